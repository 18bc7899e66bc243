"""A lighthouse whose process is killed: it comes back at the same address, or not."""

from __future__ import annotations

import contextlib
import multiprocessing
import re
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

import pytest

from megastrategy._replicas import TorchftLink, start_lighthouse
from megastrategy.core import Collectives, SingleRankCollectives
from megastrategy.errors import CollectiveError, ReplicaMismatchError
from tests.support.patience import HANG_S
from tests.support.replicas import (
    HEARTBEAT_S,
    SKEW_S,
    Case,
    Run,
    assert_equal,
    assert_replayed,
    assert_together,
    members_by_step,
    prepare,
    results,
    run_replicas,
)


class Lighthouse:
    """A process that is killed and started again at the same port."""

    def __init__(self, minimum: int = 1) -> None:
        self.port = 0
        self.start(minimum)

    def start(self, minimum: int = 1) -> None:
        context = multiprocessing.get_context("forkserver")
        receiver, sender = context.Pipe(duplex=False)
        self._process = context.Process(target=_serve, args=(self.port, minimum, sender), daemon=True)
        self._process.start()
        assert receiver.poll(HANG_S)
        self.port = receiver.recv()

    def kill(self) -> None:
        self._process.kill()
        self._process.join()

    @property
    def address(self) -> str:
        return f"http://localhost:{self.port}"

    def num_waiting(self) -> int:
        """The number of replicas that wait for others in a meeting."""
        page = self._status()
        found = re.search(r"\[(\d+)/\d+ participants healthy\]", page)
        assert found is not None, page
        return int(found[1])

    def wait_for_heartbeats(self, num: int) -> None:
        """Waits until so many replicas are known to live."""
        deadline = time.monotonic() + HANG_S
        while True:
            page = self._status()
            if len(set(re.findall(r"replica\d+:[\w-]+", page))) >= num:
                return
            assert time.monotonic() < deadline, page
            time.sleep(0.1)

    def _status(self) -> str:
        page: str = urllib.request.urlopen(f"{self.address}/status", timeout=HANG_S).read().decode()
        return page


def _serve(port: int, minimum: int, sender: Connection) -> None:
    server = start_lighthouse(f"[::]:{port}", heartbeat_s=HEARTBEAT_S, skew_s=SKEW_S, minimum=minimum)
    sender.send(int(server.address().rpartition(":")[2]))
    threading.Event().wait()


@pytest.fixture
def server(request: pytest.FixtureRequest) -> Iterator[Lighthouse]:
    """Its parameter is the number of replicas below which it makes no group."""
    server = Lighthouse(getattr(request, "param", 1))
    yield server
    server.kill()


@pytest.mark.parametrize("point", ["before meeting", "before vote"])
def test_a_lighthouse_that_comes_back_costs_no_bits(server: Lighthouse, point: str) -> None:
    """One replica may step alone before the other has found the lighthouse, which then takes its state."""
    case = Case(ranks=2, num_epochs=2, num_batches=10)

    def job(slot: int, rank: int, _: str, collectives: Collectives) -> Any:
        num_points, fails_next = 0, False

        def hook(reached: str) -> None:
            nonlocal num_points, fails_next
            num_points += reached == point
            if (slot, rank, reached, num_points) == (0, 0, point, 5):
                server.kill()
                server.start()
                fails_next = True
            if fails_next and reached == "before meeting":
                fails_next = False
                run.replicas.link.fail()  # type: ignore[attr-defined] # otherwise no replica would ask the lighthouse

        def wait_for_the_other(run: Run) -> None:
            # Otherwise it may have trained to the end by then: no other training has steps as short as these.
            deadline = time.monotonic() + HANG_S / 4
            while len(run.replicas.members) < case.of and not server.num_waiting():
                assert time.monotonic() < deadline, "the other replica does not come"
                time.sleep(0.02)

        run = prepare(case, slot, rank, server.address, collectives, hook)
        run.train(wait_for_the_other)
        return run.outcome()

    found = results(run_replicas(case, job))
    for mine, theirs in zip(*found, strict=True):
        assert_equal(mine, theirs)
    steps = members_by_step([outcome["steps"] for by_rank in found for outcome in by_rank])
    assert sorted(steps) == [(epoch, batch) for epoch in range(2) for batch in range(10)]
    assert steps[1, 9] == (0, 1)
    assert_replayed(case, found[0][0]["weights"], steps)


def call_each(links: Sequence[TorchftLink], call: Callable[[TorchftLink], Any]) -> list[Any]:
    """``call`` on all links at a time, as in replicas that wait for each other."""
    with ThreadPoolExecutor(len(links)) as pool:
        return list(pool.map(call, links))


def meet(link: TorchftLink) -> Any:
    return link.meet(joins=True)


@contextlib.contextmanager
def two_links(server: Lighthouse) -> Iterator[list[TorchftLink]]:
    """Two replicas that have met, in the first group."""
    links = [TorchftLink(slot, server.address, HEARTBEAT_S, SKEW_S, SKEW_S, "localhost") for slot in (0, 1)]
    try:
        for link in links:
            link.join(SingleRankCollectives(), lambda: None)
        call_each(links, meet)
        assert [(link.number, link.members) for link in links] == [(0, (0, 1)), (0, (0, 1))]
        yield links
    finally:
        for link in links:
            link.leave()


@pytest.mark.parametrize("server", [2], indirect=True)
def test_a_group_is_not_taken_for_that_of_the_same_number_before(server: Lighthouse) -> None:
    """A lighthouse counts from 1 again. Sums in the old group would wait for the replica that is gone."""
    with two_links(server) as links:
        links[0]._manager._manager.shutdown()  # it is silent, and connected
        server.kill()
        server.start()

        assert meet(links[1]) is None
        assert (links[1].number, links[1].members, links[1].failure) == (1, (1,), "")
        assert links[1].vote()


@pytest.mark.parametrize("server", [2], indirect=True)
def test_a_group_that_was_left_is_not_taken_for_the_next_one_of_its_number(server: Lighthouse) -> None:
    """Both have left it when the lighthouse counts from 1 again."""
    with two_links(server) as links:
        assert call_each(links, TorchftLink.vote) == [True, True]
        links[0].undo_meeting()
        assert not links[1].confirm(b"place")
        links[1].undo_meeting()
        server.kill()
        server.start(minimum=2)

        call_each(links, meet)
        assert {link._manager._quorum_id for link in links} == {1}
        assert [(link.number, link.members, link.failure) for link in links] == [(1, (0, 1), ""), (1, (0, 1), "")]
        assert call_each(links, lambda link: link.confirm(b"place")) == [True, True]


class LeftError(Exception):
    """Ends a replica in the middle of a window."""


def test_none_joins_in_the_middle_of_a_window_after_the_lighthouse_was_started_again(server: Lighthouse) -> None:
    """It does not know the members that train, and takes the one that comes back at once for another of them."""
    case, is_back = Case(num_epochs=2, num_batches=10), threading.Event()

    def job(slot: int, rank: int, _: str, collectives: Collectives) -> Any:
        lives, errors = list[Run](), list[str]()

        def hook(point: str) -> None:
            if (slot, point, len(lives), len(run.steps)) == (1, "before sum 0", 1, 3):
                raise LeftError

        def on_step(run: Run) -> None:
            if (slot, len(run.steps)) == (0, 2):
                server.kill()
                server.start()
                server.wait_for_heartbeats(2)
                is_back.set()
            assert len(run.steps) < 2 or is_back.wait(HANG_S)
            if run.replicas.members == (0,):
                time.sleep(0.5)  # until the other one has joined

        while True:
            run = prepare(case, slot, rank, server.address, collectives, hook)
            lives.append(run)
            try:
                run.train(on_step)
                return run.outcome(), [life.steps for life in lives], errors
            except (LeftError, ReplicaMismatchError) as error:
                errors.append(str(error))

    (one, its_steps, none), (other, others_steps, errors) = (by_rank[0] for by_rank in results(run_replicas(case, job)))
    assert none == []
    assert [" came back in the middle of a batch" in error for error in errors] == [False, True]
    assert_equal(one, other)
    steps = members_by_step([*its_steps, *others_steps])
    assert steps[0, 3] == (0,)
    assert steps[1, 9] == (0, 1)
    assert_replayed(case, one["weights"], steps)


def test_all_replicas_together_train_without_a_lighthouse(server: Lighthouse) -> None:
    case = Case(ranks=2, num_epochs=2)

    def job(slot: int, rank: int, _: str, collectives: Collectives) -> Any:
        run = prepare(case, slot, rank, server.address, collectives)

        def kill_the_lighthouse(run: Run) -> None:
            if (slot, rank, len(run.steps)) == (0, 0, 2):
                server.kill()

        run.train(kill_the_lighthouse)
        return run.outcome()

    found = results(run_replicas(case, job))
    assert_together(case, found)


def test_a_lighthouse_that_is_gone_is_named_by_each_rank(server: Lighthouse) -> None:
    case = Case(of=1, ranks=2)

    def job(_: int, rank: int, __: str, collectives: Collectives) -> None:
        num_meetings = 0

        def hook(point: str) -> None:
            nonlocal num_meetings
            num_meetings += point == "before meeting"
            if (rank, point, num_meetings) == (0, "before meeting", 3):
                server.kill()
                run.replicas.link.fail()  # type: ignore[attr-defined]

        run = prepare(case, 0, rank, server.address, collectives, hook, patience_s=5.0)
        with pytest.raises(CollectiveError, match=rf"lighthouse at {server.address}. It does not answer"):
            run.train()
        assert len(run.steps) == 2

    results(run_replicas(case, job))


@pytest.mark.long
@pytest.mark.parametrize("point", ["before meeting", "before sum 0"])
def test_survivors_of_a_replica_end_if_the_lighthouse_is_gone(server: Lighthouse, point: str) -> None:
    """They wait for it for patience_s before a batch, and for 2 skew_s + heartbeat_s in the middle of one."""
    case = Case(of=3, ranks=2, num_epochs=1)

    def job(slot: int, rank: int, _: str, collectives: Collectives) -> tuple[str, int]:
        def hook(reached: str) -> None:
            if (slot, reached, len(run.steps)) == (2, point, 3):
                raise LeftError

        def kill_the_lighthouse(run: Run) -> None:
            if (slot, rank, len(run.steps)) == (0, 0, 2):
                server.kill()

        run = prepare(case, slot, rank, server.address, collectives, hook, skew_s=5.0, patience_s=15.0)
        try:
            run.train(kill_the_lighthouse)
        except (CollectiveError, LeftError) as error:
            return str(error), len(run.steps)
        return "", len(run.steps)

    for by_rank in results(run_replicas(case, job, skew_s=5.0))[:2]:
        for error, num_steps in by_rank:
            assert f"lighthouse at {server.address}. It does not answer" in error
            assert num_steps == 3
