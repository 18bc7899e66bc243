"""A gradient that user code keeps beyond its drop does not change, as under torch DDP, or says that it is gone; and
hooks on gradients run before these are sent, whenever they were registered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from megastrategy import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from megastrategy.core.errors import ReducedGradError
from tests.support.ranks import run_ranks

from .test_reduced_grad import Net, batch, loss_of, sharded

Program = Callable[[Any, Net, Any, int], list[Tensor]]
"""Trains a model with an optimizer on a rank, and returns what is compared."""

WHOLE: dict[str, dict[str, Any]] = {
    "contiguous": {"bucket_size": 40},
    "late": {"bucket_size": 40, "overlap_grad_reduce": False},
    "flattened": {"use_contiguous_buffers": False, "overlap_grad_reduce": False},
}
whole = pytest.mark.parametrize("options", WHOLE.values(), ids=WHOLE)


class Wide(Net):
    """With a gradient that is copied into its view, not added to zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(10, 2_000), nn.Linear(2_000, 3)
        generator = torch.Generator().manual_seed(0)
        for param in self.parameters():
            nn.init.normal_(param, std=0.03, generator=generator)


def by_rank(program: Program, options: dict[str, Any] | None, kind: type[Net] = Net) -> list[list[Tensor]]:
    """Returns the program's result; under torch DDP without ``options``."""

    def run(rank: int, group: ProcessGroup) -> list[Tensor]:
        net = kind()
        model: Any = TorchDDP(net, process_group=group, find_unused_parameters=True)
        if options is not None:
            model = DistributedDataParallel(net, DistributedDataParallelConfig(**options), group)
        inner = torch.optim.SGD(net.parameters(), lr=0.1)
        found = program(model, net, inner if options is None else DistributedOptimizer(inner, model), rank)
        return [tensor.detach().clone() for tensor in found]

    return run_ranks(2, run)


def assert_as_under_torch_ddp(program: Program, options: dict[str, Any], kind: type[Net] = Net) -> None:
    for mine, theirs in zip(by_rank(program, options, kind), by_rank(program, None, kind), strict=True):
        assert all(map(torch.equal, mine, theirs))


def put_back(drop: Callable[[Net, Any], None]) -> Program:
    """Steps with the gradients of the backward before the last."""

    def program(model: Any, net: Net, optimizer: Any, rank: int) -> list[Tensor]:
        for step in range(3):
            loss_of(model, rank, step).backward()
            kept = [param.grad for param in net.parameters()]
            drop(net, optimizer)
            loss_of(model, rank, 10 + step).backward()
            for param, grad in zip(net.parameters(), kept, strict=True):
                param.grad = grad
            optimizer.step()
            optimizer.zero_grad()
        return list(net.parameters())

    return program


def drop_by_hand(net: Net, optimizer: Any) -> None:
    for param in net.parameters():
        param.grad = None


def write_others(net: Net, optimizer: Any) -> None:
    for param in net.parameters():
        if param.grad is not None:
            param.grad = torch.ones_like(param)


DROPS: dict[str, Callable[[Net, Any], None]] = {
    "optimizer": lambda net, optimizer: optimizer.zero_grad(),
    "module": lambda net, optimizer: net.zero_grad(),
    "by hand": drop_by_hand,
    "others in their place": write_others,
}
drops = pytest.mark.parametrize("drop", DROPS.values(), ids=DROPS)


@drops
@whole
@pytest.mark.parametrize("kind", [Net, Wide])
def test_a_full_gradient_that_is_kept_and_put_back_is_unchanged(
    kind: type[Net], options: dict[str, Any], drop: Callable[[Net, Any], None]
) -> None:
    assert_as_under_torch_ddp(put_back(drop), options | {"use_distributed_optimizer": False}, kind)


@drops
@sharded
def test_a_stand_in_that_is_put_back_beside_another_gradient_is_refused(
    options: dict[str, Any], drop: Callable[[Net, Any], None]
) -> None:
    def program(model: Any, net: Net, optimizer: Any, rank: int) -> list[Tensor]:
        with pytest.raises(ReducedGradError, match=r"putting back a \.grad that was dropped"):
            put_back(drop)(model, net, optimizer, rank)
        return []

    by_rank(program, options)


def test_a_copy_of_a_stand_in_is_no_better_and_zeroing_it_zeroes_nothing() -> None:
    def program(model: Any, net: Net, optimizer: Any, rank: int) -> list[Tensor]:
        loss_of(model, rank, 0).backward()
        assert net.first.weight.grad is not None
        kept = net.first.weight.grad.detach()
        optimizer.zero_grad()
        loss_of(model, rank, 1).backward()
        kept.zero_()
        full = model.full_grad(net.first.weight)
        assert full.any()
        net.first.weight.grad = kept
        with pytest.raises(ReducedGradError, match="putting back"):
            optimizer.step()
        return []

    by_rank(program, {"bucket_size": 40})


@pytest.mark.parametrize("sharded", [True, False])
def test_a_local_gradient_kept_from_an_accumulation_is_unchanged(sharded: bool) -> None:
    def program(model: Any, net: Net, optimizer: Any, rank: int) -> list[Tensor]:
        found: list[Tensor] = []
        for step in range(2):
            with model.no_sync():
                loss_of(model, rank, step).backward()
            kept = [param.grad for param in net.parameters() if param.grad is not None]
            net.zero_grad()
            loss_of(model, rank, 10 + step).backward()
            optimizer.step()
            optimizer.zero_grad()
            found += kept
        return found + list(net.parameters())

    assert_as_under_torch_ddp(program, {"bucket_size": 40, "use_distributed_optimizer": sharded})


def test_gradients_without_other_references_cost_no_memory() -> None:
    def program(model: Any, net: Net, optimizer: Any, rank: int) -> list[Tensor]:
        buffers = model.engine.grad_buffers
        before = [id(view) for view in buffers.views]
        for step in range(2):
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            assert all(param.grad is None or param.grad.any() for param in net.parameters())
        assert [id(view) for view in buffers.views] == before
        return []

    by_rank(program, {"bucket_size": 40, "use_distributed_optimizer": False})


# --- hooks -----------------------------------------------------------------------------------------------------------


def halve(param: Tensor) -> None:
    if param.grad is not None:
        param.grad.mul_(0.5)


@pytest.mark.parametrize("registered", ["after the wrapping", "after a step", "before a backward"])
@pytest.mark.parametrize("options", [{}, {"use_distributed_optimizer": False}, {"grad_buffer": "pooled"}])
def test_a_hook_that_changes_gradients_may_be_registered_at_any_time(options: dict[str, Any], registered: str) -> None:
    def program(model: Any, net: Net, optimizer: Any, rank: int) -> list[Tensor]:
        def register() -> None:
            for param in net.parameters():
                param.register_post_accumulate_grad_hook(halve)

        if registered == "after the wrapping":
            register()
        for step in range(3):
            optimizer.zero_grad()
            loss = model(batch(rank, step)).square().mean()
            if step == 1 and registered == "before a backward":
                register()
            loss.backward()
            optimizer.step()
            if step == 0 and registered == "after a step":
                register()
        return list(net.parameters())

    assert_as_under_torch_ddp(program, {"bucket_size": 40, **options})
