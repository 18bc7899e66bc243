"""``megastrategy.Replicas``: its arguments, what it refuses, and what it costs where it is not used."""

from __future__ import annotations

import copy
import importlib
import pickle
import sys
import threading
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import ProcessGroup

import megastrategy
from megastrategy import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from megastrategy._replicas import TorchftLink, check_timeouts, describe_timeouts
from megastrategy.core import Collectives, Replicas, SingleRankCollectives, make_collectives
from megastrategy.errors import CollectiveError, LayoutMismatchError
from tests.support.ranks import run_ranks
from tests.support.replicas import Case, HookedLink, lighthouse, prepare, results, run_replicas

VARIABLES = {"NUM_REPLICA_GROUPS": "3", "REPLICA_GROUP_ID": "2", "TORCHFT_LIGHTHOUSE": "http://localhost:1"}


def link_host(replicas: megastrategy.Replicas) -> str:
    assert isinstance(replicas.link, TorchftLink)
    return replicas.link._host


def test_arguments_come_from_the_environment_of_torchfts_launchers(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)
    replicas = megastrategy.Replicas()
    assert (replicas.of, replicas.slot, replicas.minimum, replicas.members) == (3, 2, 1, ())
    assert megastrategy.Replicas(of=4, slot=0).slot == 0
    monkeypatch.setenv("MEGASTRATEGY_HOST", "10.0.0.7")
    assert [link_host(megastrategy.Replicas(host=host)) for host in (None, "name")] == ["10.0.0.7", "name"]
    monkeypatch.setenv("TORCHFT_TIMEOUT_SEC", "7")
    with pytest.raises(ValueError, match="TORCHFT_TIMEOUT_SEC is set"):
        megastrategy.Replicas()
    monkeypatch.delenv("REPLICA_GROUP_ID")
    with pytest.raises(ValueError, match=r"Replicas\(slot=\).*REPLICA_GROUP_ID"):
        megastrategy.Replicas()


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("NUM_REPLICA_GROUPS", "two", r"of='two' \(NUM_REPLICA_GROUPS\): expected a whole number"),
        ("REPLICA_GROUP_ID", "1.0", r"slot='1.0' \(REPLICA_GROUP_ID\): expected a whole number"),
        ("MEGASTRATEGY_SKEW_S", "1m", "MEGASTRATEGY_SKEW_S='1m': expected a number of seconds"),
        ("TORCHFT_LIGHTHOUSE", "localhost:29510", "lighthouse='localhost:29510' .* http://machine:29510"),
        ("TORCHFT_LIGHTHOUSE", "http://localhost:two", "lighthouse='http://localhost:two' .* http://machine:29510"),
    ],
)
def test_a_variable_that_cannot_be_read_is_named(
    variable: str, value: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, good in (VARIABLES | {variable: value}).items():
        monkeypatch.setenv(name, good)
    with pytest.raises(ValueError, match=message):
        megastrategy.Replicas()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"slot": 2}, "slot=2: expected a number from 0 to 1"),
        ({"minimum": 3}, "minimum=3: expected a number from 1 to of=2"),
        ({"heartbeat_s": 0.5}, "heartbeat_s=0.5: expected at least 1 seconds, the time of 10 heartbeats"),
        ({"skew_s": 4.0}, "skew_s=4: expected at least 5 seconds, the time of heartbeat_s"),
        ({"patience_s": 124.0}, r"patience_s=124: expected at least 125 seconds, the time of 2 skew_s \+ heartbeat_s"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, Mapping) else "",
)
def test_wrong_numbers_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        megastrategy.Replicas(**{"of": 2, "slot": 0, "lighthouse": "http://localhost:1", **options})


def test_all_time_outs_are_in_one_line() -> None:
    check_timeouts(2.0, 20.0, 60.0)
    line = describe_timeouts(2.0, 20.0, 60.0)
    assert all(f"{seconds} s" in line for seconds in (2, 20, 42, 60))


def test_the_group_of_the_ranks_has_to_wait_longer() -> None:
    case = Case(ranks=2)

    def job(rank: int, group: ProcessGroup) -> str:
        collectives = make_collectives(group, torch.device("cpu"))
        run = prepare(case, 0, rank, "http://localhost:1", collectives, skew_s=30.0)
        with pytest.raises(ValueError, match="skew_s=30: expected less than 30 seconds") as raised:
            run.replicas.begin_batch()
        return str(raised.value)

    assert len(run_ranks(2, job)) == 2


def test_a_lighthouse_that_is_not_there_is_named() -> None:
    run = prepare(Case(of=1), 0, 0, "http://localhost:1", SingleRankCollectives(), skew_s=2.0, patience_s=2.0)
    with pytest.raises(CollectiveError, match="lighthouse at http://localhost:1"):
        run.replicas.begin_batch()


def test_missing_replicas_are_waited_for_in_bounded_time() -> None:
    """Below the minimum nothing is stepped; above it the present ones begin."""
    with lighthouse() as address:
        run = prepare(Case(of=3, minimum=2), 0, 0, address, SingleRankCollectives(), patience_s=3.0)
        with pytest.raises(CollectiveError, match="1 of 3 replicas are there, and minimum=2"):
            run.replicas.begin_batch()
    with lighthouse() as address:
        run = prepare(Case(of=3), 0, 0, address, SingleRankCollectives(), patience_s=3.0)
        run.train()
    assert len(run.steps) == 8


@pytest.mark.parametrize(
    "options",
    [
        {"grad_buffer": "pooled"},
        {"use_contiguous_buffers": False, "use_distributed_optimizer": False, "overlap_grad_reduce": False},
        {"grad_wire_dtype": "bf16"},
        {"reduce_scatter_with_fp32_accumulation": True, "grad_reduce_in_fp32": False},
        {"num_distributed_optimizer_instances": 2},
    ],
    ids=lambda options: next(iter(options)),
)
def test_options_that_are_not_supported_yet_are_refused_by_name(options: dict[str, Any]) -> None:
    def job(rank: int, group: ProcessGroup) -> None:
        collectives = make_collectives(group, torch.device("cpu"))
        with pytest.raises(ValueError, match=next(iter(options))):
            prepare(Case(options=options), 0, rank, "http://localhost:1", collectives)

    run_ranks(2, job)


def test_a_second_model_and_parameters_of_no_model_are_refused() -> None:
    run = prepare(Case(), 0, 0, "http://localhost:1", SingleRankCollectives())
    with pytest.raises(ValueError, match="one model is supported"):
        DistributedDataParallel(nn.Linear(2, 2), collectives=SingleRankCollectives(), replicas=run.replicas)
    other = nn.Parameter(torch.zeros(3))
    with pytest.raises(ValueError, match="not the wrapped model's"):
        DistributedOptimizer(torch.optim.SGD([*run.module.parameters(), other], lr=0.1), run.model)


def test_a_model_without_a_wrapped_optimizer_is_refused() -> None:
    """Steps would be made again on weights that were taken, and the optimizer's state would not be taken over."""
    link = HookedLink(0, "http://localhost:1", lambda point: None)
    replicas = Replicas(link, of=1, slot=0)
    model = DistributedDataParallel(nn.Linear(2, 2), collectives=SingleRankCollectives(), replicas=replicas)
    with pytest.raises(ValueError, match=r"there is none.*wrap each optimizer: DistributedOptimizer\(optimizer, model"):
        replicas.begin_batch()
    model.close()


@pytest.mark.parametrize(
    ("get", "message"), [(threading.Lock, "cannot pickle"), (lambda: {}["missing"], "KeyError: 'missing'")]
)
def test_registered_state_that_cannot_be_sent_is_named_at_the_start(get: Any, message: str) -> None:
    """Before the second batch. Otherwise all replicas would end when one comes back: it never gets a state."""
    case = Case(of=1)

    def job(slot: int, rank: int, address: str, collectives: Collectives) -> list[Any]:
        run = prepare(case, slot, rank, address, collectives)
        run.replicas.register("weights", run.module.state_dict, lambda state: None)
        run.replicas.register("place", get, lambda state: None)
        with pytest.raises(ValueError, match=rf"replicas\.register\('place', get, put\).*{message}"):
            run.train()
        return run.steps

    assert results(run_replicas(case, job)) == [[[(0, 0, (0,), True)]]]


def test_other_groups_of_parameters_are_refused() -> None:
    run = prepare(Case(), 0, 0, "http://localhost:1", SingleRankCollectives())
    across = run.model.engine.reducer.across
    assert across is not None
    theirs = across.model.groups()
    [[group]] = theirs["optimizers"]
    first, *others = group["params"]
    for groups in ([{**group, "params": [first]}, {**group, "params": others}], []):
        with pytest.raises(LayoutMismatchError, match="Adam has other groups of parameters"):
            across.model.load_groups({**theirs, "optimizers": [groups]})


def test_another_number_of_optimizers_is_refused_in_words() -> None:
    run = prepare(Case(), 0, 0, "http://localhost:1", SingleRankCollectives())
    across = run.model.engine.reducer.across
    assert across is not None
    groups, state = across.model.groups(), across.model.state()
    across.model.load_groups({**groups, "optimizers": 2 * groups["optimizers"]})
    with pytest.raises(LayoutMismatchError, match=r"or its optimizers\. Build the same module"):
        across.model.load({**state, "optimizers": 2 * state["optimizers"]})


def test_replicas_that_were_left_train_no_other_model() -> None:
    run = prepare(Case(), 0, 0, "http://localhost:1", SingleRankCollectives())
    run.replicas.close()
    with pytest.raises(ValueError, match="were left: make new ones"):
        DistributedDataParallel(nn.Linear(2, 2), collectives=SingleRankCollectives(), replicas=run.replicas)


def test_a_name_is_registered_once_and_a_batch_needs_a_model() -> None:
    replicas = megastrategy.Replicas(of=1, slot=0, lighthouse="http://localhost:1")
    replicas.register("place", lambda: 0, lambda place: None)
    with pytest.raises(ValueError, match="'place' is registered already"):
        replicas.register("place", lambda: 0, lambda place: None)
    with pytest.raises(ValueError, match="no model trains with these replicas"):
        replicas.begin_batch()


def test_a_launcher_copies_replicas_as_long_as_they_have_no_model() -> None:
    threads = threading.active_count()
    replicas = megastrategy.Replicas(of=3, slot=2, lighthouse="http://localhost:1")
    assert threading.active_count() == threads, "a process that is forked would have no such thread"
    copied = pickle.loads(pickle.dumps(replicas))
    assert (copied.of, copied.slot) == (3, 2)
    DistributedDataParallel(nn.Linear(2, 2), collectives=SingleRankCollectives(), replicas=copied)
    assert copy.deepcopy({"replicas": copied}) == {"replicas": None}


def test_torchft_is_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchft", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'megastrategy\[replicas\]'"):
        megastrategy.Replicas(of=1, slot=0, lighthouse="http://localhost:1")


def test_a_torchft_with_another_interface_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of 2026-10-26, for example, which has ``reconfigure``."""
    for base in importlib.import_module("torchft").ProcessGroupGloo.__mro__:
        if "configure" in vars(base):
            monkeypatch.delattr(base, "configure")
    with pytest.raises(ImportError, match=r"needs torchft 0\.2.*without torchft-nightly"):
        megastrategy.Replicas(of=1, slot=0, lighthouse="http://localhost:1")


def test_without_replicas_no_worker_and_no_copy_is_made() -> None:
    module = nn.Linear(2, 2)
    model = DistributedDataParallel(module, DistributedDataParallelConfig(), collectives=SingleRankCollectives())
    assert model.engine.reducer.across is None
