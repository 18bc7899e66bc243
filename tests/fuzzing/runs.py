"""Cases drawn for a time, not for a number."""

from __future__ import annotations

import time
from collections.abc import Callable

from hypothesis import HealthCheck, Phase, given, seed, settings

from .cases import Case, cases
from .players import check

CASES_A_SEED = 25

Tell = Callable[[int, int], object]


def run_for(
    seconds: float, first_seed: int, *, shrinks: bool = True, tell: Callable[[int, int], object] = print
) -> int:
    """Checks cases of one seed after the other until the time is over, and returns how many.

    Raises what the first case that fails raises, with the smallest case that fails like it in its notes.

    Args:
        tell: called with the seed and the number of cases so far, before each seed.
    """
    phases = [Phase.generate, *([Phase.shrink] if shrinks else [])]
    deadline, number, count = time.monotonic() + seconds, first_seed, 0

    def count_and_check(case: Case) -> None:
        nonlocal count
        count += 1
        check(case)

    while time.monotonic() < deadline:
        tell(number, count)
        options = settings(
            max_examples=CASES_A_SEED,
            deadline=None,
            database=None,
            phases=phases,
            suppress_health_check=list(HealthCheck),
            report_multiple_bugs=False,
        )
        seed(number)(options(given(cases())(count_and_check)))()
        number += 1
    return count
