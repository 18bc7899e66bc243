"""The contents of ``.grad``, after several backwards, zeroing and user code: compared with torch DDP."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from megastrategy import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from tests.support.data_path import grads_of
from tests.support.gradients import (
    ENGINE_IDS,
    ENGINES,
    Scenario,
    assert_equal,
    batch,
    grads_with_ddp,
    grads_with_ours,
    one_backward,
)
from tests.support.models import two_layers
from tests.support.ranks import run_ranks


def accumulate(model: Any, rank: int) -> None:
    for number in range(3):
        with model.no_sync():
            model(batch(rank, number)).square().sum().backward()
    model(batch(rank, 3)).square().sum().backward()


def several_synchronised(model: Any, rank: int) -> None:
    for number in range(3):
        model(batch(rank, number)).square().sum().backward()


def synchronised_then_local_then_synchronised(model: Any, rank: int) -> None:
    model(batch(rank, 0)).square().sum().backward()
    with model.no_sync():
        model(batch(rank, 1)).square().sum().backward()
    model(batch(rank, 2)).square().sum().backward()


def zeroed_between(model: Any, rank: int) -> None:
    model(batch(rank, 0)).square().sum().backward()
    model.zero_grad()
    model(batch(rank, 1)).square().sum().backward()


def zeroed_twice_then_accumulated(model: Any, rank: int) -> None:
    model(batch(rank, 0)).square().sum().backward()
    model.zero_grad()
    model.zero_grad()
    accumulate(model, rank)


def zeroed_by_hand_in_the_window(model: Any, rank: int) -> None:
    """As Lightning does when it validates in the middle of an accumulation window."""
    with model.no_sync():
        model(batch(rank, 0)).square().sum().backward()
    for param in model.module.parameters():
        param.grad = None
    model(batch(rank, 1)).square().sum().backward()


def one_gradient_dropped_by_hand(model: Any, rank: int) -> None:
    with model.no_sync():
        model(batch(rank, 0)).square().sum().backward()
    model.module[0].weight.grad = None
    model(batch(rank, 1)).square().sum().backward()


def gradients_replaced_and_scaled_by_hand(model: Any, rank: int) -> None:
    with model.no_sync():
        model(batch(rank, 0)).square().sum().backward()
    model.module[0].weight.grad = torch.full_like(model.module[0].weight, 2.0 + rank)
    model.module[2].bias.grad.mul_(3.0)
    model(batch(rank, 1)).square().sum().backward()


def forward_in_between(model: Any, rank: int) -> None:
    loss = model(batch(rank, 0)).square().sum()
    with torch.no_grad():
        model(batch(rank, 1))
    loss.backward()


def two_losses_of_one_forward(model: Any, rank: int) -> None:
    out = model(batch(rank))
    (out.square().sum() + out.abs().sum()).backward()


def gradient_penalty(model: Any, rank: int) -> None:
    """autograd.grad through the wrapped forward is no backward: nothing may be sent for it."""
    x = batch(rank).requires_grad_()
    out = model(x).square().sum()
    (slope,) = torch.autograd.grad(out, x, create_graph=True)
    (out + slope.square().sum()).backward()


SCENARIOS = [
    one_backward,
    accumulate,
    several_synchronised,
    synchronised_then_local_then_synchronised,
    zeroed_between,
    zeroed_twice_then_accumulated,
    zeroed_by_hand_in_the_window,
    one_gradient_dropped_by_hand,
    gradients_replaced_and_scaled_by_hand,
    forward_in_between,
    two_losses_of_one_forward,
    gradient_penalty,
]

ADD_TO_REDUCED = [several_synchronised, synchronised_then_local_then_synchronised]
ACCUMULATE = [accumulate, zeroed_twice_then_accumulated]
CHANGE_LOCAL_GRADS = [
    zeroed_by_hand_in_the_window,
    one_gradient_dropped_by_hand,
    gradients_replaced_and_scaled_by_hand,
]
"""Pooled gradients are never a rank's own between two backwards: ``.grad`` is None."""


@pytest.mark.parametrize(
    ("scenario", "engine"),
    [
        pytest.param(scenario, engine, id=f"{scenario.__name__}-{name}")
        for scenario in SCENARIOS
        for engine, name in zip(ENGINES, ENGINE_IDS, strict=True)
        if not (name == "pooled" and scenario in CHANGE_LOCAL_GRADS)
    ],
)
def test_gradients_equal_torch_ddp(scenario: Scenario, engine: dict[str, Any]) -> None:
    pooled = "grad_buffer" in engine
    # To add to a mean that is spread over the ranks, it is multiplied by their number and divided again, on its owner;
    # torch DDP adds the mean to every rank's gradient and takes the mean of that, which rounds elsewhere.
    # Pooled, the mean over ranks is taken of each microbatch, and then the sum.
    rounds_elsewhere = scenario in ADD_TO_REDUCED and engine["use_distributed_optimizer"]
    rounds_elsewhere |= scenario in ACCUMULATE and pooled
    ours, reference = grads_with_ours(two_layers, scenario, **engine), grads_with_ddp(two_layers, scenario)
    assert_equal(ours, reference, 1e-6 if rounds_elsewhere else 0.0)


@pytest.mark.parametrize("sharded", [True, False])
def test_autograd_adds_into_the_buffer_without_a_copy(sharded: bool) -> None:
    def run(rank: int, group: ProcessGroup) -> None:
        module = two_layers()
        model = DistributedDataParallel(module, DistributedDataParallelConfig(use_distributed_optimizer=sharded), group)
        one_backward(model, rank)  # at whose end the buffer is made
        model.zero_grad()
        [flat] = grads_of(model)
        with model.no_sync():
            for _ in range(2):
                one_backward(model, rank)
                for param in module.parameters():
                    assert param.grad is not None
                    assert flat.data_ptr() <= param.grad.data_ptr() < flat.data_ptr() + flat.nbytes

    run_ranks(2, run)


@pytest.mark.parametrize("sharded", [True, False])
def test_two_optimizers_over_parts_of_one_model(sharded: bool) -> None:
    """Each zeroes and steps its own part; the other part's gradients stay."""

    def run_ours(rank: int, group: ProcessGroup) -> list[Tensor]:
        module = two_layers()
        config = DistributedDataParallelConfig(use_distributed_optimizer=sharded, bucket_size=10**9)
        model = DistributedDataParallel(module, config, group)
        first = DistributedOptimizer(torch.optim.Adam(module[0].parameters(), lr=0.1), model)
        second = DistributedOptimizer(torch.optim.Adam(module[2].parameters(), lr=0.1), model)
        alternate(model, first, second, rank)
        return [param.detach().clone() for param in module.parameters()]

    def run_ddp(rank: int, group: ProcessGroup) -> list[Tensor]:
        module = two_layers()
        first = torch.optim.Adam(module[0].parameters(), lr=0.1)
        second = torch.optim.Adam(module[2].parameters(), lr=0.1)
        alternate(TorchDDP(module, process_group=group), first, second, rank)
        return [param.detach().clone() for param in module.parameters()]

    def alternate(model: Any, first: Any, second: Any, rank: int) -> None:
        for number in range(4):
            first.zero_grad()
            model(batch(rank, number)).square().sum().backward()  # adds to what the second has not zeroed
            first.step()
            if number % 2 == 1:
                second.step()
                second.zero_grad()

    assert_equal(run_ranks(2, run_ours), run_ranks(2, run_ddp), 1e-5 if sharded else 0.0)


@pytest.mark.parametrize("engine", ENGINES, ids=ENGINE_IDS)
def test_gradients_from_before_the_wrapping_are_kept(engine: dict[str, Any]) -> None:
    def with_grads() -> nn.Module:
        module = two_layers()
        module(torch.ones(2, 10)).sum().backward()
        return module

    assert_equal(grads_with_ours(with_grads, one_backward, **engine), grads_with_ddp(with_grads, one_backward))


def test_full_grad_wants_a_parameter_of_the_model() -> None:
    def run(rank: int, group: ProcessGroup) -> None:
        model = DistributedDataParallel(two_layers(), process_group=group)
        with pytest.raises(ValueError, match="not a trainable parameter"):
            model.full_grad(nn.Parameter(torch.ones(2)))

    run_ranks(2, run)
