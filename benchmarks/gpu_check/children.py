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
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

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
    """The processes of a group, its leader first; the leader alone where nobody tells."""
    found = [group]
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            # After the name, which may have anything in it: state, parent, group.
            if int(path.read_text().rpartition(")")[2].split()[2]) == group and int(path.parent.name) != group:
                found.append(int(path.parent.name))
    return found


def run_child(
    method: str,
    name: str,
    run: Callable[..., None],
    arguments: tuple[Any, ...],
    box_s: float,
    on_line: Callable[[Line], None],
) -> None:
    """Calls ``run(say, *arguments)`` in a process and a process group of its own, where ``say`` takes lines.

    Returns when the process and all that it started have ended, within ``box_s`` and some seconds. What it wrote
    besides is shown with a failure alone.

    Args:
        method: one of :func:`start_methods`.
        name: for the line about an end that was not a return.
        on_line: called with each line, and with one about a process that hung, crashed, raised or said nothing.
    """
    context = multiprocessing.get_context(method)
    ours, theirs = context.Pipe(duplex=False)
    began, num_lines = time.monotonic(), 0
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        log = Path(folder) / "log"
        process = context.Process(target=_child_main, args=(theirs, str(log), run, arguments))
        process.start()
        theirs.close()
        try:
            for line in _lines_of(process, ours, began + box_s):
                num_lines += 1
                on_line(_with_log(line, log))
            if time.monotonic() < began + box_s:
                process.join(5)  # it has said its last word
            else:
                ask_where(_members(process.pid))
        finally:
            reason = _end(process)
            ours.close()
        seconds = time.monotonic() - began
        if time.monotonic() > began + box_s:
            reason = f"did not end within its box of {box_s:.0f} s"
        elif not reason and not num_lines:
            reason = "ended without a line"
        if reason:
            line = Line(verdict=Verdict.FAIL, name=name, seconds=seconds, detail=reason)
            on_line(_with_log(line, log))


def _lines_of(process: Any, connection: Any, deadline: float) -> Iterator[Line]:
    """Yields what the process says, until it ends or its time has."""
    while (left := deadline - time.monotonic()) > 0:
        ready = multiprocessing.connection.wait([connection, process.sentinel], left)
        if connection in ready:
            try:
                line = connection.recv()
            except EOFError:
                return
            if line is None:
                return
            yield line
        elif process.sentinel in ready:
            return


def _end(process: Any) -> str:
    """Ends the process's group, and says why the process itself has not ended well; empty if it has."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        # Its ranks too, and what they started. By its number, which nobody else has before it is joined.
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
