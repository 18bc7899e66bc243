"""Keeps an optimizer's state in bf16 or on the host between steps, and main params as bits; in a step all is fp32.

[Note: narrow and offloaded state]
With ``optimizer_state_dtype`` what an optimizer keeps for each element of a shard (Adam's two moments) takes 2 bytes of
memory, and the optimizer never sees that. A step goes through the shards slice by slice: the state of a slice becomes
fp32 in memory of its own, the user's optimizer steps the slice, and the new state is rounded at random
(:mod:`.random_rounding`) into its place. So beside the narrow state there is the fp32 state of a few slices at a time.

With ``store_param_remainders`` main params are made for the slice in the same way, and kept as :mod:`.low_bits`.

With ``offload_optimizer_states`` the state, fp32 or narrow, is in the host's memory between steps, and of the device
for its slice alone; the next slice's is brought meanwhile, and the last one's goes back (:mod:`.offload`).

No other code needs to know. Saved state is fp32, each number exactly. Loaded state is rounded to the nearest, which
changes nothing of state that was saved so. Counters stay as they are, and so does state of another dtype than fp32, and
that of parameters that are stepped whole, which need not have a number for each element.
"""

from __future__ import annotations

import bisect
import collections
import contextlib
import dataclasses
import itertools
import weakref
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import devices
from ..collectives import Collectives
from ..layout import BufferLayout
from ..trials import is_per_element
from .flat_run import BLOCK_NUMEL, FlatRun, Span, State, flat_slice
from .low_bits import LowBits
from .offload import Arriving, Offload
from .param_shard import ParamShard
from .random_rounding import draw, first_place, halves, key_of_step, round_at_random_

NARROW = torch.bfloat16
COUNT = "rounding_step"
"""The name of a counter of steps in the state of optimizers that keep none (SGD with momentum): the random numbers of a
step depend on it."""
_STEP = "step"

_AT_ONCE_NUMEL, _DEVICE_NUMEL = 2**18, 2**22
"""The most elements that are fp32 at once: 3 MiB for Adam on bf16 weights on the host, where chunks stay in the cache
anyway; and on an accelerator 48 MiB, since a slice takes some fifty kernels there, which smaller ones would not fill.
Random numbers take up to twice as much, of a chunk, or of a slice."""


class StepSlice:
    """A part of a run, in a step. What is kept for it is fp32 while :meth:`StateStorage.widened` is open.

    ``bucket``, ``group``, ``start``, ``times``, ``main``, ``weights``, ``keeps_remainder``: as a run's. With ``bits``
    ``main`` has been made of them.
    """

    def __init__(self, run: _RunInStep, span: Span) -> None:
        self.run, self.span = run, span
        self.bucket, self.group, self.start = run.run.bucket, run.run.group, run.run.start + span[0]
        self.times = run.run.times
        # Another tensor than the run's, under which the narrow state is.
        self.main = flat_slice(run.run.main, span)
        self.bits: LowBits | None = None
        self.weights = None if run.run.weights is None else flat_slice(run.run.weights, span)
        if (bits := run.run.bits) is not None:
            assert self.weights is not None, "main params have weights"
            self.bits = bits.part(self.main, span[0])
            self.main = self.bits.join(self.weights)
        self.keeps_remainder = run.run.keeps_remainder
        self.tensors = [self.main]

    def set_grad(self) -> None:
        self.main.grad = self.run.run.grad[slice(*self.span)].to(self.main.dtype)


@dataclasses.dataclass(eq=False)
class _RunInStep:
    """A run whose slices are stepped one after the other.

    Attributes:
        before: its state as the step found it, which every slice begins with.
        after: its state as the slices left it so far; it becomes that of the run with the last one.
    """

    run: FlatRun
    before: State
    after: dict[str, Any] = dataclasses.field(default_factory=dict)


class _Place(NamedTuple):
    """The place of a slice in a step."""

    run: _RunInStep
    span: Span


class StateStorage:
    """The state of one optimizer's shards; see [Note: narrow and offloaded state].

    Args:
        dtype: in which its state is kept; None for fp32.
        offloads: whether its state is kept in the host's memory.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, dtype: torch.dtype | None, device: torch.device, *, offloads: bool
    ) -> None:
        self._optimizer = optimizer
        self._rounds = dtype is not None
        assert dtype in (None, NARROW)
        self._is_on_host = devices.is_on_host(device)
        self._offload = Offload(device) if offloads else None
        self._planned: collections.deque[list[_Place]] = collections.deque()
        self._incoming: dict[_Place, tuple[dict[str, Tensor], Arriving]] = {}  # in a step: copies, for each slice
        self._known_offsets: weakref.WeakKeyDictionary[FlatRun, dict[Span, tuple[Any, Tensor | None]]]
        self._known_offsets = weakref.WeakKeyDictionary()

    @property
    def _state(self) -> MutableMapping[Tensor, State]:
        state: MutableMapping[Tensor, State] = self._optimizer.state  # another one after each load
        return state

    # --- in a step ---------------------------------------------------------------------------------------------------

    def begin_step(
        self, runs: Sequence[FlatRun], order: Sequence[int], cuts: Mapping[int, bool], names: set[str] | None
    ) -> None:
        """Plans a step in slices, and starts to bring what the first ones need.

        Args:
            order: that in which their buckets are stepped.
            cuts: by group, whether a run of it may be stepped in parts.
            names: of what the optimizer keeps for each element, where that is known.
        """
        most = _AT_ONCE_NUMEL if self._is_on_host else _DEVICE_NUMEL
        longest = BLOCK_NUMEL if self._is_on_host else _DEVICE_NUMEL
        bucket, numel = -1, 0
        for run in sorted(runs, key=lambda run: order.index(run.bucket)):
            for place in self._cut(run, longest if cuts[run.group] else run.main.numel()):
                length = place.span[1] - place.span[0]
                if run.bucket != bucket or numel + length > most:
                    self._planned.append([])
                    bucket, numel = run.bucket, 0
                self._planned[-1].append(place)
                numel += length
        self._fetch_next(names)

    def slices(self, bucket: int, names: set[str] | None) -> Iterator[list[StepSlice]]:
        """The slices of a bucket, in lists of what is stepped in one call; the buckets come in their order."""
        while self._planned and self._planned[0][0].run.run.bucket == bucket:
            places = self._planned.popleft()
            self._fetch_next(names)
            yield [StepSlice(*place) for place in places]

    def _fetch_next(self, names: set[str] | None) -> None:
        if self._offload is not None and self._planned:
            self._fetch(self._planned[0], names)

    def _fetch(self, places: Sequence[_Place], names: set[str] | None) -> None:
        """Starts to bring the state of slices to the device."""
        if not places:
            return
        assert self._offload is not None
        kept = [_per_element(of.before, of.run.main.numel(), names) for of, _ in places]
        parts = [
            value[slice(*span)] for (_, span), values in zip(places, kept, strict=True) for value in values.values()
        ]
        arriving = self._offload.fetch(parts)
        copies = iter(arriving.places)
        for place, values in zip(places, kept, strict=True):
            self._incoming[place] = dict(zip(values, copies)), arriving  # noqa: B905 - the next place has the next ones

    def end_step(self, collectives: Collectives) -> None:
        """Returns when all that the step has changed is where it is kept; also after a step that failed.

        Raises:
            CollectiveError: see :meth:`Offload.settle`.
        """
        self._planned.clear()
        if self._offload is not None:
            self._offload.settle(collectives)
        self._incoming.clear()  # of a step that failed

    def uncut_slices(self, runs: Iterable[FlatRun]) -> list[StepSlice]:
        """Each run as one slice, for an optimizer that is called once."""
        return [StepSlice(*place) for run in runs for place in self._cut(run, run.main.numel())]

    def _cut(self, run: FlatRun, numel: int) -> list[_Place]:
        end, of = run.main.numel(), _RunInStep(run, self._state.get(run.main, {}))
        starts = range(0, end, numel) if numel < end else (0,)
        return [_Place(of, span) for span in itertools.pairwise((*starts, end))]

    @contextlib.contextmanager
    def widened(self, stepped: Sequence[Any], names: set[str] | None, layout: BufferLayout) -> Iterator[None]:
        """The optimizer has the state of slices in fp32 while this is open, and in bf16 afterwards.

        Args:
            stepped: slices, and what is stepped as it is.
            names: of what the optimizer keeps for each element, where that is known.
        """
        slices = [slice_ for slice_ in stepped if isinstance(slice_, StepSlice)]
        if self._offload is not None:
            # None but where all are stepped in one call.
            places = (_Place(slice_.run, slice_.span) for slice_ in slices)
            self._fetch([place for place in places if place not in self._incoming], names)
        try:
            for slice_ in slices:
                if wide := self._fp32_state(slice_, names):
                    self._state[slice_.main] = wide
            yield
        finally:  # after an error too: a state in fp32 under a tensor that is gone would be lost
            left = [pair for slice_ in slices for pair in self._narrow(slice_, names, layout)]
            if self._offload is not None and left:
                self._offload.send(*zip(*left, strict=True))

    def _fp32_state(self, slice_: StepSlice, names: set[str] | None) -> State:
        before, wide = slice_.run.before, dict[str, Any]()
        kept = _per_element(before, slice_.run.run.main.numel(), names)
        if self._offload is None:
            parts = {name: value[slice(*slice_.span)] for name, value in kept.items()}
        else:
            parts, arriving = self._incoming.pop(_Place(slice_.run, slice_.span))
            self._offload.arrive(arriving)
        for name, value in before.items():
            if (part := parts.get(name)) is not None:
                wide[name] = part.float() if self._rounds and _is_narrow(part) else part
            elif name != COUNT:
                # Each slice counts for itself, and all of them the same step.
                wide[name] = value.clone() if isinstance(value, Tensor) else value
        return wide

    def _narrow(self, slice_: StepSlice, names: set[str] | None, layout: BufferLayout) -> list[tuple[Tensor, Tensor]]:
        """Takes what a step has left of a slice's state to where it is kept; returns what is still to be copied there,
        with its place."""
        before, after = slice_.run.before, slice_.run.after
        numel, wide = slice_.run.run.main.numel(), self._state.pop(slice_.main, {})
        kept = _per_element(wide, slice_.main.numel(), names)
        after.update((name, value) for name, value in wide.items() if name not in kept)
        fp32 = (name for name, value in kept.items() if value.dtype == torch.float32)
        rounded = sorted(fp32) if self._rounds else []
        for name, value in kept.items():
            dtype = NARROW if name in rounded else value.dtype
            if name not in after:
                after[name] = self._place_of(before.get(name), numel, dtype, value.device)
        if rounded:
            kept |= self._rounded(slice_, {name: kept[name].detach() for name in rounded}, layout)
        left = [(after[name][slice(*slice_.span)], value.detach()) for name, value in kept.items()]
        if self._offload is None:
            for place, value in left:
                if place.data_ptr() != value.data_ptr():
                    place.copy_(value)
            left = []
        if slice_.span[1] == numel and after:
            self._state[slice_.run.run.main] = after
        return left

    def _rounded(self, slice_: StepSlice, wide: Mapping[str, Tensor], layout: BufferLayout) -> dict[str, Tensor]:
        """Rounds what is fp32 to bf16: into its place, or beside it on the device where its place is on the host."""
        before, after = slice_.run.before, slice_.run.after
        step = after[_STEP] if _is_number(after.get(_STEP)) else before.get(COUNT, 0) + 1
        if not _is_number(after.get(_STEP)):
            after[COUNT] = step
        places, chances, narrow = self._positions(slice_, layout), list[Tensor](), dict[str, Tensor]()
        for number, (name, value) in enumerate(wide.items()):
            # 32 random bits are two chances.
            chances = chances or list(halves(draw(places, key_of_step(step, number // 2))))
            is_there = self._offload is None
            narrow[name] = after[name][slice(*slice_.span)] if is_there else torch.empty_like(value, dtype=NARROW)
            round_at_random_(narrow[name], value, chances.pop(0))
        return narrow

    def _place_of(self, before: Any, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory in which the state of a run is kept: that which it had, if it is of that kind."""
        if (
            isinstance(before, Tensor)
            and (before.dtype, before.shape) == (dtype, (numel,))
            # What was loaded, or joined to other runs since, is not.
            and (self._offload is None or self._offload.is_pinned(before))
        ):
            return before
        # Zeros: the elements between two parameters are stepped along, and stay zero.
        return self._offload.zeros(numel, dtype) if self._offload else torch.zeros(numel, dtype=dtype, device=device)

    def _positions(self, slice_: StepSlice, layout: BufferLayout) -> Tensor:
        """The place of each element of a slice in its parameter: int32, for :func:`.random_rounding.draw`.

        What lies between two parameters counts on from the one before.
        """
        run, numel, device = slice_.run.run, slice_.main.numel(), slice_.main.device
        places = torch.arange(numel, dtype=torch.int32, device=device)
        known = self._known_offsets.setdefault(run, {})
        if slice_.span not in known:
            known[slice_.span] = self._offsets(slice_, layout)
        ahead, lengths = known[slice_.span]
        # One call for all parameters, of which a run may have thousands.
        ahead = ahead if lengths is None else torch.repeat_interleave(ahead, lengths, output_size=numel)
        return places.add_(ahead)

    def _offsets(self, slice_: StepSlice, layout: BufferLayout) -> tuple[Any, Tensor | None]:
        """The place that a slice's first element has, and None; of several parameters a tensor of the places that it
        would have in each, and their lengths. Kept from step to step: to bring them to a device makes the host wait."""
        (first, end), shards = slice_.span, slice_.run.run.shards
        starts = [shard.offset - shards[0].offset for shard in shards]
        # The first of them may begin before the slice, and end before it, where that begins between two.
        number = max(bisect.bisect_right(starts, first) - 1, 0)
        inside = [number, *range(number + 1, bisect.bisect_left(starts, end))]
        ahead = [first_place(layout.params[shards[i].param].name, shards[i].start - starts[i] + first) for i in inside]
        if len(inside) == 1:
            return ahead[0], None
        borders = [first, *(starts[i] for i in inside[1:]), end]
        lengths = [b - a for a, b in itertools.pairwise(borders)]
        device = slice_.main.device
        return torch.tensor(ahead, dtype=torch.int32, device=device), torch.tensor(lengths, device=device)

    # --- between steps -----------------------------------------------------------------------------------------------

    def as_saved(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """The state of a shard, or of neighbours, in fp32; nothing is converted before it is read."""
        return _Widened(state) if self._rounds else state

    def keep_loaded(self, shards: Sequence[ParamShard], names: set[str] | None) -> None:
        """Brings what shards were given to where it is kept, and rounds it to the nearest; or makes it fp32, where
        state is kept in that."""
        before, after = (torch.float32, NARROW) if self._rounds else (NARROW, torch.float32)
        for shard in shards:
            kept = self._state.get(shard.main, {}) if shard.is_cut else {}
            for name, value in _per_element(kept, shard.numel, names).items():
                # Under main params in bits torch leaves state in the dtype that it comes in.
                may_be_narrow = self._rounds or shard.bits is not None
                dtype = after if may_be_narrow and value.dtype == before else value.dtype
                # Pinned in the next step: by run, and not in thousands of slices of memory.
                kept[name] = value.to(dtype) if self._offload is None else devices.on_host(value, dtype)

    def names_kept_on_host(self, shard: ParamShard, values: Mapping[str, Any], names: set[str] | None) -> Iterable[str]:
        """The names of a shard's loaded state that need not come to the device: all that is kept on the host, unless
        the optimizer does more than torch's own with what is loaded, and may look at it."""
        if self._offload is None or not shard.is_cut or _looks_at_loaded(self._optimizer):
            return ()
        return _per_element(values, shard.numel, names)

    def copy_of(self, value: Tensor) -> Tensor:
        """A copy of a part of the state, where that is kept."""
        return value.clone() if self._offload is None else devices.on_host(value, value.dtype, copy=True)


class _Widened(Mapping[str, Any]):
    """The state of a shard, or of neighbours, as it is saved: what is narrow is fp32 when it is read, one tensor at a
    time, and not kept."""

    def __init__(self, state: Mapping[str, Any]) -> None:
        self._state = state

    def __getitem__(self, name: str) -> Any:
        value = self._state[name]
        return value.float() if _is_narrow(value) else value

    def __iter__(self) -> Iterator[str]:
        return iter(self._state)

    def __len__(self) -> int:
        return len(self._state)


def _per_element(state: Mapping[str, Any], numel: int, names: set[str] | None) -> dict[str, Tensor]:
    """Picks, of the state of ``numel`` elements, what has a number for each."""
    return {name: value for name, value in state.items() if is_per_element(name, value, (numel,), names)}


def _looks_at_loaded(optimizer: torch.optim.Optimizer) -> bool:
    kind: Any = type(optimizer)
    is_torchs_load = kind.load_state_dict is torch.optim.Optimizer.load_state_dict
    return not is_torchs_load or not kind.__setstate__.__module__.startswith("torch.optim.")


def _is_narrow(value: Any) -> bool:
    # Also the optimizer's own: one that keeps bf16 itself is given fp32 as well. No counter is 1-D.
    return isinstance(value, Tensor) and value.dtype == NARROW and value.dim() == 1


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1
    return isinstance(value, int | float) and not isinstance(value, bool)
