"""Moves a model to another layout of the same parameters, before optimizers have state.

[Note: moving to another layout]
Buckets are divided into shards, so other buckets have other shards. The move comes at the end of the first synchronised
backward, when only its reduced gradients are sharded; shards of optimizers are made anew from the weights. If state
was loaded or made by then (a run that is resumed, Adagrad), or a CUDA graph reads the weights at their addresses,
nothing moves on any rank, and buckets stay in the order of registration. The buckets of the old layout are gathered one
after the other, and each rank copies its new parts out of them. When every rank has all of its parts, each changes to
the new layout by itself, so that after a failed collective all ranks are still in the old layout.

A move needs memory for one bucket, and for this rank's gradients a second time. While the parameters' buffer is
replaced, parameters are in the memory of the gradient buffer: after a reduce-scatter only this rank's parts in it have
a meaning, and these are gathered by then.

With all-reduce there are no shards. Gradients are copied without communication, and exist twice for that time.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import Parameter

from ..buffers import GradBuffers, ParamBuffers
from ..collectives import Collectives, is_same_on_all_ranks
from ..events import EventKind
from ..layout import BufferLayout, Domain, Owners
from ..module import LocalParts, ModelParallel, captured_modules
from ..sync import ParamGather, Reducer
from .shard_holder import ShardHolder


class Engine(Protocol):
    """The members of :class:`~..engine.Engine` that a move uses."""

    layout: BufferLayout
    params: list[Parameter]
    owners: Owners
    grad_buffers: GradBuffers
    param_buffers: ParamBuffers | None
    param_gather: ParamGather
    local_parts: LocalParts
    reducer: Reducer
    model_parallel: ModelParallel
    collectives: Collectives
    device: torch.device
    shard_holders: list[weakref.ref[ShardHolder]]

    @property
    def module(self) -> torch.nn.Module: ...

    def ranks_of(self, domain: Domain) -> Collectives: ...

    def finish_param_gather(self) -> None: ...

    def make_grad_buffers(self) -> GradBuffers: ...

    def emit(self, kind: EventKind, index: int) -> None: ...


def relayout(engine: Engine, layout: BufferLayout) -> bool:
    """Moves parameters and gradients to another layout of the same parameters; see [Note: moving to another layout].

    Not to be called in a backward, or with accumulated gradients that are not reduced. Collective with reduce-scatter:
    all ranks pass the same layout.

    Returns:
        Whether everything has moved, on all ranks and tensor ranks, or nothing.

    Raises:
        CollectiveError: if a collective failed; this rank is then in the old layout.
    """
    present, grads = engine.layout, engine.grad_buffers
    assert layout.params == present.params, "it has other parameters"
    assert layout.domain == present.domain
    assert not engine.reducer.has_local_grads, "gradients that are not reduced would be lost"
    with torch.no_grad():
        # Without shards every rank has everything, and moves by itself.
        if engine.param_buffers is None:
            engine.layout = layout
            engine.grad_buffers = engine.make_grad_buffers()
            engine.grad_buffers.keep_views_of(grads)
        else:
            # Weights that have not arrived yet would be copied with their values before the step.
            engine.finish_param_gather()
            # A tensor that user code has assigned (``p.data = x``), or written into ``.grad``, is in no buffer yet.
            engine.param_buffers.recapture()
            grads.adopt_written_grads(range(len(engine.params)))
            optimizers = [holder for ref in engine.shard_holders if (holder := ref()) is not None]
            # A CUDA graph that was captured since the wrapping would read the weights at their old addresses.
            is_captured = bool(captured_modules(engine.module, engine.params))
            if not _on_all_ranks(not is_captured and not any(holder.has_state() for holder in optimizers), engine):
                return False
            reduced = _gather_grads(engine, layout)
            # Views of the old buffers would keep their memory while the new ones are allocated.
            for optimizer in optimizers:
                optimizer.release_shards()
            _change_shards(engine, layout, reduced)
            for optimizer in optimizers:
                optimizer.make_shards_again()
    engine.reducer.move_to(engine.grad_buffers)
    engine.emit(EventKind.LAYOUT_CHANGED, len(layout.buckets))
    return True


def _change_shards(engine: Engine, layout: BufferLayout, reduced: Mapping[int, Tensor]) -> None:
    """Changes to ``layout``; ``reduced``: by parameter, this rank's part of the reduced gradient there, flat."""
    before = engine.grad_buffers
    memory = before.close_and_return_memory()
    engine.layout = layout
    # CUDA's allocator gives a freed block to a request of the same size. So weights wait in the gradients' memory until
    # that of the old weights is free: new weights get it, and new gradients get that of the old gradients. If new
    # weights stayed in the gradients' memory, the allocator would have to reserve one more block for gradients.
    if ParamBuffers.can_hold(layout, memory):
        _move_params(engine, memory)
    memory = []
    _move_params(engine, ())
    engine.owners = Owners(layout, engine.owners.rank_of)
    engine.grad_buffers = engine.make_grad_buffers()
    engine.grad_buffers.continue_from(before, reduced)


def _move_params(engine: Engine, memory: Sequence[Tensor]) -> None:
    engine.param_buffers = ParamBuffers(engine.layout, engine.params, engine.device, engine.local_parts, memory)
    engine.param_gather.set_buffers(engine.param_buffers)


def _on_all_ranks(can_move: bool, engine: Engine) -> bool:
    """Whether all ranks can move, and have the same gradients: user code may have written one on one rank only."""
    collectives = engine.collectives
    can_move = collectives.max_of_bytes([not can_move]) == [0] and is_same_on_all_ranks(
        bytes(engine.grad_buffers.has_grad), collectives
    )
    # see local_parts' [Note: one layout on all tensor ranks]
    tensor_ranks = engine.model_parallel.tensor_ranks
    return can_move if tensor_ranks is None else tensor_ranks.max_of_bytes([not can_move]) == [0]


def _gather_grads(engine: Engine, layout: BufferLayout) -> dict[int, Tensor]:
    """Returns this rank's parts of the reduced gradients in ``layout``, by parameter, flat. Collective."""
    present, grads, rank = engine.layout, engine.grad_buffers, engine.collectives.rank
    reduced: dict[int, Tensor] = {}
    largest = max(bucket.numel for bucket in present.buckets)
    scratch: dict[torch.dtype, Tensor] = {}
    for bucket in present.buckets:
        members = [index for index in bucket.params if grads.has_grad[index]]
        if not members:
            continue
        # One buffer for all buckets: with one per bucket, between the copies, the heap would be fragmented.
        dtype = present.buffers[bucket.buffer].sum_dtype
        if dtype not in scratch:
            scratch[dtype] = torch.empty(largest, dtype=dtype, device=engine.device)
        flat = scratch[dtype][: bucket.numel].zero_()
        for index in members:
            owned = present.owned_range(index, rank)
            part = grads.owned(index)
            if owned is not None and part is not None:
                flat[owned[0] - bucket.start : owned[1] - bucket.start] = part
        engine.ranks_of(bucket.domain).all_gather(flat).wait()
        for index in members:
            owned = layout.owned_range(index, rank)
            if owned is not None:
                shift = present.slots[index].start - bucket.start - layout.slots[index].start
                reduced[index] = flat[owned[0] + shift : owned[1] + shift].clone()
    # No rank changes to the new layout before all ranks can.
    engine.collectives.max_of_bytes([0])
    return reduced
