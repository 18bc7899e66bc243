"""Groups of the engine's own, over the ranks of somebody else's.

[Note: a peer that dies while ranks connect]
Gloo looks for the addresses of the others in the store, and waits there for one that is missing until the group's
timeout: half an hour, for a rank that was killed after all had agreed to make the group. So a thread of its own
connects, and the caller looks every second whether all processes are there still, over the group that the new one is
made from. The thread is left behind where one is not: nothing ends it before the timeout. The group has a connection of
its own to the store, since a client that waits keeps every other request of its process waiting.
"""

from __future__ import annotations

import concurrent.futures
import secrets
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import PrefixStore, Store

from ..errors import CollectiveError

_GLANCE_S = 1.0
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
    return part_of_group(group, dist.get_process_group_ranks(group), _new_name(group, device), device)


def host_group() -> ProcessGroup:
    """A new gloo group over all ranks, with the timeout of the default group. Collective.

    torch would give it 30 minutes, whatever was asked for: a rank that may wait for an hour would be ended, and one
    that may wait for a minute would be kept.

    Raises:
        ValueError: if torch.distributed is not initialised.
    """
    world = dist.group.WORLD
    if world is None:
        raise ValueError("torch.distributed is not initialised: call torch.distributed.init_process_group(...) first")
    device = torch.device("cpu")
    # An NCCL world has no backend on the CPU, whose timeout could be asked for.
    if device not in world._device_types:
        device = world._device_types[0]  # its backends, if it has several, were made with one timeout
    return part_of_group(world, dist.get_process_group_ranks(world), _new_name(world, device), device, backend="gloo")


def _new_name(group: ProcessGroup, device: torch.device) -> str:
    """A name that no other group has or had. Collective."""
    # Rank 0's draw, and of secrets: users seed the other generators, again before each fit, and a name would come
    # twice.
    number = torch.tensor([secrets.randbelow(2**62)], device=device)
    group.broadcast([number], dist.BroadcastOptions()).wait()
    return f"megastrategy {int(number.item())}"


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
    timeout = group._get_backend(device).options._timeout

    def connect() -> ProcessGroup:
        made: ProcessGroup
        # torch's own helper, private: new_group() goes through it too, but that one all ranks of the world must call
        made, _ = c10d._new_process_group_helper(
            len(ranks),
            ranks.index(own),
            ranks,
            dist.Backend(backend),
            c10d._world.pg_map[world][1].clone(),  # type: ignore[attr-defined] # missing in torch's stubs
            name,  # type: ignore[arg-type] # a str to Python; torch's own type for it is recent
            timeout=timeout,
            device_id=world.bound_device_id,
        )
        return made

    peers = [dist.get_group_rank(group, rank) for rank in ranks if rank != own]
    made = _while_all_live(connect, group, peers)
    # new_group() writes this too: get_process_group_ranks and destroy_process_group find a group by it
    c10d._world.pg_group_ranks[made] = {rank: place for place, rank in enumerate(ranks)}
    return made


def _while_all_live(connect: Callable[[], ProcessGroup], group: ProcessGroup, peers: Iterable[int]) -> ProcessGroup:
    """Calls ``connect``, and returns the group; see [Note: a peer that dies while ranks connect].

    Args:
        group: in which all are connected already.
        peers: the other ranks that connect, by their numbers in ``group``.

    Raises:
        CollectiveError: if one of them has ended.
    """
    if torch.device("cpu") not in group._device_types or group._get_backend(torch.device("cpu")).name() != "gloo":
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
    while not concurrent.futures.wait([future], _GLANCE_S).done:
        for peer in peers:
            try:
                # gloo refuses to begin a message on a connection that the other end has closed
                probes.append(group.send([torch.zeros(1, dtype=torch.uint8)], peer, PROBE_TAG))
            except RuntimeError as error:
                raise CollectiveError(
                    f"rank {group.rank()} of {group.size()}: connecting a new group did not complete, since the "
                    f"process of rank {peer} is gone. Most often another rank ended with an error, was killed, or ran "
                    f"out of memory: look at the first error among the ranks. The backend said: {error}"
                ) from error
    return future.result()


class Pair:
    """A gloo connection of two ranks, for tensors in host memory, that torch.distributed does not know.

    Args:
        store: that both see.
        name: that no other connection has or had in it.
        place: 0 on one of the ranks, 1 on the other; both make it at about the same time.
        timeout: of that, and of each message.
    """

    def __init__(self, store: Store, name: str, place: int, timeout: timedelta) -> None:
        # Not registered with torch: an attendant's thread makes it at any time, and torch's counters must stay equal on
        # all ranks.
        self._group: Any = dist.ProcessGroupGloo(PrefixStore(name, store), place, 2, timeout)
        self._other = 1 - place

    def send(self, tensor: Tensor) -> None:
        self._group.send([tensor], self._other, 0).wait()

    def receive(self, tensor: Tensor) -> None:
        """Waits for a message and puts it into ``tensor``, which has its size."""
        self._group.recv([tensor], self._other, 0).wait()


def destroy_group(group: ProcessGroup) -> None:
    """Ends a group that :func:`private_group` made, if torch.distributed still knows it."""
    if dist.is_initialized() and group in dist.distributed_c10d._world.pg_group_ranks:
        dist.destroy_process_group(group)
