"""Copies and pickles of optimizers, made as for torch's optimizers: with a Trainer, a callback or a scheduler.

[Note: copies and pickles of an optimizer]
A copy of a :class:`~megastrategy.DistributedOptimizer` is one of the user's optimizer, where every rank steps the
Parameters themselves. Where the optimizer has shards or main params, a copy would lack the engine that reduces its
gradients and the other ranks' parts of the state, so it is refused.
"""

from __future__ import annotations

from typing import NoReturn

from torch.optim import Optimizer

from ..errors import DirectUseError


def same(optimizer: Optimizer) -> Optimizer:
    """Unpickles a DistributedOptimizer as the copy of the user's optimizer, which schedulers in the same copy share."""
    return optimizer


def refuse_copy() -> NoReturn:
    """Raises, as ``__getstate__`` of an optimizer that has shards or main params: copies and pickles call it."""
    raise DirectUseError(
        "an optimizer that steps shards or main params cannot be copied (copy, deepcopy, pickle), alone or with a "
        "scheduler, a callback or a Trainer that refers to it: copy its state_dict(), asked for on all ranks, and load "
        "it into an optimizer that is built on the copied model's parameters"
    )
