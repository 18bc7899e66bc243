"""A mesh of data-parallel ranks and those that share a model, tensor ranks and stages, with Lightning's names, for a
Trainer and for Fabric."""

from __future__ import annotations

import dataclasses
import itertools
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor
from torch.nn import Module

from .._checkpoints.not_tensors import NOT_TENSORS, not_tensors
from ..core import cut_state, materialise

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

DATA, TENSOR, PIPELINE = "data_parallel", "tensor_parallel", "pipeline_parallel"
"""The names of the mesh's dimensions; Lightning has the first two."""


@dataclasses.dataclass(frozen=True)
class ModelSizes:
    """The number of ranks that share a model.

    Args:
        tensor_parallel_size, pipeline_parallel_size: the number of ranks that have parts of each layer, and of those
            that have layers of their own.
        stage_order: by stage, which of the ``pipeline_parallel_size`` blocks of consecutive ranks has it; None for one
            after the other.

    Raises:
        ValueError: for what is no size or order, by name.
    """

    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    stage_order: Sequence[int] | None = None

    def __post_init__(self) -> None:
        tensor, pipeline = self.tensor_parallel_size, self.pipeline_parallel_size
        for name, size in (("tensor_parallel_size", tensor), ("pipeline_parallel_size", pipeline)):
            if size < 1:
                raise ValueError(f"{name}={size}: expected at least one rank")
        if self.stage_order is not None and sorted(self.stage_order) != list(range(pipeline)):
            raise ValueError(
                f"stage_order={list(self.stage_order)}: expected each number from 0 to {pipeline - 1} once, of "
                f"pipeline_parallel_size={pipeline} blocks of ranks"
            )

    def make_mesh(self, world_size: int, device: torch.device) -> DeviceMesh | None:
        """All ranks, as (:data:`PIPELINE`, :data:`DATA`, :data:`TENSOR`) without the first or the last where its size
        is 1; None where each is a data-parallel one. Collective.

        Raises:
            ValueError: if the ranks cannot be divided so.
        """
        tensor, pipeline = self.tensor_parallel_size, self.pipeline_parallel_size
        if tensor * pipeline == 1:
            return None
        if world_size % (tensor * pipeline):
            sizes = {"tensor_parallel_size": tensor, "pipeline_parallel_size": pipeline}
            given = " times ".join(f"{name}={size}" for name, size in sizes.items() if size > 1)
            raise ValueError(
                f"{given} does not divide the {world_size} ranks: choose devices and num_nodes so that it does"
            )
        from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

        if pipeline == 1:
            return init_device_mesh(device.type, (world_size // tensor, tensor), mesh_dim_names=(DATA, TENSOR))
        # As Megatron-LM has it: tensor ranks, which speak most, are neighbours, and stages are farthest apart.
        blocks = torch.arange(world_size, device="cpu").view(pipeline, -1, tensor)[
            list(self.stage_order or range(pipeline))
        ]
        if tensor == 1:
            return DeviceMesh(device.type, blocks.squeeze(2), mesh_dim_names=(PIPELINE, DATA))
        return DeviceMesh(device.type, blocks, mesh_dim_names=(PIPELINE, DATA, TENSOR))


def sampler_ranks(mesh: DeviceMesh) -> dict[str, int]:
    """Says which part of the data this rank gets: all ranks that share a model get the same batches."""
    return {"num_replicas": mesh[DATA].size(), "rank": mesh.get_local_rank(DATA)}


def bring_to_replicas(module: Module, mesh: DeviceMesh) -> None:
    """Parameters and buffers become those of the first data-parallel rank, and what tensor ranks have whole the first
    one's of these. Collective."""
    for tensor in (*module.parameters(), *module.buffers()):
        part = getattr(tensor, "_local_tensor", tensor).detach()
        is_cut = any(placement.is_shard() for placement in getattr(tensor, "placements", ()))
        has_tensor_ranks = TENSOR in (mesh.mesh_dim_names or ())
        names = [TENSOR, DATA] if has_tensor_ranks and not is_cut else [DATA]
        for name in names:
            torch.distributed.broadcast(part, group=mesh.get_group(name), group_src=0)


def is_first_replica(mesh: DeviceMesh | None, rank: int) -> bool:
    """Whether a rank has the first replica of what it has of the model, and so writes what data-parallel ranks may have
    otherwise, as buffers."""
    if mesh is None:
        return rank == 0
    return not any(mesh.get_local_rank(name) for name in mesh.mesh_dim_names or () if name != PIPELINE)


def all_not_tensors(weights: Mapping[str, Mapping[str, Any]], mesh: DeviceMesh | None) -> dict[str, Any]:
    """As :func:`not_tensors`, of all stages. Collective over them."""
    found = not_tensors(weights)
    if mesh is None or not is_pipeline(mesh):
        return found
    every: list[Any] = [None] * mesh[PIPELINE].size()
    torch.distributed.all_gather_object(every, found, group=mesh.get_group(PIPELINE))
    joined: dict[str, dict[str, Any]] = {}
    for by_key in (theirs.get(NOT_TENSORS, {}) for theirs in every):
        for key, values in by_key.items():
            joined.setdefault(key, {}).update(values)
    return {NOT_TENSORS: joined} if joined else {}


def check_precision_of_pipeline(precision: str) -> None:
    """Raises ValueError for a precision whose losses are scaled when a schedule's backwards are over."""
    if precision == "16-mixed":
        raise ValueError(
            "precision='16-mixed' with a pipeline: losses are scaled after the forward, when its backwards are over, "
            "so that small gradients would be lost. Choose 'bf16-mixed'"
        )


def is_pipeline(mesh: DeviceMesh) -> bool:
    """Whether its ranks share a model by layers."""
    return PIPELINE in (mesh.mesh_dim_names or ())


def whole_weights(module: Module, mesh: DeviceMesh) -> dict[str, Any]:
    """The state of the module as one process would have it, on the host of rank 0; empty on the others. Collective."""
    if is_pipeline(mesh):
        from ..pipeline import whole_state_dict

        # The other data-parallel ranks' stages have the same.
        return whole_state_dict(module) if mesh.get_local_rank(DATA) == 0 else {}
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    # A tensor at a time, and on rank 0 alone.
    return get_model_state_dict(module, options=StateDictOptions(full_state_dict=True, cpu_offload=True))


def load_weights(module: Module, weights: Mapping[str, Any], strict: bool, mesh: DeviceMesh) -> None:
    """Loads whole weights, of which each rank takes its parts, and what a rank has read its part of alone."""
    if is_pipeline(mesh):
        from ..pipeline import load_whole_state_dict

        load_whole_state_dict(module, weights, strict)
        return
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    set_model_state_dict(module, cut_state(module, weights), options=StateDictOptions(strict=strict))


@contextmanager
def empty_init_context(precision: AbstractContextManager[Any]) -> Iterator[None]:
    """Makes what is made in it on meta: a model that no device has room for gets memory once it is cut, as under
    Lightning's ModelParallelStrategy. ``precision``: the plugin's context."""
    with torch.device("meta"), precision:
        yield


def is_on_meta(module: Module) -> bool:
    """Whether a parameter or buffer of the module has no memory yet."""
    return any(tensor.is_meta for tensor in itertools.chain(module.parameters(), module.buffers()))


def has_cut_parameters(module: Module) -> bool:
    """Whether a parameter of the module is a DTensor."""
    return any(hasattr(param, "placements") for param in module.parameters())


def give_memory(module: Module, device: torch.device) -> None:
    """Gives what is on meta memory; warns of classes that cannot give it values."""
    if without := materialise(module, device):
        rank_zero_warn(
            f"{', '.join(without)} have no reset_parameters() method: their parameters and buffers, made on meta, have "
            "memory and no values now. Load or set them before training"
        )


_NEAR = 200
"""Nodes of a graph that are looked at: losses are near its end, and a walk over all of a large one takes long."""


def is_loss_parallel(loss: Tensor) -> bool:
    """Whether torch's ``loss_parallel`` was open where this loss was computed, so that backward needs it too.

    Only then are the logits of a cross entropy cut along their classes; without it DTensor makes them whole first.
    """
    pending, seen = deque([loss.grad_fn]), set[Any]()
    while pending and len(seen) < _NEAR:
        node = pending.popleft()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name() in ("NllLossBackward0", "NllLoss2DBackward0"):
            logits = node._saved_self  # type: ignore[attr-defined]
            classes = 1 if logits.dim() > 1 else 0
            placements = getattr(logits, "placements", ())
            if any(placement.is_shard(classes) for placement in placements):
                return True
        pending.extend(child for child, _ in node.next_functions)
    return False
