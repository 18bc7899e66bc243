"""Simulates one rank of many alike: a program that computes, launches collectives and waits for them. Pure functions.

[Note: what shares what]
Collectives are carried out one after the other, in the order of their launches, as the engine's are. One has phases:
hops that take time and nothing else, and bytes that go as fast as the link lets them. Sending takes processor time as
well, where the host does it (gloo). Then program and collective share the rank's cores: the collective gets what it
needs up to half, or up to what the program leaves, which gets the rest. All ranks are alike, so one represents all;
where a rank has half a core, its neighbour does the same at the same time.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Hashable, Sequence
from typing import Literal

Waits = Literal["gradients", "parameters"]


@dataclasses.dataclass(frozen=True)
class Link:
    """A rank's link in one direction: what it carries in a millisecond, and the milliseconds of a hop."""

    bytes_per_ms: float
    hop_ms: float = 0.0

    def __post_init__(self) -> None:
        if not self.bytes_per_ms > 0 or not self.hop_ms >= 0:
            raise ValueError(f"{self}: expected a positive rate, and a hop of no negative time")


@dataclasses.dataclass(frozen=True)
class Processor:
    """A rank's cores, and what sending takes of them.

    Attributes:
        cores: of a rank; the program takes one. Infinite where communication takes none of them (NCCL).
        ms_per_byte: processor time of a byte that is sent, with receiving and adding up.
    """

    cores: float = math.inf
    ms_per_byte: float = 0.0

    def rates(self, computes: bool, link: Link | None) -> tuple[float, float]:
        """The program's speed, from 0 to 1, and the bytes a millisecond, while it computes and while ``link``
        carries something (None: nothing); see [Note: what shares what]."""
        if link is None:
            return (min(1.0, self.cores) if computes else 0.0), 0.0
        wanted = link.bytes_per_ms * self.ms_per_byte
        left = max(self.cores / 2, self.cores - 1) if computes else self.cores
        used = min(wanted, left)
        rate = link.bytes_per_ms if used >= wanted else used / self.ms_per_byte
        return (min(1.0, self.cores - used) if computes else 0.0), rate


@dataclasses.dataclass(frozen=True)
class Phase:
    """A part of a collective: ``num_hops`` after each other, and ``nbytes`` that this rank sends."""

    link: Link
    num_hops: int
    nbytes: float

    @property
    def alone_ms(self) -> float:
        """Its time, on a rank that does nothing else and has cores enough."""
        return self.num_hops * self.link.hop_ms + self.nbytes / self.link.bytes_per_ms


@dataclasses.dataclass(frozen=True)
class Compute:
    """Milliseconds of one core's work."""

    ms: float


@dataclasses.dataclass(frozen=True)
class Launch:
    """Queues a collective under a key, in place of an earlier one with that key."""

    key: Hashable
    phases: tuple[Phase, ...]


@dataclasses.dataclass(frozen=True)
class Wait:
    """Waits for collectives; one that was never launched is not waited for."""

    keys: tuple[Hashable, ...]
    what: Waits


@dataclasses.dataclass(frozen=True)
class StepEnd:
    """The next step begins."""


Operation = Compute | Launch | Wait | StepEnd


@dataclasses.dataclass(frozen=True)
class SimulatedStep:
    """The last step of a program, in milliseconds.

    Attributes:
        step_ms: from the end of the step before to its own.
        compute_ms: of its work, if nothing were in its way.
        exposed_gradients_ms, exposed_parameters_ms: of waiting.
        wire_ms: of the collectives that it launches, each alone.
        sent_bytes: by this rank.
    """

    step_ms: float
    compute_ms: float
    exposed_gradients_ms: float
    exposed_parameters_ms: float
    wire_ms: float
    sent_bytes: float

    @property
    def exposed_ms(self) -> float:
        return self.exposed_gradients_ms + self.exposed_parameters_ms

    @property
    def slowed_ms(self) -> float:
        """By how much communication held computing up without being waited for."""
        return max(0.0, self.step_ms - self.compute_ms - self.exposed_ms)


def simulate(step: Sequence[Operation], processor: Processor, num_steps: int = 3) -> SimulatedStep:
    """Runs a step's operations so many times and returns the last: what the first one leaves in flight meets the next.

    Args:
        step: what the program does in one step, without :class:`StepEnd`.
        processor: of a rank.
        num_steps: at least 2; the first finds nothing in flight.
    """
    run = _Run([*step, StepEnd()] * num_steps, processor)
    run.to_the_end()
    launched = [phase for op in step if isinstance(op, Launch) for phase in op.phases]
    waited = run.waited_ms[-1]
    return SimulatedStep(
        step_ms=run.ends[-1] - run.ends[-2],
        compute_ms=sum(op.ms for op in step if isinstance(op, Compute)),
        exposed_gradients_ms=waited["gradients"],
        exposed_parameters_ms=waited["parameters"],
        wire_ms=sum(phase.alone_ms for phase in launched),
        sent_bytes=sum(phase.nbytes for phase in launched),
    )


class _Run:
    """The state of a run: the program's place, and the queue's."""

    def __init__(self, operations: Sequence[Operation], processor: Processor) -> None:
        self._operations, self._processor = operations, processor
        self._now, self._place = 0.0, 0
        first = operations[0]
        self._left_ms = first.ms if isinstance(first, Compute) else 0.0
        self._queue: collections.deque[int] = collections.deque()  # numbers of launches
        self._phases: collections.deque[Phase] = collections.deque()  # of the first in the queue, those that are left
        self._hop_ms = self._nbytes = 0.0  # left of the first phase
        self._given: dict[int, tuple[Phase, ...]] = {}
        self._last: dict[Hashable, int] = {}  # by key, its last launch
        self._done = 0  # launches that have ended: they end in order
        self._num_launched = 0
        self.ends: list[float] = []
        self.waited_ms: list[dict[Waits, float]] = []
        self._waited: dict[Waits, float] = {"gradients": 0.0, "parameters": 0.0}

    def to_the_end(self) -> None:
        while self._advance_program():
            operation = self._operations[self._place]
            computes = isinstance(operation, Compute)
            link = self._phases[0].link if self._phases and self._hop_ms <= 0 else None
            speed, rate = self._processor.rates(computes, link)
            until = [self._left_ms / speed] if computes else []
            if self._phases:
                until.append(self._nbytes / rate if link is not None else self._hop_ms)
            # A program that waits for an event without a source would be a fault of this simulator.
            passed = min(until)
            self._now += passed
            if computes:
                self._left_ms = 0.0 if passed == until[0] else self._left_ms - passed * speed
            elif isinstance(operation, Wait):
                self._waited[operation.what] += passed
            if self._phases:
                self._advance_queue(passed, is_over=passed == until[-1], carries=link is not None, rate=rate)

    def _advance_program(self) -> bool:
        """Does what takes no time; whether the program has not ended."""
        while self._place < len(self._operations):
            operation = self._operations[self._place]
            if isinstance(operation, Compute):
                if self._left_ms > 0:
                    return True
            elif isinstance(operation, Wait):
                if any(self._last.get(key, -1) >= self._done for key in operation.keys):
                    return True
            elif isinstance(operation, Launch):
                self._launch(operation)
            else:
                self.ends.append(self._now)
                self.waited_ms.append(self._waited)
                self._waited = {"gradients": 0.0, "parameters": 0.0}
            self._place += 1
            if self._place < len(self._operations):
                after = self._operations[self._place]
                self._left_ms = after.ms if isinstance(after, Compute) else 0.0
        return False

    def _launch(self, launch: Launch) -> None:
        self._last[launch.key] = self._num_launched
        self._given[self._num_launched] = launch.phases
        self._queue.append(self._num_launched)
        self._num_launched += 1
        if len(self._queue) == 1:
            self._begin_collective()

    def _begin_collective(self) -> None:
        """Begins the first of the queue that takes time; those that take none have ended."""
        while self._queue:
            self._phases = collections.deque(self._given.pop(self._queue[0]))
            if self._begin_phase():
                return
            self._end_collective()

    def _begin_phase(self) -> bool:
        while self._phases:
            phase = self._phases[0]
            self._hop_ms, self._nbytes = phase.num_hops * phase.link.hop_ms, phase.nbytes
            if self._hop_ms > 0 or self._nbytes > 0:
                return True
            self._phases.popleft()
        return False

    def _end_collective(self) -> None:
        self._done = self._queue.popleft() + 1

    def _advance_queue(self, passed: float, *, is_over: bool, carries: bool, rate: float) -> None:
        if not carries:
            self._hop_ms = 0.0 if is_over else self._hop_ms - passed
        else:
            self._nbytes = 0.0 if is_over else self._nbytes - passed * rate
        if self._hop_ms > 0 or self._nbytes > 0:
            return
        self._phases.popleft()
        if not self._begin_phase():
            self._end_collective()
            self._begin_collective()
