"""Moves a model that is being trained to another layout of the same parameters.

[Note: moving to another layout]
Buckets are divided into shards, so other buckets have other shards: the optimizers' state, main params and reduced
gradients move to new owners, unchanged to the bit. First all ranks exchange a description of their tensors, and nothing
moves if any rank has state that cannot be moved. Then the buckets of the old layout are gathered one after the other, a
tensor of each kind at a time, and each rank copies its new shards out of them. When every rank has all of its shards,
each changes to the new layout by itself, so that after a failed collective all ranks are still in the old layout.
Parameters are complete on every rank, and are copied.

A move needs memory for one bucket, and for this rank's shards a second time. While the parameters' buffer is replaced,
parameters are in the memory of the gradient buffer: after a reduce-scatter only this rank's shards in it have a
meaning, and these are gathered by then.

With all-reduce there are no shards. Gradients are copied without communication, and exist twice for that time.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeGuard

import torch
from torch import Tensor
from torch.nn import Parameter

from .. import devices
from ..buffers import GradBuffers, ParamBuffers
from ..collectives import Collectives
from ..events import EventKind
from ..layout import BufferLayout, Domain, Owners
from ..module import LocalParts, ModelParallel, captured_modules
from ..sync import ParamGather, Reducer
from .shard_holder import Contents, PerElement, ShardHolder


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


@dataclasses.dataclass(frozen=True)
class _OnDevice:
    """A tensor in host memory that belongs on the rank's device."""

    value: Tensor


_GRADS = -1
"""The number of the reduced gradients among shard holders; optimizers are numbered from 0."""
_GRAD = "grad"


class _ReducedGrads(ShardHolder):
    """Holds the reduce-scattered gradients."""

    def __init__(self, buffers: GradBuffers, *, may_move: bool) -> None:
        self._buffers, self._may_move = buffers, may_move
        self.shards: dict[int, Tensor] = {}

    def describe(self) -> Contents | None:
        if not self._may_move:
            return None
        layout = self._buffers.layout
        return {
            index: {_GRAD: PerElement(layout.buffers[layout.slots[index].buffer].sum_dtype)}
            for index, has_grad in enumerate(self._buffers.has_grad)
            if has_grad
        }

    def part(self, param: int, name: str) -> Tensor | None:
        return self._buffers.owned(param)

    def adopt(self, contents: Contents) -> None:
        self.shards = {index: values[_GRAD] for index, values in contents.items()}


def relayout(engine: Engine, layout: BufferLayout) -> bool:
    """Moves parameters, gradients and the shards of optimizers to another layout of the same parameters; see
    [Note: moving to another layout].

    Not to be called in a backward, or with accumulated gradients that are not reduced. Collective with reduce-scatter:
    all ranks pass the same layout.

    Returns:
        Whether everything has moved, on all ranks and tensor ranks, or nothing. Nothing moves if an optimizer may have
        state outside of tensors, or a rank has captured a module in a CUDA graph.

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
            # A CUDA graph that was captured since the wrapping would read the weights at their old addresses.
            may_move = not captured_modules(engine.module, engine.params)
            reduced = _ReducedGrads(grads, may_move=may_move)
            optimizers = {number: holder for number, ref in enumerate(engine.shard_holders) if (holder := ref())}
            contents = _gather({_GRADS: reduced, **optimizers}, engine, layout)
            if not _on_all_tensor_ranks(contents is not None, engine) or contents is None:
                return False
            reduced.adopt(contents.pop(_GRADS))
            # Views of the old buffers would keep their memory while the new ones are allocated.
            for optimizer in optimizers.values():
                optimizer.release()
            _change_shards(engine, layout, reduced.shards)
            for number, optimizer in optimizers.items():
                optimizer.adopt(contents[number])
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


def _gather(holders: Mapping[int, ShardHolder], engine: Engine, layout: BufferLayout) -> dict[int, Contents] | None:
    """Returns this rank's contents in ``layout`` by holder; None, on all ranks, if something cannot be moved.

    Collective, and changes nothing.
    """
    present, collectives, device = engine.layout, engine.collectives, engine.device
    # Ranks own different parameters, and all must decide alike whether to move.
    described = {number: holder.describe() for number, holder in holders.items()}
    by_rank = collectives.all_gather_objects(_on_host(described, collectives))
    whole = _merge(by_rank)
    if whole is None:
        return None
    own: dict[int, Contents] = {}
    for number, contents in whole.items():
        own[number] = {
            index: {
                name: value.value.to(device) if isinstance(value, _OnDevice) else value
                for name, value in values.items()
            }
            for index, values in contents.items()
            if layout.owned_range(index, collectives.rank) is not None
        }
    scratch: dict[torch.dtype, Tensor] = {}
    for bucket in present.buckets:
        for number, contents in whole.items():
            kept = [
                item for i in bucket.params for item in contents.get(i, {}).items() if isinstance(item[1], PerElement)
            ]
            # One collective for each kind of tensor in the bucket, in the order of the merged description, which is the
            # same on all ranks. Parameters may lack a kind (no step yet), or have it in another dtype.
            for name, kind in dict.fromkeys(kept):
                members = [i for i in bucket.params if contents.get(i, {}).get(name) == kind]
                # One buffer for all buckets: with one per bucket, between the copies, the heap would be fragmented.
                if kind.dtype not in scratch:
                    largest = max(other.numel for other in present.buckets)
                    scratch[kind.dtype] = torch.empty(largest, dtype=kind.dtype, device=device)
                flat = scratch[kind.dtype][: bucket.numel].zero_()
                for index in members:
                    _fill(flat, holders[number], name, index, bucket.start, present, collectives.rank)
                _all_gather(flat, engine, bucket.domain)
                for index in members:
                    if index in own[number]:
                        part = _cut(flat, index, bucket.start, present, layout, collectives.rank)
                        own[number][index][name] = holders[number].copy_of(name, part)
    # No rank changes to the new layout before all ranks can.
    collectives.max_of_bytes([0])
    return own


def _all_gather(flat: Tensor, engine: Engine, domain: Domain) -> None:
    engine.ranks_of(domain).all_gather(flat).wait()
    if engine.layout.offloads_state:  # its parts are copied to the host next
        engine.collectives.wait_for_device(engine.device, "all-gather")


def _on_all_tensor_ranks(can_move: bool, engine: Engine) -> bool:
    # see local_parts' [Note: one layout on all tensor ranks]
    ranks = engine.model_parallel.tensor_ranks
    return can_move if ranks is None else ranks.max_of_bytes([not can_move]) == [0]


def _fill(
    flat: Tensor, holder: ShardHolder, name: str, param: int, first: int, present: BufferLayout, rank: int
) -> None:
    """Copies the part that ``rank`` has of a parameter into a bucket of ``present`` that begins at ``first``."""
    owned = present.owned_range(param, rank)
    part = holder.part(param, name) if owned is not None else None
    if owned is not None and part is not None:
        flat[owned[0] - first : owned[1] - first] = part


def _cut(flat: Tensor, param: int, first: int, present: BufferLayout, layout: BufferLayout, rank: int) -> Tensor:
    """Returns the part that ``rank`` owns in ``layout``, a view of a bucket of ``present`` that begins at ``first``."""
    owned = layout.owned_range(param, rank)
    assert owned is not None
    shift = present.slots[param].start - first - layout.slots[param].start
    return flat[owned[0] + shift : owned[1] + shift]


def _merge(by_rank: Sequence[Mapping[int, Contents | None]]) -> dict[int, Contents] | None:
    """Joins the ranks' descriptions; None if they differ, or a rank has something that cannot be moved."""
    merged: dict[int, Contents] = {}
    for number in by_rank[0]:
        merged[number] = {}
        for described in by_rank:
            contents = described.get(number)
            if contents is None:
                return None
            for index, values in contents.items():
                # All owners must have the same kinds of sharded tensors; of other values the lowest rank's is used.
                known = merged[number].setdefault(index, dict(values))
                for name, value in values.items():
                    other = known.setdefault(name, value)
                    if (isinstance(value, PerElement) or isinstance(other, PerElement)) and other != value:
                        return None
    has_grad = [set(described[_GRADS] or ()) for described in by_rank]  # user code may write gradients on one rank only
    same_holders = all(described.keys() == by_rank[0].keys() for described in by_rank)
    return merged if same_holders and has_grad.count(has_grad[0]) == len(has_grad) else None


def _on_host(described: Mapping[int, Contents | None], collectives: Collectives) -> dict[int, Contents | None]:
    def moved(value: Any) -> Any:
        if _is_on_device(value):
            return _OnDevice(value.detach().cpu())
        return value.detach() if isinstance(value, Tensor) else value

    kept = (values for contents in described.values() if contents for values in contents.values())
    if device := next((value.device for values in kept for value in values.values() if _is_on_device(value)), None):
        # Gathers before were waited for on the stream only.
        collectives.wait_for_device(device, "all-gather")
    return {
        number: contents
        and {index: {name: moved(value) for name, value in values.items()} for index, values in contents.items()}
        for number, contents in described.items()
    }


def _is_on_device(value: Any) -> TypeGuard[Tensor]:
    return isinstance(value, Tensor) and not devices.is_on_host(value.device)
