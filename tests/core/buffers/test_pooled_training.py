"""grad_buffer="pooled" trains as persistent buffers do, whatever is done to gradients between backwards."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from megastrategy import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer, GradScaler
from tests.support.gradients import assert_equal, batch, grads_with_ddp, grads_with_ours
from tests.support.models import awkward_model, images, two_layers
from tests.support.pooled import POOLED, config, half, one_large
from tests.support.ranks import run_ranks
from tests.support.training import (
    Run,
    assert_close,
    assert_same_bits,
    assert_same_state,
    train_with_ddp,
    train_with_ours,
)

# --- training --------------------------------------------------------------------------------------------------------


@pytest.mark.sample(1)
@pytest.mark.parametrize("size", [2, 3])
def test_one_microbatch_a_step_has_the_bits_of_persistent_buffers(size: int) -> None:
    """With sums in the order of the ranks: on three ranks torch's and the ring's order is another."""
    fp32_sums = {"reduce_scatter_with_fp32_accumulation": True, "grad_reduce_in_fp32": False}
    run = Run(options=(("lr", 0.01), ("eps", 1e-4)), groups=3)
    if size == 2:
        assert_same_bits(train_with_ours(run, 2, config()), train_with_ddp(run, 2))
    assert_close(train_with_ours(run, size, config()), train_with_ddp(run, size), 1e-6)
    in_bf16 = Run(groups=3, dtype=torch.bfloat16)
    contiguous = train_with_ours(in_bf16, size, DistributedDataParallelConfig(bucket_size=200, **fp32_sums))
    for options in (fp32_sums, {"grad_reduce_in_fp32": False}):
        assert_same_bits(train_with_ours(in_bf16, size, config(**options)), contiguous)
    if size == 2:
        sent_as_fp32 = train_with_ours(in_bf16, 2, DistributedDataParallelConfig(bucket_size=200))
        assert_same_bits(train_with_ours(in_bf16, 2, config()), sent_as_fp32)


@pytest.mark.parametrize("size", [2, 3])
def test_accumulation_differs_only_by_rounding(size: int) -> None:
    run = Run(options=(("lr", 0.01), ("eps", 1e-4)), groups=3, accumulate=3)
    assert_close(train_with_ours(run, size, config()), train_with_ddp(run, size), 1e-6)


@pytest.mark.parametrize("size", [2, 3])
def test_sums_are_those_of_the_sent_values_in_fp32_to_the_bit(size: int) -> None:
    """bf16 gradients of several microbatches, by hand: over ranks in their order, then over microbatches."""
    numbers = range(4)

    def local(rank: int, number: int) -> list[Tensor]:
        module = one_large(torch.bfloat16)
        module(batch(rank, number).bfloat16()).square().sum().backward()
        return [param.grad.float() for param in module.parameters() if param.grad is not None]

    expected = [torch.zeros_like(grad) for grad in local(0, 0)]
    for number in numbers:
        by_rank = [local(rank, number) for rank in range(size)]
        for index, total in enumerate(expected):
            of_microbatch = torch.zeros_like(total)
            for rank in range(size):
                of_microbatch += by_rank[rank][index] * (1.0 / size)
            total += of_microbatch

    def run(rank: int, group: ProcessGroup) -> None:
        options = config(bucket_size=1000, grad_reduce_in_fp32=False)
        model = DistributedDataParallel(one_large(torch.bfloat16), options, group)
        for number in numbers:
            with model.no_sync():
                model(batch(rank, number).bfloat16()).square().sum().backward()
        for param, total in zip(model.module.parameters(), expected, strict=True):
            grad = model.full_grad(param)
            assert grad is not None
            assert grad.dtype == torch.float32
            assert torch.equal(grad, total)
        model.close()

    run_ranks(size, run)


# --- what users do between backwards ---------------------------------------------------------------------------------


def zero_grad_in_the_window(model: Any, rank: int) -> None:
    half(model, rank, 0, sync=False)
    model.zero_grad()
    half(model, rank, 1)


def zeroed_in_place_in_the_window(model: Any, rank: int) -> None:
    half(model, rank, 0, sync=False)
    model.zero_grad(set_to_none=False)
    half(model, rank, 1)


def written_before_the_window(model: Any, rank: int) -> None:
    """A tensor that replaces a gradient is added to, and reduced with it."""
    half(model, rank, 0)
    model.zero_grad()
    model.module[0].weight.grad = torch.full((33, 10), 2.0 + rank)
    half(model, rank, 1)


def replaced_between(model: Any, rank: int) -> None:
    """The last layer's gradient comes first in the next backward, the first layer's is replaced."""
    half(model, rank, 0)
    model.module[0].weight.grad = torch.full((33, 10), 2.0 + rank)
    half(model, rank, 1)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(
    "scenario",
    [zero_grad_in_the_window, zeroed_in_place_in_the_window, written_before_the_window, replaced_between],
    ids=lambda scenario: scenario.__name__,
)
def test_changes_of_gradients_between_backwards(scenario: Callable[[Any, int], None], size: int) -> None:
    ours = grads_with_ours(two_layers, scenario, size, **POOLED, bucket_size=1)
    assert_equal(ours, grads_with_ddp(two_layers, scenario, size), 1e-6)


@pytest.mark.parametrize("zeroes", [True, False])
def test_a_step_leaves_the_sums_where_they_are(zeroes: bool) -> None:
    """A second step finds them, and the next window adds to them unless they are zeroed."""

    def run(rank: int, group: ProcessGroup, ours: bool) -> list[Tensor]:
        module = two_layers()
        inner = torch.optim.SGD(module.parameters(), lr=0.01, momentum=0.9)
        model: Any = DistributedDataParallel(module, config(), group) if ours else TorchDDP(module, process_group=group)
        optimizer: Any = DistributedOptimizer(inner, model) if ours else inner
        for step in range(3):
            half(model, rank, step)
            optimizer.step()
            optimizer.step()
            if zeroes:
                optimizer.zero_grad()
        return [param.detach().clone() for param in module.parameters()]

    mine, theirs = (run_ranks(2, lambda rank, group, o=ours: run(rank, group, o)) for ours in (True, False))
    assert_equal(mine, theirs, 0.0 if zeroes else 1e-6)


class Parts(nn.Module):
    """Uses the parts whose numbers are passed."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(4)
        self.parts = nn.ModuleList(nn.Linear(10, 5) for _ in range(4))
        for param in self.parameters():
            param.data = torch.randn(param.shape, generator=generator) * 0.3

    def forward(self, x: Tensor, used: tuple[int, ...]) -> Tensor:
        return sum(self.parts[number](x).square().sum() for number in used)  # type: ignore[return-value]


@pytest.mark.parametrize("static", [False, True])
def test_parameters_that_some_ranks_or_some_microbatches_do_not_use(static: bool) -> None:
    """No rank uses part 3, and the optimizer skips it although it has weight decay."""
    used = {0: [(0, 1), (0, 1)], 1: [(0, 2), (0, 2)]} if static else {0: [(0, 1), (0,)], 1: [(0,), (2,)]}

    def train(rank: int, model: Any, optimizer: Any) -> None:
        for step in range(3):
            optimizer.zero_grad()
            for microbatch, parts in enumerate(used[rank]):
                model.require_backward_grad_sync = microbatch == 1
                model(batch(rank, 10 * step + microbatch), parts).backward()
            optimizer.step()

    def run(rank: int, group: ProcessGroup) -> list[Tensor]:
        module = Parts()
        model = DistributedDataParallel(module, config(bucket_size=1, static_graph=static), group)
        optimizer = DistributedOptimizer(torch.optim.SGD(module.parameters(), 0.01, 0.9, weight_decay=0.1), model)
        train(rank, model, optimizer)
        return [param.detach().clone() for param in module.parameters()]

    def reference(rank: int, group: ProcessGroup) -> list[Tensor]:
        module = Parts()
        # all microbatches of a step as one forward, so that torch's search finds all that is used
        model = TorchDDP(module, process_group=group, find_unused_parameters=True)
        optimizer = torch.optim.SGD(module.parameters(), 0.01, 0.9, weight_decay=0.1)
        for step in range(3):
            optimizer.zero_grad()
            x = torch.stack([batch(rank, 10 * step + microbatch) for microbatch in range(2)])
            model(x, used[rank]).backward()
            optimizer.step()
        return [param.detach().clone() for param in module.parameters()]

    def each_part_of_its_microbatch(self: Parts, x: Tensor, used: list[tuple[int, ...]]) -> Tensor:
        if isinstance(used, tuple):
            return own_forward(self, x, used)
        return sum(own_forward(self, part_x, part_used) for part_x, part_used in zip(x, used, strict=True))  # type: ignore[return-value]

    own_forward = Parts.forward
    ours = run_ranks(2, run)
    Parts.forward = each_part_of_its_microbatch  # type: ignore[method-assign, assignment]
    try:
        expected = run_ranks(2, reference)
    finally:
        Parts.forward = own_forward  # type: ignore[method-assign]
    assert_equal(ours, expected, 1e-6)
    assert torch.equal(ours[0][6], Parts().parts[3].weight), "used by no rank"
    assert not torch.equal(ours[0][4], Parts().parts[2].weight), "used by rank 1"


def test_a_backward_that_broke_off_leaves_nothing_in_the_sums() -> None:
    """Nor in the staging buffers, with buckets on the wire; earlier gradients of the window are dropped with it."""

    def broken(model: Any, rank: int) -> None:
        half(model, rank, 7, sync=False)

        def fail(grad: Tensor) -> None:
            raise ZeroDivisionError("on purpose")

        hook = model.module[0].weight.register_hook(fail)
        with pytest.raises(ZeroDivisionError):
            half(model, rank, 8)
        hook.remove()
        half(model, rank, 0)

    def whole(model: Any, rank: int) -> None:
        half(model, rank, 0)

    for bucket_size in (1, 10**9):
        ours = grads_with_ours(two_layers, broken, **POOLED, bucket_size=bucket_size)
        assert_equal(ours, grads_with_ddp(two_layers, whole))


def test_scaling_clipping_and_unfreezing() -> None:
    """fp16 gradients with a scaler, a step that is skipped, a norm, and a layer that joins in mid-training."""

    def run(rank: int, group: ProcessGroup) -> list[tuple[list[Tensor], list[float]]]:
        results = []
        for options in ({}, POOLED):
            module = two_layers()
            module[0].requires_grad_(False)
            model = DistributedDataParallel(module, DistributedDataParallelConfig(bucket_size=100, **options), group)
            optimizer = DistributedOptimizer(torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9), model)
            scaler, norms = GradScaler("cpu", init_scale=2.0**10), []
            for step in range(6):
                if step == 3:
                    module[0].requires_grad_(True)
                optimizer.zero_grad()
                loss = model(batch(rank, step)).square().mean()
                scaler.scale(loss * (float("inf") if step == 2 and rank == 1 else 1.0)).backward()
                scaler.unscale_(optimizer)
                norms.append(optimizer.clip_grad_norm_(0.01).item() if step != 2 else 0.0)
                scaler.step(optimizer)
                scaler.update()
            assert scaler.get_scale() == 2.0**9
            results.append(([param.detach().clone() for param in module.parameters()], norms))
            model.close()
        return results

    for (weights, norms), (pooled_weights, pooled_norms) in run_ranks(2, run):
        assert norms == pooled_norms
        assert all(map(torch.equal, weights, pooled_weights))


def start_leg(module: nn.Module, options: dict[str, Any] | None, group: ProcessGroup) -> tuple[Any, Any]:
    inner = torch.optim.AdamW(module.parameters(), lr=0.01)
    if options is None:
        return TorchDDP(module, process_group=group, find_unused_parameters=True), inner
    model = DistributedDataParallel(module, DistributedDataParallelConfig(bucket_size=200, **options), group)
    return model, DistributedOptimizer(inner, model)


def train_leg(rank: int, model: Any, optimizer: Any, leg: int) -> None:
    for step in range(3 * leg, 3 * leg + 3):
        optimizer.zero_grad()
        model(images(rank, step, 0), step, rank).backward()
        optimizer.step()


def test_checkpoints_cross() -> None:
    """Three steps each as pooled, contiguous and torch DDP, one after the other by checkpoint, are 15 of torch DDP."""
    legs: list[dict[str, Any] | None] = [POOLED, {}, POOLED, None, POOLED]

    def run(rank: int, group: ProcessGroup) -> tuple[dict[str, Tensor], dict[str, Any]]:
        weights, state = awkward_model().state_dict(), None
        for leg, options in enumerate(legs):
            module = awkward_model()
            module.load_state_dict(weights)
            model, optimizer = start_leg(module, options, group)
            if state is not None:
                optimizer.load_state_dict(copy.deepcopy(state))
            train_leg(rank, model, optimizer, leg)
            saved = optimizer.state_dict()
            if rank == 0:
                shared[leg] = saved
            barrier.wait(30)
            state = shared[leg]
            weights = {name: value.detach().clone() for name, value in module.state_dict().items()}
            if options is not None:
                model.close()
        assert state is not None
        return weights, state

    def reference(rank: int, group: ProcessGroup) -> tuple[dict[str, Tensor], dict[str, Any]]:
        module = awkward_model()
        model = TorchDDP(module, process_group=group, find_unused_parameters=True)
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
        for leg in range(len(legs)):
            train_leg(rank, model, optimizer, leg)
        return module.state_dict(), optimizer.state_dict()

    shared: dict[int, dict[str, Any]] = {}
    barrier = threading.Barrier(2)
    for (weights, state), (expected, expected_state) in zip(run_ranks(2, run), run_ranks(2, reference), strict=True):
        assert all(torch.equal(weights[name], value) for name, value in expected.items())
        assert_same_state(state, expected_state)
