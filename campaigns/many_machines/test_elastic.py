"""``examples/elastic.py`` under two agents of torchrun on a machine; one is killed with its worker, and comes back."""

from __future__ import annotations

import csv
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.ports import free_port
from tests.support.scripts import ROOT
from tests.support.timeouts import HANG_S

from .nodes import Node

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1800)]

Row = tuple[int, float, int, float]
"""An epoch, the test loss after it, the number of ranks, and when that was."""


def node(name: str, port: int, out: Path, epochs: int, *options: str) -> Node:
    """One that trains with the example, and writes into ``out``."""
    conf = "last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=10"
    elastic = ["--nnodes", "1:2", "--max-restarts", "10", "--monitor-interval", "0.5"]
    elastic += ["--rdzv-backend", "c10d", "--rdzv-conf", conf]
    elastic += ["--rdzv-endpoint", f"127.0.0.1:{port}", "--local-addr", "127.0.0.1", *options]
    example = [str(ROOT / "examples" / "elastic.py"), "--out", str(out), "--epochs", str(epochs), "--pause", "0.04"]
    return Node(out.parent / f"{name}.log", *elastic, *example)


def rows(out: Path) -> list[Row]:
    path = out / "losses.csv"
    if not path.exists():
        return []
    with path.open() as file:
        found = [row for row in csv.reader(file) if len(row) == 4]
    return [(int(epoch), float(loss), int(ranks), float(at)) for epoch, loss, ranks, at in found]


def await_(what: str, is_there: Callable[[], bool], *nodes: Node) -> None:
    deadline = time.monotonic() + HANG_S / 3
    while not is_there():
        assert time.monotonic() < deadline, f"{what} did not come\n" + "\n".join(node.said() for node in nodes)
        time.sleep(0.05)


def listens(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def test_a_node_that_dies_is_left_out_and_taken_in_when_it_is_back(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    out, whole, port, epochs = tmp_path / "run", tmp_path / "whole", free_port(), 120
    with node("first", port, out, epochs, "--rdzv-id", "elastic") as first:
        # the agent that comes first holds the store
        await_("the store", lambda: listens(port), first)
        with node("second", port, out, epochs, "--rdzv-id", "elastic") as second:
            await_("an epoch on two ranks", lambda: any(row[2] == 2 for row in rows(out)), first, second)
            killed_at = time.time()
            second.kill()
        await_("an epoch on one rank", lambda: rows(out)[-1][2] == 1, first)
        alone_at = next(at for *_, ranks, at in rows(out) if at > killed_at and ranks == 1)
        with node("back", port, out, epochs, "--rdzv-id", "elastic") as back:
            back_at = time.time()
            await_("two ranks again", lambda: rows(out)[-1][2] == 2, first, back)
            together_at = next(at for *_, ranks, at in rows(out) if at > back_at and ranks == 2)
            assert first.agent.wait(HANG_S) == 0, first.said()
            assert back.agent.wait(HANG_S) == 0, back.said()
            # what waits for 30 s in torchrun: for more nodes, and for a worker that does not obey SIGTERM
            seconds = alone_at - killed_at, together_at - back_at
            record_property("seconds from the kill to one rank, and from the return to two", seconds)
            assert "forcefully exiting" not in first.said(), "the worker obeyed SIGTERM"
    found = {epoch: (loss, ranks) for epoch, loss, ranks, _ in rows(out)}
    assert sorted(found) == list(range(epochs)), "no epoch is left out"
    sizes = [ranks for _, ranks in (found[epoch] for epoch in range(epochs))]
    changes = [ranks for place, ranks in enumerate(sizes) if place == 0 or sizes[place - 1] != ranks]
    assert changes[-3:] == [2, 1, 2]

    with node("whole", free_port(), whole, epochs, "--rdzv-id", "whole") as alone:
        assert alone.agent.wait(HANG_S) == 0, alone.said()
    # on one and two ranks gradients of the same images are summed in other orders
    expected = [loss for _, loss, _, _ in rows(whole)]
    assert [found[epoch][0] for epoch in range(epochs)] == pytest.approx(expected, rel=0.01)
    assert expected[-1] < 0.2 < expected[0]
