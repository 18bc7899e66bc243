"""Fits with other options, and what they send; with the default ones the matrix compares them with ``"ddp"``."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms import Join

from megastrategy import DistributedDataParallel, DistributedOptimizer
from tests.doors.features.manual import (
    Checkpointed,
    LocalOverBatches,
    LocalThenSynchronised,
    Manual,
    ToggledModel,
    TwiceSynchronised,
    ZeroesAfterEachStep,
    manual,
)

from ..fabric_loops import make_fabric
from ..fits import AwkwardModule, Fit, assert_same_fit, fit
from ..matrix import MODES
from ..rank_processes import Ranks, assert_failed


class WithoutBranch(AwkwardModule):
    """The same graph in every batch."""

    def forward(self, features: Tensor, tokens: Tensor, use_side: bool = True) -> Tensor:
        return super().forward(features, tokens, use_side=True)


def fit_of(name: str, kind: type[pl.LightningModule], options: dict[str, Any], **trainer_options: Any) -> Fit:
    return fit(name, module=kind(), strategy_options=options, **trainer_options)


@pytest.mark.parametrize(
    ("kind", "options", "under_ddp"),
    [
        pytest.param(WithoutBranch, {"static_graph": True}, {}, id="static_graph"),
        pytest.param(AwkwardModule, {"bucket_size": None, "bucket_cap_mb": 0.001}, {}, id="bucket_cap_mb"),
        pytest.param(
            AwkwardModule,
            {"use_distributed_optimizer": False, "overlap_grad_reduce": False, "use_contiguous_buffers": False},
            {},
            id="fallback",
        ),
        pytest.param(AwkwardModule, {"broadcast_buffers": False}, {"broadcast_buffers": False}, id="broadcast_buffers"),
        pytest.param(AwkwardModule, {"grad_buffer": "pooled"}, {}, id="pooled"),
    ],
)
def test_options_equal_ddp(ranks: Ranks, kind: Any, options: dict[str, Any], under_ddp: dict[str, Any]) -> None:
    """How gradients travel must not show in the result; broadcast_buffers=False means what it means under ddp."""
    ours, theirs = ranks.run(fit_of, "megatron_ddp", kind, options), ranks.run(fit_of, "ddp", kind, under_ddp)
    for mine, other in zip(ours, theirs, strict=True):
        assert_same_fit(mine, other)


def test_pooled_gradients_survive_a_validation(ranks: Ranks) -> None:
    """Each microbatch is reduced by itself, which rounds elsewhere; what was reduced before the validation stays."""
    options = {"accumulate_grad_batches": 3, "val_check_interval": 2}
    ours = ranks.run(fit, "megatron_ddp", strategy_options={"grad_buffer": "pooled"}, **options)
    theirs = ranks.run(fit, "ddp", **options)
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.losses == pytest.approx(other.losses, rel=1e-5)
    assert torch.equal(ours[0].weights["inputs.weight"], ours[1].weights["inputs.weight"])


# --- what is sent ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "options", "num_windows", "mode"),
    [
        (AwkwardModule, {"accumulate_grad_batches": 3}, 3, "reduce-scatter"),
        (AwkwardModule, {"accumulate_grad_batches": 3}, 3, "all-reduce"),
        (Checkpointed, {}, 7, "all-reduce"),
        (LocalThenSynchronised, {}, 7, "reduce-scatter"),  # two backwards a batch, one of them local
        (LocalOverBatches, {}, 3, "reduce-scatter"),  # windows of 3, 3 and 1
        (ToggledModel, {}, 2 * 4, "reduce-scatter"),  # two optimizers, windows of 2, 2, 2 and 1
        (TwiceSynchronised, {}, 2 * 7, "all-reduce"),
    ],
)
def test_every_bucket_is_reduced_once_a_window(
    ranks: Ranks, kind: type[pl.LightningModule], options: dict[str, Any], num_windows: int, mode: str
) -> None:
    """Nothing is sent while gradients accumulate, nor when the backward inside a checkpoint ends."""
    for num_buckets, counts in ranks.run(count_reductions, kind, MODES[mode], **options):
        assert num_buckets > 2
        assert counts == {"reduce_scatter": 0, "all_reduce": 0, mode.replace("-", "_"): num_windows}


def count_reductions(
    kind: type[pl.LightningModule], strategy_options: dict[str, Any], **options: Any
) -> tuple[int, dict[str, Fraction]]:
    counter = CountReductions()
    fit_of("megatron_ddp", kind, strategy_options, callbacks=[counter], max_epochs=1, **options)
    return counter.num_buckets, counter.counts


class CountReductions(pl.Callback):
    """Listens at the one seam through which the engine sends, during a fit. Each bucket counts as its part of all there
    are, which may become others after the first backward."""

    def __init__(self) -> None:
        self.counts = {"reduce_scatter": Fraction(0), "all_reduce": Fraction(0)}
        self.num_buckets = 0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        wrapped = trainer.strategy.model
        assert isinstance(wrapped, DistributedDataParallel)
        self.num_buckets = len(wrapped.layout.buckets)
        for name in self.counts:
            send = getattr(wrapped.engine.collectives, name)
            setattr(wrapped.engine.collectives, name, self._counted(name, send, wrapped))

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        for name in self.counts:
            delattr(trainer.strategy.model.engine.collectives, name)

    def _counted(self, name: str, send: Callable[..., Any], wrapped: DistributedDataParallel) -> Callable[..., Any]:
        def counted(*arguments: Any, **options: Any) -> Any:
            self.counts[name] += Fraction(1, len(wrapped.layout.buckets))
            return send(*arguments, **options)

        return counted


# --- steps that go round the strategy --------------------------------------------------------------------------------


class BacksItself(ZeroesAfterEachStep):
    """``loss.backward()``, where Lightning asks for ``self.manual_backward(loss)``."""

    def manual_backward(self, loss: Tensor, *_: Any, **__: Any) -> None:
        loss.backward()


@pytest.mark.parametrize("mode", MODES)
def test_backward_of_the_loss_itself_is_synchronised(ranks: Ranks, mode: str) -> None:
    """Which it is not under "ddp"."""
    expected, _ = ranks.run(manual, "ddp", {}, ZeroesAfterEachStep)
    for mine in ranks.run(manual, "megatron_ddp", MODES[mode], BacksItself):
        assert_same_params(mine, expected)
    zero, one = ranks.run(manual, "ddp", {}, BacksItself)
    with pytest.raises(AssertionError):
        assert_same_params(zero, one)


def assert_same_params(actual: Fit, expected: Fit) -> None:
    """BatchNorm's statistics are each rank's own."""
    for name, _ in AwkwardModule().named_parameters():
        torch.testing.assert_close(actual.weights[name], expected.weights[name], rtol=0, atol=0)


class StepsTheInnerOptimizer(Manual):
    """Keeps what it made in ``configure_optimizers``, and steps that: under "ddp" it is what ``optimizers()`` wraps."""

    def configure_optimizers(self) -> Any:
        self.inner = super().configure_optimizers()
        return self.inner

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        self.inner.zero_grad()
        self.manual_backward(self.loss(batch))
        self.inner.step()


def test_inner_optimizer_in_a_module_is_refused(ranks: Ranks) -> None:
    for outcome in ranks.outcomes(fit_of, "megatron_ddp", StepsTheInnerOptimizer, {}):
        assert_failed(outcome, "self.optimizers() in a LightningModule", kind="DirectUseError")


def join_in_a_plain_loop() -> None:
    make_fabric("ddp")  # for a process group
    model = DistributedDataParallel(nn.Linear(3, 2))
    optimizer = DistributedOptimizer(torch.optim.AdamW(model.parameters()), model)
    for join in (model.join, lambda: Join([model, optimizer]), lambda: Join([optimizer])):
        with pytest.raises(NotImplementedError, match=r"(?s)belongs to torch DDP.*DistributedSampler.*drop_last=True"):
            join()
    model.close()


def test_join_of_torch_ddp_is_refused(ranks: Ranks) -> None:
    ranks.run(join_in_a_plain_loop)


def test_unused_parameter_against_a_promise_is_named(ranks: Ranks) -> None:
    """Under ddp that is an error in the next forward, without a name; here it comes at once, on both ranks."""
    for outcome in ranks.outcomes(fit, "megatron_ddp", strategy_options={"find_unused_parameters": False}):
        assert_failed(outcome, "'side.weight'", kind="UnusedParameterError")
