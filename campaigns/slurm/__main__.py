"""python -m campaigns.slurm: what becomes of jobs of a real Slurm, with ours and with "ddp"; prints tables.

It needs ``sbatch``, two nodes, and a folder for temporary files that both see; :file:`cluster.sh` makes such a Slurm on
one machine. It fails where the weights at the end of a job are not those of a job that nothing happened to, to the bit;
where a job does not go on at the step that all its ranks saved at the signal; or where a rank's script has not ended
within 3 s of SIGTERM.
"""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from . import replicas
from .job import NUM_BATCHES, NUM_EPOCHS, SAVES_EVERY

ROOT = Path(__file__).parents[2]
PATIENCE_S = 240.0
LEAVES_WITHIN_S = 3.0
RESTS_S = 5.0
SENT_AT = 8
"""The place in a stage: a batch, or half of the saves."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A job, and where something happens to it."""

    stage: str
    nodes: int = 2
    tasks_per_node: int = 1
    strategy: str = "megatron_ddp"
    options: tuple[str, ...] = ()

    @property
    def tasks(self) -> int:
        return self.nodes * self.tasks_per_node

    @property
    def place(self) -> str:
        nodes = "one node" if self.nodes == 1 else f"{self.nodes} nodes"
        return f"{self.tasks}, {nodes}"


PLACES = ((1, 1), (1, 2), (2, 1))
"""Nodes, and tasks on each."""
LIMIT = ("--time=2", "--signal=USR1@30")
"""Slurm sends the signal up to a minute earlier."""
IN_A_FIT = ("training", "validation", "saving")


class Job:
    """A job of Slurm's while it is queued or runs."""

    def __init__(self, case: Case, folder: Path) -> None:
        self.case, self.folder = case, folder
        job = f"{sys.executable} -m campaigns.slurm.job {folder} {case.stage} {case.strategy}"
        script = f"#!/bin/sh\ncd {ROOT}\nOMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES= srun {job}\n"
        options = ["--parsable", "--requeue", "--open-mode=append", f"--output={folder}/output"]
        options += [f"--nodes={case.nodes}", f"--ntasks-per-node={case.tasks_per_node}", f"--ntasks={case.tasks}"]
        self.id = _call("sbatch", *options, *case.options, text=script).strip()

    def state(self) -> str:
        """With its reason, as ``squeue`` has them; nothing where the job has ended."""
        return _call("squeue", "--noheader", f"--jobs={self.id}", "--format=%t %r").strip()

    def words(self, what: str) -> list[list[tuple[float, list[str]]]]:
        """By rank, the times and the rest of the lines that begin with ``what``."""
        found = []
        for rank in range(self.case.tasks):
            log = self.folder / f"rank{rank}.log"
            lines = [line.split() for line in log.read_text().splitlines()] if log.exists() else []
            found.append([(float(line[0]), line[2:]) for line in lines if line[1] == what])
        return found

    def await_(self, what: str, is_there: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not is_there():
            if time.monotonic() > deadline:
                raise SystemExit(f"{self.case}: {what} did not come\n{(self.folder / 'output').read_text()}")
            time.sleep(0.05)

    def await_stage(self) -> None:
        sent_at = SENT_AT // 2 if self.case.stage == "saving" else SENT_AT
        self.await_("the stage", lambda: all(len(lines) > sent_at for lines in self.words("in")))

    def start_again(self) -> None:
        """Slurm lets a job wait for two minutes before it runs again, in which processes and nodes come to rest."""
        self.await_("the job in the queue", lambda: self.state() == "PD BeginTime")
        self.await_("the end of its processes", lambda: not _processes(self._is_watched_by))
        time.sleep(RESTS_S)
        _call("scontrol", "update", f"jobid={self.id}", "starttime=now")
        self.await_("its second start", lambda: all(len(starts) == 2 for starts in self.words("started")))

    def _is_watched_by(self, process: psutil.Process) -> bool:
        return f"slurmstepd: [{self.id}." in " ".join(process.cmdline())

    def weights(self) -> str:
        """The digest of them at the end of a fit, which is the same on all ranks."""
        self.await_("the end of all ranks", lambda: all(self.words("finished")))
        ends = {tuple(lines[-1][1]) for lines in self.words("finished")}
        [(step, digest)] = ends
        assert int(step) == NUM_BATCHES * NUM_EPOCHS, self.case
        return digest


@contextmanager
def job_of(case: Case) -> Iterator[Job]:
    """Cancels it at the end of the block."""
    with tempfile.TemporaryDirectory() as folder:
        job = Job(case, Path(folder))
        try:
            yield job
        finally:
            for options in (["--signal=KILL"], []):
                subprocess.run(["scancel", *options, job.id], capture_output=True)  # it may have ended by itself
            job.await_("its end", lambda: not job.state())


# --- nothing happens -------------------------------------------------------------------------------------------------


def undisturbed(tasks: tuple[int, int], strategy: str) -> str:
    """The digest of a job's weights."""
    with job_of(Case("none", *tasks, strategy)) as job:
        return job.weights()


# --- signals ---------------------------------------------------------------------------------------------------------


def requeue(case: Case, expected: str) -> str:
    """A row of the table of what Slurm sends ahead of a limit."""
    with job_of(case) as job:
        if case.options != LIMIT:
            job.await_stage()
            _call("scancel", "--signal=USR1", job.id)
        job.start_again()
        resumed = [lines[-1] for lines in job.words("started")]
        saved = [[step for at, step in lines if at < resumed[0][0]][-1] for lines in job.words("saved")]
        steps = {int(step) for [step] in [*saved, *(step for _, step in resumed)]}
        assert len(steps) == 1, f"{case}: saved at {saved}, resumed at {resumed}"
        assert job.weights() == expected, case
        how = " ".join(case.options) or "scancel --signal=USR1"
        return f"| {case.place} | {case.stage} | `{how}` | {steps.pop()} |"


def terminate(case: Case) -> str:
    """A row of the table of SIGTERM."""
    with job_of(case) as job:
        job.await_stage()
        sent_at = time.time()
        _call("scancel", job.id)
        job.await_("the end of all ranks", lambda: all(job.words("left")))
        assert not any(job.words("finished")), f"{case}: went on to its end"
        took_s = max(at for lines in job.words("left") for at, _ in lines) - sent_at
        assert took_s < LEAVES_WITHIN_S, f"{case}: left after {took_s:.2f} s"
        return f"| {case.place} | {case.stage} | {took_s:.2f} s |"


# --- failures --------------------------------------------------------------------------------------------------------


def cancel(job: Job) -> None:
    _call("scancel", job.id)


def kill_a_task(job: Job) -> None:
    _tasks_of("node1")[0].kill()


def set_a_node_down(job: Job) -> None:
    _call("scontrol", "update", "nodename=node1", "state=down", "reason=tried")


def kill_a_node(job: Job) -> None:
    """All of its processes: its daemon first, which would otherwise say what has become of the others."""
    tasks = _tasks_of("node1")
    for process in [*_daemons_of("node1"), *(task.parent() for task in tasks), *tasks]:
        assert process is not None
        process.kill()


def bring_back_a_node(job: Job) -> None:
    if not _daemons_of("node1"):
        _call("slurmd", "-c", "-N", "node1")

    def is_back() -> bool:
        state = _call("sinfo", "--noheader", "--nodes=node1", "--format=%T").strip()
        if state.startswith("down"):  # a daemon that starts, or lives, may bring it back by itself
            subprocess.run(["scontrol", "update", "nodename=node1", "state=resume"], capture_output=True)
        return state == "idle"

    job.await_("the node", is_back)


def _tasks_of(node: str) -> list[psutil.Process]:
    def is_one(process: psutil.Process) -> bool:
        task = process.cmdline()[1:3] == ["-m", "campaigns.slurm.job"]
        return task and process.environ().get("SLURMD_NODENAME") == node

    return _processes(is_one)


def _daemons_of(node: str) -> list[psutil.Process]:
    return _processes(lambda process: process.cmdline()[:1] == ["slurmd"] and process.cmdline()[-2:] == ["-N", node])


def _processes(is_one: Callable[[psutil.Process], bool]) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.AccessDenied, psutil.NoSuchProcess):  # not one of ours, or no longer
            if is_one(process):
                found.append(process)
    return found


def fail(what: str, happens: Callable[[Job], None], strategy: str, expected: str) -> tuple[str, str]:
    """How long it took, and what then became of the job, for the table of failures."""
    with job_of(Case("training", strategy=strategy)) as job:
        job.await_stage()
        began_at = time.time()
        happens(job)
        job.await_("the end of all ranks", lambda: not _tasks_of("node0") and not _tasks_of("node1"))
        ranks_s = time.time() - began_at
        job.await_("the end of the job", lambda: job.state() in ("", "PD BeginTime"))
        job_s = time.time() - began_at
        then = "gone"
        if job.state():
            bring_back_a_node(job)
            job.start_again()
            [[step]] = {tuple(lines[-1][1]) for lines in job.words("started")}
            assert int(step) >= SAVES_EVERY, what
            # "ddp" keeps no place in the data: the epoch's first batches come again
            assert job.weights() == expected or strategy == "ddp", what
            then = f"goes on at step {step}"
        return f"{ranks_s:.1f} s, {job_s:.1f} s", then


FAILURES = {
    "`scancel`": cancel,
    "a task killed": kill_a_task,
    "a node set down": set_a_node_down,
    "a node's processes killed": kill_a_node,
}


# --- examples --------------------------------------------------------------------------------------------------------


def example(name: str, leaves: str) -> str:
    """The last output of an sbatch file."""
    with tempfile.TemporaryDirectory() as folder:
        variables = f"--export=ALL,PYTHON={sys.executable},OUT={folder},EPOCHS=1,CUDA_VISIBLE_DEVICES="
        _call("sbatch", "--wait", f"--output={folder}/output", variables, f"examples/slurm/{name}.sbatch")
        assert list(Path(folder).glob(leaves)), f"{name} left no {leaves}"
        return (Path(folder) / "output").read_text()


def main() -> None:
    """The command."""
    assert "MegatronDDPStrategy on 2 rank(s)" in example("trainer", "last.ckpt")
    assert "2 process(es)" in example("accelerate", "checkpoint-*")
    _tell("examples/slurm/*.sbatch ran to their ends on two nodes.\n")
    replicas.main()
    weights = {place: undisturbed(place, "ddp") for place in PLACES}
    _tell('Undisturbed, weights after a fit equal to those of "ddp" to the bit:')
    for place in PLACES:
        assert undisturbed(place, "megatron_ddp") == weights[place], place
        _tell(f"- {Case('', *place).place}")

    _tell("\n| tasks | the requeue signal in | sent by | saved and resumed at step |\n|---|---|---|---|")
    for stage in IN_A_FIT:
        for place in PLACES:
            _tell(requeue(Case(stage, *place), weights[place]))
    for stage in ("validation", "saving"):
        _tell(requeue(Case(f"long-{stage}", *PLACES[-1], options=LIMIT), weights[PLACES[-1]]))

    _tell("\n| tasks | SIGTERM in | the last rank's script has ended after |\n|---|---|---|")
    for stage in (*IN_A_FIT, "test", "prediction"):
        for place in PLACES:
            _tell(terminate(Case(stage, *place)))

    _tell('\n| two nodes | `"ddp"`: ranks, job | | `"megatron_ddp"`: ranks, job | |\n|---|---|---|---|---|')
    for what, happens in FAILURES.items():
        found = [fail(what, happens, strategy, weights[PLACES[-1]]) for strategy in ("ddp", "megatron_ddp")]
        _tell(f"| {what} | " + " | ".join(" | ".join(cells) for cells in found) + " |")


def _call(*command: str, text: str | None = None) -> str:
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=True, cwd=ROOT)
    return done.stdout


def _tell(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
