"""python -m campaigns.many_machines: how long two nodes of torchrun take to end when one fails.

With "ddp" and with ours; prints the table of docs/project/launchers.md.

A worker ends for good when its process has; an agent may wait for others.
"""

from __future__ import annotations

import math
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from tests.support.ports import free_port

from .nodes import Node

STARTS_WITHIN_S = 240.0
PATIENCE_S = 60.0
"""From then on it hangs."""

TRAINING = Path(__file__).with_name("training.py")


def kill_worker(node: Node) -> None:
    for worker in node.workers():
        worker.kill()


def terminate_worker(node: Node) -> None:
    for worker in node.workers():
        worker.terminate()


def terminate_agent(node: Node) -> None:
    node.agent.send_signal(signal.SIGTERM)


FAILURES: dict[str, Callable[[Node], Any]] = {
    "a worker killed": kill_worker,
    "an agent and its worker killed": Node.kill,
    "SIGTERM to a worker": terminate_worker,
    "SIGTERM to an agent": terminate_agent,
}


def until_all_end(strategy: str, happens: Callable[[Node], Any], folder: Path) -> float:
    """Seconds until no worker is left after it has happened to the second node; infinite where one is."""
    port = free_port()

    def node(rank: int) -> Node:
        where = ["--nnodes", "2", "--node-rank", str(rank), "--master-addr", "127.0.0.1", "--master-port", str(port)]
        return Node(
            folder / f"{rank}.log", *where, "--monitor-interval", "0.1", str(TRAINING), strategy, str(folder), "long"
        )

    with node(0) as first, node(1) as second:
        marks = [folder / f"in-{rank}" for rank in range(2)]
        deadline = time.monotonic() + STARTS_WITHIN_S
        while not all(mark.exists() and len(mark.read_text()) > 10 for mark in marks):
            if time.monotonic() > deadline:
                raise SystemExit(f"{strategy} did not start\n{first.said()}\n{second.said()}")
            time.sleep(0.05)
        workers = [*first.workers(), *second.workers()]
        began_at = time.monotonic()
        happens(second)
        _, left = psutil.wait_procs(workers, timeout=PATIENCE_S)
        return math.inf if left else time.monotonic() - began_at


def main() -> None:
    """The command."""
    sys.stdout.write('| two nodes of torchrun | `"ddp"` | `"megatron_ddp"` |\n|---|---|---|\n')
    for what, happens in FAILURES.items():
        cells = []
        for strategy in ("ddp", "megatron_ddp"):
            with tempfile.TemporaryDirectory() as folder:
                seconds = until_all_end(strategy, happens, Path(folder))
            cells.append(f"{seconds:.1f} s" if seconds <= PATIENCE_S else f"not within {PATIENCE_S:.0f} s")
        sys.stdout.write(f"| {what} | {' | '.join(cells)} |\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
