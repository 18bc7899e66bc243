"""The facts that replicas exchange at the end of each window, and what follows where they differ.

Each replica has a row of its own in one small sum, for which the others send zeros. Rows are compared with the one that
most members have, at a tie with that of the first: all find the same one, and a replica with another row ends itself.
"""

from __future__ import annotations

import dataclasses
import enum
import struct
from collections import Counter
from collections.abc import Sequence

from ..collectives import ReplicaLink
from ..errors import LayoutMismatchError, MegastrategyError, MicrobatchMismatchError, ReplicaMismatchError

WORD = 8
"""Bytes of a digest: replicas that differ by accident, not on purpose."""

_ROW = struct.Struct("<8s8s8sQQdIQI")


class Flag(enum.IntFlag):
    """The facts that are true or false; of a replica's ranks any."""

    STARTS = enum.auto()
    """It waits for no other replicas."""
    STOPS = enum.auto()
    NONFINITE = enum.auto()
    COUNTED = enum.auto()
    """A loss was counted by tokens."""
    UNCOUNTED = enum.auto()
    """A loss was not."""
    LATE = enum.auto()
    MICROBATCHES_DIFFER = enum.auto()


NO_FLAGS = Flag(0)


@dataclasses.dataclass(frozen=True)
class ReplicaFacts:
    """One replica's row.

    Attributes:
        history: a digest of all steps so far: who took part, and the state before the first one.
        layout: a digest of the layout and of all options.
        numbers: a digest of the hyper-parameters of all steps so far.
        batch: the number of batches so far.
        microbatch: see :class:`~.agreement.Agreement`.
        num_batches: the length of its loader; 0 if it has none.
        token_weights, num_losses: see :mod:`.loss_tokens`.
    """

    history: bytes
    layout: bytes
    numbers: bytes
    batch: int
    microbatch: int = 0
    token_weights: float = 0.0
    num_losses: int = 0
    num_batches: int = 0
    flags: Flag = NO_FLAGS


def exchange(link: ReplicaLink, own: ReplicaFacts, numbers: bytes) -> tuple[list[ReplicaFacts], bytes] | None:
    """Returns all members' rows, and the maxima of their ``numbers``; None if the exchange failed."""
    num, place = len(link.members), link.place
    row = _ROW.pack(*(getattr(own, field.name) for field in dataclasses.fields(own)))
    data = bytes(_ROW.size * place) + row + bytes(_ROW.size * (num - place - 1)) + numbers
    received = link.max_of_bytes(data)
    if received is None:
        return None
    rows = [ReplicaFacts(*values) for values in _ROW.iter_unpack(received[: _ROW.size * num])]
    return [dataclasses.replace(row, flags=Flag(row.flags)) for row in rows], received[_ROW.size * num :]


def check_facts(every: Sequence[ReplicaFacts], place: int, slot: int) -> None:
    """Raises the error of the replica at ``place``, in this slot, if its row is not as most are."""
    own = every[place]
    for name, error in _ERRORS.items():
        known = Counter(getattr(facts, name) for facts in every)
        if getattr(own, name) != max(known, key=lambda value: known[value]):  # of equal counts the first
            kind, text = error
            raise kind(f"replica {slot} of {len(every)} that train together: {text}")


_AGAIN = "It ends here; started again, it takes over the state of the others"
_ERRORS: dict[str, tuple[type[MegastrategyError], str]] = {
    "layout": (
        LayoutMismatchError,
        "its layout or options differ from those of the others. Build the same module, with the same frozen parameters "
        "and options, on as many ranks, in every replica",
    ),
    "history": (
        ReplicaMismatchError,
        "its steps so far are not those of the others. Before the first step: it began with other weights, buffers or "
        "optimizer state; seed all replicas alike before the model is built, or load one file in all of them. Later: "
        f"the replicas were divided into two groups, and this is not the larger one. {_AGAIN}",
    ),
    "numbers": (
        ReplicaMismatchError,
        "its optimizer stepped with other hyper-parameters (a learning rate, for example) than those of the others. A "
        "schedule must depend only on the batch's number, or on values that are equal in all replicas, such as those "
        f"of replicas.register(). {_AGAIN}",
    ),
    "batch": (
        MicrobatchMismatchError,
        "it is at another batch than the others: it skipped a batch, ran one twice, or one of them has come to the end "
        f"of its training and another has not. {_AGAIN}",
    ),
}
