"""Lightning's callbacks, loggers and metrics: their effect on a fit, and the values that they see and write."""

from __future__ import annotations

import dataclasses
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import (
    Callback,
    EarlyStopping,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LearningRateFinder,
    LearningRateMonitor,
    ModelCheckpoint,
    ModelPruning,
    OnExceptionCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassConfusionMatrix

from ..fits import BATCHES_PER_EPOCH, NUM_TOKENS, NUM_VALIDATED, AwkwardModule, Fit, adamw, fit
from ..matrix import Beyond, Feature
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


# --- learning rates and accumulation ---------------------------------------------------------------------------------


def warmup(optimizer: Optimizer) -> LambdaLR:
    return LambdaLR(optimizer, lambda step: (step + 1) / 5)


def two_groups(params: Any) -> Optimizer:
    first, *rest = params
    return torch.optim.AdamW([{"params": [first], "lr": 3e-3}, {"params": rest}], lr=1e-2)


def scheduled(name: str, strategy_options: dict[str, Any], **module_options: Any) -> Watched:
    """Schedulers hold the user's optimizer and the monitor asks the Trainer's: both must see what the step uses."""
    seen = watched(
        name,
        strategy_options,
        callbacks=[partial(LearningRateMonitor, logging_interval="step")],
        module=partial(AwkwardModule, **module_options),
        accumulate_grad_batches=3,
    )
    assert not [text for text in seen.fit.warnings if "lr_scheduler" in text]
    assert len({tuple(rates) for _, rates, _ in seen.batches}) > 1, "the scheduler never changed anything"
    if name != "ddp" and seen.fit.logged:
        assert any(key.startswith("lr-AdamW") for _, values in seen.fit.logged for key in values)
    return seen


class Plateau(AwkwardModule):
    """ReduceLROnPlateau insists on a torch optimizer and is stepped with a metric by Lightning."""

    def configure_optimizers(self) -> Any:
        optimizer = adamw(self.parameters())
        scheduler = ReduceLROnPlateau(optimizer, mode="max", patience=0, factor=0.1)  # max: a falling loss is a plateau
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}


def accumulating(name: str, strategy_options: dict[str, Any]) -> Watched:
    callback = GradientAccumulationScheduler({0: 1, 1: 2, 2: 4})
    seen = watched(name, strategy_options, callbacks=[callback], max_epochs=4)
    assert seen.batches[-1][0] == 7 + 4 + 2 + 2, "windows of 1, 2, 4 and 4 over 7 batches"
    return seen


class WithRate(AwkwardModule):
    """Has the attribute that the learning rate finder sets."""

    def __init__(self) -> None:
        super().__init__()
        self.learning_rate = 1e-3

    def configure_optimizers(self) -> Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.learning_rate)


def finding_a_rate(name: str, strategy_options: dict[str, Any]) -> Watched:
    """Trains with rising rates, and loads a checkpoint of the beginning into the model and the optimizer in mid-fit."""
    finder = LearningRateFinder(min_lr=1e-4, max_lr=1.0, num_training_steps=25, early_stop_threshold=None)
    with tempfile.TemporaryDirectory() as folder:
        seen = watched(
            name,
            strategy_options,
            callbacks=[finder],
            module=WithRate,
            enable_checkpointing=True,
            default_root_dir=folder,
        )
    assert finder.optimal_lr is not None
    suggestion = finder.optimal_lr.suggestion()
    assert seen.batches[0][:2] == (1, [suggestion]), "training starts anew, with the rate found"
    seen.notes = {"suggestion": suggestion, **finder.optimal_lr.results}
    return seen


def averaging_monitored(name: str, strategy_options: dict[str, Any], **module_options: Any) -> Watched:
    """SWA makes a scheduler in mid-fit, on the Trainer's optimizer; the monitor names what it finds by its class."""
    averages = StochasticWeightAveraging(swa_lrs=5e-3, swa_epoch_start=2, annealing_epochs=1)
    monitor = LearningRateMonitor()
    seen = watched(
        name,
        strategy_options,
        callbacks=[averages, monitor],
        module=partial(AwkwardModule, **module_options),
        max_epochs=4,
    )
    assert not [text for text in seen.fit.warnings if "lr_scheduler" in text]
    seen.notes = dict(monitor.lrs)
    assert {key.partition("/")[0] for key in monitor.lrs} == {"lr-AdamW"}
    assert {5e-3} < {rate for rates in monitor.lrs.values() for rate in rates}, "SWA's rate, and others before it"
    return seen


# --- weights that callbacks read and replace -------------------------------------------------------------------------


def averaging(name: str, strategy_options: dict[str, Any], *, callback: Make) -> Watched:
    seen = watched(name, strategy_options, callbacks=[callback], max_epochs=4)
    final = torch.cat([seen.fit.weights[key].flatten() for key, _ in AwkwardModule().named_parameters()])
    last = seen.batches[4 * BATCHES_PER_EPOCH - 1]  # StochasticWeightAveraging adds an epoch, for BatchNorm
    assert not torch.equal(final, last[2]), "the average is not what the last step left"
    return seen


class SameOnEveryRank(AwkwardModule):
    """ModelPruning keeps copies of the weights from before rank 0's are broadcast, and goes back to them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        for module in self.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()


def second_epoch(epoch: int) -> bool:
    return epoch == 1


def pruning(name: str, strategy_options: dict[str, Any], *, callback: Callable[..., ModelPruning]) -> Watched:
    """Weights move to ``weight_orig`` in mid-training, masks become buffers, and at the end everything moves back."""
    seen = watched(name, strategy_options, callbacks=[callback], module=SameOnEveryRank, max_epochs=3)
    weights = seen.fit.weights
    keys = ("inputs.weight", "out.weight", "side.weight")
    pruned = [weights[key] if key in weights else weights[f"{key}_mask"] for key in keys]
    seen.notes = {"zeros": [int((weight == 0).sum()) for weight in pruned]}
    assert sum(seen.notes["zeros"]) > 50
    return seen


# --- checkpoints and the end of a fit --------------------------------------------------------------------------------


def checkpointing(
    name: str, strategy_options: dict[str, Any], *, fails_at: int | None = None, **saver_options: Any
) -> Watched:
    """The contents of the folder after the fit, and the callback's record of it."""
    with tempfile.TemporaryDirectory() as folder:
        saver = ModelCheckpoint(dirpath=folder, **saver_options)
        callbacks: list[Make | Callback] = [saver]
        if fails_at is not None:
            callbacks += [OnExceptionCheckpoint(folder, filename="at-the-error"), FailsAt(fails_at)]
        failure = ""
        try:
            seen = watched(name, strategy_options, callbacks=callbacks, enable_checkpointing=True, max_epochs=3)
        except ZeroDivisionError as error:
            seen, failure = Watched(Fit({}, [], [], {}, []), []), str(error)
        assert bool(failure) == (fails_at is not None)
        seen.notes = {
            "failure": failure,
            "files": {path.name: read_checkpoint(path, folder) for path in sorted(Path(folder).iterdir())},
            "best": Path(saver.best_model_path).name,
            "best score": saver.best_model_score,
            "kept": {Path(path).name: score for path, score in saver.best_k_models.items()},
            "last": Path(saver.last_model_path).name,
        }
        if os.environ["LOCAL_RANK"] == "0":
            assert seen.notes["files"]
    return seen


class FailsAt(Callback):
    """Raises on both ranks after this many batches."""

    def __init__(self, batch: int) -> None:
        self.batch = batch

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.fit_loop.total_batch_idx == self.batch:
            raise ZeroDivisionError("on purpose")


def read_checkpoint(path: Path, folder: str) -> Any:
    checkpoint = without_folder(torch.load(path, weights_only=True), folder)
    for optimizer in checkpoint.get("optimizer_states", []):
        # under "ddp" in the order of first use; the sharded one gathers in the order of the parameters
        optimizer["state"] = dict(sorted(optimizer["state"].items()))
    return checkpoint


def without_folder(value: Any, folder: str) -> Any:
    """The same with the folder's name cut out of every text: each fit has a folder of its own."""
    if isinstance(value, str):
        return value.replace(folder, "folder")
    if isinstance(value, Mapping):
        return type(value)({without_folder(key, folder): without_folder(item, folder) for key, item in value.items()})
    if isinstance(value, list | tuple):
        return type(value)(without_folder(item, folder) for item in value)
    return value


def stopping_early(name: str, strategy_options: dict[str, Any], **options: Any) -> Watched:
    stopper = EarlyStopping("val_loss", **options)
    seen = watched(name, strategy_options, callbacks=[stopper], max_epochs=6)
    assert len(seen.batches) < 6 * BATCHES_PER_EPOCH, "nothing was stopped"
    seen.notes = {"epoch": stopper.stopped_epoch, "best": stopper.best_score, "reason": stopper.stopping_reason_message}
    return seen


def _with(**options: Any) -> Mapping[str, Any]:
    return options


AREA = "Callbacks"

FEATURES = [
    Feature(
        AREA,
        "ModelCheckpoint, the best two by a metric",
        checkpointing,
        _with(monitor="val_loss", save_top_k=2),
        often=True,
    ),
    Feature(
        AREA,
        "ModelCheckpoint, every_n_train_steps, all kept",
        checkpointing,
        _with(every_n_train_steps=4, save_top_k=-1),
    ),
    Feature(AREA, "OnExceptionCheckpoint", checkpointing, _with(fails_at=9)),
    Feature(AREA, "EarlyStopping, a metric that gets no better", stopping_early, _with(mode="max", patience=1)),
    Feature(AREA, "EMAWeightAveraging", averaging, _with(callback=partial(EMAWeightAveraging, decay=0.9))),
    Feature(AREA, "GradientAccumulationScheduler", accumulating),
    Feature(
        AREA,
        "LearningRateMonitor, warm-up by step",
        scheduled,
        _with(scheduler=warmup, interval="step", optimizer=two_groups),
    ),
    Feature(AREA, "LearningRateMonitor, StochasticWeightAveraging", averaging_monitored, often=True),
    Feature(AREA, "ReduceLROnPlateau", watched, _with(module=Plateau, max_epochs=3)),
    Feature(AREA, "LearningRateFinder", finding_a_rate),
    Feature(
        AREA,
        "ModelPruning, by layer",
        pruning,
        _with(callback=partial(ModelPruning, "l1_unstructured", amount=0.3, use_lottery_ticket_hypothesis=False)),
    ),
    Feature(
        AREA,
        "ModelPruning, global, weights reset once, masks kept",
        pruning,
        _with(
            callback=partial(
                ModelPruning,
                "l1_unstructured",
                amount=0.3,
                use_global_unstructured=True,
                use_lottery_ticket_hypothesis=second_epoch,
                make_pruning_permanent=False,
            )
        ),
    ),
    Feature(AREA, "TensorBoardLogger", logged, often=True),
    Feature(AREA, "torchmetrics and every kind of self.log", measured),
]

_TESTS = "lightning/test_changes_in_a_fit.py"

BEYOND = [
    Beyond(
        "BackboneFinetuning and every other unfreezing in mid-training: the ranks stay equal (Lightning #20340)",
        f"{_TESTS}::test_unfrozen_backbone_is_synchronised",
    ),
    Beyond(
        "a `manual_backward` that ran out of memory, tried again in the same training_step",
        f"{_TESTS}::test_failed_backward_may_be_tried_again",
    ),
]
