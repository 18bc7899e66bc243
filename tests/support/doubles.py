"""Collectives that record, delay or fail, around real ones. Everything still reaches the other ranks."""

from __future__ import annotations

import dataclasses
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megastrategy.core.collectives import Collectives, Handle, make_collectives
from megastrategy.core.collectives.backend import BackendCollectives, WorkHandle
from megastrategy.core.collectives.instanced import run_now
from megastrategy.core.layout.layout import Spans


@dataclasses.dataclass(frozen=True)
class Call:
    """One collective: its name, the elements, bytes and dtype of the tensor, whether it is the sum that is scaled, and
    when it was started."""

    name: str
    numel: int
    nbytes: int
    dtype: torch.dtype
    time_ns: int


class _Double(Collectives):
    """Every collective goes through ``_do``, which has the one of ``real`` to start."""

    def __init__(self, real: Collectives) -> None:
        super().__init__(real.group)
        self._real = real

    @property
    def is_rank_zero(self) -> bool:
        return self._real.is_rank_zero

    def connect(self, device: torch.device, *, exchanges: bool) -> None:
        self._real.connect(device, exchanges=exchanges)

    @abstractmethod
    def _do(
        self, name: str, tensor: Tensor, *args: float, start: Callable[..., Handle] | None = None, **options: bool
    ) -> Handle:
        """Starts the collective ``name`` on ``tensor``: by ``start``, or with what the real ones have by that name."""

    def all_reduce(self, tensor: Tensor, scale: float) -> Handle:
        return self._do("all_reduce", tensor, scale)

    def all_reduce_max(self, tensor: Tensor) -> Handle:
        return self._do("all_reduce_max", tensor)

    def reduce_scatter(self, tensor: Tensor, scale: float) -> Handle:
        return self._do("reduce_scatter", tensor, scale)

    def reduce_scatter_into(self, sums: Tensor, tensor: Tensor, scale: float) -> Handle:
        def start(sent: Tensor, *args: float, **options: bool) -> Handle:
            return self._real.reduce_scatter_into(sums, sent, *args, **options)

        return self._do("reduce_scatter_into", tensor, scale, start=start)

    def all_gather(self, tensor: Tensor) -> Handle:
        return self._do("all_gather", tensor)

    def gather_spans(self, tensor: Tensor, spans: Spans) -> Handle:
        return self._do("gather_spans", tensor, start=lambda sent: self._real.gather_spans(sent, spans))

    def all_to_all(
        self, received: Tensor, tensor: Tensor, received_sizes: Sequence[int], sizes: Sequence[int]
    ) -> Handle:
        def start(sent: Tensor) -> Handle:
            return self._real.all_to_all(received, sent, received_sizes, sizes)

        return self._do("all_to_all", tensor, start=start)

    def broadcast(self, tensor: Tensor) -> Handle:
        return self._do("broadcast", tensor)


class _OfInstance(_Double):
    """Does the collectives of one instance of the distributed optimizer, as part of the whole double."""

    def __init__(self, real: Collectives, do: Callable[..., Handle]) -> None:
        super().__init__(real)
        self._do_in_whole = do

    def _do(
        self, name: str, tensor: Tensor, *args: float, start: Callable[..., Handle] | None = None, **options: bool
    ) -> Handle:
        return self._do_in_whole(name, tensor, *args, start=start or getattr(self._real, name), **options)


class RecordingCollectives(_Double):
    """Writes down every collective, then does it.

    Args:
        group: the ranks.
        real: what does it, on ``group``; if it is divided into instances, so is this, and their collectives are among
            the calls. None for what fits the group.
    """

    def __init__(self, group: ProcessGroup, real: Collectives | None = None) -> None:
        super().__init__(make_collectives(group, torch.device("cpu")) if real is None else real)
        self.calls: list[Call] = []
        for size, instance in self._real.instances.items():
            self.instances[size] = _OfInstance(instance, self._do)

    def _do(
        self, name: str, tensor: Tensor, *args: float, start: Callable[..., Handle] | None = None, **options: bool
    ) -> Handle:
        self.calls.append(Call(name, tensor.numel(), tensor.nbytes, tensor.dtype, time.perf_counter_ns()))
        handle: Handle = (start or getattr(self._real, name))(tensor, *args, **options)
        return handle

    def _do_before(self, what: str, run: Callable[[], object]) -> Handle:
        """Runs in the thread of the real collectives, between what was started before and what is started after."""
        return start_between(self._real, what, run)

    def close(self) -> None:
        self._real.close()

    def named(self, *names: str) -> list[Call]:
        """The calls of these names, in order."""
        return [call for call in self.calls if call.name in names]


def start_between(real: Collectives, what: str, run: Callable[[], object]) -> Handle:
    """Runs it in the thread of ``real``, or at once where there is none; an error is raised where it is waited for."""
    # The worker of the real one, on purpose. What a backend starts it launches in the caller's thread.
    start = None if isinstance(innermost(real), BackendCollectives) else getattr(real, "_start", None)
    handle: Handle = WorkHandle(what, run_now(run), real) if start is None else start(what, run)
    return handle


def innermost(collectives: Collectives) -> Collectives:
    """The collectives that send, inside of any others."""
    while (real := getattr(collectives, "real", None)) is not None:
        collectives = real
    return collectives


REDUCTIONS = ("reduce_scatter", "reduce_scatter_into", "all_reduce")
EVERYTHING = (*REDUCTIONS, "all_reduce_max", "all_gather", "broadcast")


class DelayingCollectives(RecordingCollectives):
    """Lets ``delay_s`` pass in the worker's thread before each reduction (or what else is named), so buckets stay in
    flight.

    Args:
        group: as for recording.
        delay_s: seconds, or what is asked for them at each call.
        names: the collectives that are late.
        real: as for recording.
    """

    def __init__(
        self,
        group: ProcessGroup,
        delay_s: float | Callable[[], float],
        names: Sequence[str] = REDUCTIONS,
        real: Collectives | None = None,
    ) -> None:
        super().__init__(group, real)
        self._delay_s = delay_s
        self._names = names

    def _do(self, name: str, tensor: Tensor, *args: float, **options: Any) -> Handle:
        if name in self._names:
            seconds = self._delay_s() if callable(self._delay_s) else self._delay_s
            self._do_before("delay", lambda: time.sleep(seconds))
        return super()._do(name, tensor, *args, **options)


class OutOfLuckError(RuntimeError):
    """Raised by a collective that has to fail."""


class FailingCollectives(RecordingCollectives):
    """Fails in one collective, named by :meth:`fail_at`, on this rank. Until then, everything is done."""

    def __init__(self, group: ProcessGroup, real: Collectives | None = None) -> None:
        super().__init__(group, real)
        self._names: Sequence[str] = ()
        self._countdown = 0
        self._on_the_wire = self.has_failed = False

    def fail_at(self, number: int, names: Sequence[str] = EVERYTHING, *, on_the_wire: bool = False) -> None:
        """Makes the ``number``-th collective with one of these names, counted from now on, fail.

        Args:
            number: from 1; 0 for none.
            names: of the collectives that are counted.
            on_the_wire: it starts, and its ``wait`` raises, as does that of all that follow: a connection broke.
                Else it raises in place of starting, as where memory is short, and what follows is done.
        """
        self._countdown, self._names, self._on_the_wire, self.has_failed = number, names, on_the_wire, False

    def _do(self, name: str, tensor: Tensor, *args: float, **options: Any) -> Handle:
        if self._countdown > 0 and name in self._names:
            self._countdown -= 1
            if self._countdown == 0:
                self.has_failed = True
                if not self._on_the_wire:
                    raise OutOfLuckError("out of luck")
        if self.has_failed and self._on_the_wire:

            def fail() -> None:
                raise OutOfLuckError("out of luck")

            return self._do_before(name, fail)
        return super()._do(name, tensor, *args, **options)
