"""Modules for which equality with ``"ddp"`` is not the whole story: ``"ddp"`` lets the ranks part, or refuses, or fails
in silence."""

from __future__ import annotations

import copy
import os
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.nn.utils import parametrize

from tests.doors.features.changed_modules import Lazy
from tests.doors.features.classifiers import Classifier, Plain, fitted, trained, wrap_again
from tests.doors.features.modules import Sparse, compiled

from ..fits import Fit, assert_same_fit, assert_same_tensors, fit
from ..matrix import MODES
from ..rank_processes import Ranks, assert_failed


class WrapsAgain(Callback):
    """Under "ddp" the module must be wrapped again after a change of what is trained: here in the first batch after it.

    What the tests below compare with: it is what a user of "ddp" would have to do.
    """

    def __init__(self, at_step: int) -> None:
        self.at_step = at_step

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == self.at_step:
            wrap_again(trainer)


# --- parametrizations ------------------------------------------------------------------------------------------------


class Symmetric(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.triu() + x.triu(1).transpose(-1, -2)

    def right_inverse(self, x: Tensor) -> Tensor:
        return x.triu()


class Reparametrises(Callback):
    """Registers a parametrization in mid-fit, and removes it again: the Parameter moves, and gets other memory."""

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        layer = pl_module.net.block[2]
        if trainer.global_step == 3:
            parametrize.register_parametrization(layer, "weight", Symmetric())
        if trainer.global_step == 9:
            parametrize.remove_parametrizations(layer, "weight", leave_parametrized=True)


def reparametrised(name: str, strategy_options: dict[str, Any], *, again: bool = False) -> Fit:
    callbacks: list[Callback] = [Reparametrises()]
    if again:
        callbacks = [WrapsAgain(3), WrapsAgain(9), *callbacks]
    result = fitted(name, strategy_options, Classifier(Plain), callbacks=callbacks)
    assert "net.block.2.weight" in result.weights
    return result


@pytest.mark.sample(1)
@pytest.mark.parametrize("mode", MODES)
def test_a_parametrization_registered_in_mid_fit_is_synchronised(ranks: Ranks, mode: str) -> None:
    """``Tensor.set_`` gives the Parameter another gradient accumulator, and torch DDP's hook is on the old one."""
    apart = ranks.run(reparametrised, "ddp", {})
    assert not torch.equal(apart[0].weights["net.block.2.weight"], apart[1].weights["net.block.2.weight"])
    theirs = ranks.run(reparametrised, "ddp", {}, again=True)
    ours = ranks.run(reparametrised, "megatron_ddp", MODES[mode])
    for mine, other in zip(ours, theirs, strict=True):
        assert_same_fit(mine, other)
    assert_same_tensors(ours[0].weights, ours[1].weights)


# --- weights replaced ------------------------------------------------------------------------------------------------


class Assigns(Callback):
    """Loads the weights it finds, as new Parameters, after the first epoch."""

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.current_epoch == 0:
            self.loaded = {name: value.clone() for name, value in pl_module.state_dict().items()}
            pl_module.load_state_dict(self.loaded, assign=True)


def assigning(name: str, strategy_options: dict[str, Any]) -> tuple[dict[str, Tensor], Fit]:
    callback = Assigns()
    result = fitted(name, strategy_options, Classifier(Plain), callbacks=[callback])
    return callback.loaded, result


@pytest.mark.parametrize("mode", MODES)
def test_parameters_replaced_in_mid_fit_are_refused_by_name(ranks: Ranks, mode: str) -> None:
    """The optimizer has the old ones: under "ddp" nothing is trained from then on, without a message."""
    for loaded, result in ranks.run(assigning, "ddp", {}):
        assert_same_tensors(result.weights, loaded)
    for outcome in ranks.outcomes(assigning, "megatron_ddp", MODES[mode]):
        assert_failed(
            outcome,
            "'net.block.0.weight' was replaced by another object (load_state_dict(assign=True)",
            kind="ParameterChangedError",
        )


class Replaces(Callback):
    """Puts a copy in place of a layer, after the first epoch."""

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        if trainer.current_epoch == 0:
            pl_module.net.block[0] = copy.deepcopy(pl_module.net.block[0])
            self.weight = pl_module.net.block[0].weight.detach().clone()


def replacing(name: str, strategy_options: dict[str, Any]) -> tuple[Tensor, Fit]:
    callback = Replaces()
    result = fitted(name, strategy_options, Classifier(Plain), callbacks=[callback])
    return callback.weight, result


@pytest.mark.parametrize("mode", MODES)
def test_a_submodule_replaced_in_mid_fit_is_refused_by_name(ranks: Ranks, mode: str) -> None:
    """The old one's parameters are unchanged and unused."""
    for weight, result in ranks.run(replacing, "ddp", {}):
        assert torch.equal(result.weights["net.block.0.weight"], weight)
    for outcome in ranks.outcomes(replacing, "megatron_ddp", MODES[mode]):
        assert_failed(outcome, "'net.block.0.weight' was replaced by another object", kind="ParameterChangedError")


# --- sparse gradients ------------------------------------------------------------------------------------------------


def momentum(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05, momentum=0.9)


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=1e-2)


class Dense(Sparse):
    """The same, with dense gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.embed.sparse = False


@pytest.mark.sample(1)
@pytest.mark.parametrize("mode", MODES)
def test_adam_trains_sparse_embeddings_as_dense_ones(ranks: Ranks, mode: str) -> None:
    """Gradients accumulate in a dense buffer, so every optimizer takes them; torch's Adam refuses sparse ones."""
    for outcome in ranks.outcomes(trained, "ddp", {}, build=Sparse, optimizer=adam):
        assert_failed(outcome, "Adam does not support sparse gradients")
    theirs = ranks.run(trained, "ddp", {}, build=Dense, optimizer=adam)
    ours = ranks.run(trained, "megatron_ddp", MODES[mode], build=Sparse, optimizer=adam)
    for mine, other in zip(ours, theirs, strict=True):
        assert_same_fit(mine, other)


# --- refused as under ddp --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_an_uninitialised_lazy_module_is_refused_by_name(ranks: Ranks, mode: str) -> None:
    """Under "ddp" the same, without the name."""
    for outcome in ranks.outcomes(fit_lazy, "megatron_ddp", MODES[mode]):
        assert_failed(outcome, kind="ValueError")
        assert outcome.message.startswith("parameter 'net.block.0.weight' is uninitialised")
    for outcome in ranks.outcomes(fit_lazy, "ddp", {}):
        assert_failed(outcome, "uninitialized parameters")


def fit_lazy(name: str, strategy_options: dict[str, Any]) -> Fit:
    return fit(name, strategy_options=strategy_options, module=Classifier(Lazy))


# --- compiled code ---------------------------------------------------------------------------------------------------


@pytest.mark.long  # a C++ compiler runs for half a minute
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler on a CPU")
def test_inductors_code_trains_the_same_as_under_ddp(ranks: Ranks, tmp_path: Path) -> None:
    """It reads parameters, and writes gradients, by address."""
    ours, theirs = (ranks.run(fit_with_inductor, name, str(tmp_path)) for name in ("megatron_ddp", "ddp"))
    for mine, other in zip(ours, theirs, strict=True):
        assert_same_fit(mine, other)


def fit_with_inductor(name: str, folder: str) -> Fit:
    with mock.patch.dict(os.environ, TORCHINDUCTOR_CACHE_DIR=folder):
        return compiled(name, {}, whole=False, backend="inductor")
