"""Makes what the optimizer steps: this rank's shards, joined where they lie side by side, and cut to fit the cache.

[Note: runs]
Between steps each parameter's shard has state of its own, as checkpoints want it. In a step the shards of one group
that follow each other in a bucket are one flat tensor, a *run*: a model of 2,000 small parameters is stepped as a few
tensors. Runs and shards are views of the same memory, and so are their states: going from one to the other copies
nothing but counters, unless other shards are joined than before. The few elements between two parameters, there for
alignment, are stepped along: weight, gradient and state are zero there.

A parameter that has no gradient in a step that its neighbours take is kept apart, and has another history from then on
(its ``step`` counter, for one).

[Note: blocks that fit the cache]
An optimizer that does one operation after the other on a whole tensor reads it from memory each time. On the CPU, where
that is so unless it is fused, a run is stepped in blocks that stay in the cache: the same bits, in less time. A fused
kernel on the CPU is the other way round: it rounds a tensor's last few elements differently, so that its shards are not
joined, and takes all tensors in one call anyway.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Callable, Collection, Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..buffers import slice_view
from ..layout import PARAM_ALIGNMENT_NUMEL, Bucket, BufferLayout
from ..trials import equal, is_per_element
from .param_shard import ParamShard

if TYPE_CHECKING:  # only those import it who ask for it
    from .low_bits import LowBits

BLOCK_NUMEL = 2**17
"""Elements of a block. Adam's four tensors then take 2 MB in fp32, about a core's second-level cache."""

Span = tuple[int, int]
State = MutableMapping[str, Any]


@dataclasses.dataclass(eq=False)
class FlatRun:
    """Shards of one parameter group, side by side in one bucket. All its tensors are flat and of equal length.

    Attributes:
        bucket, group: their numbers.
        start: the place of the first element in the bucket's buffer.
        shards: in the order of their addresses.
        main: what is stepped; the shards' ``main`` are parts of it.
        weights: those that ``main`` stands for; None if it is the weights.
        grad: the reduced gradients, in the gradient dtype.
        keeps_remainder: see param_shard's [Note: remainders of sent changes].
        bits: as a shard's, whose ``low`` is ``main`` then. Such a run is stepped in slices.
        times: the number of times that its parameters are in their group: a tied weight may be listed twice, and is
            stepped twice then.
    """

    bucket: int
    group: int
    start: int
    shards: tuple[ParamShard, ...]
    main: Tensor
    weights: Tensor | None
    grad: Tensor
    keeps_remainder: bool = False
    bits: LowBits | None = None
    times: int = 1

    def __post_init__(self) -> None:
        first = self.shards[0].offset
        self._shard_spans = [(shard.offset - first, shard.offset - first + shard.numel) for shard in self.shards]
        self._cut_for_shards: _CutState | None = None
        self._cut_for_tensors: _CutState | None = None
        self.tensors = [self.main]
        """The tensors in the optimizer's groups in a step: ``main``, whole or in blocks."""
        self.begins = False
        """Whether the next step brings the state into being; it can be in blocks after that."""

    def join_state(self, state: MutableMapping[Tensor, State], names: set[str] | None, block_numel: int) -> None:
        """Replaces the shards' state by the state of ``tensors`` (the run, whole or in blocks).

        What is kept for each element (``exp_avg``) becomes views of one flat tensor, without a copy where it was cut
        from it before. Counters (``step``) are equal in all shards, as :meth:`has_one_history` saw: one is kept.

        Args:
            names: of what the optimizer keeps for each element, where that is known.
            block_numel: the most elements of one tensor.
        """
        numel = self.main.numel()
        states = [state.pop(shard.main, {}) for shard in self.shards]
        whole = _join(states, self._shard_spans, numel, names, self._cut_for_shards)
        # before its first step there is no state to cut: the step makes it for the whole run, in one piece, and later
        # ones see it in blocks without a copy
        starts = range(0, numel, block_numel) if whole and numel > block_numel else (0,)
        spans = list(itertools.pairwise((*starts, numel)))
        if len(spans) != len(self.tensors):
            self.tensors = [flat_slice(self.main, span) for span in spans]
        self._cut_for_shards, self._cut_for_tensors = None, _CutState(whole, spans, numel, names)
        state.update(zip(self.tensors, self._cut_for_tensors.parts, strict=True))
        self.begins = not whole and numel > block_numel

    def split_state(self, state: MutableMapping[Tensor, State], names: set[str] | None) -> None:
        """Replaces the state of ``tensors`` by that of the shards, with the arguments of :meth:`join_state`."""
        assert self._cut_for_tensors is not None, "it was joined"
        states = [state.pop(tensor, {}) for tensor in self.tensors]
        whole = _join(states, self._cut_for_tensors.spans, self.main.numel(), names, self._cut_for_tensors)
        self._cut_for_tensors = None
        if whole:
            self._cut_for_shards = _CutState(whole, self._shard_spans, self.main.numel(), names)
            state.update(zip((shard.main for shard in self.shards), self._cut_for_shards.parts, strict=True))

    def joined_state(self, state: Mapping[Tensor, State], names: set[str] | None) -> State:
        """Returns the state of the whole run while it is that of ``tensors``, and leaves all as it is."""
        assert self._cut_for_tensors is not None, "it was joined"
        states = [state.get(tensor, {}) for tensor in self.tensors]
        return _join(states, self._cut_for_tensors.spans, self.main.numel(), names, self._cut_for_tensors)

    def has_one_history(self, state: Mapping[Tensor, State], names: set[str] | None) -> bool:
        """Whether the shards' states, while they are split, can be joined."""
        return all(have_one_history(a, b, state, names) for a, b in itertools.pairwise(self.shards))

    def set_grad(self) -> None:
        """Gives the tensors their gradients: views if the dtype is theirs, else copies."""
        start, grad = 0, self.grad.to(self.main.dtype)
        for tensor in self.tensors:
            tensor.grad = grad[start : start + tensor.numel()]
            start += tensor.numel()

    def element_names(self, names: set[str] | None) -> set[str]:
        """The names of what was split for each element."""
        whole, numel = self._cut_for_shards.whole if self._cut_for_shards else {}, self.main.numel()
        return {name for name, value in whole.items() if is_per_element(name, value, (numel,), names)}

    def forget_state(self) -> None:
        """Lets go of the state that was split, since another takes its place."""
        self._cut_for_shards = None


class _CutState:
    """Cuts the state of a flat tensor into states of its parts, which share its memory, and knows them again.

    Hazard: an optimizer may replace a tensor of its state in a step (``state["x"] = state["x"] * 2``), or a user load
    others. The flat tensor is stale then, so :meth:`still_has` compares identities before it is used again.
    """

    def __init__(self, whole: State, spans: Sequence[Span], numel: int, names: set[str] | None) -> None:
        self.whole, self.spans = whole, spans
        self.parts: list[State] = [whole] if len(spans) == 1 and spans[0] == (0, numel) else []
        if not self.parts:
            per_element = {name for name, value in whole.items() if is_per_element(name, value, (numel,), names)}
            self.parts = [
                {
                    name: flat_slice(value, span) if name in per_element else _separate_copy(value)
                    for name, value in whole.items()
                }
                for span in spans
            ]
        self._given = [dict(part) for part in self.parts]

    def still_has(self, name: str, states: Sequence[State]) -> bool:
        """Whether these are the parts that were given out under this name."""
        return len(states) == len(self._given) and all(
            state[name] is given.get(name) for state, given in zip(states, self._given, strict=True)
        )


def _join(
    states: Sequence[State], spans: Sequence[Span], numel: int, names: set[str] | None, known: _CutState | None
) -> State:
    """The state of a flat tensor of ``numel`` elements from those of its parts; without copies where they were cut from
    ``known``."""
    # a shard that is alone in its run: its state is that of the run, the very dictionary
    if len(spans) == 1 and spans[0] == (0, numel):
        return states[0]
    whole: State = {}
    for name, value in states[0].items():
        if not is_per_element(name, value, (spans[0][1] - spans[0][0],), names):
            whole[name] = _separate_copy(value)
        elif known is not None and known.still_has(name, states):
            whole[name] = known.whole[name]
        else:
            # zeros: the elements between two parameters are stepped along, and nothing but zero may ever be there
            whole[name] = value.new_zeros(numel)
            for state, (start, end) in zip(states, spans, strict=True):
                whole[name][start:end] = state[name]
    return whole


def _separate_copy(value: Any) -> Any:
    """A copy for one of many tensors: a deep copy of a tensor takes ten times as long as its clone."""
    return value.detach().clone() if type(value) is Tensor else copy.deepcopy(value)


def flat_slice(flat: Tensor, span: Span) -> Tensor:
    """Elements ``[start, end)`` of a 1-D contiguous tensor, with a storage that spans no more."""
    start, end = span
    return slice_view(flat, int(flat.storage_offset()) + start, (end - start,), (1,), end - start)


def unshare_state(state: State) -> None:
    """Copies what are parts of a larger tensor, so as not to keep that alive."""
    state.update({name: value.clone() for name, value in state.items() if isinstance(value, Tensor)})


def cut_shards(
    indices: Collection[int],
    layout: BufferLayout,
    rank: int,
    flats: Sequence[Tensor],
    bitmaps: Sequence[Tensor | None],
) -> dict[int, ParamShard]:
    """This rank's shards of these parameters; main params of neighbours in one piece of memory.

    Args:
        indices: of the parameters; those of which another rank has all are left out.
        layout, rank: where they lie, and whose they are.
        flats: the parameters' buffers.
        bitmaps: beside them; None where main params are kept in fp32.
    """
    slots = layout.slots
    owned = {index: span for index in indices if (span := layout.owned_range(index, rank)) is not None}
    neighbours: list[list[int]] = []
    for index in sorted(owned, key=lambda index: (slots[index].bucket, owned[index])):
        # main params of neighbours come from one allocation, so that a run of them is one flat tensor without a copy
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
        flat, bits = flats[buffer], None
        # 16-bit weights: the shard is a view of an fp32 copy; others are views of the parameters' own buffer
        is_apart, keeps_remainder = layout.has_separate_main(members[0]), layout.sends_weight_changes(members[0])
        if is_apart:
            base = owned[members[0]][0]
            weights = flat[base : owned[members[-1]][1]]
            if (bitmap := bitmaps[buffer]) is not None:
                bits = _no_bits(weights, bitmap, base, layout.buckets[slots[members[0]].bucket], layout, rank)
                flat = bits.low
            else:
                flat = torch.zeros_like(weights) if keeps_remainder else weights.float()
        for index in members:
            (start, end), slot = owned[index], slots[index]
            weights = slice_view(flats[buffer], start, (end - start,), (1,), end - start)
            main = slice_view(flat, start - base, (end - start,), (1,), end - start)
            place = start - slot.start, end - slot.start
            own_bits = None if bits is None else bits.part(main, start - base)
            shards[index] = ParamShard(index, *place, main, weights, flat, start - base, keeps_remainder, own_bits)
    return shards


def _no_bits(weights: Tensor, bitmap: Tensor, start: int, bucket: Bucket, layout: BufferLayout, rank: int) -> LowBits:
    """The bits of main params that are their weights, which begin at element ``start`` of the buffer."""
    from .low_bits import Bitmap, LowBits

    first = bucket.start // bucket.domain.num_shards + start - layout.shard_range(bucket, rank)[0]
    return LowBits(torch.zeros_like(weights, dtype=torch.int16), Bitmap(bitmap), first)


def build_runs(
    groups: Sequence[Sequence[ParamShard]],
    times: Mapping[int, int],
    apart: Collection[int],
    stepping: set[int],
    layout: BufferLayout,
    param_flats: Sequence[Tensor],
    reduced: Callable[[int, int, int], Tensor],
    state: Mapping[Tensor, State],
    names: set[str] | None,
) -> list[FlatRun]:
    """The fewest runs that these shards can be stepped in, by address.

    Args:
        groups: this rank's shards by parameter group.
        times: as a run's, by parameter.
        apart: numbers of groups whose shards are not joined.
        stepping: the parameters that have a gradient now; a run's shards step together or not at all.
        reduced: the reduced gradients in a bucket, from one element of its buffer to another.
        state, names: as for :meth:`FlatRun.join_state`.
    """

    def address(shard: ParamShard) -> int:
        return layout.slots[shard.param].start + shard.start

    # by address, whatever the order of the optimizer's groups: only neighbours in memory are one tensor
    placed = [(shard, number) for number, shards in enumerate(groups) for shard in shards]
    placed.sort(key=lambda pair: (layout.slots[pair[0].param].bucket, address(pair[0]), pair[0].numel))
    drafts: list[tuple[int, list[ParamShard]]] = []
    for shard, group in placed:
        if drafts and drafts[-1][0] == group and group not in apart:
            before = drafts[-1][1][-1]
            if (
                layout.slots[before.param].bucket == layout.slots[shard.param].bucket
                and before.flat is shard.flat
                # an empty shard has no address of its own, and could stand between two that are not neighbours
                and min(before.numel, shard.numel) > 0
                # no other parameter lies between: each begins on a multiple of the alignment
                and address(shard) - address(before) - before.numel < PARAM_ALIGNMENT_NUMEL
                and (before.param in stepping) == (shard.param in stepping)
                and times[before.param] == times[shard.param]
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
                # the shard's own tensor where it is alone: an optimizer may know it by its identity
                first.main if len(shards) == 1 else flat_slice(flat, (first.offset, last.offset + last.numel)),
                flat_slice(param_flats[slot.buffer], span) if layout.has_separate_main(first.param) else None,
                reduced(slot.bucket, *span),
                first.keeps_remainder,
                first.bits,
                times[first.param],
            )
        )
    return runs


def have_one_history(a: ParamShard, b: ParamShard, state: Mapping[Tensor, State], names: set[str] | None) -> bool:
    """Whether the states of two shards differ in nothing but numbers for each element."""
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
