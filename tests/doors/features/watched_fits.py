"""Fits that are watched: weights and metrics of every batch, what callbacks kept, and what loggers and metrics show."""

from __future__ import annotations

import dataclasses
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor
from torch.nn import functional as F
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassConfusionMatrix

from ..fits import BATCHES_PER_EPOCH, NUM_TOKENS, NUM_VALIDATED, AwkwardModule, Fit, fit
from ..rank_processes import SIZE, number_of_ranks

Make = Callable[[], Callback]


@dataclasses.dataclass
class Watched:
    """A fit and what was seen while it ran.

    Attributes:
        fit: what it left behind.
        batches: after every batch: optimizer steps so far, all learning rates, all weights in one tensor.
        notes: what is particular to a feature.
    """

    fit: Fit
    batches: list[tuple[int, list[float], Tensor]]
    notes: dict[str, Any] = dataclasses.field(default_factory=dict)


class Watch(Callback):
    """Records what :class:`Watched` holds of every batch; after the callbacks that are given before it."""

    def __init__(self) -> None:
        self.batches: list[tuple[int, list[float], Tensor]] = []

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        rates = [group["lr"] for optimizer in trainer.optimizers for group in optimizer.param_groups]
        self.batches.append((trainer.global_step, rates, flat_weights(pl_module)))


def flat_weights(module: torch.nn.Module) -> Tensor:
    return torch.cat([param.detach().flatten() for param in module.parameters()])


def watched(
    name: str,
    strategy_options: dict[str, Any],
    *,
    callbacks: Sequence[Make | Callback] = (),
    module: Callable[[], pl.LightningModule] = AwkwardModule,
    **trainer_options: Any,
) -> Watched:
    """Fits with these callbacks, and watches."""
    made = [callback if isinstance(callback, Callback) else callback() for callback in callbacks]
    watch = Watch()
    result = fit(name, strategy_options=strategy_options, module=module(), callbacks=[*made, watch], **trainer_options)
    return Watched(result, watch.batches)


class Hyperparameters(AwkwardModule):
    def __init__(self, width: int = 13, name: str = "narrow") -> None:
        super().__init__()
        self.save_hyperparameters()


def logged(name: str, strategy_options: dict[str, Any]) -> Watched:
    with tempfile.TemporaryDirectory() as folder:
        logger = TensorBoardLogger(folder, name="run", version=0)
        seen = watched(name, strategy_options, module=Hyperparameters, logger=logger)
        logger.finalize("success")
        seen.notes = {"dir": Path(logger.log_dir).relative_to(folder).as_posix()}
        if os.environ["LOCAL_RANK"] == "0":
            seen.notes["scalars"] = read_scalars(Path(logger.log_dir))
            seen.notes["hparams"] = (Path(logger.log_dir) / "hparams.yaml").read_text()
            assert "narrow" in seen.notes["hparams"]
        else:
            assert list(Path(folder).rglob("*.*")) == [], "rank 0 writes"
    return seen


def read_scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder)).Reload()
    scalars = {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    assert len(scalars["train_loss_step"]) == 2 * BATCHES_PER_EPOCH
    return scalars


class Measured(AwkwardModule):
    """Logs metric objects, a collection, values reduced over the ranks in all ways, and one computed by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy = MulticlassAccuracy(NUM_TOKENS, average="micro")
        self.val_metrics = MetricCollection(
            {"micro": MulticlassAccuracy(NUM_TOKENS, average="micro"), "macro": MulticlassAccuracy(NUM_TOKENS)},
            prefix="val_",
        )
        self.confusion = MulticlassConfusionMatrix(NUM_TOKENS)
        self.mean = MeanMetric()
        self.matrices: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        features, tokens, targets = batch
        logits = self(features, tokens, use_side=batch_idx % 2 == 1)
        loss = F.cross_entropy(logits, targets)
        self.losses.append(loss.item())
        self.accuracy(logits, targets)
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        self.mean.update(loss.detach())
        for reduction in ("mean", "sum", "max", "min"):
            self.log(f"loss_{reduction}", loss, on_epoch=True, sync_dist=True, reduce_fx=reduction)
        self.log("on_rank_zero", float(self.global_rank), rank_zero_only=True)
        return loss

    def on_train_epoch_end(self) -> None:
        self.log("mean_by_hand", self.mean.compute())
        self.mean.reset()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        features, tokens, targets = batch
        logits = self(features, tokens)
        self.val_metrics.update(logits, targets)
        self.confusion.update(logits, targets)
        self.log_dict(self.val_metrics)

    def on_validation_epoch_end(self) -> None:
        self.matrices.append(self.confusion.compute().clone())
        self.confusion.reset()


def measured(name: str, strategy_options: dict[str, Any]) -> Watched:
    module = Measured()
    seen = watched(name, strategy_options, module=lambda: module)
    assert {"accuracy_epoch", "val_micro", "val_macro", "loss_max_epoch", "mean_by_hand"} <= set(seen.fit.metrics)
    seen.notes = {"confusion": module.matrices}
    assert sum(module.matrices[-1].flatten().tolist()) == NUM_VALIDATED // SIZE * number_of_ranks(), (
        "all ranks' samples"
    )
    return seen
