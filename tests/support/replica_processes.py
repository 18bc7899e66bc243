"""Replicas whose ranks are processes, which a test kills and which are started again, as a launcher does."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
import signal
import time
from collections.abc import Sequence
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from .patience import HANG_S
from .replicas import HEARTBEAT_S, SKEW_S, Case, Run, lighthouse, prepare

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


@dataclasses.dataclass
class _Replica:
    slot: int
    life: int = -1
    processes: list[BaseProcess] = dataclasses.field(default_factory=list)
    is_done: bool = False


def run_with_kills(
    case: Case, kills: Sequence[Kill], folder: Path, *, skew_s: float = SKEW_S, timeout_s: float = HANG_S
) -> list[list[Any]]:
    """The outcomes of a training by slot and rank, in which these processes were killed and started again."""
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
                    args=(case, replica.slot, rank, replica.life, address, own, folder, skew_s),
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
                if all(code == 0 for code in codes):
                    replica.is_done = True
                elif any(code for code in codes):
                    for process in replica.processes:
                        process.join(SOON_S)
                        assert process.exitcode is not None, "a rank did not notice that another of its replica ended"
                    assert not any(other.is_done for other in replicas), "it would begin anew, alone"
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


def _rank(
    case: Case, slot: int, rank: int, life: int, address: str, kills: Sequence[Kill], folder: Path, skew_s: float
) -> None:
    torch.set_num_threads(1)
    step = 1

    def hook(point: str) -> None:
        nonlocal step
        if point == "before meeting":
            (folder / f"ready-{slot}-{rank}-{life}").touch()
        for kill in kills:
            if (kill.rank, kill.point) == (rank, point) and kill.step in (0, step):
                if not kill.stopped_s:
                    os.kill(os.getpid(), signal.SIGKILL)
                _stop_for(kill.stopped_s)
        step += point == "after step"

    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store-{slot}-{life}",
        rank=rank,
        world_size=case.ranks,
        timeout=timedelta(seconds=HANG_S),
    )
    run = prepare(case, slot, rank, address, None, hook, skew_s=skew_s)

    with (folder / f"{slot}-{rank}-{life}.steps").open("w") as log:

        def on_step(run: Run) -> None:
            log.write(json.dumps(run.steps[-1]) + "\n")
            log.flush()
            hook("after step")
            if len(run.replicas.members) < case.of:  # until the other one is back
                _wait_for_next_life(folder, run)

        run.train(on_step)
    torch.save(run.outcome(), folder / f"{slot}-{rank}.pt")
    dist.destroy_process_group()


def _wait_for_next_life(folder: Path, run: Run) -> None:
    """Returns when those that are gone have come back once, or soon, if they have been killed again since."""
    deadline = time.monotonic() + HANG_S / 2
    for slot in set(range(run.case.of)) - set(run.replicas.members):
        while not (folder / f"ready-{slot}-0-1").exists() and time.monotonic() < deadline:
            time.sleep(0.02)
    time.sleep(0.3)


def _stop_for(seconds: float) -> None:
    pid = os.getpid()
    if os.fork() == 0:
        time.sleep(seconds)
        os.kill(pid, signal.SIGCONT)
        os._exit(0)
    os.kill(pid, signal.SIGSTOP)
