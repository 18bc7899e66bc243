"""python -m campaigns.slurm.replicas: ``examples/slurm/replicas.sbatch`` on a real Slurm of two nodes.

A replica's processes are killed, then its element of the array is requeued. It fails where the
other replica does not go on alone meanwhile, where the one does not come back, or where the weights at the end differ.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILES = ROOT / "examples" / "slurm"
PATIENCE_S = 600.0
NUM_EPOCHS = 40
NUM_STEPS = NUM_EPOCHS * 29
"""1,797 images in batches of 16 on four ranks."""


class Replicas:
    """An array of two replicas of two processes, and the job of their lighthouse."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        variables = {"PYTHON": sys.executable, "OUT": str(folder), "EPOCHS": str(NUM_EPOCHS), "PROCESSES": "2"}
        self._environment = os.environ | variables | {"CUDA_VISIBLE_DEVICES": ""}
        self.lighthouse = self._submit("lighthouse")
        self._environment["LIGHTHOUSE"] = self.lighthouse
        self.array = self._submit("replicas")

    def _submit(self, name: str) -> str:
        output = f"--output={self.folder}/%x-%a.out"
        return self._call("sbatch", "--parsable", output, str(FILES / f"{name}.sbatch")).strip()

    def _call(self, *command: str) -> str:
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=self._environment)
        assert done.returncode == 0, (command, done.stderr)
        return done.stdout

    def outputs(self) -> str:
        return "\n".join(f"{path.name}: {path.read_text()[-2000:]}" for path in sorted(self.folder.glob("*.out")))

    def steps(self) -> list[tuple[int, str]]:
        """The number and the members of each tenth step that the leader, replica 0, has printed."""
        path = self.folder / "replicas-0.out"
        found = re.findall(r"step (\d+): loss \S+, replicas (\(.*\))", path.read_text() if path.exists() else "")
        return [(int(step), members) for step, members in found]

    def wait(self, what: str, is_there: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not is_there():
            if time.monotonic() > deadline:
                raise SystemExit(f"{what} did not come\n{self.outputs()}")
            time.sleep(0.1)

    def wait_for_steps(self, members: str) -> int:
        """Waits until the present members are these; returns the last step."""
        before = self.last_step()
        self.wait(f"a step of {members}", lambda: self.steps()[-1:] > [(before, "")] and self.steps()[-1][1] == members)
        return self.last_step()

    def last_step(self) -> int:
        return self.steps()[-1][0] if self.steps() else 0

    def state(self, job: str) -> str:
        """With its reason, as ``squeue`` has them; nothing if the job has ended."""
        found = subprocess.run(
            ["squeue", "--noheader", f"--jobs={job}", "--format=%t %r"], capture_output=True, text=True
        )
        return found.stdout.strip()

    def kill_processes(self, job: str) -> None:
        """Kills those of the job's first step, and not the batch script, as ``scancel --signal=KILL JOB`` does."""
        self._call("scancel", "--signal=KILL", f"{job}.0")

    def requeue(self, job: str) -> None:
        self._call("scontrol", "requeue", job)
        self.wait(f"{job} in the queue", lambda: self.state(job) == "PD BeginTime")

    def start_again(self, job: str) -> None:
        """Slurm would wait for two minutes."""
        self._call("scontrol", "update", f"jobid={job}", "starttime=now")

    def cancel(self) -> None:
        for job in (self.array, self.lighthouse):
            subprocess.run(["scancel", job], capture_output=True)  # it may have ended by itself
            self.wait(f"the end of {job}", lambda job=job: not self.state(job))  # type: ignore[misc]


def main() -> None:
    """The command."""
    with tempfile.TemporaryDirectory() as folder:
        replicas = Replicas(Path(folder))
        try:
            _run(replicas)
        finally:
            replicas.cancel()


def _run(replicas: Replicas) -> None:
    second = f"{replicas.array}_1"
    replicas.wait_for_steps("(0, 1)")

    replicas.kill_processes(second)
    alone = replicas.wait_for_steps("(0,)")
    back = replicas.wait_for_steps("(0, 1)")
    _tell(f"- processes of replica 1 killed: the other went on alone at step {alone}, both at step {back}")

    replicas.requeue(second)
    alone = replicas.wait_for_steps("(0,)")
    replicas.start_again(second)
    back = replicas.wait_for_steps("(0, 1)")
    _tell(f"- its element requeued: the other went on alone at step {alone}, both at step {back}")

    replicas.wait("the end of the array", lambda: not replicas.state(replicas.array))
    assert replicas.last_step() == NUM_STEPS - NUM_STEPS % 10, replicas.outputs()
    first, other = (path.read_text() for path in sorted(replicas.folder.glob("weights-*")))
    assert first == other, replicas.outputs()
    _tell(f"- both ended with weights {first}")


def _tell(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
