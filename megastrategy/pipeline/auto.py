"""``split_spec="auto"``: the planner's division for devices of one kind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ..core import dtensors_of
from ..tools.plan.cards import Card
from ..tools.plan.partitions import plan

_PLANNED: Mapping[str, Literal["1f1b", "gpipe"]] = {"1F1B": "1f1b", "GPipe": "gpipe"}
"""The planner's names of torch's schedules."""
_PLENTY = 2**60
"""The bytes of a device whose memory is unknown."""


def planned_split(
    layers: Sequence[nn.Module],
    sample: Tensor | None,
    mesh: DeviceMesh,
    device: torch.device,
    microbatches: int,
    schedule: str,
    keep_together: Sequence[tuple[int, int]],
) -> Sequence[int]:
    """Returns the numbers of layers per stage for the shortest step in the planner's simulation.

    Collective over the stages.

    Args:
        sample: one microbatch of the first layer's argument.
        mesh: the ranks of the stages.
        device: the device of this rank.

    Raises:
        ValueError: if there is no sample, the devices differ, layers are cut, a rank has several stages, or nothing
            fits.
    """
    if sample is None:
        raise ValueError("split_spec='auto' needs a sample, one microbatch of the first layer: pass sample=")
    cut = next(iter(dtensors_of(nn.ModuleList(layers))), None)
    if cut:
        raise ValueError(
            f"split_spec='auto' plans whole layers, and parameter {cut!r} is a DTensor: make the division with "
            "megastrategy.plan before parallelize_module"
        )
    planned = _PLANNED.get(schedule)
    if planned is None:
        raise ValueError(f"split_spec='auto' with schedule={schedule!r}: the planner cuts for one stage a rank")
    memory = _PLENTY
    name = device.type
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        memory = properties.total_memory
        name = properties.name
    every: list[tuple[str, int]] = [("", 0)] * mesh.size()
    dist.all_gather_object(every, (name, memory), group=mesh.get_group())
    if len(set(every)) > 1:
        raise ValueError(
            f"split_spec='auto' is for devices of one kind, and the stages have {', '.join(n for n, _ in every)}: say "
            "what they are to megastrategy.plan(layers, sample, devices=..., microbatches=...), and pass its split_spec"
        )
    # The speed makes no difference for equal devices.
    cards = [Card(name, memory, 1e12)] * mesh.size()
    found = plan(
        layers,
        sample,
        devices=cards,
        microbatches=microbatches,
        keep_together=keep_together,
        schedule=planned,
    )
    return found.split_spec
