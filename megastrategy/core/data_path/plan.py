"""The plan: the address of every parameter, made at the end of the first synchronised backward.

:class:`~megastrategy.core.layout.BufferLayout` is the plan itself. This file decides its order.

[Note: why the plan is made late]
Buckets follow the order in which gradients arrive. At the end of the first synchronised backward that order is known,
nothing has been reduced, and no optimizer has state. A plan that is made then needs no move: gradients are copied to
their addresses from autograd's own tensors, as in every later backward. The price is one backward without overlap.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..collectives import Collectives
from ..config import DistributedDataParallelConfig
from ..layout import BufferLayout, better_layout_order, build_layout
from ..module import ModelParallel


def plan_as_seen(
    layout: BufferLayout,
    config: DistributedDataParallelConfig,
    ranks: Collectives,
    model: ModelParallel,
    arrivals: Sequence[int],
    required: Sequence[bool],
) -> BufferLayout:
    """Returns the plan in the order of ``arrivals``, or ``layout`` if that is about as good. Collective.

    Args:
        layout: the plan in the order of registration, the same on all ranks.
        arrivals: parameters in the order in which gradients arrived on this rank. Rank 0 decides for all, and the
            first tensor rank for tensor ranks, which have one plan.
        required: by parameter, whether it requires a gradient: a bucket with one that never arrives is launched at
            the end of backward, and those behind it are, too.
    """
    if len(layout.buckets) < 2 or ranks.size == 1 or not config.overlap_grad_reduce:
        return layout
    order = None
    if ranks.rank == 0 and arrivals:
        order = better_layout_order(layout, config, arrivals, required)
    order = ranks.all_gather_objects(order)[0]
    if model.tensor_ranks is not None:
        order = model.tensor_ranks.all_gather_objects(order)[0]
    return layout if order is None else build_layout(layout.params, config, ranks.size, order)
