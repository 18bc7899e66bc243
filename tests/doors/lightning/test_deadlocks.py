"""A rank says that it waits in vain only where that is certain."""

from __future__ import annotations

import torch

from megastrategy._faults.deadlocks import DeadlockFinder
from megastrategy.core import Collectives, host_collectives

from ..fits import fit
from ..rank_processes import Ranks


def send(collectives: Collectives, count: int) -> None:
    for _ in range(count):
        collectives.all_reduce_max(torch.zeros(1)).wait()


def look_while_both_wait_in_a_group_that_was_given_up() -> list[str]:
    fit("ddp")  # leaves a default group, which others are made from
    waits = DeadlockFinder(lambda: "both wait in a group that was given up")
    old = waits.watch("for gradients or weights", host_collectives())
    send(old, 40)
    waits.forget()
    send(waits.watch("for gradients or weights", host_collectives()), 2)
    assert old.watchdog is not None
    reasons = []
    for _ in range(2):  # the second time each has read the note of the other
        reasons.append(old.watchdog("all-gather", 40))
        torch.distributed.barrier()
    return reasons


def test_a_slow_collective_of_a_group_that_was_given_up_is_no_deadlock(ranks: Ranks) -> None:
    """After an exception another group serves the same purpose, and has begun two collectives: the 40th of the old one
    is not compared with those."""
    assert ranks.run(look_while_both_wait_in_a_group_that_was_given_up) == [["", ""], ["", ""]]
