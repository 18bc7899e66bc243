"""The table of times is made of what pytest prints."""

from __future__ import annotations

import datetime
import subprocess
import sys
from pathlib import Path

import pytest

from tests.durations import BEGIN, PHASES, put_into, report, summary, times_of
from tests.support.patience import HANG_S

PAGE = Path(__file__).parents[2] / "docs" / "design" / "testing.md"

SLOW = """
import time
import pytest

@pytest.fixture(scope="module")
def slow():
    time.sleep(0.3)
    yield
    time.sleep(0.1)

def test_a(slow):
    time.sleep(0.2)

@pytest.mark.parametrize("name", ["with :: in it", "and a space"])
def test_b(slow, name):
    time.sleep(0.1)
"""


@pytest.mark.fresh
def test_a_run_is_read_by_file_and_phase(tmp_path: Path) -> None:
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / f"test_of_{folder}.py").write_text(SLOW)
    command = [sys.executable, "-m", "pytest", "--durations=0", "-p", "no:cacheprovider", "--rootdir", str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 0, done.stdout
    times = times_of(done.stdout)
    assert set(times) == {"one/test_of_one.py", "two/test_of_two.py"}
    for phases in times.values():
        assert all(phases[phase] for phase in PHASES), "each has slept"
    assert summary(done.stdout).startswith("6 passed in 0 min ")


LOG = """
3 workers [9 items]
12.00s call     tests/a/test_long.py::test_one[x::y z]
1.50s setup    tests/a/test_long.py::test_one[x::y z]
0.25s teardown tests/b/test_short.py::test_two
0.75s call     tests/b/test_short.py::test_two
0.50s call     tests/b/test_other.py::test_three
(20 durations < 0.005s hidden.  Use -vv to show all durations.)
====== 8 passed, 1 skipped in 125.31s (0:02:05) ======
"""


def test_the_longest_come_first_and_the_short_ones_in_one_row() -> None:
    assert report(LOG, datetime.date(2026, 11, 23), least=1.0) == (
        "Seconds of the tests' phases on 2026-11-23 (8 passed, 1 skipped in 2 min 5 s, 3 workers):\n\n"
        "| folder | setup | call | teardown | sum |\n|---|---:|---:|---:|---:|\n"
        "| `tests/a` | 2 | 12 | 0 | 14 |\n| `tests/b` | 0 | 1 | 0 | 2 |\n\n"
        "| file | setup | call | teardown | sum |\n|---|---:|---:|---:|---:|\n"
        "| `tests/a/test_long.py` | 2 | 12 | 0 | 14 |\n| `tests/b/test_short.py` | 0 | 1 | 0 | 1 |\n"
        "| 1 with less than 1 each | 0 | 0 | 0 | 0 |\n"
    )


def test_a_log_without_durations_and_one_that_was_cut_off_are_refused() -> None:
    with pytest.raises(ValueError, match="--durations=0"):
        times_of("1 passed in 1.00s")
    with pytest.raises(ValueError, match="not ended"):
        report(LOG[: LOG.index("======")], datetime.date.today(), 1.0)


def test_the_page_is_written_in_its_place_however_often() -> None:
    page = PAGE.read_text(encoding="utf-8")
    once = put_into(page, "new\n")
    assert put_into(once, "new\n") == once
    assert once.partition(BEGIN)[0] == page.partition(BEGIN)[0]
    with pytest.raises(ValueError, match="the page has no"):
        put_into("# Another\n", "new\n")
