"""The mesh of ``expert_parallel_size``, an option of Lightning, Fabric and Accelerate."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch.nn import Module

from .core import dtensors_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

EXPERT = "expert_parallel"
EXPERT_DATA = "expert_data_parallel"
"""The names of the mesh's dimensions: ranks with different experts, and ranks with the same ones."""


def check_divides(sizes: Mapping[str, int], num_ranks: int, way_out: str) -> None:
    """Raises ValueError unless the product of ``sizes``, by option, divides the number of ranks."""
    if num_ranks % math.prod(sizes.values()):
        given = " times ".join(f"{name}={size}" for name, size in sizes.items() if size > 1)
        raise ValueError(f"{given} does not divide the {num_ranks} ranks: choose {way_out} so that it does")


def make_expert_mesh(size: int, num_ranks: int, device_type: str, way_out: str) -> DeviceMesh | None:
    """Returns all ranks as (:data:`EXPERT_DATA`, :data:`EXPERT`), the second with ``size`` neighbours; None if that
    is 1. Collective.

    Raises:
        ValueError: if the ranks cannot be divided so; ``way_out`` names the options that choose their number.
    """
    if size == 1:
        return None
    check_divides({"expert_parallel_size": size}, num_ranks, way_out)
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh(device_type, (num_ranks // size, size), mesh_dim_names=(EXPERT_DATA, EXPERT))


def check_has_experts(module: Module, size: int, owner: str) -> None:
    """Raises ValueError for a module whose experts are not divided. ``owner`` of the mesh, as user code names it."""
    if not dtensors_of(module):
        raise ValueError(
            f"expert_parallel_size={size} and a {type(module).__name__} without divided experts, so that every rank "
            "would train all of them: replace their parameters by nn.Parameter(distribute_tensor(param, "
            f'{owner}.expert_mesh["{EXPERT}"], [Shard(0)]))'
        )
