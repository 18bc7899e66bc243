"""The replicas of a Trainer's fit: what one that comes back takes over, and which of them writes.

The state of a Trainer is loaded at the end of a backward, where batch and step are under way here as they were in the
replica that has sent it. A batch that is dropped runs again inside of its optimizer step, before schedules step. With
``accumulate_grad_batches`` and in manual optimization it is lost.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from torch.nn import Module

from .._replicas import Replicas
from ..data import set_epoch
from .callbacks import is_a
from .replaced_methods import ReplacedMethods

if TYPE_CHECKING:
    import lightning.pytorch as pl

_REFUSED = {
    "StochasticWeightAveraging": "a replica that comes back cannot take over its schedule. Use WeightAveraging",
    "LearningRateFinder": (
        "it trains before the fit, where replicas do not meet. Find the learning rate in a run without replicas"
    ),
}
"""Callbacks of Lightning, with the reason and the way out."""


class TrainerReplicas:
    """The replicas of one strategy, or None: then each method is that of a single replica."""

    def __init__(self, replicas: Replicas | None) -> None:
        self._given = replicas
        self._trainer: Any = None  # of the fit that has joined
        self._acts_alone = False
        self._is_behind = False  # whether the loader is not at the place of the others yet
        self._ready_at_begin = 0
        self._replaced = ReplacedMethods()

    @property
    def _replicas(self) -> Replicas:
        assert self._given is not None, "a fit has joined them"
        return self._given

    def name_logs(self, module: pl.LightningModule | None, inside: Callable[[Any], Any]) -> None:
        """Gives loggers that would number their folders a name of this replica: several would take one number."""
        if self._given is None or module is None:
            return
        name = inside(f"replica{self._given.slot}-{time.strftime('%Y%m%d-%H%M%S')}")
        for logger in module.trainer.loggers:
            if vars(logger).get("_version", name) is None:
                logger._version = name  # type: ignore[attr-defined]

    def sampler_ranks(self, module: pl.LightningModule | None, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Returns the arguments of a sampler: for batches of training those of all replicas."""
        if self._given is None or module is None or not module.trainer.training:
            return kwargs
        return self._given.sampler_ranks(**kwargs)

    def join(self, trainer: pl.Trainer) -> None:
        """Registers the Trainer's state if this is a fit, whose model is wrapped.

        Raises:
            ValueError: for a callback, or a kind of optimization, that cannot be used with replicas.
        """
        if self._given is None or trainer.state.fn != "fit":
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
        self._given.register("trainer", self._state, self._take)
        self._given.register("callbacks", self._callbacks_state, self._take_callbacks, is_copied=False)
        run_stage = trainer._run_stage

        def run() -> Any:
            try:
                return run_stage()
            except BaseException as error:  # the others must not wait while callbacks save
                self.leave(error)
                raise

        self._replaced.add(trainer, "_run_stage", run)

    # --- the state ---------------------------------------------------------------------------------------------------

    def _parts(self) -> dict[str, Any]:
        loop = self._trainer.fit_loop
        parts = {
            "epoch": loop.epoch_progress,
            "batch": loop.epoch_loop.batch_progress,
            "schedule": loop.epoch_loop.scheduler_progress,
            "optimizer": loop.epoch_loop.automatic_optimization.optim_progress,
            "manual": loop.epoch_loop.manual_optimization.optim_step_progress,
            "precision": self._trainer.precision_plugin,
        }
        return parts | {f"scheduler {n}": one.scheduler for n, one in enumerate(self._trainer.lr_scheduler_configs)}

    def _state(self) -> dict[str, Any]:
        loop = self._trainer.fit_loop.epoch_loop
        self._ready_at_begin = loop.batch_progress.current.ready
        return {"stepped": loop._batches_that_stepped, **{name: p.state_dict() for name, p in self._parts().items()}}

    def _take(self, state: dict[str, Any]) -> None:
        loop = self._trainer.fit_loop.epoch_loop
        progress = loop.batch_progress
        # Microbatches, which the others have made, too.
        num_since = 0 if self._replicas.dropped else progress.current.ready - self._ready_at_begin
        loop._batches_that_stepped = state["stepped"]
        for name, part in self._parts().items():
            part.load_state_dict(state[name])
        for counters in (progress.current, progress.total):
            for name in vars(counters):
                setattr(counters, name, getattr(counters, name) + num_since)
        self._is_behind = True

    def _callbacks_state(self) -> dict[str, Any]:
        module = self._trainer.datamodule
        return {
            "states": {one.state_key: one.state_dict() for one in self._trainer.callbacks},
            "averages": {
                one.state_key: {name: each.state_dict() for name, each in self._averages(one).items()}
                for one in self._trainer.callbacks
            },
            "datamodule": None if module is None else module.state_dict(),
        }

    def _take_callbacks(self, state: dict[str, Any]) -> None:
        for one in self._trainer.callbacks:
            one.load_state_dict(state["states"][one.state_key])
            for name, each in self._averages(one).items():
                each.load_state_dict(state["averages"][one.state_key][name])
        if state["datamodule"]:
            self._trainer.datamodule.load_state_dict(state["datamodule"])

    def _averages(self, callback: object) -> dict[str, Module]:
        """Returns a callback's copies of the module, such as an average of its weights."""
        trained = self._trainer.lightning_module
        return {name: each for name, each in vars(callback).items() if isinstance(each, Module) and each is not trained}

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

    def remove(self) -> None:
        """Puts Lightning's own method back, and leaves the replicas if that has not been done."""
        self._replaced.remove()
        self.leave()

    # --- files -------------------------------------------------------------------------------------------------------

    @property
    def writes(self) -> bool:
        """Whether this replica is the one that writes files."""
        return self._trainer is None or self._replicas.writes

    @property
    def is_first(self) -> bool:
        """Whether rank 0 of this replica is rank 0 of all."""
        return self.writes or self._acts_alone

    @contextlib.contextmanager
    def acting_alone(self) -> Iterator[None]:
        """For what each replica does for itself, such as queueing its job again."""
        self._acts_alone = True
        try:
            yield
        finally:
            self._acts_alone = False
