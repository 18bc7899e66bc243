"""The callback that logs what communication costs a fit.

Imports neither ``lightning.pytorch`` nor ``pytorch_lightning``, whose doors combine it with their own ``Callback``.
"""

from __future__ import annotations

import collections
import contextlib
import math
import pickle
import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from lightning_utilities.core.rank_zero import rank_zero_info

from .._bottlenecks import RankTimes, Verdict, verdict_of
from .._faults.recovery import POLL_S, store_of
from ..core import DistributedDataParallel, Event, EventKind
from .trainer_strategy import TrainerStrategy

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from ..core.layout.layout import BufferLayout

_WAITS = ("gradients", "parameters")
"""Names the values of ``index`` in WAIT_START and WAIT_END: what the rank waits for."""
_BATCH, _BETWEEN = "batch", "between batches"
_KEPT_INTERVALS = 1000
"""Bounds the intervals that are kept, so that a rare log does not pile them up."""
_KEPT_LAUNCHES = 50
"""The last reductions of a fit, by which ranks are compared."""
_PATIENCE_S = 3.0
"""Seconds for which rank 0 waits for other ranks' numbers when a fit ends: on some the callback may not be."""


class TrainerMonitor:
    """Logs how long training waits for communication, how much is sent, and how many steps were skipped.

    It logs to all of the Trainer's loggers, every ``Trainer(log_every_n_steps=...)`` optimizer steps, and for those
    that are left when training ends. Each rank logs its own numbers, and Lightning's loggers write rank 0's. They are
    averages over the optimizer steps since it last logged:

    - ``communication/exposed_gradients_ms``, ``communication/exposed_parameters_ms``: milliseconds a step in which the
      rank waited for gradients at the end of backward, and for new weights after the optimizer. Includes waiting for a
      slower rank.
    - ``communication/exposed_ms``: the sum of the two; ``communication/exposed_share``: its part, between 0 and 1, of
      the time spent in training batches, which is without data loading, validation and checkpoints between them.
    - ``communication/sent_bytes``: bytes a step that this rank sends of gradients and parameters. Microbatches that are
      accumulated without synchronisation send nothing. Other messages are small: a byte a parameter tensor, norms, and
      the module's buffers. Where parameters are stepped whole (Muon), their gradients on the way to owners are not
      counted, and weights as on the average of the ranks.
    - ``communication/buckets``: how many there are; more when parameters were unfrozen.
    - ``communication/skipped_steps``: how many of the fit's steps so far changed no weights, because a GradScaler
      met an infinite gradient or (with a GradScaler) ``training_step`` returned None.

    With ``log_norms`` it logs three numbers more, the same on all ranks, of the optimizer step that is logged (with
    several optimizers of each of them, its number at the end of the name): ``norms/grad_norm``, before clipping;
    ``norms/grad_num_zeros``, the number of elements that are zero; ``norms/param_norm``, before the step. They cost two
    passes over a rank's shard in the steps that are logged.

    When a fit ends, rank 0 logs in one sentence the bound of the fit: its input, its own work, the link, or, on CPUs, a
    rank that was late. ``verdict`` has it for programs, on rank 0.

    On CUDA the times are the device's, from CUDA events on the current stream, since there the host does not wait; that
    is not measured yet.

    Raises:
        MisconfigurationException: at the start of a fit, if the Trainer has no logger or another strategy.
    """

    _misconfiguration: ClassVar[type[Exception]]
    """The package's own error; set by the class that is made from this one."""

    def __init__(self, log_norms: bool = False) -> None:
        self._log_norms = log_norms
        self._norms: dict[str, float] = {}
        self._record = _Record(_HostClock(), lambda *_: 0)
        self._first_step = self._logged_step = self._logger_step = 0
        self._judged_from: int | None = None
        self.verdict: Verdict | None = None

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        # evaluation sends no gradients, and needs neither a logger nor this strategy
        if stage != "fit":
            return
        if not trainer.loggers:
            raise self._misconfiguration("Cannot use `CommunicationMonitor` callback with `Trainer(logger=False)`.")
        strategy = trainer.strategy
        if not isinstance(strategy, TrainerStrategy):
            raise self._misconfiguration(
                "`CommunicationMonitor` measures the engine of Trainer(strategy='megatron_ddp'), and this Trainer's "
                f"strategy is {type(strategy).__module__}.{type(strategy).__qualname__}: choose that strategy, or "
                "leave the callback out"
            )
        # the engine takes its listeners when the model is wrapped, which is later; so the strategy counts the bytes
        device = strategy.root_device
        self._record = _Record(_CudaClock(device) if device.type == "cuda" else _HostClock(), _SentBytes(strategy))
        strategy.add_listener(self._record)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Begins to count, also in a trial run like the learning rate finder's, in the middle of a fit's setup."""
        self._first_step = self._logged_step = trainer.global_step
        self._judged_from = self.verdict = None
        self._norms = {}
        self._record.reset()

    def on_train_epoch_start(self, *_: Any, **__: Any) -> None:
        """Leaves out this time: between two batches the next one is loaded, except in these hooks."""
        self._record.drop(_BETWEEN)

    on_validation_start = on_save_checkpoint = on_train_epoch_start

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._record.end(_BETWEEN)
        self._record.start(_BATCH)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._record.end(_BATCH)
        self._logger_step = trainer.fit_loop.epoch_loop._batches_that_stepped  # under which the batch's loss is logged
        if self._is_due(trainer, self._step(trainer)):
            self._log(trainer)
        # The first step has costs that occur once: trial steps, the optimizer's state, first connections.
        if self._judged_from is None and self._step(trainer) > self._first_step:
            self._judged_from = self._step(trainer)
            self._record.begin_to_judge()
        self._record.start(_BETWEEN)

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """Computes the norms on all ranks, which log the same steps."""
        if not self._log_norms or not self._is_due(trainer, self._step(trainer) + 1):
            return
        place = [id(other) for other in trainer.optimizers].index(id(optimizer))
        suffix = f"_{place}" if len(trainer.optimizers) > 1 else ""
        for name in ("grad_norm", "grad_num_zeros", "param_norm"):
            self._norms[f"{name}{suffix}"] = getattr(optimizer, name)().item()

    def _is_due(self, trainer: pl.Trainer, step: int) -> bool:
        """Whether it is time to log after this step."""
        every = _log_every_n_steps(trainer)
        return every > 0 and step // every > self._logged_step // every

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if _log_every_n_steps(trainer) > 0 and self._step(trainer) > self._logged_step:
            self._log(trainer)
        self._judge(trainer)

    def _judge(self, trainer: pl.Trainer) -> None:
        """Logs the bound of the fit on rank 0, if it made more than one step."""
        num_steps = self._step(trainer) - self._judged_from if self._judged_from is not None else 0
        if num_steps < 1:
            return
        total_ms, num_ended = self._record.judged()
        # Intervals with an evaluation in them were dropped: the others give the average.
        input_ms = total_ms[_BETWEEN] / max(num_ended[_BETWEEN], 1) * num_ended[_BATCH] / num_steps
        gradients_ms, parameters_ms = (total_ms[what] / num_steps for what in _WAITS)
        period_ms = total_ms[_BATCH] / num_steps + input_ms
        own = RankTimes(trainer.global_rank, period_ms, input_ms, gradients_ms, parameters_ms, self._record.launches())
        ranks = _numbers_of_all(own, trainer.world_size)
        if trainer.is_global_zero:
            self.verdict = verdict_of(ranks, "lies between batches, where the next is loaded")
            rank_zero_info(self.verdict.sentence)

    def _step(self, trainer: pl.Trainer) -> int:
        """Counts the optimizer steps so far, skipped ones too.

        The Trainer does not count those of an optimizer that manual optimization takes without its wrapper. None of
        these is skipped.
        """
        return self._first_step + max(trainer.global_step - self._first_step, self._record.num_updates)

    def _log(self, trainer: pl.Trainer) -> None:
        model, step = trainer.strategy.model, self._step(trainer)
        assert isinstance(model, DistributedDataParallel), "the fit is going on"
        num_steps, self._logged_step = step - self._logged_step, step
        total_ms, sent_bytes = self._record.pop_totals()
        gradients_ms, parameters_ms = (total_ms[what] / num_steps for what in _WAITS)
        exposed_ms, batch_ms = gradients_ms + parameters_ms, total_ms[_BATCH]
        values = {
            "exposed_ms": exposed_ms,
            "exposed_gradients_ms": gradients_ms,
            "exposed_parameters_ms": parameters_ms,
            "exposed_share": exposed_ms * num_steps / batch_ms if batch_ms > 0 else math.nan,
            "sent_bytes": sent_bytes / num_steps,
            "buckets": len(model.layout.buckets),
            "skipped_steps": step - self._first_step - self._record.num_updates,
        }
        norms, self._norms = self._norms, {}
        for logger in trainer.loggers:
            groups = {"communication": values, "norms": norms}
            separator = logger.group_separator
            named = {f"{group}{separator}{name}": each[name] for group, each in groups.items() for name in each}
            logger.log_metrics(named, step=self._logger_step)


def _numbers_of_all(own: RankTimes, num_ranks: int) -> list[RankTimes]:
    """Returns the numbers of all ranks on rank 0, or only its own if others do not report in time; elsewhere the own.

    They go over the store: a collective would hang where only some ranks have the callback.
    """
    if num_ranks == 1:
        return [own]
    # The store may go with the process that held it: at the end of a fit that must be no error of this one.
    with contextlib.suppress(RuntimeError):
        store = store_of("monitor")
        # As many as fits have ended on this rank, which is as many as on the others.
        number = store.add(f"fits/{own.rank}", 1)
        store.set(f"{number}/{own.rank}", pickle.dumps(own))  # type: ignore[arg-type]  # bytes are taken
        keys = [f"{number}/{rank}" for rank in range(num_ranks)]
        until = time.monotonic() + _PATIENCE_S
        while own.rank == 0 and time.monotonic() < until:
            if store.check(keys):
                return [pickle.loads(store.get(key)) for key in keys]
            time.sleep(POLL_S)
    return [own]


def _log_every_n_steps(trainer: pl.Trainer) -> int:
    every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]  # set by its logger connector
    return every


class _SentBytes:
    """Computes the bytes that a collective over a bucket sends at present. A copy of a Trainer has no model."""

    def __init__(self, strategy: Any) -> None:
        self._strategy = weakref.ref(strategy)

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def __call__(self, kind: EventKind, bucket: int) -> int:
        model = getattr(self._strategy(), "model", None)
        assert isinstance(model, DistributedDataParallel), "it has just emitted an event"
        return _sent_bytes(model.layout, kind, bucket)


def _sent_bytes(layout: BufferLayout, kind: EventKind, bucket: int) -> int:
    """Computes the bytes that one rank sends for one collective over a bucket.

    By the rings, which send the least possible: a reduce-scatter and an all-gather ``(d - 1) / d`` of the bucket's
    bytes each, an all-reduce the two of them (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters
    of workstations", 2009). With instances of the optimizer the ranks of one reduce-scatter and gather, and each shard
    is all-reduced over its owners; without shards those are all ranks. Of experts d is the number of ranks that have
    the same ones. A bucket divides by the number of ranks. A
    backend that takes a tree where it is faster sends about as much on average over the ranks.
    """
    place = layout.buckets[bucket]
    buffer, domain = layout.buffers[place.buffer], place.domain
    sent_numel = place.shard_numel * (domain.num_shards - 1)
    if kind is not EventKind.REDUCE_START:
        return buffer.sent_weight_nbytes(sent_numel)
    scattered, instances = buffer.sent_grad_nbytes(sent_numel), domain.num_instances
    all_reduced = 2 * (place.shard_numel // instances) * (instances - 1) * buffer.sum_dtype.itemsize
    return scattered + all_reduced


class _HostClock:
    """Reads the host's time, where waiting blocks the host."""

    def now(self) -> int:
        return time.perf_counter_ns()

    def elapsed_ms(self, start: int, end: int) -> float:
        return (end - start) / 1e6


class _CudaClock:
    """Reads the device's time, where waiting blocks the current stream and the host runs ahead."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def now(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def elapsed_ms(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        end.synchronize()
        milliseconds: float = start.elapsed_time(end)
        return milliseconds


class _Record:
    """Collects events until they are logged; the listener. Times are subtracted only then, since on CUDA that waits.

    Args:
        clock: of the device.
        sent_bytes: computes the bytes of a collective over a bucket, called at its start, since buckets may change.

    Attributes:
        num_updates: how often an optimizer has changed weights, since the reset.
    """

    def __init__(self, clock: _HostClock | _CudaClock, sent_bytes: Callable[[EventKind, int], int]) -> None:
        self._clock: Any = clock
        self._is_host = isinstance(clock, _HostClock)
        self._bytes_of = sent_bytes
        self.reset()

    def reset(self) -> None:
        """Forgets everything."""
        self.num_updates = 0
        self._started: dict[str, Any] = {}
        self._intervals: list[tuple[str, Any, Any]] = []
        self._total_ms: dict[str, float] = dict.fromkeys((*_WAITS, _BATCH, _BETWEEN), 0.0)
        self._judged_ms: collections.Counter[str] = collections.Counter()
        self._num_judged: collections.Counter[str] = collections.Counter()
        self._sent_bytes = 0
        self._num_reduced = 0
        self._launched: dict[int, tuple[int, int]] = {}  # by bucket: which reduction, and when
        self._launches: collections.deque[tuple[int, int, int | None]] = collections.deque(maxlen=_KEPT_LAUNCHES)

    def __call__(self, event: Event) -> None:
        kind = event.kind
        if kind is EventKind.REDUCE_START or kind is EventKind.GATHER_START:
            # when it is launched: buckets may have changed by the time of a log
            self._sent_bytes += self._bytes_of(kind, event.index)
            if kind is EventKind.REDUCE_START:
                self._launched[event.index] = self._num_reduced, event.time_ns
                self._num_reduced += 1
        elif kind is EventKind.REDUCE_END and event.index in self._launched:
            self._launches.append((*self._launched.pop(event.index), event.ran_ns[1] if event.ran_ns else None))
        elif kind is EventKind.WAIT_START:
            self.start(_WAITS[event.index])
        elif kind is EventKind.WAIT_END:
            self.end(_WAITS[event.index])
        elif kind is EventKind.STEP_END:
            self.num_updates += 1

    def start(self, what: str) -> None:
        """Begins an interval. One that never ended, because of an exception in it, is dropped."""
        self._started[what] = self._clock.now()

    def end(self, what: str) -> None:
        """Ends the interval that began last, if one began: a batch that is None has only an end."""
        if what in self._started:
            self._intervals.append((what, self._started.pop(what), self._clock.now()))
        if len(self._intervals) >= 2 * _KEPT_INTERVALS:  # the older half has ended on the device as well: no waiting
            self._add_up(_KEPT_INTERVALS)

    def drop(self, what: str) -> None:
        """Drops an interval that began and contains something else."""
        self._started.pop(what, None)

    def begin_to_judge(self) -> None:
        """Counts for a verdict from now on."""
        self._add_up(len(self._intervals))
        self._judged_ms.clear()
        self._num_judged.clear()
        self._launches.clear()

    def judged(self) -> tuple[collections.Counter[str], collections.Counter[str]]:
        """Returns the milliseconds of each kind of interval, and how many there were, since then."""
        self._add_up(len(self._intervals))
        return self._judged_ms, self._num_judged

    def launches(self) -> dict[int, tuple[int, int | None]]:
        """The last reductions, by number: when they were launched and when they ended, in nanoseconds of the time of
        day. None on CUDA, where the host runs ahead."""
        if not self._is_host:
            return {}
        offset_ns = time.time_ns() - time.perf_counter_ns()
        return {
            number: (launched + offset_ns, None if ended is None else ended + offset_ns)
            for number, launched, ended in self._launches
        }

    def pop_totals(self) -> tuple[dict[str, float], int]:
        """Returns the milliseconds of each kind of interval, and the bytes sent, since the last call."""
        self._add_up(len(self._intervals))
        total_ms, self._total_ms = self._total_ms, dict.fromkeys(self._total_ms, 0.0)
        sent_bytes, self._sent_bytes = self._sent_bytes, 0
        return total_ms, sent_bytes

    def _add_up(self, count: int) -> None:
        for what, start, end in self._intervals[:count]:
            elapsed_ms = self._clock.elapsed_ms(start, end)
            self._total_ms[what] += elapsed_ms
            self._judged_ms[what] += elapsed_ms
            self._num_judged[what] += 1
        del self._intervals[:count]
