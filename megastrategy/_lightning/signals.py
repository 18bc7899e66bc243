"""Signals that SLURM sends to a job: SIGTERM before it ends, and one of the user's choice to save and queue again.

Lightning acts on them wherever they find a rank, and both take collectives: a broadcast for the first, a checkpoint
for the second. Unless a signal finds all ranks between the same two collectives, those are matched with the wrong
ones, and ranks hang or fail, under "ddp" too. Here the handlers only record and share it
(:mod:`megastrategy._lightning.shared_signals`).

Before every batch of training, and at the end of a fit, the ranks agree, in place of Lightning's own broadcast. Between
two batches of evaluation they poll the store, and do not wait for each other:

- For SIGTERM each rank stops where it is, and reports it. A rank that waits for one that stopped, at the end of the
  validation or before the next batch of training, reads it there and stops too. No step is half done then: a rank
  evaluates after it has sent all of its steps.
- For the other signal all ranks save together, as a single rank does: a validation may last longer than the time that
  the scheduler leaves. If one waits for the others at its end, they come there, and save before the next batch of
  training.

A single rank has no other to agree with. Lightning sees SIGTERM at once, and stops after the batch; the other signal is
obeyed before the next batch, when no step is half done.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .._faults.process_collectives import exception_name
from .._faults.recovery import report_failure
from ..core import CollectiveError, Collectives
from .checked_collectives import compare_calls
from .replaced_methods import ReplacedMethods
from .shared_signals import SharedSignals

if TYPE_CHECKING:
    from .trainer_replicas import TrainerReplicas

_log = logging.getLogger("megastrategy")


class SignalAgreement:
    """Replaces methods on objects of one Trainer, until :meth:`remove`.

    Args:
        trainer: the Trainer, before it registers its signal handlers.
        call_check: the collectives by which ranks agree before a batch; None on one rank.
        sigterm_exception: raised by Lightning for SIGTERM.
        replicas: meet before a batch, when no signal stops this one.
    """

    def __init__(
        self,
        trainer: Any,
        call_check: Collectives | None,
        sigterm_exception: type[BaseException],
        replicas: TrainerReplicas,
    ) -> None:
        self._trainer = trainer
        self._call_check = call_check
        self._sigterm_exception = sigterm_exception
        self._replicas = replicas
        self._connector = trainer._signal_connector
        self._shared = SharedSignals() if call_check is not None else None
        self._terminated = False
        self._num_requeues = self._num_requeues_done = 0
        self._requeue_signal = 0
        self._replaced = ReplacedMethods()
        self._save_and_requeue = self._connector._slurm_sigusr_handler_fn
        self._replaced.add(self._connector, "_sigterm_notifier_fn", self._on_sigterm)
        self._replaced.add(self._connector, "_slurm_sigusr_handler_fn", self._on_requeue_signal)
        fit_loop = trainer.fit_loop
        for loop in (fit_loop.epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop):
            self._run_before(loop, "_evaluation_step", functools.partial(self._obey_before_batch, loop))
        loop = trainer.predict_loop
        self._run_before(loop, "_predict_step", functools.partial(self._obey_before_batch, loop))
        if self._shared is None:
            self._run_before(fit_loop.epoch_loop, "advance", self._save_before_batch)
        else:
            self._replaced.add(fit_loop.epoch_loop, "_broadcast_sigterm_tensor", self._agree_before_batch)
            # no next batch comes before which ranks would stop
            self._run_before(fit_loop, "on_run_end", self._agree)
            self._replaced.add(trainer, "_run_stage", self._stopping_with_others(trainer._run_stage))
            self._replaced.add(fit_loop, "run", _reporting_failures(fit_loop.run))

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies as None: a copy of the Trainer runs nothing that a signal could end."""
        return type(None), ()

    def remove(self) -> None:
        """Puts Lightning's own methods back."""
        self._replaced.remove()

    def _run_before(self, loop: Any, name: str, do: Callable[[], None]) -> None:
        """Replaces a loop's method by one that calls ``do`` first."""
        method = getattr(loop, name)

        @functools.wraps(method)
        def run(*arguments: Any, **options: Any) -> Any:
            do()
            return method(*arguments, **options)

        self._replaced.add(loop, name, run)

    # --- handlers ----------------------------------------------------------------------------------------------------

    def _on_sigterm(self, signum: int, frame: Any) -> None:
        when = "it stops after this batch" if self._shared is None else "all ranks stop before the next batch"
        _log.warning("rank %d: received SIGTERM; %s", self._trainer.global_rank, when)
        launcher = self._trainer.strategy.launcher
        if launcher is not None and not self._terminated:
            launcher.kill(signum)
        self._terminated = True
        if self._shared is None:
            self._connector.received_sigterm = True
        else:
            self._shared.share_sigterm()

    def _on_requeue_signal(self, signum: int, frame: Any) -> None:
        who = "it saves" if self._shared is None else "all ranks save"
        _log.warning("rank %d: received signal %d; %s before the next batch", self._trainer.global_rank, signum, who)
        self._num_requeues += 1
        self._requeue_signal = signum
        if self._shared is not None:
            self._shared.share_requeue(self._num_requeues, signum)

    # --- evaluation --------------------------------------------------------------------------------------------------

    def _obey_before_batch(self, loop: Any) -> None:
        """Obeys signals that came before a batch of evaluation."""
        if self._shared is None:
            self._requeue(self._num_requeues, self._requeue_signal)
            if self._terminated:
                raise self._sigterm_exception
        elif loop.batch_progress.current.ready > 0:  # the first may take all ranks, for buffers of the module
            self._obey_shared(self._shared)

    def _obey_shared(self, shared: SharedSignals) -> None:
        signum = shared.poll(self._num_requeues_done)
        if signum:
            self._requeue(self._num_requeues_done + 1, signum)
        if shared.terminates:
            shared.report_stop()
            self._connector.received_sigterm = True
            raise self._sigterm_exception

    def _stopping_with_others(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps the run: a failure that follows from other ranks having stopped for SIGTERM ends this rank in the
        same way."""

        @functools.wraps(method)
        def run(*arguments: Any, **options: Any) -> Any:
            try:
                return method(*arguments, **options)
            except RuntimeError as error:  # the engine's, or a backend's from an unwatched collective
                if self._shared is None or not self._shared.has_any_stopped():
                    raise
                rank = self._trainer.global_rank
                _log.warning("rank %d: stops, since another did for SIGTERM. It was interrupted by: %s", rank, error)
                self._shared.report_stop()
                self._connector.received_sigterm = True
                raise self._sigterm_exception from error

        return run

    # --- training ----------------------------------------------------------------------------------------------------

    def _save_before_batch(self) -> None:
        """Obeys a requeue signal on one rank before a batch, when no step is half done."""
        self._requeue(self._num_requeues, self._requeue_signal)
        self._replicas.begin_batch()

    def _agree_before_batch(self) -> None:
        self._agree()
        self._replicas.begin_batch()

    def _requeue(self, num_requeues: int, signum: int) -> None:
        if num_requeues > self._num_requeues_done:  # the same signal may reach another rank a batch later
            self._num_requeues_done = num_requeues
            self._save_and_requeue(signum, None)

    def _agree(self) -> None:
        assert self._call_check is not None
        facts = [self._terminated, self._num_requeues, self._requeue_signal]
        terminated, num_requeues, requeue_signal = compare_calls(self._call_check, "batch", facts)
        self._requeue(num_requeues, requeue_signal)
        if terminated:
            self._connector.received_sigterm = True
            raise self._sigterm_exception


def _reporting_failures(run: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a loop's run: other ranks learn of a failure before this rank cleans up behind it.

    Lightning's LearningRateFinder restores its checkpoint in a ``finally``, with a barrier, before ``on_exception``.
    """

    @functools.wraps(run)
    def run_and_report(*arguments: Any, **options: Any) -> Any:
        try:
            return run(*arguments, **options)
        except CollectiveError:
            raise  # it follows from another rank's failure
        except Exception as error:
            report_failure(exception_name(), error)
            raise

    return run_and_report
