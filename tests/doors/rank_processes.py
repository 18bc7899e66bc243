"""Rank processes that run jobs: started once, since Lightning's import takes seconds; replaced after a failure. And a
Python process, for what cannot be shown inside the tests'."""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import gc
import math
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import IO, Any

import torch

import megastrategy

from ..support import chosen_collectives
from ..support.lazy_collectives import violations
from ..support.ports import free_port
from ..support.processes import ENDED
from ..support.timeouts import HANG_S, REPORT_S

SIZE = 2
NUM_RANKS = "NUM_RANKS"
"""In the environment of a rank process: how many there are."""


@dataclasses.dataclass(frozen=True)
class Failure:
    """How a job ended on a rank that did not return."""

    rank: int
    kind: str
    message: str
    traceback: str
    seconds: float


def assert_failed(outcome: Any, *texts: str, kind: str = "", within_s: float = math.inf) -> None:
    """The job failed, with an exception of this kind, these texts in its message, and in time."""
    assert isinstance(outcome, Failure), outcome
    assert outcome.kind == (kind or outcome.kind), outcome.traceback
    for text in texts:
        assert text in outcome.message, outcome.traceback
    assert outcome.seconds < within_s


class Ranks:
    """Runs a picklable function on all ranks (two by default) at once, in processes that Lightning takes for
    torchrun's.

    A rank whose job raises ends its process, as a script would; the next job then gets fresh ones.
    """

    def __init__(self, size: int = SIZE) -> None:
        self._size = size
        self._processes: list[BaseProcess] = []
        self._connections: list[Connection] = []

    def run(self, job: Callable[..., Any], /, *arguments: Any, timeout_s: float = HANG_S, **options: Any) -> list[Any]:
        """``job(*arguments, **options)`` on every rank; results by rank, or an AssertionError with the tracebacks."""
        outcomes = self.outcomes(job, *arguments, timeout_s=timeout_s, **options)
        failures = [outcome for outcome in outcomes if isinstance(outcome, Failure)]
        report = "\n".join(f"rank {f.rank} after {f.seconds:.1f} s:\n{f.traceback}" for f in failures)
        assert not failures, report
        return outcomes

    def outcomes(
        self, job: Callable[..., Any], /, *arguments: Any, timeout_s: float = HANG_S, **options: Any
    ) -> list[Any]:
        """Like :meth:`run`, but a rank that failed has a :class:`Failure` for a result."""
        if not self._processes:
            self._start()
        message = pickle.dumps((job, arguments, options, timeout_s))
        for connection in self._connections:
            connection.send_bytes(message)
        start = time.monotonic()
        outcomes = [
            self._receive(rank, connection, start, timeout_s) for rank, connection in enumerate(self._connections)
        ]
        if any(isinstance(outcome, Failure) for outcome in outcomes):
            self.close()
        return outcomes

    def close(self) -> None:
        """Ends the processes; the next job starts new ones."""
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.join(5.0)
            if process.is_alive():
                process.kill()
                process.join()
            process.close()
        self._processes, self._connections = [], []

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        port = free_port()
        for rank in range(self._size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, self._size, port, theirs, chosen_collectives.chosen), daemon=True
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)

    @staticmethod
    def _receive(rank: int, connection: Connection, start: float, timeout_s: float) -> Any:
        try:
            if connection.poll(max(0.0, start + timeout_s - time.monotonic())):
                return pickle.loads(connection.recv_bytes())
            reason = f"no result within {timeout_s} s"
        except EOFError:
            reason = ENDED
        return Failure(rank, "died", reason, reason, time.monotonic() - start)


def number_of_ranks() -> int:
    """How many run this job; two where no rank process runs it."""
    return int(os.environ.get(NUM_RANKS, SIZE))


def _serve(rank: int, size: int, port: int, connection: Connection, choice: chosen_collectives.Choice) -> None:
    torch.set_num_threads(1)
    # It is ignored in what a shell starts in the background, and jobs are about what Ctrl-C does.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        LOCAL_RANK=str(rank),
        NODE_RANK="0",
        **{NUM_RANKS: str(size)},
    )
    if choice != chosen_collectives.Choice():
        chosen_collectives.choose(choice)
    while True:
        try:
            job, arguments, options, timeout_s = pickle.loads(connection.recv_bytes())
        except (EOFError, OSError):
            return
        start = time.monotonic()
        faulthandler.dump_traceback_later(min(REPORT_S, timeout_s - 1.0), file=2)  # type: ignore[arg-type]
        try:
            outcome = job(*arguments, **options)
            assert not violations, "raised, and caught on its way"
        except BaseException as error:  # noqa: BLE001 - handed to the test, whatever it is
            seconds = time.monotonic() - start
            outcome = Failure(rank, type(error).__name__, str(error), traceback.format_exc(), seconds)
        faulthandler.cancel_dump_traceback_later()
        connection.send_bytes(pickle.dumps(outcome))
        if isinstance(outcome, Failure):
            return
        # Models that are garbage hold gloo's groups, and each group wakes a thread a hundred times a second.
        gc.collect()


# --- a Python process, for what cannot be shown inside the tests': imports, launchers, scripts ------------------------


def run_python(
    *arguments: str,
    cwd: Path | None = None,
    autoload: bool = False,
    environment: Mapping[str, str] | None = None,
    timeout_s: float = HANG_S,
) -> str:
    """Output and errors of a Python of its own, which must succeed. ``autoload``: torch calls its entry points."""
    [output] = run_pythons(arguments, [environment or {}], cwd=cwd, autoload=autoload, timeout_s=timeout_s)
    return output


def run_pythons(
    arguments: Iterable[str],
    environments: Iterable[Mapping[str, str]],
    *,
    cwd: Path | None = None,
    autoload: bool = False,
    timeout_s: float = HANG_S,
    returncode: int = 0,
) -> list[str]:
    """The same command in several processes at once, each with more variables in its environment. All of them have to
    end with ``returncode``: -n for signal n. If one does not, the others are ended, and all outputs shown."""
    base = {key: value for key, value in os.environ.items() if key not in ("LOCAL_RANK", "NODE_RANK")}
    base |= {
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        "PYTHONPATH": str(Path(megastrategy.__file__).parents[1]),
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "1" if autoload else "0",
    }
    command = [sys.executable, *arguments]
    with contextlib.ExitStack() as stack:
        outputs, processes = list[IO[str]](), list[subprocess.Popen[str]]()
        for environment in environments:
            outputs.append(stack.enter_context(tempfile.TemporaryFile("w+")))
            processes.append(
                stack.enter_context(
                    subprocess.Popen(
                        command,
                        cwd=cwd,
                        env=base | dict(environment),
                        stdout=outputs[-1],
                        stderr=subprocess.STDOUT,
                        text=True,
                    )
                )
            )
        deadline = time.monotonic() + timeout_s
        try:
            # Until one ends in another way: the others may wait for it.
            while None in (codes := {process.poll() for process in processes}) and codes <= {None, returncode}:
                if time.monotonic() > deadline:
                    break
                time.sleep(0.05)
        finally:
            for process in processes:
                process.kill()
        for output in outputs:
            output.seek(0)
        texts = [output.read() for output in outputs]
    assert codes == {returncode}, "\n".join(texts)
    return texts
