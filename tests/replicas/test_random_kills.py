"""A few programs of ``python -m tests.campaigns.random_kills``."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.random_kills import OPTIONS, RARE_POINTS, STOPPED_S, Program, check
from tests.support.replica_processes import POINTS


def test_every_form_and_point_is_drawn() -> None:
    programs = [Program.draw(seed) for seed in range(300)]
    kills = [kill for program in programs for kill in program.kills]
    assert {kill.point for kill in kills} == {*POINTS, *RARE_POINTS}
    assert {kill.stopped_s for kill in kills} == {0.0, *STOPPED_S}
    assert {kill.life for kill in kills} == {0, 1, 2}
    cases = [program.case for program in programs]
    assert {(case.of, case.ranks, case.accumulate, case.minimum) for case in cases} == {
        (of, ranks, accumulate, minimum)
        for of in (2, 3)
        for ranks in (1, 2)
        for accumulate in (1, 2)
        for minimum in (1, 2)
    }
    assert all(options in [case.options for case in cases] for options in OPTIONS)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(6))
def test_random_kills(seed: int, tmp_path: Path) -> None:
    check(Program.draw(seed), tmp_path)
