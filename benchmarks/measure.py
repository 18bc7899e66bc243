"""Runs on a rank: the engines in turns for their times, and one engine alone for its bytes and waits."""

from __future__ import annotations

import dataclasses
import gc
import math
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.optim import _muon  # type: ignore[attr-defined]

from megastrategy.core import Event, EventKind

from . import counters
from .cases import CASES, Case
from .engines import Engine, EngineSpec
from .processes import Rank

_WARM_UP_STEPS = 2
"""torch DDP rebuilds its buckets after the first step, and optimizers make their state in it."""
_PROBE_BYTES = 8 * 2**20


@dataclasses.dataclass(frozen=True)
class Block:
    """Consecutive steps of one engine: means over them.

    Attributes:
        cpu_ms: processor time of all threads.
        in_step_ms: in the optimizer's ``step()``.
        in_step_cpu_ms: of it, processor time of the thread that called it: neither waiting nor sending.
        orthogonalising_cpu_ms: of that, in the iterations of torch's Muon.
    """

    step_ms: float
    cpu_ms: float
    in_step_ms: float = math.nan
    in_step_cpu_ms: float = math.nan
    orthogonalising_cpu_ms: float = math.nan


@dataclasses.dataclass(frozen=True)
class Timing:
    """One rank's view of a run in turns: by engine its blocks in order, and the loss of every step it took."""

    link_mbit: float
    blocks: dict[str, list[Block]]
    losses: dict[str, list[float]]


@dataclasses.dataclass(frozen=True)
class Alone:
    """One rank's view of one engine that runs alone, in a fresh process.

    Attributes:
        tensor_bytes: in tensors known to Python: parameters, gradients, optimizer state.
        heap_bytes: allocated by anybody, torch's C++ buckets and activations included.
        rss_bytes: the resident memory's highest.
        received_bytes: payload a step, over TCP.
        interface_bytes: a step through the interface, with headers; None on the host's loopback, which is shared.
        reported_wait_ms: a step, as reported by engines that do.
    """

    tensor_bytes: int
    heap_bytes: int | None
    rss_bytes: int
    received_bytes: float
    interface_bytes: float | None
    reported_wait_ms: float | None


def train_step(engine: Engine, microbatches: Tensor, observe: Callable[[], None] = lambda: None) -> Tensor:
    """Does a step; returns its microbatches' mean loss. ``observe`` is called where memory may be at its highest."""
    losses = []
    engine.optimizer.zero_grad()
    for number, tokens in enumerate(microbatches):
        if number < len(microbatches) - 1:
            with engine.not_synced():
                losses.append(_forward_backward(engine, tokens, len(microbatches), lambda: None))
        else:
            losses.append(_forward_backward(engine, tokens, len(microbatches), observe))
    observe()
    start_ns, start_cpu_ns = time.perf_counter_ns(), time.thread_time_ns()
    engine.optimizer.step()
    engine.in_step_ns += time.perf_counter_ns() - start_ns
    engine.in_step_cpu_ns += time.thread_time_ns() - start_cpu_ns
    observe()
    return torch.stack(losses).mean()


def _forward_backward(engine: Engine, tokens: Tensor, num_microbatches: int, observe: Callable[[], None]) -> Tensor:
    logits = engine.model(tokens[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    del logits
    observe()
    (loss / num_microbatches).backward()
    return loss.detach()


def order_of_round(names: list[str], number: int) -> list[str]:
    """Every engine takes every place in turn, and every second round goes backwards, so that none always follows the
    same one."""
    shift = number // 2 % len(names)
    rotated = names[shift:] + names[:shift]
    return rotated[::-1] if number % 2 else rotated


def time_in_turns(
    rank: Rank, case: Case, specs: list[EngineSpec], optimizer: str, num_rounds: int, num_steps: int
) -> Timing:
    """Short blocks of steps, engine after engine, round after round.

    A block begins with a step that is not timed: caches and buffers are warm, and an engine that leaves something in
    flight at the end of a step finds the last one's, so that what is timed are whole periods. The ranks start it
    together, and nothing holds them together inside.
    """
    link_mbit = _measure_link(rank)
    batches = case.batches(rank.number)
    engines, losses = {}, {}
    for spec in specs:
        rank.say(f"building {spec.name}")
        engines[spec.name] = spec.build(case, optimizer)
        losses[spec.name] = [
            train_step(engines[spec.name], batches[step % len(batches)]) for step in range(_WARM_UP_STEPS)
        ]
        engines[spec.name].settle(batches[0, 0, :, :-1])
    blocks: dict[str, list[Block]] = {name: [] for name in engines}
    gc.collect()
    gc.freeze()  # a collection in a block then looks at what the block made, not at all engines

    muon_clock = _MuonClock()

    def clocks_ns(engine: Engine) -> tuple[int, ...]:
        """In the order of a block's fields."""
        in_step_ns = engine.in_step_ns, engine.in_step_cpu_ns
        return time.perf_counter_ns(), time.process_time_ns(), *in_step_ns, muon_clock.total_ns

    def step(name: str) -> None:
        losses[name].append(train_step(engines[name], batches[len(losses[name]) % len(batches)]))

    for number in range(num_rounds):
        for name in order_of_round(list(engines), number):
            rank.say(f"round {number + 1} of {num_rounds}: {name}")
            dist.barrier()
            step(name)
            before_ns = clocks_ns(engines[name])
            for _ in range(num_steps):
                step(name)
            elapsed_ns = [after - before for after, before in zip(clocks_ns(engines[name]), before_ns, strict=True)]
            engines[name].settle(batches[0, 0, :, :-1])
            blocks[name].append(Block(*(1e-6 * elapsed / num_steps for elapsed in elapsed_ns)))
    dist.barrier()
    for engine in engines.values():
        engine.close()
    return Timing(link_mbit, blocks, {name: torch.stack(values).tolist() for name, values in losses.items()})


def _measure_link(rank: Rank) -> float:
    """Measures what rank 0 gets through to rank 1, in Mbit/s: the median of five messages."""
    if rank.size < 2:
        return math.nan
    message, received_s = torch.zeros(_PROBE_BYTES, dtype=torch.uint8), []
    for _ in range(5):
        dist.barrier()
        start_s = time.perf_counter()
        if rank.number == 0:
            dist.send(message, 1)
        elif rank.number == 1:
            dist.recv(message, 0)
        dist.barrier()
        received_s.append(time.perf_counter() - start_s)
    return 8e-6 * _PROBE_BYTES / sorted(received_s)[2]


class _MuonClock:
    """Adds up the processor time in which torch's Muon orthogonalises, from when it is made on."""

    def __init__(self) -> None:
        self.total_ns, self._inner = 0, _muon._zeropower_via_newtonschulz
        _muon._zeropower_via_newtonschulz = self

    def __call__(self, *args: Any) -> Tensor:
        start_ns = time.thread_time_ns()
        orthogonal: Tensor = self._inner(*args)
        self.total_ns += time.thread_time_ns() - start_ns
        return orthogonal


class _WaitClock:
    """Adds up the time between the engine's WAIT_START and WAIT_END."""

    def __init__(self) -> None:
        self.num_waits, self.total_ns, self._since_ns = 0, 0, 0

    def __call__(self, event: Event) -> None:
        if event.kind is EventKind.WAIT_START:
            self._since_ns = event.time_ns
        elif event.kind is EventKind.WAIT_END:
            self.num_waits += 1
            self.total_ns += event.time_ns - self._since_ns


def measure_alone(rank: Rank, case: Case, spec: EngineSpec, optimizer: str, num_steps: int) -> Alone:
    """Bytes, and the waits that the engine reports."""
    _touch_libraries(optimizer)
    batches = case.batches(rank.number)
    gc.collect()
    heap_before, tensors_before = counters.heap_bytes(), counters.tensor_bytes([])
    resident_before, _ = counters.resident_bytes()
    waits = _WaitClock()
    engine = spec.build(case, optimizer, waits)

    def train(steps: int) -> None:
        for number in range(steps):
            train_step(engine, batches[number % len(batches)])

    def received() -> tuple[int, int]:
        dist.barrier()
        return counters.payload_received_bytes(), counters.interface_received_bytes(rank.place.interface)

    train(_WARM_UP_STEPS)
    before, before_ns = received(), waits.total_ns
    train(num_steps)
    after, after_ns = received(), waits.total_ns

    tensors, heaps = [], []

    def observe() -> None:
        gc.collect()
        grads = [param.grad for param in engine.model.parameters() if param.grad is not None]
        tensors.append(counters.tensor_bytes(grads) - tensors_before)
        if heap_before is not None and (heap := counters.heap_bytes()) is not None:
            heaps.append(heap - heap_before)

    rss_bytes = counters.resident_bytes()[1] - resident_before
    train_step(engine, batches[0], observe)
    engine.settle(batches[0, 0, :, :-1])
    dist.barrier()
    engine.close()
    return Alone(
        tensor_bytes=max(tensors),
        heap_bytes=max(heaps) if heaps else None,
        rss_bytes=rss_bytes,
        received_bytes=(after[0] - before[0]) / num_steps,
        interface_bytes=(after[1] - before[1]) / num_steps if rank.place.namespace is not None else None,
        reported_wait_ms=1e-6 * (after_ns - before_ns) / num_steps if waits.num_waits else None,
    )


def _touch_libraries(optimizer: str) -> None:
    """Steps of a small model: what loading and first use of the libraries cost is no engine's."""
    from .engines import ENGINES

    engine, batches = ENGINES["ddp"].build(CASES["tiny"], optimizer), CASES["tiny"].batches(0)
    for _ in range(_WARM_UP_STEPS):
        train_step(engine, batches[0])
