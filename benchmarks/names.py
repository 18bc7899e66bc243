"""Names given on the command line, against those that exist."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def require_known(kind: str, names: Iterable[str], known: Iterable[str]) -> None:
    """Raises ValueError for the first of ``names`` that is not known, with the nearest one that is."""
    known = list(known)
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
            raise ValueError(f"unknown {kind} {name!r}: did you mean {near[0]!r}? known are {', '.join(known)}")
