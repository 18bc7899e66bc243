"""Gradients as hooks see and change them, where more than equality with ``"ddp"`` is to be shown."""

from __future__ import annotations

import itertools
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer

from ..fits import AwkwardModule, Fit, fit
from ..matrix import MODES
from ..rank_processes import Ranks, assert_failed

EITHER_MODE = pytest.mark.parametrize("mode", MODES)

# --- norms -----------------------------------------------------------------------------------------------------------

NORM_TYPES: list[float | str] = [1, 2.0, 3.5, "inf"]


class RecordNorms(pl.Callback):
    """``strategy.grad_norm`` beside norms of ``full_grad`` in fp64, in both hooks."""

    def __init__(self, norm_type: float | str) -> None:
        self.norm_type = norm_type
        self.found: list[dict[str, Tensor]] = []
        self.expected: list[dict[str, Tensor]] = []

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._record(trainer, pl_module)

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        self._record(trainer, pl_module)

    def _record(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        strategy: Any = trainer.strategy
        order = float(self.norm_type)
        grads = {name: strategy.full_grad(p) for name, p in pl_module.named_parameters() if p.requires_grad}
        present = {name: grad.double() for name, grad in grads.items() if grad is not None}
        expected = {f"grad_{order}_norm/{name}": grad.norm(order) for name, grad in present.items()}
        together = torch.cat([grad.reshape(-1) for grad in present.values()])
        expected[f"grad_{order}_norm_total"] = together.norm(order)
        self.expected.append(expected)
        self.found.append(strategy.grad_norm(self.norm_type))


def record_norms(strategy_options: dict[str, Any], norm_type: float | str) -> RecordNorms:
    recorder = RecordNorms(norm_type)
    fit("megatron_ddp", strategy_options=strategy_options, callbacks=[recorder], max_epochs=1)
    return recorder


@pytest.mark.sample(1)
@EITHER_MODE
@pytest.mark.parametrize("norm_type", NORM_TYPES)
def test_grad_norm_is_the_norm_of_each_whole_gradient_and_of_all(
    ranks: Ranks, norm_type: float | str, mode: str
) -> None:
    """Tied weights count once, frozen and unused ones not at all, and every rank has the same bits."""
    first, second = ranks.run(record_norms, MODES[mode], norm_type)
    assert len(first.found) == 2 * 7
    for batch, (found, expected) in enumerate(zip(first.found, first.expected, strict=True)):
        assert list(found) == list(expected)
        assert len(found) == (10 if batch // 2 % 2 else 9)  # the branch is used in odd batches
        for name, value in expected.items():
            assert found[name].dtype == torch.float32
            torch.testing.assert_close(found[name].double(), value, rtol=1e-6, atol=1e-12, msg=name)
            assert torch.equal(found[name], second.found[batch][name])


# --- what hooks change -----------------------------------------------------------------------------------------------


class FreezesItsLastLayer(AwkwardModule):
    """DINO's recipe: gradients of the last layer are dropped while the first steps are made."""

    def __init__(self) -> None:
        super().__init__()
        self.outs: list[Tensor] = []

    def on_after_backward(self) -> None:
        if self.global_step < 3:
            for param in self.out.parameters():
                param.grad = None

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        for param in self.out.parameters():
            dropped = self.trainer.strategy.full_grad(param) is None  # type: ignore[attr-defined]
            assert dropped == (self.global_step < 3)

    def on_train_batch_end(self, *_: Any) -> None:
        self.outs.append(self.out.weight.detach().clone())


def fit_freezing(strategy_options: dict[str, Any]) -> list[Tensor]:
    module = FreezesItsLastLayer()
    before = module.out.weight.detach().clone()
    fit("megatron_ddp", strategy_options=strategy_options, module=module, max_epochs=1)
    return [before, *module.outs]


@EITHER_MODE
def test_a_gradient_set_to_none_in_a_hook_is_left_out_of_the_step(ranks: Ranks, mode: str) -> None:
    """Under reduce-scatter ``.grad`` was None already, and the assignment says something nevertheless."""
    outs = ranks.run(fit_freezing, MODES[mode])[0]
    assert all(torch.equal(out, outs[0]) for out in outs[:4])
    assert all(not torch.equal(*pair) for pair in itertools.pairwise(outs[3:]))


# --- anomalies -------------------------------------------------------------------------------------------------------


class NanBackward(AwkwardModule):
    """The derivative of a square root at zero, times zero, on rank 1."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if self.trainer.global_rank == 1 and batch_idx == 2:
            loss = loss + (self.scale * 0.0).sqrt() * 0.0
        return loss


def fit_with_nan(**strategy_options: Any) -> Fit:
    return fit("megatron_ddp", module=NanBackward(), strategy_options=strategy_options, detect_anomaly=True)


@EITHER_MODE
def test_detect_anomaly_names_the_function_and_ends_both_ranks(ranks: Ranks, mode: str) -> None:
    """torch raises inside backward, with reductions on their way; the other rank must hear of it."""
    waiting, raising = ranks.outcomes(fit_with_nan, **MODES[mode])
    assert_failed(raising, "SqrtBackward0", "nan")
    assert_failed(waiting, kind="CollectiveError", within_s=30)
