"""SIGTERM in a fit, as SLURM sends it before it ends a job: all ranks stop before the same batch.

Lightning's handler for it is a collective (a broadcast, since 2.5.2), run wherever the signal finds a rank. Unless it
finds all ranks between the same two collectives, those are matched with the wrong ones, and ranks hang or fail, under
"ddp" too. Here the handler only remembers, and the ranks agree where Lightning has them compare notes in any case:
before every batch.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

_log = logging.getLogger("megastrategy")


class SigtermAgreement:
    """Takes the place of two methods on objects of one Trainer, until :meth:`remove`.

    Args:
        trainer: the Trainer, before it registers its signal handlers.
        device: of this rank.
    """

    def __init__(self, trainer: Any, device: torch.device) -> None:
        self._trainer, self._device = trainer, device
        self._connector, self._loop = trainer._signal_connector, trainer.fit_loop.epoch_loop
        self._received = False
        self._broadcast = self._loop._broadcast_sigterm_tensor
        self._connector._sigterm_notifier_fn = self._remember
        self._loop._broadcast_sigterm_tensor = self._agree

    def remove(self) -> None:
        """Lightning's own methods again."""
        vars(self._connector).pop("_sigterm_notifier_fn", None)
        vars(self._loop).pop("_broadcast_sigterm_tensor", None)

    def _remember(self, signum: int, frame: Any) -> None:
        _log.info("rank %d: received SIGTERM; all ranks stop before the next batch", self._trainer.global_rank)
        launcher = self._trainer.strategy.launcher
        if launcher is not None and not self._received:
            launcher.kill(signum)
        self._received = True

    def _agree(self) -> None:
        received = torch.tensor([self._received], dtype=torch.uint8, device=self._device)
        try:
            torch.distributed.all_reduce(received, torch.distributed.ReduceOp.MAX)
        except RuntimeError:
            return  # a rank's process ended: as after Lightning's own, the next collective says so, and better
        if received.item():
            self._connector.received_sigterm = True
            self._broadcast()  # rank 0's flag, which all have now; raises SIGTERMException
