"""Makes sure that all ranks call the same collective of the framework before any of them enters it.

Lightning's barriers, broadcasts and reductions (in its set-up, in validation, for a metric) run on the default group. A
rank that waits there for one that failed notices only the end of that one's process, and a collective that some ranks
began and others did not makes the group useless.

So ranks first compare their calls in a small all-reduce on a separate group, whose waits are watched
(:mod:`megastrategy._faults.failure_watch`). A rank that waits in vain gives up there, before anything was begun on the
default group. They do so before each batch, too, where Lightning broadcasts whether a rank got SIGTERM.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.constants import default_pg_timeout

from .._faults.process_collectives import (
    call_check_collectives,
    engine_collectives,
    exception_name,
    give_up_engine_collectives,
)
from .._faults.recovery import StoreAllGather, report_failure
from ..core import CollectiveError, Collectives, DistributedOptimizer, Engine
from .meshes import ModelMesh

if TYPE_CHECKING:
    import lightning.pytorch as pl

_log = logging.getLogger("megastrategy")
_CALLS = {
    "setup": "sets its model up",
    "batch": "comes to its next batch, or to the end of its fit",
    **{call: f"calls {call}() of the strategy" for call in ("barrier", "broadcast", "reduce", "all_gather")},
}
_NUM_FACTS = 3


def compare_calls(collectives: Collectives, call: str, facts: Sequence[int] = (0,) * _NUM_FACTS) -> list[int]:
    """Returns the maximum over ranks of each of three facts, when all ranks have come to ``call``.

    Args:
        collectives: between host memories, used for nothing else: a rank that makes a different call would otherwise
            meet a message of a different size, at which gloo ends the process.
        call: one of :data:`_CALLS`.
        facts: of this rank.

    Raises:
        CollectiveError: if some rank came to another, or does not come.
    """
    # The maximum has a mark for each call that some rank is about to make: more than one is a mismatch.
    marks_and_facts = torch.tensor([*(call == name for name in _CALLS), *facts], device="cpu")
    collectives.all_reduce_max(marks_and_facts).wait()
    marks: list[int] = marks_and_facts.tolist()
    others = [does for (name, does), mark in zip(_CALLS.items(), marks, strict=False) if mark and name != call]
    if others:
        raise CollectiveError(
            f"rank {collectives.rank} of {collectives.size}: this rank {_CALLS[call]}, and another "
            f"{' or '.join(others)}. Most often a checkpoint, or a log with sync_dist=True, was for some ranks "
            "only: all ranks save and log, and Lightning writes on rank 0"
        )
    return marks[-_NUM_FACTS:]


class CheckedCollectives:
    """Checks the collectives of one Trainer's strategy between :meth:`start` and :meth:`stop`.

    After an exception ranks exchange values over torch.distributed's store instead.

    Attributes:
        engine: of the last fit.
        call_check: the collectives of :func:`compare_calls`; None on one rank.
        store_gather: the exchange after the present exception; several callbacks may save, and ranks count their
            exchanges, so it is kept.
    """

    def __init__(self, strategy: Any, mesh: ModelMesh) -> None:
        # a TrainerStrategy, whose module imports this one
        self._strategy = strategy
        self._mesh = mesh
        self.engine: Engine | None = None
        self.call_check: Collectives | None = None
        self.store_gather: StoreAllGather | None = None

    def start(self) -> None:
        """Checks collectives from now on, since all ranks are about to set something up. Collective."""
        if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
            self.call_check = call_check_collectives(self._strategy.root_device)

    def stop(self) -> None:
        """Leaves collectives to Lightning from now on."""
        if self.call_check is not None:
            self.call_check.close()
            self.call_check = None

    def give_up(self) -> None:
        """Gives up all groups after an exception, since some ranks may be in any collective of them."""
        self.call_check = None
        give_up_engine_collectives()

    def check(self, call: str) -> None:
        """Returns when all ranks are about to make the same ``call``. Raises as :func:`compare_calls`."""
        if self.call_check is not None:
            compare_calls(self.call_check, call)

    def check_on_host(self, call: str, tensor: Any, group: Any = None) -> None:
        """Checks a collective over all ranks, if ``tensor`` is on the host.

        A collective on a GPU does not make the host wait, and neither must this.
        """
        is_over_all_ranks = group is None or group is torch.distributed.group.WORLD
        if is_over_all_ranks and isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu":
            self.check(call)

    def gather_if_interrupted(self, value: Any) -> list[Any] | None:
        """Returns the picklable ``value`` of every rank after an exception, ``[value]`` if the others do not come; None
        where no exception has interrupted the Trainer."""
        gather = self.after_exception()
        return None if gather is None else gather.all_gather(value, self._strategy._timeout or default_pg_timeout)

    @property
    def trainer(self) -> pl.Trainer | None:
        """The Trainer of the strategy's module; None outside of a run, and in a launcher's main process."""
        module = self._strategy.lightning_module
        return None if module is None else module._trainer

    @property
    def is_interrupted(self) -> bool:
        """Whether the Trainer deals with an exception, or has."""
        trainer = self.trainer
        return trainer is not None and trainer.interrupted

    def after_exception(self) -> StoreAllGather | None:
        """Returns the exchange of all ranks after an exception; None where there was none, or no other rank.

        Called by what callbacks do in ``on_exception``, most often saving a checkpoint, which needs all ranks.
        """
        strategy = self._strategy
        engine = self.engine
        if not self.is_interrupted or engine is None or engine.collectives.size == 1:
            return None
        if self.store_gather is None:
            exception = sys.exception()
            if exception is not None:
                report_failure(exception_name(), exception)  # before the others' failures that follow from it
            # the groups may hold a collective that was cut off, which would be matched with the first of the save
            self.give_up()
            steps = [opt.num_steps for opt in strategy.optimizers if isinstance(opt, DistributedOptimizer)]
            # rank 0 saves unsharded optimizers, at whichever step the others stopped
            sharded = engine.layout.num_shards > 1
            state = f"steps begun and done: {steps}" if sharded else ""
            self.store_gather = StoreAllGather(exception_name(), state, strategy.patience)
            # all ranks may have stopped in the same step, when some buckets' weights were from before it
            if sharded and any(begun != done for begun, done in steps):
                self.store_gather.problem = self.store_gather.problem or "a step was under way"
            # ``agreed``: all ranks have just given the old group up, and none need be asked
            if not self.store_gather.problem:
                engine.use_for_checkpoints(engine_collectives(strategy.root_device, agreed=True))
        return self.store_gather

    def why_not_saved(self, *, waits: bool = False) -> str:
        """Says why a checkpoint cannot be saved after an exception; empty if a save can begin.

        The shards of all ranks may be out of reach, or belong to different steps. With ``waits`` it returns when the
        other ranks have come to the same save.
        """
        strategy = self._strategy
        if self._mesh.shares_model and self.is_interrupted:
            return "ranks share the model, and the parts of others are out of reach"
        gather = self.after_exception()
        if gather is None:
            return ""
        if waits:
            gather.all_gather(None, strategy.patience)  # a hook that fails on some rank keeps it from coming here
        assert self.engine is not None, "ranks exchange values about a model that was set up"
        if not gather.problem or self.engine.layout.num_shards == 1:
            return ""
        return f"the optimizer state is sharded over the ranks and {gather.problem}"

    def cannot_save(self, path: str | Path) -> bool:
        """Logs why this checkpoint cannot be saved, if so, when all ranks have come to save it."""
        reason = self.why_not_saved(waits=True)
        if reason:
            _log.error(
                "rank %d: %s was NOT saved after the exception, since %s. The checkpoint before it is the last",
                self._strategy.global_rank,
                path,
                reason,
            )
        return reason != ""
