"""Buckets that are filled in the order seen change nothing but that order.

The same training with ``overlap_grad_reduce=False`` keeps the order of registration.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.utils.checkpoint import checkpoint

from megastrategy import DistributedOptimizer
from tests.support.layers_in_any_order import Layers, adamw, batch, momentum, moves, wrap
from tests.support.ranks import run_ranks
from tests.support.training import assert_same_state


class UsedByTwoCheckpoints(Layers):
    """Its third layer is recomputed twice in a backward, by nested ones, so that its gradient comes in two parts."""

    def forward(self, x: Tensor) -> Tensor:
        for number in (5, 3, 2, 4, 3, 1, 0):
            if number == 3:
                x = x + checkpoint(self.layers[3], x, use_reentrant=True)
            else:
                x = x + torch.tanh(self.layers[number](x))
        return (self.scale * x).float().square().mean()


@pytest.mark.parametrize("sharded", [True, False])
def test_layer_with_late_grad_goes_last(sharded: bool) -> None:
    """It is complete at the end of backward only, as what is never used, and keeps no other bucket waiting."""

    def run(rank: int, group: ProcessGroup, moving: bool) -> list[Tensor]:
        module = UsedByTwoCheckpoints(reverse=True)
        options = {"overlap_grad_reduce": moving, "use_distributed_optimizer": sharded}
        model, events, _ = wrap(group, module, **options)
        optimizer = DistributedOptimizer(momentum(model), model)
        for step in range(4):
            model(batch(rank, step)).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert moves(events) == moving
        if moving:
            order = [model.layout.params[index].name for bucket in model.layout.buckets for index in bucket.params]
            assert sorted(order[-4:]) == ["layers.3.bias", "layers.3.weight", "never.bias", "never.weight"]
        return [param.detach().clone() for param in module.parameters()]

    ours, reference = (run_ranks(2, lambda rank, group, m=m: run(rank, group, m)) for m in (True, False))
    for mine, theirs in zip(ours, reference, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    assert all(map(torch.equal, *ours))


def test_graph_kept_over_the_move_gives_same_grads() -> None:
    """Its second backward begins after the parameters have got other memory, before they have got other values."""

    def run(rank: int, group: ProcessGroup, moving: bool) -> list[Tensor | None]:
        module = Layers(reverse=True)
        model, events, _ = wrap(group, module, overlap_grad_reduce=moving, grad_reduce_in_fp32=True)
        loss = model(batch(rank, 0))
        loss.backward(retain_graph=True)
        model.zero_grad()
        loss.backward()
        assert moves(events) == moving
        return [model.full_grad(param) for param in module.parameters()]

    ours, reference = (run_ranks(2, lambda rank, group, m=m: run(rank, group, m)) for m in (True, False))
    for mine, theirs in zip(ours, reference, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            assert (a is None) == (b is None)
            assert a is None or b is None or torch.equal(a, b)


# --- checkpoints do not notice ---------------------------------------------------------------------------------------


Saved = tuple[dict[str, Tensor], dict[str, Any], dict[str, Tensor]]
"""Weights, optimizer state and main params."""


def steps_between(
    make: Callable[[nn.Module], torch.optim.Optimizer],
    dtype: torch.dtype,
    steps: range,
    *,
    moving: bool,
    saved: Saved | None = None,
) -> tuple[Saved, Saved]:
    """The state saved after these steps, and the one saved after their first backward, before its step."""

    def run(rank: int, group: ProcessGroup) -> tuple[Saved, Saved]:
        module = Layers(reverse=True, dtype=dtype)
        if saved is not None:
            module.load_state_dict(saved[0])
        model, events, _ = wrap(group, module, overlap_grad_reduce=moving)
        optimizer = DistributedOptimizer(make(model), model)
        if saved is not None:
            optimizer.load_state_dict(saved[1])
            optimizer.load_main_params(saved[2])

        def save() -> Saved:
            weights = {name: value.clone() for name, value in module.state_dict().items()}
            return weights, optimizer.state_dict(), optimizer.main_params()

        at_first: Saved | None = None
        for step in steps:
            model(batch(rank, step, dtype)).backward()
            at_first = at_first or save()
            optimizer.step()
            optimizer.zero_grad()
        assert moves(events) == moving
        assert at_first is not None
        return save(), at_first

    return run_ranks(2, run)[0]


def assert_same_save(mine: Saved, theirs: Saved) -> None:
    for values, expected in ((mine[0], theirs[0]), (mine[2], theirs[2])):
        assert list(values) == list(expected)
        assert all(torch.equal(values[name], value) for name, value in expected.items())
    assert_same_state(mine[1], theirs[1])


@pytest.mark.parametrize(
    ("make", "dtype", "before", "after"), [(adamw, torch.float32, False, True), (momentum, torch.float32, True, False)]
)
def test_a_run_that_resumes_goes_on_to_the_bit(
    make: Callable[[nn.Module], torch.optim.Optimizer], dtype: torch.dtype, before: bool, after: bool
) -> None:
    """Saved from one plan and loaded into another: the state waits for the plan of the resumed run."""
    uninterrupted, _ = steps_between(make, dtype, range(6), moving=False)
    saved, _ = steps_between(make, dtype, range(3), moving=before)
    resumed, at_first = steps_between(make, dtype, range(3, 6), moving=after, saved=saved)
    assert_same_save(at_first, saved)
    assert_same_save(resumed, uninterrupted)
