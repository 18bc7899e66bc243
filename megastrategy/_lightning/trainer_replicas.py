"""The replicas of a Trainer's fit: what one that comes back takes over, and which of them writes.

The state of a Trainer is loaded at the end of a backward, where batch and step are under way here as they were in the
replica that has sent it. A batch that is dropped runs again inside of its optimizer step, before schedules step. With
``accumulate_grad_batches`` and in manual optimization it is lost.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch.nn import Module

from .._replicas import Replicas, set_epoch
from .callbacks import is_a

if TYPE_CHECKING:
    import lightning.pytorch as pl

_REFUSED = {
    "StochasticWeightAveraging": "a replica that comes back cannot take over its schedule. Use WeightAveraging",
    "LearningRateFinder": "it trains before the fit, where replicas do not meet. Run it without replicas",
}
"""Callbacks of Lightning, with the reason and the way out."""


class TrainerReplicas:
    """The replicas of one strategy, or None: then each method is that of a single replica."""

    def __init__(self, replicas: Replicas | None) -> None:
        self._replicas: Any = replicas
        self._trainer: Any = None  # of the fit that has joined
        self._is_behind = False  # whether the loader is not at the place of the others yet
        self._ready_at_begin = 0

    def sampler_ranks(self, module: pl.LightningModule | None, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Returns the arguments of a sampler: for batches of training those of all replicas."""
        if self._replicas is None or module is None or not module.trainer.training:
            return kwargs
        ranks: dict[str, Any] = self._replicas.sampler_ranks(**kwargs)
        return ranks

    def join(self, trainer: pl.Trainer) -> None:
        """Registers the Trainer's state if this is a fit, whose model is wrapped.

        Raises:
            ValueError: for a callback, or a kind of optimization, that cannot be used with replicas.
        """
        if self._replicas is None or trainer.state.fn != "fit":
            return
        for name, reason in _REFUSED.items():
            if any(is_a(callback, name) for callback in trainer.callbacks):  # type: ignore[attr-defined]
                raise ValueError(f"replicas=: the callback {name} cannot be used, since {reason}")
        if not trainer.lightning_module.automatic_optimization and len(trainer.strategy.optimizers) > 1:
            raise ValueError(
                "replicas=: manual optimization of several optimizers has several votes a batch, and one that comes "
                "back may begin between them. Use one optimizer with several parameter groups"
            )
        self._trainer = trainer
        self._replicas.register("trainer", self._state, self._take)
        self._replicas.register("callbacks", self._callbacks_state, self._take_callbacks, is_copied=False)

    # --- the state ---------------------------------------------------------------------------------------------------

    def _parts(self) -> list[Any]:
        loop = self._trainer.fit_loop
        return [
            loop.epoch_progress,
            loop.epoch_loop.batch_progress,
            loop.epoch_loop.scheduler_progress,
            loop.epoch_loop.automatic_optimization.optim_progress,
            loop.epoch_loop.manual_optimization.optim_step_progress,
            self._trainer.precision_plugin,
            *(config.scheduler for config in self._trainer.lr_scheduler_configs),
        ]

    def _state(self) -> list[Any]:
        loop = self._trainer.fit_loop.epoch_loop
        self._ready_at_begin = loop.batch_progress.current.ready
        return [loop._batches_that_stepped, *(part.state_dict() for part in self._parts())]

    def _take(self, state: list[Any]) -> None:
        loop = self._trainer.fit_loop.epoch_loop
        progress = loop.batch_progress
        # Microbatches, which the others have made, too.
        num_since = 0 if self._replicas.dropped else progress.current.ready - self._ready_at_begin
        loop._batches_that_stepped = state[0]
        for part, values in zip(self._parts(), state[1:], strict=True):
            part.load_state_dict(values)
        for counters in (progress.current, progress.total):
            for name in vars(counters):
                setattr(counters, name, getattr(counters, name) + num_since)
        self._is_behind = True

    def _state_owners(self) -> list[Any]:
        """Returns the callbacks, the datamodule, and copies of the module in them, such as an average of weights."""
        trainer = self._trainer
        owners = [*trainer.callbacks] if trainer.datamodule is None else [*trainer.callbacks, trainer.datamodule]
        modules = [each for owner in owners for each in vars(owner).values() if isinstance(each, Module)]
        return owners + [module for module in modules if module is not trainer.lightning_module]

    def _callbacks_state(self) -> list[Any]:
        return [owner.state_dict() for owner in self._state_owners()]

    def _take_callbacks(self, states: list[Any]) -> None:
        for owner, state in zip(self._state_owners(), states, strict=True):
            owner.load_state_dict(state)

    # --- a batch -----------------------------------------------------------------------------------------------------

    def begin_batch(self) -> None:
        """Goes to the place of the others before a batch is fetched, if this replica has come back in the last one."""
        if not self._is_behind:
            return
        self._is_behind = False
        loop = self._trainer.fit_loop
        num_batches = loop.epoch_loop.batch_progress.current.ready
        if num_batches:  # otherwise an epoch begins
            for loader in loop._combined_loader.flattened:
                set_epoch(loader, self._trainer.current_epoch)
            iter(loop._data_fetcher)
            for _ in range(num_batches):
                next(loop._data_fetcher)

    def step(self, call: Callable[[], Any]) -> Any:
        """Makes an optimizer step, and again with the same batch if replicas have dropped it."""
        result = call()
        if self._trainer is None:
            return result
        is_repeatable = self._trainer.lightning_module.automatic_optimization
        is_repeatable = is_repeatable and self._trainer.accumulate_grad_batches == 1
        while self._replicas.dropped and is_repeatable and not self._replicas.should_stop:
            result = call()
        if self._replicas.should_stop:
            self._trainer.should_stop = True
        return result

    # --- the end -----------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Ends a fit with the others."""
        if self._trainer is None:
            return
        self._replicas.finish()
        if self._replicas.dropped:  # the last batch, which Lightning has counted
            epoch = self._trainer.fit_loop.epoch_progress
            ended = epoch.state_dict()
            self._replicas.restore()
            if not self._replicas.healed:
                epoch.load_state_dict(ended)

    def leave(self, error: BaseException | None = None) -> None:
        """Leaves the others, which go on."""
        if self._trainer is None:
            return
        if isinstance(error, SystemExit) and not error.code:
            error.code = 128 + signal.SIGTERM  # for 0, which is Lightning's, it would not be started again
        self._replicas.close()

    # --- files -------------------------------------------------------------------------------------------------------

    @property
    def writes(self) -> bool:
        """Whether this replica is the one that writes files."""
        return self._trainer is None or self._replicas.writes
