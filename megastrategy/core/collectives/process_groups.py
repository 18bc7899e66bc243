"""Groups of the engine's own, over the ranks of a given group.

[Note: a peer that dies while ranks connect]
Gloo reads the addresses of the others from the store, and waits for a missing one until the group's timeout: half an
hour, for a rank that was killed after all had agreed to make the group. So a separate thread connects, and the caller
checks every second whether all processes still run, over the group from which the new one is made. If one does not, the
thread is left behind, since nothing ends it before the timeout. The group has its own connection to the store: a client
that waits blocks every other request of its process.

[Note: NCCL groups made by their members only]
If ``init_process_group`` was given a ``device_id`` (by Lightning, for example), torch splits the communicator of a new
NCCL group from the default group's, and a split is collective over all ranks of that: members that make a group without
the others would wait for them forever. torch splits if the default group has the device bound. So it is unbound while
such a group is made, and the members connect the communicator, as eagerly.

[Note: hosts that cannot connect]
Ranks whose group belongs to a device (NCCL) agree over a gloo group of their hosts. Gloo listens on the address of the
machine's own name. On many images that is a loopback address, which other nodes cannot reach; this group then listens
on the interface towards the store's host, which every rank has reached already. The device's group does not show
either whether a process has ended. So connecting is limited to :data:`HOSTS_CONNECT_S`, and then raises on each rank
that lacks a connection.
"""

from __future__ import annotations

import concurrent.futures
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import HashStore, ProcessGroup  # type: ignore[attr-defined] # missing in torch's stubs
from torch.distributed.distributed_c10d import PrefixStore, Store

from ..errors import CollectiveError

_CHECK_PEERS_S = 1.0
_NAME = "megastrategy "
HOSTS_CONNECT_S = 60.0
"""The time that hosts have to connect. They start together, from a collective on the device; a full mesh
of 512 takes seconds."""

PROBE_TAG = 2**31 - 1
"""The tag of a message that no rank receives. Exchanges of the rings count from 0, and never reach it."""
_NUM_PROBES: WeakKeyDictionary[ProcessGroup, int] = WeakKeyDictionary()
"""Messages that this module has sent in a group that it did not make."""


def private_group(group: ProcessGroup | None, device: torch.device) -> ProcessGroup:
    """Makes a group over the same ranks as ``group`` (default: all), for this engine only.

    On a group that other code uses, its collectives would wait behind ours, or run in a different order on another
    rank. The new group has the backend and the timeout (on ``device``) of ``group``. A group that torch.distributed
    does not know was made by hand, for the caller, and is returned as it is. Collective over ``group``.
    :func:`destroy_group` or ``torch.distributed.destroy_process_group()`` ends the new group.

    Raises:
        ValueError: if torch.distributed is not initialised.
    """
    if group is None and not dist.is_initialized():
        raise ValueError(
            "torch.distributed is not initialised: call torch.distributed.init_process_group(...) first (torchrun "
            "sets the addresses for it), or pass process_group"
        )
    group = group or world_group()
    # It has no entry in torch's tables, by which a new group could be named and ended.
    if group not in dist.distributed_c10d._world.pg_group_ranks:
        return group
    return part_of_group(group, dist.get_process_group_ranks(group), new_name(group, device), device)


def world_group() -> ProcessGroup:
    """Returns the default group.

    Raises:
        ValueError: if torch.distributed is not initialised.
    """
    world = dist.group.WORLD
    if world is None:
        raise ValueError("torch.distributed is not initialised: call torch.distributed.init_process_group(...) first")
    return world


def num_collectives(group: ProcessGroup) -> int:
    """Returns the number of collectives that this rank has started in a group; backends match them by it.

    Gloo's number counts messages between two ranks, too. Those of :func:`_while_all_live` are not included: a rank
    sends them only if connecting lasts, and others may not.
    """
    return int(group._get_sequence_number_for_group()) - _NUM_PROBES.get(group, 0)  # type: ignore[attr-defined]


def host_group(group: ProcessGroup, device: torch.device | None = None) -> ProcessGroup:
    """Makes a gloo group over the ranks of ``group``, with its timeout. Collective.

    torch's default would be 30 minutes: too short for a rank that may wait for an hour, too long for a timeout of a
    minute. See [Note: hosts that cannot connect]. ``device``: see :func:`device_of_group`.

    Raises:
        ValueError: if torch.distributed does not know ``group``.
        CollectiveError: if the hosts cannot connect.
    """
    if group not in dist.distributed_c10d._world.pg_map:
        raise ValueError(
            "torch.distributed does not know the process group that was passed, which was made by hand and has no gloo "
            "for the ranks' hosts: pass one of torch.distributed.new_group(), or register gloo for the CPU in it"
        )
    device = device_of_group(group, device)
    name = new_name(group, device)
    ranks = dist.get_process_group_ranks(group)
    try:
        return part_of_group(group, ranks, name, device, backend="gloo")
    except RuntimeError as error:
        if has_gloo(group):  # these hosts have connected before, so it is not the interface's failure
            raise
        raise CollectiveError(
            f"rank {group.rank()} of {group.size()}: the hosts could not connect over gloo, by which the ranks agree. "
            "Most often gloo listens on an interface that the other machines do not reach: set GLOO_SOCKET_IFNAME to "
            f"one that they do (eth0, say) on every machine. The reason here: {error}"
        ) from error


def device_of_group(group: ProcessGroup, own: torch.device | None = None) -> torch.device:
    """Returns a device that ``group`` has a backend for: the CPU if it has one. All devices of a
    group have one timeout.

    Args:
        own: this rank's, if the caller knows it. A device without an index means the current one, which is the
            first one on every rank of a script that moves its model and calls no ``set_device``: NCCL refuses
            two ranks on one.
    """
    cpu = torch.device("cpu")
    if cpu in group._device_types:
        return cpu
    device: torch.device = group._device_types[0] if own is None else own
    return device


def num_private_groups() -> int:
    """Returns the number of groups of this process that :func:`private_group` and similar functions have
    made and not ended."""
    return sum(name.startswith(_NAME) for name in dist.distributed_c10d._world.pg_names.values())


def new_name(group: ProcessGroup, device: torch.device) -> str:
    """Returns a name that no other group has or had. Collective."""
    # Rank 0 draws it, from secrets: users seed the other generators, again before each fit, and a name would repeat.
    number = torch.tensor([secrets.randbelow(2**62)], device=device)
    group.broadcast([number], dist.BroadcastOptions()).wait()
    return f"{_NAME}{int(number.item())}"


def part_of_group(
    group: ProcessGroup, ranks: list[int], name: str, device: torch.device, *, backend: str | None = None
) -> ProcessGroup:
    """Makes a group with the backend and the timeout of ``group``. Collective over its members only.

    ``torch.distributed.new_group()`` would name it after the number of groups that this rank has made, including its
    own ones since torch 2.15, and with ``use_local_synchronization=True`` after its ranks and the number of groups that
    it is in. Ranks that differ in those numbers wait for each other forever, and a group that is made after another one
    has ended finds that one's addresses in the store.

    Args:
        ranks: some of the group's, by their numbers in the world, including this one.
        name: that no other group has or had.
        backend: instead of the group's.
    """
    c10d = dist.distributed_c10d
    world = c10d._get_default_group()
    own = dist.get_rank()
    backend = backend or dist.get_backend_config(group)
    timeout = timeout_of(group, device)

    store = c10d._world.pg_map[world][1]
    hosts_only = backend == "gloo" and not has_gloo(world)  # a gloo world listens where its ranks have met already
    address = ""
    if hosts_only:
        address = address_to_listen_at(PrefixStore(f"{name}, addresses", store), ranks.index(own), len(ranks))
    config = "cpu:gloo" if backend == "gloo" else backend

    def connect() -> ProcessGroup:
        # torch's helper accepts neither an address nor a second connection.
        if address or (len(ranks) == 2 and (backend == "gloo" or _is_plain_gloo(group))):
            ways = _gloo_ways(address, len(ranks))
            return _gloo_over(ways, config, store.clone(), name, ranks.index(own), len(ranks), timeout)  # type: ignore[attr-defined]
        # See [Note: NCCL groups made by their members only].
        bound = world.bound_device_id
        if len(ranks) < world.size():
            world.bound_device_id = None
        try:
            # A private helper of torch's. new_group() uses it too, but all ranks of the world must call that.
            made, _ = c10d._new_process_group_helper(
                len(ranks),
                ranks.index(own),
                ranks,
                dist.Backend(backend),
                store.clone(),  # type: ignore[attr-defined] # missing in torch's stubs
                name,  # type: ignore[arg-type] # a str to Python; torch's own type for it is recent
                timeout=timeout,
                device_id=bound,
            )
        finally:
            world.bound_device_id = bound
        group_made: ProcessGroup = made
        return group_made

    peers = [dist.get_group_rank(group, rank) for rank in ranks if rank != own]
    made = _while_all_live(connect, group, peers, bounded=hosts_only)
    # new_group() writes this too: get_process_group_ranks and destroy_process_group find a group by it
    c10d._world.pg_group_ranks[made] = {rank: place for place, rank in enumerate(ranks)}
    return made


def subgroup(group: ProcessGroup, ranks: Iterable[int], device: torch.device) -> ProcessGroup | None:
    """Makes a group of some ranks of ``group``, by their numbers there; returns None on the others. Collective over
    ``group``."""
    name = new_name(group, device)
    wanted = [dist.get_global_rank(group, rank) for rank in ranks]
    return part_of_group(group, wanted, name, device) if dist.get_rank() in wanted else None


def is_fake(group: ProcessGroup, device: torch.device) -> bool:
    """Whether the group's peers do not exist: the process runs as one rank of many, for inspection."""
    kind = torch.device(device.type)
    return kind in group._device_types and group._get_backend(kind).name() == dist.Backend.FAKE


def timeout_of(group: ProcessGroup, device: torch.device) -> timedelta:
    """Returns the maximum time of a collective of the group on ``device``."""
    if is_fake(group, device):
        return dist.constants.default_pg_timeout  # it has no options, and waits for nothing
    timeout: timedelta = group._get_backend(device).options._timeout
    return timeout


def has_gloo(group: ProcessGroup) -> bool:
    """Whether gloo connects the hosts of the group."""
    cpu = torch.device("cpu")
    return cpu in group._device_types and group._get_backend(cpu).name() == "gloo"


def address_to_listen_at(store: Store, rank: int, size: int, timeout_s: float = HOSTS_CONNECT_S) -> str:
    """Returns the address of this machine's interface towards the other ranks, or "" if gloo may choose itself.

    It is needed if gloo would choose a loopback address and not all ranks are on this machine. Collective over
    ``store``, which must be empty.

    See [Note: hosts that cannot connect].
    """
    below: Any = store
    while isinstance(below, PrefixStore):
        below = below.underlying_store
    if type(below).__name__ != "TCPStore":
        return ""  # in a file, or of one process: it has no address
    towards = _address_towards(below.host, below.port)
    store.set(f"{rank}", towards)
    keys = [f"{other}" for other in range(size)]
    store.wait(keys, timedelta(seconds=timeout_s))
    elsewhere = [found for key in keys if not _is_loopback(found := store.get(key).decode())]
    # The store's machine reaches the store by loopback, so it uses the interface towards another rank.
    if _is_loopback(towards) and elsewhere:
        towards = _address_towards(elsewhere[0], below.port)
    try:
        chosen_by_gloo = socket.gethostbyname(socket.gethostname())
    except OSError:
        chosen_by_gloo = ""  # a name that nothing knows
    return towards if _is_loopback(chosen_by_gloo) and not _is_loopback(towards) else ""


def _address_towards(host: str, port: int) -> str:
    """Returns the address of the interface that reaches ``host``; empty if none does."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            # A datagram socket sends nothing when it connects: the kernel only chooses the interface.
            probe.connect((host, port))
        except OSError:
            return ""
        return str(probe.getsockname()[0])


def _is_loopback(address: str) -> bool:
    return not address or address.startswith("127.")


def _is_plain_gloo(group: ProcessGroup) -> bool:
    """Whether gloo serves all devices of a group, and torch does not wrap it (TORCH_DISTRIBUTED_DEBUG=DETAIL)."""
    return all(isinstance(group._get_backend(kind), dist.ProcessGroupGloo) for kind in group._device_types)


def _gloo_devices(address: str) -> list[Any]:
    """Returns the interfaces that gloo listens on: at ``address``, or torch's choice (GLOO_SOCKET_IFNAME)."""
    gloo: Any = dist.ProcessGroupGloo
    if address:
        return [gloo.create_device(hostname=address)]
    # torch chooses in its constructor only. A group of one rank connects to no other, and is gone after this.
    devices: list[Any] = gloo(HashStore(), 0, 1, timedelta(seconds=1)).options._devices
    return devices


def _gloo_ways(address: str, size: int) -> list[Any]:
    """Returns the interfaces of a gloo group of this size, one for each connection of two ranks.

    Two ranks have two connections, over one interface and with one event thread; see gloo_rings' [Note: two gloo
    connections between two ranks].
    """
    chosen = _gloo_devices(address)
    return 2 * chosen if size == 2 and len(chosen) == 1 else chosen


def _gloo_by_hand(
    store: Store, place: int, size: int, timeout: timedelta, devices: list[Any], kinds: Iterable[str]
) -> ProcessGroup:
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = timeout
    options._devices = devices
    backend = gloo(PrefixStore("cpu/", store), place, size, options)
    if torch.__version__ < "2.15":  # which begins at 0 by itself, and prints a warning
        backend._set_sequence_number_for_group()
    made: Any = ProcessGroup(store, place, size)
    for kind in kinds:
        made._register_backend(torch.device(kind), ProcessGroup.BackendType.GLOO, backend)
    made._set_default_backend(ProcessGroup.BackendType.GLOO)
    group: ProcessGroup = made
    return group


def _gloo_over(
    ways: list[Any], config: str, store: Store, name: str, place: int, size: int, timeout: timedelta
) -> ProcessGroup:
    """Makes a gloo group like torch's helper, which does not accept ``ways``. ``config`` is a backend for each kind of
    device, as torch writes it: gloo for all."""
    c10d: Any = dist.distributed_c10d  # whose private names torch's stubs lack
    prefix = PrefixStore(f"{name}/", store)
    kinds = [kind.partition(":")[0] for kind in config.split(",")]
    made: Any = _gloo_by_hand(prefix, place, size, timeout, ways, kinds)
    made._set_group_name(name)
    made._set_group_desc("undefined")
    # The tables of this group and of all groups that destroy_process_group() reads.
    c10d._world.pg_map[made] = "gloo", prefix
    c10d._world.pg_names[made] = name
    c10d._world.pg_backend_config[made] = config
    c10d._world.pg_to_tag[made] = tag = f"ptd:{name}"
    c10d._world.tags_to_pg.setdefault(tag, []).append(made)
    c10d._register_process_group(name, made)
    group: ProcessGroup = made
    return group


def _while_all_live(
    connect: Callable[[], ProcessGroup], group: ProcessGroup, peers: Iterable[int], *, bounded: bool = False
) -> ProcessGroup:
    """Calls ``connect``, and returns the group; see [Note: a peer that dies while ranks connect].

    Args:
        group: in which all are connected already.
        peers: the other ranks that connect, by their numbers in ``group``.
        bounded: limits the time to :data:`HOSTS_CONNECT_S`, for a ``group`` that cannot tell which process has ended.

    Raises:
        CollectiveError: if one of them has ended, or the time has passed.
    """
    can_probe = has_gloo(group)
    deadline = time.monotonic() + HOSTS_CONNECT_S
    if not can_probe and not bounded:
        return connect()  # NCCL connects later, and cannot tell whether a process has ended
    future: Future[ProcessGroup] = Future()

    def run() -> None:
        try:
            future.set_result(connect())
        except BaseException as error:  # noqa: BLE001 - raised where the future is waited for
            future.set_exception(error)

    # A daemon, since it may be left behind: the interpreter waits for other kinds of threads when it ends.
    threading.Thread(target=run, name="megastrategy-connect", daemon=True).start()
    probes: list[Any] = []  # kept, since gloo would wait for a dropped one
    while not concurrent.futures.wait([future], _CHECK_PEERS_S).done:
        if bounded and time.monotonic() > deadline:
            raise CollectiveError(
                f"rank {group.rank()} of {group.size()}: the hosts did not connect over gloo within "
                f"{HOSTS_CONNECT_S:g} s"
            )
        for peer in peers if can_probe else ():
            try:
                # Gloo refuses to begin a message on a connection that the other end has closed.
                probes.append(group.send([torch.zeros(1, dtype=torch.uint8, device="cpu")], peer, PROBE_TAG))
                _NUM_PROBES[group] = _NUM_PROBES.get(group, 0) + 1
            except RuntimeError as error:
                raise CollectiveError(
                    f"rank {group.rank()} of {group.size()}: connecting a new group did not complete, since the "
                    f"process of rank {peer} is gone. Most often another rank ended with an error, was killed, or ran "
                    f"out of memory: look at the first error among the ranks. The backend said: {error}"
                ) from error
    return future.result()


def destroy_group(group: ProcessGroup) -> None:
    """Ends a group that :func:`private_group` made, if torch.distributed still knows it."""
    if dist.is_initialized() and group in dist.distributed_c10d._world.pg_group_ranks:
        dist.destroy_process_group(group)


def ranks_of(group: ProcessGroup | None) -> set[int]:
    """Returns the ranks of a group (None: of all) by their numbers in the world; empty if torch.distributed
    does not know it."""
    if group is None:
        return set(range(dist.get_world_size())) if dist.is_initialized() else set()
    return set(dist.distributed_c10d._world.pg_group_ranks.get(group, ()))
