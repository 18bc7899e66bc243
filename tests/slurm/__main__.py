"""python -m tests.slurm: sends the requeue signal and SIGTERM to jobs of a real Slurm; prints docs/signals.md's tables.

It needs ``sbatch`` and a folder for temporary files that all nodes see. It fails where a job is not resumed at the step
that all its ranks saved, or where a rank's script has not ended within 3 s of SIGTERM.
"""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[2]
PATIENCE_S = 120.0
LEAVES_WITHIN_S = 3.0
SENT_AT_BATCH = 8


@dataclasses.dataclass(frozen=True)
class Case:
    """A job, and where its signal finds it."""

    nodes: int
    tasks_per_node: int
    stage: str

    @property
    def tasks(self) -> int:
        return self.nodes * self.tasks_per_node

    def __str__(self) -> str:
        nodes = "one node" if self.nodes == 1 else f"{self.nodes} nodes"
        return f"{self.tasks}, {nodes} | {self.stage}"


PLACES = ((1, 1), (1, 2), (2, 1))
"""Nodes, and tasks on each."""
REQUEUES = [Case(*place, stage) for stage in ("training", "validation") for place in PLACES]
TERMINATES = [Case(*place, stage) for stage in ("training", "validation", "test", "prediction") for place in PLACES]


class Job:
    """A job of Slurm's while it is queued or runs; leaving the block cancels it."""

    def __init__(self, case: Case, folder: Path) -> None:
        self._case, self._folder = case, folder

    def __enter__(self) -> Job:
        case, folder = self._case, self._folder
        python = f"{sys.executable} -m tests.slurm.job {folder} {case.stage}"
        script = f"#!/bin/sh\ncd {ROOT}\nOMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES= srun {python}\n"
        options = ["--parsable", "--requeue", "--open-mode=append", f"--output={folder}/output"]
        options += [f"--nodes={case.nodes}", f"--ntasks-per-node={case.tasks_per_node}", f"--ntasks={case.tasks}"]
        self.id = _call("sbatch", *options, text=script).strip()
        return self

    def __exit__(self, *_: object) -> None:
        _call("scancel", self.id)
        self.await_("its end", lambda: not self.state())

    def state(self) -> str:
        """With its reason, as ``squeue`` has them; nothing where the job has ended."""
        return _call("squeue", "--noheader", f"--jobs={self.id}", "--format=%t %r").strip()

    def signal(self, *options: str) -> float:
        """When it was sent."""
        sent_at = time.time()
        _call("scancel", *options, self.id)
        return sent_at

    def words(self, what: str) -> list[list[tuple[float, str]]]:
        """By rank, the times and the rest of the lines that begin with ``what``."""
        found = []
        for rank in range(self._case.tasks):
            log = self._folder / f"rank{rank}.log"
            lines = [line.split(maxsplit=2) for line in log.read_text().splitlines()] if log.exists() else []
            found.append([(float(line[0]), line[-1]) for line in lines if line[1] == what])
        return found

    def await_(self, what: str, is_there: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not is_there():
            if time.monotonic() > deadline:
                raise SystemExit(f"{self._case}: {what} did not come\n{(self._folder / 'output').read_text()}")
            time.sleep(0.05)

    def await_stage(self) -> None:
        self.await_(f"batch {SENT_AT_BATCH}", lambda: all(len(lines) > SENT_AT_BATCH for lines in self.words("in")))


def requeue(case: Case, job: Job) -> str:
    """A row of the first table."""
    job.await_stage()
    job.signal("--signal=USR1")
    job.await_("a checkpoint of all ranks", lambda: all(job.words("saved")))
    # Slurm lets a job wait for two minutes before it runs again
    job.await_("the job in the queue", lambda: job.state() == "PD BeginTime")
    _call("scontrol", "update", f"jobid={job.id}", "starttime=now")
    job.await_("its second start", lambda: all(len(starts) == 2 for starts in job.words("started")))
    [saved] = {step for lines in job.words("saved") for _, step in lines}
    [resumed] = {lines[-1][1] for lines in job.words("started")}
    assert saved == resumed, f"{case}: saved at step {saved}, resumed at {resumed}"
    return f"| {case} | {saved} | {resumed} |"


def terminate(case: Case, job: Job) -> str:
    """A row of the second table."""
    job.await_stage()
    sent_at = job.signal()
    job.await_("the end of all ranks", lambda: all(job.words("left")))
    assert not any(job.words("finished")), f"{case}: went on to its end"
    took_s = max(at for lines in job.words("left") for at, _ in lines) - sent_at
    assert took_s < LEAVES_WITHIN_S, f"{case}: left after {took_s:.2f} s"
    return f"| {case} | {took_s:.2f} s |"


def main() -> None:
    """The command."""
    for head, cases, run in (
        ("| tasks | the requeue signal in | saved at step | resumed at step |\n|---|---|---|---|", REQUEUES, requeue),
        ("| tasks | SIGTERM in | the last rank's script has ended after |\n|---|---|---|", TERMINATES, terminate),
    ):
        _tell(head)
        for case in cases:
            with tempfile.TemporaryDirectory() as folder, Job(case, Path(folder)) as job:
                _tell(run(case, job))
        _tell("")


def _call(*command: str, text: str | None = None) -> str:
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=True)
    return done.stdout


def _tell(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
