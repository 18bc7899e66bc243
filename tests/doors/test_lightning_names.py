"""``Trainer(strategy="megatron_ddp")`` and its sisters: known after ``import megastrategy``, fitting on two ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry

import megastrategy

NAMES = {
    "megatron_ddp": "popen",
    "megatron_ddp_spawn": "spawn",
    "megatron_ddp_fork": "fork",
    "megatron_ddp_notebook": "fork",
}


@pytest.mark.parametrize(("name", "start_method"), NAMES.items())
def test_a_trainer_takes_the_name(name: str, start_method: str) -> None:
    """What the name stands for, and that its processes are started as those of ddp's name are."""
    trainer, theirs = (
        pl.Trainer(strategy=text, accelerator="cpu", devices=2, logger=False, enable_checkpointing=False)
        for text in (name, name.replace("megatron_ddp", "ddp"))
    )
    assert type(trainer.strategy) is megastrategy.MegatronDDPStrategy
    assert type(trainer.strategy.launcher) is type(theirs.strategy.launcher)
    assert isinstance(theirs.strategy, DDPStrategy)
    assert trainer.strategy._start_method == theirs.strategy._start_method == start_method
    assert trainer.strategy.config == megastrategy.DistributedDataParallelConfig()
    assert "Megatron-LM" in StrategyRegistry[name]["description"]


# --- import ----------------------------------------------------------------------------------------------------------

IMPORTS = {
    "before_lightning": """
        import sys
        import megastrategy
        import megastrategy
        assert not [name for name in sys.modules if name.startswith(("lightning", "pytorch_lightning", "torchmetrics"))]
        import importlib
        importlib.reload(megastrategy)
        import lightning.pytorch as pl
    """,
    "after_lightning": """
        import sys
        import lightning.pytorch as pl
        import megastrategy
        import importlib
        importlib.reload(megastrategy)
    """,
    "between_lightnings_packages": """
        import sys
        import lightning.fabric
        import megastrategy
        from lightning.pytorch.strategies import StrategyRegistry
        import lightning.pytorch as pl
    """,
}

CHECK_NAMES = """
import inspect
assert not [finder for finder in sys.meta_path if type(finder).__module__.startswith("megastrategy")]
module = sys.modules["lightning.pytorch.strategies"]
assert "megastrategy" not in f"{type(module.__spec__.loader)} {type(module.__loader__)}"
assert "megatron" not in inspect.getsource(module)
names = sorted(name for name in module.StrategyRegistry if name.startswith("megatron"))
assert names == ["megatron_ddp", "megatron_ddp_fork", "megatron_ddp_notebook", "megatron_ddp_spawn"], names
assert "megastrategy.lightning" not in sys.modules
trainer = pl.Trainer(strategy="megatron_ddp", accelerator="cpu", devices=2, logger=False, enable_checkpointing=False)
assert type(trainer.strategy) is megastrategy.MegatronDDPStrategy
"""


@pytest.mark.parametrize("order", IMPORTS)
def test_the_names_are_there_in_every_order_of_imports(order: str) -> None:
    """``import megastrategy`` must not cost Lightning's seconds, and leaves no finder behind once it was useful."""
    run_python("-c", textwrap.dedent(IMPORTS[order]) + CHECK_NAMES)


def run_python(*arguments: str, cwd: Path | None = None, timeout_s: float = 100.0) -> str:
    """Output and errors of a Python of its own, which must succeed."""
    environment = {key: value for key, value in os.environ.items() if key not in ("LOCAL_RANK", "NODE_RANK")}
    this_checkout = str(Path(megastrategy.__file__).parents[1])
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "PYTHONPATH": this_checkout}
    process = subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert process.returncode == 0, process.stdout
    return process.stdout


# --- fits ------------------------------------------------------------------------------------------------------------

SCRIPT = """
import json
import sys

import lightning.pytorch as pl
import megastrategy
import torch
from torch.utils.data import DataLoader, TensorDataset


class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = torch.nn.Linear(512, 1024, bias=False)
        self.second = torch.nn.Linear(1024, 512, bias=False)

    def training_step(self, batch, batch_idx):
        return self.second(torch.tanh(self.first(batch[0]))).square().mean()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)

    def on_train_end(self):
        state = self.optimizers().state.values()
        tensors = [value for values in state for value in values.values() if value.dim() > 0]
        if self.trainer.global_rank == 0:
            found = {
                "ranks": self.trainer.world_size,
                "strategy": type(self.trainer.strategy).__name__,
                "state_bytes": sum(value.nbytes for value in tensors),
            }
            print("RESULT" + json.dumps(found), flush=True)


def fit(name):
    model = Model()
    data = DataLoader(TensorDataset(torch.randn(8, 512, generator=torch.Generator().manual_seed(1))), batch_size=2)
    trainer = pl.Trainer(
        strategy=name, accelerator="cpu", devices=2, max_epochs=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )
    trainer.fit(model, data)
    return model.state_dict()


if __name__ == "__main__":
    torch.set_num_threads(1)
    ours, theirs = fit(sys.argv[1]), fit(sys.argv[2])
    for name in theirs:
        assert torch.equal(ours[name], theirs[name]), name
        assert not torch.equal(ours[name], Model().state_dict()[name]), name
"""


@pytest.mark.parametrize(
    ("name", "reference"),
    [("megatron_ddp", "ddp"), ("megatron_ddp_fork", "ddp_fork"), ("megatron_ddp_spawn", "ddp_fork")],
)
def test_a_script_fits_on_two_processes(tmp_path: Path, name: str, reference: str) -> None:
    """As a user starts it: weights equal ddp's, state is halved, and rank 0 alone prints what was set up.

    Two layers of 2**19 elements, so 4 MiB of fp32 weights in two buckets; the optimizer's bytes are also counted.
    """
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    output = run_python(str(script), name, reference, cwd=tmp_path)
    ours, theirs = (
        json.loads(line.removeprefix("RESULT")) for line in output.splitlines() if line.startswith("RESULT")
    )
    assert ours == {"ranks": 2, "strategy": "MegatronDDPStrategy", "state_bytes": 2 * 2**20 * 4 // 2}
    assert theirs == {"ranks": 2, "strategy": "DDPStrategy", "state_bytes": 2 * 2**20 * 4}

    assert output.count("megatron_ddp on 2 rank(s): reduce-scatter, sharded optimizer") == 1
    assert output.count("2 bucket(s), 524,288 to 524,288 elements each, 1,048,576 in all, sent as float32") == 1
    assert rows(output) == {
        "megatron_ddp": ["4.00 MiB", "4.00 MiB", "4.00 MiB", "12.00 MiB"],
        "ddp": ["4.00 MiB", "4.00 MiB", "8.00 MiB", "16.00 MiB"],
    }


def rows(output: str) -> dict[str, Any]:
    """The printed table: name of a strategy -> parameters, gradients, optimizer, total."""
    table = {}
    for line in output.splitlines():
        words = line.split()
        if "MiB" in words:
            numbers = words[1::2]
            assert words[0] not in table, "printed twice"
            table[words[0]] = [f"{number} MiB" for number in numbers]
    return table
