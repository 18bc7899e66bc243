"""Backwards inside others, gradients that come in two parts or not at all, and backwards that broke off."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.utils.checkpoint import checkpoint

from megastrategy import DistributedDataParallel, DistributedDataParallelConfig
from megastrategy.core.errors import BucketInFlightError, UnusedParameterError
from tests.support.doubles import DelayingCollectives
from tests.support.gradients import (
    assert_equal,
    batch,
    grads_with_ddp,
    grads_with_ours,
    one_backward,
)
from tests.support.models import two_layers
from tests.support.ranks import run_ranks


def recomputed(function: Callable[[Tensor], Tensor], x: Tensor, reentrant: bool) -> Tensor:
    """torch's checkpoint. Without its saving of the random state: two threads at the default generator deadlock there,
    one waiting for the generator with the GIL, one the other way round.
    """
    result: Tensor = checkpoint(function, x, use_reentrant=reentrant, preserve_rng_state=False)
    return result


WAYS = [{}, {"use_distributed_optimizer": False}, {"grad_buffer": "pooled"}]


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


@pytest.mark.parametrize(
    ("reentrant", "engine"),
    [
        (True, {"use_distributed_optimizer": True, "bucket_size": 1}),
        (False, {"use_distributed_optimizer": True, "bucket_size": 1000000000, "overlap_grad_reduce": False}),
        (True, {"use_distributed_optimizer": False, "bucket_size": 1}),
        (True, {"use_distributed_optimizer": False, "use_contiguous_buffers": False, "overlap_grad_reduce": False}),
        (True, {"use_distributed_optimizer": True, "bucket_size": 1, "grad_buffer": "pooled"}),
    ],
    ids=str,
)
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


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_grad_of_bucket_in_flight_is_not_lost(way: dict[str, Any]) -> None:
    """On one rank only, and with the reduction held up, so that the bucket is surely on the wire."""

    def run(rank: int, group: ProcessGroup) -> list[Tensor | None]:
        module = two_layers()
        config = DistributedDataParallelConfig(bucket_size=1, **way)
        collectives = DelayingCollectives(group, 0.05)
        model = DistributedDataParallel(module, config, collectives=collectives)
        model(batch(rank)).sum().backward()  # at whose end the buckets are made
        model.zero_grad()
        collectives.calls.clear()
        hidden = torch.tanh(module[0](batch(rank)))
        if rank == 1:
            # a second backward, to the last layer's weight, inside the first, after that layer's bucket was launched
            hidden.register_hook(lambda _: second_backward(module))
        model.watch_backward(loss := module[2](hidden).square().sum())
        loss.backward()
        reductions = collectives.named("reduce_scatter", "reduce_scatter_into", "all_reduce")
        assert len(reductions) > len(model.layout.buckets), "one was reduced twice"
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


def test_late_grad_raises_where_ranks_do_not_agree() -> None:
    def run(rank: int, group: ProcessGroup) -> None:
        module = two_layers()
        config = DistributedDataParallelConfig(bucket_size=1, static_graph=True)
        model = DistributedDataParallel(module, config, group)
        model(batch(rank)).square().sum().backward()
        model.zero_grad()
        hidden = torch.tanh(module[0](batch(rank)))
        hidden.register_hook(lambda _: second_backward(module))
        model.watch_backward(loss := module[2](hidden).square().sum())
        with pytest.raises(BucketInFlightError, match=r"(?s)'2\.weight'.*static_graph off"):
            loss.backward()

    run_ranks(2, run)


class Skips(nn.Module):
    """One of its two layers only where it is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.idle = nn.Linear(10, 1), nn.Linear(10, 1)

    def forward(self, x: Tensor, both: bool) -> Tensor:
        return (self.used(x) + (self.idle(x) if both else 0.0)).sum()


def test_promised_params_without_grad_are_named() -> None:
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


def _raise(grad: Tensor) -> Tensor:
    raise ZeroDivisionError("in the middle of backward")


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_a_backward_that_is_tried_again_after_an_error(way: dict[str, Any]) -> None:
    def retried(model: Any, rank: int) -> None:
        out = model(batch(rank))
        handle = out.register_hook(_raise)
        with pytest.raises(ZeroDivisionError):
            out.square().sum().backward(retain_graph=True)
        handle.remove()
        loss = model(batch(rank)).square().sum()
        tries = []

        def once(grad: Tensor) -> None:
            tries.append(1)
            if len(tries) == 1:
                raise ValueError("the first time")

        # when the last layer's gradients are in the buffer, and its buckets on the wire
        model.module[0].weight.register_hook(once)
        with pytest.raises(ValueError, match="the first time"):
            loss.backward(retain_graph=True)
        loss.backward()

    ours = grads_with_ours(two_layers, retried, **way, bucket_size=1)
    assert_equal(ours, grads_with_ddp(two_layers, one_backward))
