"""Manual optimization: Lightning's GAN, what is sent and when, and a rank that leaves a batch out."""

from __future__ import annotations

from datetime import timedelta
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.doors.features.manual import (
    GAN,
    LocalOverBatches,
    LocalThenSynchronised,
    Manual,
    ToggledModel,
    TwiceSynchronised,
    ZeroesAfterEachStep,
    manual,
)

from ..fits import AwkwardModule, Fit, assert_same_tensors, batches, fit, weights_of
from ..matrix import MODES
from ..rank_processes import Ranks, assert_failed
from .test_lightning_parity import CountReductions

EITHER_MODE = pytest.mark.parametrize("mode", MODES)

# --- Lightning's GAN -------------------------------------------------------------------------------------------------


def fit_gan(name: str, **strategy_options: Any) -> Fit:
    return fit(name, module=GAN(), strategy_options=strategy_options, max_epochs=2)


def gan_by_hand() -> tuple[dict[str, Tensor], list[list[float]]]:
    """The recipe in one process: each network steps with the mean of the two ranks' gradients."""
    gan = GAN()
    opt_g, opt_d = gan.configure_optimizers()
    losses: list[list[float]] = [[], []]

    def step(optimizer: torch.optim.Optimizer, network: nn.Module, both: list[Tensor]) -> None:
        params = list(network.parameters())
        first, second = (torch.autograd.grad(loss, params, retain_graph=True) for loss in both)
        for param, one, other in zip(params, first, second, strict=True):
            param.grad = (one + other) / 2
        optimizer.step()
        for rank, loss in enumerate(both):
            losses[rank].append(loss.item())

    for epoch in range(2):
        for batch_idx, pair in enumerate(batches(epoch)):
            reals = [batch[0] for batch in pair]
            fakes = [gan.generator(gan.noise(rank, batch_idx, len(real))) for rank, real in enumerate(reals)]
            step(opt_d, gan.discriminator, [gan.loss_d(real, fake) for real, fake in zip(reals, fakes, strict=True)])
            step(opt_g, gan.generator, [gan.loss_g(fake) for fake in fakes])
    return weights_of(gan), losses


@pytest.mark.sample(1)
@EITHER_MODE
def test_the_documentations_gan_trains_which_it_does_not_under_ddp(ranks: Ranks, mode: str) -> None:
    """The discriminator's backward leaves the generator without gradients: "ddp" waits for them and says so in the
    second. Here it is what the recipe computes, to the bit."""
    for outcome in ranks.outcomes(fit_gan, "ddp", find_unused_parameters=False):
        assert_failed(outcome, "parameters that were not used in producing the loss")
    weights, losses = gan_by_hand()
    for rank, result in enumerate(ranks.run(fit_gan, "megatron_ddp", **MODES[mode])):
        assert result.losses == losses[rank]
        assert_same_tensors(result.weights, weights)


# --- what is sent ----------------------------------------------------------------------------------------------------


def count_reductions(kind: type[Manual], strategy_options: dict[str, Any]) -> tuple[Fraction, int]:
    counter = CountReductions()
    manual("megatron_ddp", strategy_options, kind, callbacks=[counter])
    return sum(counter.counts.values()), counter.num_buckets


@pytest.mark.sample(1)
@EITHER_MODE
@pytest.mark.parametrize(
    ("kind", "num_synchronised"),
    [
        (LocalThenSynchronised, 7),  # two backwards a batch, one of them local
        (LocalOverBatches, 3),  # windows of 3, 3 and 1
        (ToggledModel, 2 * 4),  # two optimizers, windows of 2, 2, 2 and 1
        (TwiceSynchronised, 2 * 7),
    ],
)
def test_a_blocked_backward_sends_nothing_and_any_other_every_bucket_once(
    ranks: Ranks, kind: type[Manual], num_synchronised: int, mode: str
) -> None:
    for num_sent, num_buckets in ranks.run(count_reductions, kind, MODES[mode]):
        assert num_buckets > 2
        assert num_sent == num_synchronised


# --- closures --------------------------------------------------------------------------------------------------------


# --- a rank that leaves a batch out ----------------------------------------------------------------------------------


class SkipsOnRank1(AwkwardModule):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:  # type: ignore[override]
        loss = super().training_step(batch, batch_idx)
        return None if self.trainer.global_rank == 1 and batch_idx == 3 else loss


def fit_skipping(**strategy_options: Any) -> Fit:
    return fit("megatron_ddp", module=SkipsOnRank1(), strategy_options=strategy_options)


@EITHER_MODE
def test_a_training_step_that_returns_none_on_one_rank_ends_both_with_a_reason(ranks: Ranks, mode: str) -> None:
    """Lightning refuses it on the rank that does it; the other must not wait for the process group's half hour."""
    waiting, skipping = ranks.outcomes(fit_skipping, **MODES[mode])
    assert_failed(skipping, "by returning None in distributed training is not supported")
    assert_failed(waiting, "another rank ended", kind="CollectiveError", within_s=30)


# --- idioms that go round the strategy -------------------------------------------------------------------------------


class ClipsByHand(Manual):
    """As loops do that were written before they became a LightningModule."""

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        torch.nn.utils.clip_grad_norm_(self.parameters(), 0.05)
        optimizer.step()


def test_clipping_by_hand_is_refused_or_works(ranks: Ranks) -> None:
    for failure in ranks.outcomes(fit_manual, "megatron_ddp", ClipsByHand, MODES["reduce-scatter"]):
        assert_failed(failure, "self.clip_gradients", kind="ReducedGradError")
    ours = ranks.run(fit_manual, "megatron_ddp", ClipsByHand, MODES["all-reduce"])
    assert_same_tensors(ours[0].weights, ranks.run(fit_manual, "ddp", ClipsByHand)[0].weights)


class ZeroesTheModule(Manual):
    """Drops the gradients of every second batch through the module itself, after the backward."""

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        self.manual_backward(self.loss(batch))
        if batch_idx % 2:
            self.zero_grad()
        self.optimizers().step()
        self.optimizers().zero_grad()


def test_zeroing_the_module_after_the_backward_drops_the_gradients(ranks: Ranks) -> None:
    ours, theirs = (ranks.run(fit_manual, name, ZeroesTheModule) for name in ("megatron_ddp", "ddp"))
    assert [mine.losses for mine in ours] == [expected.losses for expected in theirs]
    # of rank 0: in manual optimization "ddp" leaves BatchNorm's statistics each rank's own
    assert_same_tensors(ours[0].weights, theirs[0].weights)


class BacksItself(ZeroesAfterEachStep):
    """``loss.backward()``, where Lightning asks for ``self.manual_backward(loss)``."""

    def manual_backward(self, loss: Tensor, *_: Any, **__: Any) -> None:
        loss.backward()


@EITHER_MODE
def test_a_backward_that_is_not_lightnings_is_synchronised_which_it_is_not_under_ddp(ranks: Ranks, mode: str) -> None:
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


class SkipsABackward(Manual):
    """On rank 1 in batch 3, and steps all the same."""

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = self.loss(batch)
        if self.trainer.global_rank == 0 or batch_idx != 3:
            self.manual_backward(loss)
        optimizer.step()


@pytest.mark.parametrize("sharded", [True, False])
def test_a_backward_that_one_rank_skips_ends_all_at_the_timeout(ranks: Ranks, sharded: bool) -> None:
    """The ranks are in different collectives then."""
    ranks.close()  # fits of one process share their groups, which have the timeout of the first
    options = {"use_distributed_optimizer": sharded, "timeout": timedelta(seconds=5)}
    outcomes = ranks.outcomes(fit_manual, "megatron_ddp", SkipsABackward, options)
    for outcome in outcomes:
        assert_failed(outcome, kind="CollectiveError", within_s=30)


def fit_manual(name: str, kind: type[Manual], options: dict[str, Any] | None = None) -> Fit:
    return fit(name, module=kind(), strategy_options=options)
