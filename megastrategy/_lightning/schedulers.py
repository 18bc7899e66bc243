"""Learning rate schedulers that callbacks make while a fit goes on."""

from __future__ import annotations

from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from ..core import DistributedOptimizer


class SchedulersHoldUsersOptimizers:
    """Comes in front of a Trainer's ``DDPStrategy``: every scheduler holds the user's own optimizer, whoever made it.

    Those of ``configure_optimizers`` do so by themselves. StochasticWeightAveraging makes its own on
    ``trainer.optimizers[0]``. LearningRateMonitor compares the optimizers of the schedulers with those of the Trainer,
    and would take the two for different ones: it would log a ``lr-DistributedOptimizer``, and each rate twice.

    The learning rate finder compares its own scheduler's with the Trainer's, too, before anybody logs anything. So that
    one is left alone.
    """

    _lr_scheduler_configs: list[Any]

    @property
    def lr_scheduler_configs(self) -> list[Any]:
        """Lightning's list itself, to which callbacks append. It is looked through at each access, since nobody tells
        of a new one."""
        for config in self._lr_scheduler_configs:
            optimizer = getattr(config.scheduler, "optimizer", None)
            is_finders = type(config.scheduler).__module__.endswith(".tuner.lr_finder")
            if isinstance(optimizer, DistributedOptimizer) and not is_finders:
                _HasSeenStep(optimizer.optimizer, last_epoch=0)
                config.scheduler.optimizer = optimizer.optimizer
        return self._lr_scheduler_configs

    @lr_scheduler_configs.setter
    def lr_scheduler_configs(self, configs: list[Any]) -> None:
        self._lr_scheduler_configs = configs


class _HasSeenStep(LRScheduler):
    """Has torch note on an optimizer that ``step`` was called, and changes nothing else.

    A scheduler that is given the optimizer later asks for the note, and would warn that it was stepped too early.
    """

    def _initial_step(self) -> None:
        """Does nothing: a scheduler's first step would set the rates."""
