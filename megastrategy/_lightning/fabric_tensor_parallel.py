"""Fabric's mesh of data-parallel and tensor ranks, with Lightning's names for both.

Does nothing where every rank is a data-parallel one.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import TYPE_CHECKING, Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from .._checkpoints.files import trainable_weights
from ..core import DistributedDataParallel
from .fabric_strategy import FabricStrategy, unwrapped
from .meshes import DATA, check_tensor_parallel_size, load_weights, make_mesh, sampler_ranks, whole_weights
from .signature import ALL_REDUCE_OPTION

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class FabricTensorParallelStrategy(FabricStrategy):
    __doc__ = FabricStrategy.__doc__

    _device_mesh: DeviceMesh | None = None

    def _set_tensor_parallel(self, size: int, parallelize_fn: Callable[[Any, DeviceMesh], Module] | None) -> None:
        self.tensor_parallel_size = check_tensor_parallel_size(size)
        if parallelize_fn is not None and size == 1:
            raise ValueError(
                "parallelize_fn is given and tensor_parallel_size is 1: there is nothing to parallelise over. Pass "
                "tensor_parallel_size, or leave parallelize_fn out"
            )
        self._parallelize_fn = parallelize_fn

    @property
    def device_mesh(self) -> DeviceMesh | None:
        """All ranks, as ("data_parallel", "tensor_parallel"); None where ``tensor_parallel_size`` is 1, and before
        ``fabric.launch()``."""
        return self._device_mesh

    def __getstate__(self) -> dict[str, Any]:
        # A launcher's copy has no processes yet, and makes its own mesh; a copy of a model asks it for nothing.
        return super().__getstate__() | {"_device_mesh": None}

    def setup_environment(self) -> None:
        super().setup_environment()
        self._device_mesh = make_mesh(self.world_size, self.tensor_parallel_size, self.root_device)

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """By data-parallel rank: all ranks of a tensor group get the same batches."""
        if (mesh := self._device_mesh) is None:
            kwargs: dict[str, Any] = super().distributed_sampler_kwargs
            return kwargs
        return sampler_ranks(mesh)

    # --- setup -------------------------------------------------------------------------------------------------------

    def module_init_context(self, empty_init: bool | None = None) -> AbstractContextManager[Any]:
        if self._parallelize_fn is None or not empty_init:
            context: AbstractContextManager[Any] = super().module_init_context(empty_init)
            return context
        # A model that no device has room for gets memory once it is cut, as under ModelParallelStrategy.
        stack = ExitStack()
        stack.enter_context(torch.device("meta"))
        stack.enter_context(self.precision.module_init_context())
        return stack

    def module_to_device(self, module: Module) -> None:
        if self._parallelize_fn is None or not _is_on_meta(module):
            super().module_to_device(module)

    def setup_module(self, module: Module) -> DistributedDataParallel:  # type: ignore[override]
        # A model that is set up already was parallelised when it came first.
        if self._parallelize_fn is not None and not self._models.of([module]):
            assert self._device_mesh is not None, "Fabric launches before it sets a model up"
            module = self._parallelize_fn(module, self._device_mesh)
            if not isinstance(module, Module):
                raise TypeError(f"parallelize_fn returned {type(module).__name__}: expected the module")
            if _is_on_meta(module):
                _materialise(module, self.root_device)
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
        group = mesh.get_group(DATA)
        return DistributedDataParallel(module, self.config, process_group=group, all_reduce_option=ALL_REDUCE_OPTION)

    # --- checkpoints -------------------------------------------------------------------------------------------------

    def get_module_state_dict(self, module: Module) -> dict[str, Any | Tensor]:
        """Whole weights, as one process would have them: of a tensor-parallel model on rank 0 alone, and for a
        directory this rank's parts. Collective."""
        if self._device_mesh is None or self.state_dict_type == "sharded":
            return super().get_module_state_dict(module)
        return whole_weights(unwrapped(module))

    def load_module_state_dict(self, module: Module, state_dict: dict[str, Any | Tensor], strict: bool = True) -> None:
        if self._device_mesh is None:
            super().load_module_state_dict(module, state_dict, strict)
            return
        load_weights(unwrapped(module), state_dict, strict)
        self._load_main_params_of(module, trainable_weights(unwrapped(module), state_dict))


def _is_on_meta(module: Module) -> bool:
    return any(tensor.is_meta for tensor in itertools.chain(module.parameters(), module.buffers()))


def _materialise(module: Module, device: torch.device) -> None:
    """Gives a module on meta memory, and the values that ``reset_parameters`` of its submodules chooses."""
    module.to_empty(device=device)
    without = set[str]()
    for child in module.modules():
        own = itertools.chain(child.parameters(recurse=False), child.buffers(recurse=False))
        if next(own, None) is None:
            continue
        if callable(reset := getattr(child, "reset_parameters", None)):
            reset()
        else:
            without.add(type(child).__name__)
    if without:
        rank_zero_warn(
            f"{', '.join(sorted(without))} have no reset_parameters() method: their parameters and buffers, made on "
            "meta, have memory and no values now. Load or set them before training"
        )
