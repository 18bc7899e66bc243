"""The arguments of an optimizer's ``step``: a closure, and others that the user's class accepts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class StepArguments:
    """The arguments of one call, as they were given."""

    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def closure(self) -> Callable[[], Any] | None:
        """The closure, given by its name or in front; None if there is none."""
        given: Callable[[], Any] | None = self.kwargs.get("closure", self.args[0] if self.args else None)
        # step(None) is a call without one; anything else in front is an argument of the user's class.
        return given if callable(given) else None

    def with_closure(self, closure: Callable[[], Any]) -> StepArguments:
        """Returns the arguments with another closure."""
        if "closure" in self.kwargs:
            return StepArguments(self.args, {**self.kwargs, "closure": closure})
        return StepArguments((closure, *self.args[1:]), self.kwargs)

    def without_closure(self) -> StepArguments:
        """Returns the other arguments; None keeps the closure's place in front of them."""
        kwargs = {name: value for name, value in self.kwargs.items() if name != "closure"}
        is_in_front = "closure" not in self.kwargs and bool(self.args)
        # Nothing in front is a closure: a first argument of another kind stays where it is.
        if not is_in_front or (self.args[0] is not None and self.closure is None):
            return StepArguments(self.args, kwargs)
        return StepArguments((None, *self.args[1:]) if len(self.args) > 1 else (), kwargs)

    def __bool__(self) -> bool:
        return bool(self.args or self.kwargs)

    def call(self, step: Callable[..., Any]) -> Any:
        """Calls ``step`` with them."""
        return step(*self.args, **self.kwargs)
