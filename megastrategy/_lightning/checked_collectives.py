"""Makes sure that all ranks call the same collective of the framework's before any of them enters it.

Lightning's barriers, broadcasts and reductions (in its set-up, in validation, for a metric) run on the default group. A
rank that waits there for one that failed notices only the end of that one's process, and a collective that some ranks
began and others did not makes the group useless.

So ranks first meet in a small all-reduce on a group made for it, whose waits are watched
(:mod:`megastrategy._faults.deadlocks`). A rank that waits in vain gives up there, before anything was begun on the
default group. The same all-reduce shows whether all call the same. They meet there before each batch, too, where
Lightning has them compare notes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor
from torch.distributed.constants import default_pg_timeout

from .._faults.process_collectives import count_barrier, give_up_engine_collectives, meeting_collectives
from ..core import CollectiveError

if TYPE_CHECKING:
    from lightning.pytorch.strategies import DDPStrategy as _Base

    from .._faults.recovery import StoreExchange
    from ..core import Collectives
else:
    _Base = object

T = TypeVar("T")

_PLACES = {
    "setup": "sets its model up",
    "batch": "comes to its next batch, or to the end of its fit",
    **{call: f"calls {call}() of the strategy" for call in ("barrier", "broadcast", "reduce", "all_gather")},
}
_NUM_FACTS = 3


class MeetingPlace:
    """Lets all ranks come to the same place of their programs before any of them goes on.

    Args:
        collectives: between host memories, for this alone: a rank that is elsewhere would else be met there with
            something of another size, at which gloo ends the process.
    """

    def __init__(self, collectives: Collectives) -> None:
        self.collectives = collectives

    def meet(self, place: str, facts: Sequence[int] = (0,) * _NUM_FACTS) -> list[int]:
        """Returns the maximum over ranks of each of three facts, when all have come to ``place``.

        Raises:
            CollectiveError: if some rank came to another, or does not come.
        """
        # The maximum has a mark for each place that some rank has come to: more than one is a mismatch.
        count_barrier(f"a meeting of all ranks: it {_PLACES[place]}")
        told = torch.tensor([*(name == place for name in _PLACES), *facts], device="cpu")
        self.collectives.all_reduce_max(told).wait()
        marks: list[int] = told.tolist()
        others = [does for (name, does), mark in zip(_PLACES.items(), marks, strict=False) if mark and name != place]
        if others:
            raise CollectiveError(
                f"rank {self.collectives.rank} of {self.collectives.size}: this rank {_PLACES[place]}, and another "
                f"{' or '.join(others)}. Most often a checkpoint, or a log with sync_dist=True, was for some ranks "
                "only: all ranks save and log, and Lightning writes on rank 0"
            )
        return marks[-_NUM_FACTS:]


class CollectivesTogether(_Base):
    """Comes in front of ``DDPStrategy``, and checks its collectives between :meth:`begin_together` and
    :meth:`end_together`.

    After an exception they go through a :class:`~megastrategy._faults.recovery.StoreExchange` instead.
    """

    _meeting_place: MeetingPlace | None = None

    def begin_together(self) -> None:
        """Checks collectives from now on, since all ranks are about to set something up. Collective."""
        if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
            self._meeting_place = MeetingPlace(meeting_collectives(self.root_device))

    def end_together(self) -> None:
        """Leaves collectives to Lightning alone from now on."""
        if self._meeting_place is not None:
            self._meeting_place.collectives.close()
            self._meeting_place = None

    def give_up_together(self) -> None:
        """Gives up all groups after an exception, since some ranks may be in any collective of them."""
        self._meeting_place = None
        give_up_engine_collectives()

    def await_others(self, call: str) -> None:
        """Returns when all ranks are about to ``call`` the same.

        Raises:
            CollectiveError: if some rank is not, or does not come.
        """
        if self._meeting_place is not None:
            self._meeting_place.meet(call)

    def _is_interrupted(self) -> bool:
        """Whether the Trainer deals with an exception, or has."""
        module = self.lightning_module
        return module is not None and module._trainer is not None and module.trainer.interrupted

    def _meet_if_interrupted(self) -> StoreExchange | None:
        raise NotImplementedError

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        meeting = self._meet_if_interrupted()
        if meeting is None:
            self.await_others("barrier")
            super().barrier(*args, **kwargs)
        else:
            meeting.exchange(None, self._timeout or default_pg_timeout)

    def broadcast(self, obj: T, src: int = 0) -> T:
        meeting = self._meet_if_interrupted()
        if meeting is None:
            self.await_others("broadcast")
            return super().broadcast(obj, src)
        values: list[T] = meeting.exchange(obj, self._timeout or default_pg_timeout)
        return obj if meeting.problem else values[src]

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        meeting = self._meet_if_interrupted()
        if meeting is None:
            # Over all ranks, where a sum of logged values may be over those with other samples.
            vote, every = torch.tensor(int(decision), device=self.root_device), torch.distributed.group.WORLD
            votes = int(self.reduce(vote, every, torch.distributed.ReduceOp.SUM))
            return votes == self.world_size if all else votes > 0
        decisions: list[bool] = meeting.exchange(decision, self._timeout or default_pg_timeout)
        return min(decisions) if all else max(decisions)

    def reduce(self, tensor: Tensor, group: Any = None, reduce_op: Any = "mean") -> Tensor:
        """Returns this rank's own value after an exception. ModelCheckpoint asks for all metrics then, and the ranks
        may have different ones left to reduce."""
        if self._is_interrupted():
            return tensor
        self._await_others_of("reduce", tensor, group)
        return super().reduce(tensor, group, reduce_op)

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Returns ``(1, *shape)`` after an exception where the others do not come, as for one rank."""
        meeting = self._meet_if_interrupted()
        if meeting is None:
            self._await_others_of("all_gather", tensor, group)
            return super().all_gather(tensor, group, sync_grads)
        values = meeting.exchange(tensor.detach().cpu(), self._timeout or default_pg_timeout)
        return torch.stack(values).to(tensor.device)

    def _await_others_of(self, call: str, tensor: Any, group: Any) -> None:
        """Meets the other ranks before a collective over all of them, if ``tensor`` is on the host.

        A collective on a GPU does not keep the host, and neither must this.
        """
        of_all_ranks = group is None or group is torch.distributed.group.WORLD
        if of_all_ranks and isinstance(tensor, Tensor) and tensor.device.type == "cpu":
            self.await_others(call)
