"""What the configuration promises of the parameters that a backward uses, and its check."""

from __future__ import annotations

from ..errors import UnusedParameterError
from ..layout import BufferLayout


class Promises:
    """``static_graph=True``: the same parameters in every synchronised backward; or all of them.

    Bytes are flags by parameter, in launch order.

    Attributes:
        used: the parameters of a static graph that any rank uses; None until the ranks have agreed.
    """

    def __init__(self, rank: int, *, is_static: bool) -> None:
        self._rank = rank
        self._is_static = is_static
        self._missing = b""  # in the first synchronised backward
        self.used: bytes | None = None

    @property
    def needs_exchange(self) -> bool:
        """Whether the next synchronised backward ends with an exchange of the used parameters."""
        return self._is_static and self.used is None

    def agree(self, used: bytes) -> None:
        """Records the parameters that all ranks together have used."""
        if self._is_static and self.used is None:
            self.used = used

    def check(self, missing: bytes, layout: BufferLayout) -> None:
        """Raises UnusedParameterError if parameters were used against the promise.

        ``missing``: those that require gradients and got none on this rank.
        """
        if self._is_static:
            if self.used is None:
                self._missing = missing
            changed = [place for place, flag in enumerate(missing) if flag != self._missing[place]]
            promise = "static_graph=True: the same parameters as in the first synchronised backward must be used"
        else:
            changed = [place for place, flag in enumerate(missing) if flag]
            promise = "find_unused_parameters=False: every parameter must be used"
        if not changed:
            return
        order = layout.param_order
        names = [layout.params[index].name for index in sorted(order[place] for place in changed)]
        first = ", ".join(map(repr, names[:5])) + (", ..." if len(names) > 5 else "")
        what = "no gradient" if missing[changed[0]] else "a gradient"
        raise UnusedParameterError(
            f"rank {self._rank}: {len(names)} parameter(s) received {what} in this backward against {promise}: "
            f"{first}. Drop the option (unused parameters are handled by default, at one byte a parameter a step), or "
            "freeze what is never used"
        )
