"""Raises at the line that touches memory in flight, where poison is only seen in the result.

On the host backward runs in the thread of its caller, so that one mode sees all that a rank does: autograd's own
operators, the optimizer's, and the user's. Collectives tell of themselves where they are
:class:`~.lazy_collectives.LazyCollectives`.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from .lazy_collectives import Flight, Observer, Span, flights, is_own_work, observed_by, place_of_caller, violated
from .thread_mode import ThreadMode

MAIN = "main"


class PaperStream(torch.cpu.Stream):
    """One of :class:`Streams`, to be passed off as ``torch.cpu.current_stream()``."""

    def __init__(self, streams: Streams, name: str) -> None:
        super().__init__()
        self._streams, self.name = streams, name

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PaperStream) and (self._streams, self.name) == (other._streams, other.name)

    def __hash__(self) -> int:
        return hash(self.name)

    def wait_stream(self, stream: Any) -> None:
        with self._streams.on(self.name):
            self._streams.wait_for(stream.name)


class Streams:
    """Streams as a device has them, on paper: what is queued on one is ordered behind what it has waited for alone.

    A clock for each stream says how far it knows the others to be. Everything is done at once all the same; a guard
    compares what was done with what a stream may count on.
    """

    def __init__(self) -> None:
        self.current = MAIN
        self._now: collections.Counter[str] = collections.Counter()
        self._known: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)

    @contextlib.contextmanager
    def on(self, name: str) -> Iterator[None]:
        """Queues what follows on another stream, as ``torch.cuda.stream`` does."""
        before, self.current = self.current, name
        try:
            yield
        finally:
            self.current = before

    def wait_for(self, name: str) -> None:
        """Orders the present stream behind all that is queued on another by now, as ``wait_stream`` does."""
        self._known[self.current] |= self._known[name]
        self._known[self.current][name] = self._now[name]

    @property
    def current_stream(self) -> PaperStream:
        """The present one, as torch would give it out."""
        return PaperStream(self, self.current)

    def count(self) -> int:
        """Something is queued on the present stream. Returns its number there."""
        self._now[self.current] += 1
        return self._now[self.current]

    def is_behind(self, name: str, number: int) -> bool:
        """Whether what is queued on the present stream now comes after the ``number``-th on another."""
        return name == self.current or self._known[self.current][name] >= number

    def launch(self, name: str) -> None:
        """A collective begins, on a stream of its own that is behind the present one."""
        present = self.current
        with self.on(name):
            self.wait_for(present)
            self.count()


@dataclasses.dataclass(frozen=True)
class _Access:
    span: Span
    writes: bool
    stream: str
    number: int
    what: str


class InFlightGuard(ThreadMode, Observer):
    """While it is entered, raises a ContractError if this thread touches memory in flight, or writes what may be read
    in flight.

    Args:
        streams: on which this thread queues; with them it also raises where two that touch the same memory are
            ordered by nothing. A wait for a collective then serves the stream that waits, and no other.
    """

    def __init__(self, streams: Streams | None = None) -> None:
        super().__init__()
        self._streams = streams
        self._accesses: list[_Access] = []
        self._names: dict[Flight, str] = {}
        self.num_checked = 0
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        self._stack.enter_context(observed_by(self))
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self._stack.close()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not is_own_work() and _touches_elements(func):
            for tensor, writes in _arguments(func, args, kwargs or {}):
                self._check(Span(tensor), writes, str(func))
        return func(*args, **kwargs or {})

    def _check(self, span: Span, writes: bool, what: str) -> None:
        self.num_checked += 1
        for flight in flights():
            for memory in (*flight.undefined, *flight.read) if writes else flight.undefined:
                if not memory.is_freed and memory.overlaps(span):
                    raise violated(f"{what} at {place_of_caller()} touches memory in flight, of {flight}")
        if self._streams is not None:
            self._order(_Access(span, writes, self._streams.current, self._streams.count(), what))

    def launched(self, flight: Flight) -> None:
        if self._streams is None:
            return
        for memory, writes in flight.accesses():
            self._order(_Access(memory, writes, self._streams.current, self._streams.count(), str(flight)))
        self._names[flight] = name = f"that of {flight}, the {len(self._names) + 1}. of this rank's"
        self._streams.launch(name)

    def waited_for(self, flight: Flight) -> None:
        if self._streams is None or (name := self._names.get(flight)) is None:
            return
        # What it wrote is now known to the stream that waits. Others find it here, and may not be behind it.
        self._streams.wait_for(name)
        for memory, writes in flight.accesses():
            self._note(_Access(memory, writes, name, 1, str(flight)))

    def _order(self, access: _Access) -> None:
        assert self._streams is not None
        for other in self._accesses:
            if (
                (access.writes or other.writes)
                and not other.span.is_freed
                and other.span.overlaps(access.span)
                and not self._streams.is_behind(other.stream, other.number)
            ):
                raise violated(
                    f"{access.what} on stream {access.stream!r} at {place_of_caller()} is not ordered behind "
                    f"{other.what} on stream {other.stream!r}, which touches the same memory"
                )
        self._note(access)

    def _note(self, access: _Access) -> None:
        # A stream's later access to the same memory represents its earlier ones.
        self._accesses = [
            known
            for known in self._accesses
            if not known.span.is_freed
            and not (
                known.stream == access.stream
                and known.writes <= access.writes
                and access.span.start <= known.span.start
                and known.span.end <= access.span.end
            )
        ]
        self._accesses.append(access)


def _touches_elements(func: Any) -> bool:
    """Whether an operator reads or writes elements, and not shapes and places alone."""
    name = func.overloadpacket.__name__
    return not (func.is_view or name in _PLACES_ALONE or name.startswith("new_") or name.endswith("_like"))


_PLACES_ALONE = frozenset(("alias", "detach", "lift_fresh", "set_", "_reshape_alias", "_unsafe_view", "is_pinned"))


def _arguments(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[Tensor, bool]]:
    """The tensors that an operator is given, and whether it writes them."""
    for number, argument in enumerate(func._schema.arguments):
        value = args[number] if number < len(args) else kwargs.get(argument.name)
        writes = argument.alias_info is not None and argument.alias_info.is_write
        for leaf in tree_leaves(value):
            if isinstance(leaf, Tensor) and leaf.device.type == "cpu" and leaf.numel() > 0 and not leaf.is_sparse:
                yield leaf, writes
