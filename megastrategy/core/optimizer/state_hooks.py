"""Calls a user's hooks on ``state_dict()`` and ``load_state_dict()`` around the full state.

[Note: hooks see the full state]
The user's optimizer saves and loads the state of shards, which has other sizes and numbers than the model's parameters.
A hook that adds, renames or counts entries is written for the full state, as under torch DDP, and for entries beside
``state`` and ``param_groups``, which shards do not have. So no hooks run while the user's optimizer handles shards.
They are called before and after, with the :class:`~megastrategy.DistributedOptimizer`, whose ``state`` raises for a
look-up by one of the model's Parameters.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

from torch.optim import Optimizer

_NAMES = (
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)


@contextlib.contextmanager
def without_state_hooks(optimizer: Optimizer) -> Iterator[None]:
    """Removes the hooks on saves and loads while this is open."""
    kept = {name: optimizer.__dict__[name] for name in _NAMES}
    optimizer.__dict__.update({name: OrderedDict() for name in _NAMES})
    try:
        yield
    finally:
        optimizer.__dict__.update(kept)


def save_with_hooks(optimizer: Optimizer, shown: Optimizer, save: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Calls ``save`` between the ``state_dict()`` hooks of ``optimizer``, which get ``shown`` as the optimizer."""
    for before in list(optimizer._optimizer_state_dict_pre_hooks.values()):
        before(shown)
    saved = save()
    for after in list(optimizer._optimizer_state_dict_post_hooks.values()):
        changed = after(shown, saved)
        saved = saved if changed is None else changed
    return saved


def load_with_hooks(
    optimizer: Optimizer, shown: Optimizer, saved: dict[str, Any], load: Callable[[dict[str, Any]], None]
) -> None:
    """Calls ``load`` between the ``load_state_dict()`` hooks of ``optimizer``, which get ``shown`` as the optimizer."""
    saved = saved.copy()
    for before in list(optimizer._optimizer_load_state_dict_pre_hooks.values()):
        changed = before(shown, saved)
        saved = saved if changed is None else changed
    load(saved)
    for after in list(optimizer._optimizer_load_state_dict_post_hooks.values()):
        after(shown)
