"""When a rank hands its state over: the one that is asked for, or none."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
from torch.distributed import HashStore

from megastrategy.core.at_rest import AtRest, Version
from megastrategy.core.checkpoint.hand_over import Lending, _when_at_rest
from megastrategy.core.own_parts import OwnParts

WANTED = Version(num_begun=3, num_done=3, num_replaced=1, num_moves=0, num_params=4)


class Lender:
    """Has one version after the other, each for a moment, and keeps the last; changes under its lock, as steps do."""

    def __init__(self, *versions: Version) -> None:
        self.at_rest = AtRest()
        self._version = versions[0]
        self._thread = threading.Thread(target=self._live, args=(versions[1:],))
        self._thread.start()

    def _live(self, versions: tuple[Version, ...]) -> None:
        for version in versions:
            time.sleep(0.05)
            with self.at_rest.lock:
                self._version = version

    def version(self) -> Version:
        return self._version

    def own_parts(self, what: str) -> OwnParts:
        raise NotImplementedError("it is not asked for them here")


def ask(lender: Lender, patience_s: float = 30.0) -> tuple[str, Version]:
    """What the rank says, empty if it hands over, and the version that it then has, while its lock is held."""
    request: dict[str, Any] = {"version": WANTED, "patience_s": patience_s}
    problem = _when_at_rest(lender, request)
    found = lender.version()
    if not problem:
        lender.at_rest.lock.release()
    return problem, found


@pytest.mark.parametrize(
    "behind",
    [
        {"num_begun": 2, "num_done": 2},  # a step that rank 0 has done
        {"num_done": 2},  # in that step
        {"num_replaced": 0},  # a state that rank 0 has loaded
    ],
)
def test_a_rank_that_is_behind_is_waited_for(behind: dict[str, int]) -> None:
    lender = Lender(WANTED._replace(**behind), WANTED)
    assert ask(lender) == ("", WANTED)


def test_what_comes_next_waits_until_all_is_handed_over() -> None:
    ahead = WANTED._replace(num_begun=4, num_done=4)
    lender = Lender(WANTED, ahead)
    assert _when_at_rest(lender, {"version": WANTED, "patience_s": 30.0}) == ""
    time.sleep(0.2)
    assert lender.version() == WANTED
    lender.at_rest.lock.release()
    lender._thread.join()
    assert lender.version() == ahead


@pytest.mark.parametrize(
    ("ahead", "says"),
    [
        ({"num_begun": 4}, "has begun its step 4, and no longer has the state after 3"),
        ({"num_begun": 4, "num_done": 4}, "has begun its step 4"),
        ({"num_replaced": 2}, "has loaded another state since"),
    ],
)
def test_a_rank_that_is_ahead_says_so_at_once(ahead: dict[str, int], says: str) -> None:
    problem, _ = ask(Lender(WANTED._replace(**ahead)))
    assert says in problem


def test_a_rank_that_does_not_come_is_waited_for_no_longer_than_asked() -> None:
    """Its layout has other parameters: rank 0's and its parts would not fit together."""
    start = time.monotonic()
    problem, _ = ask(Lender(WANTED._replace(num_params=5)), patience_s=0.3)
    assert time.monotonic() - start >= 0.3
    assert "num_params=5" in problem
    assert "num_params=4" in problem


def answer_of(lending: Lending, patience_s: float) -> str:
    """The word that a rank has for rank 0, which asks for its first optimizer."""
    store = HashStore()
    lending({"key": "asked", "number": 1, "what": "state", "version": WANTED, "patience_s": patience_s}, store)
    return str(store.get("asked/answer/1").decode())


def test_an_optimizer_that_is_not_made_yet_is_waited_for() -> None:
    """A rank may be in its constructor while rank 0 is at its ``state_dict()``."""
    lending, lender = Lending(rank=1), Lender(WANTED)
    threading.Timer(0.3, lambda: lending.add(lender)).start()
    assert "it is not asked for them here" in answer_of(lending, patience_s=30.0), "it was found, and read"
    assert answer_of(Lending(rank=1), patience_s=0.2) == "it has not made its optimizer, for 0.2 s"


def test_an_optimizer_that_is_gone_is_not_waited_for() -> None:
    lending = Lending(rank=1)
    lending.add(Lender(WANTED))
    assert answer_of(lending, patience_s=600.0) == "its optimizer is no longer there"
