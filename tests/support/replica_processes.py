"""Replicas whose ranks are processes, which a test kills and which are started again, as a launcher does."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megastrategy.core import Replicas

from .patience import HANG_S
from .replicas import HEARTBEAT_S, SKEW_S, Case, Hook, Run, lighthouse, prepare

POINTS = (
    "before meeting",
    "after meeting",
    "before sum 0",
    "after sum 0",
    "before sum 1",
    "after sum 1",
    "before vote",
    "after vote",
    "after step",
)
"""Of each step."""
SOON_S = 120.0
"""Within so many seconds a rank ends by itself, after another of its replica was killed."""


@dataclasses.dataclass(frozen=True)
class Kill:
    """Ends a rank's process at a point of its step ``step``, from 1, or stops it there for ``stopped_s`` seconds.

    Attributes:
        step: 0 for any step.
        life: 0 for the process that is started first, 1 for the one after it.
    """

    slot: int
    rank: int
    point: str
    step: int = 3
    life: int = 0
    stopped_s: float = 0.0
    signum: signal.Signals = signal.SIGKILL


@dataclasses.dataclass(frozen=True)
class Place:
    """The training of one process, and where it is."""

    case: Case
    slot: int
    rank: int
    life: int
    address: str
    folder: Path
    skew_s: float

    @contextlib.contextmanager
    def log(self) -> Iterator[Callable[[object], None]]:
        """Gives a function that logs a step: see :func:`logged_steps`."""
        with (self.folder / f"{self.slot}-{self.rank}-{self.life}.steps").open("w") as file:

            def write(step: object) -> None:
                file.write(json.dumps(step) + "\n")
                file.flush()

            yield write

    def wait_for_others(self, replicas: Replicas) -> None:
        """Returns at once if all are there, else when those that are gone have come back once.

        If they have been killed again since, or have come to their end, it waits for a moment only.
        """
        if len(replicas.members) == self.case.of:
            return
        deadline = time.monotonic() + HANG_S / 2
        for slot in set(range(self.case.of)) - set(replicas.members):
            back_or_done = self.folder / f"ready-{slot}-0-1", self.folder / f"{slot}-0.pt"
            while not any(path.exists() for path in back_or_done) and time.monotonic() < deadline:
                time.sleep(0.02)
        time.sleep(0.3)


Train = Callable[[Place, Hook], Any]


@dataclasses.dataclass
class _Replica:
    slot: int
    life: int = -1
    processes: list[BaseProcess] = dataclasses.field(default_factory=list)
    is_done: bool = False


def run_with_kills(
    case: Case,
    kills: Sequence[Kill],
    folder: Path,
    *,
    skew_s: float = SKEW_S,
    timeout_s: float = HANG_S,
    train: Train | None = None,
) -> list[list[Any]]:
    """The outcomes of a training by slot and rank, in which these processes were killed and started again.

    ``train`` returns the outcome of a process; None for a plain loop.
    """
    context = multiprocessing.get_context("forkserver")
    replicas = [_Replica(slot) for slot in range(case.of)]
    deadline = time.monotonic() + timeout_s

    with lighthouse(skew_s=skew_s) as address:

        def start(replica: _Replica) -> None:
            replica.life += 1
            own = [kill for kill in kills if (kill.slot, kill.life) == (replica.slot, replica.life)]
            replica.processes = [
                context.Process(
                    target=_rank,
                    args=(
                        Place(case, replica.slot, rank, replica.life, address, folder, skew_s),
                        own,
                        train or train_plainly,
                    ),
                    daemon=True,
                )
                for rank in range(case.ranks)
            ]
            for process in replica.processes:
                process.start()

        for replica in replicas:
            start(replica)
        while not all(replica.is_done for replica in replicas):
            assert time.monotonic() < deadline, [p.exitcode for replica in replicas for p in replica.processes]
            time.sleep(0.02)
            for replica in replicas:
                codes = [process.exitcode for process in replica.processes]
                if replica.is_done or not any(code is not None for code in codes):
                    continue
                results = [(folder / f"{replica.slot}-{rank}.pt").exists() for rank in range(case.ranks)]
                if all(code == 0 for code in codes) and all(results):
                    replica.is_done = True
                elif any(code for code in codes) or all(code == 0 for code in codes):
                    assert any(codes), "a launcher takes 0 for a complete training, and ends the other replicas"
                    for process in replica.processes:
                        process.join(SOON_S)
                        assert process.exitcode is not None, "a rank did not notice that another of its replica ended"
                    assert not any(other.is_done for other in replicas), "it would begin anew, alone"
                    is_killed = any((kill.slot, kill.life) == (replica.slot, replica.life) for kill in kills)
                    assert is_killed, "a replica ended that was to be left alone, with the error on stderr"
                    time.sleep(HEARTBEAT_S + 0.5)  # until the others have seen that it is gone
                    start(replica)
    return [[torch.load(folder / f"{slot}-{rank}.pt") for rank in range(case.ranks)] for slot in range(case.of)]


def logged_steps(folder: Path) -> list[list[Any]]:
    """The steps that each process logged."""
    return [
        [
            (epoch, number, tuple(members), has_part)
            for epoch, number, members, has_part in map(json.loads, path.read_text().splitlines())
        ]
        for path in sorted(folder.glob("*.steps"))
    ]


def _rank(place: Place, kills: Sequence[Kill], train: Train) -> None:
    torch.set_num_threads(1)
    step = 1

    def hook(point: str) -> None:
        nonlocal step
        if point == "before meeting":
            (place.folder / f"ready-{place.slot}-{place.rank}-{place.life}").touch()
        for kill in kills:
            if (kill.rank, kill.point) == (place.rank, point) and kill.step in (0, step):
                if not kill.stopped_s:
                    os.kill(os.getpid(), kill.signum)
                else:
                    _stop_for(kill.stopped_s)
        step += point == "after step"

    dist.init_process_group(
        "gloo",
        init_method=f"file://{place.folder}/store-{place.slot}-{place.life}",
        rank=place.rank,
        world_size=place.case.ranks,
        timeout=timedelta(seconds=HANG_S),
    )
    outcome = train(place, hook)
    torch.save(outcome, place.folder / f"{place.slot}-{place.rank}.pt")
    dist.destroy_process_group()


def train_plainly(
    place: Place, hook: Hook, wait_for_others: Callable[[Place, Replicas], None] = Place.wait_for_others
) -> Any:
    run = prepare(place.case, place.slot, place.rank, place.address, None, hook, skew_s=place.skew_s)
    with place.log() as log:

        def on_step(run: Run) -> None:
            if not place.case.ends_window(run.replicas.batch):
                return
            log(run.steps[-1])
            hook("after step")
            wait_for_others(place, run.replicas)

        run.train(on_step)
    return run.outcome()


def _stop_for(seconds: float) -> None:
    pid = os.getpid()
    if os.fork() == 0:
        time.sleep(seconds)
        os.kill(pid, signal.SIGCONT)
        os._exit(0)
    os.kill(pid, signal.SIGSTOP)
