"""Groups of the engine's own, over the ranks of somebody else's.

[Note: a peer that dies while ranks connect]
Gloo looks for the addresses of the others in the store, and waits there for one that is missing until the group's
timeout: half an hour, for a rank that was killed after all had agreed to make the group. So a thread of its own
connects, and the caller looks every second whether all processes are there still, over the group that the new one is
made from. The thread is left behind where one is not: nothing ends it before the timeout. The group has a connection of
its own to the store, since a client that waits keeps every other request of its process waiting.

[Note: members alone]
Where ``init_process_group`` was given a ``device_id`` (Lightning gives it), torch splits the communicator of a new NCCL
group from the default group's, and a split is collective over all ranks of that: a part whose members alone make it
would wait for the others for ever. torch splits if the default group has the device bound. So it has not while a part
is made, and the part's communicator is connected by its members, as eagerly.

[Note: hosts that cannot connect]
Ranks whose group is a device's (NCCL) agree over a gloo group of their hosts. Gloo listens on what the machine's own
name resolves to. On many images that is a loopback address, where no other node can come; so this group then listens
where the way to the store's host begins, which every rank has gone already. Nor does the device's group show whether a
process has ended. So connecting has :data:`HOSTS_CONNECT_S`, and then raises on each rank that lacks a connection.
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

import torch
import torch.distributed as dist
from torch.distributed import HashStore, ProcessGroup  # type: ignore[attr-defined] # missing in torch's stubs
from torch.distributed.distributed_c10d import PrefixStore, Store

from ..errors import CollectiveError

_CHECK_PEERS_S = 1.0
_NAME = "megastrategy "
HOSTS_CONNECT_S = 60.0
"""The time that hosts have to connect. They come together, from a collective on the device; a full mesh of 512 takes
seconds."""

PROBE_TAG = 2**31 - 1
"""A message that nobody receives has this tag. Exchanges of the rings count from 0, and none has come that far."""


def private_group(group: ProcessGroup | None, device: torch.device) -> ProcessGroup:
    """A new group over the same ranks as ``group`` (default: all), for this engine alone.

    A group that torch.distributed does not know was made by hand for whoever passes it, and is returned as it is.

    On a group shared with others, a collective of theirs would wait behind ours, or run in another order on another
    rank. It has the backend and the timeout (on ``device``) of the one it is made from. All ranks of ``group`` must
    call this together. :func:`destroy_group` or ``torch.distributed.destroy_process_group()`` ends it.

    Raises:
        ValueError: if torch.distributed is not initialised.
    """
    if group is None and not dist.is_initialized():
        raise ValueError(
            "torch.distributed is not initialised: call torch.distributed.init_process_group(...) first (torchrun "
            "sets the addresses for it), or pass process_group"
        )
    # It has no entry in torch's tables: nothing there could be named after it, or end it.
    if group is not None and group not in dist.distributed_c10d._world.pg_group_ranks:
        return group
    group = group or dist.group.WORLD
    assert group is not None, "initialised, as checked above"
    return part_of_group(group, dist.get_process_group_ranks(group), new_name(group, device), device)


def world_group() -> ProcessGroup:
    """The default group.

    Raises:
        ValueError: if torch.distributed is not initialised.
    """
    world = dist.group.WORLD
    if world is None:
        raise ValueError("torch.distributed is not initialised: call torch.distributed.init_process_group(...) first")
    return world


def host_group(group: ProcessGroup, device: torch.device | None = None) -> ProcessGroup:
    """A new gloo group over the ranks of ``group``, with its timeout.

    torch would give it 30 minutes, whatever was asked for: a rank that may wait for an hour would be ended, and one
    that may wait for a minute would be kept. Collective. See [Note: hosts that cannot connect].
    ``device``: see :func:`device_of_group`.

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
    name, ranks = new_name(group, device), dist.get_process_group_ranks(group)
    if has_gloo(group):  # these hosts have connected before: a failure now is a rank's, and no interface's
        return part_of_group(group, ranks, name, device, backend="gloo")
    try:
        return part_of_group(group, ranks, name, device, backend="gloo")
    except RuntimeError as error:
        raise CollectiveError(
            f"rank {group.rank()} of {group.size()}: the hosts could not connect over gloo, by which the ranks agree. "
            "Most often gloo listens on an interface that the other machines do not reach: set GLOO_SOCKET_IFNAME to "
            f"one that they do (eth0, say) on every machine. The reason here: {error}"
        ) from error


def device_of_group(group: ProcessGroup, own: torch.device | None = None) -> torch.device:
    """A device that ``group`` has a backend for: the CPU if it has one. If several, all have one timeout.

    Args:
        own: this rank's, where the caller knows it. A kind alone means the current device, which is the first one on
            every rank of a script that moves its model and calls no ``set_device``: NCCL refuses two ranks on one.
    """
    cpu = torch.device("cpu")
    if cpu in group._device_types:
        return cpu
    device: torch.device = group._device_types[0] if own is None else own
    return device


def num_private_groups() -> int:
    """The number of groups of this process that :func:`private_group` and its like have made and not ended."""
    return sum(name.startswith(_NAME) for name in dist.distributed_c10d._world.pg_names.values())


def new_name(group: ProcessGroup, device: torch.device) -> str:
    """A name that no other group has or had. Collective."""
    # Rank 0's draw, and of secrets: users seed the other generators, again before each fit, and a name would come
    # twice.
    number = torch.tensor([secrets.randbelow(2**62)], device=device)
    group.broadcast([number], dist.BroadcastOptions()).wait()
    return f"{_NAME}{int(number.item())}"


def part_of_group(
    group: ProcessGroup, ranks: list[int], name: str, device: torch.device, *, backend: str | None = None
) -> ProcessGroup:
    """A new group with the backend and the timeout of ``group``. Collective over its ranks alone.

    ``torch.distributed.new_group()`` would name it after the number of groups that this rank has made, those of it
    alone among them since torch 2.15, and with ``use_local_synchronization=True`` after its ranks and the number of
    groups that it is in: ranks that differ in those numbers wait for each other forever, and a group that is made after
    another one has ended finds that one's addresses in the store.

    Args:
        ranks: some of the group's, by their numbers in the world, this one among them.
        name: that no other group has or had.
        backend: in the place of the group's.
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
        # torch's own helper takes neither an address nor a second connection.
        if address or (len(ranks) == 2 and (backend == "gloo" or _is_plain_gloo(group))):
            ways = _gloo_ways(address, len(ranks))
            return _gloo_over(ways, config, store.clone(), name, ranks.index(own), len(ranks), timeout)  # type: ignore[attr-defined]
        # See [Note: members alone].
        bound = world.bound_device_id
        if len(ranks) < world.size():
            world.bound_device_id = None
        try:
            # torch's own helper, private: new_group() goes through it too, but that one all ranks of the world must
            # call
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
    """A new group of some ranks of ``group``, by their numbers there; None on the others. Collective over ``group``."""
    name, wanted = new_name(group, device), [dist.get_global_rank(group, rank) for rank in ranks]
    return part_of_group(group, wanted, name, device) if dist.get_rank() in wanted else None


def is_fake(group: ProcessGroup, device: torch.device) -> bool:
    """Whether the group's peers do not exist: a process that runs as one rank of many, to be looked at."""
    kind = torch.device(device.type)
    return kind in group._device_types and group._get_backend(kind).name() == dist.Backend.FAKE


def timeout_of(group: ProcessGroup, device: torch.device) -> timedelta:
    """The longest that a collective of the group may take on ``device``."""
    if is_fake(group, device):
        return dist.constants.default_pg_timeout  # it has no options; nothing is waited for either
    timeout: timedelta = group._get_backend(device).options._timeout
    return timeout


def has_gloo(group: ProcessGroup) -> bool:
    """Whether the hosts of the group are connected by gloo."""
    cpu = torch.device("cpu")
    return cpu in group._device_types and group._get_backend(cpu).name() == "gloo"


def address_to_listen_at(store: Store, rank: int, size: int) -> str:
    """The address of the interface of this machine that leads to the other ranks, where gloo's own choice is a loopback
    address and they are elsewhere; else empty. Collective over ``store``, in which nothing else is.

    See [Note: hosts that cannot connect].
    """
    below: Any = store
    while isinstance(below, PrefixStore):
        below = below.underlying_store
    if type(below).__name__ != "TCPStore":
        return ""  # in a file, or of one process: nothing says which way the others are
    towards = _address_towards(below.host, below.port)
    store.set(f"{rank}", towards)
    keys = [f"{other}" for other in range(size)]
    store.wait(keys, timedelta(seconds=HOSTS_CONNECT_S))
    elsewhere = [found for key in keys if not _is_loopback(found := store.get(key).decode())]
    # The machine of the store reaches it by loopback, and the others by an interface that they lead to.
    if _is_loopback(towards) and elsewhere:
        towards = _address_towards(elsewhere[0], below.port)
    try:
        chosen_by_gloo = socket.gethostbyname(socket.gethostname())
    except OSError:
        chosen_by_gloo = ""  # a name that nothing knows
    return towards if _is_loopback(chosen_by_gloo) and not _is_loopback(towards) else ""


def _address_towards(host: str, port: int) -> str:
    """The address of the interface by which ``host`` is reached; empty if it is not."""
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
    """Whether gloo alone serves a group, and torch does not watch what it does (TORCH_DISTRIBUTED_DEBUG=DETAIL)."""
    return all(isinstance(group._get_backend(kind), dist.ProcessGroupGloo) for kind in group._device_types)


def _gloo_ways(address: str, size: int) -> list[Any]:
    """The interfaces that a gloo group of so many ranks listens on, one for each connection of two ranks: at
    ``address``, or where torch would have it (GLOO_SOCKET_IFNAME).

    Two ranks have two connections, over one interface and with one event thread; see gloo_rings' [Note: a connection
    for each direction].
    """
    gloo: Any = dist.ProcessGroupGloo
    if address:
        chosen = [gloo.create_device(hostname=address)]
    else:
        # torch chooses in its constructor alone. A group of one rank connects to nobody, and is gone after this.
        chosen = gloo(HashStore(), 0, 1, timedelta(seconds=1)).options._devices
    return 2 * chosen if size == 2 and len(chosen) == 1 else chosen


def _gloo_over(
    ways: list[Any], config: str, store: Store, name: str, place: int, size: int, timeout: timedelta
) -> ProcessGroup:
    """Makes a gloo group as torch's own helper would make it, which does not take ``ways``. ``config`` is a backend for
    each kind of device, as torch writes it: gloo for all."""
    c10d: Any = dist.distributed_c10d  # whose private names torch's stubs lack
    gloo: Any = dist.ProcessGroupGloo
    prefix = PrefixStore(f"{name}/", store)
    options = gloo._Options()
    options._timeout = timeout
    options._devices = ways
    backend = gloo(PrefixStore("cpu/", prefix), place, size, options)
    if torch.__version__ < "2.15":  # which begins at 0 by itself, and prints a warning
        backend._set_sequence_number_for_group()
    made: Any = ProcessGroup(prefix, place, size)
    for kind in config.split(","):
        made._register_backend(torch.device(kind.partition(":")[0]), ProcessGroup.BackendType.GLOO, backend)
    made._set_default_backend(ProcessGroup.BackendType.GLOO)
    made._set_group_name(name)
    made._set_group_desc("undefined")
    # The tables that destroy_process_group() reads, of this group and of all.
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
        bounded: they have :data:`HOSTS_CONNECT_S` for it, since ``group`` cannot tell who has ended.

    Raises:
        CollectiveError: if one of them has ended, or the time has passed.
    """
    can_probe, deadline = has_gloo(group), time.monotonic() + HOSTS_CONNECT_S
    if not can_probe and not bounded:
        return connect()  # NCCL connects later, and tells nobody whether a process is there
    future: Future[ProcessGroup] = Future()

    def run() -> None:
        try:
            future.set_result(connect())
        except BaseException as error:  # noqa: BLE001 - whoever waits for the future raises it
            future.set_exception(error)

    # a daemon, as it may be left behind: the interpreter would wait for another kind of thread when it ends
    threading.Thread(target=run, name="megastrategy-connect", daemon=True).start()
    probes: list[Any] = []  # kept, as gloo would wait for them
    while not concurrent.futures.wait([future], _CHECK_PEERS_S).done:
        if bounded and time.monotonic() > deadline:
            raise CollectiveError(
                f"rank {group.rank()} of {group.size()}: the hosts did not connect over gloo within "
                f"{HOSTS_CONNECT_S:g} s"
            )
        for peer in peers if can_probe else ():
            try:
                # gloo refuses to begin a message on a connection that the other end has closed
                probes.append(group.send([torch.zeros(1, dtype=torch.uint8, device="cpu")], peer, PROBE_TAG))
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
    """The ranks of a group (None: of all) by their numbers in the world; none where torch.distributed does not know."""
    if group is None:
        return set(range(dist.get_world_size())) if dist.is_initialized() else set()
    return set(dist.distributed_c10d._world.pg_group_ranks.get(group, ()))
