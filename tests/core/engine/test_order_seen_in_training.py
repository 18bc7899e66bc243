"""Buckets that are filled in the order seen change nothing but that order: losses, norms, weights, checkpoints.

The same training with ``overlap_grad_reduce=False`` never moves, and is what training that does is compared with.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.utils.checkpoint import checkpoint

from megastrategy import DistributedOptimizer
from tests.support.layers_in_any_order import Layers, adamw, amsgrad, batch, groups, momentum, moves, wrap
from tests.support.ranks import run_ranks
from tests.support.training import assert_same_state


def nadam(model: nn.Module) -> torch.optim.Optimizer:
    """Two counters of shape () for each parameter."""
    return torch.optim.NAdam(model.parameters(), lr=0.01)


def adagrad(model: nn.Module) -> torch.optim.Optimizer:
    """Has state before the first step."""
    return torch.optim.Adagrad(model.parameters(), lr=0.02, initial_accumulator_value=0.1)


def fused(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.02, fused=True)


@dataclasses.dataclass
class Case:
    """How a model is trained. ``resume_at``: the step before which all is saved, and loaded into a new model."""

    make: Callable[[nn.Module], torch.optim.Optimizer] = adamw
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    accumulate: int = 1
    step_every: int = 1
    clip_norm: float | None = None
    schedule: bool = False
    freeze_at: int | None = None


@dataclasses.dataclass
class Outcome:
    """The final state of a rank: copies."""

    weights: dict[str, Tensor]
    strides: dict[str, tuple[int, ...]]
    losses: list[float]
    norms: list[Tensor]
    state: dict[str, Any]
    main_params: dict[str, Tensor]


def train(case: Case, size: int, *, moving: bool, steps: int = 8) -> list[Outcome]:
    def run(rank: int, group: ProcessGroup) -> Outcome:
        module = Layers(reverse=True, dtype=case.dtype)
        model, events, _ = wrap(group, module, **{**case.options, "overlap_grad_reduce": moving})
        optimizer = DistributedOptimizer(case.make(model), model)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer.optimizer, 0.8) if case.schedule else None
        losses, norms = [], []
        for step in range(steps):
            if step == case.freeze_at:
                module.layers[2].requires_grad_(False)
            for microbatch in range(case.accumulate):
                with model.no_sync() if microbatch < case.accumulate - 1 else contextlib.nullcontext():
                    loss = model(batch(rank, 10 * step + microbatch, case.dtype)) / case.accumulate
                    loss.backward()
            losses.append(loss.item())
            if step % case.step_every == case.step_every - 1:
                if case.clip_norm is not None:
                    norms.append(optimizer.clip_grad_norm_(case.clip_norm))
                optimizer.step()
                optimizer.zero_grad()
                if scheduler is not None:
                    scheduler.step()
        assert moves(events) == moving
        state, main_params = optimizer.state_dict(), optimizer.main_params()
        strides = {name: param.stride() for name, param in module.named_parameters()}
        model.close()
        weights = {name: param.detach().clone() for name, param in module.named_parameters()}
        return Outcome(weights, strides, losses, norms, state, main_params)

    return run_ranks(size, run)


def assert_same_bits(ours: list[Outcome], reference: list[Outcome]) -> None:
    for mine, theirs in zip(ours, reference, strict=True):
        assert mine.losses == theirs.losses
        assert mine.strides == theirs.strides
        for kind in ("weights", "main_params"):
            values, expected = getattr(mine, kind), getattr(theirs, kind)
            assert values.keys() == expected.keys()
            for name, value in expected.items():
                assert torch.equal(values[name], value), f"{kind}: {name}"
    assert_same_state(ours[0].state, reference[0].state)


BF16 = {"dtype": torch.bfloat16}
SUMS = {"grad_reduce_in_fp32": False, "reduce_scatter_with_fp32_accumulation": True}
CASES = {
    "AdamW": Case(),
    "Adagrad": Case(make=adagrad),
    "fused": Case(make=fused),
    "main params and groups": Case(make=groups, schedule=True, **BF16),
    "accumulation": Case(make=nadam, accumulate=3),
    "several backwards a step, fp32 sums": Case(step_every=3, options=SUMS, **BF16),
    "frozen on the way": Case(freeze_at=3),
    "gathered under forward": Case(make=momentum, options={"overlap_param_gather": True}),
    "rounded for the wire": Case(make=amsgrad, options={"grad_wire_dtype": "bf16"}),
    "static graph": Case(options={"static_graph": True, "check_for_nan_in_grad": True}),
    "all-reduce, main params": Case(
        options={"use_distributed_optimizer": False}, make=groups, step_every=2, accumulate=2, **BF16
    ),
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_training_is_the_same_to_the_bit(case: Case) -> None:
    assert_same_bits(train(case, 2, moving=True), train(case, 2, moving=False))


@pytest.mark.sample(1)
@pytest.mark.parametrize("case", [CASES["main params and groups"], Case(step_every=3)])
def test_on_three_ranks_all_have_the_same_weights(case: Case) -> None:
    """Sums over three ranks depend on an element's place in its bucket, in the last bit."""
    ours, reference = train(case, 3, moving=True), train(case, 3, moving=False)
    for outcome in ours:
        for name, value in outcome.weights.items():
            assert torch.equal(value, ours[0].weights[name])
            torch.testing.assert_close(value, reference[0].weights[name], rtol=1e-2, atol=1e-3)


def test_several_backwards_a_step_add_up_to_the_same() -> None:
    """Within rounding: who owns an element adds its own gradient to what was reduced before it adds the others'."""
    ours, reference = (train(Case(make=momentum, step_every=3), 2, moving=moving) for moving in (True, False))
    for mine, theirs in zip(ours, reference, strict=True):
        for name, value in theirs.weights.items():
            torch.testing.assert_close(mine.weights[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_are_within_a_millionth_and_so_is_what_is_clipped(dtype: torch.dtype) -> None:
    case = Case(make=momentum, clip_norm=0.05, dtype=dtype)
    ours, reference = train(case, 2, moving=True, steps=4), train(case, 2, moving=False, steps=4)
    assert len(ours[0].norms) == 4
    for mine, theirs in zip(ours, reference, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine.norms, ours[0].norms, strict=True)), "one norm on all ranks"
        assert float(mine.norms[0]) == pytest.approx(float(theirs.norms[0]), rel=1e-6)
        rounding = 1e-6 if dtype == torch.float32 else 1e-2
        for name, value in theirs.weights.items():
            torch.testing.assert_close(mine.weights[name], value, rtol=rounding, atol=1e-6)


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
def test_a_layer_whose_gradient_comes_in_two_parts_goes_last(sharded: bool) -> None:
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


def test_parameters_may_join_after_the_move() -> None:
    """To the bit what it is without one."""

    def run(rank: int, group: ProcessGroup, moving: bool) -> list[Tensor]:
        module = Layers(reverse=True)
        module.layers[2].requires_grad_(False)
        model, events, _ = wrap(group, module, overlap_grad_reduce=moving)
        optimizer = DistributedOptimizer(adamw(model), model)
        for step in range(5):
            module.layers[2].requires_grad_(step >= 2)
            model(batch(rank, step)).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert moves(events) == moving
        return [param.detach().clone() for param in module.parameters()]

    ours, reference = (run_ranks(2, lambda rank, group, m=m: run(rank, group, m)) for m in (True, False))
    for mine, theirs in zip(ours, reference, strict=True):
        assert all(map(torch.equal, mine, theirs))


class Adversaries(nn.Module):
    """Two models in one, registered and run in opposite orders, as a GAN's: each has an optimizer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = Layers(reverse=True), Layers(reverse=True)

    def forward(self, x: Tensor, which: str) -> Tensor:
        loss: Tensor = getattr(self, which)(x)
        return loss


def test_several_optimizers_of_one_model_move_with_it() -> None:
    """The first backward reaches the parameters of one of them; a third holds parameters of both."""

    def run(rank: int, group: ProcessGroup, moving: bool) -> tuple[list[Tensor], list[dict[str, Any]]]:
        module = Adversaries()
        model, events, _ = wrap(group, module, overlap_grad_reduce=moving)
        some = [*module.one.layers[1].parameters(), *module.other.layers[4].parameters()]
        optimizers = {
            "one": DistributedOptimizer(adamw(module.one), model),
            "other": DistributedOptimizer(momentum(module.other), model),
            "both": DistributedOptimizer(torch.optim.Adam(some, lr=0.01), model),
        }
        for step in range(6):
            which = ("one", "other")[step % 2]
            model(batch(rank, step), which).backward()
            optimizers[which].step()
            if step % 3 == 2:
                optimizers["both"].step()
            model.zero_grad()
        assert moves(events) == moving
        return [p.detach().clone() for p in module.parameters()], [o.state_dict() for o in optimizers.values()]

    ours = run_ranks(2, lambda rank, group: run(rank, group, True))
    reference = run_ranks(2, lambda rank, group: run(rank, group, False))
    for (mine, _), (theirs, _) in zip(ours, reference, strict=True):
        assert all(map(torch.equal, mine, theirs))
    for mine_state, their_state in zip(ours[0][1], reference[0][1], strict=True):
        assert_same_state(mine_state, their_state)


def test_a_forward_that_one_rank_runs_for_itself_is_its_own_business() -> None:
    """The move is where the ranks meet anyway, and not in a forward."""

    def run(rank: int, group: ProcessGroup) -> list[Tensor]:
        module = Layers(reverse=True)
        model, events, _ = wrap(group, module)
        optimizer = DistributedOptimizer(adamw(model), model)
        for step in range(3):
            if rank == 1:
                model(batch(rank, 50 + step))
            model(batch(rank, step)).backward()
            if rank == 1:
                model(batch(rank, 60 + step))
            optimizer.step()
            optimizer.zero_grad()
        assert moves(events) == 1
        return [param.detach().clone() for param in module.parameters()]

    first, second = run_ranks(2, run)
    assert all(map(torch.equal, first, second))


def test_a_graph_that_is_kept_over_the_move_gives_the_same_gradients_again() -> None:
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
    case: Case, size: int, first: int, end: int, *, moving: bool, saved: Saved | None = None
) -> tuple[Saved, Saved]:
    """The state saved after these steps, and the one saved after their first backward, before its step."""

    def run(rank: int, group: ProcessGroup) -> tuple[Saved, Saved]:
        module = Layers(reverse=True, dtype=case.dtype)
        if saved is not None:
            module.load_state_dict(saved[0])
        model, events, _ = wrap(group, module, overlap_grad_reduce=moving)
        optimizer = DistributedOptimizer(case.make(model), model)
        if saved is not None:
            optimizer.load_state_dict(saved[1])
            optimizer.load_main_params(saved[2])

        def save() -> Saved:
            weights = {name: value.clone() for name, value in module.state_dict().items()}
            return weights, optimizer.state_dict(), optimizer.main_params()

        at_first: Saved | None = None
        for step in range(first, end):
            model(batch(rank, step, case.dtype)).backward()
            at_first = at_first or save()
            optimizer.step()
            optimizer.zero_grad()
        assert moves(events) == moving
        assert at_first is not None
        return save(), at_first

    return run_ranks(size, run)[0]


def assert_same_save(mine: Saved, theirs: Saved) -> None:
    for values, expected in ((mine[0], theirs[0]), (mine[2], theirs[2])):
        assert list(values) == list(expected)
        assert all(torch.equal(values[name], value) for name, value in expected.items())
    assert_same_state(mine[1], theirs[1])


RESUMED = {"AdamW": Case(), "momentum": Case(make=momentum), "main params": Case(make=groups, dtype=torch.bfloat16)}


@pytest.mark.sample(2)
@pytest.mark.parametrize("case", RESUMED.values(), ids=RESUMED)
@pytest.mark.parametrize(("before", "after"), [(False, True), (True, False), (True, True)])
def test_a_run_that_resumes_goes_on_to_the_bit(case: Case, before: bool, after: bool) -> None:
    """Saved from one plan and loaded into another: the state waits for the plan of the resumed run."""
    uninterrupted, _ = steps_between(case, 2, 0, 6, moving=False)
    saved, _ = steps_between(case, 2, 0, 3, moving=before)
    resumed, moved = steps_between(case, 2, 3, 6, moving=after, saved=saved)
    assert_same_save(moved, saved)
    assert_same_save(resumed, uninterrupted)
