"""Methods of Lightning's objects that are replaced for the time of a fit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class _Replacement:
    """Replaces a method of Lightning's object. Copies and pickles of the object have their own method again."""

    def __init__(self, owner: Any, name: str, run: Callable[..., Any]) -> None:
        self._owner = owner
        self._name = name
        self._run = run

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._owner, self._name)  # the object is being made, and has only its class's methods


class ReplacedMethods:
    """Methods of Lightning's objects that are replaced until :meth:`remove`."""

    def __init__(self) -> None:
        self._replaced: list[tuple[Any, str, Any]] = []

    def add(self, owner: Any, name: str, method: Callable[..., Any]) -> None:
        """Replaces a method."""
        self._replaced.append((owner, name, vars(owner).get(name)))
        setattr(owner, name, _Replacement(owner, name, method))

    def remove(self) -> None:
        """Puts Lightning's own methods back, or those that a user had put in their place."""
        for owner, name, before in reversed(self._replaced):
            if before is not None:
                setattr(owner, name, before)
            else:
                vars(owner).pop(name, None)
        self._replaced.clear()
