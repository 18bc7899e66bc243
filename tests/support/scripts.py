"""A user's script on ranks that are forks of a server which has imported the frameworks, started as torchrun would.

A fresh interpreter needs five seconds of processor time for its imports, each rank again; a fork needs none. What a
fork cannot show is an import that the script forgot (ruff sees an undefined name), what happens while the
frameworks are imported, and how a launcher starts ranks: such tests use interpreters of their own. With
``FRESH_SCRIPTS=1`` in the environment all do (``make nightly``).
"""

from __future__ import annotations

import atexit
import dataclasses
import multiprocessing
import os
import runpy
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from .ports import free_port
from .timeouts import HANG_S

ROOT = Path(__file__).parents[2]
FRESH_SCRIPTS = os.environ.get("FRESH_SCRIPTS") == "1"


def outside_of_ranks() -> dict[str, str]:
    """The environment without what a launcher told this process: on the CPU, with one thread and this clone."""
    told = ("RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE")
    ours = {name: value for name, value in os.environ.items() if name not in told}
    return ours | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}


@dataclasses.dataclass(frozen=True)
class Done:
    """A script that ended: rank 0's exit code, or that of the first rank which failed; what all ranks printed."""

    returncode: int
    stdout: str
    stderr: str

    @property
    def printed(self) -> str:
        """Its standard output; it must have succeeded without a warning."""
        assert self.returncode == 0, self.stdout + self.stderr
        # On a machine that has Slurm, Lightning says that the script was not started with it.
        told = [line for line in self.stderr.splitlines() if "Warning" in line and "`srun`" not in line]
        assert not told, self.stderr
        return self.stdout


def run_script(
    script: Path,
    *arguments: object,
    cwd: Path,
    ranks: int = 2,
    environment: Mapping[str, str] | None = None,
    before: tuple[str, ...] = (),
    timeout_s: float = HANG_S,
) -> Done:
    """``python script arguments`` on each rank. ``before``: ``python -m`` this module with these arguments first."""
    base = outside_of_ranks() | {"PYTHONIOENCODING": "utf-8"}
    base |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    base |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "NODE_RANK": "0", **(environment or {})}
    argv = [*before, str(script), *map(str, arguments)]
    out, err = _Pipe(), _Pipe()
    processes: list[Any] = []
    try:
        for rank in range(ranks):
            variables = base | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            if FRESH_SCRIPTS:
                command = [sys.executable, *(["-m"] if before else []), *argv]
                processes.append(_start_interpreter(command, cwd, variables, out.write, err.write))
            else:
                processes.append(_start_fork(argv, bool(before), cwd, variables, out.write, err.write))
        printed = [pipe.read_to_the_end() for pipe in (out, err)]
        codes = [_wait(process, timeout_s) for process in processes]
    finally:
        for process in processes:
            process.kill()
    stdout, stderr = (reader() for reader in printed)
    return Done(next((code for code in codes if code), 0), stdout, stderr)


class _Pipe:
    """Carries what several processes write and this one reads."""

    def __init__(self) -> None:
        self._read, self.write = multiprocessing.Pipe(duplex=False)

    def read_to_the_end(self) -> Callable[[], str]:
        """Reads from now on; returns a function that waits for the writers' end and gives what came. Call it once they
        have started."""
        self.write.close()
        parts: list[bytes] = []

        def read() -> None:
            while part := os.read(self._read.fileno(), 1 << 16):
                parts.append(part)
            self._read.close()

        thread = threading.Thread(target=read, daemon=True)
        thread.start()

        def ended() -> str:
            thread.join(10.0)
            assert not thread.is_alive(), "a process that the script started has outlived it"
            return b"".join(parts).decode("utf-8", "replace")

        return ended


def _wait(process: Any, timeout_s: float) -> int:
    if isinstance(process, subprocess.Popen):
        return process.wait(timeout_s)
    process.join(timeout_s)
    assert process.exitcode is not None, f"the script runs for more than {timeout_s} s"
    return int(process.exitcode)


def _start_interpreter(
    command: list[str], cwd: Path, environment: dict[str, str], out: Connection, err: Connection
) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command, cwd=cwd, env=environment, stdout=out.fileno(), stderr=err.fileno())


def _start_fork(
    argv: list[str], is_module: bool, cwd: Path, environment: dict[str, str], out: Connection, err: Connection
) -> Any:
    context = multiprocessing.get_context("forkserver")
    # No daemon: a DataLoader of the script's has processes of its own.
    process = context.Process(target=_run, args=(argv, is_module, str(cwd), environment, out, err))
    process.start()
    return process


def _run(
    argv: list[str], is_module: bool, cwd: str, environment: dict[str, str], out: Connection, err: Connection
) -> None:
    """Does what an interpreter does between its start and its end, in a fork that already has its imports."""
    for connection, descriptor, name in ((out, 1, "stdout"), (err, 2, "stderr")):
        os.dup2(connection.fileno(), descriptor)
        connection.close()
        setattr(sys, name, open(descriptor, "w", encoding="utf-8", closefd=False))  # noqa: SIM115 - until the end
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    _ranks_of_lightning(int(environment["LOCAL_RANK"]))
    try:
        if is_module:
            sys.argv = argv
            sys.path.insert(0, cwd)
            runpy.run_module(argv[0], run_name="__main__", alter_sys=True)
        else:
            sys.argv = argv
            sys.path.insert(0, str(Path(argv[0]).parent))
            runpy.run_path(argv[0], run_name="__main__")
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()


def _ranks_of_lightning(rank: int) -> None:
    """Lightning asks the environment for its rank when it is imported, which was before there was one."""
    from lightning.fabric.utilities import rank_zero as fabric

    decorated: Any = fabric.rank_zero_only
    decorated.rank = rank
