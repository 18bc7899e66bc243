"""Copies and pickles of optimizers, made where torch's optimizers can be copied: of a Trainer, a callback, a scheduler.

[Note: copies and pickles of an optimizer]
A copy of a wrapped model is a plain module, and a copy of a :class:`~megastrategy.DistributedOptimizer` is an optimizer
of the user's own class. Where every rank steps the Parameters themselves it is the copy that torch makes under DDP:
parameters, state and groups are its own, and it steps. Where the optimizer has shards or main params a copy has neither
the engine that reduces their gradients nor the other ranks' parts of the state: it has groups to read, with copies of
the Parameters, and no state. It refuses to step, to save and to load, so that no script trains on from a part.
"""

from __future__ import annotations

import collections
from typing import Any, NoReturn

from torch.optim import Optimizer

from ..errors import DirectUseError


def same(optimizer: Optimizer) -> Optimizer:
    """Unpickles a DistributedOptimizer: as the copy of the user's optimizer, which schedulers in the same copy have as
    well."""
    return optimizer


def refuse_use_of_copy(optimizer: Optimizer, *_: Any) -> NoReturn:
    """Hook of a copy without its state."""
    raise DirectUseError(
        f"this {type(optimizer).__name__} is a copy (copy, deepcopy, pickle) of one that steps shards or main params, "
        "and has no state: copy the original's state_dict(), asked for on all ranks, and load it into an optimizer "
        "that is built on the copied model's parameters"
    )


class StateOfCopy:
    """Stands for ``__getstate__`` of a user's optimizer that has shards or main params.

    Set on the object itself, since its class is the user's. Called by ``copy``, ``deepcopy`` and ``pickle``.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer

    def __call__(self) -> dict[str, Any]:
        """The state of a copy: the optimizer without its own, and with hooks that refuse what needs it."""
        # By the class: the object's own __getstate__ is this very object, and would call itself.
        kind: Any = type(self._optimizer)
        state: dict[str, Any] = dict(kind.__getstate__(self._optimizer))
        # torch drops hooks from a copy, and so would a copy of this one: it could step, and save that it has no state
        state["__getstate__"] = self
        hooks = ("_optimizer_step_pre_hooks", "_optimizer_state_dict_pre_hooks", "_optimizer_load_state_dict_pre_hooks")
        state |= {name: collections.OrderedDict({0: refuse_use_of_copy}) for name in hooks}
        # Lists of its own, also in a shallow copy: what is added to a group there must not reach the original.
        groups = [{**group, "params": list(group["params"])} for group in self._optimizer.param_groups]
        return state | {"state": collections.defaultdict(dict), "param_groups": groups}
