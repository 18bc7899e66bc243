"""Collectives that write as late as they may, around real ones: what the host hides of a device is seen here.

[Note: the contract of one stream]
A collective reads its tensors when it is launched, and may write them at any moment until a wait for it has returned.
On the host of a test most collectives are done long before that, so that a missing wait, an early read or a write in
flight changes no bit. Here each is seen:

- At the launch the tensors are copied, and the real collective is started on the copies: all ranks start the same in
  the same order, whatever is delivered when.
- What the contract leaves undefined is overwritten with poison: NaN, or 0xAB in each byte. Of a reduction that is
  everything, of a gather the others' parts, of a broadcast everything but on rank 0.
- The result is written over the poison at the wait, and nothing but the result: the rest of a reduce-scattered
  tensor stays poison. A backend leaves partial sums there. Sums of zeros are zeros, so zeros are no poison: the padding
  between parameters is sent with the next reduction as it is.
- Until then the memory must not change: a write would be a write into a transfer.
- The memory is known by a weak reference, so that its owner is seen to let go of it in flight.

The real collective begins at the launch and not at the wait, since ranks may rely on that: one that waits for the
first bucket may need a rank that has launched it and is now in other code's collective.
"""

from __future__ import annotations

import contextlib
import os
import random
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import _disable_current_modes

from megastrategy.core.collectives import Collectives, Handle, interface
from megastrategy.core.collectives.rank_check import CALL_ON_EVERY_RANK
from megastrategy.core.layout.layout import Spans

from . import doubles

Delivery = Literal["at-wait", "at-launch", "at-random"]
"""When a result is written: as late as may be, as early, or at a launch or wait of this rank's in between."""

POISON_BYTE = 0xAB
RANDOM_SHARE = 1 / 3  # of what is in flight, delivered at each launch and wait


class ContractError(AssertionError):
    """Raised where the engine, and not the network, is at fault."""


violations: list[str] = []
"""The texts of all that were raised in this process since the last look: one may have been caught on its way."""


def violated(text: str) -> ContractError:
    """The error, which is also noted."""
    violations.append(text)
    return ContractError(text)


_flights: list[weakref.ref[Flight]] = []
_flights_lock = threading.Lock()


def flights() -> list[Flight]:
    """The collectives in flight on all ranks that are threads of this process. Only the ranks' collectives keep them: a
    rank that ends in an error has to let go of its group."""
    return [flight for known in list(_flights) if (flight := known()) is not None and flight.is_guarded]


class Span:
    """The addresses of a tensor's elements, without keeping it alive."""

    def __init__(self, tensor: Tensor) -> None:
        self._storage = StorageWeakRef(tensor.untyped_storage())
        self.start: int = tensor.data_ptr()
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        self.end = self.start + (last + 1) * tensor.itemsize if tensor.numel() > 0 else self.start

    @property
    def is_freed(self) -> bool:
        return bool(self._storage.expired())

    def overlaps(self, other: Span) -> bool:
        """Whether both have an address. Storages do not tell: one may be a slice of another."""
        return self.start < other.end and other.start < self.end


class Memory(Span):
    """The elements of a 1-D contiguous tensor."""

    def __init__(self, tensor: Tensor) -> None:
        assert tensor.dim() == 1, "collectives take 1-D tensors"
        assert tensor.is_contiguous(), "collectives take contiguous tensors"
        super().__init__(tensor)
        self._dtype, self._offset, self._numel = tensor.dtype, tensor.storage_offset(), tensor.numel()

    def tensor(self) -> Tensor:
        """The elements. Writing there counts as no version: no backend's does."""
        return self._view(self._dtype, self._offset, self._numel)

    def bits(self) -> Tensor:
        """The elements as bytes, so that NaN equals NaN."""
        itemsize = self._dtype.itemsize
        return self._view(torch.uint8, self._offset * itemsize, self._numel * itemsize)

    def poison(self) -> None:
        if self._dtype.is_floating_point or self._dtype.is_complex:
            self.tensor().fill_(float("nan"))
        else:
            self.bits().fill_(POISON_BYTE)

    def _view(self, dtype: torch.dtype, offset: int, numel: int) -> Tensor:
        storage = torch.UntypedStorage._new_with_weak_ptr(self._storage.cdata)
        assert storage is not None, "looked at before"
        return torch.empty(0, dtype=dtype).set_(storage, offset, (numel,))


class PartialSums(Memory):
    """Memory in which a reduction may leave sums of some ranks' elements."""

    def poison(self) -> None:
        if self._dtype.is_floating_point or self._dtype.is_complex:
            sums = self.tensor()
            sums.masked_fill_(sums != 0, float("nan"))
        else:
            super().poison()


Copies = Sequence[tuple[Memory, Tensor]]


class Flight:
    """A collective from its launch until a wait for it has returned.

    Args:
        name: of the collective.
        handle: of the real one, which works on copies.
        results: what is written, and where the real one leaves it.
        undefined: what may be written from the launch on, which becomes poison.
        read: memory that may be read in flight, and not written.
    """

    def __init__(
        self, name: str, handle: Handle, results: Copies, undefined: Sequence[Memory], read: Sequence[Memory]
    ) -> None:
        self.place, self._name, self.handle = place_of_caller(), name, handle
        self.undefined, self.read = undefined, read
        self._results = results
        self._is_delivered = self.is_done = self.is_given_up = False
        self._failure: Exception | None = None
        self._lock = threading.RLock()  # any thread may be the first that waits
        self._left: list[tuple[Memory, Tensor]] = []  # what has to be there until something is delivered

    def __str__(self) -> str:
        return f"{self._name} (launched at {self.place})"

    def accesses(self) -> Iterator[tuple[Memory, bool]]:
        """The memory that it has in flight, and whether it may write there."""
        yield from ((memory, True) for memory in self.undefined)
        yield from ((memory, False) for memory in self.read)

    def touches(self, other: Flight) -> bool:
        """Whether one of them may write what the other reads or writes."""
        return any(
            mine.overlaps(theirs)
            for mine, writes_mine in self.accesses()
            for theirs, writes_theirs in other.accesses()
            if writes_mine or writes_theirs
        )

    @property
    def is_freed(self) -> bool:
        return any(memory.is_freed for memory, _ in self.accesses())

    @property
    def is_guarded(self) -> bool:
        """Whether its memory may not be touched."""
        return not (self.is_done or self.is_given_up)

    def begin(self) -> None:
        """Makes the memory that it may write undefined from now on."""
        for memory in self.undefined:
            memory.poison()
        self._left = [(memory, memory.bits().clone()) for memory, _ in self.accesses()]

    def deliver(self) -> None:
        """Writes the results, also before a wait. An error is kept for the wait."""
        with self._lock:
            if self._is_delivered:
                return
            self._is_delivered = True
            try:
                self.handle.wait()
                self._check_untouched()
                for memory, result in self._results:
                    memory.tensor().copy_(result)
                self._left = [(memory, memory.bits().clone()) for memory, _ in self._left]
            except (Exception, ContractError) as error:  # noqa: BLE001 - raised by the wait that it belongs to
                self._failure = error
            self._results = []

    def finish(self) -> None:
        """Ends a wait. Another wait has the same result."""
        with self._lock:
            self.deliver()
            if not self.is_done and self._failure is None:
                self._check_untouched()
            self.is_done, self._left = True, []
            if self._failure is not None:
                raise self._failure

    def _check_untouched(self) -> None:
        for memory, bits in self._left:
            if memory.is_freed:
                raise violated(f"memory of {self} was freed in flight")
            if not torch.equal(memory.bits(), bits):
                elements = (memory.bits() != bits).nonzero()
                raise violated(
                    f"memory of {self} was written in flight: bytes {int(elements[0])} to {int(elements[-1])} "
                    f"of {bits.numel()}"
                )


class _Airspace:
    """The collectives in flight on one rank, over all ranks and inside its instance."""

    def __init__(self, delivery: Delivery, seed: str) -> None:
        self._delivery = delivery
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._flights: list[Flight] = []

    def add(self, flight: Flight) -> None:
        with self._lock:
            # A dropped handle was not waited for: its collective stays in flight as long as its memory exists.
            self._flights = [other for other in self._flights if not other.is_freed]
            for other in self._flights:
                if flight.touches(other):
                    raise violated(f"{flight} has memory that is in flight in {other}")
            flight.begin()
            self._flights.append(flight)
        with _flights_lock:
            _flights[:] = [*(known for known in _flights if known() is not None), weakref.ref(flight)]
        if self._delivery == "at-launch":
            flight.deliver()

    def remove(self, flight: Flight) -> None:
        with self._lock:
            if flight in self._flights:
                self._flights.remove(flight)

    def clear(self) -> None:
        """Gives up the collectives in flight: no wait will come, or an earlier one has failed, and they with it."""
        with self._lock:
            for flight in self._flights:
                flight.is_given_up = True
            self._flights = []

    def pass_time(self) -> None:
        """Something happens on this rank, and a result may come meanwhile."""
        if self._delivery == "at-random":
            with self._lock:
                arriving = [flight for flight in self._flights if self._random.random() < RANDOM_SHARE]
            for flight in arriving:
                flight.deliver()


class _LazyHandle(Handle):
    def __init__(self, flight: Flight, airspace: _Airspace, kept: Tensor | None) -> None:
        self._flight, self._airspace, self._kept = flight, airspace, kept

    def wait(self) -> None:
        with own_work():
            self._airspace.pass_time()
            try:
                self._flight.finish()
            except Exception as error:
                if not isinstance(error, ContractError):
                    self._airspace.clear()
                raise
            finally:
                self._airspace.remove(self._flight)
            if _state.observer is not None:
                _state.observer.waited_for(self._flight)
            self.ran_ns = self._flight.handle.ran_ns


class LazyCollectives(Collectives):
    """See [Note: the contract of one stream].

    Args:
        real: does it, in its own time.
        delivery: when a result is written.
        seed: of at-random, with the rank: ranks differ, as they do in life.
        airspace: of the collectives of all ranks, if these are an instance's.
    """

    def __init__(
        self, real: Collectives, delivery: Delivery = "at-wait", seed: int = 0, airspace: _Airspace | None = None
    ) -> None:
        self.real = real
        super().__init__(real.group, real.rank_check)
        self.progress = real.progress
        self.airspace = airspace or _Airspace(delivery, f"{seed} {real.rank}")
        for size, instance in real.instances.items():
            self.add_instance(size, instance)

    def add_instance(self, size: int, real: Collectives) -> LazyCollectives:
        """Takes in the real collectives of this rank's instance."""
        self.real.instances[size] = real
        self.instances[size] = lazy = LazyCollectives(real, airspace=self.airspace)
        return lazy

    def all_reduce(self, tensor: Tensor, scale: float) -> Handle:
        with own_work():
            sent = tensor.detach().clone()
            handle = self.real.all_reduce(sent, scale)
            return self._launched("all-reduce", handle, [(Memory(tensor), sent)], [Memory(tensor)])

    def all_reduce_max(self, tensor: Tensor) -> Handle:
        with own_work():
            sent = tensor.detach().clone()
            handle = self.real.all_reduce_max(sent)
            # Only the handle may keep the tensor, as a backend's does: ranks meet in one whose result no code reads.
            return self._launched("all-reduce", handle, [(Memory(tensor), sent)], [Memory(tensor)], kept=tensor)

    def reduce_scatter(self, tensor: Tensor, scale: float) -> Handle:
        with own_work():
            sent = tensor.detach().clone()
            own, result = (whole.chunk(self.size)[self.rank] for whole in (tensor, sent))
            handle = self.real.reduce_scatter(sent, scale)
            return self._launched("reduce-scatter", handle, [(Memory(own), result)], [PartialSums(tensor)])

    def reduce_scatter_into(self, sums: Tensor, tensor: Tensor, scale: float) -> Handle:
        with own_work():
            sent, total = tensor.detach().clone(), sums.detach().clone()
            handle = self.real.reduce_scatter_into(total, sent, scale)
            memory = Memory(sums)
            return self._launched("reduce-scatter", handle, [(memory, total)], [memory, PartialSums(tensor)])

    def all_gather(self, tensor: Tensor) -> Handle:
        with own_work():
            sent = tensor.detach().clone()
            handle = self.real.all_gather(sent)
            parts = list(map(Memory, tensor.chunk(self.size)))
            others = [rank for rank in range(self.size) if rank != self.rank]
            results = [(parts[rank], sent.chunk(self.size)[rank]) for rank in others]
            return self._launched("all-gather", handle, results, [parts[rank] for rank in others], [parts[self.rank]])

    def gather_spans(self, tensor: Tensor, spans: Spans) -> Handle:
        with own_work():
            sent = tensor.detach().clone()
            handle = self.real.gather_spans(sent, spans)
            own = [Memory(tensor[start:end]) for start, end in spans[self.rank]]
            places = [slice(*span) for rank, of_rank in enumerate(spans) if rank != self.rank for span in of_rank]
            results = [(Memory(tensor[place]), sent[place]) for place in places]
            return self._launched("all-gather", handle, results, [memory for memory, _ in results], own)

    def all_to_all(
        self, received: Tensor, tensor: Tensor, received_sizes: Sequence[int], sizes: Sequence[int]
    ) -> Handle:
        with own_work():
            sent, came = tensor.detach().clone(), torch.empty_like(received)
            handle = self.real.all_to_all(came, sent, received_sizes, sizes)
            memory = Memory(received)
            return self._launched("all-to-all", handle, [(memory, came)], [memory], [Memory(tensor)])

    def broadcast(self, tensor: Tensor) -> Handle:
        with own_work():
            sent = tensor.detach().clone()
            handle = self.real.broadcast(sent)
            if self.is_rank_zero:
                return self._launched("broadcast", handle, [], [], [Memory(tensor)])
            return self._launched("broadcast", handle, [(Memory(tensor), sent)], [Memory(tensor)])

    def _launched(
        self,
        name: str,
        handle: Handle,
        results: Copies,
        undefined: Sequence[Memory],
        read: Sequence[Memory] = (),
        kept: Tensor | None = None,
    ) -> Handle:
        self.airspace.pass_time()
        flight = Flight(name, handle, results, undefined, read)
        if _state.observer is not None:
            _state.observer.launched(flight)
        self.airspace.add(flight)
        return _LazyHandle(flight, self.airspace, kept)

    # --- everything else is the real one's ---------------------------------------------------------------------------

    @property
    def watchdog(self) -> Any:
        return self.real.watchdog

    @watchdog.setter
    def watchdog(self, watchdog: Any) -> None:
        self.real.watchdog = watchdog

    @property
    def rank_check(self) -> Any:
        return self.real.rank_check

    @rank_check.setter
    def rank_check(self, rank_check: Any) -> None:
        self.real.rank_check = rank_check

    @property
    def is_rank_zero(self) -> bool:
        return self.real.is_rank_zero

    def require_all_ranks(self, what: str, remedy: str = CALL_ON_EVERY_RANK) -> None:
        self.real.require_all_ranks(what, remedy)

    def probe(self, rank: int) -> None:
        self.real.probe(rank)

    def connect(self, device: torch.device, *, exchanges: bool) -> None:
        self.real.connect(device, exchanges=exchanges)

    def close(self) -> None:
        self.airspace.clear()
        self.real.close()

    def _finish_started(self) -> None:
        self.real._finish_started()

    def _start(self, what: str, run: Callable[[], object]) -> Handle:
        """For doubles around this one that put something into the real one's thread, or in its place."""
        return doubles.start_between(self.real, what, run)


class Observer:
    """Called with this thread's collectives."""

    def launched(self, flight: Flight) -> None:
        """A collective begins."""

    def waited_for(self, flight: Flight) -> None:
        """Work that follows on the waiting stream may use its result."""


class _State(threading.local):
    is_own_work = False
    observer: Observer | None = None


_state = _State()


@contextlib.contextmanager
def observed_by(observer: Observer) -> Iterator[None]:
    """Calls the observer while it is entered."""
    before, _state.observer = _state.observer, observer
    try:
        yield
    finally:
        _state.observer = before


@contextlib.contextmanager
def own_work() -> Iterator[None]:
    """In it the double works, and not the engine."""
    before, _state.is_own_work = _state.is_own_work, True
    try:
        # No guard's mode either: a process group that goes through Python on the way to its backend, in several threads
        # at a time, has ended the interpreter (a segmentation fault in torch 2.13).
        with contextlib.nullcontext() if _state.observer is None else _disable_current_modes():
            yield
    finally:
        _state.is_own_work = before


def is_own_work() -> bool:
    """Whether the double works."""
    return _state.is_own_work


def place_of_caller() -> str:
    """The file and line that the engine or the test is at."""
    frame: Any = sys._getframe(1)
    while frame.f_back is not None and (
        frame.f_code.co_filename in _OWN_FILES or f"{os.sep}torch{os.sep}" in frame.f_code.co_filename
    ):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


_OWN_FILES = {__file__, doubles.__file__, interface.__file__, contextlib.__file__}
_OWN_FILES.add(os.path.join(os.path.dirname(__file__), "in_flight.py"))
