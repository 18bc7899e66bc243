"""Optimizers that a door does not shard, since no model that was set up has any of their parameters.

torch DDP allows this: the model may come later, and a parameter that no model has is stepped by each rank with its own
gradient. Here the first would train nothing where gradients are reduce-scattered, so the doors call
:meth:`UnshardedOptimizers.refuse_earlier` when a model comes. The second is warned of, once.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch.optim import Optimizer

from .core import DistributedDataParallel, DistributedOptimizer, describe_unreduced


class UnshardedOptimizers:
    """Knows the unsharded optimizers of one door, by weak references. ``warn`` shows a warning on one rank."""

    def __init__(self, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._known: list[weakref.ref[Optimizer]] = []

    def add(self, optimizer: Optimizer) -> Optimizer:
        """Registers the optimizer and returns it. It warns from now on of the first gradient that is not reduced."""
        if not any(known is optimizer for known in self._alive()):
            self._known.append(weakref.ref(optimizer))
            optimizer.register_step_pre_hook(_Warning(self._warn))
        return optimizer

    def add_or_shard(self, optimizer: Optimizer, model: DistributedDataParallel) -> Optimizer:
        """Shards the optimizer if it has any parameter of ``model``, which is the only one; else adds it."""
        params = {id(param) for group in optimizer.param_groups for param in group["params"]}
        if params and params <= model.engine.ignored_params():
            return optimizer
        if params.isdisjoint(map(id, model.engine.named_params().values())):
            return self.add(optimizer)
        return DistributedOptimizer(optimizer, model)

    def add_or_shard_all(
        self, optimizers: Sequence[Optimizer], model: DistributedDataParallel, unchanged: type[Optimizer]
    ) -> list[Optimizer]:
        """Does so with each that is not sharded for ``model`` yet, and not of the class ``unchanged``."""
        # Of a fit before: the user's optimizer inside is one of torch's again.
        raw: list[Any] = [
            opt.optimizer if isinstance(opt, DistributedOptimizer) and opt.is_closed else opt for opt in optimizers
        ]
        is_ready = (DistributedOptimizer, unchanged)
        return [opt if isinstance(opt, is_ready) else self.add_or_shard(opt, model) for opt in raw]

    def refuse_earlier(self, model: DistributedDataParallel, done: str, way_out: str) -> None:
        """Closes ``model`` and raises ValueError if a known optimizer has a trainable parameter of it and cannot step
        it: gradients would be placeholders, or 16-bit weights would be stepped without their main params.

        ``done`` names the setup that came too early, and ``way_out`` the right order.
        """
        params = {id(param) for param in model.engine.params}
        for optimizer in () if model.engine.steps_params_themselves else self._alive():
            if any(params & set(map(id, group["params"])) for group in optimizer.param_groups):
                model.close()
                raise ValueError(
                    f"the {type(optimizer).__name__} of this model was {done} before it, when it was unknown that the "
                    f"optimizer has to step shards, or fp32 main params of 16-bit weights: {way_out}"
                )

    def _alive(self) -> list[Optimizer]:
        alive = [optimizer for reference in self._known if (optimizer := reference()) is not None]
        self._known = [weakref.ref(optimizer) for optimizer in alive]
        return alive


class _Warning:
    def __init__(self, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._has_warned = False

    def __call__(self, optimizer: Optimizer, *_: Any) -> None:
        if not self._has_warned and (text := describe_unreduced(optimizer)) is not None:
            self._has_warned = True
            self._warn(text)
