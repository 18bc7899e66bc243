"""Keeps optimizer state in bf16 or on the host between steps, and main params as low bits; in a step all is fp32.

[Note: narrow and offloaded state]
With ``optimizer_state_dtype`` the element-wise state of shards (Adam's two moments) takes 2 bytes an element, and the
optimizer never sees that. A step goes through the shards slice by slice: the state of a slice becomes fp32 in memory of
its own, the user's optimizer steps the slice, and the new state is rounded at random (:mod:`.random_rounding`) into
its place. So only a few slices at a time have fp32 state beside the narrow one.

With ``store_param_remainders`` main params are made for the slice in the same way, and kept as :mod:`.low_bits`.

With ``offload_optimizer_states`` the state, fp32 or narrow, is in host memory between steps, and on the device only for
its slice. The next slice's state is fetched meanwhile, and the last one's is sent back (:mod:`.offload`).

Code outside of the step need not know about it. Saved state is fp32, each number exactly. Loaded state is rounded to
the nearest, which changes nothing in a state that was saved from here. Counters stay as they are, and so do state that
is not fp32 and the state of parameters that are stepped whole, which need not be element-wise.
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
from .flat_run import CACHE_BLOCK_NUMEL, FlatRun, Span, State, flat_slice
from .low_bits import LowBits
from .offload import Arriving, Offload
from .param_shard import ParamShard
from .random_rounding import draw, first_place, halves, key_of_step, round_at_random_
from .state_fragments import ConvertedOnRead

NARROW = torch.bfloat16
COUNT = "rounding_step"
"""Name of a step counter in the state of optimizers without one (SGD with momentum): random numbers depend on it."""
_STEP = "step"

_AT_ONCE_NUMEL, _DEVICE_NUMEL = 2**18, 2**22
"""The most elements that are fp32 at once. On the host that is 3 MiB for Adam on bf16 weights, in blocks that stay in
the cache; on an accelerator 48 MiB, since a slice takes some fifty kernels, which smaller slices would not fill. Random
numbers take up to twice as much, for a block or a slice."""


class StepSlice:
    """A slice of a run, in a step. Its state is fp32 while :meth:`StateStorage.widened` is open.

    ``bucket``, ``group``, ``start``, ``times``, ``main``, ``weights`` and ``keeps_remainder`` are as in a run. With
    ``bits``, ``main`` is joined from weights and bits.
    """

    def __init__(self, in_step: _RunInStep, span: Span) -> None:
        self.in_step, self.span, run = in_step, span, in_step.run
        self.bucket, self.group, self.start = run.bucket, run.group, run.start + span[0]
        self.times = run.times
        # Not the run's tensor, which is the key of the narrow state.
        self.main = flat_slice(run.main, span)
        self.bits: LowBits | None = None
        self.weights = None if run.weights is None else flat_slice(run.weights, span)
        if (bits := run.bits) is not None:
            assert self.weights is not None, "main params have weights"
            self.bits = bits.part(self.main, span[0])
            self.main = self.bits.join(self.weights)
        self.keeps_remainder = run.keeps_remainder
        self.tensors = [self.main]

    def set_grad(self) -> None:
        self.main.grad = self.in_step.run.grad[slice(*self.span)].to(self.main.dtype)


@dataclasses.dataclass(eq=False)
class _RunInStep:
    """A run whose slices are stepped one after the other.

    Attributes:
        before: its state before the step; every slice begins with it.
        after: its state after the slices so far; it becomes the state of the run with the last one.
    """

    run: FlatRun
    before: State
    after: dict[str, Any] = dataclasses.field(default_factory=dict)


class _PlannedSlice(NamedTuple):
    """A slice that the step will come to."""

    in_step: _RunInStep
    span: Span


class StateStorage:
    """Stores the state of one optimizer's shards between steps; see [Note: narrow and offloaded state].

    Args:
        dtype: of the stored state; None for fp32.
        names: the names of element-wise state; one set, which grows.
        offloads: True if it is in host memory.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        dtype: torch.dtype | None,
        device: torch.device,
        names: set[str],
        *,
        offloads: bool,
    ) -> None:
        self._optimizer, self._names = optimizer, names
        self._rounds = dtype is not None
        assert dtype in (None, NARROW)
        self._is_on_host = devices.is_on_host(device)
        self._offload = Offload(device) if offloads else None
        self._planned: collections.deque[list[_PlannedSlice]] = collections.deque()
        self._incoming: dict[_PlannedSlice, tuple[dict[str, Tensor], Arriving]] = {}  # in a step: copies on the device
        self._known_offsets: weakref.WeakKeyDictionary[FlatRun, dict[Span, tuple[Any, Tensor | None]]]
        self._known_offsets = weakref.WeakKeyDictionary()

    @property
    def _state(self) -> MutableMapping[Tensor, State]:
        state: MutableMapping[Tensor, State] = self._optimizer.state  # a different one after each load
        return state

    # --- in a step ---------------------------------------------------------------------------------------------------

    def begin_step(self, runs: Sequence[FlatRun], order: Sequence[int], cuts: Mapping[int, bool]) -> None:
        """Plans a step in slices, and starts to fetch the state of the first ones.

        Args:
            order: the buckets in the order in which they are stepped.
            cuts: by group, whether its runs may be stepped in slices.
        """
        most = _AT_ONCE_NUMEL if self._is_on_host else _DEVICE_NUMEL
        longest = CACHE_BLOCK_NUMEL if self._is_on_host else _DEVICE_NUMEL
        bucket, numel = -1, 0
        for run in sorted(runs, key=lambda run: order.index(run.bucket)):
            for place in self._cut(run, longest if cuts[run.group] else run.main.numel()):
                length = place.span[1] - place.span[0]
                if run.bucket != bucket or numel + length > most:
                    self._planned.append([])
                    bucket, numel = run.bucket, 0
                self._planned[-1].append(place)
                numel += length
        self._fetch_next()

    def slices(self, bucket: int) -> Iterator[list[StepSlice]]:
        """Yields the slices of a bucket, in lists that are stepped in one call. Buckets come in the planned order."""
        while self._planned and self._planned[0][0].in_step.run.bucket == bucket:
            places = self._planned.popleft()
            self._fetch_next()
            yield [StepSlice(*place) for place in places]

    def _fetch_next(self) -> None:
        self._fetch(self._planned[0] if self._planned else ())

    def _fetch(self, places: Sequence[_PlannedSlice]) -> None:
        """Starts to copy the state of slices to the device, if it is offloaded."""
        if self._offload is None or not places:
            return
        kept = [self._per_element(of.before, of.run.main.numel()) for of, _ in places]
        parts = [
            value[slice(*span)] for (_, span), values in zip(places, kept, strict=True) for value in values.values()
        ]
        arriving = self._offload.fetch(parts)
        copies = iter(arriving.places)
        for place, values in zip(places, kept, strict=True):
            self._incoming[place] = dict(zip(values, copies)), arriving  # noqa: B905 - the next slice has the next ones

    def end_step(self, collectives: Collectives) -> None:
        """Returns when the state is stored as it is after the step, also if the step failed.

        Raises:
            CollectiveError: see :meth:`Offload.settle`.
        """
        self._planned.clear()
        if self._offload is not None:
            self._offload.settle(collectives)
        self._incoming.clear()  # a step that failed may leave some

    def uncut_slices(self, runs: Iterable[FlatRun]) -> list[StepSlice]:
        """Returns each run as one slice, for an optimizer that is called once a step."""
        return [StepSlice(*place) for run in runs for place in self._cut(run, run.main.numel())]

    def _cut(self, run: FlatRun, numel: int) -> list[_PlannedSlice]:
        end, of = run.main.numel(), _RunInStep(run, self._state.get(run.main, {}))
        starts = range(0, end, numel) if numel < end else (0,)
        return [_PlannedSlice(of, span) for span in itertools.pairwise((*starts, end))]

    @contextlib.contextmanager
    def widened(self, stepped: Sequence[Any], layout: BufferLayout) -> Iterator[None]:
        """Gives the optimizer the state of slices in fp32 while this is open, and stores it afterwards.

        ``stepped``: slices, and whole parameters, whose state is left as it is.
        """
        slices = [slice_ for slice_ in stepped if isinstance(slice_, StepSlice)]
        # All are fetched already, unless everything is stepped in one call.
        places = (_PlannedSlice(slice_.in_step, slice_.span) for slice_ in slices)
        self._fetch([place for place in places if place not in self._incoming])
        try:
            for slice_ in slices:
                if wide := self._fp32_state(slice_):
                    self._state[slice_.main] = wide
            yield
        finally:  # After an error too: otherwise fp32 state would stay under a tensor that is gone.
            left = [pair for slice_ in slices for pair in self._narrow(slice_, layout)]
            if self._offload is not None and left:
                self._offload.send(*zip(*left, strict=True))

    def _fp32_state(self, slice_: StepSlice) -> State:
        before, wide = slice_.in_step.before, dict[str, Any]()
        kept = self._per_element(before, slice_.in_step.run.main.numel())
        if self._offload is None:
            parts = {name: value[slice(*slice_.span)] for name, value in kept.items()}
        else:
            parts, arriving = self._incoming.pop(_PlannedSlice(slice_.in_step, slice_.span))
            self._offload.arrive(arriving)
        for name, value in before.items():
            if (part := parts.get(name)) is not None:
                wide[name] = _widened(part) if self._rounds else part
            elif name != COUNT:
                # Each slice has its own counter, and all count the same step.
                wide[name] = value.clone() if isinstance(value, Tensor) else value
        return wide

    def _narrow(self, slice_: StepSlice, layout: BufferLayout) -> list[tuple[Tensor, Tensor]]:
        """Stores the state of a slice after its step. Returns pairs (place, value) that are still to be copied."""
        before, after = slice_.in_step.before, slice_.in_step.after
        numel, wide = slice_.in_step.run.main.numel(), self._state.pop(slice_.main, {})
        kept = self._per_element(wide, slice_.main.numel())
        after.update((name, value) for name, value in wide.items() if name not in kept)
        fp32 = (name for name, value in kept.items() if value.dtype == torch.float32)
        rounded = sorted(fp32) if self._rounds else []
        for name, value in kept.items():
            dtype = NARROW if name in rounded else value.dtype
            if name not in after:
                after[name] = self._memory_for(before.get(name), numel, dtype, value.device)
        if rounded:
            kept |= self._rounded(slice_, {name: kept[name].detach() for name in rounded}, layout)
        left = [(after[name][slice(*slice_.span)], value.detach()) for name, value in kept.items()]
        if self._offload is None:
            for place, value in left:
                if place.data_ptr() != value.data_ptr():
                    place.copy_(value)
            left = []
        if slice_.span[1] == numel and after:
            self._state[slice_.in_step.run.main] = after
        return left

    def _rounded(self, slice_: StepSlice, wide: Mapping[str, Tensor], layout: BufferLayout) -> dict[str, Tensor]:
        """Rounds fp32 state to bf16: into its place, or into new memory on the device if its place is on the host."""
        before, after = slice_.in_step.before, slice_.in_step.after
        step: Any = after.get(_STEP)
        if not _is_number(step):
            step = after[COUNT] = before.get(COUNT, 0) + 1
        places, chances, narrow = self._positions(slice_, layout), list[Tensor](), dict[str, Tensor]()
        for number, (name, value) in enumerate(wide.items()):
            # 32 random bits round two numbers.
            chances = chances or list(halves(draw(places, key_of_step(step, number // 2))))
            is_there = self._offload is None
            narrow[name] = after[name][slice(*slice_.span)] if is_there else torch.empty_like(value, dtype=NARROW)
            round_at_random_(narrow[name], value, chances.pop(0))
        return narrow

    def _memory_for(self, before: Any, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Returns memory in which the state of a run is stored: the memory it had, if dtype, size and kind fit."""
        if (
            isinstance(before, Tensor)
            and (before.dtype, before.shape) == (dtype, (numel,))
            # Loaded state, and state joined to other runs since, is not pinned.
            and (self._offload is None or self._offload.is_pinned(before))
        ):
            return before
        # Zeros: the padding between two parameters is stepped along, and stays zero.
        return self._offload.zeros(numel, dtype) if self._offload else torch.zeros(numel, dtype=dtype, device=device)

    def _positions(self, slice_: StepSlice, layout: BufferLayout) -> Tensor:
        """Returns the position of each element of a slice in its parameter: int32, for :func:`.random_rounding.draw`.

        The padding behind a parameter counts on.
        """
        run, numel, device = slice_.in_step.run, slice_.main.numel(), slice_.main.device
        places = torch.arange(numel, dtype=torch.int32, device=device)
        known = self._known_offsets.setdefault(run, {})
        if slice_.span not in known:
            known[slice_.span] = self._offsets(slice_, layout)
        ahead, lengths = known[slice_.span]
        # One call for all parameters: a run may have thousands.
        ahead = ahead if lengths is None else torch.repeat_interleave(ahead, lengths, output_size=numel)
        return places.add_(ahead)

    def _offsets(self, slice_: StepSlice, layout: BufferLayout) -> tuple[Any, Tensor | None]:
        """Returns the position of a slice's first element in its parameter, and None.

        For a slice of several parameters these are tensors: the position that the first element would have in each, and
        their lengths. They are kept from step to step, since copying them to a device makes the host wait.
        """
        (first, end), shards = slice_.span, slice_.in_step.run.shards
        starts = [shard.offset - shards[0].offset for shard in shards]
        # The first parameter may begin before the slice, and end before it if the slice begins with padding.
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
        """Returns the state of a shard, or of a run, in fp32. Nothing is converted before it is read."""
        return ConvertedOnRead(state, _widened) if self._rounds else state

    def keep_loaded(self, shards: Iterable[ParamShard]) -> None:
        """Stores state that was set from outside: rounds it to the nearest, or widens it if state is kept in fp32."""
        before, after = (torch.float32, NARROW) if self._rounds else (NARROW, torch.float32)
        for shard in shards:
            kept = self._state.get(shard.main, {}) if shard.is_cut else {}
            for name, value in self._per_element(kept, shard.numel).items():
                # Where main params are kept as low bits, torch leaves loaded state in its dtype.
                may_be_narrow = self._rounds or shard.bits is not None
                dtype = after if may_be_narrow and value.dtype == before else value.dtype
                # Pinned in the next step, by run: thousands of shards would be pinned one by one here.
                kept[name] = value.to(dtype) if self._offload is None else devices.on_host(value, dtype)

    def names_kept_on_host(self, shard: ParamShard, values: Mapping[str, Any]) -> Iterable[str]:
        """Returns the names of a shard's loaded state that need not be copied to the device.

        That is all element-wise state if it is offloaded. It is none for optimizers with a ``load_state_dict`` of their
        own, which may read what is loaded.
        """
        if self._offload is None or not shard.is_cut or _looks_at_loaded(self._optimizer):
            return ()
        return self._per_element(values, shard.numel)

    def copy_of(self, value: Tensor) -> Tensor:
        """Returns a copy of state, in the memory in which state is stored."""
        return value.clone() if self._offload is None else devices.on_host(value, value.dtype, copy=True)

    def _per_element(self, state: Mapping[str, Any], numel: int) -> dict[str, Tensor]:
        """Returns the element-wise entries of the state of ``numel`` elements."""
        return {name: value for name, value in state.items() if is_per_element(name, value, (numel,), self._names)}


def _looks_at_loaded(optimizer: torch.optim.Optimizer) -> bool:
    kind: Any = type(optimizer)
    is_torchs_load = kind.load_state_dict is torch.optim.Optimizer.load_state_dict
    return not is_torchs_load or not kind.__setstate__.__module__.startswith("torch.optim.")


def _widened(value: Any) -> Any:
    """Returns element-wise state in fp32, also that of an optimizer that keeps bf16 itself. No counter is 1-D."""
    return value.float() if isinstance(value, Tensor) and value.dtype == NARROW and value.dim() == 1 else value


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1
    return isinstance(value, int | float) and not isinstance(value, bool)
