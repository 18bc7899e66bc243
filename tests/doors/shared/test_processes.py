"""Every way to start two processes: script, spawn, fork, notebook, torchrun, SLURM; and the timeout of their groups."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch import nn

from megastrategy import MegatronDDPStrategy
from tests.support.ports import free_port

from ..accelerate_loops import Worlds, make_accelerator
from ..fabric_loops import make_fabric
from ..fits import AwkwardModule, loader, make_trainer
from ..rank_processes import Ranks, run_python, run_pythons

SCRIPT = """
import json
import sys

import lightning.pytorch as pl
IMPORT
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
                "environment": type(self.trainer.strategy.cluster_environment).__name__,
                "launcher": type(self.trainer.strategy.launcher).__name__,
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
    *names, reference = sys.argv[1:]
    fits = [fit(name) for name in names]
    theirs = fit(reference)
    for ours in fits:
        for name in theirs:
            assert torch.equal(ours[name], theirs[name]), name
            assert not torch.equal(ours[name], Model().state_dict()[name]), name
"""
STATE_BYTES = 2 * 2**20 * 4
"""Adam's two moments of two layers with 2**19 elements each, in fp32, unsharded."""


def write_script(folder: Path, *, imported: bool) -> Path:
    script = folder / "train.py"
    script.write_text(SCRIPT.replace("IMPORT", "import megastrategy" if imported else ""))
    return script


def assert_results(output: str, *, environment: str, launcher: str, ours: int = 1) -> None:
    """Two ranks in every fit; the optimizer state of ours is half of that of ddp, whose fit is the last."""
    results = [json.loads(line.removeprefix("RESULT")) for line in output.splitlines() if line.startswith("RESULT")]
    common = {"ranks": 2, "environment": environment, "launcher": launcher}
    sharded = {**common, "strategy": "MegatronDDPStrategy", "state_bytes": STATE_BYTES // 2}
    assert results == [sharded] * ours + [{**common, "strategy": "DDPStrategy", "state_bytes": STATE_BYTES}]
    assert output.count("megatron_ddp on 2 rank(s): reduce-scatter, sharded optimizer") == ours, "on rank 0 alone"


def test_script_fits_on_two_processes(tmp_path: Path) -> None:
    """As a user starts it: weights equal ddp's, state is halved, and rank 0 alone prints what was set up."""
    output = run_python(str(write_script(tmp_path, imported=True)), "megatron_ddp", "ddp", cwd=tmp_path)
    assert_results(output, environment="LightningEnvironment", launcher="_SubprocessScriptLauncher")
    assert output.count("2 bucket(s), 524,288 to 524,288 elements each, 1,048,576 in all, sent as float32") == 1
    rows = [line.split() for line in output.splitlines() if line.split()[2:3] == ["MiB"]]
    assert [[row[0], *row[1::2]] for row in rows] == [  # parameters, gradients, optimizer, total
        ["megatron_ddp", "4.00", "4.00", "4.00", "12.00"],
        ["ddp", "4.00", "4.00", "8.00", "16.00"],
    ]
    assert "the end of the first backward needs 16.00 MiB for parameters and gradients" in output, "both twice"


@pytest.mark.nightly
def test_fork_notebook_and_spawn_in_one_process(tmp_path: Path) -> None:
    """The launchers that start the processes anew for each fit and bring the weights back to the main process."""
    script = write_script(tmp_path, imported=True)
    names = ["megatron_ddp_fork", "megatron_ddp_notebook", "megatron_ddp_spawn", "ddp_fork"]
    output = run_python(str(script), *names, cwd=tmp_path)
    assert_results(output, environment="LightningEnvironment", launcher="_MultiProcessingLauncher", ours=3)


@pytest.mark.nightly
def test_torchrun(tmp_path: Path) -> None:
    """The script does not import megastrategy: every process that torchrun starts has the names by torch."""
    script = write_script(tmp_path, imported=False)
    launch = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port())]
    output = run_python(*launch, str(script), "megatron_ddp", "ddp", cwd=tmp_path, autoload=True)
    assert_results(output, environment="TorchElasticEnvironment", launcher="_SubprocessScriptLauncher")


@pytest.mark.nightly
def test_slurm(tmp_path: Path) -> None:
    """As ``srun --ntasks-per-node=2`` starts it; Lightning reads all it needs from SLURM's variables."""
    script = write_script(tmp_path, imported=True)
    job = {
        "SLURM_JOB_ID": "4711",
        "SLURM_JOB_NAME": "train",
        "SLURM_NTASKS": "2",
        "SLURM_NTASKS_PER_NODE": "2",
        "SLURM_NNODES": "1",
        "SLURM_NODELIST": "localhost",
        "SLURM_NODEID": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    tasks = [{**job, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)} for rank in range(2)]
    first, second = run_pythons([str(script), "megatron_ddp", "ddp"], tasks, cwd=tmp_path)
    assert_results(first, environment="SLURMEnvironment", launcher="_SubprocessScriptLauncher")
    assert "RESULT" not in second
    assert "megatron_ddp on" not in second


# --- timeout= --------------------------------------------------------------------------------------------------------


TIMEOUT = timedelta(seconds=51)
"""A timeout that no group has by default."""


@pytest.fixture
def fresh() -> Iterator[Ranks]:
    """Processes whose default group is not there yet, since that one keeps the timeout of its first user."""
    pool = Ranks()
    yield pool
    pool.close()


def timeouts_s() -> list[float]:
    """The timeout of every group that this process is in, in seconds."""
    groups = torch.distributed.distributed_c10d._world.pg_map
    return [group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in groups]


def with_trainer(folder: Path) -> list[float]:
    strategy = MegatronDDPStrategy(timeout=TIMEOUT, state_dict_type="sharded")
    options = {"max_steps": 1, "enable_checkpointing": True, "default_root_dir": folder}
    make_trainer(strategy, **options).fit(AwkwardModule(), loader())
    return timeouts_s()


def test_groups_of_a_fit_have_the_timeout(fresh: Ranks, tmp_path: Path) -> None:
    for found in fresh.run(with_trainer, tmp_path):
        assert found == [TIMEOUT.total_seconds()] * 4, "all, the engine's, to meet, to save"


def with_fabric(folder: Path) -> list[float]:
    fabric = make_fabric("megatron_ddp", {"timeout": TIMEOUT, "state_dict_type": "sharded"})
    net = nn.Linear(5, 3)
    model, optimizer = fabric.setup(net, torch.optim.Adam(net.parameters()))
    fabric.save(folder / "saved", {"model": model, "optimizer": optimizer})
    return timeouts_s()


def test_groups_under_fabric_have_the_timeout(fresh: Ranks, tmp_path: Path) -> None:
    for found in fresh.run(with_fabric, tmp_path):
        assert found == [TIMEOUT.total_seconds()] * 3, "all, the engine's, to save"


def with_accelerate(folder: Path) -> list[float]:
    from accelerate import InitProcessGroupKwargs

    handlers = [InitProcessGroupKwargs(timeout=TIMEOUT)]
    accelerator = make_accelerator("megatron_ddp", {"state_dict_type": "sharded"}, kwargs_handlers=handlers)
    net = nn.Linear(5, 3)
    accelerator.prepare(net, torch.optim.Adam(net.parameters()))
    accelerator.save_state(str(folder / "saved"))
    return timeouts_s()


def test_groups_under_accelerate_have_the_timeout(tmp_path: Path) -> None:
    worlds = Worlds()
    try:
        for found in worlds.run(with_accelerate, tmp_path):
            assert found == [TIMEOUT.total_seconds()] * 3, "all, the engine's, to save"
    finally:
        worlds.close()
