"""``self.log(..., sync_dist=True, reduce_fx="sum")`` where ranks share a model: each sample counts once."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import EarlyStopping
from torch import Tensor

from megastrategy import MegatronDDPStrategy
from tests.doors.lightning import test_lightning_pipeline as stages
from tests.doors.lightning import test_lightning_tensor_parallel as parts

from ..fits import make_trainer
from ..rank_processes import Ranks


class Counting(pl.LightningModule):
    """Comes in front of a module, and logs how many samples its steps have had."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = super().training_step(batch, batch_idx)
        self.count("samples", batch)
        self.log("largest", float(batch[0].max()), sync_dist=True, reduce_fx="max", on_step=False, on_epoch=True)
        # Decisions are those of all ranks, also of one that is not the first of its model.
        strategy, is_last = self.trainer.strategy, self.global_rank == self.trainer.world_size - 1
        assert strategy.reduce_boolean_decision(is_last, all=False)
        assert strategy.reduce_boolean_decision(True)
        assert self.trainer.world_size == 1 or not strategy.reduce_boolean_decision(is_last)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.count("val_samples", batch)

    def count(self, name: str, batch: list[Tensor]) -> None:
        self.log(name, float(len(batch[0])), sync_dist=True, reduce_fx="sum", on_step=False, on_epoch=True)


class CountingParts(Counting, parts.LitModel):
    pass


class CountingStages(Counting, stages.LitModel):
    pass


def fit(kind: Any, options: dict[str, Any], devices: int, batch_size: int) -> dict[str, Any]:
    module = kind()
    loader = parts.loader if kind is CountingParts else stages.loader
    strategy = MegatronDDPStrategy(**options) if devices > 1 else "ddp"
    trainer = make_trainer(
        strategy, devices=devices, max_epochs=3, callbacks=[EarlyStopping("val_samples", patience=1)]
    )
    trainer.fit(module, loader(batch_size), loader(batch_size, samples=8))
    metrics = {name: float(trainer.callback_metrics[name]) for name in ("samples", "val_samples", "largest")}
    [validated] = trainer.validate(kind(), loader(batch_size, samples=8), verbose=False)
    return {"metrics": metrics, "validated": validated, "epochs": trainer.current_epoch}


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        pytest.param(CountingParts, {"tensor_parallel_size": 2}, marks=pytest.mark.long),
        pytest.param(CountingStages, {"pipeline_parallel_size": 2}, marks=pytest.mark.long),
        (CountingStages, {"pipeline_parallel_size": 2, "tensor_parallel_size": 2}),
    ],
)
def test_a_logged_sum_counts_each_sample_once(one_rank: Ranks, mesh: Ranks, kind: Any, options: dict[str, Any]) -> None:
    dp_size = 4 // (options.get("pipeline_parallel_size", 1) * options.get("tensor_parallel_size", 1))
    [alone] = one_rank.run(fit, kind, options, 1, 4)
    assert (alone["metrics"]["samples"], alone["metrics"]["val_samples"], alone["epochs"]) == (16, 8, 2)
    for own in mesh.run(fit, kind, options, 4, 4 // dp_size):
        assert own == alone
