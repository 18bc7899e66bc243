"""Lines that sections say: what was looked at, what came out, and what may come out."""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Mapping


class Verdict(enum.Enum):
    """The first word of a line."""

    PASS = "PASS"
    """The value is within its limit."""
    FAIL = "FAIL"
    """It is not, or nothing came out: the reason follows."""
    MEASURED = "MEASURED"
    """A figure without a promise or a limit."""
    SKIPPED = "SKIPPED"
    """Not looked at, for the reason that follows."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Line:
    """One line of the report.

    Attributes:
        name: the section's letter, a dot, and what was looked at.
        value: the figure; None where there is none.
        limit: the largest value that passes (the smallest, with ``at_least``); None where there is none.
        unit: of both.
        seconds: since the line before.
        detail: the reason of a FAIL or SKIPPED line, or what else there is to know.
        figures: more of them, by name; units are in the names.
    """

    verdict: Verdict
    name: str
    value: float | str | None = None
    limit: float | None = None
    at_least: bool = False
    unit: str = ""
    seconds: float = 0.0
    detail: str = ""
    figures: Mapping[str, float | str] = dataclasses.field(default_factory=dict)

    def __str__(self) -> str:
        limit = "-" if self.limit is None else f"{'>=' if self.at_least else '<='} {_figure(self.limit)}"
        value = _figure(self.value) + (f" {self.unit}" if self.unit and self.value is not None else "")
        text = f"{self.verdict.value:<8} {self.name:<46} {value:>16} {limit:>12} {self.seconds:7.1f} s"
        if self.verdict is Verdict.FAIL:
            return "\n".join([text, *(f"         | {part}" for part in self.detail.splitlines())])
        figures = ", ".join(f"{name} {_figure(value)}" for name, value in self.figures.items())
        return "  ".join(part for part in (text, self.detail, figures) if part)

    def as_json(self) -> dict[str, object]:
        """Plain values. NaN and infinities are strings, since JSON has none."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        fields |= {"verdict": self.verdict.value, "figures": {name: _plain(v) for name, v in self.figures.items()}}
        return {name: _plain(value) for name, value in fields.items()}


def judged(name: str, value: float, limit: float, *, at_least: bool = False, unit: str = "", detail: str = "") -> Line:
    """A line that passes if the value is within its limit. NaN never is."""
    within = value >= limit if at_least else value <= limit
    verdict = Verdict.PASS if within else Verdict.FAIL
    return Line(verdict=verdict, name=name, value=value, limit=limit, at_least=at_least, unit=unit, detail=detail)


def _figure(value: float | str | None) -> str:
    if value is None:
        return "-"
    return value if isinstance(value, str) else f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def _plain(value: object) -> object:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
