"""python -m tests.durations LOG [--write PAGE]: where a run's time went, by folder, by file and by phase.

LOG is the output of pytest with ``--durations=0``. Seconds of setup are those of fixtures, which a file's first test
pays for all. ``--write`` puts the tables into a page, between the two comments that name this command.
"""

from __future__ import annotations

import argparse
import datetime
import re
import sys
from collections import defaultdict
from pathlib import Path, PurePosixPath

PHASES = ("setup", "call", "teardown")
BEGIN, END = "<!-- python -m tests.durations -->", "<!-- end of python -m tests.durations -->"

Times = dict[str, dict[str, float]]
"""Seconds by name (a file, a folder) and phase."""


def times_of(log: str) -> Times:
    """Seconds by file and phase; what pytest hides, below 5 ms, is not among them."""
    times: Times = defaultdict(lambda: dict.fromkeys(PHASES, 0.0))
    for seconds, phase, file in re.findall(r"^(\d+\.\d\d)s (setup|call|teardown) +([^\s:]+\.py)::", log, re.MULTILINE):
        times[file][phase] += float(seconds)
    if not times:
        raise ValueError("no durations: run pytest with --durations=0")
    return times


def by_folder(times: Times) -> Times:
    folders: Times = defaultdict(lambda: dict.fromkeys(PHASES, 0.0))
    for file, phases in times.items():
        for phase, seconds in phases.items():
            folders[str(PurePosixPath(file).parent)][phase] += seconds
    return folders


def table(what: str, times: Times, least: float = 0.0) -> str:
    """The longest first; those below ``least`` seconds in one row."""
    rows = [f"| {what} | setup | call | teardown | sum |", "|---|---:|---:|---:|---:|"]
    rest, others = dict.fromkeys(PHASES, 0.0), 0
    for name, phases in sorted(times.items(), key=lambda item: -sum(item[1].values())):
        if sum(phases.values()) >= least:
            rows.append(_row(f"`{name}`", phases))
        else:
            others += 1
            rest = {phase: rest[phase] + phases[phase] for phase in PHASES}
    if others:
        rows.append(_row(f"{others} with less than {least:g} each", rest))
    return "\n".join(rows)


def _row(name: str, phases: dict[str, float]) -> str:
    return " | ".join([f"| {name}", *(f"{phases[phase]:.0f}" for phase in PHASES), f"{sum(phases.values()):.0f} |"])


def summary(log: str) -> str:
    """What the run was: its tests, minutes and workers."""
    ended = re.findall(r"^=* ?((?:\d+ \w+, )*\d+ \w+) in (\d+)\.\d+s", log, re.MULTILINE)
    if not ended:
        raise ValueError("the run has not ended: its last line is missing")
    counts, seconds = ended[-1][0], int(ended[-1][1])
    workers = re.findall(r"^(\d+) workers \[", log, re.MULTILINE)
    by = f", {workers[-1]} workers" if workers else ""
    return f"{counts} in {seconds // 60} min {seconds % 60} s{by}"


def report(log: str, date: datetime.date, least: float) -> str:
    times = times_of(log)
    return (
        f"Seconds of the tests' phases on {date} ({summary(log)}):\n\n"
        f"{table('folder', by_folder(times))}\n\n{table('file', times, least)}\n"
    )


def put_into(page: str, text: str) -> str:
    """The page with this text between the comments."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page has no {BEGIN if not begin else END}")
    return f"{before}{BEGIN}\n\n{text}\n{END}{after}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.durations", description=__doc__)
    parser.add_argument("log", type=Path, help="the output of pytest with --durations=0")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="docs/design/testing.md")
    parser.add_argument("--least", type=float, default=10.0, help="seconds that give a file a row of its own (10)")
    arguments = parser.parse_args()
    date = datetime.date.fromtimestamp(arguments.log.stat().st_mtime)
    text = report(arguments.log.read_text(encoding="utf-8", errors="replace"), date, arguments.least)
    if arguments.write is None:
        sys.stdout.write(text)
    else:
        page = arguments.write.read_text(encoding="utf-8")
        arguments.write.write_text(put_into(page, text), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
