"""Starts the replicas of a script on this machine, with their lighthouse, and again those that end with an error."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

from .._replicas import has_met, start_lighthouse

_POLL_S = 0.1
_END_S = 30.0
"""Seconds that replicas get to end after SIGTERM, in which a script may save."""
_EARLY_S = 20.0
_NUM_EARLY = 3
"""A script that fails in all replicas within so many seconds, or before they have met, so many times in a row, is not
started again."""
_LAUNCH = """
import sys
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main
try:
    main()
except (ChildFailedError, SignalException):  # it has logged which process ended, and the process its own traceback
    sys.exit(1)
"""


class ReplicasError(RuntimeError):
    """No replica has come to the end of the script."""


@dataclasses.dataclass
class _Slot:
    number: int
    process: subprocess.Popen[bytes]
    restarts_left: int
    started_at: float = dataclasses.field(default_factory=time.monotonic)
    num_early: int = 0

    @property
    def has_failed(self) -> bool:
        return self.process.poll() not in (None, 0)

    @property
    def has_finished(self) -> bool:
        return self.process.poll() == 0

    def is_early(self, lighthouse: Any) -> bool:
        """Whether it has begun just now, or no replica has begun to train."""
        return time.monotonic() - self.started_at < _EARLY_S or not has_met(lighthouse)


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
    end, and unless all fail at their starts.

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
    program = ["-c", _LAUNCH, "--standalone", "--nproc-per-node", str(num_ranks)]
    command = [sys.executable, *program, *(["-m"] if is_module else []), target, *arguments]

    def start(number: int) -> subprocess.Popen[bytes]:
        # In a session of its own: Ctrl-C reaches this process only, which ends all of them in order.
        return subprocess.Popen(command, env=environment | {"REPLICA_GROUP_ID": str(number)}, start_new_session=True)

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
                    _restart(slot, slots, start, lighthouse, log)
        if of > 1 and any(slot.has_finished for slot in slots) and not has_met(lighthouse):
            log(
                f"{target} ended without a meeting of replicas: each trained by itself. Does it pass "
                "replicas=megastrategy.Replicas()?"
            )
    finally:
        _end([slot.process for slot in slots])
        lighthouse.shutdown()
    if not any(slot.has_finished for slot in slots):
        codes = ", ".join(f"replica {slot.number} with exit code {slot.process.returncode}" for slot in slots)
        early = all(slot.num_early >= _NUM_EARLY for slot in slots)
        why = f"each failed {_NUM_EARLY} times at its start" if early else "none is left to restart"
        raise ReplicasError(f"{target}: no replica came to the end, and {why}: {codes}")


def _restart(
    slot: _Slot,
    slots: Sequence[_Slot],
    start: Callable[[int], subprocess.Popen[bytes]],
    lighthouse: Any,
    log: Callable[[str], None],
) -> None:
    what = f"replica {slot.number} ended with exit code {slot.process.returncode}"
    if any(other.has_finished for other in slots):
        log(f"{what}; another one has come to the end, so it is not started again")
        slot.restarts_left = 0
        return
    slot.num_early = slot.num_early + 1 if slot.is_early(lighthouse) else 0
    if all(other.num_early >= _NUM_EARLY and other.is_early(lighthouse) for other in slots):
        for other in slots:
            other.restarts_left = 0
        log(f"{what}; all have failed {_NUM_EARLY} times at their starts, so none is started again")
        return
    slot.restarts_left -= 1
    log(f"{what}; it is started again ({slot.restarts_left} restarts left)")
    slot.process = start(slot.number)
    slot.started_at = time.monotonic()


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
