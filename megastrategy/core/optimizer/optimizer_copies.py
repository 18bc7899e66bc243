"""Copies and pickles of optimizers, made as for torch's optimizers: with a Trainer, a callback or a scheduler.

[Note: copies and pickles of an optimizer]
A copy of a wrapped model is a plain module, and a copy of a :class:`~megastrategy.DistributedOptimizer` is an optimizer
of the user's own class. Where every rank steps the Parameters themselves it is the copy that torch makes under DDP: it
has its own parameters, state and groups, and it steps. Where the optimizer has shards or main params, a copy lacks the
engine that reduces its gradients and the other ranks' parts of the state: it has groups to read, with copies of the
Parameters, and no state. It refuses to step, save and load, so that no training continues from a part of the state.
"""

from __future__ import annotations

import collections
from typing import Any, NoReturn

from torch.optim import Optimizer

from ..errors import DirectUseError


def same(optimizer: Optimizer) -> Optimizer:
    """Unpickles a DistributedOptimizer as the copy of the user's optimizer, which schedulers in the same copy share."""
    return optimizer


def refuse_use_of_copy(optimizer: Optimizer, *_: Any) -> NoReturn:
    """Hook of a copy without state; raises."""
    raise DirectUseError(
        f"this {type(optimizer).__name__} is a copy (copy, deepcopy, pickle) of one that steps shards or main params, "
        "and has no state: copy the original's state_dict(), asked for on all ranks, and load it into an optimizer "
        "that is built on the copied model's parameters"
    )


class StateOfCopy:
    """Replaces ``__getstate__`` of a user's optimizer that has shards or main params.

    It is set on the object, since the class is the user's. ``copy``, ``deepcopy`` and ``pickle`` call it.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer

    def __call__(self) -> dict[str, Any]:
        """Returns the attributes of a copy: without optimizer state, and with hooks that refuse what needs it."""
        # By the class: the object's own __getstate__ is this object, and would call itself.
        kind: Any = type(self._optimizer)
        state: dict[str, Any] = dict(kind.__getstate__(self._optimizer))
        # torch drops hooks from a copy, and so would a copy of this copy: it could step, and save an empty state.
        state["__getstate__"] = self
        hooks = ("_optimizer_step_pre_hooks", "_optimizer_state_dict_pre_hooks", "_optimizer_load_state_dict_pre_hooks")
        state |= {name: collections.OrderedDict({0: refuse_use_of_copy}) for name in hooks}
        # New lists, also in a shallow copy: parameters added to a group there must not reach the original.
        groups = [{**group, "params": list(group["params"])} for group in self._optimizer.param_groups]
        return state | {"state": collections.defaultdict(dict), "param_groups": groups}
