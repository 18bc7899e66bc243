"""Processes for sections: one each, with a time box, so that one that crashes or hangs is a line and not the end."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import faulthandler
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from .lines import Line, Verdict

_TAIL_LINES = 200
_WRITING_S = 1.0
"""For a process to write where it is."""
_PR_SET_PDEATHSIG = 1

FORK = "fork"
"""Fast: torch is imported once. Right as long as nothing has touched a device before."""
SPAWN = "spawn"
"""Fresh interpreters, where forks cannot use the device."""


def start_methods() -> list[str]:
    """The ways to start a process here, the fastest first."""
    return [FORK, SPAWN] if sys.platform.startswith("linux") else [SPAWN]


def end_with_parent() -> None:
    """Ends this process when the one that started it ends, however that does."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def ask_where(pids: Sequence[int]) -> None:
    """Has processes write down where they hang, before they are ended; one after the other, into one log."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGUSR1)
        time.sleep(_WRITING_S)


def _members(group: int) -> list[int]:
    """The processes of a group, its leader first; only the leader if the system lists none."""
    found = [group]
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            # After the name, which may have anything in it: state, parent, group.
            if int(path.read_text().rpartition(")")[2].split()[2]) == group and int(path.parent.name) != group:
                found.append(int(path.parent.name))
    return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """A function that runs in a process and a process group of its own, as ``run(say, *arguments)``.

    Attributes:
        name: for the line about an end that was not a return.
        run: calls ``say`` with each line.
        box_s: the seconds after which the process is ended.
        on_line: called here with each line, and with one about a process that hung, crashed, raised or said nothing.
        on_end: called when the process and all that it started have ended.
    """

    name: str
    run: Callable[..., None]
    arguments: tuple[Any, ...]
    box_s: float
    on_line: Callable[[Line], None]
    on_end: Callable[[], None] = lambda: None


def run_child(
    method: str,
    name: str,
    run: Callable[..., None],
    arguments: tuple[Any, ...],
    box_s: float,
    on_line: Callable[[Line], None],
) -> None:
    """Runs one :class:`Job`; returns within ``box_s`` and some seconds. ``method``: one of :func:`start_methods`."""
    run_lanes(method, [[Job(name=name, run=run, arguments=arguments, box_s=box_s, on_line=on_line)]])


def run_lanes(method: str, lanes: Iterable[Iterable[Job]]) -> None:
    """Runs jobs: those of a lane one after another, lanes side by side. A lane is asked for its next job when the one
    before has ended, and so may decide then."""
    waiting = [iter(lane) for lane in lanes]
    running: dict[Iterator[Job], _Child] = {}
    try:
        while True:
            for lane in list(waiting):
                waiting.remove(lane)
                if (job := next(lane, None)) is not None:
                    running[lane] = _Child(method, job)
            if not running:
                return
            _wait(list(running.values()))
            for lane, child in list(running.items()):
                if child.has_ended():
                    del running[lane]
                    child.finish()
                    waiting.append(lane)
    finally:
        for child in running.values():  # after an interrupt
            child.abandon()


@contextlib.contextmanager
def awake_device(method: str, kind: str) -> Iterator[None]:
    """A context in which a GPU's driver stays loaded: between processes it may unload, which costs each next one
    seconds. It takes some hundred MiB of the GPU's memory."""
    if kind == "cpu":
        yield
        return
    process: Any = multiprocessing.get_context(method).Process(target=_hold_device, args=(kind,), daemon=True)
    process.start()
    try:
        yield
    finally:
        process.kill()
        process.join()


def _hold_device(kind: str) -> None:
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.zeros(1, device=kind)
    signal.pause()


def _wait(children: list[_Child]) -> None:
    """Returns when one of them says something, ends, or has had its time."""
    left = min(child.seconds_left for child in children)
    multiprocessing.connection.wait([waited for child in children for waited in child.waits_for], max(0.0, left))


class _Child:
    """The process of a job. What it wrote besides its lines is shown only with a failure."""

    def __init__(self, method: str, job: Job) -> None:
        self._job = job
        context = multiprocessing.get_context(method)
        self._connection, theirs = context.Pipe(duplex=False)
        self._folder = tempfile.TemporaryDirectory(prefix="gpu-check-")
        self._log = Path(self._folder.name) / "log"
        self._began, self._num_lines, self._said_all = time.monotonic(), 0, False
        self._process: Any = context.Process(
            target=_child_main, args=(theirs, str(self._log), job.run, job.arguments), name=job.name
        )
        self._process.start()
        theirs.close()

    @property
    def waits_for(self) -> list[Any]:
        return [self._connection, self._process.sentinel]

    @property
    def seconds_left(self) -> float:
        return self._began + self._job.box_s - time.monotonic()

    def has_ended(self) -> bool:
        """Hands over what the process has said; whether it has said all, has ended, or has had its time."""
        has_exited = self._process.exitcode is not None  # asked first: it may say something and end between the two
        while not self._said_all and self._connection.poll():
            try:
                line = self._connection.recv()
            except EOFError:
                line = None
            if line is None:
                self._said_all = True
            else:
                self._say(line)
        return self._said_all or has_exited or self.seconds_left <= 0

    def finish(self) -> None:
        """Ends the process with all that it started, and says how it has ended if not well."""
        if is_over_time := self.seconds_left <= 0:
            ask_where(_members(self._process.pid))
        else:
            self._process.join(5)  # it has said its last word
        reason = _end(self._process)
        if is_over_time:
            reason = f"did not end within its box of {self._job.box_s:.0f} s"
        elif not reason and not self._num_lines:
            reason = "ended without a line"
        if reason:
            seconds = time.monotonic() - self._began
            self._say(Line(verdict=Verdict.FAIL, name=self._job.name, seconds=seconds, detail=reason))
        self._release()
        self._job.on_end()

    def abandon(self) -> None:
        """Ends it without a word."""
        _end(self._process)
        self._release()

    def _release(self) -> None:
        self._connection.close()
        self._folder.cleanup()

    def _say(self, line: Line) -> None:
        self._num_lines += 1
        self._job.on_line(_with_log(line, self._log))


def _end(process: Any) -> str:
    """Ends the process's group, and says why the process itself has not ended well; empty if it has."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        # Its ranks too, and what they started. No other process has its number before it is joined.
        os.killpg(process.pid, signal.SIGKILL)
    was_alive = process.exitcode is None
    process.join(10)
    if process.is_alive():
        process.kill()
        process.join()
    if was_alive or process.exitcode == 0:
        return ""
    code = process.exitcode
    return f"ended with exit status {code}" if code > 0 else f"was ended by {signal.Signals(-code).name}"


def _with_log(line: Line, log: Path) -> Line:
    """A failure that has no value, with the end of what was written while it happened."""
    if line.verdict is not Verdict.FAIL or line.value is not None or not log.exists():
        return line
    tail = log.read_text(errors="replace").splitlines()[-_TAIL_LINES:]
    return dataclasses.replace(line, detail="\n".join([*line.detail.splitlines(), *(f"> {text}" for text in tail)]))


def _child_main(connection: Any, log: str, run: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    os.setpgid(0, 0)
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    faulthandler.enable()
    # What asks where a process hangs, see ask_where. Not faulthandler's own timer: its thread deadlocks forks.
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    try:
        run(connection.send, *arguments)
    except Exception as error:  # noqa: BLE001 - a line, whatever it is
        name = arguments[0] if arguments and isinstance(arguments[0], str) else "section"
        detail = f"raised {type(error).__name__}: {error}\n{traceback.format_exc()}"
        connection.send(Line(verdict=Verdict.FAIL, name=f"{name}.section", detail=detail))
    connection.send(None)
