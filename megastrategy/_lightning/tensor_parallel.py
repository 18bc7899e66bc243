"""A Trainer's mesh of data-parallel and tensor ranks, with Lightning's names for both.

Does nothing where every rank is a data-parallel one.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import Module

from .._checkpoints.validation import check_module_state
from ..core import DistributedDataParallel, one_listener
from .signature import ALL_REDUCE_OPTION
from .trainer_strategy import TrainerStrategy

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_log = logging.getLogger("megastrategy")

DATA, TENSOR = "data_parallel", "tensor_parallel"
"""The names of the mesh's dimensions in Lightning."""


class TensorParallelStrategy(TrainerStrategy):
    __doc__ = TrainerStrategy.__doc__

    _device_mesh: DeviceMesh | None = None

    def _set_tensor_parallel_size(self, size: int) -> None:
        if size < 1:
            raise ValueError(f"tensor_parallel_size={size}: expected at least one rank")
        if size > 1 and self.state_dict_type == "sharded":
            raise ValueError(
                f"tensor_parallel_size={size} contradicts state_dict_type='sharded': a tensor-parallel model is saved "
                "whole. Leave state_dict_type at 'full'"
            )
        self.tensor_parallel_size = size

    @property
    def device_mesh(self) -> DeviceMesh | None:
        """All ranks, as ("data_parallel", "tensor_parallel"); None where ``tensor_parallel_size`` is 1, and before the
        processes exist."""
        return self._device_mesh

    def setup_environment(self) -> None:
        super().setup_environment()
        if self.tensor_parallel_size == 1:
            return
        if self.world_size % self.tensor_parallel_size:
            raise ValueError(
                f"tensor_parallel_size={self.tensor_parallel_size} does not divide the {self.world_size} ranks: choose "
                "devices and num_nodes so that it does"
            )
        from torch.distributed.device_mesh import init_device_mesh

        shape = self.world_size // self.tensor_parallel_size, self.tensor_parallel_size
        self._device_mesh = init_device_mesh(self.root_device.type, shape, mesh_dim_names=(DATA, TENSOR))
        assert self.lightning_module is not None
        self.lightning_module._device_mesh = self._device_mesh  # which configure_model reads as self.device_mesh

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """By data-parallel rank: all ranks of a tensor group get the same batches."""
        if (mesh := self._device_mesh) is None:
            kwargs: dict[str, Any] = super().distributed_sampler_kwargs
            return kwargs
        return {"num_replicas": mesh[DATA].size(), "rank": mesh.get_local_rank(DATA)}

    def _setup_model(self, model: Module) -> DistributedDataParallel:  # type: ignore[override]
        if (mesh := self._device_mesh) is None:
            return super()._setup_model(model)
        self.await_others("setup")
        wrapped = DistributedDataParallel(
            model,
            self.config,
            process_group=mesh.get_group(DATA),
            listener=one_listener(self._listeners),
            all_reduce_option=ALL_REDUCE_OPTION,
        )
        self._engine = wrapped.engine
        return wrapped

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Whole weights, as one process would have them. Collective."""
        if self._parts_are_lost():
            return {}
        if self._device_mesh is None:
            state: dict[str, Any] = super().lightning_module_state_dict()
            return state
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

        assert self.lightning_module is not None
        # On the host, a tensor at a time, and on rank 0 alone.
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        return get_model_state_dict(self.lightning_module, options=options)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        if self._device_mesh is None:
            super().load_model_state_dict(checkpoint, strict)
            return
        from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

        assert self.lightning_module is not None
        check_module_state(self.lightning_module, checkpoint["state_dict"], strict, self._loaded_from)
        options = StateDictOptions(full_state_dict=True, strict=strict)
        set_model_state_dict(self.lightning_module, checkpoint["state_dict"], options=options)

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        return {} if self._parts_are_lost() else super().optimizer_state(optimizer)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None) -> None:
        if not self._parts_are_lost():
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        _log.error(
            "rank %d: %s was NOT saved after the exception, since the model is tensor-parallel, and the parts of other "
            "ranks are out of reach. The checkpoint before it is the last",
            self.global_rank,
            filepath,
        )

    def _parts_are_lost(self) -> bool:
        """Whether an exception may have left the tensor ranks in different places, so that none can ask another."""
        return self._device_mesh is not None and self._is_interrupted()
