"""A section is given this: the device that it checks, ranks to do it on, and lines to say it in."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from .lines import Line, Verdict, judged
from .ranks import FAKE_SIZE, Place, Way, run_ranks

LEFT_OUT = "left out for want of time"
"""The beginning of the reason of cases that were not begun."""


class Context:
    """Belongs to one section, in its process.

    Args:
        letter: the section's.
        say: takes its lines.
        kind: of device, ``"cuda"`` or ``"cpu"``.
        num_gpus: how many ranks have a device each; with one, two ranks share it where a section needs two.
        method: to start processes.
        ends_at: the time, by ``time.monotonic``, from which on no further case is begun.
    """

    def __init__(
        self,
        letter: str,
        say: Callable[[Line], None],
        kind: str,
        num_gpus: int,
        method: str,
        ends_at: float = math.inf,
    ) -> None:
        self.letter, self.kind, self.num_gpus, self.method = letter, kind, num_gpus, method
        self._say, self._ends_at = say, ends_at
        self._last = time.monotonic()

    @property
    def is_host(self) -> bool:
        """Whether the processor replaces a GPU."""
        return self.kind == "cpu"

    def place(self, way: Way | None = None, size: int | None = None, **options: Any) -> Place:
        """Chooses where ranks run: by default as many as there are GPUs, or two that share one."""
        way = way or ("backend" if self.num_gpus > 1 else "staged")
        size = size or {"alone": 1, "fake": FAKE_SIZE}.get(way, max(2, self.num_gpus))
        return Place(kind=self.kind, method=self.method, way=way, size=size, num_gpus=self.num_gpus, **options)

    def cases(self, names: Iterable[str]) -> Iterator[str]:
        """Yields names of cases while the time left is enough for one as long as the longest so far; says which are
        left out."""
        longest_s = 0.0
        for name in names:
            began = time.monotonic()
            if began + longest_s > self._ends_at:
                self.skip(name, f"{LEFT_OUT}: {max(0.0, self._ends_at - began):.0f} s were left")
                continue
            yield name
            longest_s = max(longest_s, time.monotonic() - began)

    def ranks(self, function: Callable[..., Any], *arguments: Any, place: Place | None = None) -> list[Any]:
        """The results of a function by rank; see :func:`.ranks.run_ranks`."""
        return run_ranks(place or self.place(), function, *arguments)

    # --- lines -------------------------------------------------------------------------------------------------------

    def check(self, name: str, value: float, limit: float, **how: Any) -> None:
        """Says PASS or FAIL; see :func:`.lines.judged`."""
        self._line(judged(f"{self.letter}.{name}", value, limit, **how))

    def check_equal(self, name: str, what: str, difference: str) -> None:
        """Says PASS if there is no difference.

        Args:
            what: was compared.
            difference: in words; empty for none.
        """
        verdict = Verdict.FAIL if difference else Verdict.PASS
        self._line(Line(verdict=verdict, name=f"{self.letter}.{name}", value=what, detail=difference))

    def measure(
        self,
        name: str,
        value: float | str,
        unit: str = "",
        detail: str = "",
        figures: Mapping[str, float | str] | None = None,
    ) -> None:
        """Says what was measured."""
        full = f"{self.letter}.{name}"
        more = dict(figures or {})
        self._line(Line(verdict=Verdict.MEASURED, name=full, value=value, unit=unit, detail=detail, figures=more))

    def skip(self, name: str, reason: str) -> None:
        """Says what is not looked at, and why."""
        self._line(Line(verdict=Verdict.SKIPPED, name=f"{self.letter}.{name}", detail=reason))

    @contextlib.contextmanager
    def attempt(self, name: str) -> Iterator[None]:
        """Makes a FAIL line of what raises inside; the section goes on."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - a line, whatever it is
            detail = f"raised {type(error).__name__}: {error}\n{traceback.format_exc(limit=-3)}"
            self._line(Line(verdict=Verdict.FAIL, name=f"{self.letter}.{name}", detail=detail))

    def _line(self, line: Line) -> None:
        now = time.monotonic()
        self._say(dataclasses.replace(line, seconds=now - self._last))
        self._last = now
