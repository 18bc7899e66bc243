"""Starts the replicas of a script on this machine, with their lighthouse, and again those that end with an error."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from .._replicas import start_lighthouse

_POLL_S = 0.1
_END_S = 30.0
"""Seconds that replicas get to end after SIGTERM, in which a script may save."""


class ReplicasError(RuntimeError):
    """No replica has come to the end of the script."""


def run_replicas(
    target: str,
    arguments: Sequence[str],
    *,
    is_module: bool,
    of: int,
    num_ranks: int,
    restarts: int,
    heartbeat_s: float,
    skew_s: float,
    patience_s: float,
    log: Callable[[str], None],
) -> None:
    """Runs the script in ``of`` replicas of ``num_ranks`` processes, until each has ended.

    A replica that ends with an error is started again, at most ``restarts`` times, while none has come to the end.

    Raises:
        ReplicasError: if no replica has come to the end.
    """
    lighthouse = start_lighthouse("[::]:0", heartbeat_s=heartbeat_s, skew_s=skew_s)
    environment = os.environ | {
        "TORCHFT_LIGHTHOUSE": lighthouse.address(),
        "NUM_REPLICA_GROUPS": str(of),
        "MEGASTRATEGY_SKEW_S": str(skew_s),
        "MEGASTRATEGY_PATIENCE_S": str(patience_s),
    }
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    command = [*launcher, *(["-m"] if is_module else []), target, *arguments]

    def start(number: int) -> subprocess.Popen[bytes]:
        # In a session of its own: Ctrl-C reaches this process only, which ends all of them in order.
        return subprocess.Popen(command, env=environment | {"REPLICA_GROUP_ID": str(number)}, start_new_session=True)

    processes = [start(number) for number in range(of)]
    restarts_left = [restarts] * of
    ends_at = float("inf")
    try:
        with _signals_as_interrupts():
            while time.monotonic() < ends_at and any(process.poll() is None for process in processes):
                time.sleep(_POLL_S)
                if any(process.poll() == 0 for process in processes):
                    # The others end now, too. One that was about to come back would begin anew, without them.
                    ends_at = min(ends_at, time.monotonic() + skew_s)
                    continue
                for number, process in enumerate(processes):
                    if process.poll() is None or restarts_left[number] == 0:
                        continue
                    restarts_left[number] -= 1
                    log(
                        f"replica {number} ended with exit code {process.returncode}; it is started again "
                        f"({restarts_left[number]} restarts left)"
                    )
                    processes[number] = start(number)
    finally:
        _end(processes)
        lighthouse.shutdown()
    codes = [process.returncode for process in processes]
    if 0 not in codes:
        raise ReplicasError(f"{target}: no replica came to the end, after {restarts} restarts; exit codes {codes}")


@contextmanager
def _signals_as_interrupts() -> Iterator[None]:
    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Ends those that still run: torchrun passes SIGTERM on to its ranks."""
    for process in processes:
        if process.poll() is None:
            process.terminate()
    deadline = time.monotonic() + _END_S
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
