"""The groups of hosts: where they listen, and what carries the ranks' exchange where they cannot connect."""

from __future__ import annotations

import socket
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import HashStore, PrefixStore, ProcessGroup

import megastrategy.core.collectives as collectives_of_core
from megastrategy.core.collectives import Collectives, GlooCollectives, host_collectives, process_groups
from megastrategy.core.collectives.gloo import HostCollectives
from megastrategy.core.collectives.gloo_rings import GlooRings
from megastrategy.core.collectives.store import StoreCollectives
from megastrategy.core.errors import CollectiveError

from ..support.processes import run_processes
from ..support.ranks import run_ranks

CPU = torch.device("cpu")


def over_store(group: ProcessGroup) -> StoreCollectives:
    return StoreCollectives(group, PrefixStore("rounds", group.get_group_store()))  # beside gloo's own addresses


def numbers(rank: int, numel: int, dtype: torch.dtype) -> Tensor:
    return torch.randint(0, 9, (numel,), generator=torch.Generator().manual_seed(rank)).to(dtype)


CALLS: dict[str, Callable[[Collectives, Tensor], Any]] = {
    "all_reduce": lambda collectives, tensor: collectives.all_reduce(tensor, 0.5),
    "all_reduce, the sum scaled": lambda collectives, tensor: collectives.all_reduce(tensor, 0.5, scale_sum=True),
    "all_reduce_max": lambda collectives, tensor: collectives.all_reduce_max(tensor),
    "all_gather": lambda collectives, tensor: collectives.all_gather(tensor),
    "broadcast": lambda collectives, tensor: collectives.broadcast(tensor),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("size", [2, 3])
def test_the_store_carries_what_gloo_does(size: int, call: str, dtype: torch.dtype) -> None:
    """Whole numbers, and halves of them: exact in every order and dtype."""

    def run(rank: int, group: ProcessGroup) -> None:
        store = over_store(group)
        for make in (GlooCollectives(group), store):
            tensors = [numbers(rank + 10 * round_, 6 * size, dtype) for round_ in range(3)]
            for tensor in tensors:
                CALLS[call](make, tensor).wait()
            results.setdefault(rank, []).append(torch.stack(tensors))
            make.close()
        assert torch.equal(*results[rank])
        sums = torch.ones(6)
        store.reduce_scatter_into(sums, numbers(rank, 6 * size, dtype), 1.0).wait()
        scattered = numbers(rank, 6 * size, dtype)
        store.reduce_scatter(scattered, 1.0).wait()
        total = torch.stack([numbers(r, 6 * size, torch.float32) for r in range(size)]).sum(0)
        own = slice(6 * rank, 6 * rank + 6)
        assert torch.equal(sums, total[own] + 1)
        assert torch.equal(scattered[own].float(), total[own])
        assert store.max_of_bytes([rank, 255 - rank]) == [size - 1, 255]
        assert store.all_gather_bytes(b"x" * rank) == [b"x" * r for r in range(size)]

    results: dict[int, list[Tensor]] = {}
    run_ranks(size, run)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7, 8])
def test_hosts_find_a_maximum_in_as_many_exchanges_as_the_size_has_bits(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And take nobody's data of another collective that runs between."""
    distances: list[int] = []
    exchange = GlooRings._exchange

    def counted(self: GlooRings, kind: int, sent: Any, received: Any, distance: int = 1) -> Any:
        if len(received) == 1 and received[0].dtype == torch.uint8:
            distances.append(distance)
        return exchange(self, kind, sent, received, distance)

    monkeypatch.setattr(GlooRings, "_exchange", counted)

    def run(rank: int, group: ProcessGroup) -> None:
        hosts = HostCollectives(group)
        for round_ in range(3):
            of_ranks = [numbers(10 * round_ + r, 50, torch.uint8) for r in range(size)]
            own = of_ranks[rank].clone()
            hosts.all_reduce_max(own).wait()
            assert torch.equal(own, torch.stack(of_ranks).amax(0))
            whole = torch.zeros(size, dtype=torch.int64)
            whole[rank] = rank
            hosts.all_gather(whole).wait()
            assert whole.tolist() == list(range(size))
        hosts.close()

    run_ranks(size, run)
    num_exchanges = (size - 1).bit_length()
    assert sorted(distances) == [2**k for k in range(num_exchanges) for _ in range(3 * size)]


def test_the_store_keeps_two_rounds_at_most() -> None:
    left: dict[int, int] = {}

    def run(rank: int, group: ProcessGroup) -> None:
        collectives = StoreCollectives(group, stores[rank])
        for _ in range(20):
            collectives.max_of_bytes([rank])
        left[rank] = store.num_keys()

    store = HashStore()
    stores = [store, store]
    before = store.num_keys()
    run_ranks(2, run)
    assert all(number - before <= 4 for number in left.values())


def test_a_rank_that_waits_at_the_store_is_told_that_it_waits_in_vain() -> None:
    gone = threading.Event()

    def run(rank: int, group: ProcessGroup) -> None:
        collectives = over_store(group)
        if rank == 1:
            assert gone.wait(30)
            return
        collectives.watchdog = lambda what, number: f"rank 1 left ({what}, {number})"
        with pytest.raises(CollectiveError, match=r"all-reduce was given up: rank 1 left \(all-reduce, 1\)"):
            collectives.max_of_bytes([rank])
        gone.set()

    run_ranks(2, run)


def test_a_wait_at_the_store_ends_with_the_groups_timeout() -> None:
    done = threading.Event()

    def run(rank: int, group: ProcessGroup) -> None:
        if rank == 1:
            assert done.wait(30)
            return
        with pytest.raises(CollectiveError, match="not all ranks came within 2 s"):
            over_store(group).all_gather(torch.zeros(2)).wait()
        done.set()

    run_ranks(2, run, timeout_s=2.0)


# --- where they listen ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("own_name", "is_at_master", "expected"),
    [
        ("10.0.0.5", False, ""),  # gloo's own choice will do
        ("127.0.1.1", False, "10.0.0.7"),
        ("127.0.1.1", True, "10.0.0.4"),  # the master reaches itself by loopback, and the others by that
        (None, False, "10.0.0.7"),
    ],
)
def test_hosts_listen_where_the_others_come_if_their_name_is_a_loopback_address(
    own_name: str | None, is_at_master: bool, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Debian's images have it. The interfaces of the machines are given: there is one machine here."""
    store = dist.TCPStore("127.0.0.1", 0, 2, True, wait_for_workers=False)
    other = "10.0.0.7" if is_at_master else "127.0.0.1"
    shared = dist.PrefixStore("addresses", store)
    shared.set("1", other)

    def resolve(_: str) -> str:
        if own_name is None:
            raise socket.gaierror
        return own_name

    def towards(host: str, port: int) -> str:
        assert port == store.port
        if host == "127.0.0.1":
            return "127.0.0.1" if is_at_master else "10.0.0.7"
        return {"10.0.0.7": "10.0.0.4"}[host]

    monkeypatch.setattr(socket, "gethostbyname", resolve)
    monkeypatch.setattr(process_groups, "_address_towards", towards)
    assert process_groups.address_to_listen_at(shared, 0, 2) == expected


def test_the_way_to_a_host_begins_at_an_interface() -> None:
    assert process_groups._address_towards("127.0.0.1", 29500) == "127.0.0.1"
    assert process_groups._address_towards("", 0) in ("", "127.0.0.1", "0.0.0.0")


def test_connecting_hosts_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device's group cannot tell that a process has ended."""
    monkeypatch.setattr(process_groups, "HOSTS_CONNECT_S", 0.1)
    monkeypatch.setattr(process_groups, "has_gloo", lambda group: False)
    ended = threading.Event()

    def never() -> ProcessGroup:
        ended.wait(60)
        raise AssertionError

    def run(rank: int, group: ProcessGroup) -> None:
        with pytest.raises(CollectiveError, match=r"rank 0 of 1: the hosts did not connect over gloo within 0\.1 s"):
            process_groups._while_all_live(never, group, [], bounded=True)

    try:
        run_ranks(1, run)
    finally:
        ended.set()


def hosts_of_a_world_without_gloo(failing_rank: int) -> tuple[str, list[str], int]:
    """Makes them as beside NCCL, exchanges something, and returns what carried it, warnings, and groups left behind."""
    rank, before = dist.get_rank(), len(dist.distributed_c10d._world.pg_map)
    # An address of documentation's, which no interface has.
    address = "203.0.113.1" if rank == failing_rank else "127.0.0.1"
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        patch.setattr(process_groups, "has_gloo", lambda group: False)
        patch.setattr(process_groups, "address_to_listen_at", lambda *_: address)
        patch.setattr(process_groups, "HOSTS_CONNECT_S", 5.0)
        collectives = host_collectives()
    assert collectives.max_of_bytes([rank, 3]) == [1, 3]
    assert collectives.roll_call is not None, "ranks can meet"
    timeout = dist.group.WORLD._get_backend(CPU).options._timeout  # type: ignore[union-attr]
    assert collectives.roll_call.timeout == timeout
    collectives.close()
    if isinstance(collectives, GlooCollectives):
        assert collectives.group._get_backend(CPU).options._timeout == timeout
        process_groups.destroy_group(collectives.group)
    left = len(dist.distributed_c10d._world.pg_map) - before
    return type(collectives).__name__, [str(item.message) for item in caught], left


@pytest.mark.parametrize("failing_rank", [-1, 1])
def test_where_one_host_cannot_listen_all_use_the_store_and_say_so_once(failing_rank: int) -> None:
    began = time.monotonic()
    found = run_processes(2, hosts_of_a_world_without_gloo, failing_rank)
    kinds, warned, _ = zip(*found, strict=True)
    if failing_rank < 0:
        assert set(kinds) == {"GlooCollectives"}
        assert warned == ([], [])
        assert all(left == 0 for *_, left in found)
        return
    assert set(kinds) == {"StoreCollectives"}
    assert [len(messages) for messages in warned] == [1, 0]
    assert "set GLOO_SOCKET_IFNAME" in warned[0][0]
    assert time.monotonic() - began < 60


class OnDevice:
    """A group of one kind of device, and no gloo, as ``init_process_group("nccl")`` makes it."""

    _device_types = (torch.device("cuda"),)
    options = dist.ProcessGroupGloo._Options()

    def rank(self) -> int:
        return 1

    def size(self) -> int:
        return 2

    def name(self) -> str:
        return "nccl"

    def _get_backend(self, device: torch.device) -> OnDevice:
        return self


@pytest.mark.parametrize("is_known", [False, True])
def test_hosts_name_their_group_over_the_models_own_device(is_known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not over the current one: that is the first GPU on every rank of a script that calls no ``set_device``."""
    group: Any = OnDevice()
    asked: list[torch.device] = []

    class AskedError(Exception):
        pass

    def new_name(_: ProcessGroup, device: torch.device) -> str:
        asked.append(device)
        raise AskedError

    for module in (process_groups, collectives_of_core):
        monkeypatch.setattr(module, "new_name", new_name)
    if is_known:
        monkeypatch.setitem(dist.distributed_c10d._world.pg_map, group, ("nccl", HashStore()))
    with pytest.raises(AskedError):
        collectives_of_core.make_collectives(group, torch.device("cuda:1"))
    assert asked == [torch.device("cuda:1")]


def bound_while_made(ranks: list[int]) -> list[Any]:
    """The device that the default group had bound when torch made the part, and the one that the part was to bind."""
    world, c10d = dist.group.WORLD, dist.distributed_c10d
    assert world is not None
    device, make, seen = torch.device("cuda:0"), c10d._new_process_group_helper, []

    def helper(*args: Any, device_id: Any, **options: Any) -> Any:
        seen.extend([world.bound_device_id, device_id])
        world.bound_device_id = None  # there is none here
        return make(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(c10d, "_new_process_group_helper", helper)
        world.bound_device_id = device
        if dist.get_rank() in ranks:
            part = process_groups.part_of_group(world, ranks, "a part", CPU)
            assert world.bound_device_id == device
            # A rank that ended here would close connections which the other one is still making.
            part.allreduce([torch.zeros(1)]).wait()
    return seen


@pytest.mark.parametrize("ranks", [[0, 1, 2], [1]])  # two gloo ranks are connected without torch's helper
def test_a_part_that_its_members_alone_make_is_not_split_from_the_world(ranks: list[int]) -> None:
    """torch splits NCCL's communicator if the world has its device bound: all ranks of the world have to take part."""
    device = torch.device("cuda:0")
    everybody = len(ranks) == 3
    assert run_processes(3, bound_while_made, ranks)[1] == [device if everybody else None, device]
