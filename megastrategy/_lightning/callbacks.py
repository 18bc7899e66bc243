"""Recognises Lightning's callbacks, in either of its packages."""

from __future__ import annotations

from typing import Any


def is_a(callback: Any, name: str) -> bool:
    """Whether a callback is of Lightning's class of that name, or derives from it."""
    return any(kind.__name__ == name for kind in type(callback).__mro__)
