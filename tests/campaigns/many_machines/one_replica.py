"""Trains one of two replicas, each on a host of its own: python one_replica.py SLOT LIGHTHOUSE FOLDER.

The vote of the second one fails once, so it takes the state of the first. FOLDER/SLOT.pt gets the weights or the error,
and what was logged.
"""

from __future__ import annotations

import logging
import socket
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megastrategy import DistributedDataParallel, DistributedOptimizer, Replicas
from megastrategy._replicas import start_lighthouse
from megastrategy.errors import CollectiveError
from tests.support.patience import HANG_S

PORT = 29510
TIMES: dict[str, Any] = {"heartbeat_s": 2.0, "skew_s": 8.0}


def train(slot: int, host: str) -> dict[str, Any]:
    # None trains alone if they do not connect.
    replicas = Replicas(2, slot, lighthouse=f"http://{host}:{PORT}", minimum=2, patience_s=30.0, **TIMES)
    torch.manual_seed(0)
    module = torch.nn.Linear(8, 4)
    model = DistributedDataParallel(module, replicas=replicas)
    optimizer = DistributedOptimizer(torch.optim.Adam(module.parameters(), lr=0.01), model)
    link: Any = replicas.link
    vote = link.vote

    def vote_that_fails_once() -> bool:
        if (slot, replicas.batch) == (1, 2):
            link.vote = vote
            link._manager.report_error(RuntimeError("the test's"))
        return bool(vote())

    link.vote = vote_that_fails_once
    data = [torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + slot)) for step in range(6)]
    for _ in replicas.epochs(1):
        for batch in replicas.batches(data):
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
    return {"weights": list(module.parameters()), "num_taken": replicas.num_taken}


def main(slot: int, host: str, folder: Path) -> None:
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("megastrategy").addHandler(handler)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store-{slot}", rank=0, world_size=1)
    server = start_lighthouse(f"[::]:{PORT}", **TIMES) if slot == 0 else None
    deadline = time.monotonic() + HANG_S
    while time.monotonic() < deadline and not _answers(host.strip("[]")):
        time.sleep(0.1)
    try:
        found = train(slot, host)
    except CollectiveError as error:
        found = {"error": str(error)}
    torch.save({**found, "messages": messages}, folder / f"{slot}.pt")
    while server is not None and time.monotonic() < deadline and not (folder / "1.pt").exists():
        time.sleep(0.1)
    dist.destroy_process_group()


def _answers(host: str) -> bool:
    try:
        socket.create_connection((host, PORT), timeout=1.0).close()
    except OSError:
        return False
    return True


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
