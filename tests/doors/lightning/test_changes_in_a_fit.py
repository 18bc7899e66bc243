"""Changes in mid-fit for which equality with ``"ddp"`` is not all: it lets the ranks part, or fails in silence."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import BackboneFinetuning, Callback, ModelCheckpoint
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from tests.doors.features.callbacks import Watched, watched
from tests.doors.features.modules import Classifier, Lazy, Plain, fitted, wrap_again
from tests.support.comparison import assert_equal

from ..fits import (
    NUM_TOKENS,
    Fit,
    assert_same_tensors,
    fit,
    loader,
    make_strategy,
    make_trainer,
    weights_of,
)
from ..matrix import MODES
from ..rank_processes import Ranks, assert_failed

# --- weights replaced ------------------------------------------------------------------------------------------------


class Replaces(Callback):
    """Loads the weights it finds as new Parameters after the first epoch, or puts a copy in place of a layer."""

    def __init__(self, way: str) -> None:
        self.way = way

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        if trainer.current_epoch > 0:
            return
        if self.way == "layer":
            pl_module.net.block[0] = copy.deepcopy(pl_module.net.block[0])
        else:
            state = {name: value.clone() for name, value in pl_module.state_dict().items()}
            pl_module.load_state_dict(state, assign=True)
        self.weight = pl_module.net.block[0].weight.detach().clone()


def replacing(name: str, strategy_options: dict[str, Any], way: str) -> tuple[Tensor, Fit]:
    callback = Replaces(way)
    result = fitted(name, strategy_options, Classifier(Plain), callbacks=[callback])
    return callback.weight, result


@pytest.mark.parametrize(("mode", "way"), [("reduce-scatter", "assign"), ("all-reduce", "layer")])
def test_replaced_parameters_are_refused_by_name(ranks: Ranks, mode: str, way: str) -> None:
    """The optimizer has the old ones: under "ddp" they are not trained from then on, without a message."""
    for weight, result in ranks.run(replacing, "ddp", {}, way):
        assert torch.equal(result.weights["net.block.0.weight"], weight)
    for outcome in ranks.outcomes(replacing, "megatron_ddp", MODES[mode], way):
        text = "'net.block.0.weight' was replaced by another object (load_state_dict(assign=True)"
        assert_failed(outcome, text, kind="ParameterChangedError")


def fit_lazy(name: str) -> Fit:
    return fit(name, module=Classifier(Lazy))


def test_uninitialised_lazy_module_is_refused_by_name(ranks: Ranks) -> None:
    """Under "ddp" the same, without the name."""
    for outcome in ranks.outcomes(fit_lazy, "megatron_ddp"):
        assert_failed(outcome, "parameter 'net.block.0.weight' is uninitialised", kind="ValueError")


# --- finetuning ------------------------------------------------------------------------------------------------------


class Backboned(pl.LightningModule):
    """A backbone with BatchNorm, which stays trainable when it is frozen, and a head."""

    def __init__(self) -> None:
        super().__init__()
        # rank 0's values must reach rank 1, also those of what is frozen
        torch.manual_seed(int(os.environ["LOCAL_RANK"]))
        self.backbone = nn.Sequential(nn.Linear(5, 17), nn.BatchNorm1d(17), nn.Tanh(), nn.Linear(17, 9), nn.Tanh())
        self.head = nn.Linear(9, NUM_TOKENS)
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        features, _, targets = batch
        loss = F.cross_entropy(self.head(self.backbone(features)), targets)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        features, _, targets = batch
        self.log("val_loss", F.cross_entropy(self.head(self.backbone(features)), targets), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([param for param in self.parameters() if param.requires_grad], lr=1e-2)


class Finetuning(BackboneFinetuning):
    """Unfreezes the backbone in the second epoch, and again after a restart, which Lightning's leaves to the user.

    Args:
        again: wrap the module again when that has happened ("ddp" only): see :func:`wrap_again`.
    """

    def __init__(self, again: bool = False) -> None:
        super().__init__(unfreeze_backbone_at_epoch=1, lambda_func=lambda epoch: 1.5, backbone_initial_ratio_lr=0.2)
        self.again = again

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        before = sum(param.requires_grad for param in pl_module.parameters())
        super().on_train_epoch_start(trainer, pl_module)
        if trainer.current_epoch > 0:
            self.make_trainable(pl_module.backbone)
        if self.again and sum(param.requires_grad for param in pl_module.parameters()) > before:
            wrap_again(trainer)


def finetuned(
    name: str, strategy_options: dict[str, Any], again: bool = False, folder: Path | None = None, **options: Any
) -> Watched:
    """Four epochs unless told otherwise; with a checkpoint of the third."""
    callbacks: list[Any] = [Finetuning(again)]
    if folder is not None:
        saver = ModelCheckpoint(folder, filename="{epoch}", every_n_epochs=1, save_top_k=-1)
        callbacks.append(saver)
        options["enable_checkpointing"] = True
    return watched(name, strategy_options, callbacks=callbacks, module=Backboned, **{"max_epochs": 4, **options})


@pytest.mark.parametrize("mode", MODES)
def test_unfrozen_backbone_is_synchronised(ranks: Ranks, tmp_path: Path, mode: str) -> None:
    """Under "ddp" its gradients are the rank's own (Lightning #20340); here it is as if wrapped again, and saved so.

    BaseFinetuning assigns ``optimizer.param_groups`` while the backbone is frozen; then their state is loaded.
    """
    apart = ranks.run(finetuned, "ddp", {})
    assert not torch.equal(*(result.fit.weights["backbone.0.weight"] for result in apart))
    theirs = ranks.run(finetuned, "ddp", {}, again=True)
    ours = ranks.run(finetuned, "megatron_ddp", MODES[mode], folder=tmp_path)
    for mine, other in zip(ours, theirs, strict=True):
        assert_equal(mine, other)
    assert_same_tensors(ours[0].fit.weights, ours[1].fit.weights)
    rates = [rates for _, rates, _ in ours[0].batches]
    assert len(rates[0]) == 1
    assert rates[-1] == [1e-2, pytest.approx(1e-2 * 0.2 * 1.5 * 1.5)], "the new group's rate follows its schedule"
    resumed = ranks.run(finetuned, "megatron_ddp", MODES[mode], ckpt_path=str(tmp_path / "epoch=2.ckpt"))
    for mine, other in zip(resumed, ours, strict=True):
        assert len(mine.batches) == 7
        assert mine.fit.losses == other.fit.losses[-7:]
        assert_equal(mine.batches, other.batches[-7:])


# --- out of memory ---------------------------------------------------------------------------------------------------


class RunsOutOfMemory(torch.autograd.Function):
    """Passes everything on, until its backward meets a batch that is too large."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, limit: int) -> Tensor:
        ctx.limit = limit
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        if len(grad) > ctx.limit:
            raise RuntimeError("CUDA out of memory. On purpose.")
        return grad, None


class Halves(pl.LightningModule):
    """Goes through batches of more than four in two halves.

    Args:
        warned: it knows beforehand; else it learns from an error in the middle of backward, with the gradients of its
            last layers reduced.
    """

    def __init__(self, warned: bool) -> None:
        super().__init__()
        torch.manual_seed(int(os.environ["LOCAL_RANK"]))
        self.first = nn.Sequential(nn.Linear(5, 17), nn.Tanh())
        self.second = nn.Sequential(nn.Linear(17, 9), nn.Tanh(), nn.Linear(9, NUM_TOKENS))
        self.automatic_optimization = False
        self.warned = warned

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(loader().dataset, batch_size=8)

    def loss(self, features: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.second(RunsOutOfMemory.apply(self.first(features), 4)), targets)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        features, _, targets = batch
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        try:
            if len(features) <= 4 or not self.warned:
                self.manual_backward(self.loss(features, targets))
        except RuntimeError as error:
            if "out of memory" not in str(error):
                raise
            optimizer.zero_grad()
        if len(features) > 4:
            halves = zip(features.chunk(2), targets.chunk(2), strict=True)
            self.manual_backward(torch.stack([self.loss(*half) / 2 for half in halves]).sum())
        optimizer.step()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def halving(name: str, strategy_options: dict[str, Any], warned: bool) -> dict[str, Tensor]:
    module = Halves(warned)
    make_trainer(make_strategy(name, **strategy_options), max_epochs=1).fit(module)
    return weights_of(module)


@pytest.mark.parametrize("mode", MODES)
def test_failed_backward_may_be_tried_again(ranks: Ranks, mode: str) -> None:
    """No forward of the wrapped model comes between: what the first left behind must not be added to the second."""
    theirs = ranks.run(halving, "ddp", {}, warned=True)
    ours = ranks.run(halving, "megatron_ddp", MODES[mode], warned=False)
    for mine, other in zip(ours, theirs, strict=True):
        assert_equal(mine, other)
