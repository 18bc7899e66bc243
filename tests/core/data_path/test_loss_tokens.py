"""Averages by tokens: ranks with ragged batches and microbatches train as one process that has all of their tokens."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megastrategy import GradScaler
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
    ],
)
def test_ragged_tokens_train_as_one_process(mode: str, size: int, accumulate: int) -> None:
    """In fp32, and with gradients that are rounded to fp16 on the wire within what that changes."""
    expected = train_on_all(size, WINDOWS[accumulate], adamw)
    relative = 2e-4 if mode == "sums apart" else 1e-6
    ours = run_ranks(size, lambda rank, group: train(rank, group, accumulate, **MODES[mode]))
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


@pytest.mark.parametrize("accumulate", [1, 3])
def test_with_instances(accumulate: int) -> None:
    expected = train_on_all(4, WINDOWS[accumulate], adamw)
    options = {"num_distributed_optimizer_instances": 2}
    for weights in run_ranks(4, lambda rank, group: train(rank, group, accumulate, **options)):
        assert_close(weights, expected, 1e-6)


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


# --- bits ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["reduce-scatter", "all-reduce"])
def test_counts_of_powers_of_two_change_no_bit(mode: str) -> None:
    def run(rank: int, group: ProcessGroup, num_tokens: int | None) -> dict[str, Tensor]:
        setup = Setup(group, **MODES[mode])
        for step in (0, 3, 4):
            setup.optimizer.zero_grad()
            for microbatch in range(2):
                ids, labels = batch(rank, step, microbatch)
                with contextlib.nullcontext() if microbatch else setup.model.no_sync():
                    loss = setup.model(ids, labels, rank)
                    if num_tokens is None:
                        loss = loss / 2
                    else:
                        setup.model.count_tokens(num_tokens)
                        loss = loss * num_tokens
                    loss.backward()
            setup.optimizer.step()
        return setup.weights()

    expected = run_ranks(2, lambda rank, group: run(rank, group, None))
    for num_tokens in (1, 64, 4096):
        ours = run_ranks(2, lambda rank, group, n=num_tokens: run(rank, group, n))
        assert all(torch.equal(ours[0][name], value) for name, value in expected[0].items())


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


@pytest.mark.parametrize(("mode", "reads"), [("reduce-scatter", "full_grad"), ("reduce-scatter", "unscale")])
def test_first_read_of_grads_is_the_token_mean(mode: str, reads: str) -> None:
    """Later readers do not get a mean that was corrected twice, also if all backwards were under ``no_sync``."""

    def run(rank: int, group: ProcessGroup, *, sync: bool) -> list[Tensor | None]:
        setup = Setup(group, **MODES[mode])
        setup.optimizer.zero_grad()
        for microbatch in range(2):
            setup.backward(5, microbatch, sync=sync and microbatch == 1)
        if not sync or reads == "step":
            setup.optimizer.grad_norm()
        if reads == "unscale":
            scaler = GradScaler("cpu", init_scale=1.0)
            scaler.scale(torch.ones(()))
            scaler.unscale_(setup.optimizer)
        elif reads == "grad_norm":
            setup.optimizer.grad_norm()
        elif reads == "grad_norms":
            setup.model.grad_norms()
        return setup.grads()

    one, other = (run_ranks(3, lambda rank, group, sync=sync: run(rank, group, sync=sync)) for sync in (True, False))
    if mode == "all-reduce":  # nothing is reduced then, as under torch DDP: each rank has its own mean
        other = one
    assert_same(one[0], other[0])
