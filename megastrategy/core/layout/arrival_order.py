"""Finds the order in which buckets should be filled: arithmetic on what the first synchronised backward showed.

Reverse registration is a guess of the order in which gradients arrive. Where a module registers its layers in another
order than it runs them, or has parameters that are never used, a bucket that could be sent waits for one before it
that cannot.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence

from ..config import DistributedDataParallelConfig
from .build import build_layout
from .layout import BufferLayout

WORTH_MOVING = 0.9
"""The part of the present :func:`launch_cost` that another order must get below. A weight and its bias that come the
other way round change it by less, in a model of more than a few layers; a model whose layers run in reverse halves
it."""


def launch_cost(layout: BufferLayout, arrival: Sequence[int]) -> int:
    """Measures how late elements are sent: the sum over buckets of their size times what has arrived at their launch.

    A bucket can be launched when its gradients and those of all buckets before it have arrived. Padding does not count:
    a scalar that has a bucket of its own at the wrong end is not worth a move.

    Args:
        arrival: by parameter, how many elements have arrived when its gradient has.
    """
    cost = launched = 0
    for bucket in layout.buckets:
        # A maximum: a bucket waits for the one before it, whenever its own gradients came.
        launched = max(launched, *(arrival[index] for index in bucket.params))
        cost += sum(layout.params[index].numel for index in bucket.params) * launched
    return cost


def better_layout_order(
    layout: BufferLayout, config: DistributedDataParallelConfig, arrived: Sequence[int], needed: Sequence[bool]
) -> list[int] | None:
    """Indices of all parameters in the order in which :func:`build_layout` should place them; None if the present one
    is about as good.

    A parameter whose gradient never came, or came in parts, is complete at the end of backward only: such go last, in
    the present order, and so do frozen ones.

    Args:
        arrived: parameters in the order in which their gradients arrived in a backward.
        needed: by parameter, whether its bucket waits for its gradient.
    """
    times = collections.Counter(arrived)
    order = [index for index in arrived if times[index] == 1]
    total = sum(layout.params[index].numel for index in times)
    # One that never came holds its bucket to the end; a frozen one is waited for by nobody.
    arrival = [total if is_needed else 0 for is_needed in needed]
    so_far = 0
    # The first part counts as arrived; a gradient in parts is whole at the end only, and keeps that time.
    for index in dict.fromkeys(arrived):
        so_far += layout.params[index].numel
        if times[index] == 1:
            arrival[index] = so_far
    order += [index for index in layout.param_order if times[index] != 1]
    other = build_layout(layout.params, config, layout.dp_size, order)
    return order if launch_cost(other, arrival) < WORTH_MOVING * launch_cost(layout, arrival) else None
