"""The optimizer state that ``megastrategy plan`` counts: of a script that closes its model, and of factors."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from megastrategy.tools.plan.memory import rank_memory
from megastrategy.tools.plan.one_step import MeasuredStep
from tests.support.scripts import run_script

CLOSED = """
import torch, torch.distributed as dist, megastrategy as m
dist.init_process_group("gloo")
m.DistributedDataParallel(torch.nn.Linear(4, 4), m.DistributedDataParallelConfig()).close()
net = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.Linear(128, 1))
model = m.DistributedDataParallel(net, m.DistributedDataParallelConfig())
optimizer = m.DistributedOptimizer(torch.optim.Adam(model.parameters()), model)
for _ in range(STEPS):
    model(torch.ones(2, 64)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
model.close()
"""

FIT = """
import torch, lightning.pytorch as pl
class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.Linear(128, 1))
    def training_step(self, batch):
        return self.net(batch).sum()
    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())
quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
trainer = pl.Trainer(accelerator="cpu", devices=RANKS, strategy="megatron_ddp", max_steps=STEPS, **quiet)
trainer.fit(Module(), torch.utils.data.DataLoader(torch.ones(64, 64), batch_size=2))
"""


def plan_of(text: str, size: int, tmp_path: Path) -> MeasuredStep:
    path, file = tmp_path / "script.py", tmp_path / "step"
    path.write_text(text)
    program = ("megastrategy.tools.plan.one_step", str(size), str(file), "shapes")
    done = run_script(path, cwd=tmp_path, ranks=1, before=program)
    assert file.exists(), done.stderr
    step = pickle.loads(file.read_bytes())
    assert isinstance(step, MeasuredStep), step
    return step


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("script", [CLOSED, FIT], ids=["loop", "fit"])
def test_a_script_that_closes_its_model_after_one_step_is_planned_as_one_that_goes_on(
    script: str, size: int, tmp_path: Path
) -> None:
    """A model that was closed before it trained is no part of the plan."""
    closed, going_on = (
        rank_memory(plan_of(f"STEPS, RANKS = {steps}, {size}\n{script}", size, tmp_path)) for steps in (1, 2)
    )
    assert closed == going_on
    assert closed.state_bytes >= 2 * 4 * (64 * 128 + 128 + 128 + 1) // size


@pytest.mark.parametrize("size", [2, 3])
def test_factors_of_whole_parameters_are_not_counted_as_numbers_for_each_element(size: int, tmp_path: Path) -> None:
    """Adafactor keeps rows and columns of a matrix, and a number for each element of a vector."""
    text = CLOSED.replace("torch.optim.Adam(", "torch.optim.Adafactor(")
    [model] = plan_of(f"STEPS = 1\n{text}", size, tmp_path).models
    dims = [len(spec.shape) for spec in model.layout.params]
    assert set(dims) == {1, 2}
    assert model.num_kept == {index: int(dim == 1) for index, dim in enumerate(dims)}
    matrices = sum(spec.numel for spec in model.layout.params if len(spec.shape) == 2)
    assert 0 <= model.other_state_bytes < 4 * matrices // 10
