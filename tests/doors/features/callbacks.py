"""Lightning's callbacks, loggers and metrics: what they do to a fit, and what they see and write while it runs."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping
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
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau

from ..fits import BATCHES_PER_EPOCH, AwkwardModule, Fit, adamw
from ..matrix import Beyond, Feature
from .watched_fits import Make, Watched, logged, measured, watched

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
