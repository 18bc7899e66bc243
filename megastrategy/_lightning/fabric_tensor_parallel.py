"""Fabric's mesh of data-parallel ranks and those that share a model, tensor ranks and stages.

Does nothing where every rank is a data-parallel one.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from .._checkpoints.files import trainable_weights
from ..core import DistributedDataParallel
from .fabric_strategy import FabricStrategy, unwrapped
from .meshes import (
    DATA,
    ModelSizes,
    check_precision_of_pipeline,
    empty_init_context,
    give_memory,
    is_on_meta,
    is_pipeline,
    load_weights,
    sampler_ranks,
    whole_weights,
)
from .signature import ALL_REDUCE_OPTION

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class FabricTensorParallelStrategy(FabricStrategy):
    __doc__ = FabricStrategy.__doc__

    def _set_model_sizes(self, sizes: ModelSizes, parallelize_fn: Callable[[Any, DeviceMesh], Module] | None) -> None:
        self._sizes = sizes
        self.tensor_parallel_size = sizes.tensor_parallel_size
        self.pipeline_parallel_size = sizes.pipeline_parallel_size
        if parallelize_fn is not None and sizes.tensor_parallel_size == 1:
            raise ValueError(
                "parallelize_fn is given and tensor_parallel_size is 1: there is nothing to parallelise over. Pass "
                "tensor_parallel_size, or leave parallelize_fn out"
            )
        self._parallelize_fn = parallelize_fn

    @property
    def device_mesh(self) -> DeviceMesh | None:
        """All ranks, as ("pipeline_parallel", "data_parallel", "tensor_parallel") without what has size 1 of the first
        and the last; None where each has all of the model, and before ``fabric.launch()``."""
        return self._device_mesh

    def __getstate__(self) -> dict[str, Any]:
        # A launcher's copy has no processes yet, and makes its own mesh; a copy of a model asks it for nothing.
        return super().__getstate__() | {"_device_mesh": None}

    def setup_environment(self) -> None:
        super().setup_environment()
        self._device_mesh = self._sizes.make_mesh(self.world_size, self.root_device)

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """By data-parallel rank: all ranks that share a model get the same batches."""
        if (mesh := self._device_mesh) is None:
            kwargs: dict[str, Any] = super().distributed_sampler_kwargs
            return kwargs
        return sampler_ranks(mesh)

    # --- setup -------------------------------------------------------------------------------------------------------

    def module_init_context(self, empty_init: bool | None = None) -> AbstractContextManager[Any]:
        if self._parallelize_fn is None or not empty_init:
            context: AbstractContextManager[Any] = super().module_init_context(empty_init)
            return context
        return empty_init_context(self.precision.module_init_context())

    def module_to_device(self, module: Module) -> None:
        if self._parallelize_fn is None or not is_on_meta(module):
            super().module_to_device(module)

    def setup_module(self, module: Module) -> DistributedDataParallel:  # type: ignore[override]
        # A model that is set up already was parallelised when it came first.
        if self._parallelize_fn is not None and not self._models.of([module]):
            assert self._device_mesh is not None, "Fabric launches before it sets a model up"
            module = self._parallelize_fn(module, self._device_mesh)
            if not isinstance(module, Module):
                raise TypeError(f"parallelize_fn returned {type(module).__name__}: expected the module")
            if is_on_meta(module):
                give_memory(module, self.root_device)
        return super().setup_module(module)

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        # parallelize_module puts new Parameters in the place of those that an earlier optimizer holds
        if self._parallelize_fn is not None and self._models.open() and not self._models.owners(optimizer, "set up"):
            raise ValueError(
                f"this {type(optimizer).__name__} has no parameter of a model that was set up, since parallelize_fn "
                "makes new ones. Call model = fabric.setup(module) first, build the optimizer on model.parameters(), "
                "and call fabric.setup_optimizers(optimizer)"
            )
        return super().setup_optimizer(optimizer)

    def _wrap(self, module: Module) -> DistributedDataParallel:
        if (mesh := self._device_mesh) is None:
            return super()._wrap(module)
        if is_pipeline(mesh):
            check_precision_of_pipeline(self.precision.precision)
        group = mesh.get_group(DATA)
        return DistributedDataParallel(module, self.config, process_group=group, all_reduce_option=ALL_REDUCE_OPTION)

    # --- checkpoints -------------------------------------------------------------------------------------------------

    def get_module_state_dict(self, module: Module) -> dict[str, Any | Tensor]:
        """Whole weights, as one process would have them: of a tensor-parallel model on rank 0 alone, and for a
        directory this rank's parts. Collective."""
        if self._device_mesh is None or self.state_dict_type == "sharded":
            return super().get_module_state_dict(module)
        return whole_weights(unwrapped(module), self._device_mesh)

    def load_module_state_dict(self, module: Module, state_dict: dict[str, Any | Tensor], strict: bool = True) -> None:
        if self._device_mesh is None:
            super().load_module_state_dict(module, state_dict, strict)
            return
        load_weights(unwrapped(module), state_dict, strict, self._device_mesh)
        self._load_main_params_of(module, trainable_weights(unwrapped(module), state_dict))
