"""Cases drawn for a time, not for a number."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings

from .cases import Case, cases
from .comparison import check
from .tally import Tally

CASES_A_SEED = 50

Tell = Callable[[int, Tally], object]


def run_for(seconds: float, first_seed: int, *, shrinks: bool = True, tell: Tell = lambda number, tally: None) -> Tally:
    """Checks cases of one seed after the other until the time is over.

    Raises what the first case that fails raises, with the smallest case that fails like it in its notes, as a test.

    Args:
        tell: called with the seed and what was drawn so far, before each seed.
    """
    phases = [Phase.generate, *([Phase.shrink] if shrinks else [])]
    deadline, number, tally = time.monotonic() + seconds, first_seed, Tally()
    failed: list[Case] = []

    def count_and_check(case: Case) -> None:
        if not failed:
            if time.monotonic() > deadline:
                return
            tally.count(case)
        try:
            check(case)
        except AssertionError:
            failed.append(case)
            raise

    while time.monotonic() < deadline:
        tell(number, tally)
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
        except BaseException as error:
            if failed:  # the smallest comes last
                error.add_note(f"Found after {tally.num_cases} cases. As a test:\n\n{as_test(failed[-1], number)}")
            raise
        number += 1
    return tally


def as_test(case: Case, number: int) -> str:
    """A file of its own, that fails as the case does."""
    fields = "".join(f"        {part},\n" for part in _arguments(case))
    return (
        "from tests.fuzzing.cases import *\n"
        "from tests.fuzzing.comparison import check\n\n\n"
        f"def test_found_with_seed_{number}() -> None:\n"
        f"    case = Case(\n{fields}    )\n    check(case)\n"
    )


def _arguments(value: Any) -> list[str]:
    """Those that are not the defaults."""
    given = [(field, getattr(value, field.name)) for field in dataclasses.fields(value)]
    return [f"{field.name}={_source(present)}" for field, present in given if present != field.default]


def _source(value: Any) -> str:
    if dataclasses.is_dataclass(value):
        return f"{type(value).__name__}({', '.join(_arguments(value))})"
    if isinstance(value, tuple):
        return f"({', '.join(map(_source, value))}{',' if len(value) == 1 else ''})"
    return repr(value)
