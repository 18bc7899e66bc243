"""Progress bars, loggers and metrics, and the numbers that they show of a fit."""

from __future__ import annotations

import contextlib
import io
import os
import tempfile
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from torch import Tensor
from torch.nn import functional as F
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassConfusionMatrix

from ..fits import BATCHES_PER_EPOCH, NUM_TOKENS, NUM_VALIDATED, AwkwardModule
from ..rank_processes import SIZE, number_of_ranks
from .watched_fits import Make, Watched, watched


def monitored(name: str, strategy_options: dict[str, Any], *, callback: Make, says: str) -> Watched:
    """Their values are the machine's and the clock's: names, steps and counts are compared."""
    seen = watched(name, strategy_options, callbacks=[callback], max_epochs=1)
    told = [(step, values) for step, values in seen.fit.logged if any(says in key for key in values)]
    assert told or os.environ["LOCAL_RANK"] != "0"
    seen.notes = {"told": [(step, sorted(values)) for step, values in told]}
    counts = ("batches", "samples")
    seen.notes["counts"] = [[v for k, v in values.items() if k.endswith(counts)] for _, values in told]
    seen.fit.logged = [entry for entry in seen.fit.logged if entry not in told]
    return seen


def samples_of(batch: Any) -> int:
    return len(batch[0])


class Shows(AwkwardModule):
    """Shows its loss in the progress bar."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("shown", loss, prog_bar=True)
        return loss


def shown(name: str, strategy_options: dict[str, Any], *, bar: type[Any]) -> Watched:
    made = bar()
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(out):
        seen = watched(name, strategy_options, callbacks=[made], module=Shows, enable_progress_bar=True)
    if os.environ["LOCAL_RANK"] == "0":
        assert made.metrics
        assert "Epoch" in out.getvalue()
    seen.notes = {"metrics": made.metrics}
    return seen


class _KeepsMetrics:
    """Keeps what a progress bar is given to show."""

    def __init__(self) -> None:
        super().__init__()
        self.metrics: list[dict[str, Any]] = []

    def get_metrics(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> dict[str, Any]:
        metrics = super().get_metrics(trainer, pl_module)  # type: ignore[misc]
        self.metrics.append({key: value for key, value in metrics.items() if key != "v_num"})
        return metrics


class TQDM(_KeepsMetrics, TQDMProgressBar):
    pass


class Rich(_KeepsMetrics, RichProgressBar):
    pass


class Hyperparameters(AwkwardModule):
    def __init__(self, width: int = 13, name: str = "narrow") -> None:
        super().__init__()
        self.save_hyperparameters()


def logged(name: str, strategy_options: dict[str, Any], *, kind: str) -> Watched:
    with tempfile.TemporaryDirectory() as folder:
        logger = {"csv": CSVLogger, "tensorboard": TensorBoardLogger}[kind](folder, name="run", version=0)
        seen = watched(name, strategy_options, module=Hyperparameters, logger=logger)
        logger.finalize("success")
        seen.notes = {"dir": Path(logger.log_dir).relative_to(folder).as_posix()}
        if os.environ["LOCAL_RANK"] == "0":
            read = {"csv": read_csv, "tensorboard": read_tensorboard}[kind]
            seen.notes.update(read(Path(logger.log_dir)))
            seen.notes["hparams"] = (Path(logger.log_dir) / "hparams.yaml").read_text()
            assert "narrow" in seen.notes["hparams"]
        else:
            assert list(Path(folder).rglob("*.*")) == [], "rank 0 writes"
    return seen


def read_csv(folder: Path) -> dict[str, Any]:
    text = (folder / "metrics.csv").read_text()
    assert "train_loss" in text
    return {"metrics": text}


def read_tensorboard(folder: Path) -> dict[str, Any]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder)).Reload()
    scalars = {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    assert len(scalars["train_loss_step"]) == 2 * BATCHES_PER_EPOCH
    return {"scalars": scalars}


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
