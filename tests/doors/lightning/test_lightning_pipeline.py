"""``MegatronDDPStrategy(pipeline_parallel_size=2)``: a module with a Pipeline in it trains, saves and resumes as in one
process, by automatic optimization."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, EMAWeightAveraging, ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from megastrategy import MegatronDDPStrategy, Pipeline
from tests.support.pipelines import SAMPLES, SEQUENCE, VOCAB, Case, loss_of, make_layers
from tests.support.tensor_parallel import adamw

from ..fits import make_trainer
from ..model_parallel_fits import assert_close, read
from ..rank_processes import Ranks

CASE = Case((2, 4), frozen="middle", tied=True)
BATCH_SIZE = SAMPLES // 2


class LitModel(pl.LightningModule):
    def __init__(self, split: tuple[int, ...] = (2, 4)) -> None:
        super().__init__()
        self.split, self.net = split, None
        self.losses: list[float] = []

    def configure_model(self) -> None:
        if self.net is None:
            mesh, cut_over = self.device_mesh, None
            if mesh is not None and "tensor_parallel" in mesh.mesh_dim_names:
                mesh, cut_over = mesh["pipeline_parallel", "tensor_parallel"], mesh["tensor_parallel"]
            elif mesh is not None:
                mesh = mesh["pipeline_parallel"]
            self.net = Pipeline(make_layers(CASE, cut_over), self.split, loss=loss_of, microbatches=2, mesh=mesh)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        assert self.net is not None
        tokens, targets = batch
        loss: Tensor = self.net(tokens, target=targets)
        self.losses.append(loss.item())
        self.log("loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        assert self.net is not None
        tokens, targets = batch
        self.log("val_loss", self.net(tokens, target=targets), sync_dist=True)

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        assert self.net is not None
        logits: Tensor = self.net(batch[0])
        return logits.argmax(-1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return adamw(self.parameters())


def loader(batch_size: int, samples: int = 16) -> DataLoader[Any]:
    tokens = torch.randint(VOCAB, (samples, SEQUENCE), generator=torch.Generator().manual_seed(5))
    return DataLoader(TensorDataset(tokens, tokens.roll(-1, 1)), batch_size=batch_size)


def fit(
    strategy: Any, devices: int, batch_size: int, folder: str, epochs: int, resume: str | None, **options: Any
) -> dict[str, Any]:
    """Trains, and saves a checkpoint called after the number of devices and epochs."""
    module = LitModel()
    trainer = make_trainer(
        strategy,
        devices=devices,
        max_epochs=epochs,
        gradient_clip_val=0.1,
        enable_checkpointing=True,
        callbacks=[ModelCheckpoint(folder, f"{devices} devices, {{epoch}}", save_top_k=-1)],
        **options,
    )
    evaluated_on = loader(batch_size, samples=8)
    trainer.fit(module, loader(batch_size), evaluated_on, ckpt_path=resume)
    trainer.save_checkpoint(f"{folder}/{devices} devices, {epochs} epochs.ckpt")
    predicted = trainer.predict(module, evaluated_on)
    return {
        "losses": module.losses,
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "predicted": torch.cat(predicted),  # type: ignore[arg-type] # there are some
    }


def fit_on_mesh(folder: str, epochs: int, resume: str | None) -> dict[str, Any]:
    strategy = MegatronDDPStrategy(pipeline_parallel_size=2, stage_order=[1, 0])
    return fit(strategy, 4, BATCH_SIZE, folder, epochs, resume)


def test_stages_train_save_and_resume_as_one_process(one_rank: Ranks, mesh: Ranks, tmp_path: Path) -> None:
    folder = str(tmp_path)
    [alone] = one_rank.run(fit, "ddp", 1, 2 * BATCH_SIZE, folder, 1, None)
    together = mesh.run(fit_on_mesh, folder, 1, None)
    for rank, own in enumerate(together):
        assert own["losses"] == together[rank % 2]["losses"], "one batch, and one loss, for the stages"
        assert own["metrics"] == pytest.approx(alone["metrics"], rel=1e-5)
        assert torch.equal(own["predicted"], alone["predicted"][rank % 2 :: 2]), "by a Trainer that only evaluates"
    assert together[0]["losses"] != together[1]["losses"], "another batch for each data-parallel rank"
    means = [sum(pair) / 2 for pair in zip(together[0]["losses"], together[1]["losses"], strict=True)]
    assert means == pytest.approx(alone["losses"], rel=1e-5)
    # the file is what one process wrote
    expected, four = read(tmp_path / "1 devices, 1 epochs.ckpt"), read(tmp_path / "4 devices, 1 epochs.ckpt")
    assert list(four["state_dict"]) == list(expected["state_dict"])
    for part in ("state_dict", "optimizer_states"):
        assert_close(four[part], expected[part], part)
    # each goes on from the other's
    one_rank.run(fit, "ddp", 1, 2 * BATCH_SIZE, folder, 2, f"{folder}/4 devices, 1 epochs.ckpt")
    mesh.run(fit_on_mesh, folder, 2, f"{folder}/1 devices, 1 epochs.ckpt")
    expected, four = read(tmp_path / "1 devices, 2 epochs.ckpt"), read(tmp_path / "4 devices, 2 epochs.ckpt")
    assert_close(four["state_dict"], expected["state_dict"], "resumed")


def fit_refused(strategy: Any, **options: Any) -> None:
    trainer = make_trainer(strategy, devices=2, max_epochs=1, **options)
    trainer.fit(LitModel(), loader(BATCH_SIZE))


def refused(**options: Any) -> str:
    sizes = {name: options.pop(name) for name in list(options) if name in ("accumulate_grad_batches", "precision")}
    if options.pop("averages", False):
        sizes["callbacks"] = [EMAWeightAveraging()]
    with pytest.raises(ValueError, match=r".") as caught:
        fit_refused(MegatronDDPStrategy(pipeline_parallel_size=2, **options), **sizes)
    return str(caught.value)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"accumulate_grad_batches": 3}, "Let a batch be 3 times as large, and have 3 times as many microbatches"),
        ({"averages": True}, "would lack other ranks"),
        ({"stage_order": [0, 2]}, "expected each number from 0 to 1 once"),
        (
            {"tensor_parallel_size": 2},
            "tensor_parallel_size=2 times pipeline_parallel_size=2 does not divide the 2 ranks",
        ),
    ],
)
def test_what_a_pipeline_has_no_room_for_is_refused(options: dict[str, Any], said: str) -> None:
    ranks = Ranks(2)
    try:
        assert all(said in text for text in ranks.run(refused, **options))
    finally:
        ranks.close()


# --- logged sums -----------------------------------------------------------------------------------------------------


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


class CountingStages(Counting, LitModel):
    pass


def fit_counting(strategy: Any, devices: int, batch_size: int) -> dict[str, Any]:
    stopper = EarlyStopping("val_samples", patience=1)
    trainer = make_trainer(strategy, devices=devices, max_epochs=3, callbacks=[stopper])
    trainer.fit(CountingStages(), loader(batch_size), loader(batch_size, samples=8))
    metrics = {name: float(trainer.callback_metrics[name]) for name in ("samples", "val_samples", "largest")}
    [validated] = trainer.validate(CountingStages(), loader(batch_size, samples=8), verbose=False)
    return {"metrics": metrics, "validated": validated, "epochs": trainer.current_epoch}


def count_on_mesh() -> dict[str, Any]:
    return fit_counting(MegatronDDPStrategy(pipeline_parallel_size=2, tensor_parallel_size=2), 4, 4)


def test_logged_sum_counts_each_sample_once(one_rank: Ranks, mesh: Ranks) -> None:
    """``self.log(..., sync_dist=True, reduce_fx="sum")`` where ranks share a model."""
    [alone] = one_rank.run(fit_counting, "ddp", 1, 4)
    assert (alone["metrics"]["samples"], alone["metrics"]["val_samples"], alone["epochs"]) == (16, 8, 2)
    assert mesh.run(count_on_mesh) == [alone] * 4
