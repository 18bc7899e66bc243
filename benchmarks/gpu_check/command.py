"""The command: chooses sections, has each run in a process of its own, prints lines, and writes each down at once."""

from __future__ import annotations

import argparse
import collections
import json
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from ..names import require_known
from . import children
from .budget import Plan, Turn
from .context import LEFT_OUT, Context
from .devices import why_no_device
from .lines import Line, Verdict
from .sections import SECTIONS, Section
from .versions import describe

_HOST_BOX_S = 240.0
"""A section's on the host, where models are smaller: twenty times what one takes there on quiet cores."""


_LEAST_BUDGET_S = 60.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0, 1 if a line is FAIL, 2 if nothing could be run."""
    options = _parse(arguments)
    options.began = _started_at() if arguments is None else time.monotonic()
    method, reason = _start_method(options.device, options.gpus)
    if reason:
        print(f"gpu_check: {reason}", file=sys.stderr)
        return 2
    report = _Report(options, method, sys.argv[1:] if arguments is None else arguments)
    with children.awake_device(method, options.device):
        for lanes in _stages(options, report):
            children.run_lanes(method, [_jobs(turns, options, method, report) for turns in lanes])
    print(report.summary(), flush=True)
    return 1 if report.counts[Verdict.FAIL] else 0


def _started_at() -> float:
    """When this process was started, by ``time.monotonic``: imports, seconds of them, are in a budget too."""
    now = time.monotonic()
    if not sys.platform.startswith("linux"):
        return now
    ticks = float(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return now - age_s if 0 <= age_s < _LEAST_BUDGET_S else now  # else a clock of another machine's


def _stages(options: argparse.Namespace, report: _Report) -> Iterator[list[Iterator[Turn]]]:
    if options.budget is None:
        yield [(Turn(letter=letter) for letter in options.only)]
        return
    expected_s = {letter: section.expected_s for letter, section in SECTIONS.items()}
    plan = Plan(options.only, expected_s, options.budget - (time.monotonic() - report.began), options.gpus)
    yield from plan.stages()
    for letter in plan.left_out:
        report.take(Line(verdict=Verdict.SKIPPED, name=f"{letter}.all", detail=f"{LEFT_OUT}: no time was left"))


def _jobs(turns: Iterator[Turn], options: argparse.Namespace, method: str, report: _Report) -> Iterator[children.Job]:
    for turn in turns:
        letter, began = turn.letter, time.monotonic()
        section = SECTIONS[letter]
        print(f"--- {letter}: {section.about}", flush=True)
        box_s = options.box or (_HOST_BOX_S if options.device == "cpu" else section.box_s)
        yield children.Job(
            name=f"{letter}.section",
            run=run_section,
            arguments=(letter, options.device, options.gpus, method, turn.ends_at, turn.threads),
            box_s=min(box_s, turn.box_s),
            on_line=report.take,
        )
        report.end_section(letter, section, time.monotonic() - began)


def run_section(
    say: Callable[[Line], None], letter: str, kind: str, num_gpus: int, method: str, ends_at: float, threads: int
) -> None:
    """In the section's process."""
    if threads:
        torch.set_num_threads(threads)  # of ranks that are forked
        os.environ.setdefault("OMP_NUM_THREADS", str(threads))  # of fresh ones
    SECTIONS[letter].run(Context(letter, say, kind, num_gpus, method, ends_at))


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    sections = "\n".join(f"  {letter}  {section.about}" for letter, section in SECTIONS.items())
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_check",
        description="Checks this engine on the GPUs of this machine; docs/project/gpu_check.md explains its lines.",
        epilog=f"sections:\n{sections}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: tries the program itself")
    parser.add_argument("--gpus", type=int, default=1, metavar="N", help="a rank on each of N; 1: two ranks share one")
    parser.add_argument("--only", metavar="A,C", default=",".join(SECTIONS), help="these sections")
    parser.add_argument("--json", type=Path, metavar="PATH", help="all lines, each written as soon as it is said")
    times = parser.add_mutually_exclusive_group()
    times.add_argument("--box", type=float, metavar="SECONDS", help="for each section, in place of its own")
    times.add_argument("--budget", type=float, metavar="SECONDS", help="for all: plans the sections into it")
    options = parser.parse_args(arguments)
    options.only = list(dict.fromkeys(name.strip().upper() for name in options.only.split(",") if name.strip()))
    if not options.only:
        parser.error(f"--only: expected letters out of {', '.join(SECTIONS)}")
    if options.budget is not None and options.budget < _LEAST_BUDGET_S:
        parser.error(f"--budget {options.budget:g}: expected {_LEAST_BUDGET_S:g} seconds or more")
    if options.gpus < 1:
        parser.error(f"--gpus {options.gpus}: expected 1 or more")
    try:
        require_known("section", options.only, SECTIONS)
    except ValueError as error:
        parser.error(str(error))
    return options


def _start_method(kind: str, num_gpus: int) -> tuple[str, str]:
    """Returns how to start processes so that they can use the device, and why that cannot be; one of both is empty.

    Forks fail if anything has touched the driver before, which some import may do one day; a fresh interpreter does
    not. The driver is asked in children, since asking is touching. If forks are right after the imports that take
    longest, these are done here, once.
    """
    ways: list[tuple[str, Callable[..., None]]] = [(method, _probe) for method in children.start_methods()]
    if children.FORK in children.start_methods():
        ways.insert(0, (children.FORK, _probe_after_imports))
    reason = ""
    for method, probe in ways:
        found: list[Line] = []
        children.run_child(method, "probe", probe, (kind, num_gpus), 90.0, found.append)
        answer = found[-1]
        if answer.verdict is Verdict.MEASURED and not answer.value:
            if probe is _probe_after_imports:
                _import_slow()
            return method, ""
        # A fork whose parent has touched the driver may raise, or just see no GPU: the next way is tried after both.
        reason = str(answer.value or answer.detail)
    return "", reason


def _probe(say: Callable[[Line], None], kind: str, num_gpus: int) -> None:
    say(Line(verdict=Verdict.MEASURED, name="probe", value=why_no_device(kind, num_gpus)))


def _probe_after_imports(say: Callable[[Line], None], kind: str, num_gpus: int) -> None:
    _import_slow()
    children.run_child(children.FORK, "probe", _probe, (kind, num_gpus), 60.0, say)


def _import_slow() -> None:
    """Imports what each rank would, seconds each: the first step of an optimizer imports torch's compiler."""
    import torch._dynamo
    import torch.distributed.checkpoint  # noqa: F401


class _Report:
    """Prints lines and keeps them."""

    def __init__(self, options: argparse.Namespace, method: str, arguments: Sequence[str]) -> None:
        self._path: Path | None = options.json
        self.began = options.began
        self.counts: collections.Counter[Verdict] = collections.Counter()
        self._content: dict[str, Any] = {
            **describe(),
            "command": shlex.join(["python", "-m", "benchmarks.gpu_check", *arguments]),
            "device": options.device,
            "gpus": options.gpus,
            "started_by": method,
            "budget_s": options.budget,
            "is_complete": False,
            "sections": [],
            "lines": [],
        }

    def take(self, line: Line) -> None:
        """A section says it."""
        self.counts[line.verdict] += 1
        self._content["lines"].append(line.as_json())
        self._write()  # first, so that what has been printed is in it
        print(line, flush=True)

    def end_section(self, letter: str, section: Section, seconds: float) -> None:
        """A section has ended, well or not."""
        self._content["sections"].append({"letter": letter, "about": section.about, "seconds": round(seconds, 1)})

    def summary(self) -> str:
        """The last lines: what failed, what was left out, and how many lines there are of each kind."""
        self._content["is_complete"] = True
        self._content["seconds"] = round(time.monotonic() - self.began, 1)
        self._write()
        lines = self._content["lines"]
        names = {
            Verdict.FAIL.value: [line["name"] for line in lines if line["verdict"] == Verdict.FAIL.value],
            LEFT_OUT: [line["name"] for line in lines if line["detail"].startswith(LEFT_OUT)],
        }
        counts = ", ".join(f"{self.counts[verdict]} {verdict.value}" for verdict in Verdict)
        listed = [f"--- {what}: {', '.join(found)}" for what, found in names.items() if found]
        return "\n".join([*listed, f"--- {counts} in {self._content['seconds']} s"])

    def _write(self) -> None:
        if self._path is None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        # Never half: who reads it may do so while the next section runs.
        beside = self._path.with_name(f"{self._path.name}.part")
        beside.write_text(json.dumps(self._content, indent=1) + "\n", encoding="utf-8")
        os.replace(beside, self._path)
