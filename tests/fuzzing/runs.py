"""Cases drawn for a time, not for a number."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.errors import Flaky

from .cases import Case, cases
from .comparison import check

CASES_A_SEED = 50
SHRINKING_S = 120.0

Tell = Callable[[int, int], object]


@dataclasses.dataclass(frozen=True)
class Failure:
    """The failures of one case; the first is as it was drawn, the others are ever smaller."""

    case: Case
    error: AssertionError
    time_s: float


def run_for(
    seconds: float,
    first_seed: int,
    *,
    shrinks: bool = True,
    tell: Tell = lambda number, num_cases: None,
    in_work: Path | None = None,
) -> int:
    """Checks cases of one seed after the other until the time is over. Returns their number.

    Raises an AssertionError with the smallest case that was found to fail in its notes, as a test.

    Args:
        tell: called with the seed and the number of cases so far, before each seed.
        in_work: where each case is written before it is checked, as a test. gloo ends the process where two ranks are
            in different collectives, and then this is all that is left.
    """
    phases = [Phase.generate, *([Phase.shrink] if shrinks else [])]
    begun, number, num_cases = time.monotonic(), first_seed, 0
    failures: list[Failure] = []

    def count_and_check(case: Case) -> None:
        nonlocal num_cases
        if not failures:
            if time.monotonic() > begun + seconds:
                return
            num_cases += 1
        elif time.monotonic() > failures[0].time_s + SHRINKING_S and case != failures[-1].case:
            return  # small enough
        if in_work is not None:
            in_work.write_text(as_test(case, number))
        try:
            check(case)
        except AssertionError as error:
            failures.append(Failure(case, error, time.monotonic()))
            raise

    while time.monotonic() < begun + seconds:
        tell(number, num_cases)
        options = settings(
            max_examples=CASES_A_SEED,
            deadline=None,
            database=None,
            phases=phases,
            suppress_health_check=list(HealthCheck),
            report_multiple_bugs=False,
        )
        try:
            seed(number)(options(given(cases())(count_and_check)))()
        except (AssertionError, Flaky):
            # a race may be lost once and never again, which Flaky says, and not what differed
            smallest = failures[-1]
            found = f"Found with seed {number} in case {num_cases}, after {failures[0].time_s - begun:.0f} s"
            smallest.error.add_note(f"{found}. As a test:\n\n{as_test(smallest.case, number)}")
            raise smallest.error from None
        number += 1
    return num_cases


def as_test(case: Case, number: int) -> str:
    """A file of its own, that fails as the case does."""
    fields = "".join(f"        {part},\n" for part in _arguments(case))
    return (
        "from tests.fuzzing.cases import *  # noqa: F403\n"
        "from tests.fuzzing.comparison import check\n\n\n"
        f"def test_found_with_seed_{number}() -> None:\n"
        f"    case = Case(\n{fields}    )\n    check(case)\n"
    )


def _arguments(value: Any) -> list[str]:
    """The arguments that are not the defaults."""
    given = [(field, getattr(value, field.name)) for field in dataclasses.fields(value)]
    return [f"{field.name}={_source(present)}" for field, present in given if present != field.default]


def _source(value: Any) -> str:
    if dataclasses.is_dataclass(value):
        return f"{type(value).__name__}({', '.join(_arguments(value))})"
    if isinstance(value, tuple):
        return f"({', '.join(map(_source, value))}{',' if len(value) == 1 else ''})"
    return repr(value)
