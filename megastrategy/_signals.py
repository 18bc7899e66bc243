"""Signals that SLURM sends to a job: SIGTERM before it ends, and one of the user's choice to save and queue again.

Lightning acts on them wherever they find a rank, and both take collectives: a broadcast for the first, a checkpoint
for the second. Unless a signal finds all ranks between the same two collectives, those are matched with the wrong
ones, and ranks hang or fail, under "ddp" too. Here the handlers only remember, and the ranks agree where Lightning has
them compare notes in any case: before every batch.

One rank has nobody to agree with, and Lightning compares no notes there. SIGTERM is known to Lightning at once, which
stops after the batch, in training and in evaluation; the other signal is obeyed before the next batch of either, when
no step is half done.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch

from .core import Collectives

_log = logging.getLogger("megastrategy")


class SignalAgreement:
    """Takes the place of methods on objects of one Trainer, until :meth:`remove`.

    Args:
        trainer: the Trainer, before it registers its signal handlers.
        collectives: between host memories, to agree over; None on one rank.
    """

    def __init__(self, trainer: Any, collectives: Collectives | None) -> None:
        self._trainer, self._collectives = trainer, collectives
        self._connector, self._loop = trainer._signal_connector, trainer.fit_loop.epoch_loop
        self._terminated = False
        self._num_requeues = self._num_requeues_done = 0
        self._requeue_signal = 0
        self._broadcast = self._loop._broadcast_sigterm_tensor
        self._save_and_requeue = self._connector._slurm_sigusr_handler_fn
        self._connector._sigterm_notifier_fn = self._remember_to_end
        self._connector._slurm_sigusr_handler_fn = self._remember_to_requeue
        if collectives is not None:
            self._loop._broadcast_sigterm_tensor = self._agree
        else:
            self._loop.advance = self._obeying(self._loop.advance)
            self._loop.val_loop._evaluation_step = self._obeying(self._loop.val_loop._evaluation_step)

    def remove(self) -> None:
        """Lightning's own methods again."""
        for name in ("_sigterm_notifier_fn", "_slurm_sigusr_handler_fn"):
            vars(self._connector).pop(name, None)
        for name in ("_broadcast_sigterm_tensor", "advance"):
            vars(self._loop).pop(name, None)
        vars(self._loop.val_loop).pop("_evaluation_step", None)
        if self._collectives is not None:
            self._collectives.close()

    def _remember_to_end(self, signum: int, frame: Any) -> None:
        alone = self._collectives is None
        when = "it stops after this batch" if alone else "all ranks stop before the next batch"
        _log.info("rank %d: received SIGTERM; %s", self._trainer.global_rank, when)
        launcher = self._trainer.strategy.launcher
        if launcher is not None and not self._terminated:
            launcher.kill(signum)
        self._terminated = True
        if alone:
            self._connector.received_sigterm = True

    def _remember_to_requeue(self, signum: int, frame: Any) -> None:
        who = "it saves" if self._collectives is None else "all ranks save"
        _log.info("rank %d: received signal %d; %s before the next batch", self._trainer.global_rank, signum, who)
        self._num_requeues += 1
        self._requeue_signal = signum

    def _obeying(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """A loop's method for one batch, which a signal that came before goes before."""

        @functools.wraps(method)
        def run(*arguments: Any, **options: Any) -> Any:
            self._requeue(self._num_requeues, self._requeue_signal)
            return method(*arguments, **options)

        return run

    def _requeue(self, num_requeues: int, signum: int) -> None:
        if num_requeues > self._num_requeues_done:  # the same signal may reach another rank a batch later
            self._num_requeues_done = num_requeues
            self._save_and_requeue(signum, None)

    def _agree(self) -> None:
        assert self._collectives is not None
        received = torch.tensor([self._terminated, self._num_requeues, self._requeue_signal])
        self._collectives.all_reduce_max(received).wait()
        terminated, num_requeues, requeue_signal = received.tolist()
        self._requeue(num_requeues, requeue_signal)
        if terminated:
            self._connector.received_sigterm = True
            self._broadcast()  # rank 0's flag, which all have now; raises SIGTERMException
