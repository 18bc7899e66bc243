"""The groups of hosts: where they listen, and their error if they cannot connect."""

from __future__ import annotations

import socket
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megastrategy.core.collectives import host_collectives, make_collectives, process_groups
from megastrategy.core.collectives.gloo import HostCollectives
from megastrategy.core.collectives.gloo_rings import GlooRings
from megastrategy.core.errors import CollectiveError
from tests.support.processes import run_processes
from tests.support.ranks import run_ranks

CPU = torch.device("cpu")


def numbers(rank: int, numel: int, dtype: torch.dtype) -> Tensor:
    return torch.randint(0, 9, (numel,), generator=torch.Generator().manual_seed(rank)).to(dtype)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7, 8])
def test_hosts_find_maximum_in_log_exchanges(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """And receive no data of another collective that runs between."""
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
def test_hosts_with_loopback_name_listen_for_others(
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


def hosts_of_a_world_without_gloo(failing_rank: int) -> tuple[str, int]:
    """Makes them as beside NCCL and exchanges something; returns the error, if any, and the number of groups left."""
    rank, before = dist.get_rank(), len(dist.distributed_c10d._world.pg_map)
    # An address of documentation's, which no interface has.
    address = "203.0.113.1" if rank == failing_rank else "127.0.0.1"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process_groups, "has_gloo", lambda group: False)
        patch.setattr(process_groups, "address_to_listen_at", lambda *_: address)
        patch.setattr(process_groups, "HOSTS_CONNECT_S", 5.0)
        try:
            collectives = host_collectives()
        except CollectiveError as error:
            return str(error), len(dist.distributed_c10d._world.pg_map) - before
    assert collectives.max_of_bytes([rank, 3]) == [1, 3]
    assert collectives.rank_check is not None, "ranks can meet"
    timeout = dist.group.WORLD._get_backend(CPU).options._timeout  # type: ignore[union-attr]
    assert collectives.rank_check.timeout == timeout
    collectives.close()
    assert collectives.group._get_backend(CPU).options._timeout == timeout
    process_groups.destroy_group(collectives.group)
    return "", len(dist.distributed_c10d._world.pg_map) - before


def test_hosts_connect_at_address_towards_others() -> None:
    assert run_processes(2, hosts_of_a_world_without_gloo, -1) == [("", 0)] * 2


def test_host_that_cannot_listen_names_the_setting() -> None:
    began = time.monotonic()
    for rank, (error, left) in enumerate(run_processes(2, hosts_of_a_world_without_gloo, 1)):
        assert error.startswith(f"rank {rank} of 2: the hosts could not connect over gloo, by which the ranks agree.")
        assert "set GLOO_SOCKET_IFNAME" in error
        assert left == 0
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


def test_a_group_made_by_hand_without_gloo_is_refused() -> None:
    group: Any = OnDevice()
    with pytest.raises(ValueError, match="made by hand and has no gloo for the ranks' hosts: pass one of torch"):
        make_collectives(group, torch.device("cuda:1"))


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
def test_part_of_world_is_not_split_from_it(ranks: list[int]) -> None:
    """torch splits NCCL's communicator if the world has its device bound: all ranks of the world have to take part."""
    device = torch.device("cuda:0")
    everybody = len(ranks) == 3
    assert run_processes(3, bound_while_made, ranks)[1] == [device if everybody else None, device]
