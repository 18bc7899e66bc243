"""Everything that a layout cuts moves to another one: to any of the same parameters, at any time between two
backwards; or nothing does, on any rank."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from megastrategy.core.buffers.contiguous_buffers import ContiguousGradBuffers
from megastrategy.core.engine.relayout import relayout
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megastrategy import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from megastrategy.core.errors import CollectiveError
from megastrategy.core.events import EventKind
from megastrategy.core.layout.build import build_layout
from megastrategy.core.layout.layout import BufferLayout
from megastrategy.core.layout.memory import memory_use
from tests.core.properties.test_memory import bytes_of
from tests.support.doubles import FailingCollectives
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
) -> list[tuple[dict[str, Tensor], dict[str, Any], dict[str, Tensor], list[Tensor | None]]]:
    """Four steps of a model that does not move by itself, and once by hand before the first: ``when``, or never."""

    def run(rank: int, group: ProcessGroup) -> Any:
        module = Layers(reverse=False, dtype=dtype)
        model, events, _ = wrap(group, module, overlap_grad_reduce=False, **options)
        optimizer = DistributedOptimizer(make(model), model)
        for step in range(4):
            if step == 0 and when == "before forward":
                assert relayout(model.engine, other_layout(model))
            loss = model(batch(rank, step, dtype))
            if step == 0 and when == "before backward":
                assert relayout(model.engine, other_layout(model))
            loss.backward()
            if step == 0 and when == "before step":
                assert relayout(model.engine, other_layout(model))
            if step == 0:
                grads = [model.full_grad(param) for param in module.parameters()]
            optimizer.step()
            optimizer.zero_grad()
        assert moves(events) == (when is not None)
        if when is not None:
            assert model.layout.buckets[0].params[0] == 0
        state, main_params = optimizer.state_dict(), optimizer.main_params()
        model.close()
        return {name: value.clone() for name, value in module.state_dict().items()}, state, main_params, grads

    return run_ranks(2, run)


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


MOMENTS = ["before forward", "before backward", "before step"]
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


def test_of_three_ranks_each_has_its_new_third() -> None:
    def run(rank: int, group: ProcessGroup) -> None:
        model, _, _ = wrap(group, Layers(reverse=False, dtype=BF16), overlap_grad_reduce=False)
        optimizer = DistributedOptimizer(groups(model), model)
        model(batch(rank, 0, BF16)).backward()
        owned = [model.layout.owned_range(index, rank) for index in range(len(model.engine.params))]
        weights = [param.detach().clone() for param in model.engine.params]
        grads = [model.full_grad(param) for param in model.engine.params]
        main_params = optimizer.main_params()
        assert relayout(model.engine, other_layout(model))
        assert [model.layout.owned_range(index, rank) for index in range(len(model.engine.params))] != owned
        assert all(map(torch.equal, weights, (param.detach() for param in model.engine.params)))
        for param, grad in zip(model.engine.params, grads, strict=True):
            moved_grad = model.full_grad(param)
            assert moved_grad is grad is None or torch.equal(moved_grad, grad)
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


# --- or nothing moves ------------------------------------------------------------------------------------------------


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


def after_a_step(model: DistributedDataParallel, optimizer: DistributedOptimizer, rank: int) -> None:
    model(batch(rank, 0)).backward()
    optimizer.step()


def with_a_loaded_state(model: DistributedDataParallel, optimizer: DistributedOptimizer, rank: int) -> None:
    state = optimizer.state_dict()
    numels = [param.shape for group in optimizer.param_groups for param in group["params"]]
    state["state"] = {number: {"momentum_buffer": torch.ones(shape)} for number, shape in enumerate(numels)}
    optimizer.load_state_dict(state)


def with_a_gradient_on_one_rank(model: DistributedDataParallel, optimizer: DistributedOptimizer, rank: int) -> None:
    if rank == 1:
        model.engine.params[0].grad = torch.ones_like(model.engine.params[0])


@pytest.mark.parametrize("prepare", [after_a_step, with_a_loaded_state, with_a_gradient_on_one_rank])
def test_with_state_nothing_moves(prepare: Callable[[Any, Any, int], None]) -> None:
    def run(rank: int, group: ProcessGroup) -> None:
        model, _, _ = wrap(group, Layers(reverse=False), overlap_grad_reduce=False)
        optimizer = DistributedOptimizer(momentum(model), model)
        prepare(model, optimizer, rank)
        before = untouched(model, optimizer)[:2]
        assert not relayout(model.engine, other_layout(model))
        assert untouched(model, optimizer)[:2] == before

    run_ranks(2, run)


def test_a_run_that_is_resumed_keeps_the_order_of_registration_and_its_numbers() -> None:
    """A model that would move in its first backward, and goes on from another one's state."""

    def run(rank: int, group: ProcessGroup) -> int:
        module = Layers(reverse=True)
        model, _, _ = wrap(group, module)
        optimizer = DistributedOptimizer(momentum(model), model)
        for step in range(2):
            model(batch(rank, step)).backward()
            optimizer.step()
            optimizer.zero_grad()
        weights, state = {name: value.clone() for name, value in module.state_dict().items()}, optimizer.state_dict()
        again = Layers(reverse=True)
        again.load_state_dict(weights)
        resumed, events, _ = wrap(group, again)
        other = DistributedOptimizer(momentum(resumed), resumed)
        other.load_state_dict(state)
        for wrapped, stepped in ((model, optimizer), (resumed, other)):
            wrapped(batch(rank, 2)).backward()
            stepped.step()
        for mine, expected in zip(again.parameters(), module.parameters(), strict=True):
            assert torch.equal(mine, expected)
        return moves(events)

    assert run_ranks(2, run) == [0, 0]


NUM_EXCHANGES = 7


@pytest.mark.sample(1)
@pytest.mark.parametrize("number", [1, 2, 4, NUM_EXCHANGES])
def test_a_rank_that_fails_in_a_move_ends_all_and_leaves_what_was(number: int) -> None:
    """Failures are in four exchanges: whether all can move, whether they have the same gradients, of the gradients of a
    bucket, and in the last, in which each rank learns that all have everything."""
    kept: dict[int, tuple[list[Any], list[Any]]] = {}
    counts: dict[int, int] = {}

    def run(rank: int, group: ProcessGroup) -> None:
        module = Layers(reverse=False, dtype=BF16)
        collectives = FailingCollectives(group)
        config = DistributedDataParallelConfig(bucket_size=500, overlap_grad_reduce=False)
        model = DistributedDataParallel(module, config, collectives=collectives)
        optimizer = DistributedOptimizer(adamw(model), model)
        model(batch(rank, 0, BF16)).backward()
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
    assert number < NUM_EXCHANGES or counts[0] == NUM_EXCHANGES, "the last of them"


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
