"""Averages by tokens: ranks with ragged batches and microbatches train as one process that has all of their tokens."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megastrategy import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer, GradScaler
from megastrategy.errors import LossTokensError
from tests.support.doubles import RecordingCollectives
from tests.support.ragged_tokens import assert_close, batch, count, token_model, train_on_all
from tests.support.ranks import run_ranks, try_ranks, with_instances

MODES: dict[str, dict[str, Any]] = {
    "reduce-scatter": {},
    "late": {"overlap_grad_reduce": False},
    "forward": {"overlap_param_gather": "forward"},
    "pooled": {"grad_buffer": "pooled"},
    "all-reduce": {"use_distributed_optimizer": False},
    "flattened": {
        "use_distributed_optimizer": False,
        "use_contiguous_buffers": False,
        "overlap_grad_reduce": False,
    },
    "sums apart": {"grad_wire_dtype": "fp16"},
}
WINDOWS = {1: [1, 1, 1, 1], 3: [3, 3, 3, 2]}
"""By microbatches a step; the last window of an epoch is a short one."""


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    # A large epsilon: Adam's first step is else the sign of the gradient, whatever its size.
    return torch.optim.AdamW(module.parameters(), lr=0.02, eps=1e-2)


class Setup:
    """A wrapped model on a rank."""

    def __init__(
        self,
        group: ProcessGroup,
        dtype: torch.dtype = torch.float32,
        *,
        recording: bool = False,
        make_optimizer: Callable[[nn.Module], torch.optim.Optimizer] = adamw,
        **options: Any,
    ) -> None:
        config = DistributedDataParallelConfig(**{"bucket_size": 60, **options})
        instances = config.num_distributed_optimizer_instances
        collectives = RecordingCollectives(group) if recording else None
        if instances > 1:
            collectives = with_instances(group, instances)  # type: ignore[assignment]
        self.rank = group.rank()
        self.collectives = collectives
        self.module = token_model().to(dtype)
        self.model = DistributedDataParallel(self.module, config, group, collectives=collectives)
        self.optimizer = DistributedOptimizer(make_optimizer(self.model), self.model)

    def backward(self, step: int, microbatch: int = 0, *, of: int = 1, counts: bool = True, sync: bool = True) -> None:
        ids, labels = batch(self.rank, step, microbatch)
        with contextlib.nullcontext() if sync else self.model.no_sync():
            if counts and microbatch % 2:
                self.model.loss_tokens(count(labels))
            loss = self.model(ids, labels, self.rank) / of
            if counts and not microbatch % 2:
                self.model.loss_tokens((labels != -100).sum())
            loss.backward()

    def step(self, step: int, microbatches: int, *, counts: bool = True) -> None:
        self.optimizer.zero_grad()
        for microbatch in range(microbatches):
            self.backward(step, microbatch, of=microbatches, counts=counts, sync=microbatch == microbatches - 1)

    def weights(self) -> dict[str, Tensor]:
        self.model.close()
        return {name: value.detach().clone() for name, value in self.module.state_dict().items()}

    def grads(self) -> list[Tensor | None]:
        return [self.model.full_grad(param) for param in self.module.parameters()]


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


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("mode", MODES)
def test_ragged_ranks_and_microbatches_train_as_one_process_with_all_tokens(
    mode: str, size: int, accumulate: int
) -> None:
    """In fp32, and with gradients that are rounded to fp16 on the wire within what that changes."""
    expected = train_on_all(size, WINDOWS[accumulate], adamw)
    relative = 2e-4 if mode == "sums apart" else 1e-6
    ours = run_ranks(size, lambda rank, group: train(rank, group, accumulate, **MODES[mode]))
    for weights in ours:
        assert_close(weights, expected, relative)
        assert all(torch.equal(weights[name], ours[0][name]) for name in weights), "ranks are equal"


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("mode", ["reduce-scatter", "pooled", "all-reduce"])
def test_with_clipping_and_in_fp64_to_its_last_digits(mode: str, accumulate: int) -> None:
    """A mean that is wrong by the smallest part shows."""
    options = {"dtype": torch.float64, "clip_norm": 0.05}
    expected = train_on_all(3, WINDOWS[accumulate], adamw, **options)
    for weights in run_ranks(3, lambda rank, group: train(rank, group, accumulate, **options, **MODES[mode])):
        assert_close(weights, expected, 1e-12)


def test_without_counts_it_is_another_mean() -> None:
    """And NaN from the first loss on that is a mean over nothing."""

    def run(rank: int, group: ProcessGroup, *, counts: bool, step: int) -> list[Tensor | None]:
        setup = Setup(group)
        setup.backward(step, counts=counts)
        return setup.grads()

    for step in (0, 1):
        counted, not_counted = (
            run_ranks(2, lambda rank, group, c=c, s=step: run(rank, group, counts=c, step=s))[0][0]
            for c in (True, False)
        )
        assert counted is not None
        assert not_counted is not None
        assert bool(not_counted.isnan().any()) == (step == 1)
        assert step == 1 or (counted - not_counted).norm() > 0.1 * counted.norm()


@pytest.mark.parametrize("accumulate", [1, 3])
def test_with_instances(accumulate: int) -> None:
    expected = train_on_all(4, WINDOWS[accumulate], adamw)
    options = {"num_distributed_optimizer_instances": 2}
    for weights in run_ranks(4, lambda rank, group: train(rank, group, accumulate, **options)):
        assert_close(weights, expected, 1e-6)


@pytest.mark.parametrize("mode", ["reduce-scatter", "pooled", "all-reduce"])
@pytest.mark.parametrize("sums", [{}, {"grad_reduce_in_fp32": False}], ids=["fp32 sums", "16-bit sums"])
def test_16_bit_weights(mode: str, sums: dict[str, Any]) -> None:
    """What four steps change differs by the rounding of weights and gradients, whose last bits are 2 ** -8 of them."""

    def change(weights: dict[str, Tensor]) -> Tensor:
        before = token_model().bfloat16().state_dict()
        return torch.cat([(weights[name].float() - value.float()).flatten() for name, value in before.items()])

    expected = change(train_on_all(2, WINDOWS[3], adamw))
    options = {"dtype": torch.bfloat16, **MODES[mode], **sums}
    for weights in run_ranks(2, lambda rank, group: train(rank, group, 3, **options)):
        assert (change(weights) - expected).norm() < 0.1 * expected.norm()


@pytest.mark.parametrize("mode", MODES)
def test_one_rank_averages_over_its_microbatches(mode: str) -> None:
    expected = train_on_all(1, WINDOWS[3], adamw)
    [weights] = run_ranks(1, lambda rank, group: train(rank, group, 3, **MODES[mode]))
    assert_close(weights, expected, 2e-4 if mode == "sums apart" else 1e-6)


# --- bits ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["reduce-scatter", "pooled", "all-reduce", "forward"])
def test_equal_counts_that_are_powers_of_two_change_no_bit(mode: str) -> None:
    def run(rank: int, group: ProcessGroup, num_tokens: int | None) -> dict[str, Tensor]:
        setup = Setup(group, **MODES[mode])
        for step in (0, 3, 4):
            setup.optimizer.zero_grad()
            for microbatch in range(2):
                ids, labels = batch(rank, step, microbatch)
                with contextlib.nullcontext() if microbatch else setup.model.no_sync():
                    if num_tokens is not None:
                        setup.model.loss_tokens(num_tokens)
                    setup.model(ids, labels, rank).backward()
            setup.optimizer.step()
        return setup.weights()

    expected = run_ranks(2, lambda rank, group: run(rank, group, None))
    for num_tokens in (1, 64, 4096):
        ours = run_ranks(2, lambda rank, group, n=num_tokens: run(rank, group, n))
        assert all(torch.equal(ours[0][name], value) for name, value in expected[0].items())


@pytest.mark.parametrize("mode", ["reduce-scatter", "pooled", "all-reduce"])
def test_a_run_that_resumes_has_the_same_bits(mode: str) -> None:
    """It begins with another unit than the run that it goes on from, and units are powers of two."""

    def run(rank: int, group: ProcessGroup, before: int) -> list[Tensor | None]:
        setup = Setup(group, **MODES[mode])
        for step in range(before):
            setup.step(step, 3)
        setup.step(9, 3)
        return setup.grads()

    fresh, later = (run_ranks(3, lambda rank, group, n=n: run(rank, group, n)) for n in (0, 2))
    for one, other in zip(fresh[0], later[0], strict=True):
        assert (one is None) == (other is None)
        assert one is None or torch.equal(one, other)  # type: ignore[arg-type]


# --- ranks and windows without tokens --------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_gradients_of_a_window_without_any_token_are_zeros(mode: str) -> None:
    def run(rank: int, group: ProcessGroup) -> None:
        setup = Setup(group, **MODES[mode])
        ids, labels = batch(rank, 0, 0)
        setup.model.loss_tokens(0)
        loss = setup.model(ids, torch.full_like(labels, -100), rank)
        assert loss.isnan()
        loss.backward()
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
        with pytest.raises(ValueError, match="loss_tokens: expected"):
            setup.model.loss_tokens(wrong)

    run_ranks(1, run)


# --- where gradients are read ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("reads", ["full_grad", "grad_norms", "grad_norm", "step", "unscale"])
@pytest.mark.parametrize("mode", ["reduce-scatter", "pooled", "all-reduce"])
def test_whoever_reads_gradients_first_has_the_mean_over_tokens(mode: str, reads: str) -> None:
    """And nobody after them a mean that was corrected twice, also where all backwards were under ``no_sync``."""

    def run(rank: int, group: ProcessGroup, *, sync: bool) -> list[Tensor | None]:
        setup = Setup(group, **MODES[mode])
        setup.optimizer.zero_grad()
        for microbatch in range(2):
            setup.backward(5, microbatch, of=2, sync=sync and microbatch == 1)
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
    for mine, theirs in zip(one[0], other[0], strict=True):
        assert (mine is None) == (theirs is None)
        if mine is not None and theirs is not None:
            torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-9)


def test_without_a_reduction_a_rank_steps_with_its_own_mean() -> None:
    """With all-reduce and ``no_sync`` alone, as under torch DDP."""
    expected = train_on_all(1, [3, 3], adamw)

    def run(rank: int, group: ProcessGroup) -> dict[str, Tensor]:
        setup = Setup(group, use_distributed_optimizer=False)
        for step in range(2):
            setup.optimizer.zero_grad()
            for microbatch in range(3):
                setup.backward(step, microbatch, of=3, sync=False)
            setup.optimizer.step()
        return setup.weights()

    assert_close(run_ranks(2, run)[0], expected, 1e-6)


# --- what is refused, on all ranks -----------------------------------------------------------------------------------


def refused(size: int, run: Callable[[Setup], None], match: str, **options: Any) -> None:
    """All ranks raise, with what each of them did, and go on with the next step."""

    def on_rank(rank: int, group: ProcessGroup) -> list[Tensor | None]:
        setup = Setup(group, **options)
        with pytest.raises(LossTokensError, match=match):
            run(setup)
        setup.step(7, 2)
        return setup.grads()

    def fresh(rank: int, group: ProcessGroup) -> list[Tensor | None]:
        setup = Setup(group, **options)
        setup.step(7, 2)
        return setup.grads()

    for one, other in zip(run_ranks(size, on_rank)[0], run_ranks(size, fresh)[0], strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-9)


STRICT = {"find_unused_parameters": False, "overlap_grad_reduce": False}


@pytest.mark.parametrize("mode", MODES)
def test_one_rank_counts_and_another_does_not(mode: str) -> None:
    def run(setup: Setup) -> None:
        setup.backward(0, counts=setup.rank != 1)

    refused(3, run, "rank 1 counted none.*rank 2 counted all", **MODES[mode])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("first", [True, False])
def test_a_microbatch_that_was_not_counted_beside_one_that_was(mode: str, first: bool) -> None:
    def run(setup: Setup) -> None:
        setup.backward(0, 0, counts=first, sync=False)
        setup.backward(0, 1, counts=not first)

    refused(2, run, "counted some of its losses and not others", **MODES[mode])


@pytest.mark.parametrize("mode", MODES)
def test_a_second_synchronised_backward_before_gradients_are_used(mode: str) -> None:
    def run(setup: Setup) -> None:
        setup.backward(0)
        setup.backward(1)

    refused(2, run, r"after a synchronised one, whose gradients were not used.*no_sync\(\)", **MODES[mode])


def test_gradients_that_are_dropped_in_part_between_two_microbatches() -> None:
    def run(setup: Setup) -> None:
        setup.backward(0, 0, sync=False)
        setup.module.twice.zero_grad()
        setup.backward(0, 1)

    refused(2, run, "dropped the gradients of some parameters between two microbatches")


class Dense(nn.Module):
    """All ranks use all of it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1))

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.layers(x).square().mean()
        return loss


@pytest.mark.parametrize("options", [STRICT, {"static_graph": True}, STRICT | {"bucket_size": 1}], ids=str)
def test_where_ranks_exchange_nothing_they_agree_to_count_in_the_first_backward(options: dict[str, Any]) -> None:
    """So no rank waits for an exchange that another does not take part in."""

    def begin(rank: int, group: ProcessGroup, counting: list[bool]) -> None:
        model = DistributedDataParallel(Dense(), DistributedDataParallelConfig(**options), group)
        for counts in counting:
            model.zero_grad()
            if counts:
                model.loss_tokens(rank + 1)
            model(torch.ones(2, 4)).backward()

    run_ranks(2, lambda rank, group: begin(rank, group, [True, True, True]))
    run_ranks(2, lambda rank, group: begin(rank, group, [False, False, False]))
    for by_rank, match in (
        ([[True], [False]], "rank 0 counted all.*rank 1 counted none"),
        ([[True, True], [True, False]], "rank 0 counted all.*rank 1 counted none"),
        ([[False, True], [False, True]], "for the first time after a synchronised backward"),
    ):
        found = try_ranks(2, lambda rank, group, c=by_rank: begin(rank, group, c[rank]))
        for error in found:
            assert isinstance(error, LossTokensError)
            with pytest.raises(LossTokensError, match=match):
                raise error


# --- what begins a window --------------------------------------------------------------------------------------------


def last_grads(size: int, before: Callable[[Setup], object], **options: Any) -> list[Tensor | None]:
    """Gradients of one counted window, after whatever comes before."""

    def run(rank: int, group: ProcessGroup) -> list[Tensor | None]:
        setup = Setup(group, **options)
        setup.optimizer.param_groups[0]["lr"] = 0.0  # steps are steps, and gradients stay comparable
        before(setup)
        for microbatch in range(2):
            setup.backward(6, microbatch, sync=microbatch == 1)
        return setup.grads()

    return run_ranks(size, run)[0]


def assert_same(one: list[Tensor | None], other: list[Tensor | None]) -> None:
    for mine, theirs in zip(one, other, strict=True):
        assert (mine is None) == (theirs is None)
        if mine is not None and theirs is not None:
            torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-9)


def drop_in_mid_window(setup: Setup) -> None:
    setup.backward(0, 0, sync=False)
    setup.backward(0, 1, sync=False)
    setup.optimizer.zero_grad()


def drop_raw(setup: Setup) -> None:
    setup.backward(0, 0, sync=False)
    setup.module.zero_grad()


def drop_final_raw(setup: Setup) -> None:
    setup.backward(0)
    setup.module.zero_grad()


def failing_backward(setup: Setup) -> None:
    ids, labels = batch(setup.rank, 0, 0)
    setup.model.loss_tokens(7)

    def fail(grad: Tensor) -> None:
        raise ZeroDivisionError

    handle = setup.module.embedding.weight.register_hook(fail)
    with pytest.raises(ZeroDivisionError):
        setup.model(ids, labels, setup.rank).backward()
    handle.remove()


def count_without_a_backward(setup: Setup) -> None:
    setup.model.loss_tokens(1000)


def uncounted_step(setup: Setup) -> None:
    setup.backward(0, counts=False)
    setup.optimizer.step()
    setup.optimizer.zero_grad()


def counted_and_uncounted_steps(setup: Setup) -> None:
    setup.step(0, 2)
    setup.optimizer.step()
    uncounted_step(setup)
    setup.step(1, 2)
    setup.optimizer.step()


def steps_without_a_drop(setup: Setup) -> None:
    """Of gradients that were used nobody asks for their mean with others, and what is kept is dropped in the end."""
    setup.step(0, 2)
    setup.optimizer.step()
    setup.backward(3)
    setup.optimizer.step()
    setup.optimizer.zero_grad()


def evaluation(setup: Setup) -> None:
    setup.module.eval()
    with torch.no_grad():
        ids, labels = batch(setup.rank, 0, 0)
        setup.model.loss_tokens(3)
        setup.model(ids, labels, setup.rank)
    setup.module.train()


def gradient_by_autograd(setup: Setup) -> None:
    """torch.autograd.grad's are not weighed: a penalty of them is part of a loss that is."""
    ids, labels = batch(setup.rank, 3, 0)
    weight = setup.module.twice.weight
    [alone] = torch.autograd.grad(setup.module(ids, labels, setup.rank), weight)
    setup.model.loss_tokens(100)
    [counted] = torch.autograd.grad(setup.module(ids, labels, setup.rank), weight)
    assert torch.equal(alone, counted)


WINDOW_BEGINS = [
    drop_in_mid_window,
    drop_raw,
    drop_final_raw,
    failing_backward,
    count_without_a_backward,
    uncounted_step,
    counted_and_uncounted_steps,
    steps_without_a_drop,
    evaluation,
    gradient_by_autograd,
]


@pytest.mark.parametrize("before", WINDOW_BEGINS, ids=lambda before: before.__name__)
@pytest.mark.parametrize("mode", ["reduce-scatter", "pooled", "all-reduce", "flattened"])
def test_a_window_has_the_counts_of_its_own_backwards(mode: str, before: Callable[[Setup], object]) -> None:
    def then_drop(setup: Setup) -> None:
        before(setup)
        if before is counted_and_uncounted_steps:
            setup.optimizer.zero_grad()

    assert_same(last_grads(2, then_drop, **MODES[mode]), last_grads(2, lambda setup: None, **MODES[mode]))


@pytest.mark.parametrize("who", ["model", "optimizer", "grads"])
@pytest.mark.parametrize("synced", [False, True])
@pytest.mark.parametrize("mode", ["reduce-scatter", "pooled", "all-reduce"])
def test_gradients_that_were_zeroed_in_place_are_gone(mode: str, synced: bool, who: str) -> None:
    def before(setup: Setup) -> None:
        setup.backward(0, sync=synced)
        if who == "grads":
            if not synced and mode != "pooled":
                setup.model.zero_grad()  # in-place changes of what is still accumulating are the user's own
                return
            for param in setup.module.parameters():
                if param.grad is not None:
                    param.grad.zero_()
        else:
            (setup.model if who == "model" else setup.optimizer).zero_grad(set_to_none=False)

    found = last_grads(2, before, **MODES[mode])
    for mine, theirs in zip(found, last_grads(2, lambda setup: None, **MODES[mode]), strict=True):
        if mine is not None and theirs is not None:
            torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-9)


def test_two_optimizers_that_take_turns_have_a_window_each() -> None:
    """As in a GAN: what the first has stepped with stays where it is, and is read by loggers, while the second's are
    reduced."""

    def run(rank: int, group: ProcessGroup) -> None:
        module = nn.ModuleDict({"first": Dense(), "second": Dense()})
        module.forward = lambda name, x: module[name](x)  # type: ignore[assignment]
        model = DistributedDataParallel(module, DistributedDataParallelConfig(), group)
        optimizers = {
            name: DistributedOptimizer(torch.optim.SGD(part.parameters(), lr=0.01), model)
            for name, part in module.items()
        }
        kept: dict[str, Tensor | None] = {}
        for step in range(3):
            for name in ("first", "second"):
                for other, part in module.items():
                    part.requires_grad_(other == name)
                optimizers[name].zero_grad()
                x = torch.full((2, 4), 1.0 + rank + step)
                expected = (
                    sum((r + 1) * grad_of(module[name], torch.full((2, 4), 1.0 + r + step)) for r in range(2)) / 3
                )
                model.loss_tokens(rank + 1)
                model(name, x).backward()
                found = model.full_grad(module[name].layers[0].weight)
                assert found is not None
                torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)
                if name == "second":
                    stayed = model.full_grad(module["first"].layers[0].weight)
                    torch.testing.assert_close(stayed, kept["first"], rtol=1e-6, atol=0.0)
                optimizers[name].step()
                kept[name] = found

    run_ranks(2, run)


def grad_of(module: nn.Module, x: Tensor) -> Tensor:
    weight = module.layers[0].weight  # type: ignore[union-attr,index]
    [grad] = torch.autograd.grad(module(x), weight)
    return grad


def test_parameters_that_join_later_and_those_that_stay_frozen() -> None:
    def run(rank: int, group: ProcessGroup) -> None:
        module = Dense()
        first = module.layers[0]
        first.requires_grad_(False)
        model = DistributedDataParallel(module, DistributedDataParallelConfig(bucket_size=1), group)
        for step in range(4):
            if step == 2:
                first.requires_grad_(True)
            model.zero_grad()
            inputs = [torch.full((2, 4), 1.0 + r) for r in range(2)]
            weight = module.layers[0 if step >= 2 else 2].weight
            expected = sum((r + 1) * torch.autograd.grad(module(inputs[r]), weight)[0] for r in range(2)) / 3
            model.loss_tokens(rank + 1)
            model(inputs[rank]).backward()
            torch.testing.assert_close(model.full_grad(weight), expected, rtol=1e-5, atol=1e-7)

    run_ranks(2, run)


# --- what it costs ---------------------------------------------------------------------------------------------------


def test_one_reduction_a_bucket_and_nothing_where_nobody_counts() -> None:
    def run(rank: int, group: ProcessGroup) -> None:
        setup = Setup(group, recording=True)
        assert isinstance(setup.collectives, RecordingCollectives)
        setup.step(0, 1, counts=False)
        weight = setup.module.twice.weight
        assert not torch.autograd.graph.get_gradient_edge(weight).node.metadata
        calls = []
        for counts in (False, True):
            setup.optimizer.zero_grad()
            setup.collectives.calls.clear()
            setup.step(4, 3, counts=counts)
            calls.append([(call.name, call.nbytes) for call in setup.collectives.calls])
        assert calls[1] == [*calls[0], ("all_reduce_max", 2 * 12)], "and the sums of both ranks, between hosts"

    run_ranks(2, run)


def test_a_counted_model_is_freed_and_closed_like_any() -> None:
    def run(rank: int, group: ProcessGroup) -> None:
        setup = Setup(group)
        setup.step(3, 1)
        ids, labels = batch(rank, 3, 0)
        kept_loss = setup.module(ids, labels, rank)  # its graph has the hooks
        module = setup.module
        alive = weakref.ref(setup.model)
        setup.model.close()
        weight = module.twice.weight
        module(ids, labels, rank).backward()
        [expected] = torch.autograd.grad(kept_loss, weight)
        assert weight.grad is not None
        assert torch.equal(weight.grad, expected), "a plain module again"
        del setup
        gc.collect()
        assert alive() is None

    run_ranks(1, run)
