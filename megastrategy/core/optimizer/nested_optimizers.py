"""Optimizers that step shards already, when another DistributedOptimizer is made of them or of one around them.

[Note: an optimizer around ours]
User code adds averages of weights, or a look-ahead, as an optimizer around another one. Around a DistributedOptimizer
that works: outside of ``step()`` the groups contain Parameters. A second DistributedOptimizer around both would put
shards into groups that the inner one does not read.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from .sharded_optimizer import ShardedOptimizer


def take_back(optimizer: torch.optim.Optimizer) -> None:
    """Makes an optimizer that has stepped another model's shards a plain one. Collective if it is sharded.

    Raises:
        ValueError: if that model is in use, also where an optimizer of user code is around one that steps its shards.
    """
    _refuse_around_another(optimizer)
    hooks = getattr(optimizer, "_optimizer_step_pre_hooks", {}).values()
    owners = [getattr(hook, "__self__", None) for hook in hooks]
    for stepping in [owner for owner in owners if isinstance(owner, ShardedOptimizer)]:
        if not stepping.engine.is_in_use:
            stepping.engine.close()
        if not stepping.engine.is_closed:
            raise ValueError(
                f"this {type(optimizer).__name__} is in a DistributedOptimizer already, whose model is in use: call "
                "that one, or close() the model"
            )
        stepping.give_back()


def _refuse_around_another(optimizer: torch.optim.Optimizer) -> None:
    # See [Note: an optimizer around ours].
    for name, inside in _sharded_inside(optimizer):
        engine = inside.engine
        if inside.has_runs and engine.is_in_use and not engine.is_closed:
            kind = type(optimizer).__name__
            raise ValueError(
                f"this {kind} steps a DistributedOptimizer, its attribute {name!r}: a second one around it would have "
                f"no shards.\nIn a loop, call step() of the {kind} as it is, without a second DistributedOptimizer(), "
                "fabric.setup() or accelerator.prepare(). A Trainer sets up every optimizer that is assigned to "
                "trainer.optimizers: assign none, and average or change the weights in a callback (EMAWeightAveraging)"
                + (f"; or pass {engine.all_reduce_option}" if engine.is_sharded else "")
            )


def _sharded_inside(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, ShardedOptimizer]]:
    """Yields the DistributedOptimizers in the attributes of a user's optimizer, with the attribute's name."""
    for name, value in vars(optimizer).items():
        for item in value if isinstance(value, list | tuple) else (value,):
            if issubclass(type(item), torch.optim.Optimizer):
                impl = vars(item).get("_impl")
                inside = [("", impl)] if isinstance(impl, ShardedOptimizer) else _sharded_inside(item)
                yield from ((name, sharded) for _, sharded in inside)
