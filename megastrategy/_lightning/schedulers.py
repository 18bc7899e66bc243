"""Learning rate schedulers that callbacks make during a fit."""

from __future__ import annotations

from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from ..core import DistributedOptimizer


def with_users_optimizers(configs: list[Any]) -> list[Any]:
    """Gives every scheduler the user's own optimizer in place of a sharded one, and returns the list.

    Schedulers of ``configure_optimizers`` have it already. StochasticWeightAveraging makes its own on
    ``trainer.optimizers[0]``. LearningRateMonitor compares the optimizers of the schedulers with those of the Trainer,
    and would take the two for different ones: it would log a ``lr-DistributedOptimizer``, and each rate twice.

    The learning rate finder compares its own scheduler's with the Trainer's before any callback logs, so that one is
    left unchanged.
    """
    for config in configs:
        optimizer = getattr(config.scheduler, "optimizer", None)
        is_finders = type(config.scheduler).__module__.endswith(".tuner.lr_finder")
        if isinstance(optimizer, DistributedOptimizer) and not is_finders:
            _HasSeenStep(optimizer.optimizer, last_epoch=0)
            config.scheduler.optimizer = optimizer.optimizer
    return configs


class _HasSeenStep(LRScheduler):
    """Makes torch record on an optimizer that ``step`` was called, and changes nothing else.

    A scheduler that gets the optimizer later reads the record, and would warn that it was stepped too early.
    """

    def _initial_step(self) -> None:
        """Does nothing: a scheduler's first step would set the rates."""
