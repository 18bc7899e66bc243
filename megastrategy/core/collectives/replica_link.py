"""The connection of one replica to the others: it is no process group, since its members come and go.

A replica is a job of its own, and rank r of it reaches the ranks r of the others, which have the same shard. So sums
over replicas have no part in the collectives of a replica's own ranks, and a failure in them is no error there: it is
recorded, everything until the next meeting returns at once, and the vote of the replica's ranks says no.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .interface import Collectives


class ReplicaLink(ABC):
    """One rank's connection. All ranks of a replica call its methods alike, in the same order.

    Attributes:
        members: the slots of the replicas that met last, in one order for all of them.
        place: of this replica among them.
        number: of the present group of members; a new group has another one.
        step: the number of votes that said yes, and of steps that were passed, since a start at which no replica had
            any.
        failure: why something did not complete since the last meeting; "" if nothing failed.
    """

    members: tuple[int, ...] = ()
    place = 0
    number = -1
    step = 0
    failure = ""

    @abstractmethod
    def join(self, ranks: Collectives, state: Callable[[], Any]) -> None:
        """Connects this rank; from now on others wait for this replica. Collective over ``ranks``, the replica's.

        ``state`` returns the state of this rank for the rank at its place in a replica that is behind. It is called in
        another thread while :meth:`meet` waits, and must not be collective.
        """

    @abstractmethod
    def meet(self, *, joins: bool) -> Any:
        """Agrees with the other replicas on the members. Collective over the replica's ranks.

        Returns the state of a rank of another replica if that one has stepped further, otherwise None. ``joins``: also
        replicas may be members that were not before.

        Raises:
            CollectiveError: if there is no agreement in time.
        """

    @abstractmethod
    def undo_meeting(self) -> None:
        """Goes back to the step before the last meeting, or after a later vote, and leaves the group."""

    @abstractmethod
    def leave_group(self) -> None:
        """Leaves the group of the last meeting, whose members then fail; the next one is another group."""

    @abstractmethod
    def mean_(self, tensor: Tensor) -> None:
        """Replaces ``tensor`` by its mean over the members; after a failure its elements are undefined."""

    @abstractmethod
    def max_(self, numbers: Tensor) -> None:
        """Replaces ``numbers`` (uint8) by their maxima over the members; after a failure they are undefined."""

    def max_of_bytes(self, numbers: bytes) -> bytes | None:
        """Returns the maxima over the members, byte by byte; None if one has failed. All send as many."""
        found = torch.frombuffer(bytearray(numbers), dtype=torch.uint8)
        self.max_(found)
        return None if self.failure else bytes(found.tolist())

    def confirm(self, word: bytes) -> bool:
        """Returns whether the members of the last meeting have all come here again, with one ``word``, instead of
        another meeting."""
        # All have one word if the maxima of their words and of the complements are those of each.
        sent = bytes([*word, *(255 - byte for byte in word)])
        return self.max_of_bytes(sent) == sent

    @abstractmethod
    def vote(self) -> bool:
        """Returns True if nothing has failed on any rank of this replica; that is a step. Collective over its ranks."""

    @abstractmethod
    def pass_step(self) -> None:
        """Counts a step without a vote. All ranks and all members do so alike."""

    @abstractmethod
    def leave(self) -> None:
        """Ends the connection, so that the others do not wait. May be called again."""
