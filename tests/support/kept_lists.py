"""Notes of tests in an optimizer's step."""

from __future__ import annotations

import collections
import threading
from collections.abc import Iterator
from typing import Any


class Notes:
    """A list that trial steps do not put back, and that does not make an optimizer one that counts its calls.

    A plain list in reach of an optimizer's step is put back. What Python's own objects hide is not looked through.
    """

    def __init__(self) -> None:
        self._hidden: Any = threading.Event()
        self._hidden.queue = collections.deque[Any]()

    def append(self, item: Any) -> None:
        self._hidden.queue.append(item)

    def clear(self) -> None:
        self._hidden.queue.clear()

    def __iter__(self) -> Iterator[Any]:
        return iter(list(self._hidden.queue))

    def __getitem__(self, place: Any) -> Any:
        return list(self._hidden.queue)[place]

    def __len__(self) -> int:
        return len(self._hidden.queue)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Notes | list) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]
