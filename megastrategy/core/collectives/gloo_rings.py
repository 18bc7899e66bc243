"""Reduce-scatter and all-gather made of gloo's messages between two ranks.

Gloo's own reduce-scatter is an all-reduce inside and sends twice the bytes. These rings (Patarasuk and Yuan, "Bandwidth
optimal all-reduce algorithms for clusters of workstations", 2009) send ``(size - 1) / size`` of the tensor, the least
possible. A message is cut into segments, so that one is added while the next is in flight.

[Note: two gloo connections between two ranks]
A thread that writes to one of gloo's connections holds its lock; gloo's event thread, which reads from it, tries
to get that lock and asks the kernel again as long as it is held. So two ranks that send to each other over one
connection keep a core busy with asking, and read late. A group of two ranks therefore has two connections
(:func:`.process_groups.part_of_group`), between which gloo chooses by the parity of a message's tag: tags are
even towards a lower rank and odd towards a higher one, and long messages are not written where long messages are
read. Groups of more ranks have one connection for each pair of ranks: in a ring a rank sends to one neighbour
and receives from another.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from ..layout import Spans
from .gloo_references import GlooReferences

SEGMENT_BYTES = 2**20
"""Large enough that a segment's own cost (0.1 ms) is small on a link of 10 Gbit/s, small enough that the addition of
the last one is short, too."""

# Parts of tags: ranks in different collectives must not receive each other's data, since gloo ends a process
# at a wrong size.
_GATHER, _REDUCE, _READY, _ALL_TO_ALL, _MAX = range(5)
_NUM_TAGS = 10  # of one exchange: a kind's in each direction


class GlooRings:
    """The rings of one group, on which no other code may send with their tags. Every call is collective, and returns
    when this rank is done. ``scratch`` memory, by dtype, may be shared with rings that never run at the same time."""

    def __init__(self, group: ProcessGroup, scratch: dict[torch.dtype, Tensor], references: GlooReferences) -> None:
        self._group = group
        self._scratch = scratch
        self._gloo_references = references
        self._rank = group.rank()
        self._size = group.size()
        self._first = -1
        self._num_exchanges: dict[int, int] = {}  # by distance, the same on all ranks: for tags
        self._posted: dict[int, Any] = {}  # by distance, the posted receive of the other rank's readiness
        self._word = torch.zeros(1, dtype=torch.uint8, device="cpu")
        self._word_received = torch.zeros(1, dtype=torch.uint8, device="cpu")

    def reduce_scatter(self, tensor: Tensor, scale: float) -> None:
        """Sums the rank-th of ``size`` equal parts over ranks, as :meth:`.Collectives.reduce_scatter` does."""

        def scaled(part: Tensor) -> Tensor:
            return part if scale == 1.0 else part.mul_(scale)

        parts = [_segments(part) for part in tensor.chunk(self._size)]
        for step in range(1, self._size):
            sent = parts[(self._rank - step) % self._size]
            target = parts[(self._rank - step - 1) % self._size]
            # Reused: a new allocation of a part's size would cost page faults in every step.
            received = _segments(self._get_scratch(tensor.dtype, tensor.numel() // self._size))
            outgoing = map(scaled, sent) if step == 1 else sent  # later parts are sums
            for number, came in enumerate(self._exchange(_REDUCE, outgoing, received)):
                scaled(target[number]).add_(came)
        # A single rank never enters the loop, in which a part is scaled when it is first sent.
        if self._size == 1 and scale != 1.0:
            for segment in parts[self._rank]:
                segment.mul_(scale)

    def all_gather(self, tensor: Tensor) -> None:
        """Sends every rank's own part (rank-th of ``size`` equal ones) to all ranks."""
        parts = tensor.chunk(self._size)
        for step in range(self._size - 1):
            sent = parts[(self._rank - step) % self._size]
            received = parts[(self._rank - step - 1) % self._size]
            for _ in self._exchange(_GATHER, [sent], [received]):
                pass

    def gather_spans(self, tensor: Tensor, spans: Spans) -> None:
        """Sends every rank's own elements of ``tensor``, ``spans[rank]``, to all ranks: the ring of :meth:`all_gather`
        with packed parts, since a rank may have a thousand spans and each message has a cost."""
        parts = [[tensor[start:end] for start, end in of_rank] for of_rank in spans]
        sizes = [sum(part.numel() for part in of_rank) for of_rank in parts]
        most = max(sizes)
        halves = self._get_scratch(tensor.dtype, 2 * most).split(most) if most else ()
        for step in range(self._size - 1 if most else 0):
            sender = (self._rank - step) % self._size
            source = (self._rank - step - 1) % self._size
            sent = halves[step % 2][: sizes[sender]]
            received = halves[1 - step % 2][: sizes[source]]
            if step == 0 and parts[sender]:
                torch.cat(parts[sender], out=sent)
            for _ in self._exchange(_GATHER, _not_empty(sent), _not_empty(received)):
                pass
            for part, came in zip(parts[source], received.split([part.numel() for part in parts[source]]), strict=True):
                part.copy_(came)

    def all_to_all(self, tensor: Tensor) -> Sequence[Tensor]:
        """Returns the rank-th of ``size`` equal parts of every rank's ``tensor``, by rank: views of it
        and of scratch memory."""
        parts = tensor.chunk(self._size)
        numel = parts[0].numel()
        others = self._get_scratch(tensor.dtype, (self._size - 1) * numel)
        result = [others[place * numel :][:numel] for place in range(self._size - 1)]
        result.insert(self._rank, parts[self._rank])
        self.exchange_parts(parts, result)
        return result

    def exchange_parts(self, parts: Sequence[Tensor], received: Sequence[Tensor]) -> None:
        """Sends each of ``parts`` to its rank, and receives the other ranks' parts for this one into ``received``."""
        for distance in range(1, self._size):
            to = (self._rank + distance) % self._size
            source = (self._rank - distance) % self._size
            for _ in self._exchange(_ALL_TO_ALL, _not_empty(parts[to]), _not_empty(received[source]), distance):
                pass

    def all_reduce_max(self, tensor: Tensor) -> None:
        """Replaces ``tensor`` by the element-wise maximum over ranks, in ``ceil(log2(size))`` exchanges.

        By dissemination (Hensgen, Finkel and Manber, "Two algorithms for barrier synchronization", 1988): in the k-th
        exchange a rank sends its maximum to the rank at distance 2**k, and so covers twice as many ranks. If ``size``
        is no power of two some ranks count twice, which changes no maximum. A ring, as gloo's own, has ``2 (size - 1)``
        hops, which take most of the time of small messages.
        """
        distance = 1
        while distance < self._size:
            received = self._get_scratch(tensor.dtype, tensor.numel())
            for _ in self._exchange(_MAX, [tensor], [received], distance):
                pass
            torch.maximum(tensor, received, out=tensor)
            distance *= 2

    def _exchange(
        self, kind: int, sent: Iterable[Tensor], received: Sequence[Tensor], distance: int = 1
    ) -> Iterator[Tensor]:
        """Sends to the rank at ``distance`` while receiving from the one at the same distance before: yields what has
        been received, and has sent everything when it is exhausted.

        A message that arrives while its own receive is posted makes gloo's event thread spin for the connection's lock:
        on two cores most exchanges of a few kB then take a scheduler tick (4 ms, with a busy core) instead of 0.1 ms.
        So a rank sends only when the other has reported that its receives are posted, and the receive of that report is
        itself posted before the data that it answers is sent.
        """
        before = (self._rank - distance) % self._size
        after = (self._rank + distance) % self._size
        if self._first < 0:
            # A random number of this object: an earlier one on the same group has left posted receives behind.
            first = torch.tensor([secrets.randbelow(2**26)], device="cpu")
            self._group.broadcast([self._gloo_references.view_for_gloo(first)], dist.BroadcastOptions()).wait()
            self._first = int(first.item())
        # The first exchange at this distance has no earlier one that has posted this receive.
        if distance not in self._posted:
            self._num_exchanges[distance] = self._first
            self._post_readiness(distance)
        self._num_exchanges[distance] += 1
        number = self._num_exchanges[distance]
        tag_in = _tag(number, kind, before, self._rank)
        tag_out = _tag(number, kind, self._rank, after)
        # All receives before any send: sends first take twice the time (1.9x at 64 MB) on one connection, where gloo
        # queues the notice of a posted receive behind the data.
        receives = [(segment, self._group.recv([segment], before, tag_in)) for segment in received]
        sends = [self._group.send([self._word], before, _tag(number, _READY, self._rank, before))]
        self._posted[distance].wait()
        self._post_readiness(distance)
        sends += [self._group.send([segment], after, tag_out) for segment in sent]
        for segment, receive in receives:
            receive.wait()
            yield segment
        # A send that was not waited for may still read its tensor when the caller overwrites it in the next step.
        for send in sends:
            send.wait()

    def _get_scratch(self, dtype: torch.dtype, numel: int) -> Tensor:
        scratch = self._scratch.get(dtype)
        if scratch is None or scratch.numel() < numel:
            scratch = self._scratch[dtype] = torch.empty(numel, dtype=dtype, device="cpu")
        return scratch[:numel]

    def _post_readiness(self, distance: int) -> None:
        """Posts the receive of the other rank's report that it is ready for the exchange after this one."""
        source = (self._rank + distance) % self._size
        tag = _tag(self._num_exchanges[distance] + 1, _READY, source, self._rank)
        self._posted[distance] = self._group.recv([self._word_received], source, tag)


def _tag(number: int, kind: int, source: int, target: int) -> int:
    """Returns the tag of an exchange's messages between two ranks; see [Note: two gloo connections between two
    ranks]."""
    return _NUM_TAGS * number + 2 * kind + (source < target)


def _not_empty(message: Tensor) -> list[Tensor]:
    """Returns the message in a list, empty for an empty message: both ends know its size, so it is not sent."""
    return [message] if message.numel() else []


def _segments(part: Tensor) -> Sequence[Tensor]:
    segments: Sequence[Tensor] = part.split(SEGMENT_BYTES // part.dtype.itemsize)
    return segments
