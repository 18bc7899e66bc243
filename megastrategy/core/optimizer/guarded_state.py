"""The state of a user's optimizer that steps shards, guarded against look-ups by the model's Parameters.

[Note: why a look-up by a Parameter raises]
The optimizer's state is keyed by the stepped tensors, shards and main params. ``optimizer.state`` is a ``defaultdict``,
so code that resets the momentum of one Parameter, or a method of the user's class that is called unbound, would find an
empty state for it and silently do nothing. So a look-up by such a Parameter raises, and the error says what to do. Code
that goes over all of the state (``values()``, ``items()``, ``clear()``) gets this rank's part of it, as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

from torch import Tensor

from ..errors import DirectUseError

_MISSING = object()


class GuardedState(MutableMapping[Any, Any]):
    """A view of the optimizer's own state; see [Note: why a look-up by a Parameter raises].

    ``why_not``: returns the reason why a tensor has no state; None for one that is stepped itself.
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

    # The inherited methods would look the key up, and a defaultdict creates the missing entry.

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
    """Returns the state to assign to an optimizer: ``state``, or the state that it is a view of.

    Raises:
        DirectUseError: if it has state under a tensor that is not stepped; see ``why_not``.
    """
    if isinstance(state, GuardedState):
        return state._state
    for key in state:
        if isinstance(key, Tensor) and (reason := why_not(key)) is not None:
            raise DirectUseError(reason)
    return state
