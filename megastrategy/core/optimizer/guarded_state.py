"""The state of a user's optimizer that steps shards, guarded against look-ups by the model's Parameters.

[Note: why a look-up by a Parameter raises]
The optimizer's state is keyed by the stepped tensors, shards and main params. ``optimizer.state`` is a ``defaultdict``,
so code that resets the momentum of one Parameter, or a method of the user's class that is called unbound, would find an
empty state for it and silently do nothing. So a look-up by such a Parameter raises, and the error says what to do. Code
that goes over all of the state (``values()``, ``items()``, ``clear()``) gets this rank's part of it, as it is.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from typing import Any

from torch import Tensor

from ..errors import DirectUseError
from .sharded_optimizer import ShardedOptimizer


class GuardedState(MutableMapping[Any, Any]):
    """A view of the optimizer's own state; see [Note: why a look-up by a Parameter raises]."""

    def __init__(self, optimizer: ShardedOptimizer) -> None:
        self._optimizer = optimizer
        self._state: MutableMapping[Any, Any] = optimizer.inner.state

    def __getitem__(self, key: Any) -> Any:
        _check(key, self._optimizer)
        return self._state[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        _check(key, self._optimizer)
        self._state[key] = value

    def __delitem__(self, key: Any) -> None:
        _check(key, self._optimizer)
        del self._state[key]

    def __contains__(self, key: object) -> bool:
        _check(key, self._optimizer)
        return key in self._state

    def __iter__(self) -> Iterator[Any]:
        return iter(self._state)

    def __len__(self) -> int:
        return len(self._state)

    def __bool__(self) -> bool:
        """Whether a step or a load has made state on any rank: alike on all, also where a rank steps no shard.

        torch's checkpoint helpers step an optimizer without state, and all ranks have to.
        """
        return bool(self._state) or self._optimizer.num_steps_begun > 0 or self._optimizer.has_state

    # The inherited methods would look the key up, and a defaultdict creates the missing entry.

    def get(self, key: Any, default: Any = None) -> Any:
        return self._state[key] if key in self else default

    def pop(self, key: Any, *default: Any) -> Any:
        _check(key, self._optimizer)
        return self._state.pop(key, *default)

    def clear(self) -> None:
        """Forgets the state, also what was loaded and waits for the first step."""
        self._state.clear()
        self._optimizer.forget_pending_state()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._state!r})"


def unguarded_state(state: Any, optimizer: ShardedOptimizer) -> Any:
    """Returns the state to assign to an optimizer: ``state``, or the state that it is a view of.

    Raises:
        DirectUseError: if it has state under one of the model's Parameters that is not stepped itself.
    """
    if isinstance(state, GuardedState):
        return state._state
    for key in state:
        _check(key, optimizer)
    return state


def _check(key: Any, optimizer: ShardedOptimizer) -> None:
    index = optimizer.engine.index_by_id.get(id(key)) if isinstance(key, Tensor) else None
    if index is None or not optimizer.has_runs or optimizer.is_given_back:
        return
    raise DirectUseError(
        f"the state of parameter {optimizer.engine.layout.params[index].name!r} was looked up: it belongs to a shard, "
        "or to a main param.\n"
        "On all ranks, state_dict() of the prepared optimizer has full state; optimizer.state.values() has this rank's "
        "shards. Leave out flatten_optimizer_state_dict=True of torch's StateDictOptions. Or pass "
        f"{optimizer.engine.all_reduce_option}"
    )
