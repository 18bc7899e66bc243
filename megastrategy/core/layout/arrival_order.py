"""Finds the order in which buckets should be filled, from the order of gradients in the first synchronised backward.

Buckets are first filled in reverse order of registration. That is only a guess: where a module registers its
layers in a different order than it runs them, or has unused parameters, a complete bucket has to wait for an
incomplete one before it.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence

from ..config import DistributedDataParallelConfig
from .build import build_layout
from .layout import BufferLayout

WORTH_MOVING = 0.9
"""A new order must reduce the present :func:`launch_cost` to this fraction or less. A weight and its bias in swapped
order change it by less in a model of several layers; a model whose layers run in reverse halves it."""


def launch_cost(layout: BufferLayout, arrival: Sequence[int]) -> int:
    """Measures how late elements are sent: the sum over buckets of their size times the number of elements that have
    arrived at their launch.

    A bucket can be launched when its gradients and those of all buckets before it have arrived. Padding is not counted:
    a scalar with a bucket of its own at the wrong end is not worth a move.

    Args:
        arrival: by parameter, the number of elements that have arrived when its gradient has.
    """
    cost = launched = 0
    for bucket in layout.buckets:
        # A maximum: a bucket also waits for the one before it.
        launched = max(launched, *(arrival[index] for index in bucket.params))
        cost += sum(layout.params[index].numel for index in bucket.params) * launched
    return cost


def better_layout_order(
    layout: BufferLayout, config: DistributedDataParallelConfig, arrived: Sequence[int], needed: Sequence[bool]
) -> list[int] | None:
    """Returns the order in which :func:`build_layout` should place parameters; None if the present one
    is about as good.

    A gradient that never arrived, or arrived in several parts, is complete only at the end of backward. Such parameters
    go last, in the present order, and so do frozen ones.

    Args:
        arrived: parameters in the order in which their gradients arrived in a backward.
        needed: by parameter, whether its bucket waits for its gradient.
    """
    times = collections.Counter(arrived)
    order = [index for index in arrived if times[index] == 1]
    total = sum(layout.params[index].numel for index in times)
    # A gradient that never comes delays its bucket to the end of backward; no bucket waits for a frozen parameter.
    arrival = [total if is_needed else 0 for is_needed in needed]
    so_far = 0
    # The first of several parts is counted here, but such a gradient is complete, and can be sent, only at the end.
    for index in dict.fromkeys(arrived):
        so_far += layout.params[index].numel
        if times[index] == 1:
            arrival[index] = so_far
    order += [index for index in layout.param_order if times[index] != 1]
    other = build_layout(layout.params, config, layout.dp_size, order)
    return order if launch_cost(other, arrival) < WORTH_MOVING * launch_cost(layout, arrival) else None
