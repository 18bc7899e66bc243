"""Averages by tokens: ranks with ragged batches and microbatches train as one process that has all of their tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megastrategy import GradScaler
from tests.support.engines import engines
from tests.support.ragged_tokens import assert_close, batch, token_model, train_on_all
from tests.support.ranks import run_ranks
from tests.support.token_training import MODES, WINDOWS, Setup, adamw, assert_same


def train(
    rank: int,
    group: ProcessGroup,
    accumulate: int,
    *,
    dtype: torch.dtype = torch.float32,
    clip_norm: float | None = None,
    counts: bool = True,
    **options: Any,
) -> dict[str, Tensor]:
    setup = Setup(group, dtype, **options)
    for step, microbatches in enumerate(WINDOWS[accumulate]):
        setup.step(step, microbatches, counts=counts)
        if clip_norm is not None:
            setup.optimizer.clip_grad_norm_(clip_norm)
        setup.optimizer.step()
    return setup.weights()


# --- as one process with all tokens ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "size", "accumulate"),
    [
        ("reduce-scatter", 2, 1),
        ("late", 3, 3),
        ("forward", 4, 1),
        ("pooled", 2, 1),
        ("all-reduce", 2, 1),
        ("flattened", 2, 1),
        ("sums apart", 2, 1),
        ("instances", 4, 3),
    ],
)
def test_ragged_tokens_train_as_one_process(mode: str, size: int, accumulate: int) -> None:
    """In fp32, and with gradients that are rounded to fp16 on the wire within what that changes."""
    expected = train_on_all(size, WINDOWS[accumulate], adamw)
    relative = 2e-4 if mode == "sums apart" else 1e-6
    options = {**MODES, **engines("instances")}[mode]
    ours = run_ranks(size, lambda rank, group: train(rank, group, accumulate, **options))
    for weights in ours:
        assert_close(weights, expected, relative)
        assert all(torch.equal(weights[name], ours[0][name]) for name in weights), "ranks are equal"


@pytest.mark.parametrize(("mode", "accumulate"), [("reduce-scatter", 1), ("pooled", 3), ("all-reduce", 1)])
def test_with_clipping_and_in_fp64_to_its_last_digits(mode: str, accumulate: int) -> None:
    """A mean that is wrong by the smallest part shows."""
    options = {"dtype": torch.float64, "clip_norm": 0.05}
    expected = train_on_all(3, WINDOWS[accumulate], adamw, **options)
    for weights in run_ranks(3, lambda rank, group: train(rank, group, accumulate, **options, **MODES[mode])):
        assert_close(weights, expected, 1e-12)


@pytest.mark.parametrize(
    ("mode", "sums"), [("reduce-scatter", {}), ("all-reduce", {}), ("pooled", {"grad_reduce_in_fp32": False})], ids=str
)
def test_16_bit_weights(mode: str, sums: dict[str, Any]) -> None:
    """Changes of four steps differ by the rounding of weights and gradients, whose last bits are 2 ** -8 of them."""

    def change(weights: dict[str, Tensor]) -> Tensor:
        before = token_model().bfloat16().state_dict()
        return torch.cat([(weights[name].float() - value.float()).flatten() for name, value in before.items()])

    expected = change(train_on_all(2, WINDOWS[3], adamw))
    options = {"dtype": torch.bfloat16, **MODES[mode], **sums}
    for weights in run_ranks(2, lambda rank, group: train(rank, group, 3, **options)):
        assert (change(weights) - expected).norm() < 0.1 * expected.norm()


# --- ranks and windows without tokens --------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_grads_without_any_token_are_zeros(mode: str) -> None:
    def run(rank: int, group: ProcessGroup) -> None:
        setup = Setup(group, **MODES[mode])
        ids, labels = batch(rank, 0, 0)
        setup.model.count_tokens(0)
        setup.model(ids, torch.full_like(labels, -100), rank).backward()
        present = [grad for grad in setup.grads() if grad is not None]
        assert present
        assert all(torch.equal(grad, torch.zeros_like(grad)) for grad in present)
        setup.step(3, 1)  # and the next has its own mean
        assert any(grad is not None and grad.norm() > 0 for grad in setup.grads())

    run_ranks(2, run)


@pytest.mark.parametrize("wrong", [-1, float("nan"), float("inf"), torch.ones(2)], ids=str)
def test_what_is_no_number_of_tokens_is_refused(wrong: Any) -> None:
    def run(rank: int, group: ProcessGroup) -> None:
        setup = Setup(group)
        with pytest.raises(ValueError, match="num_tokens: expected"):
            setup.model.count_tokens(wrong)

    run_ranks(1, run)


# --- where gradients are read ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("reads", ["full_grad", "unscale"])
def test_first_read_of_grads_is_the_token_mean(reads: str) -> None:
    """Later readers do not get a mean that was corrected twice, also if all backwards were under ``no_sync``."""

    def run(rank: int, group: ProcessGroup, *, sync: bool) -> list[Tensor | None]:
        setup = Setup(group)
        setup.optimizer.zero_grad()
        for microbatch in range(2):
            setup.backward(5, microbatch, sync=sync and microbatch == 1)
        if not sync:
            setup.optimizer.grad_norm()
        if reads == "unscale":
            scaler = GradScaler("cpu", init_scale=1.0)
            scaler.scale(torch.ones(()))
            scaler.unscale_(setup.optimizer)
        return setup.grads()

    one, other = (run_ranks(3, lambda rank, group, sync=sync: run(rank, group, sync=sync)) for sync in (True, False))
    assert_same(one[0], other[0])
