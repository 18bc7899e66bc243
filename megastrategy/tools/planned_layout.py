"""Lays parameters out on any number of ranks. Experts stay divided over as many of them as in the training."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from ..core import (
    BufferLayout,
    DistributedDataParallelConfig,
    Domain,
    ParamSpec,
    build_layout,
    domain_of_all,
)


def planned_layout(
    specs: Sequence[ParamSpec],
    config: DistributedDataParallelConfig,
    dp_size: int,
) -> BufferLayout:
    """Returns the layout of ``specs``, whose domains may be those of another number of ranks.

    Raises:
        ValueError: if the options, or the experts, do not fit the number of ranks.
    """
    there = [
        dataclasses.replace(spec, domain=expert_domain(config, dp_size, len(spec.domain.groups)))
        if spec.domain is not None
        else spec
        for spec in specs
    ]
    return build_layout(there, config, dp_size)


def expert_domain(config: DistributedDataParallelConfig, dp_size: int, num_parts: int) -> Domain:
    """Returns the domain of experts that ``num_parts`` neighbours divide. Raises as :func:`planned_layout`."""
    if dp_size % num_parts:
        raise ValueError(
            f"{dp_size} rank(s), and experts are divided over {num_parts} of the data-parallel ranks: a multiple of "
            f"{num_parts} is expected"
        )
    groups = tuple(tuple(range(place, dp_size, num_parts)) for place in range(num_parts))
    return domain_of_all(config, dp_size).divided(groups)
