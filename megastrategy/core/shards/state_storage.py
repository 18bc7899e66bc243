"""Keeps element-wise optimizer state in host memory between steps.

[Note: offloaded state]
With ``offload_optimizer_states`` the element-wise state of shards (Adam's two moments) is in host memory between steps.
A step goes through the shards slice by slice: while the user's optimizer steps one slice on the device, the state of
the next one is fetched, and that of the last one is sent back (:mod:`.offload`).

Code outside of the step need not know about it: saved state is read from the host. Counters stay as they are, and so
does the state of parameters that are stepped whole, which need not be element-wise.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import devices
from ..collectives import Collectives
from ..trials import is_per_element
from .flat_run import CACHE_BLOCK_NUMEL, FlatRun, Span, State, flat_slice
from .offload import Arriving, Offload
from .param_shard import ParamShard

_AT_ONCE_NUMEL, _DEVICE_NUMEL = 2**18, 2**22
"""The most elements of a slice: on the host blocks that stay in the cache; on an accelerator 32 MiB of Adam's state,
since smaller slices would not fill its kernels."""


class StepSlice:
    """A slice of a run, in a step. Its state is on the device while :meth:`StateStorage.on_device` is open.

    ``bucket``, ``group``, ``start``, ``main`` and ``weights`` are as in a run.
    """

    def __init__(self, in_step: _RunInStep, span: Span) -> None:
        self.in_step, self.span, run = in_step, span, in_step.run
        self.bucket, self.group, self.start = run.bucket, run.group, run.start + span[0]
        # Not the run's tensor, which is the key of the state on the host.
        self.main = flat_slice(run.main, span)
        self.weights = None if run.weights is None else flat_slice(run.weights, span)
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
    """Stores the state of one optimizer's shards between steps; see [Note: offloaded state].

    ``names``: the names of element-wise state; one set, which grows.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, device: torch.device, names: set[str]) -> None:
        self._optimizer, self._names = optimizer, names
        self._is_on_host = devices.is_on_host(device)
        self._offload = Offload(device)
        self._planned: collections.deque[list[_PlannedSlice]] = collections.deque()
        self._incoming: dict[_PlannedSlice, tuple[dict[str, Tensor], Arriving]] = {}  # in a step: copies on the device

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
        """Starts to copy the state of slices to the device."""
        if not places:
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
    def on_device(self, stepped: Sequence[Any]) -> Iterator[None]:
        """Gives the optimizer the state of slices on the device while this is open, and sends it back afterwards.

        ``stepped``: slices, and whole parameters, whose state is left as it is.
        """
        slices = [slice_ for slice_ in stepped if isinstance(slice_, StepSlice)]
        # All are fetched already, unless everything is stepped in one call.
        places = (_PlannedSlice(slice_.in_step, slice_.span) for slice_ in slices)
        self._fetch([place for place in places if place not in self._incoming])
        try:
            for slice_ in slices:
                if state := self._fetched_state(slice_):
                    self._state[slice_.main] = state
            yield
        finally:  # After an error too: otherwise state would stay under a tensor that is gone.
            pairs = [pair for slice_ in slices for pair in self._places_on_host(slice_)]
            if pairs:
                self._offload.send(*zip(*pairs, strict=True))

    def _fetched_state(self, slice_: StepSlice) -> State:
        parts, arriving = self._incoming.pop(_PlannedSlice(slice_.in_step, slice_.span))
        self._offload.arrive(arriving)
        state = dict[str, Any]()
        for name, value in slice_.in_step.before.items():
            if name in parts:
                state[name] = parts[name]
            else:  # Each slice has its own counter, and all count the same step.
                state[name] = value.clone() if isinstance(value, Tensor) else value
        return state

    def _places_on_host(self, slice_: StepSlice) -> list[tuple[Tensor, Tensor]]:
        """Takes the state of a slice after its step. Returns pairs (place on the host, value) that are to be copied."""
        before, after = slice_.in_step.before, slice_.in_step.after
        numel, state = slice_.in_step.run.main.numel(), self._state.pop(slice_.main, {})
        kept = self._per_element(state, slice_.main.numel())
        after.update((name, value) for name, value in state.items() if name not in kept)
        for name, value in kept.items():
            if name not in after:
                after[name] = self._memory_for(before.get(name), numel, value.dtype)
        if slice_.span[1] == numel and after:
            self._state[slice_.in_step.run.main] = after
        return [(after[name][slice(*slice_.span)], value.detach()) for name, value in kept.items()]

    def _memory_for(self, before: Any, numel: int, dtype: torch.dtype) -> Tensor:
        """Returns host memory in which the state of a run is stored: the memory it had, if dtype, size and kind fit."""
        if (
            isinstance(before, Tensor)
            and (before.dtype, before.shape) == (dtype, (numel,))
            # Loaded state, and state joined to other runs since, is not pinned.
            and self._offload.is_pinned(before)
        ):
            return before
        # Zeros: the padding between two parameters is stepped along, and stays zero.
        return self._offload.zeros(numel, dtype)

    # --- between steps -----------------------------------------------------------------------------------------------

    def keep_loaded(self, shards: Iterable[ParamShard]) -> None:
        """Moves state that was set from outside to the host."""
        for shard in shards:
            kept = self._state.get(shard.main, {}) if shard.is_cut else {}
            for name, value in self._per_element(kept, shard.numel).items():
                # Pinned in the next step, by run: thousands of shards would be pinned one by one here.
                kept[name] = devices.on_host(value, value.dtype)

    def names_kept_on_host(self, shard: ParamShard, values: Mapping[str, Any]) -> Iterable[str]:
        """Returns the names of a shard's loaded state that need not be copied to the device.

        That is all element-wise state. It is none for optimizers with a ``load_state_dict`` of their own, which may
        read what is loaded.
        """
        if not shard.is_cut or _looks_at_loaded(self._optimizer):
            return ()
        return self._per_element(values, shard.numel)

    def copy_of(self, value: Tensor) -> Tensor:
        """Returns a copy of state on the host."""
        return devices.on_host(value, value.dtype, copy=True)

    def _per_element(self, state: Mapping[str, Any], numel: int) -> dict[str, Tensor]:
        """Returns the element-wise entries of the state of ``numel`` elements."""
        return {name: value for name, value in state.items() if is_per_element(name, value, (numel,), self._names)}


def _looks_at_loaded(optimizer: torch.optim.Optimizer) -> bool:
    kind: Any = type(optimizer)
    is_torchs_load = kind.load_state_dict is torch.optim.Optimizer.load_state_dict
    return not is_torchs_load or not kind.__setstate__.__module__.startswith("torch.optim.")
