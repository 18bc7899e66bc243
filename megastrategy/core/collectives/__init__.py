"""Communication between ranks: the only folder that calls torch.distributed.

``interface`` is the class that the engine uses; ``backend`` (NCCL and others), ``gloo`` (with ``gloo_rings``, in a
``worker``), ``single_rank``, ``instanced`` (several instances of the
optimizer) and ``fake`` (for a rank without peers) implement it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from .backend import BackendCollectives
from .comparison import (
    check_all_agree,
    descriptions_if_different,
    first_difference_error,
    is_same_on_all_ranks,
)
from .fake import FakeCollectives
from .gloo import GlooCollectives, HostCollectives
from .instanced import destroy_instances, shard_collectives
from .interface import Collectives, Handle, Handles
from .part_sums import bytes_of, digest_of
from .process_groups import (
    destroy_group,
    has_gloo,
    host_group,
    is_fake,
    num_collectives,
    num_private_groups,
    private_group,
    ranks_of,
    subgroup,
    world_group,
)
from .rank_check import CALL_ON_EVERY_RANK, RankCheck
from .single_rank import SingleRankCollectives
from .worker import Worker

__all__ = [
    "CALL_ON_EVERY_RANK",
    "Collectives",
    "Handle",
    "Handles",
    "SingleRankCollectives",
    "Worker",
    "bytes_of",
    "check_all_agree",
    "close_when_collected",
    "descriptions_if_different",
    "digest_of",
    "first_difference_error",
    "host_collectives",
    "is_same_on_all_ranks",
    "make_collectives",
    "num_collectives",
    "num_private_groups",
    "private_group",
    "ranks_of",
    "second_collectives",
    "shard_collectives",
    "subgroup",
]


def make_collectives(group: ProcessGroup, device: torch.device) -> Collectives:
    """Returns the implementation for the backend that ``group`` uses on ``device``; a group of one rank uses none."""
    if group.size() == 1:
        return SingleRankCollectives(group)
    backend = group._get_backend(device)
    if is_fake(group, device):
        return FakeCollectives(group)
    # A group that was made by hand (ranks that are threads) is not in torch's map: without a store no rank check is
    # possible, and all ranks are assumed to come.
    known = dist.distributed_c10d._world.pg_map.get(group)
    rank_check = RankCheck(known[1], group.rank(), group.size(), backend.options._timeout) if known else None
    # The backend for this device: a group may have gloo for the host and NCCL for the GPU.
    if backend.name() == "gloo":
        if device.type != "cpu":
            raise ValueError(
                f"the process group sends tensors on {device.type} by gloo, which is for host memory: use the device's "
                "own backend (init_process_group('nccl'), or Lightning's process_group_backend='nccl'), or train on "
                "the CPU"
            )
        return GlooCollectives(group, rank_check)
    if device.type == "cpu":
        return BackendCollectives(group, rank_check)
    # A group may also have gloo, which is as good as another group.
    hosts = group if has_gloo(group) else host_group(group, device)
    return BackendCollectives(group, rank_check, HostCollectives(hosts, rank_check))


def second_collectives(every: Collectives, device: torch.device) -> Collectives:
    """Returns collectives on a second group of the same ranks, which do not wait behind those in flight on ``every``.

    Made once for each ``every``, collectively; ``every`` itself for a single rank, or a group that was made by hand.
    Both count as one, since a program starts their collectives in the same order on each rank, and have one watchdog.
    """
    if every.second is None:
        group = private_group(every.group, device) if every.size > 1 else every.group
        if group is every.group:
            return every
        every.second = _like(every, group)
    return every.second


def _like(every: Collectives, group: ProcessGroup) -> Collectives:
    """Returns the same kind of collectives over another group of the same ranks."""
    if isinstance(every, FakeCollectives):
        made: Collectives = FakeCollectives(group)
    elif isinstance(every, BackendCollectives):
        made = BackendCollectives(group, every.rank_check, every.host if every.host is not every else None)
    else:
        made = GlooCollectives(group, every.rank_check)
    made.progress = every.progress
    made.watchdog = every.watchdog
    return made


def close_when_collected(owner: object, every: Collectives, own_group: ProcessGroup | None) -> Callable[[], object]:
    """Ends threads when ``owner`` is collected, or the returned function is called; also groups, if ``own_group`` was
    made for ``every``. Sends nothing, since each rank closes its model by itself, and does nothing at exit, when other
    ranks may still be in a collective."""
    end = weakref.finalize(owner, _end_groups, every, own_group)
    end.atexit = False
    return end


def _end_groups(every: Collectives, own_group: ProcessGroup | None) -> None:
    for collectives in (every.second, every):
        if collectives is not None:
            collectives.close()
    if own_group is not None:
        if every.second is not None:
            destroy_group(every.second.group)
            every.second = None
        destroy_instances(every)
        destroy_group(every.host.group)
        destroy_group(own_group)


def host_collectives() -> Collectives:
    """Makes collectives over all ranks for host memory, on a gloo group of their own. Collective.

    Raises:
        ValueError: if torch.distributed is not initialised.
        CollectiveError: if the hosts cannot connect.
    """
    world = world_group()
    if is_fake(world, torch.device("cpu")):
        return FakeCollectives(world)
    return make_collectives(host_group(world), torch.device("cpu"))
