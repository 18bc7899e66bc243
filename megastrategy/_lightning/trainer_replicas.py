"""The replicas of a Trainer's fit: where they meet, what one that comes back takes over, and which of them writes.

[Note: where the replicas of a Trainer meet]
They meet before a batch is fetched: Lightning's counters are complete there, and a validation that was due has ended.
The first meeting is in the strategy's setup, when model and optimizers are wrapped and the loops are not restored yet.
A replica that comes back takes the state of another one for a loaded checkpoint, so that Lightning's own code restores
loops, schedulers and precision from it. Its first epoch begins at the batch of the others: a loader that cannot load
its place fetches and drops the batches before it. The last meeting is after the fit. If the leader has ended while it
wrote a checkpoint, the next one finds that at the meeting after it, and writes the file.

[Note: which decisions replicas make together]
Batches of training differ between replicas, those of validation do not, and so the values that callbacks monitor are
equal. Clocks and file systems are not: a decision that ranks make together, and a value that rank 0 broadcasts, is
that of all replicas from the first batch to the last one.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import logging
import os
import pickle
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from torch.nn import Module

from ..core import CollectiveError, ReplicaMismatchError, Replicas
from .callbacks import is_a
from .replaced_methods import ReplacedMethods

if TYPE_CHECKING:
    import lightning.pytorch as pl

T = TypeVar("T")
Inside = Callable[[Any], Any]
"""Returns the value of rank 0 of this replica. Collective over its ranks."""
_log = logging.getLogger("megastrategy")

_LAST_SAVED = {"_last_global_step_saved", "_last_checkpoint_saved"}
"""Attributes of a ModelCheckpoint that are not in its state. By them it saves once a step."""
_REFUSED = {
    "StochasticWeightAveraging": "a replica that comes back cannot take over its schedule. Use WeightAveraging",
    "LearningRateFinder": (
        "it trains before the fit, where replicas do not meet. Find the learning rate in a run without replicas"
    ),
}
"""Callbacks of Lightning, with the reason and the way out."""


class TrainerReplicas:
    """The replicas of one strategy, or None: before :meth:`join`, and without, each method is that of a single replica.

    Attributes:
        saved: the paths of the last checkpoints, which all replicas saved between the same two meetings, and whether
            they have weights only.
    """

    def __init__(self, replicas: Replicas | None) -> None:
        self._given = replicas
        self._trainer: Any = None  # of the last fit
        self._acts_alone = False
        self._replaced = ReplacedMethods()
        self._begin_fit()

    def _begin_fit(self) -> None:
        self._taken: dict[str, Any] | None = None  # the state with which this process came back
        self._has_joined = self._has_begun = self._is_over = self._led = self._is_cut_off = False
        self.saved: dict[str, bool] = {}
        self._has_met_since = False  # the leader, since these were saved

    @property
    def _replicas(self) -> Replicas:
        assert self._given is not None, "a fit has joined them"
        return self._given

    def name_logs(self, module: pl.LightningModule | None, inside: Inside) -> None:
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

    # --- joining -----------------------------------------------------------------------------------------------------

    def join(self, trainer: pl.Trainer, inside: Inside) -> None:
        """Meets the other replicas if this is a fit, whose model and optimizers are wrapped. Collective.

        Raises:
            ValueError: for a callback that cannot be used with replicas.
        """
        if self._given is None or trainer.state.fn != "fit":
            return
        for name, reason in _REFUSED.items():
            if any(is_a(callback, name) for callback in trainer.callbacks):  # type: ignore[attr-defined]
                raise ValueError(f"replicas=: the callback {name} cannot be used, since {reason}")
        self._trainer = trainer
        self._inside = inside
        self._begin_fit()
        replicas = self._given
        replicas.register("trainer", self._state, self._take)
        saving: list[Any] = [
            one for one in trainer.checkpoint_callbacks if isinstance(getattr(one, "dirpath", None), str)
        ]
        replicas.notice = json.dumps([one.dirpath for one in saving]).encode()
        replicas.begin_batch()
        self._has_joined = True
        self._led = replicas.is_leader
        # Any of them may have to write the next file, and to remove an earlier one.
        folders = json.loads(replicas.notice)
        if len(folders) != len(saving):
            raise ReplicaMismatchError(
                f"replica {replicas.slot} has {len(saving)} callbacks that save in a folder, and the leader has "
                f"{len(folders)}: use the same callbacks in all replicas"
            )
        for callback, folder in zip(saving, folders, strict=True):
            callback.dirpath = folder
        if self._taken is not None:
            self._restore(self._taken)
        loop = trainer.fit_loop.epoch_loop
        self._replaced.add(loop, "advance", self._at_the_others_batch(loop.advance))
        self._replaced.add(trainer, "_run_stage", self._leaving_after(trainer._run_stage))

    def _restore(self, state: dict[str, Any]) -> None:
        """Loads what Lightning restores before a strategy's setup, and leaves the rest for it to restore after."""
        trainer = self._trainer
        connector = trainer._checkpoint_connector
        connector._loaded_checkpoint = state
        connector.restore_datamodule()
        for callback in trainer.callbacks:
            if callback.state_key in state["callbacks"]:
                callback.load_state_dict(state["callbacks"][callback.state_key])
            if is_a(callback, "BaseFinetuning"):
                # Otherwise it would build the groups anew, with the learning rates they had when they were added.
                callback._restarting = False
            for name, average in state["averages"].get(callback.state_key, {}).items():
                getattr(callback, name).load_state_dict(average)
        for callback, last_saved in zip(trainer.checkpoint_callbacks, state["last_saved"], strict=True):
            vars(callback).update(last_saved)
        trainer.should_stop = state["should_stop"]  # it came back when the others had ended
        _log.info("replica %d goes on from the state of the others", self._replicas.slot)

    def _state(self) -> dict[str, Any]:
        """Returns what this rank's counterpart in a replica that comes back takes over; it is no checkpoint, for which
        hooks are called that may be collective."""
        trainer = self._trainer
        plugin = trainer.precision_plugin
        module = trainer.datamodule
        state = {
            "loops": trainer._checkpoint_connector._get_loops_state_dict(),
            "callbacks": {one.state_key: one.state_dict() for one in trainer.callbacks},
            "averages": {one.state_key: self._averages(one) for one in trainer.callbacks},
            "last_saved": [
                {name: value for name, value in vars(one).items() if name in _LAST_SAVED}
                for one in trainer.checkpoint_callbacks
            ],
            "lr_schedulers": [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
            "optimizer_states": [],  # with the weights
            "place": self._counters(),
            "should_stop": trainer.should_stop,
        }
        for stateful in (plugin, module):
            contents = None if stateful is None else stateful.state_dict()
            if contents:
                state[type(stateful).__qualname__] = contents
        return copy.deepcopy(state)  # the next batch changes it, perhaps before all of it is sent

    def _averages(self, callback: object) -> dict[str, Any]:
        """Returns the states of a callback's copies of the module, such as an average of its weights."""
        trained = self._trainer.lightning_module
        copies = {
            name: each for name, each in vars(callback).items() if isinstance(each, Module) and each is not trained
        }
        return {name: each.state_dict() for name, each in copies.items()}

    def _take(self, state: dict[str, Any]) -> None:
        if not self._has_joined:
            self._taken = state
        elif state["place"] != self._counters():
            raise ReplicaMismatchError(
                f"replica {self._replicas.slot} was stopped for too long: the others are at "
                f"{_described(state['place'])}, it is at {_described(self._counters())}, and a Trainer cannot jump "
                "there. Start it again"
            )

    def _counters(self) -> tuple[int, int, int]:
        trainer = self._trainer
        return trainer.current_epoch, trainer.fit_loop.epoch_loop.batch_progress.current.ready, trainer.global_step

    # --- before a batch ----------------------------------------------------------------------------------------------

    def begin_batch(self) -> None:
        """Meets the other replicas before a batch is fetched. Collective."""
        if not self._has_joined:
            return
        replicas = self._replicas
        replicas.epoch, replicas.batch, _ = self._counters()
        meets = not replicas.is_in_window
        replicas.begin_batch()
        self._has_begun = True
        if meets:
            self._write_for_the_last_leader()
        if replicas.should_stop:
            self._trainer.should_stop = True
            raise StopIteration

    def _at_the_others_batch(self, method: Callable[[Any], None]) -> Callable[[Any], None]:
        """Wraps a batch of training: a replica that came back goes to the others' batch before its first one."""

        @functools.wraps(method)
        def advance(data_fetcher: Any) -> None:
            if self._taken is not None:
                self._taken = None
                # It is no restart for Lightning, which would leave out a validation and a plateau schedule's step.
                self._trainer.fit_loop.restarting = False
                self._drop_batches(data_fetcher)
            method(data_fetcher)

        return advance

    def _drop_batches(self, data_fetcher: Any) -> None:
        combined = self._trainer.fit_loop._combined_loader
        assert combined is not None
        are_stateful = [hasattr(one, "state_dict") and hasattr(one, "load_state_dict") for one in combined.flattened]
        if are_stateful and all(are_stateful):
            return
        if any(are_stateful):
            raise ValueError("replicas=: either all training loaders can load their place, or none: use one kind")
        iter(data_fetcher)  # workers may have read ahead before the sampler knew the epoch
        for _ in range(self._replicas.batch):
            next(data_fetcher)

    # --- the end -----------------------------------------------------------------------------------------------------

    def _leaving_after(self, method: Callable[[], Any]) -> Callable[[], Any]:
        """Wraps the fit: the others must not wait while callbacks save after an exception."""

        @functools.wraps(method)
        def run() -> Any:
            try:
                result = method()
                self._meet_at_the_end()
            except BaseException as error:
                self.leave(error)
                raise
            return result

        return run

    def _meet_at_the_end(self) -> None:
        if self._has_begun:
            try:
                self._replicas.begin_batch()
            except CollectiveError as error:  # the training is complete
                _log.warning("replica %d has ended without the others: %s", self._replicas.slot, error)
            self._write_for_the_last_leader()
        self._is_over = True
        self._replicas.finish()

    def leave(self, error: BaseException | None = None) -> None:
        """Leaves the other replicas. One that failed writes nothing any more, if there are others that go on."""
        if self._trainer is None:
            return
        self._is_over = True
        if isinstance(error, SystemExit) and not error.code:
            error.code = 128 + signal.SIGTERM  # for 0, which is Lightning's, it would not be started again
        if isinstance(error, Exception) and len(self._replicas.members) > 1:  # neither SIGTERM nor Ctrl-C
            self._is_cut_off = True
        self._replicas.close()

    def remove(self) -> None:
        """Puts Lightning's own methods back, and leaves the replicas if that has not been done."""
        self._replaced.remove()
        self.leave()

    # --- decisions ---------------------------------------------------------------------------------------------------

    @property
    def _are_together(self) -> bool:
        """Whether all replicas are between the first batch and the last one, and so make the same calls."""
        return self._has_begun and not self._is_over

    def decide(self, decision: bool, *, all: bool) -> bool:
        """Returns whether all replicas decide so, or any. Collective, with one decision on all ranks."""
        if not self._are_together:
            return decision
        votes = self._replicas.max_of_bytes(bytes([decision, not decision])) if self._trainer.global_rank == 0 else None
        together = decision if votes is None else not votes[1] if all else bool(votes[0])
        return bool(self._inside(together))

    def from_leader(self, value: T, is_sender: bool) -> T:
        """Returns the leader's value of what this rank is about to broadcast."""
        if not is_sender or not self._are_together:
            return value
        data = pickle.dumps(value) if self._replicas.is_leader else b""
        size = self._replicas.max_of_bytes(len(data).to_bytes(8, "big"))
        received = None if size is None else self._replicas.max_of_bytes(data.ljust(int.from_bytes(size, "big"), b"\0"))
        result: T = value if received is None else pickle.loads(received)
        return result

    # --- checkpoints -------------------------------------------------------------------------------------------------

    @property
    def writes(self) -> bool:
        """Whether this replica is the one that writes files."""
        return not self._has_joined or (self._replicas.is_leader and not self._is_cut_off)

    @property
    def is_first(self) -> bool:
        """Whether rank 0 of this replica is rank 0 of all: before they have met each one is."""
        return self.writes or self._acts_alone

    @contextlib.contextmanager
    def acting_alone(self) -> Iterator[None]:
        """For what each replica does for itself, such as queueing its job again."""
        self._acts_alone = True
        try:
            yield
        finally:
            self._acts_alone = False

    def saves(self, checkpoint: Mapping[str, Any], path: str | os.PathLike[str]) -> bool:
        """Notes a checkpoint that the leader writes, and returns whether that is this replica."""
        if self._has_joined:
            if self._has_met_since:
                self.saved = {}
                self._has_met_since = False
            self.saved[str(path)] = "optimizer_states" not in checkpoint
        return self.writes

    def note_removed(self, path: str | os.PathLike[str]) -> None:
        """Notes that a checkpoint is not wanted any more: a new leader does not write it."""
        self.saved.pop(str(path), None)

    def _write_for_the_last_leader(self) -> None:
        """Writes the last checkpoints if the leader ended before they were complete. Collective over this replica's
        ranks."""
        leads_now = self.writes and not self._led
        self._led = self.writes
        # A leader that came to a meeting has written them, or does so in the background.
        had_met = self._has_met_since
        self._has_met_since = True
        if not leads_now:
            return
        saved = dict(self.saved)
        for path, is_weights_only in saved.items():
            # One of the same name may be an earlier one.
            if not (had_met and self._inside(_exists(path))):
                slot = self._replicas.slot
                _log.warning("the leader ended before %s was complete: replica %d writes it", path, slot)
                self._trainer.save_checkpoint(path, is_weights_only)
        for one in self._trainer.checkpoint_callbacks:
            last = getattr(one, "_last_checkpoint_saved", "")
            if getattr(one, "save_last", None) == "link" and last in saved and not had_met:
                one._link_checkpoint(self._trainer, last, one.last_model_path)


def _exists(path: str) -> bool:
    from fsspec.core import url_to_fs  # type: ignore[import-untyped]

    return bool(url_to_fs(path)[0].exists(path))


def _described(counters: tuple[int, int, int]) -> str:
    epoch, batch, step = counters
    return f"batch {batch} of epoch {epoch} (step {step})"
