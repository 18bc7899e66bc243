"""Shows the state of a user's optimizer that steps shards, and refuses to look it up by the model's Parameters.

[Note: why a look-up by a Parameter raises]
The optimizer's state is keyed by what is stepped, shards and main params. ``optimizer.state`` is a ``defaultdict``, so
code that resets the momentum of one Parameter, or a method of the user's class that is called unbound, would find an
empty state for it, do nothing, and say nothing. So a look-up by such a Parameter raises, with the way out. What walks
over all of the state (``values()``, ``items()``, ``clear()``) gets this rank's part of it, as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

from torch import Tensor

from ..errors import DirectUseError

_MISSING = object()


class GuardedState(MutableMapping[Any, Any]):
    """The optimizer's own state, which is changed through it; see [Note: why a look-up by a Parameter raises].

    Args:
        why_not: says in words why there is nothing under a tensor; None for one that is stepped itself.
    """

    def __init__(self, state: MutableMapping[Any, Any], why_not: Callable[[Tensor], str | None]) -> None:
        self._state, self._why_not = state, why_not

    def _check(self, key: Any) -> None:
        if isinstance(key, Tensor) and (reason := self._why_not(key)) is not None:
            raise DirectUseError(reason)

    def __getitem__(self, key: Any) -> Any:
        self._check(key)
        return self._state[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._check(key)
        self._state[key] = value

    def __delitem__(self, key: Any) -> None:
        self._check(key)
        del self._state[key]

    def __contains__(self, key: object) -> bool:
        self._check(key)
        return key in self._state

    def __iter__(self) -> Iterator[Any]:
        return iter(self._state)

    def __len__(self) -> int:
        return len(self._state)

    # The two below would otherwise ask for the key, and a defaultdict makes what it is asked for.

    def get(self, key: Any, default: Any = None) -> Any:
        return self._state[key] if key in self else default

    def pop(self, key: Any, default: Any = _MISSING) -> Any:
        if key in self or default is _MISSING:
            value = self._state[key]
            del self._state[key]
            return value
        return default

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._state!r})"


def unguarded_state(state: Any, why_not: Callable[[Tensor], str | None]) -> Any:
    """Returns ``state``, which is assigned to an optimizer, or the one that it shows.

    Raises:
        DirectUseError: if it has state under a tensor whose state is not kept here; see ``why_not``.
    """
    if isinstance(state, GuardedState):
        return state._state
    for key in state:
        if isinstance(key, Tensor) and (reason := why_not(key)) is not None:
            raise DirectUseError(reason)
    return state
