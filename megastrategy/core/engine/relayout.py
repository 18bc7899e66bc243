"""Everything that a layout cuts moves to another layout of the same parameters, in the midst of training.

[Note: a move]
Shards are cut at the ends of buckets, so other buckets are other shards: what each rank keeps of every parameter (the
optimizers' state, main params, reduced gradients) goes to its new owner, bit by bit as it is. Ranks first tell each
other what they keep, and leave everything where it is if a rank keeps state that cannot be moved. Then the old layout's
buckets are gathered one after the other, a tensor of each kind at a time, and each rank copies out what will be its
own. When every rank has everything, each changes over by itself, so that a collective that fails leaves all of it in
the old layout. Parameters are whole on every rank, and are copied.

So a move takes, until it is over, one bucket, and this rank's shards a second time. The gradient buffer makes room for
the parameters, while theirs is replaced by another of about its size: of what it holds after a reduce-scatter only this
rank's shards mean anything, and those are gathered by then.

With all-reduce nothing is cut. Gradients are whole and are copied, without any communication; for that moment there are
two of each.
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
from ..layout import BufferLayout
from ..module import ModelParallel, captured_modules
from ..sync import Reducer
from .shard_holder import Contents, PerElement, ShardHolder


class Engine(Protocol):
    """The parts of an engine that move, or move others; see :class:`~..engine.Engine`."""

    layout: BufferLayout
    params: list[Parameter]
    grad_buffers: GradBuffers
    param_buffers: ParamBuffers | None
    reducer: Reducer
    model_parallel: ModelParallel
    collectives: Collectives
    device: torch.device
    shard_holders: list[weakref.ref[ShardHolder]]

    @property
    def module(self) -> torch.nn.Module: ...

    @property
    def shard_collectives(self) -> Collectives: ...

    def finish_param_gather(self) -> None: ...

    def change_whole(self, layout: BufferLayout) -> None: ...

    def change_shards(self, layout: BufferLayout, reduced: Mapping[int, Tensor]) -> None: ...

    def emit(self, kind: EventKind, index: int) -> None: ...


@dataclasses.dataclass(frozen=True)
class _OnDevice:
    """A tensor that belongs on the rank's device, on its way through host memory."""

    value: Tensor


_GRADS = -1
"""The number of the reduced gradients among what holds shards; optimizers count from 0."""
_GRAD = "grad"


class _ReducedGrads(ShardHolder):
    """The reduce-scattered gradients themselves."""

    def __init__(self, buffers: GradBuffers, rank: int, *, may_move: bool) -> None:
        self._buffers, self._rank, self._may_move = buffers, rank, may_move
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
        layout = self._buffers.layout
        owned = layout.owned_range(param, self._rank)
        return None if owned is None else self._buffers.reduced(layout.slots[param].bucket, *owned)

    def take(self, contents: Contents) -> None:
        self.shards = {index: values[_GRAD] for index, values in contents.items()}


def relayout(engine: Engine, layout: BufferLayout) -> bool:
    """Moves parameters, gradients and the shards of optimizers to another layout of the same parameters; see
    [Note: a move].

    Not while a backward runs, nor when gradients are accumulated that were not reduced. Collective with
    reduce-scatter: all ranks pass the same layout.

    Returns:
        Whether it was done, on all ranks, tensor ranks among them, or on none: not where an optimizer may keep more
        than state of tensors, nor where a rank has captured a module in a CUDA graph.

    Raises:
        CollectiveError: if a collective failed; this rank is then as it was.
    """
    present, grads = engine.layout, engine.grad_buffers
    assert layout.params == present.params, "of the same parameters"
    assert (layout.dp_size, layout.num_shards) == (present.dp_size, present.num_shards)
    assert not engine.reducer.has_local_grads, "what is not reduced yet would be lost"
    with torch.no_grad():
        # nothing is cut: every rank has all of it, and changes over by itself
        if engine.param_buffers is None:
            engine.change_whole(layout)
        else:
            # weights still on their way would be copied as they were before the step
            engine.finish_param_gather()
            # what a user put in a parameter's place (``p.data = x``) or wrote into ``.grad`` is in no buffer yet
            engine.param_buffers.recapture()
            grads.adopt_written_grads(range(len(engine.params)))
            # a CUDA graph that was captured since the wrapping would go on to read the weights where they were
            may_move = not captured_modules(engine.module, engine.params)
            reduced = _ReducedGrads(grads, engine.collectives.rank, may_move=may_move)
            optimizers = {number: holder for number, ref in enumerate(engine.shard_holders) if (holder := ref())}
            contents = _gather({_GRADS: reduced, **optimizers}, engine, layout)
            if not _on_all_tensor_ranks(contents is not None, engine) or contents is None:
                return False
            reduced.take(contents.pop(_GRADS))
            # views of the old buffers would keep their memory while the new ones are made: two of each at once
            for optimizer in optimizers.values():
                optimizer.release()
            engine.change_shards(layout, reduced.shards)
            for number, optimizer in optimizers.items():
                optimizer.take(contents[number])
    engine.reducer.follow(layout, engine.grad_buffers)
    engine.emit(EventKind.LAYOUT_CHANGED, len(layout.buckets))
    return True


def _gather(holders: Mapping[int, ShardHolder], engine: Engine, layout: BufferLayout) -> dict[int, Contents] | None:
    """Gathers what this rank will keep in ``layout``, by holder. Collective; changes nothing.

    Returns:
        None, on all ranks, if there is something that cannot be moved.
    """
    present, collectives, device = engine.layout, engine.collectives, engine.device
    # ranks own different parameters, so none knows alone what there is; and all must decide alike whether to move
    described = {number: holder.describe() for number, holder in holders.items()}
    by_rank = collectives.all_gather_objects(_on_host(described, collectives))
    whole = _merge(by_rank)
    if whole is None:
        return None
    own: dict[int, Contents] = {}
    for number, contents in whole.items():
        own[number] = {
            index: {name: _from_host(value, device) for name, value in values.items()}
            for index, values in contents.items()
            if layout.owned_range(index, collectives.rank) is not None
        }
    scratch: dict[torch.dtype, Tensor] = {}
    for bucket in present.buckets:
        for number, contents in whole.items():
            kept = [
                (name, value) for i in bucket.params for name, value in contents.get(i, {}).items() if _is_cut(value)
            ]
            # one collective for each kind of tensor in the bucket, in the order of the merged description: the same on
            # all ranks. Parameters may lack a kind (no step yet), or keep it in another dtype
            for name, kind in dict.fromkeys(kept):
                members = [i for i in bucket.params if contents.get(i, {}).get(name) == kind]
                # one buffer for all buckets: those that come and go between the copies would leave holes in the heap
                if kind.dtype not in scratch:
                    largest = max(other.numel for other in present.buckets)
                    scratch[kind.dtype] = torch.empty(largest, dtype=kind.dtype, device=device)
                flat = scratch[kind.dtype][: bucket.numel].zero_()
                for index in members:
                    _fill(flat, holders[number], name, index, bucket.start, present, collectives.rank)
                _all_gather(flat, engine)
                for index in members:
                    if index in own[number]:
                        part = _cut(flat, index, bucket.start, present, layout, collectives.rank)
                        own[number][index][name] = holders[number].copy_of(name, part)
    # no rank changes over before all ranks can
    collectives.max_of_bytes([0])
    return own


def _all_gather(flat: Tensor, engine: Engine) -> None:
    engine.shard_collectives.all_gather(flat).wait()
    if engine.layout.offloads_state:  # parts of it are copied to the host next
        engine.collectives.wait_for_device(engine.device, "all-gather")


def _on_all_tensor_ranks(can_move: bool, engine: Engine) -> bool:
    # see local_parts' [Note: one layout on all tensor ranks]
    ranks = engine.model_parallel.tensor_ranks
    return can_move if ranks is None else ranks.max_of_bytes([not can_move]) == [0]


def _fill(
    flat: Tensor, holder: ShardHolder, name: str, param: int, first: int, present: BufferLayout, rank: int
) -> None:
    """Puts what ``rank`` has of a parameter into a bucket of ``present`` that begins at ``first``."""
    owned = present.owned_range(param, rank)
    part = holder.part(param, name) if owned is not None else None
    if owned is not None and part is not None:
        flat[owned[0] - first : owned[1] - first] = part


def _cut(flat: Tensor, param: int, first: int, present: BufferLayout, layout: BufferLayout, rank: int) -> Tensor:
    """The part of a parameter that ``rank`` owns in ``layout``, as a view of a bucket of ``present`` that begins at
    ``first``."""
    owned = layout.owned_range(param, rank)
    assert owned is not None
    shift = present.slots[param].start - first - layout.slots[param].start
    return flat[owned[0] + shift : owned[1] + shift]


def _merge(by_rank: Sequence[Mapping[int, Contents | None]]) -> dict[int, Contents] | None:
    """Joins what the ranks keep; None if they disagree, or one keeps something that cannot be moved."""
    merged: dict[int, Contents] = {}
    for number in by_rank[0]:
        merged[number] = {}
        for described in by_rank:
            contents = described.get(number)
            if contents is None:
                return None
            for index, values in contents.items():
                # of what is cut every owner of a part has to say the same; of a whole value the lowest rank's is taken
                known = merged[number].setdefault(index, dict(values))
                for name, value in values.items():
                    if (_is_cut(value) or _is_cut(known.get(name))) and known.get(name, value) != value:
                        return None
                    known.setdefault(name, value)
    has_grad = [set(described[_GRADS] or ()) for described in by_rank]  # a user may write gradients on one rank alone
    same_holders = all(described.keys() == by_rank[0].keys() for described in by_rank)
    return merged if same_holders and has_grad.count(has_grad[0]) == len(has_grad) else None


def _is_cut(value: Any) -> bool:
    return isinstance(value, PerElement)


def _on_host(described: Mapping[int, Contents | None], collectives: Collectives) -> dict[int, Contents | None]:
    def moved(value: Any) -> Any:
        if _is_on_device(value):
            return _OnDevice(value.detach().cpu())
        return value.detach() if isinstance(value, Tensor) else value

    kept = (values for contents in described.values() if contents for values in contents.values())
    if device := next((value.device for values in kept for value in values.values() if _is_on_device(value)), None):
        # behind gathers that were waited for on the stream alone
        collectives.wait_for_device(device, "all-gather")
    return {
        number: contents
        and {index: {name: moved(value) for name, value in values.items()} for index, values in contents.items()}
        for number, contents in described.items()
    }


def _is_on_device(value: Any) -> TypeGuard[Tensor]:
    return isinstance(value, Tensor) and not devices.is_on_host(value.device)


def _from_host(value: Any, device: torch.device) -> Any:
    """A tensor of the rank's own for a value that came from another; what is cut keeps its place until it is there."""
    return value.value.to(device) if isinstance(value, _OnDevice) else value
