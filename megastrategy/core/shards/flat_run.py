"""The tensors that the optimizer steps: this rank's shards, joined to runs of neighbours and cut to fit the cache.

[Note: runs]
Between steps each parameter's shard has its own state, as checkpoints need it. In a step the neighbouring shards of one
group in a bucket are one flat tensor, a *run*: a model of 2,000 small parameters is stepped as a few tensors. Runs and
shards are views of the same memory, and so are their states: going from one form to the other copies only counters,
unless different shards are joined than before. The padding between two parameters is stepped along: weight, gradient
and state are zero there.

A parameter without a gradient in a step that its neighbours take is stepped in a run of its own, and has a different
history from then on (its ``step`` counter, for example).

[Note: blocks that fit the cache]
An optimizer that is not fused does one operation after the other on all elements of a tensor, and reads them from
memory each time. So on the CPU a run is stepped in blocks that stay in the cache: the same bits, in less time. A fused
kernel on the CPU rounds a tensor's last few elements differently, so its shards are not joined; it accepts all tensors
in one call anyway.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Callable, Collection, Mapping, MutableMapping, Sequence
from typing import Any

from torch import Tensor

from ..buffers import slice_view
from ..layout import PARAM_ALIGNMENT_NUMEL, BufferLayout
from ..trials import equal, is_per_element
from .param_shard import ParamShard

CACHE_BLOCK_NUMEL = 2**17
"""Elements of a block. Adam's four tensors then take 2 MB in fp32, about a core's second-level cache."""

Span = tuple[int, int]
State = MutableMapping[str, Any]


@dataclasses.dataclass(eq=False)
class FlatRun:
    """Shards of one parameter group, side by side in one bucket. All its tensors are flat and of equal length.

    Attributes:
        start: the position of the first element in the bucket's buffer.
        shards: in the order of their addresses.
        main: the stepped tensor; the shards' ``main`` are slices of it.
        weights: the weights that ``main`` is the main param of; None if ``main`` is the weights themselves.
        grad: the reduced gradients, in the gradient dtype.
        names: the names of element-wise state: one set for all runs of an optimizer, which grows.
    """

    bucket: int
    group: int
    start: int
    shards: tuple[ParamShard, ...]
    main: Tensor
    weights: Tensor | None
    grad: Tensor
    names: set[str]

    def __post_init__(self) -> None:
        first = self.shards[0].offset
        self._shard_spans = [(shard.offset - first, shard.offset - first + shard.numel) for shard in self.shards]
        self._cut_for_shards: _CutState | None = None
        self._cut_for_tensors: _CutState | None = None
        self.tensors = [self.main]
        """The tensors in the optimizer's groups in a step: ``main``, in one tensor or in blocks."""
        self.begins = False
        """True if the next step creates the state; it can be cut into blocks after that."""

    def join_state(self, state: MutableMapping[Tensor, State], *, in_blocks: bool) -> None:
        """Replaces the shards' state by the state of ``tensors`` (the run, in one tensor or in blocks).

        Element-wise state (``exp_avg``) becomes views of one flat tensor, without a copy where it was cut from that
        tensor before. Counters (``step``) are equal in all shards, as :meth:`has_one_history` checked: one is kept.

        ``in_blocks``: see [Note: blocks that fit the cache].
        """
        numel = self.main.numel()
        block_numel = CACHE_BLOCK_NUMEL if in_blocks else numel
        # Popped before the run's state is added: a run of one shard is the shard's own tensor, and has the same key.
        states = [state.pop(shard.main, {}) for shard in self.shards]
        joined = _join(states, self._shard_spans, numel, self.names, self._cut_for_shards)
        # Before its first step there is no state to cut: that step creates it for the run in one tensor, and later
        # steps see it in blocks without a copy.
        starts = range(0, numel, block_numel) if joined and numel > block_numel else (0,)
        spans = list(itertools.pairwise((*starts, numel)))
        if len(spans) != len(self.tensors):
            self.tensors = [flat_slice(self.main, span) for span in spans]
        # The joined tensors are kept in _CutState, so that split_state finds them again and copies nothing.
        self._cut_for_shards, self._cut_for_tensors = None, _CutState(joined, spans, numel, self.names)
        state.update(zip(self.tensors, self._cut_for_tensors.parts, strict=True))
        self.begins = not joined and numel > block_numel

    def split_state(self, state: MutableMapping[Tensor, State]) -> None:
        """Replaces the state of ``tensors`` by that of the shards; the reverse of :meth:`join_state`."""
        joined = self.joined_state(state)
        for tensor in self.tensors:
            state.pop(tensor, None)
        self._cut_for_tensors = None
        if joined:
            self._cut_for_shards = _CutState(joined, self._shard_spans, self.main.numel(), self.names)
            state.update(zip((shard.main for shard in self.shards), self._cut_for_shards.parts, strict=True))

    def joined_state(self, state: Mapping[Tensor, State]) -> State:
        """Returns the state of the run in one tensor, while it is joined. Changes nothing."""
        assert self._cut_for_tensors is not None, "it was joined"
        states = [state.get(tensor, {}) for tensor in self.tensors]
        return _join(states, self._cut_for_tensors.spans, self.main.numel(), self.names, self._cut_for_tensors)

    def has_one_history(self, state: Mapping[Tensor, State]) -> bool:
        """Returns True if the shards' states, while they are split, can be joined."""
        return all(have_one_history(a, b, state, self.names) for a, b in itertools.pairwise(self.shards))

    def set_grad(self) -> None:
        """Sets ``.grad`` of the tensors: views if the dtypes are equal, otherwise copies."""
        start, grad = 0, self.grad.to(self.main.dtype)
        for tensor in self.tensors:
            tensor.grad = grad[start : start + tensor.numel()]
            start += tensor.numel()

    def element_names(self) -> set[str]:
        """Returns the names of the element-wise state that was split."""
        joined, numel = self._cut_for_shards.joined if self._cut_for_shards else {}, self.main.numel()
        return {name for name, value in joined.items() if is_per_element(name, value, (numel,), self.names)}

    def unshare_state(self, state: Mapping[Tensor, State]) -> None:
        """Copies the state of a run of one shard, so that it no longer keeps the state of a larger run alive."""
        if kept := state.get(self.main):
            kept.update({name: value.clone() for name, value in kept.items() if isinstance(value, Tensor)})

    def forget_state(self) -> None:
        """Drops the state that was split, since another replaces it."""
        self._cut_for_shards = None


class _CutState:
    """Cuts the state of a flat tensor into states of its slices, which share its memory.

    Hazard: an optimizer may replace a tensor of its state in a step (``state["x"] = state["x"] * 2``), or a user may
    load others. The flat tensor is stale then, so :meth:`still_has` compares identities before it is used again.
    """

    def __init__(self, joined: State, spans: Sequence[Span], numel: int, names: set[str]) -> None:
        self.joined, self.spans = joined, spans
        self.parts: list[State] = [joined] if len(spans) == 1 and spans[0] == (0, numel) else []
        if not self.parts:
            per_element = {name for name, value in joined.items() if is_per_element(name, value, (numel,), names)}
            self.parts = [
                {
                    name: flat_slice(value, span) if name in per_element else _separate_copy(value)
                    for name, value in joined.items()
                }
                for span in spans
            ]
        self._given = [dict(part) for part in self.parts]

    def still_has(self, name: str, states: Sequence[State]) -> bool:
        """Returns True if ``states`` still have the slices that were cut under this name."""
        return len(states) == len(self._given) and all(
            state[name] is given.get(name) for state, given in zip(states, self._given, strict=True)
        )


def _join(
    states: Sequence[State], spans: Sequence[Span], numel: int, names: set[str], known: _CutState | None
) -> State:
    """Returns the state of a flat tensor of ``numel`` elements, from the states of its slices.

    Copies nothing where the slices were cut from ``known``.
    """
    # A run of one shard: its state is that of the run, the very dictionary.
    if len(spans) == 1 and spans[0] == (0, numel):
        return states[0]
    joined: State = {}
    for name, value in states[0].items():
        if not is_per_element(name, value, (spans[0][1] - spans[0][0],), names):
            joined[name] = _separate_copy(value)
        elif known is not None and known.still_has(name, states):
            joined[name] = known.joined[name]
        else:
            # Zeros: the padding between two parameters is stepped along, and must stay zero.
            joined[name] = value.new_zeros(numel)
            for state, (start, end) in zip(states, spans, strict=True):
                joined[name][start:end] = state[name]
    return joined


def _separate_copy(value: Any) -> Any:
    # A deep copy of a tensor takes ten times as long as its clone.
    return value.detach().clone() if type(value) is Tensor else copy.deepcopy(value)


def flat_slice(flat: Tensor, span: Span) -> Tensor:
    """Returns elements ``[start, end)`` of a 1-D contiguous tensor, with a storage of only these."""
    start, end = span
    return slice_view(flat, int(flat.storage_offset()) + start, (end - start,), (1,), end - start)


def cut_shards(
    indices: Collection[int],
    layout: BufferLayout,
    rank: int,
    flats: Sequence[Tensor],
) -> dict[int, ParamShard]:
    """Makes this rank's shards of these parameters. The main params of neighbours share one allocation.

    Parameters without elements on this rank are left out. ``flats``: those of the param buffers.
    """
    slots = layout.slots
    owned = {index: span for index in indices if (span := layout.owned_range(index, rank)) is not None}
    neighbours: list[list[int]] = []
    for index in sorted(owned, key=lambda index: (slots[index].bucket, owned[index])):
        # Main params of neighbours come from one allocation, so that a run of them is one flat tensor without a copy.
        before = neighbours[-1][-1] if neighbours else None
        if (
            before is not None
            and slots[before].bucket == slots[index].bucket
            and owned[index][0] - owned[before][1] < PARAM_ALIGNMENT_NUMEL
        ):
            neighbours[-1].append(index)
        else:
            neighbours.append([index])
    shards: dict[int, ParamShard] = {}
    for members in neighbours:
        buffer, base = slots[members[0]].buffer, 0
        flat = flats[buffer]
        # 16-bit weights: the shard is a view of an fp32 copy. Other shards are views of the param buffer.
        is_apart = layout.has_separate_main(members[0])
        if is_apart:
            base = owned[members[0]][0]
            weights = flat[base : owned[members[-1]][1]]
            flat = weights.float()
        for index in members:
            (start, end), slot = owned[index], slots[index]
            weights = slice_view(flats[buffer], start, (end - start,), (1,), end - start)
            main = slice_view(flat, start - base, (end - start,), (1,), end - start)
            place = start - slot.start, end - slot.start
            shards[index] = ParamShard(index, *place, main, weights, flat, start - base)
    return shards


def build_runs(
    groups: Sequence[Sequence[ParamShard]],
    apart: Collection[int],
    stepping: set[int],
    layout: BufferLayout,
    param_flats: Sequence[Tensor],
    reduced: Callable[[int, int, int], Tensor],
    state: Mapping[Tensor, State],
    names: set[str],
) -> list[FlatRun]:
    """Joins shards to as few runs as possible; returns these by address.

    Args:
        groups: this rank's shards by parameter group.
        apart: numbers of groups whose shards are not joined.
        stepping: the parameters that have a gradient now; a run's shards step together or not at all.
        reduced: returns the reduced gradients in a bucket, from one element of its buffer to another.
        state: of the shards.
        names: see :class:`FlatRun`.
    """

    def address(shard: ParamShard) -> int:
        return layout.slots[shard.param].start + shard.start

    # By address, whatever the order of the optimizer's groups: only neighbours in memory are one tensor.
    placed = [(shard, number) for number, shards in enumerate(groups) for shard in shards]
    placed.sort(key=lambda pair: (layout.slots[pair[0].param].bucket, address(pair[0]), pair[0].numel))
    drafts: list[tuple[int, list[ParamShard]]] = []
    for shard, group in placed:
        if drafts and drafts[-1][0] == group and group not in apart:
            before = drafts[-1][1][-1]
            if (
                layout.slots[before.param].bucket == layout.slots[shard.param].bucket
                and before.flat is shard.flat
                # An empty shard has no address of its own, and could be between two that are not neighbours.
                and min(before.numel, shard.numel) > 0
                # No other parameter is between them: each begins on a multiple of the alignment.
                and address(shard) - address(before) - before.numel < PARAM_ALIGNMENT_NUMEL
                and (before.param in stepping) == (shard.param in stepping)
                and have_one_history(before, shard, state, names)
            ):
                drafts[-1][1].append(shard)
                continue
        drafts.append((group, [shard]))
    runs = []
    for group, shards in drafts:
        first, last = shards[0], shards[-1]
        slot, flat = layout.slots[first.param], first.flat
        assert flat is not None, "sharded"
        span = address(first), address(last) + last.numel
        runs.append(
            FlatRun(
                slot.bucket,
                group,
                span[0],
                tuple(shards),
                # A single shard is its own tensor: an optimizer may know it by its identity.
                first.main if len(shards) == 1 else flat_slice(flat, (first.offset, last.offset + last.numel)),
                flat_slice(param_flats[slot.buffer], span) if layout.has_separate_main(first.param) else None,
                reduced(slot.bucket, *span),
                names,
            )
        )
    return runs


def have_one_history(a: ParamShard, b: ParamShard, state: Mapping[Tensor, State], names: set[str]) -> bool:
    """Returns True if the states of two shards differ only in element-wise state."""
    one, other = state.get(a.main, {}), state.get(b.main, {})
    if one.keys() != other.keys():
        return False
    for name in one:
        per_element = is_per_element(name, one[name], (a.numel,), names)
        if per_element != is_per_element(name, other[name], (b.numel,), names):
            return False
        if per_element and one[name].dtype != other[name].dtype:
            return False
        if not per_element and not equal(one[name], other[name]):
            return False
    return True
