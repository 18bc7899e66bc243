"""Watches the first synchronised backward, and plans other buckets where a move to them pays.

[Note: buckets in the order seen]
In the first synchronised backward each rank notes in which order gradients arrive. If buckets that are filled in that
order could be launched materially earlier (on any rank, which it says with what was used), all ranks take rank 0's, and
everything moves to a layout in it when the reductions of that backward have ended. That moment is the same on all ranks
by construction, which a forward is not: a rank may run one for itself.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from ..collectives import Collectives
from ..config import DistributedDataParallelConfig
from ..layout import BufferLayout, better_layout_order, build_layout


class BucketPlanner:
    """Belongs to one reducer, which drops it after the first synchronised backward.

    Judged once: a second move would be worth less than it costs, and every rank must stop agreeing on it at the same
    time.

    Args:
        tensor_ranks: the ranks that hold the parts of a tensor-parallel model, and have one layout.
    """

    def __init__(
        self,
        config: DistributedDataParallelConfig,
        collectives: Collectives,
        tensor_ranks: Collectives | None,
    ) -> None:
        self._config, self._collectives, self._tensor_ranks = config, collectives, tensor_ranks
        self._arrived: list[int] = []
        self._wanted_order: list[int] | None = None

    def start(self) -> None:
        """A synchronised backward has reached its first parameter; one before it may have ended in an exception."""
        self._arrived.clear()

    def note(self, param: int) -> None:
        """A parameter's gradient has arrived, or another part of it."""
        self._arrived.append(param)

    def wants_other_order(self, layout: BufferLayout, deferred: Collection[int], needed: Sequence[bool]) -> bool:
        """Whether buckets could be launched earlier in the order in which gradients arrived on this rank.

        Args:
            deferred: parameters whose bucket waits for the end of backward.
            needed: by parameter, whether its bucket waits for its gradient.
        """
        # One bucket is complete when the last gradient is there, in whichever order it is filled.
        if not self._arrived or len(layout.buckets) == 1:
            return False
        arrived = [index for index in self._arrived if index not in deferred]  # what waits for the end goes last
        self._wanted_order = better_layout_order(layout, self._config, arrived, needed)
        return self._wanted_order is not None

    def finish(self, layout: BufferLayout, *, moves: bool) -> BufferLayout | None:
        """Returns the layout to move to, the same on all ranks, or None: the reductions of the first synchronised
        backward have ended. Collective if ``moves``.

        Args:
            moves: whether any rank wants another order; then all go by what rank 0 wants, which may be nothing.
        """
        if not moves:
            return None
        # -1 for nothing wanted: the other ranks are in this broadcast already, so rank 0 has to say something.
        wanted = self._wanted_order or [-1] * len(layout.params)
        order = torch.tensor(wanted, dtype=torch.int64, device="cpu")
        if self._tensor_ranks is not None:
            self._tensor_ranks.host.broadcast(order).wait()
        self._collectives.host.broadcast(order).wait()
        if order[0] < 0:
            return None
        return build_layout(layout.params, self._config, layout.dp_size, order.tolist())
