"""Optimizers that a door leaves as they are, since no model that was set up has any of their parameters.

Under torch DDP that is allowed: the model may come later, and a parameter that no model has is stepped by each rank
with its own gradient. Here the first would train nothing where gradients are reduce-scattered, so the doors ask
:meth:`WholeOptimizers.of` when a model comes; of the second a warning tells, once.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

from .core import DistributedDataParallel, DistributedOptimizer, describe_unreduced


class WholeOptimizers:
    """Knows the whole optimizers of one door, by weak references.

    Args:
        tell: shows a warning to the user, on one rank.
    """

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._known: list[weakref.ref[Optimizer]] = []

    def add(self, optimizer: Optimizer) -> Optimizer:
        """Registers the optimizer and returns it. It warns from now on of the first gradient that nobody reduces."""
        if not any(known is optimizer for known in self._alive()):
            self._known.append(weakref.ref(optimizer))
            optimizer.register_step_pre_hook(_Warning(self._tell))
        return optimizer

    def add_or_shard(self, optimizer: Optimizer, model: DistributedDataParallel) -> Optimizer:
        """Shards the optimizer if it has any parameter of ``model``, which is the only one; else adds it."""
        params = {id(param) for group in optimizer.param_groups for param in group["params"]}
        if params and params <= model.engine.ignored_params():
            return optimizer
        if params.isdisjoint(map(id, model.engine.named_params().values())):
            return self.add(optimizer)
        return DistributedOptimizer(optimizer, model)

    def of(self, model: DistributedDataParallel) -> Optimizer | None:
        """Returns a known optimizer that has a trainable parameter of ``model``, which came after it; or None."""
        params = {id(param) for param in model.engine.params}
        groups = ((optimizer, group) for optimizer in self._alive() for group in optimizer.param_groups)
        return next((optimizer for optimizer, group in groups if params & set(map(id, group["params"]))), None)

    def _alive(self) -> list[Optimizer]:
        alive = [optimizer for reference in self._known if (optimizer := reference()) is not None]
        self._known = [weakref.ref(optimizer) for optimizer in alive]
        return alive


class _Warning:
    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._is_told = False

    def __call__(self, optimizer: Optimizer, *_: Any) -> None:
        if not self._is_told and (text := describe_unreduced(optimizer)) is not None:
            self._is_told = True
            self._tell(text)
