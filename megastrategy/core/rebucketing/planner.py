"""Watches the first synchronised backwards, and moves everything to other buckets where that pays.

[Note: buckets in the order seen]
In the first synchronised backward each rank notes in which order gradients arrive. If buckets that are filled in that
order could be launched materially earlier (on any rank, which it says with what was used), all ranks take rank 0's, and
everything moves to a layout in it when the reductions of that backward have ended. That moment is the same on all ranks
by construction, which a forward is not: a rank may run one for itself.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch

from ..collectives import Collectives
from ..config import DistributedDataParallelConfig
from ..layout import BufferLayout, build_layout
from .arrival_order import better_layout_order
from .tuning import BucketSizeTuner


class BucketPlanner:
    """Belongs to one reducer, which drops it when there is nothing left to watch.

    Args:
        config: the options.
        collectives: the data-parallel ranks.
        move: changes over to another layout; whether that was possible. Collective.
        tuner: chooses the size of buckets, if that is to be measured.
    """

    def __init__(
        self,
        config: DistributedDataParallelConfig,
        collectives: Collectives,
        move: Callable[[BufferLayout], bool],
        tuner: BucketSizeTuner | None = None,
    ) -> None:
        self._config, self._collectives, self._move = config, collectives, move
        self._tuner = tuner
        self.judges_order = config.overlap_grad_reduce
        """Whether the first synchronised backward has not ended yet."""
        self._arrived: list[int] = []
        self._wanted_order: list[int] | None = None

    @property
    def is_done(self) -> bool:
        return not self.judges_order and self._tuner is None

    def start(self) -> None:
        """A synchronised backward has reached its first parameter; one before it may have ended in an exception."""
        self._arrived.clear()
        if self._tuner is not None:
            self._tuner.start()

    def note(self, param: int) -> None:
        """A parameter's gradient has arrived, or another part of it."""
        if self.judges_order:
            self._arrived.append(param)
        if self._tuner is not None:
            self._tuner.note(param)

    def stop(self) -> None:
        """The backward has ended, but for reductions."""
        if self._tuner is not None:
            self._tuner.stop()

    def wants_other_order(self, layout: BufferLayout, deferred: Collection[int], needed: Sequence[bool]) -> bool:
        """Whether buckets could be launched earlier in the order in which gradients arrived on this rank.

        Args:
            layout: the present one.
            deferred: parameters whose bucket waits for the end of backward.
            needed: by parameter, whether its bucket waits for its gradient.
        """
        # One bucket is complete when the last gradient is there, in whichever order it is filled.
        if not self.judges_order or not self._arrived or len(layout.buckets) == 1:
            return False
        arrived = [index for index in self._arrived if index not in deferred]  # what waits for the end goes last
        self._wanted_order = better_layout_order(layout, self._config, arrived, needed)
        return self._wanted_order is not None

    def finish(self, layout: BufferLayout, *, moves: bool) -> None:
        """The reductions of a synchronised backward have ended. Collective where something moves or is measured.

        Args:
            layout: the present one.
            moves: whether any rank wants another order; then all go by what rank 0 wants, which may be nothing.
        """
        # Judged once: a second move would be worth less than it costs, and every rank must stop agreeing on it at the
        # same time.
        wanted, self._wanted_order, self.judges_order = self._wanted_order, None, False
        if moves:
            # -1 for nothing wanted: the other ranks are in this broadcast already, so rank 0 has to say something.
            order = torch.tensor(wanted or [-1] * len(layout.params), dtype=torch.int64)
            self._collectives.host.broadcast(order).wait()
            if order[0] >= 0:
                other = build_layout(layout.params, self._config, layout.dp_size, order.tolist())
                layout = other if self._move(other) else layout
        # After the order, in the layout that it left: a size is chosen for buckets in that order.
        if self._tuner is not None and self._tuner.propose(layout, self._move):
            self._tuner = None
