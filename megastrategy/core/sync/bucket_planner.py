"""Plans buckets in the order in which gradients arrive, if these can be launched earlier.

[Note: buckets in the order of arrival]
In the first synchronised backward each rank records the order in which gradients arrive. If buckets in that order could
be launched much earlier on any rank (reported together with the used parameters), all ranks use rank 0's order, and
everything moves to such a layout when the reductions of that backward have ended. That moment is the same on all ranks;
a forward is not, since a rank may run one by itself.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from ..collectives import Collectives
from ..config import DistributedDataParallelConfig
from ..layout import BufferLayout, better_layout_order, build_layout


class BucketPlanner:
    """Plans buckets for one reducer, which drops it after the first synchronised backward.

    There is only one move: a second would gain less than it costs, and all ranks must stop exchanging the wish for it
    at the same time. Tensor ranks have one layout, and move together.
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
        """Begins to record a backward; an earlier one may have raised."""
        self._arrived.clear()

    def record_arrival(self, param: int) -> None:
        """Records that a parameter's gradient, or another part of it, has arrived."""
        self._arrived.append(param)

    def wants_other_order(self, layout: BufferLayout, deferred: Collection[int], needed: Sequence[bool]) -> bool:
        """Whether buckets could be launched earlier in the order in which gradients arrived on this rank.

        Args:
            deferred: parameters whose bucket is launched at the end of backward.
            needed: by parameter, whether its bucket waits for its gradient.
        """
        # A single bucket is complete with the last gradient in any order.
        if not self._arrived or len(layout.buckets) == 1:
            return False
        arrived = [index for index in self._arrived if index not in deferred]  # deferred ones go last
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
