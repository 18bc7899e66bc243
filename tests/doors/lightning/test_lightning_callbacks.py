"""Callbacks for which equality with ``"ddp"`` is not all: ``"ddp"`` lets the ranks part, or cannot go on."""

from __future__ import annotations

import copy
import os
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import BackboneFinetuning, ModelCheckpoint, ModelPruning
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from tests.doors.features.callbacks import SameOnEveryRank
from tests.doors.features.classifiers import wrap_again
from tests.doors.features.watched_fits import Watched, watched
from tests.support.comparison import assert_equal

from ..fits import NUM_TOKENS, assert_same_tensors, loader, make_strategy, make_trainer, weights_of
from ..matrix import MODES
from ..rank_processes import Ranks

# --- finetuning ------------------------------------------------------------------------------------------------------


class Backboned(pl.LightningModule):
    """A backbone with BatchNorm, which stays trainable when it is frozen, and a head."""

    def __init__(self, optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW) -> None:
        super().__init__()
        torch.manual_seed(
            int(os.environ["LOCAL_RANK"])
        )  # rank 0's values must reach rank 1, also those of what is frozen
        self.backbone = nn.Sequential(nn.Linear(5, 17), nn.BatchNorm1d(17), nn.Tanh(), nn.Linear(17, 9), nn.Tanh())
        self.head = nn.Linear(9, NUM_TOKENS)
        self.kind = optimizer
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
        return self.kind([param for param in self.parameters() if param.requires_grad], lr=1e-2)


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
    name: str,
    strategy_options: dict[str, Any],
    again: bool = False,
    optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW,
    folder: str | None = None,
    max_epochs: int = 4,
    **options: Any,
) -> Watched:
    callbacks: list[Any] = [Finetuning(again)]
    if folder is not None:
        callbacks.append(ModelCheckpoint(folder, filename="last", every_n_epochs=1))
        options["enable_checkpointing"] = True
    module = partial(Backboned, optimizer)
    return watched(name, strategy_options, callbacks=callbacks, module=module, max_epochs=max_epochs, **options)


@pytest.mark.sample(1)
@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD])
@pytest.mark.parametrize("mode", MODES)
def test_an_unfrozen_backbone_is_synchronised(ranks: Ranks, mode: str, optimizer: type[torch.optim.Optimizer]) -> None:
    """Under "ddp" its gradients are the rank's own (Lightning #20340); here it is as if wrapped again."""
    apart = ranks.run(finetuned, "ddp", {}, optimizer=optimizer)
    assert not torch.equal(*(result.fit.weights["backbone.0.weight"] for result in apart))
    theirs = ranks.run(finetuned, "ddp", {}, again=True, optimizer=optimizer)
    ours = ranks.run(finetuned, "megatron_ddp", MODES[mode], optimizer=optimizer)
    for mine, other in zip(ours, theirs, strict=True):
        assert_equal(mine, other)
    assert_same_tensors(ours[0].fit.weights, ours[1].fit.weights)
    rates = [rates for _, rates, _ in ours[0].batches]
    assert len(rates[0]) == 1
    assert rates[-1] == [1e-2, pytest.approx(1e-2 * 0.2 * 1.5 * 1.5)], "the new group's rate follows its schedule"


@pytest.mark.long
@pytest.mark.sample(1)
@pytest.mark.parametrize(("first", "second"), [(mode, mode) for mode in MODES] + [("ddp", "reduce-scatter")])
def test_finetuning_goes_on_from_a_checkpoint(ranks: Ranks, tmp_path: Path, first: str, second: str) -> None:
    """BaseFinetuning assigns ``optimizer.param_groups`` while the backbone is frozen; then their state is loaded."""
    whole = ranks.run(finetuned, *_strategy(second), again=second == "ddp")
    ranks.run(finetuned, *_strategy(first), again=first == "ddp", folder=str(tmp_path), max_epochs=3)
    resumed = ranks.run(finetuned, *_strategy(second), ckpt_path=str(tmp_path / "last.ckpt"))
    for mine, other in zip(resumed, whole, strict=True):
        assert_same_tensors(mine.fit.weights, other.fit.weights)
        assert mine.fit.losses == other.fit.losses[-len(mine.fit.losses) :]
        assert_equal(mine.batches, other.batches[-len(mine.batches) :])
        assert len(mine.batches) == 7


def _strategy(mode: str) -> tuple[str, dict[str, Any]]:
    return ("ddp", {}) if mode == "ddp" else ("megatron_ddp", dict(MODES[mode]))


@pytest.mark.sample(1)
@pytest.mark.parametrize("mode", MODES)
def test_a_checkpoint_of_finetuning_is_what_ddp_writes(ranks: Ranks, tmp_path: Path, mode: str) -> None:
    checkpoints = []
    for name, (kind, options) in {"theirs": ("ddp", {}), "ours": _strategy(mode)}.items():
        ranks.run(finetuned, kind, options, again=kind == "ddp", folder=str(tmp_path / name), max_epochs=2)
        checkpoint = torch.load(tmp_path / name / "last.ckpt", weights_only=True)
        (optimizer,) = checkpoint["optimizer_states"]
        assert len(optimizer["param_groups"]) == 2
        checkpoints.append({**optimizer, "state": dict(sorted(optimizer["state"].items()))})
    assert_equal(checkpoints[1], checkpoints[0])


# --- pruning ---------------------------------------------------------------------------------------------------------


class OwnMemory(ModelPruning):
    """ModelPruning as it is where its copy of the first weights is on another device than the parameters."""

    @staticmethod
    def _copy_param(new: nn.Module, old: nn.Module, name: str) -> None:
        ModelPruning._copy_param(new, copy.deepcopy(old), name)


def pruned(name: str, strategy_options: dict[str, Any], callback: type[ModelPruning]) -> Watched:
    made = partial(callback, "l1_unstructured", amount=0.3, use_global_unstructured=True)
    return watched(name, strategy_options, callbacks=[made], module=SameOnEveryRank, max_epochs=3)


@pytest.mark.long
def test_pruning_goes_back_to_the_first_weights_every_time(ranks: Ranks) -> None:
    """The callback points parameters at its copy of them. On a CPU "ddp" then trains that copy, and the next time goes
    back to what has been trained; a parameter in a buffer takes the values only."""
    (theirs, _), (apart, _) = (ranks.run(pruned, "ddp", {}, callback) for callback in (OwnMemory, ModelPruning))
    ours, _ = ranks.run(pruned, "megatron_ddp", MODES["reduce-scatter"], ModelPruning)
    assert_equal(ours, theirs)
    assert not torch.equal(apart.fit.weights["inputs.weight"], theirs.fit.weights["inputs.weight"])


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
def test_a_backward_that_failed_may_be_tried_again_within_a_training_step(ranks: Ranks, mode: str) -> None:
    """No forward of the wrapped model comes between: what the first left behind must not be added to the second."""
    theirs = ranks.run(halving, "ddp", {}, warned=True)
    ours = ranks.run(halving, "megatron_ddp", MODES[mode], warned=False)
    for mine, other in zip(ours, theirs, strict=True):
        assert_equal(mine, other)
