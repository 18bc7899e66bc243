"""Everything that a layout cuts moves to another one: to any of the same parameters, at any time between two
backwards; or nothing does, on any rank."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megastrategy import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from megastrategy.core.buffers.contiguous_buffers import ContiguousGradBuffers
from megastrategy.core.engine.relayout import relayout
from megastrategy.core.errors import CollectiveError
from megastrategy.core.events import EventKind
from megastrategy.core.layout.build import build_layout
from megastrategy.core.layout.layout import BufferLayout
from megastrategy.core.layout.memory import memory_use
from tests.core.properties.test_memory import bytes_of
from tests.support.doubles import FailingCollectives
from tests.support.gradients import assert_stands_in
from tests.support.held_tensors import tensors_in
from tests.support.layers_in_any_order import Layers, adamw, amsgrad, batch, groups, momentum, moves, wrap
from tests.support.ranks import run_ranks, try_ranks
from tests.support.training import assert_same_state

SUMS = {"grad_reduce_in_fp32": False, "reduce_scatter_with_fp32_accumulation": True}


def other_layout(model: DistributedDataParallel, bucket_size: int = 500) -> BufferLayout:
    """A layout of the same parameters, in the order of registration and in buckets of another size."""
    config = DistributedDataParallelConfig(
        bucket_size=bucket_size,
        use_distributed_optimizer=model.layout.num_shards > 1,
        grad_reduce_in_fp32=model.config.grad_reduce_in_fp32,
        reduce_scatter_with_fp32_accumulation=model.config.reduce_scatter_with_fp32_accumulation,
        grad_wire_dtype=model.config.grad_wire_dtype,
        offload_optimizer_states=model.config.offload_optimizer_states,
    )
    return build_layout(model.layout.params, config, model.layout.dp_size, range(len(model.engine.params)))


def trained(
    make: Callable[[nn.Module], torch.optim.Optimizer],
    dtype: torch.dtype,
    when: str | None,
    options: dict[str, Any],
    *,
    size: int = 2,
    joins: bool = False,
) -> list[tuple[dict[str, Tensor], dict[str, Any], dict[str, Tensor], list[Tensor | None]]]:
    """Six steps of a model that does not move by itself, and once by hand in step 3: ``when`` in it, or never. In step
    2 parameters may join."""

    def run(rank: int, group: ProcessGroup) -> Any:
        module = Layers(reverse=False, dtype=dtype)
        module.layers[0].requires_grad_(not joins)
        model, events, _ = wrap(group, module, overlap_grad_reduce=False, **options)
        optimizer = DistributedOptimizer(make(model), model)
        for step in range(6):
            if step == 2:
                module.layers[0].requires_grad_(True)
            if step == 3 and when == "before forward":
                assert relayout(model.engine, other_layout(model))
            loss = model(batch(rank, step, dtype))
            if step == 3 and when == "before backward":
                assert relayout(model.engine, other_layout(model))
            loss.backward()
            if step == 3 and when == "before step":
                assert relayout(model.engine, other_layout(model))
            if step == 3:
                grads = [model.full_grad(param) for param in module.parameters()]
            optimizer.step()
            if step == 3 and when == "before zero_grad":
                assert relayout(model.engine, other_layout(model))
            optimizer.zero_grad()
        assert moves(events) == (when is not None)
        if when is not None:
            assert model.layout.buckets[0].params[0] == 0
        state, main_params = optimizer.state_dict(), optimizer.main_params()
        model.close()
        return {name: value.clone() for name, value in module.state_dict().items()}, state, main_params, grads

    return run_ranks(size, run)


def assert_same(ours: Any, reference: Any) -> None:
    for (weights, _, main_params, grads), (expected, _, their_main_params, their_grads) in zip(
        ours, reference, strict=True
    ):
        assert all(torch.equal(weights[name], value) for name, value in expected.items())
        assert main_params.keys() == their_main_params.keys()
        assert all(torch.equal(main_params[name], value) for name, value in their_main_params.items())
        for mine, theirs in zip(grads, their_grads, strict=True):
            assert (mine is None) == (theirs is None)
            assert mine is None or torch.equal(mine, theirs)
    assert_same_state(ours[0][1], reference[0][1])


MOMENTS = ["before forward", "before backward", "before step", "before zero_grad"]
F32, BF16 = torch.float32, torch.bfloat16


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("make", "dtype", "options"),
    [
        (amsgrad, F32, {}),
        (momentum, F32, {"overlap_param_gather": True}),
        (groups, BF16, {"overlap_param_gather": True}),
        (groups, BF16, SUMS),
        (adamw, F32, {"grad_wire_dtype": "bf16"}),
        (momentum, BF16, {"offload_optimizer_states": True}),
        (adamw, BF16, {"use_distributed_optimizer": False}),
    ],
    ids=["amsgrad", "momentum, gathers under way", "main params", "fp32 sums", "rounded", "on the host", "all-reduce"],
)
def test_training_does_not_notice_when_it_was(
    make: Callable[[nn.Module], torch.optim.Optimizer], dtype: torch.dtype, options: dict[str, Any]
) -> None:
    reference = trained(make, dtype, None, options)
    for when in MOMENTS:
        assert_same(trained(make, dtype, when, options), reference)


@pytest.mark.sample(2)
@pytest.mark.parametrize("when", MOMENTS)
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_parameters_that_had_joined_find_their_place_among_the_others(when: str, dtype: torch.dtype) -> None:
    reference = trained(amsgrad, dtype, None, {}, joins=True)
    assert_same(trained(amsgrad, dtype, when, {}, joins=True), reference)


@pytest.mark.parametrize("steps_again", [True, False])
def test_gradients_that_were_stepped_with_before_a_move_are_there_after_it(steps_again: bool) -> None:
    """A second step finds them, and the next backward adds to them, since none were zeroed."""

    def run(rank: int, group: ProcessGroup, moving: bool) -> list[Tensor]:
        module = Layers(reverse=False)
        model, _, _ = wrap(group, module, overlap_grad_reduce=False)
        optimizer = DistributedOptimizer(momentum(model), model)
        model(batch(rank, 0)).backward()
        optimizer.step()
        if moving:
            assert relayout(model.engine, other_layout(model))
        for name, param in module.named_parameters():
            assert_stands_in(param, not name.startswith("never"))
        if steps_again:
            optimizer.step()
        model(batch(rank, 1)).backward()
        optimizer.step()
        return [param.detach().clone() for param in module.parameters()]

    ours, reference = (run_ranks(2, lambda rank, group, m=m: run(rank, group, m)) for m in (True, False))
    for mine, theirs in zip(ours, reference, strict=True):
        # the owner adds its own part of the second gradient to the mean first, and after the move is another rank
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-6)


def test_of_three_ranks_each_has_its_new_third() -> None:
    """The state gathered right after the move equals the state before it."""

    def run(rank: int, group: ProcessGroup) -> None:
        model, _, _ = wrap(group, Layers(reverse=False, dtype=BF16), overlap_grad_reduce=False)
        optimizer = DistributedOptimizer(groups(model), model)
        for step in range(2):
            model(batch(rank, step, BF16)).backward()
            optimizer.step()
        owned = [model.layout.owned_range(index, rank) for index in range(len(model.engine.params))]
        weights = [param.detach().clone() for param in model.engine.params]
        state, main_params = optimizer.state_dict(), optimizer.main_params()
        assert relayout(model.engine, other_layout(model))
        assert [model.layout.owned_range(index, rank) for index in range(len(model.engine.params))] != owned
        assert all(map(torch.equal, weights, (param.detach() for param in model.engine.params)))
        assert_same_state(optimizer.state_dict(), state)
        moved = optimizer.main_params()
        assert len(moved) == (len(model.engine.params) if rank == 0 else 0)
        assert all(torch.equal(moved[name], value) for name, value in main_params.items())
        for index, shard in optimizer._impl.shard_set.shards.items():
            start, end = model.layout.owned_range(index, rank) or (0, 0)
            assert shard.numel == end - start

    run_ranks(3, run)


@pytest.mark.parametrize("sharded", [True, False])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_what_is_held_afterwards_is_the_new_layouts_formula(dtype: torch.dtype, sharded: bool) -> None:
    def run(rank: int, group: ProcessGroup) -> None:
        model, events, _ = wrap(group, Layers(reverse=True, dtype=dtype), use_distributed_optimizer=sharded)
        optimizer = DistributedOptimizer(adamw(model), model)
        assert isinstance(model.engine.grad_buffers, ContiguousGradBuffers)
        buffers = [model.engine.grad_buffers, *([model.engine.param_buffers] if model.engine.param_buffers else [])]
        old = [weakref.ref(flat) for buffer in buffers for flat in buffer.flats]
        old += [weakref.ref(shard.main) for shard in optimizer._impl.shard_set.shards.values() if sharded]
        before = model.layout
        del buffers
        for step in range(2):
            model(batch(rank, step, dtype)).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert moves(events) == 1
        gc.collect()
        assert [reference() for reference in old] == [None] * len(old), "the old buffers and shards are gone"
        flats = model.engine.param_buffers.flats if model.engine.param_buffers is not None else []
        params = bytes_of([*model.engine.params, *flats])
        grads = tensors_in(model.engine.grad_buffers)
        state = [shard.main for shard in optimizer._impl.shard_set.shards.values() if shard.main.dtype != dtype]
        state += [v for values in optimizer.state.values() for name, v in values.items() if name != "step"]
        used = [i for i, spec in enumerate(model.layout.params) if not spec.name.startswith("never")]
        use, unused = memory_use(model.layout, rank, state_tensors=2), 0
        for index in set(range(len(model.engine.params))).difference(used):  # no state, but main params
            start, end = model.layout.owned_range(index, rank) or (0, 0)
            unused += 2 * 4 * (end - start)
        assert model.layout != before
        assert (params, bytes_of(grads)) == (use.param_bytes, use.grad_bytes)
        assert bytes_of(state) == use.state_bytes - unused

    run_ranks(2, run)


def test_an_optimizer_that_is_gone_is_left_out() -> None:
    def run(rank: int, group: ProcessGroup) -> None:
        model, _, _ = wrap(group, Layers(reverse=False), overlap_grad_reduce=False)
        gone = DistributedOptimizer(adamw(model), model)
        optimizer = DistributedOptimizer(momentum(model), model)
        model(batch(rank, 0)).backward()
        gone.step()
        optimizer.step()
        alive = weakref.ref(gone._impl.shard_set)
        del gone
        gc.collect()
        group.barrier().wait()  # while a thread collects, another's call returns at once
        gc.collect()
        assert alive() is None
        state = optimizer.state_dict()
        assert relayout(model.engine, other_layout(model))
        assert_same_state(optimizer.state_dict(), state)

    run_ranks(2, run)


# --- or nothing moves ------------------------------------------------------------------------------------------------


class CountsItself(torch.optim.SGD):
    """Keeps a number of its calls, which is state of no tensor."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)
        self.calls = 0

    def step(self, closure: Any = None) -> Any:
        self.calls += 1
        return super().step(closure)


class KeepsFunction(torch.optim.SGD):
    """Keeps an object with each tensor that cannot be sent."""

    def step(self, closure: Any = None) -> Any:
        for param in (param for group in self.param_groups for param in group["params"]):
            self.state[param].setdefault("function", print)
        return super().step(closure)


def untouched(model: DistributedDataParallel, optimizer: DistributedOptimizer) -> list[Any]:
    """The state that a move would change."""
    layout: Any = model.layout
    assert isinstance(model.engine.grad_buffers, ContiguousGradBuffers)
    flats = [
        *model.engine.grad_buffers.flats,
        *(model.engine.param_buffers.flats if model.engine.param_buffers else []),
    ]
    mains = [shard.main for shard in optimizer._impl.shard_set.shards.values()]
    return [
        layout,
        [t.data_ptr() for t in (*flats, *mains, *model.engine.params)],
        # As bits: what is undefined after a reduction may be NaN.
        [t.view(torch.uint8).tolist() for t in (*flats, *mains)],
    ]


def test_an_optimizer_that_may_keep_more_than_state_of_tensors_keeps_all_where_it_is() -> None:
    """Also if it is one of two."""

    def run(rank: int, group: ProcessGroup) -> None:
        model, events, _ = wrap(group, Layers(reverse=True))
        optimizer = DistributedOptimizer(adamw(model), model)
        special = DistributedOptimizer(CountsItself(model.parameters()), model)
        places = untouched(model, optimizer)[:2]
        for step in range(2):
            model(batch(rank, step)).backward()
            assert untouched(model, optimizer)[:2] == places
            optimizer.step()
            special.step()
        assert moves(events) == 0
        assert not relayout(model.engine, other_layout(model))

    run_ranks(2, run)


def test_state_that_is_neither_of_an_element_nor_a_number_keeps_all_where_it_is() -> None:
    def run(rank: int, group: ProcessGroup) -> None:
        model, _, _ = wrap(group, Layers(reverse=False), overlap_grad_reduce=False)
        optimizer = DistributedOptimizer(KeepsFunction(model.parameters(), lr=0.1), model)
        model(batch(rank, 0)).backward()
        optimizer.step()
        places = untouched(model, optimizer)[:2]
        assert not relayout(model.engine, other_layout(model))
        assert untouched(model, optimizer)[:2] == places

    run_ranks(2, run)


@pytest.mark.sample(1)
@pytest.mark.parametrize("number", [1, 3, 8, 15])
def test_a_rank_that_fails_in_a_move_ends_all_and_leaves_what_was(number: int) -> None:
    """Failures are in four exchanges: of the kinds of state, of the first gathered state, of one in the middle, and in
    the last, in which each rank learns that all have everything."""
    kept: dict[int, tuple[list[Any], list[Any]]] = {}
    counts: dict[int, int] = {}

    def run(rank: int, group: ProcessGroup) -> None:
        module = Layers(reverse=False, dtype=BF16)
        collectives = FailingCollectives(group)
        config = DistributedDataParallelConfig(bucket_size=500, overlap_grad_reduce=False)
        model = DistributedDataParallel(module, config, collectives=collectives)
        optimizer = DistributedOptimizer(adamw(model), model)
        for step in range(2):
            model(batch(rank, step, BF16)).backward()
            optimizer.step()
        model(batch(rank, 2, BF16)).backward()
        before = untouched(model, optimizer)
        collectives.fail_at(number if rank == 1 else 0)
        collectives.calls.clear()
        try:
            relayout(model.engine, other_layout(model, 150))
        finally:
            counts[rank] = len(collectives.calls)
            kept[rank] = before, untouched(model, optimizer)

    outcomes = try_ranks(2, run, timeout_s=10)
    assert isinstance(outcomes[1], RuntimeError)
    assert str(outcomes[1]) == "out of luck"
    assert isinstance(outcomes[0], CollectiveError)
    for before, after in kept.values():
        assert after == before
    assert counts[1] == number - 1
    assert number < 15 or counts[0] == 15, "the last of them"


def test_a_rank_that_fails_while_buckets_take_their_order_ends_all() -> None:
    """The error comes out of ``backward()``."""

    def run(rank: int, group: ProcessGroup) -> None:
        collectives = FailingCollectives(group)
        begun: list[bool] = []

        def listener(event: Any) -> None:
            if event.kind is EventKind.WAIT_END and not begun:
                begun.append(True)
                collectives.fail_at(5 if rank == 1 else 0)

        config = DistributedDataParallelConfig(bucket_size=150)
        model = DistributedDataParallel(Layers(reverse=True), config, collectives=collectives, listener=listener)
        optimizer = DistributedOptimizer(adamw(model), model)
        model(batch(rank, 0)).backward()
        optimizer.step()

    outcomes = try_ranks(2, run, timeout_s=5)
    assert isinstance(outcomes[1], RuntimeError)
    assert isinstance(outcomes[0], CollectiveError)
