"""Every byte that leaves a rank goes through here: the only folder that calls torch.distributed.

``interface`` is what the engine sees; ``backend`` (NCCL and others), ``gloo`` (by way of ``gloo_rings``, in a
``worker``), ``host_staged`` (gloo for tensors on an accelerator), ``single_rank`` and ``instanced`` (an optimizer in
several instances) are what stands behind it.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from .backend import BackendCollectives
from .gloo import GlooCollectives
from .host_staged import HostStagedCollectives
from .interface import Collectives, Handle, Handles
from .process_groups import host_group
from .roll_call import RollCall
from .single_rank import LoneCollectives

__all__ = [
    "BackendCollectives",
    "Collectives",
    "GlooCollectives",
    "Handle",
    "Handles",
    "HostStagedCollectives",
    "LoneCollectives",
    "host_collectives",
    "make_collectives",
]


def make_collectives(group: ProcessGroup, device: torch.device) -> Collectives:
    """The implementation for the backend that ``group`` uses on ``device``; none is used where a rank is alone."""
    if group.size() == 1:
        return LoneCollectives(group)
    backend = group._get_backend(device)
    # A group that was made by hand (ranks that are threads) is not in torch's map: no store, so no roll call, and all
    # ranks are taken to come.
    known = dist.distributed_c10d._world.pg_map.get(group)
    roll_call = RollCall(known[1], group.rank(), group.size(), backend.options._timeout) if known is not None else None
    # Asked of the backend for this device: a group may have gloo for the host and NCCL for the GPU.
    if backend.name() != "gloo":
        return BackendCollectives(group, roll_call)
    host = GlooCollectives(group, roll_call)
    return host if device.type == "cpu" else HostStagedCollectives(host, device)


def host_collectives() -> Collectives:
    """Makes collectives over all ranks, on a gloo group of their own, for what is in host memory. Collective.

    Raises:
        ValueError: if torch.distributed is not initialised.
    """
    return make_collectives(host_group(), torch.device("cpu"))
