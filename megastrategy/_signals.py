"""Signals that SLURM sends to a job: SIGTERM before it ends, and one of the user's choice to save and queue again.

Lightning acts on them wherever they find a rank, and both take collectives: a broadcast for the first, a checkpoint
for the second. Unless a signal finds all ranks between the same two collectives, those are matched with the wrong
ones, and ranks hang or fail, under "ddp" too. Here the handlers only remember, and the ranks agree where Lightning has
them compare notes in any case: before every batch.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from .core import Collectives

_log = logging.getLogger("megastrategy")


class SignalAgreement:
    """Takes the place of three methods on objects of one Trainer, until :meth:`remove`.

    Args:
        trainer: the Trainer, before it registers its signal handlers.
        collectives: between host memories, to agree over.
    """

    def __init__(self, trainer: Any, collectives: Collectives) -> None:
        self._trainer, self._collectives = trainer, collectives
        self._connector, self._loop = trainer._signal_connector, trainer.fit_loop.epoch_loop
        self._terminated = False
        self._num_requeues = self._num_requeues_done = 0
        self._requeue_signal = 0
        self._broadcast = self._loop._broadcast_sigterm_tensor
        self._save_and_requeue = self._connector._slurm_sigusr_handler_fn
        self._connector._sigterm_notifier_fn = self._remember_to_end
        self._connector._slurm_sigusr_handler_fn = self._remember_to_requeue
        self._loop._broadcast_sigterm_tensor = self._agree

    def remove(self) -> None:
        """Lightning's own methods again."""
        for name in ("_sigterm_notifier_fn", "_slurm_sigusr_handler_fn"):
            vars(self._connector).pop(name, None)
        vars(self._loop).pop("_broadcast_sigterm_tensor", None)
        self._collectives.close()

    def _remember_to_end(self, signum: int, frame: Any) -> None:
        _log.info("rank %d: received SIGTERM; all ranks stop before the next batch", self._trainer.global_rank)
        launcher = self._trainer.strategy.launcher
        if launcher is not None and not self._terminated:
            launcher.kill(signum)
        self._terminated = True

    def _remember_to_requeue(self, signum: int, frame: Any) -> None:
        _log.info(
            "rank %d: received signal %d; all ranks save before the next batch", self._trainer.global_rank, signum
        )
        self._num_requeues += 1
        self._requeue_signal = signum

    def _agree(self) -> None:
        received = torch.tensor([self._terminated, self._num_requeues, self._requeue_signal])
        self._collectives.all_reduce_max(received).wait()
        terminated, num_requeues, requeue_signal = received.tolist()
        if num_requeues > self._num_requeues_done:  # the same signal may reach another rank a batch later
            self._num_requeues_done = num_requeues
            self._save_and_requeue(requeue_signal, None)
        if terminated:
            self._connector.received_sigterm = True
            self._broadcast()  # rank 0's flag, which all have now; raises SIGTERMException
