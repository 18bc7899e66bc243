"""Starts the replicas of a script on this machine, with their lighthouse, and again those that end with an error."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType

from .._replicas import check_timeouts, describe_timeouts, start_lighthouse

_POLL_S = 0.1
_END_S = 30.0
"""Seconds that replicas get to end after SIGTERM, in which a script may save."""


__all__ = ["ReplicasError", "check_timeouts", "run_replicas"]


class ReplicasError(RuntimeError):
    """No replica has come to the end of the script."""


@dataclasses.dataclass
class _Slot:
    number: int
    process: subprocess.Popen[bytes]
    restarts_left: int

    @property
    def has_failed(self) -> bool:
        return self.process.poll() not in (None, 0)

    @property
    def has_finished(self) -> bool:
        return self.process.poll() == 0


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

    A replica that ends with an error is started again, at most ``restarts`` times, while no other one has come to the
    end.

    Raises:
        ReplicasError: if no replica has come to the end.
    """
    log(describe_timeouts(heartbeat_s, skew_s, patience_s))
    lighthouse = start_lighthouse("[::]:0", heartbeat_s=heartbeat_s, skew_s=skew_s)
    environment = os.environ | {
        "TORCHFT_LIGHTHOUSE": lighthouse.address(),
        "NUM_REPLICA_GROUPS": str(of),
        "MEGASTRATEGY_HEARTBEAT_S": str(heartbeat_s),
        "MEGASTRATEGY_SKEW_S": str(skew_s),
        "MEGASTRATEGY_PATIENCE_S": str(patience_s),
    }
    program = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    command = [sys.executable, *program, *(["-m"] if is_module else []), target, *arguments]

    def start(number: int) -> subprocess.Popen[bytes]:
        return _start(command, environment | {"REPLICA_GROUP_ID": str(number)})

    slots = [_Slot(number, start(number), restarts) for number in range(of)]
    try:
        with _signals_as_interrupts():
            ends_at = float("inf")
            while time.monotonic() < ends_at and any(slot.process.poll() is None for slot in slots):
                time.sleep(_POLL_S)
                if any(slot.has_finished for slot in slots):
                    # Those that trained with it end now, too. One that was about to come back would begin anew, alone.
                    ends_at = min(ends_at, time.monotonic() + skew_s)
                for slot in (slot for slot in slots if slot.has_failed and slot.restarts_left):
                    _restart(slot, slots, start, log)
    finally:
        _end([slot.process for slot in slots])
        lighthouse.shutdown()
    if not any(slot.has_finished for slot in slots):
        codes = ", ".join(f"replica {slot.number} with exit code {slot.process.returncode}" for slot in slots)
        raise ReplicasError(f"{target}: no replica came to the end, and none is left to restart: {codes}")


def _restart(
    slot: _Slot, slots: Sequence[_Slot], start: Callable[[int], subprocess.Popen[bytes]], log: Callable[[str], None]
) -> None:
    what = f"replica {slot.number} ended with exit code {slot.process.returncode}"
    if any(other.has_finished for other in slots):
        log(f"{what}; another one has come to the end, so it is not started again")
        slot.restarts_left = 0
        return
    slot.restarts_left -= 1
    log(f"{what}; it is started again ({slot.restarts_left} restarts left)")
    slot.process = start(slot.number)


def _start(command: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    # In a session of its own: Ctrl-C reaches this process only, which ends all of them in order.
    return subprocess.Popen(command, env=dict(environment), start_new_session=True)


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
