"""Calls a user's hooks on ``state_dict()`` and ``load_state_dict()`` around the whole state.

[Note: hooks see the full state]
The user's optimizer saves and loads the state of shards, which has other sizes and numbers than the model's parameters.
A hook that adds entries, renames or counts them is written for the whole state, as under torch DDP, and for entries
beside ``state`` and ``param_groups``, which shards do not have. So hooks are kept from the user's optimizer while it
handles shards, and called before and after, with the :class:`~megastrategy.DistributedOptimizer`: its ``state`` raises
for a look-up by one of the model's Parameters.
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
    """Saves and loads call no hooks while this is open."""
    kept = {name: optimizer.__dict__[name] for name in _NAMES}
    optimizer.__dict__.update({name: OrderedDict() for name in _NAMES})
    try:
        yield
    finally:
        optimizer.__dict__.update(kept)


def save_with_hooks(optimizer: Optimizer, shown: Optimizer, save: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Calls ``save`` between the hooks of ``optimizer`` on ``state_dict()``, which are given ``shown``."""
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
    """Calls ``load`` between the hooks of ``optimizer`` on ``load_state_dict()``, which are given ``shown``."""
    saved = saved.copy()
    for before in list(optimizer._optimizer_load_state_dict_pre_hooks.values()):
        changed = before(shown, saved)
        saved = saved if changed is None else changed
    load(saved)
    for after in list(optimizer._optimizer_load_state_dict_post_hooks.values()):
        after(shown)
