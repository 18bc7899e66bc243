"""What ``.grad`` is, and what several backwards, zeroing and user code do to it: compared with torch DDP."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils.checkpoint import checkpoint

from megastrategy import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from megastrategy.core.errors import BucketInFlightError, UnusedParameterError
from tests.support.doubles import DelayingCollectives, RecordingCollectives
from tests.support.models import two_layers
from tests.support.ranks import RankError, run_ranks

Scenario = Callable[[Any, int], None]
"""Runs forwards and backwards on a wrapped model, on a rank."""


def batch(rank: int, number: int = 0) -> Tensor:
    return torch.randn(4, 10, generator=torch.Generator().manual_seed(100 * rank + number))


def grads_with_ddp(make: Callable[[], nn.Module], scenario: Scenario, size: int = 2, **options: Any) -> list[list[Any]]:
    def run(rank: int, group: ProcessGroup) -> list[Any]:
        module = make()
        scenario(TorchDDP(module, process_group=group, **options), rank)
        return [None if param.grad is None else param.grad.clone() for param in module.parameters()]

    return run_ranks(size, run)


def grads_with_ours(
    make: Callable[[], nn.Module], scenario: Scenario, size: int = 2, **options: Any
) -> list[list[Any]]:
    def run(rank: int, group: ProcessGroup) -> list[Any]:
        module = make()
        model = DistributedDataParallel(module, DistributedDataParallelConfig(**options), group)
        scenario(model, rank)
        grads = [model.full_grad(param) for param in module.parameters() if param.requires_grad]
        if options.get("use_distributed_optimizer", True) and size > 1:
            assert all(param.grad is None for param in module.parameters()), "a shard is never shown as a gradient"
        model.close()
        assert all(param.grad is None for param in module.parameters())
        return grads

    return run_ranks(size, run)


def assert_equal(ours: list[list[Any]], reference: list[list[Any]], relative: float = 0.0) -> None:
    """Absent where absent, and equal: to the bit, or within ``relative`` of the largest element."""
    for mine, theirs in zip(ours, reference, strict=True):
        for number, (here, there) in enumerate(zip(mine, theirs, strict=True)):
            assert (here is None) == (there is None), f"parameter {number}"
            if there is not None:
                bound = relative * there.abs().max().item()
                torch.testing.assert_close(here, there, rtol=0, atol=bound, msg=lambda m, n=number: f"{n}: {m}")


def one_backward(model: Any, rank: int) -> None:
    model(batch(rank)).square().sum().backward()


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
    """What Lightning does when it validates in the middle of an accumulation window."""
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
ENGINES = [
    {"use_distributed_optimizer": True, "bucket_size": 1},
    {"use_distributed_optimizer": True, "bucket_size": 10**9, "overlap_grad_reduce": False},
    {"use_distributed_optimizer": False, "bucket_size": 1},
    {"use_distributed_optimizer": False, "use_contiguous_buffers": False, "overlap_grad_reduce": False},
]


@pytest.mark.parametrize("engine", ENGINES, ids=["sharded", "sharded_late", "all_reduce", "flattened"])
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_gradients_equal_torch_ddp(scenario: Scenario, engine: dict[str, Any]) -> None:
    # To add to a mean that is spread over the ranks, it is multiplied by their number and divided again, on its owner;
    # torch DDP adds the mean to every rank's gradient and takes the mean of that, which rounds elsewhere.
    rounds_elsewhere = scenario in ADD_TO_REDUCED and engine["use_distributed_optimizer"]
    ours, reference = grads_with_ours(two_layers, scenario, **engine), grads_with_ddp(two_layers, scenario)
    assert_equal(ours, reference, 1e-6 if rounds_elsewhere else 0.0)


@pytest.mark.parametrize("sharded", [True, False])
def test_several_synchronised_backwards_on_three_ranks(sharded: bool) -> None:
    ours = grads_with_ours(two_layers, several_synchronised, 3, use_distributed_optimizer=sharded, bucket_size=1)
    reference = grads_with_ddp(two_layers, several_synchronised, 3)
    for mine, theirs in zip(ours, reference, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6)


def recomputed(function: Callable[[Tensor], Tensor], x: Tensor, reentrant: bool) -> Tensor:
    """torch's checkpoint. Without its saving of the random state: two threads at the default generator deadlock there,
    one waiting for the generator with the GIL, one the other way round.
    """
    result: Tensor = checkpoint(function, x, use_reentrant=reentrant, preserve_rng_state=False)
    return result


class Checkpointed(nn.Module):
    """A layer in two re-entrant checkpoints, so that its gradient comes in two parts, in two nested backwards."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.inner = nn.Linear(10, 10)
        self.unused = nn.Linear(3, 3)
        self.outer = nn.Linear(10, 10)
        with torch.no_grad():
            for param in self.parameters():
                param.copy_(torch.randn(param.shape, generator=generator) * 0.3)
        self._reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.outer(x))
        for _ in range(2):
            x = recomputed(lambda y: torch.tanh(self.inner(y)), x, self._reentrant)
        return x


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("engine", ENGINES, ids=["sharded", "sharded_late", "all_reduce", "flattened"])
def test_a_layer_in_two_checkpoints(reentrant: bool, engine: dict[str, Any]) -> None:
    """torch DDP needs static_graph for the re-entrant kind; the plain model is the same function, and the reference."""

    def steps(model: Any, rank: int) -> None:
        for number in range(3):  # the second and third know the layer as one that comes twice
            model.zero_grad()
            model(batch(rank, number).requires_grad_()).square().sum().backward()

    def plain() -> nn.Module:
        module = Checkpointed(reentrant)
        module.forward = lambda x: torch.tanh(module.inner(torch.tanh(module.inner(torch.tanh(module.outer(x))))))  # type: ignore[method-assign]
        return module

    ours = grads_with_ours(lambda: Checkpointed(reentrant), steps, **engine)
    reference = grads_with_ddp(plain, steps, find_unused_parameters=True)
    for mine, theirs in zip(ours, reference, strict=True):
        for here, there in zip(mine, theirs, strict=True):
            assert (here is None) == (there is None)
            if there is not None:
                torch.testing.assert_close(here, there, rtol=1e-5, atol=1e-6)


def second_backward(module: Any) -> None:
    """Gives the last layer's weight a gradient of 5 more."""
    with torch.enable_grad():
        (module[2].weight.sum() * 5.0).backward()


@pytest.mark.parametrize("sharded", [True, False])
def test_a_gradient_that_comes_while_its_bucket_is_in_flight_is_not_lost(sharded: bool) -> None:
    """On one rank only, and with the reduction held up, so that the bucket is surely on the wire."""

    def run(rank: int, group: ProcessGroup) -> list[Tensor | None]:
        module = two_layers()
        config = DistributedDataParallelConfig(bucket_size=1, use_distributed_optimizer=sharded)
        model = DistributedDataParallel(module, config, collectives=DelayingCollectives(group, 0.05))
        hidden = torch.tanh(module[0](batch(rank)))
        if rank == 1:
            # a second backward, to the last layer's weight, inside the first, after that layer's bucket was launched
            hidden.register_hook(lambda _: second_backward(module))
        model.watch_backward(loss := module[2](hidden).square().sum())
        loss.backward()
        grads = [model.full_grad(param) for param in module.parameters()]
        model.close()
        return grads

    plain = []
    for rank in range(2):
        module = two_layers()
        module(batch(rank)).square().sum().backward()
        plain.append([param.grad.clone() for param in module.parameters() if param.grad is not None])
    expected = [(a + b) / 2 for a, b in zip(*plain, strict=True)]
    expected[2] += 2.5
    for grads in run_ranks(2, run):
        torch.testing.assert_close(grads, expected)


def test_a_bucket_that_was_late_once_waits_from_then_on() -> None:
    """So that only the first step pays for reducing it twice."""

    def run(rank: int, group: ProcessGroup) -> list[int]:
        module = two_layers()
        collectives = RecordingCollectives(group)
        model = DistributedDataParallel(module, DistributedDataParallelConfig(bucket_size=1), collectives=collectives)
        counts = []
        for number in range(3):
            collectives.calls.clear()
            model.zero_grad()
            hidden = torch.tanh(module[0](batch(rank, number)))
            hidden.register_hook(lambda _: second_backward(module))
            module[2](hidden).square().sum().backward()
            counts.append(len(collectives.named("reduce_scatter")) - len(model.layout.buckets))
        model.close()
        return counts

    for counts in run_ranks(2, run):
        assert counts == [1, 0, 0], "reductions beyond one a bucket"


def test_a_gradient_in_flight_is_an_error_where_the_ranks_do_not_agree() -> None:
    def run(rank: int, group: ProcessGroup) -> None:
        module = two_layers()
        config = DistributedDataParallelConfig(bucket_size=1, static_graph=True)
        model = DistributedDataParallel(module, config, group)
        model(batch(rank)).square().sum().backward()
        model.zero_grad()
        hidden = torch.tanh(module[0](batch(rank)))
        hidden.register_hook(lambda _: second_backward(module))
        with pytest.raises(BucketInFlightError, match=r"'2\.weight'.*static_graph off"):
            module[2](hidden).square().sum().backward()

    run_ranks(2, run)


def test_promised_parameters_without_a_gradient_are_named() -> None:
    class Skips(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.idle = nn.Linear(10, 1), nn.Linear(10, 1)

        def forward(self, x: Tensor, both: bool) -> Tensor:
            return (self.used(x) + (self.idle(x) if both else 0.0)).sum()

    def never(rank: int, group: ProcessGroup) -> None:
        model = DistributedDataParallel(Skips(), DistributedDataParallelConfig(find_unused_parameters=False), group)
        with pytest.raises(UnusedParameterError, match=r"2 parameter.*'idle.weight', 'idle.bias'"):
            model(batch(rank), False).backward()

    def later(rank: int, group: ProcessGroup) -> None:
        model = DistributedDataParallel(Skips(), DistributedDataParallelConfig(static_graph=True), group)
        model(batch(rank), False).backward()
        model.zero_grad()
        with pytest.raises(UnusedParameterError, match=r"received a gradient.*static_graph=True"):
            model(batch(rank), True).backward()

    run_ranks(2, never)
    run_ranks(2, later)


def test_all_reduce_shows_gradients_until_zeroed_and_none_where_unused() -> None:
    def run(rank: int, group: ProcessGroup) -> None:
        module = two_layers()
        module.register_parameter("idle", nn.Parameter(torch.ones(3)))
        model = DistributedDataParallel(module, DistributedDataParallelConfig(use_distributed_optimizer=False), group)
        one_backward(model, rank)
        weight = module[0].weight
        before = weight.grad
        assert before is not None
        assert module.idle.grad is None
        DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model).step()
        assert weight.grad is before, "a step leaves gradients alone"
        model.zero_grad()
        assert weight.grad is None
        one_backward(model, rank)
        assert weight.grad is before, "the same memory is used again"
        model.zero_grad(set_to_none=False)
        assert not weight.grad.any()

    run_ranks(2, run)


@pytest.mark.parametrize("sharded", [True, False])
def test_autograd_adds_into_the_buffer_without_a_copy(sharded: bool) -> None:
    def run(rank: int, group: ProcessGroup) -> None:
        module = two_layers()
        model = DistributedDataParallel(module, DistributedDataParallelConfig(use_distributed_optimizer=sharded), group)
        flat = model.grad_buffers.flats[0]  # type: ignore[attr-defined]
        with model.no_sync():
            for _ in range(2):
                one_backward(model, rank)
                for param in module.parameters():
                    assert param.grad is not None
                    assert flat.data_ptr() <= param.grad.data_ptr() < flat.data_ptr() + flat.nbytes

    run_ranks(2, run)


def test_a_backward_that_raised_leaves_nothing_behind() -> None:
    def run(rank: int, group: ProcessGroup) -> list[Tensor | None]:
        module = two_layers()
        model = DistributedDataParallel(module, DistributedDataParallelConfig(bucket_size=1), group)
        out = model(batch(rank, 5))
        handle = module[0].weight.register_hook(_raise)
        with pytest.raises(ZeroDivisionError):
            out.square().sum().backward()
        handle.remove()
        one_backward(model, rank)
        return [model.full_grad(param) for param in module.parameters()]

    assert_equal(run_ranks(2, run), grads_with_ddp(two_layers, one_backward))


def _raise(grad: Tensor) -> Tensor:
    raise ZeroDivisionError("in the middle of backward")


def test_a_parameter_frozen_for_a_while_is_unused_for_a_while() -> None:
    """Lightning's toggle_optimizer switches requires_grad off and on between backwards."""

    def toggled(model: Any, rank: int) -> None:
        model.module[0].requires_grad_(False)
        model(batch(rank)).square().sum().backward()
        model.zero_grad()
        model.module[0].requires_grad_(True)
        model(batch(rank)).square().sum().backward()

    ours = grads_with_ours(two_layers, toggled, bucket_size=1)
    reference = grads_with_ddp(two_layers, one_backward)
    assert_equal(ours, reference)


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


@pytest.mark.parametrize("engine", ENGINES, ids=["sharded", "sharded_late", "all_reduce", "flattened"])
@pytest.mark.parametrize("clip", [False, True])
def test_gradients_written_before_the_step_are_those_of_the_step(engine: dict[str, Any], clip: bool) -> None:
    def run(rank: int, group: ProcessGroup, ours: bool) -> list[Tensor]:
        module = two_layers()
        model: Any = TorchDDP(module, process_group=group)
        optimizer: Any = torch.optim.Adam(module.parameters(), lr=0.1)
        if ours:
            model = DistributedDataParallel(module, DistributedDataParallelConfig(**engine), group)
            optimizer = DistributedOptimizer(torch.optim.Adam(module.parameters(), lr=0.1), model)
        for number in range(2):
            optimizer.zero_grad()
            model(batch(rank, number)).square().sum().backward()
            module[0].weight.grad = torch.full_like(module[0].weight, 0.3)
            if clip and ours:
                optimizer.clip_grad_value_(0.1)
            elif clip:
                torch.nn.utils.clip_grad_value_(module.parameters(), 0.1)
            optimizer.step()
        return [param.detach().clone() for param in module.parameters()]

    ours, reference = (run_ranks(2, lambda r, g, mine=mine: run(r, g, mine)) for mine in (True, False))
    assert_equal(ours, reference)


def test_zeroing_in_place_reaches_a_gradient_that_was_reassigned() -> None:
    def halved(model: Any, rank: int) -> None:
        for number in range(3):
            model(batch(rank, number)).square().sum().backward()
            for param in model.module.parameters():
                param.grad = param.grad * 0.5
            if number < 2:
                model.zero_grad(set_to_none=False)

    ours = grads_with_ours(two_layers, halved, use_distributed_optimizer=False)
    assert_equal(ours, grads_with_ddp(two_layers, halved))


@pytest.mark.parametrize("engine", ENGINES, ids=["sharded", "sharded_late", "all_reduce", "flattened"])
def test_gradients_from_before_the_wrapping_are_kept(engine: dict[str, Any]) -> None:
    def with_grads() -> nn.Module:
        module = two_layers()
        module(torch.ones(2, 10)).sum().backward()
        return module

    assert_equal(grads_with_ours(with_grads, one_backward, **engine), grads_with_ddp(with_grads, one_backward))


@pytest.mark.parametrize("sharded", [True, False])
def test_a_backward_that_is_tried_again_after_an_error(sharded: bool) -> None:
    def retried(model: Any, rank: int) -> None:
        out = model(batch(rank))
        handle = out.register_hook(_raise)
        with pytest.raises(ZeroDivisionError):
            out.square().sum().backward(retain_graph=True)
        handle.remove()
        out = model(batch(rank))
        loss = out.square().sum()
        tries = []

        def once(grad: Tensor) -> None:
            tries.append(1)
            if len(tries) == 1:
                raise ValueError("the first time")

        out.register_hook(once)
        with pytest.raises(ValueError, match="the first time"):
            loss.backward(retain_graph=True)
        loss.backward()

    ours = grads_with_ours(two_layers, retried, use_distributed_optimizer=sharded, bucket_size=1)
    assert_equal(ours, grads_with_ddp(two_layers, one_backward))


@dataclasses.dataclass
class Output:
    """What some models return; torch's pytree does not look inside."""

    hidden: Tensor
    name: str = "output"


@pytest.mark.parametrize("sharded", [True, False])
def test_a_backward_of_one_output_inside_that_of_another(sharded: bool) -> None:
    def nested(model: Any, rank: int) -> None:
        first, second = model(batch(rank, 0)), model(batch(rank, 1))
        tries: list[int] = []

        def nest(grad: Tensor) -> None:
            tries.append(1)
            if len(tries) == 1:
                with torch.enable_grad():
                    second.square().sum().backward()

        model.module[2].weight.register_hook(nest)
        first.square().sum().backward()

    def one_after_the_other(model: Any, rank: int) -> None:
        (model(batch(rank, 0)).square().sum() + model(batch(rank, 1)).square().sum()).backward()

    ours = grads_with_ours(two_layers, nested, use_distributed_optimizer=sharded, bucket_size=1)
    assert_equal(ours, grads_with_ddp(two_layers, one_after_the_other), 1e-6)


def test_outputs_in_a_dataclass_with_reentrant_checkpoints() -> None:
    """The end of the outermost backward is known, so the promise of a gradient for every parameter is judged there."""

    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(10, 10) for _ in range(3))

        def forward(self, x: Tensor) -> Output:
            for layer in self.layers:
                x = recomputed(layer, x, True)
            return Output(x)

    def run(rank: int, group: ProcessGroup) -> None:
        config = DistributedDataParallelConfig(find_unused_parameters=False, bucket_size=1)
        model = DistributedDataParallel(Wrapped(), config, group)
        model(batch(rank).requires_grad_()).hidden.sum().backward()

    run_ranks(2, run)


def test_full_grad_wants_a_parameter_of_the_model() -> None:
    def run(rank: int, group: ProcessGroup) -> None:
        model = DistributedDataParallel(two_layers(), process_group=group)
        with pytest.raises(ValueError, match="not a trainable parameter"):
            model.full_grad(nn.Parameter(torch.ones(2)))

    run_ranks(2, run)


def test_the_harness_reports_errors_of_ranks() -> None:
    with pytest.raises(RankError, match="rank 1"):
        run_ranks(2, lambda rank, group: None if rank == 0 else 1 / 0)
