"""Remembers the findings of trials: an optimizer of the same kind with the same options would give them again.

[Note: which findings are remembered]
Only those of torch's own classes, whose step depends on the options of its groups and on nothing else that a process
keeps. Another class may look at its attributes, at other modules or at a file, and is tried each time. So is torch's
with options that are not plain values, or with an optimizer inside of it.
"""

from __future__ import annotations

from typing import Any

import torch

from .elementwise import Findings, check_no_inner_optimizer
from .per_parameter import trial_shapes
from .probe import probe
from .values import PLAIN_TYPES, NotForShardsError

_MOST = 64
"""The number that is kept: a search over learning rates makes one for each."""


class KnownFindings:
    """The findings of several optimizers, in a process or for a model."""

    def __init__(self) -> None:
        self._by_kind: dict[Any, Findings] = {}

    def probe(self, optimizer: torch.optim.Optimizer, device: torch.device, dtype: torch.dtype) -> Findings:
        """Does as :func:`.probe.probe`, from memory where it may; see [Note: which findings are remembered]."""
        kind = _kind_of(optimizer)
        if kind is None:
            return probe(optimizer, device, dtype)
        # Both settings of the process change what a step computes: counters' dtype, and which kernels it may take.
        kind = (kind, device, dtype, torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled())
        if kind not in self._by_kind:
            if len(self._by_kind) >= _MOST:
                del self._by_kind[next(iter(self._by_kind))]  # the oldest
            self._by_kind[kind] = probe(optimizer, device, dtype)
        return self._by_kind[kind]


def _kind_of(optimizer: torch.optim.Optimizer) -> Any:
    """Returns everything that its steps depend on, to be compared; None if that is not known."""
    cls = type(optimizer)
    if not cls.__module__.startswith("torch.optim."):
        return None
    try:
        check_no_inner_optimizer(optimizer)
    except NotForShardsError:
        return None
    groups = []
    for group in optimizer.param_groups:
        options = [(name, _plain(value)) for name, value in group.items() if name != "params"]
        if any(value is None for _, value in options):
            return None
        # the parameters that it may be given whole
        groups.append((tuple(options), trial_shapes([tuple(param.shape) for param in group["params"]])))
    # a step that replaces the class's is another one
    return cls, cls.step, tuple(groups), frozenset(optimizer.__dict__)


def _plain(value: Any) -> tuple[Any, ...] | None:
    """A value with its type, since 1, 1.0 and True are equal; None if it is not plain."""
    if type(value) is tuple:
        items = [_plain(item) for item in value]
        return None if None in items else (tuple, *items)
    return (type(value), value) if type(value) in PLAIN_TYPES else None
