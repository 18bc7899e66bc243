"""The callback that logs what communication costs a fit.

Imports neither ``lightning.pytorch`` nor ``pytorch_lightning``, whose doors combine it with their own ``Callback``.
"""

from __future__ import annotations

import time
import weakref
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from ..core import DistributedDataParallel, Event, EventKind
from .trainer_strategy import TrainerStrategy

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from ..core.layout.layout import BufferLayout


class TrainerMonitor:
    """Logs three numbers to all loggers, every ``Trainer(log_every_n_steps=...)`` optimizer steps and at the end.

    - ``communication/exposed_ms``: milliseconds a step in which this rank waited for gradients at the end of backward
      and for new weights. Includes waiting for a slower rank. On CUDA the time is the current stream's.
    - ``communication/sent_bytes``: bytes a step that this rank sends of gradients and parameters, by the formula of a
      ring. Microbatches that are accumulated send nothing.
    - ``communication/grad_norm``: the norm of the step that is logged, before clipping, equal on all ranks. It costs a
      pass over this rank's shard and a small collective, so the callback has to be on all ranks. With several
      optimizers the name ends in ``_0``, ``_1``, ...

    The first two are averages over the steps since the last log, and Lightning's loggers write rank 0's.

    Raises:
        MisconfigurationException: at the start of a fit, if the Trainer has no logger or another strategy.
    """

    _misconfiguration: ClassVar[type[Exception]]
    """The package's own error; set by the class that is made from this one."""

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
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
        self._record = _Record(strategy)
        strategy.add_listener(self._record)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Begins to count, also in a trial run like the learning rate finder's, in the middle of a fit's setup."""
        self._logged_step = trainer.global_step
        self._logger_step = 0
        self._norms: dict[str, float] = {}
        self._record.reset()

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        if self._is_due(trainer, trainer.global_step + 1):
            place = [id(candidate) for candidate in trainer.optimizers].index(id(optimizer))
            suffix = f"_{place}" if len(trainer.optimizers) > 1 else ""
            self._norms[f"grad_norm{suffix}"] = optimizer.grad_norm().item()  # type: ignore[attr-defined]

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        self._logger_step = trainer.fit_loop.epoch_loop._batches_that_stepped  # under which the batch's loss is logged
        if self._is_due(trainer, trainer.global_step):
            self._log(trainer)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.log_every_n_steps > 0 and trainer.global_step > self._logged_step:  # type: ignore[attr-defined]
            self._log(trainer)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Forgets the record: a Trainer may be pickled after a fit."""
        self.__dict__.pop("_record", None)

    def _is_due(self, trainer: pl.Trainer, step: int) -> bool:
        interval: int = trainer.log_every_n_steps  # type: ignore[attr-defined]  # set by its logger connector
        return interval > 0 and step // interval > self._logged_step // interval

    def _log(self, trainer: pl.Trainer) -> None:
        num_steps = trainer.global_step - self._logged_step
        exposed_ms, sent_bytes = self._record.pop_totals()
        values = {"exposed_ms": exposed_ms / num_steps, "sent_bytes": sent_bytes / num_steps, **self._norms}
        for logger in trainer.loggers:
            prefix = f"communication{logger.group_separator}"
            logger.log_metrics({f"{prefix}{name}": each for name, each in values.items()}, step=self._logger_step)
        self._logged_step = trainer.global_step
        self._norms = {}


class _Record:
    """Collects the engine's events until they are logged. On CUDA reading a time waits, so that is done only then."""

    def __init__(self, strategy: TrainerStrategy) -> None:
        self._strategy = weakref.ref(strategy)
        self._is_cuda = strategy.root_device.type == "cuda"
        self.reset()

    def reset(self) -> None:
        self._sent_bytes = 0
        self._waits: list[tuple[Any, Any]] = []
        self._wait_start: Any = None

    def __call__(self, event: Event) -> None:
        if event.kind is EventKind.WAIT_START:
            self._wait_start = self._now()
        elif event.kind is EventKind.WAIT_END:
            self._waits.append((self._wait_start, self._now()))
        elif event.kind in (EventKind.REDUCE_START, EventKind.GATHER_START):
            # Counted when it is launched: buckets may have changed by the time of a log.
            model = getattr(self._strategy(), "model", None)
            assert isinstance(model, DistributedDataParallel), "it has just emitted an event"
            self._sent_bytes += _sent_bytes(model.layout, event.kind, event.index)

    def _now(self) -> Any:
        if not self._is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def pop_totals(self) -> tuple[float, int]:
        """Returns the milliseconds of all waits, and the bytes sent, since the last call."""
        if self._is_cuda and self._waits:
            self._waits[-1][1].synchronize()
            exposed_ms = sum(start.elapsed_time(end) for start, end in self._waits)
        else:
            exposed_ms = sum(end - start for start, end in self._waits) * 1e3
        sent_bytes = self._sent_bytes
        self.reset()
        return exposed_ms, sent_bytes


def _sent_bytes(layout: BufferLayout, kind: EventKind, bucket: int) -> int:
    """Computes the bytes that one rank sends for one collective over a bucket.

    By the rings, which send the least possible: a reduce-scatter and an all-gather ``(d - 1) / d`` of the bucket's
    bytes each, an all-reduce the two of them. With instances of the optimizer the ranks of one reduce-scatter and
    gather, and each shard is all-reduced over its owners. Of experts d is the number of ranks that have the same ones.
    """
    place = layout.buckets[bucket]
    buffer = layout.buffers[place.buffer]
    domain = place.domain
    sent_numel = place.shard_numel * (domain.num_shards - 1)
    if kind is not EventKind.REDUCE_START:
        return sent_numel * buffer.dtype.itemsize
    scattered = sent_numel * buffer.grad_wire_dtype.itemsize
    instances = domain.num_instances
    all_reduced = 2 * (place.shard_numel // instances) * (instances - 1) * buffer.sum_dtype.itemsize
    return scattered + all_reduced
