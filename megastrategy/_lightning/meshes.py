"""Ranks that share a model or a sequence, beside data-parallel ranks: the meshes of a Trainer and of Fabric, with
Lightning's names."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch.distributed import ProcessGroup
from torch.nn import Module

from .._checkpoints.not_tensors import NOT_TENSORS, not_tensors
from .._expert_mesh import EXPERT_DATA, check_divides, check_has_experts, make_expert_mesh
from .._faults.process_collectives import engine_collectives
from .._replicas import Replicas
from ..core import DistributedDataParallelConfig, check_expert_options, cut_state, materialise
from .callbacks import is_a

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

DATA = "data_parallel"
TENSOR = "tensor_parallel"
PIPELINE = "pipeline_parallel"
CONTEXT = "context_parallel"
"""The names of the mesh's dimensions; Lightning has the first two."""

_WAY_OUT = "devices and num_nodes"


class ModelMesh:
    """The ranks of one strategy. A copy has no processes yet, and so no mesh.

    Args:
        tensor_parallel_size: the number of ranks that have parts of each layer.
        pipeline_parallel_size: the number of ranks that have different layers.
        stage_order: by stage, which of the ``pipeline_parallel_size`` blocks of consecutive ranks has it; None for
            ascending order.
        context_parallel_size: the number of ranks that have parts of each sequence.
        expert_parallel_size: the number of data-parallel and context ranks that have different experts.

    Attributes:
        mesh: all ranks, as (:data:`PIPELINE`, :data:`DATA`, :data:`CONTEXT`, :data:`TENSOR`) without those whose size
            is 1, except :data:`DATA`; None where every rank is a data-parallel rank, and before :meth:`make`.
        expert_mesh: all ranks, see :func:`~megastrategy._expert_mesh.make_expert_mesh`; None without experts.
        data_group: the ranks that reduce gradients, data-parallel times context ranks; None for all.
        shares_model: whether ranks have different parts of the model.

    Raises:
        ValueError: for an invalid size or order, or sizes that cannot be combined, by name.
    """

    def __init__(
        self,
        tensor_parallel_size: int = 1,
        pipeline_parallel_size: int = 1,
        stage_order: Sequence[int] | None = None,
        context_parallel_size: int = 1,
        expert_parallel_size: int = 1,
    ) -> None:
        self._sizes = {
            "tensor_parallel_size": tensor_parallel_size,
            "pipeline_parallel_size": pipeline_parallel_size,
            "context_parallel_size": context_parallel_size,
        }
        self._stage_order = stage_order
        self._num_parts = expert_parallel_size
        self._forget()
        for name, size in (self._sizes | {"expert_parallel_size": expert_parallel_size}).items():
            if size < 1:
                raise ValueError(f"{name}={size}: expected at least one rank")
            if expert_parallel_size > 1 and size > 1 and name in ("tensor_parallel_size", "pipeline_parallel_size"):
                raise ValueError(
                    f"expert_parallel_size={expert_parallel_size} and {name}={size} are not supported together: leave "
                    "one of them at 1"
                )
        if stage_order is not None and sorted(stage_order) != list(range(pipeline_parallel_size)):
            raise ValueError(
                f"stage_order={list(stage_order)}: expected each number from 0 to {pipeline_parallel_size - 1} once, "
                f"of pipeline_parallel_size={pipeline_parallel_size} blocks of ranks"
            )

    def __reduce__(self) -> tuple[Any, ...]:
        tensor, pipeline, context = self._sizes.values()
        return type(self), (tensor, pipeline, self._stage_order, context, self._num_parts)

    def _forget(self) -> None:
        self.mesh: DeviceMesh | None = None
        self.expert_mesh: DeviceMesh | None = None
        self.data_group: ProcessGroup | None = None
        self.shares_model = False

    def make(self, world_size: int, device: torch.device, module: Any = None) -> None:
        """Makes the meshes of ``world_size`` ranks, for a LightningModule as its ``device_mesh``. Collective.

        Raises:
            ValueError: if the ranks cannot be divided so.
        """
        self._forget()
        tensor, pipeline, context = self._sizes.values()
        check_divides(self._sizes, world_size, _WAY_OUT)
        self.expert_mesh = make_expert_mesh(self._num_parts, world_size, device.type, _WAY_OUT)
        self.shares_model = tensor * pipeline * self._num_parts > 1
        if tensor * pipeline * context == 1:
            return
        from torch.distributed.device_mesh import DeviceMesh

        # As in Megatron-LM: tensor ranks, which communicate most, are neighbours, and stages are farthest apart.
        ranks = torch.arange(world_size, device="cpu").view(pipeline, -1, context, tensor)
        ranks = ranks[list(self._stage_order or range(pipeline))]
        dims = {PIPELINE: pipeline, DATA: 0, CONTEXT: context, TENSOR: tensor}
        left_out = [dim for dim, size in enumerate(dims.values()) if size == 1]
        names = tuple(name for name, size in dims.items() if size != 1)
        self.mesh = DeviceMesh(device.type, ranks.squeeze(left_out), mesh_dim_names=names)
        if module is not None:
            module._device_mesh = self.mesh  # which configure_model reads as self.device_mesh
        if tensor * pipeline > 1:
            self.data_group = self.mesh.get_group(DATA)
            if context > 1:
                groups = ranks.permute(0, 3, 1, 2).reshape(pipeline * tensor, -1).tolist()
                self.data_group, _ = torch.distributed.new_subgroups_by_enumeration(groups)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the dimensions of :attr:`mesh`."""
        return () if self.mesh is None else self.mesh.mesh_dim_names or ()

    @property
    def is_pipeline(self) -> bool:
        """Whether ranks share the model by layers."""
        return PIPELINE in self.names

    @property
    def cuts_layers(self) -> bool:
        """Whether ``configure_model`` leaves a rank parts of layers only."""
        return self._sizes["tensor_parallel_size"] * self._num_parts > 1

    def checked(self, config: DistributedDataParallelConfig) -> DistributedDataParallelConfig:
        """Returns the options. Raises ValueError for some that do not work with divided experts."""
        if self._num_parts > 1:
            check_expert_options(config, "expert_parallel_size")
        return config

    def checked_replicas(self, replicas: Replicas | None) -> Replicas | None:
        """Returns the replicas. Raises ValueError for ranks that share a model or a sequence."""
        sizes = self._sizes | {"expert_parallel_size": self._num_parts}
        for name, size in sizes.items():
            if replicas is not None and size > 1:
                raise ValueError(f"replicas= and {name}={size} are not supported together: leave one of them out")
        return replicas

    def engine_ranks(self, module: Module, device: torch.device, *, agreed: bool = False) -> dict[str, Any]:
        """Returns the arguments of DistributedDataParallel that say which ranks reduce gradients. Collective.

        ``agreed``: see :func:`~megastrategy._faults.process_collectives.engine_collectives`.

        Raises:
            ValueError: if the experts of ``module`` should be divided, and are not.
        """
        if self.data_group is not None:
            return {"process_group": self.data_group}
        if self.expert_mesh is not None:
            check_has_experts(module, self._num_parts, "strategy")
        return {"collectives": engine_collectives(device, agreed=agreed), "expert_mesh": self.expert_mesh}

    def sampler_ranks(self) -> dict[str, int] | None:
        """Says which part of the data this rank gets: all ranks that share a model or a sequence get the same batches.
        None where no ranks do."""
        if self.mesh is None:
            return None
        return {"num_replicas": self.mesh[DATA].size(), "rank": self.mesh.get_local_rank(DATA)}

    def broadcast_state(self, module: Module) -> None:
        """Sends parameters and buffers from the first rank to the others that have the same. Collective."""
        for tensor in (*module.parameters(), *module.buffers()):
            part = getattr(tensor, "_local_tensor", tensor).detach()
            is_cut = any(placement.is_shard() for placement in getattr(tensor, "placements", ()))
            for group in self._groups_with_same(is_cut):
                torch.distributed.broadcast(part, group=group, group_src=0)

    def _groups_with_same(self, is_cut: bool) -> list[ProcessGroup | None]:
        if self.expert_mesh is not None:
            return [self.expert_mesh.get_group(EXPERT_DATA) if is_cut else None]
        if self.mesh is None or TENSOR not in self.names or is_cut:
            return [self.data_group]
        return [self.mesh.get_group(TENSOR), self.data_group]

    def set_up_evaluation(self, strategy: Any) -> None:
        """Does the rest of ``Strategy.setup`` where no model is wrapped. Collective.

        Lightning's own would send rank 0's weights to all ranks here, into other ranks' parts and layers.
        """
        strategy.precision_plugin.convert_module(strategy.model)
        strategy.model_to_device()
        self.broadcast_state(strategy.model)
        strategy.setup_precision_plugin()

    def is_first_replica(self, rank: int) -> bool:
        """Whether a rank has the first replica of its part of the model. It then saves values that may differ between
        data-parallel ranks, such as buffers."""
        if self.mesh is None:
            return rank == 0
        return not any(self.mesh.get_local_rank(name) for name in self.names if name != PIPELINE)

    def not_tensors(self, weights: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        """Returns the values that are no tensors, of all stages; see :func:`not_tensors`. Collective over them."""
        of_stage = not_tensors(weights)
        if self.mesh is None or not self.is_pipeline:
            return of_stage
        of_stages: list[Any] = [None] * self.mesh[PIPELINE].size()
        torch.distributed.all_gather_object(of_stages, of_stage, group=self.mesh.get_group(PIPELINE))
        joined: dict[str, dict[str, Any]] = {}
        for by_key in (stage.get(NOT_TENSORS, {}) for stage in of_stages):
            for key, values in by_key.items():
                joined.setdefault(key, {}).update(values)
        return {NOT_TENSORS: joined} if joined else {}

    def check_precision(self, precision: str) -> None:
        """Raises ValueError for a precision that scales the loss after a pipeline's backwards."""
        if self.is_pipeline and precision == "16-mixed":
            raise ValueError(
                "precision='16-mixed' with a pipeline: losses are scaled after the forward, when its backwards are "
                "over, so that small gradients would be lost. Choose 'bf16-mixed'"
            )

    def full_weights(self, module: Module) -> dict[str, Any]:
        """Returns the state that one process would have, on the host of rank 0; empty on other ranks. Collective."""
        if self.is_pipeline:
            from ..pipeline import whole_state_dict

            # The other data-parallel ranks' stages have the same.
            return whole_state_dict(module) if torch.distributed.get_rank(self.data_group) == 0 else {}
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

        # A tensor at a time, and on rank 0 only.
        return get_model_state_dict(module, options=StateDictOptions(full_state_dict=True, cpu_offload=True))

    def load_weights(self, module: Module, weights: Mapping[str, Any], strict: bool) -> None:
        """Loads this rank's parts of full weights; parts that this rank has read already are loaded as they are."""
        if self.is_pipeline:
            from ..pipeline import load_whole_state_dict

            load_whole_state_dict(module, weights, strict)
            return
        from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

        set_model_state_dict(module, cut_state(module, weights), options=StateDictOptions(strict=strict))


def check_trainer(mesh: ModelMesh, trainer: Any, precision: str) -> None:
    """Raises ValueError for settings of a Trainer that do not work where ranks share a model."""
    mesh.check_precision(precision)
    averaging = ("StochasticWeightAveraging", "WeightAveraging") if mesh.is_pipeline else ("StochasticWeightAveraging",)
    for callback in trainer.callbacks:
        if any(is_a(callback, name) for name in averaging):
            way_out = "Average" if mesh.is_pipeline else "Use WeightAveraging, or average"
            raise ValueError(
                f"{type(callback).__name__} with ranks that share a model: its averages in a checkpoint would lack "
                f"other ranks' parts, and Lightning refuses it for sharded models, too. {way_out} the weights of "
                "several checkpoints afterwards"
            )
    number = trainer.accumulate_grad_batches
    if mesh.is_pipeline and number != 1:
        raise ValueError(
            f"accumulate_grad_batches={number} with a pipeline: its forward begins from zero. Let a batch be "
            f"{number} times as large, and have {number} times as many microbatches"
        )


@contextmanager
def empty_init_context(precision: AbstractContextManager[Any]) -> Iterator[None]:
    """Builds modules on meta: a model too large for a device gets memory after it is cut, as under Lightning's
    ModelParallelStrategy. ``precision``: the plugin's context."""
    with torch.device("meta"), precision:
        yield


def is_on_meta(module: Module) -> bool:
    """Whether a parameter or buffer of the module has no memory yet."""
    return any(tensor.is_meta for tensor in itertools.chain(module.parameters(), module.buffers()))


@contextmanager
def leave_in_place(strategy: Any, shares_model: bool) -> Iterator[None]:
    """Keeps a teardown from moving a module to the host that is on meta or has DTensors.

    On meta there is nothing to move, and torch refuses for DTensors that the graph of a failed step still refers to:
    such an error would hide the user's.
    """
    module = strategy._lightning_module
    if module is not None and shares_model:
        is_cut = any(hasattr(param, "placements") for param in module.parameters())
        strategy._lightning_module = None if is_cut or is_on_meta(module) else module
    try:
        yield
    finally:
        strategy._lightning_module = module


def allocate(module: Module, device: torch.device) -> None:
    """Allocates parameters and buffers that are on meta; warns of classes that cannot initialise them."""
    without = materialise(module, device)
    if without:
        rank_zero_warn(
            f"{', '.join(without)} have no reset_parameters() method: their parameters and buffers, made on meta, have "
            "memory and no values now. Load or set them before training"
        )
