"""Experts that are divided over some of the data-parallel ranks: DTensors on a mesh inside of these.

[Note: gradients of experts]
Each data-parallel rank has a batch of its own. The all-to-all of user code brings an expert the tokens of all ranks of
its expert group, and their gradients come back with them, so a local gradient is a sum over the losses of these ranks.
Ranks with the same experts are one group of a :class:`~..layout.Domain`: their gradients are added up, and divided by
the number of *all* data-parallel ranks, whose losses are in the sum. With shards every element, an expert's too, has
one owner among all data-parallel ranks, so norms and counts need nothing. Without shards, ranks with different experts
join theirs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from ..collectives import Collectives, ranks_of
from ..config import DistributedDataParallelConfig, check_expert_options
from ..layout import Domain, domain_of_all
from .local_parts import dtensors_of
from .tensor_parallel import PartsGroup

_WAY_OUT = (
    'Make it as init_device_mesh(device_type, (dp // ep, ep), mesh_dim_names=("edp", "ep")) and distribute experts '
    'over mesh["ep"]: distribute_tensor(experts, mesh["ep"], [Shard(0)]). With expert_parallel_size, an option of '
    'Lightning, Fabric and Accelerate, expert_mesh["expert_parallel"] of the strategy or the Accelerator is ready'
)


class ExpertGroup(PartsGroup):
    """The ranks that have different experts of the same layers.

    Args:
        mesh: of two dimensions: ranks with the same experts, and ranks with different ones.
        process_group: the data-parallel ranks; None for all.

    Raises:
        ValueError: if the mesh is not of the data-parallel ranks.
    """

    rank_name = "expert rank"
    kind_of_parts = "a stack of experts that ranks divide"

    def __init__(
        self, mesh: DeviceMesh, process_group: ProcessGroup | None, config: DistributedDataParallelConfig
    ) -> None:
        if mesh.ndim != 2 or mesh.mesh_dim_names is None:
            raise ValueError(f"expert_mesh is {mesh}: two dimensions with names are expected. {_WAY_OUT}")
        super().__init__(mesh[mesh.mesh_dim_names[1]])
        dp_ranks = list(ranks_of(process_group))
        mesh_ranks = mesh.mesh.flatten().tolist()
        if sorted(dp_ranks) != sorted(mesh_ranks):
            raise ValueError(
                f"expert_mesh has the ranks {sorted(mesh_ranks)}, and the data-parallel ranks are {sorted(dp_ranks)}. "
                f"{_WAY_OUT}"
            )
        check_expert_options(config, "expert_mesh")
        numbers = {rank: number for number, rank in enumerate(dp_ranks)}
        groups = tuple(tuple(sorted(numbers[rank] for rank in ranks)) for ranks in mesh.mesh.T.tolist())
        rows = [[numbers[rank] for rank in ranks] for ranks in mesh.mesh.tolist()]
        self._saving = next(row for row in rows if 0 in row)  # rank 0 gets the parts of its own expert group
        every = domain_of_all(config, len(dp_ranks))
        self._domain = every.divided(groups)
        self._is_sharded = every.num_shards > 1

    def domain_of(self, param: Tensor) -> Domain | None:
        return self._domain if self.parts.is_cut(param) else None

    def connect(self, device: torch.device) -> None:
        super().connect(device)
        if not self._is_sharded:  # otherwise each element has one owner among all data-parallel ranks
            self.ranks = self.part_ranks

    def before_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Nothing: each rank has a batch of its own."""

    def saves_parts(self, collectives: Collectives) -> bool:
        return collectives.rank in self._saving

    def check(self, module: nn.Module) -> None:
        for name, buffer in module.named_buffers():
            if isinstance(buffer, DTensor):
                raise ValueError(
                    f"buffer {name!r} is a DTensor, and buffers become rank 0's before each forward. Register it as a "
                    "plain tensor with a value for each expert of the model, the same on all ranks"
                )
        divided = dtensors_of(module)
        if not divided:
            raise ValueError(
                f"expert_mesh and a {type(module).__name__} without divided experts, so that every rank would train "
                f"all of them: leave it out, or divide them. {_WAY_OUT}"
            )
        for name, param in divided.items():
            if param.device_mesh != self._mesh or type(param.placements[0]) is not Shard:
                raise ValueError(
                    f"parameter {name!r} is a DTensor ({', '.join(map(repr, param.placements))} on a mesh of "
                    f"{' x '.join(map(str, param.device_mesh.shape))}). With expert_mesh only experts are: tensor "
                    f"parallelism beside it is not supported. {_WAY_OUT}"
                )

    def replica_name(self, name: str, param: Tensor) -> str:
        """Returns the name under which ranks compare their values: expert ranks have different ones."""
        return f"{name}, part {self._mesh.get_local_rank()}" if self.parts.is_cut(param) else name
