"""Nodes that torchrun starts: an agent with its worker each, on this machine."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path

import psutil

from tests.support.scripts import outside_of_ranks


class Node:
    """An agent with its worker, as those of a machine of its own; leaving the block kills both.

    Args:
        log: where what they print goes.
        options: torchrun's, and the script with its own.
    """

    def __init__(self, log: Path, *options: str) -> None:
        self._log = log.open("w")
        ours = outside_of_ranks() | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "1", *options]
        self.agent = subprocess.Popen(command, env=ours, stdout=self._log, stderr=subprocess.STDOUT, cwd=log.parent)

    def __enter__(self) -> Node:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._log.close()

    def workers(self) -> list[psutil.Process]:
        """With what they have started."""
        try:
            return psutil.Process(self.agent.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []

    def kill(self) -> None:
        """As if the machine had gone: the agent first, which would otherwise say that its worker failed."""
        workers = self.workers()
        self.agent.kill()
        for worker in workers:
            with contextlib.suppress(psutil.NoSuchProcess):
                worker.kill()
        self.agent.wait()

    def said(self) -> str:
        self._log.flush()
        return Path(self._log.name).read_text()
