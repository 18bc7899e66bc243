"""Finds the groups of ranks that share a module: tensor ranks by its DTensors, stages by a StagedModule in it."""

from __future__ import annotations

from collections.abc import Collection

from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from ..config import DistributedDataParallelConfig
from .local_parts import LocalParts, dtensors_of
from .model_parallel import ModelGroup, ModelParallel


class StagedModule(nn.Module):
    """A module that contains some of a model's layers.

    Attributes:
        stage_group: the ranks that have the layers, in any order; None if this rank has all.
        tensor_mesh: the ranks that have parts of the same layers, in one dimension; None if layers are not cut.
        names_elsewhere: the names, in this module, of parameters and buffers that only other ranks have.
    """

    stage_group: ProcessGroup | None = None
    tensor_mesh: DeviceMesh | None = None
    names_elsewhere: Collection[str] = ()

    def make_group(self, module: nn.Module, parts: LocalParts) -> ModelGroup:
        """Returns the ranks that have the layers as a group; ``module`` is this module, or contains it."""
        raise NotImplementedError


def find_staged(module: nn.Module) -> StagedModule | None:
    """Returns the staged module in ``module`` that several ranks share; None if there is none.

    Raises:
        ValueError: if there are two.
    """
    staged = [child for child in module.modules() if isinstance(child, StagedModule) and child.stage_group is not None]
    if len(staged) > 1:
        raise ValueError("there are two pipelines in the module: one schedule is expected, of one chain of layers")
    return staged[0] if staged else None


def names_elsewhere(module: nn.Module) -> frozenset[str]:
    """Returns the names in ``module`` of the parameters and buffers that only other ranks have."""
    return frozenset(
        f"{prefix}.{name}" if prefix else name
        for prefix, child in module.named_modules()
        if isinstance(child, StagedModule)
        for name in child.names_elsewhere
    )


def find_groups(
    module: nn.Module,
    process_group: ProcessGroup | None,
    expert_mesh: DeviceMesh | None,
    config: DistributedDataParallelConfig,
) -> tuple[LocalParts, ModelParallel]:
    """Returns where this rank has the module's parameters, and which ranks share the model with it."""
    staged = find_staged(module)
    parts = LocalParts()
    groups: list[ModelGroup] = []
    if expert_mesh is not None:
        from .experts import ExpertGroup

        if staged is not None:
            raise ValueError("expert_mesh and a pipeline in one model are not supported together")
        experts = ExpertGroup(expert_mesh, process_group, config)
        return experts.parts, ModelParallel([experts])
    mesh = staged.tensor_mesh if staged is not None else None
    if mesh is not None or (staged is None and dtensors_of(module)):
        # Imported here: a model without tensor-parallel parameters does not pay for torch's DTensor.
        from .tensor_parallel import TensorGroup

        groups.append(tensor := TensorGroup(module, process_group, mesh))
        parts = tensor.parts
    if staged is not None:
        groups.append(staged.make_group(module, parts))
    return parts, ModelParallel(groups)
