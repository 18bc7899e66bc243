"""Replicas that fail, and what another takes over: threads, each a rank of a replica."""

from __future__ import annotations

import copy
import dataclasses
import re
import socket
import threading
import time
from typing import Any

import pytest
import torch

from megastrategy.core import Collectives
from megastrategy.errors import ReplicaMismatchError
from tests.support.patience import HANG_S
from tests.support.replicas import (
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

CASES = {
    "adam": Case(),
    "momentum": Case("momentum"),
    "all-reduce": Case(ranks=2, options={"use_distributed_optimizer": False}),
    "two ranks": Case(ranks=2),
    "bf16": Case(ranks=2, dtype=torch.bfloat16),
    "muon": Case("muon", ranks=2),
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", CASES)
def test_replicas_are_equal_to_a_replay_in_one_process(name: str) -> None:
    case = CASES[name]

    def job(slot: int, rank: int, address: str, collectives: Collectives) -> Any:
        run = prepare(case, slot, rank, address, collectives)
        run.train()
        return run.outcome()

    found = results(run_replicas(case, job))
    for by_rank in found[1:]:
        for mine, theirs in zip(found[0], by_rank, strict=True):
            assert_equal(mine, theirs)
    steps = members_by_step([outcome["steps"] for by_rank in found for outcome in by_rank])
    assert len(steps) == case.num_epochs * case.num_batches
    assert_replayed(case, found[0][0]["weights"], steps)


FORMS = {
    "fp32": Case(ranks=2),
    "one rank": Case("momentum"),
    "all-reduce, main params": Case(
        ranks=2, dtype=torch.bfloat16, options={"use_distributed_optimizer": False, "bucket_size": 10_000}
    ),
    "main params": Case("momentum", ranks=2, dtype=torch.bfloat16),
    "state on the host": Case(ranks=2, options={"offload_optimizer_states": True}),
    "state on the host, main params": Case(ranks=2, dtype=torch.bfloat16, options={"offload_optimizer_states": True}),
    "weights on the way": Case(ranks=2, options={"overlap_param_gather": True}),
    "whole parameters": Case("muon", ranks=2),
    "whole parameters, main params": Case("muon", ranks=2, dtype=torch.bfloat16),
}


@pytest.mark.sample(6)
@pytest.mark.parametrize("name", FORMS)
def test_state_is_taken_over_in_every_form(name: str) -> None:
    """In the third step the second replica's vote says no after the other's has said yes."""
    case = FORMS[name]

    def job(slot: int, rank: int, address: str, collectives: Collectives) -> Any:
        run = prepare(case, slot, rank, address, collectives)
        if (slot, rank) == (1, case.ranks - 1):
            run.replicas.link.failing_votes = {3}  # type: ignore[attr-defined]
        run.train()
        run.model.finish_param_gather()
        return run.outcome()

    first, second = results(run_replicas(case, job))
    for mine, theirs in zip(first, second, strict=True):
        assert_equal(mine, theirs)
        assert [has_part for *_, has_part in mine["steps"]] == [True] * 8
        assert [has_part for *_, has_part in theirs["steps"]] == [True, True, False, *[True] * 5]


def test_a_state_is_asked_for_by_the_name_that_was_given_and_through_no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others do not know the name of the machine. Sums and questions to the lighthouse do not need it."""
    monkeypatch.setattr(socket, "gethostname", lambda: "no-such-machine.invalid")
    for name in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.setenv(name, "http://localhost:1")
    case = Case(num_epochs=1)

    def job(slot: int, rank: int, address: str, collectives: Collectives) -> Any:
        run = prepare(case, slot, rank, address, collectives, skew_s=5.0, patience_s=15.0)
        run.replicas.link.failing_votes = {2} if slot == 1 else ()  # type: ignore[attr-defined]
        run.train()
        return run.outcome()

    [[first], [second]] = results(run_replicas(case, job, skew_s=5.0))
    assert_equal(first, second)
    assert [has_part for *_, has_part in second["steps"]] == [True, False, True, True]


def test_a_state_that_is_asked_for_early_is_waited_for() -> None:
    """Replicas that have met ask at once, and the one that sends may have served an older state before."""
    case = Case(num_epochs=1, num_batches=6)

    def job(slot: int, rank: int, address: str, collectives: Collectives) -> Any:
        points: list[str] = []

        def hook(point: str) -> None:
            points.append(point)
            if point == "serving":
                time.sleep(0.3)  # the other one has asked by then

        run = prepare(case, slot, rank, address, collectives, hook)
        run.replicas.link.failing_votes = {2, 4} if slot == 1 else ()  # type: ignore[attr-defined]
        run.train()
        return run.outcome() | {"points": points}

    [[first], [second]] = results(run_replicas(case, job))
    assert_equal(first, second)
    assert [has_part for *_, has_part in second["steps"]] == [True, False, True, False, True, True]
    assert (first["points"].count("serving"), second["points"].count("asking")) == (2, 2)


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ["fp32", "main params", "state on the host", "whole parameters"])
def test_a_replica_with_other_weights_and_more_steps_of_its_own_takes_those_of_the_running_ones(name: str) -> None:
    """As one that has loaded an old checkpoint; it must not overwrite what the others have."""
    case = dataclasses.replace(FORMS[name], num_batches=12)
    may_come, is_coming = threading.Event(), threading.Event()

    def job(slot: int, rank: int, address: str, collectives: Collectives) -> Any:
        module = case.module()
        if slot == 1:
            assert may_come.wait(HANG_S)
            with torch.no_grad():
                for param in module.parameters():
                    param.add_(1.0)
        patience_s, hook = (1.0, lambda point: None) if slot == 0 else (60.0, lambda point: is_coming.set())
        run = prepare(case, slot, rank, address, collectives, hook, module=module, patience_s=patience_s)
        seen: list[int] = []
        run.replicas.register("seen", lambda: list(seen), lambda theirs: seen.__setitem__(slice(None), theirs))

        def on_step(run: Run) -> None:
            seen.append(run.replicas.batch)
            if slot == 0 and len(run.steps) >= 3 and len(run.replicas.members) == 1:
                may_come.set()
                assert is_coming.wait(HANG_S)
                time.sleep(0.2)

        run.train(on_step)
        return run.outcome(), seen

    first, second = results(run_replicas(case, job))
    for (mine, seen), (theirs, seen_there) in zip(first, second, strict=True):
        assert_equal(mine, theirs)
        assert seen == seen_there == 2 * list(range(12))
        assert 3 <= len(mine["steps"]) - len(theirs["steps"]) < 24
        assert mine["steps"][-1][2] == (0, 1)


ALREADY = r"slot=0 \(REPLICA_GROUP_ID\): another process is this replica already"


def test_of_two_processes_that_begin_in_one_slot_one_ends() -> None:
    """They would read the same data. The one that has ended begins again in the other slot."""
    case, errors = Case(), list[str]()

    def job(_: int, rank: int, address: str, collectives: Collectives) -> Any:
        run = prepare(case, 0, rank, address, collectives)
        try:
            run.replicas.begin_batch()
        except ReplicaMismatchError as error:
            errors.append(str(error))
            run = prepare(case, 1, rank, address, collectives)
        run.train()
        return run.outcome()

    found = results(run_replicas(case, job))
    [error] = errors
    assert re.match(ALREADY, error)
    assert_together(case, found)


def test_all_replicas_resume_from_a_checkpoint_of_one() -> None:
    """As if they had not ended. The file is that of the leader, whose ranks gather it."""
    case = dataclasses.replace(FORMS["main params"], num_epochs=2)
    saved: dict[str, Any] = {}

    def train_once(slot: int, rank: int, address: str, collectives: Collectives) -> Any:
        run = prepare(dataclasses.replace(case, num_epochs=1), slot, rank, address, collectives)
        run.train()
        if run.replicas.is_leader:
            found = {"model": run.module.state_dict(), "optimizer": run.optimizer.state_dict()}
            found["main"] = run.optimizer.main_params()
            if rank == 0:
                saved.update(copy.deepcopy(found))

    def resume(slot: int, rank: int, address: str, collectives: Collectives) -> Any:
        run = prepare(case, slot, rank, address, collectives)
        run.module.load_state_dict(saved["model"])
        run.optimizer.load_state_dict(saved["optimizer"])
        run.optimizer.load_main_params(saved["main"])
        run.replicas.epoch = 1
        run.train()
        return run.outcome()

    def train(slot: int, rank: int, address: str, collectives: Collectives) -> Any:
        run = prepare(case, slot, rank, address, collectives)
        run.train()
        return run.outcome()

    results(run_replicas(case, train_once))
    expected, found = results(run_replicas(case, train)), results(run_replicas(case, resume))
    for slot in range(case.of):
        for mine, theirs in zip(expected[slot], found[slot], strict=True):
            assert_equal(mine, theirs)
            assert mine["steps"][case.num_batches :] == theirs["steps"]
