"""Ranks as processes of one gloo group, for what torch keeps by process (its checkpoints, its default group).

They come from a fork server that has imported torch and the package, so that a group of them starts in well under a
second.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

import megastrategy  # noqa: F401 - preloaded in the fork server

from .timeouts import HANG_S, REPORT_S

AFTER_A_FAILURE_S = 30.0
"""Seconds that the other ranks get after a failure: they may wait for the failed one, and shall tell its reason."""
ENDED = "the process ended without a result"


def run_processes(size: int, job: Callable[..., Any], /, *arguments: Any, timeout_s: float = HANG_S) -> list[Any]:
    """``job(*arguments)`` on ``size`` ranks of a default gloo group; the results by rank, or an AssertionError with
    the tracebacks."""
    context = multiprocessing.get_context("forkserver")
    with tempfile.TemporaryDirectory() as folder:
        connections, processes = [], []
        for rank in range(size):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(
                target=_serve, args=(rank, size, f"{folder}/store", timeout_s, theirs, job, arguments), daemon=True
            )
            process.start()
            theirs.close()
            processes.append(process)
            connections.append(ours)
        outcomes = _receive(connections, timeout_s)
        for process in processes:
            process.join(10.0)
            if process.is_alive():
                process.kill()
                process.join()
    failures = {rank: error for rank, (ok, error) in enumerate(outcomes) if not ok}
    for rank, error in failures.items():
        if error == ENDED:
            failures[rank] = f"{error}, with exit code {processes[rank].exitcode}"  # of a signal it is negative
    assert not failures, "\n".join(f"rank {rank}:\n{error}" for rank, error in failures.items())
    return [value for _, value in outcomes]


def _receive(connections: list[Connection], timeout_s: float) -> list[tuple[bool, Any]]:
    """Returns for each rank whether it succeeded, and its result or why not."""
    outcomes: list[tuple[bool, Any]] = [(False, f"no result within {timeout_s} s, or after another failed")] * len(
        connections
    )
    left, deadline = {connection: rank for rank, connection in enumerate(connections)}, time.monotonic() + timeout_s
    while left and (ready := wait(list(left), max(0.0, deadline - time.monotonic()))):
        for connection in ready:
            assert isinstance(connection, Connection)
            rank = left.pop(connection)
            try:
                outcomes[rank] = pickle.loads(connection.recv_bytes())
            except EOFError:
                outcomes[rank] = False, ENDED
            if not outcomes[rank][0]:
                deadline = min(deadline, time.monotonic() + AFTER_A_FAILURE_S)
    return outcomes


def _serve(
    rank: int, size: int, store: str, timeout_s: float, connection: Connection, job: Callable[..., Any], arguments: Any
) -> None:
    torch.set_num_threads(1)
    faulthandler.enable(file=2)
    faulthandler.dump_traceback_later(min(REPORT_S, timeout_s - 5.0), file=2)  # type: ignore[arg-type]
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timedelta(seconds=timeout_s)
    )
    # A rank whose job is nothing would be gone while others still connect.
    known = dist.distributed_c10d._get_default_store()
    known.set(f"connected {rank}", "")
    known.wait([f"connected {other}" for other in range(size)], timedelta(seconds=timeout_s))
    try:
        outcome = True, job(*arguments)
    except BaseException:  # noqa: BLE001 - handed to the test, whatever it is
        outcome = False, traceback.format_exc()
    connection.send_bytes(pickle.dumps(outcome))
    if outcome[0]:
        dist.destroy_process_group()
