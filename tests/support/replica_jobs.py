"""Scripts that ``examples/replicas.sh`` runs in replicas, whose processes a test kills from outside."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.replicas.scripts.sizes import BATCH_SIZE, NUM_SAMPLES

from .ports import free_port
from .timeouts import HANG_S

TESTS = Path(__file__).parents[1]
HEARTBEAT_S = 2.0


@dataclasses.dataclass
class Job:
    """A run of a script in ``of`` replicas of ``ranks`` processes."""

    folder: Path
    of: int
    ranks: int
    process: subprocess.Popen[bytes]
    killed: set[int] = dataclasses.field(default_factory=set)

    @classmethod
    def start(cls, script: str, folder: Path, *arguments: object, of: int = 2, ranks: int = 1) -> Job:
        options = {"OF": of, "RANKS": ranks, "HEARTBEAT_MS": int(1000 * HEARTBEAT_S), "PORT": free_port()}
        options["PYTHON"] = sys.executable
        environment = os.environ | {name: str(value) for name, value in options.items()}
        command = [TESTS.parent / "examples" / "replicas.sh", TESTS / "replicas" / "scripts" / script, folder]
        with (folder / "output").open("wb") as output:
            process = subprocess.Popen(
                [*command, *map(str, arguments)], env=environment, stdout=output, stderr=subprocess.STDOUT
            )
        return cls(folder, of, ranks, process)

    @property
    def samples_per_rank(self) -> int:
        return NUM_SAMPLES // (self.of * self.ranks)

    def journals(self, slot: int, rank: int = 0) -> dict[int, list[dict[str, Any]]]:
        """The complete lines of each process of this place, by its id, the oldest first."""
        # The one that was written last is the last one that runs.
        paths = sorted(self.folder.glob(f"journal-{slot}-{rank}-*"), key=lambda path: path.stat().st_mtime_ns)
        found = {}
        for path in paths:
            lines = path.read_text().splitlines(keepends=True)
            found[int(path.name.rsplit("-", 1)[1])] = [json.loads(line) for line in lines if line.endswith("\n")]
        return found

    def last(self, slot: int, rank: int = 0) -> tuple[int, list[dict[str, Any]]]:
        """The process that runs now at this place, and its lines; 0 for none."""
        alive = [(pid, lines) for pid, lines in self.journals(slot, rank).items() if pid not in self.killed]
        return alive[-1] if alive else (0, [])

    def wait_for(self, what: str, is_there: Callable[[], bool]) -> None:
        deadline = time.monotonic() + HANG_S / 2
        while not is_there():
            assert self.process.poll() is None, f"it ended before {what}: {self.output()}"
            assert time.monotonic() < deadline, f"no {what}: {self.output()}"
            time.sleep(0.02)

    def wait_until_together(self, num_batches: int) -> None:
        """Waits until each process has made so many batches with all replicas."""

        def num_together(slot: int, rank: int) -> int:
            return sum(len(line["members"]) == self.of for line in self.last(slot, rank)[1])

        places = [(slot, rank) for slot in range(self.of) for rank in range(self.ranks)]
        self.wait_for("batches of all", lambda: all(num_together(*place) >= num_batches for place in places))

    def wait_for_start(self, slot: int) -> None:
        """Waits until the processes of a replica have begun their journals, which is before their first batch."""
        self.wait_for("process", lambda: all(self.last(slot, rank)[0] for rank in range(self.ranks)))

    def kill(self, slot: int, *ranks: int) -> None:
        """Kills these processes, by default the first; the others of their replica end by themselves."""
        self.wait_for_start(slot)
        pids = [self.last(slot, rank)[0] for rank in range(self.ranks)]
        self.killed |= set(pids)
        for rank in ranks or (0,):
            os.kill(pids[rank], signal.SIGKILL)

    def wait_for_end(self) -> list[dict[str, Any]]:
        """Returns what each process wrote at its end."""
        try:
            code = self.process.wait(HANG_S / 2)
        finally:
            self.stop()
        assert code == 0, self.output()
        paths = sorted(self.folder.glob("end-*"))
        assert len(paths) == self.of * self.ranks, self.output()
        return [json.loads(path.read_text()) for path in paths]

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait()

    def output(self) -> str:
        return (self.folder / "output").read_text()[-4000:]


def longest_pause(lines: Sequence[dict[str, Any]]) -> float:
    """The longest time between two batches, in seconds."""
    return max(line["took"] for line in lines[1:])


def check_ends(job: Job, epochs: int, num_microbatches: int = 1) -> None:
    """All processes have the same weights, and have made all steps."""
    ends = job.wait_for_end()
    assert len({end["weights"] for end in ends}) == 1
    assert {end["steps"] for end in ends} == {epochs * job.samples_per_rank // (BATCH_SIZE * num_microbatches)}


def check_survivor(job: Job, slot: int, epochs: int) -> None:
    """A replica that was never killed has trained all batches of its part, each once in each epoch."""
    for rank in range(job.ranks):
        (lines,) = job.journals(slot, rank).values()
        for epoch in range(epochs):
            trained = [line for line in lines if line["epoch"] == epoch and not line["dropped"]]
            numbers = [number for line in trained for number in line["numbers"]]
            assert len(numbers) == len(set(numbers)) == job.samples_per_rank
