"""A Trainer's mesh of data-parallel ranks and those that share a model, tensor ranks and stages.

Does nothing where every rank is a data-parallel one.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Module

from .._checkpoints.validation import check_module_state
from ..core import DistributedDataParallel, combine_listeners
from .meshes import (
    DATA,
    ModelSizes,
    bring_to_replicas,
    check_precision_of_pipeline,
    empty_init_context,
    give_memory,
    has_cut_parameters,
    is_loss_parallel,
    is_on_meta,
    is_pipeline,
    load_weights,
    sampler_ranks,
    whole_weights,
)
from .signature import ALL_REDUCE_OPTION
from .trainer_strategy import TrainerStrategy
from .weight_averages import CALLBACK, WholeAverages, is_a

if TYPE_CHECKING:
    import lightning.pytorch as pl
    from torch.distributed.device_mesh import DeviceMesh

_log = logging.getLogger("megastrategy")


class TensorParallelStrategy(TrainerStrategy):
    __doc__ = TrainerStrategy.__doc__

    _whole_averages: WholeAverages | None = None

    def _set_model_sizes(self, sizes: ModelSizes) -> None:
        self._sizes = sizes
        self.tensor_parallel_size = sizes.tensor_parallel_size
        self.pipeline_parallel_size = sizes.pipeline_parallel_size

    @property
    def device_mesh(self) -> DeviceMesh | None:
        """All ranks, as ("pipeline_parallel", "data_parallel", "tensor_parallel") without what has size 1 of the first
        and the last; None where each has all of the model, and before the processes exist."""
        return self._device_mesh

    def setup_environment(self) -> None:
        super().setup_environment()
        self._device_mesh = self._sizes.make_mesh(self.world_size, self.root_device)
        if self._device_mesh is None:
            return
        assert self.lightning_module is not None
        self.lightning_module._device_mesh = self._device_mesh  # which configure_model reads as self.device_mesh

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """By data-parallel rank: all ranks that share a model get the same batches."""
        if (mesh := self._device_mesh) is None:
            kwargs: dict[str, Any] = super().distributed_sampler_kwargs
            return kwargs
        return sampler_ranks(mesh)

    def reduce(self, tensor: Tensor, group: Any = None, reduce_op: Any = "mean") -> Tensor:
        """Reduces over the data-parallel ranks where no group is given: those that share a model have the same samples,
        which a logged sum must count once."""
        if self._device_mesh is None or group is not None:
            return super().reduce(tensor, group, reduce_op)
        self._await_others_of("reduce", tensor, None)
        return super().reduce(tensor, self._device_mesh.get_group(DATA), reduce_op)

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        # trainer.init_module(empty_init=True) enters it
        on_meta = self.tensor_parallel_size > 1 and empty_init
        own = self.precision_plugin.tensor_init_context
        with empty_init_context(own()) if on_meta else super().tensor_init_context(empty_init):
            yield

    def setup(self, trainer: pl.Trainer) -> None:
        # configure_model has cut what was made on meta, so that memory for the parts alone is needed.
        if self._device_mesh is not None and self.model is not None and is_on_meta(self.model):
            give_memory(self.model, self.root_device)
        if self._device_mesh is None or trainer.state.fn == "fit":
            super().setup(trainer)
            return
        # Lightning's own brings rank 0's weights to all ranks here, into parts and layers of theirs that are others.
        assert self.accelerator is not None
        assert self.model is not None
        self.accelerator.setup(trainer)
        self.precision_plugin.convert_module(self.model)
        self.model_to_device()
        bring_to_replicas(self.model, self._device_mesh)
        self.setup_precision_plugin()

    def teardown(self) -> None:
        if self._whole_averages is not None:
            self._whole_averages.close()
            self._whole_averages = None
        # Lightning moves the module to the host here. On meta there is nothing to move, and torch refuses for DTensors
        # that the graph of a failed step still refers to: such an error would hide the user's.
        module = self._lightning_module
        if self._device_mesh is not None and module is not None and (is_on_meta(module) or has_cut_parameters(module)):
            self._lightning_module = None
        try:
            super().teardown()
        finally:
            self._lightning_module = module

    def _setup_model(self, model: Module) -> DistributedDataParallel:  # type: ignore[override]
        if (mesh := self._device_mesh) is None:
            return super()._setup_model(model)
        assert self.lightning_module is not None
        if is_pipeline(mesh):
            self._check_loop_of_pipeline()
        callbacks = self.lightning_module.trainer.callbacks  # type: ignore[attr-defined]
        self._whole_averages = WholeAverages(callbacks, self.lightning_module)
        self.await_others("setup")
        wrapped = DistributedDataParallel(
            model,
            self.config,
            process_group=mesh.get_group(DATA),
            listener=combine_listeners(self._listeners),
            all_reduce_option=ALL_REDUCE_OPTION,
        )
        self._engine = wrapped.engine
        return wrapped

    def _check_loop_of_pipeline(self) -> None:
        """Raises ValueError for what a schedule, whose forward has backwards in it, leaves no room for."""
        assert self.lightning_module is not None
        if (number := self.lightning_module.trainer.accumulate_grad_batches) != 1:
            raise ValueError(
                f"accumulate_grad_batches={number} with a pipeline: its forward begins from zero. Let a batch be "
                f"{number} times as large, and have {number} times as many microbatches"
            )
        check_precision_of_pipeline(self.precision_plugin.precision)
        for callback in self.lightning_module.trainer.callbacks:  # type: ignore[attr-defined]
            if is_a(callback, "WeightAveraging") or is_a(callback, CALLBACK):
                raise ValueError(
                    f"{type(callback).__name__} with a pipeline: its averages in a checkpoint are those of rank 0, "
                    "which has one stage, and those of the other stages would be lost. Average the weights of several "
                    "checkpoints afterwards"
                )

    def backward(self, closure_loss: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        # torch's loss_parallel has to be open in backward too, when training_step has left it. A module's own backward
        # opens it itself, as Lightning's documentation says, and torch cannot open it twice.
        module: Any = self.lightning_module
        opens_itself = type(module).backward.__qualname__ != "LightningModule.backward"
        if self._device_mesh is None or opens_itself or not is_loss_parallel(closure_loss):
            loss: Tensor = super().backward(closure_loss, *args, **kwargs)
            return loss
        from torch.distributed.tensor.parallel import loss_parallel

        with loss_parallel():
            loss = super().backward(closure_loss, *args, **kwargs)
        return loss

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Whole weights, as one process would have them; for a directory this rank's parts. Collective."""
        if self._parts_are_lost():
            return {}
        if self._device_mesh is None or self.state_dict_type == "sharded":
            state: dict[str, Any] = super().lightning_module_state_dict()
            return state
        assert self.lightning_module is not None
        return whole_weights(self.lightning_module, self._device_mesh)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        if self._device_mesh is None:
            super().load_model_state_dict(checkpoint, strict)
            return
        assert self.lightning_module is not None
        check_module_state(self.lightning_module, checkpoint["state_dict"], strict, self._loaded_from)
        load_weights(self.lightning_module, checkpoint["state_dict"], strict, self._device_mesh)

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Returns the whole state on rank 0, and nothing elsewhere; for a directory this rank's part. Collective."""
        if self._parts_are_lost():
            return {}
        state: dict[str, Any] = super().optimizer_state(optimizer)
        is_here = self._device_mesh is None or self.is_global_zero or self.state_dict_type == "sharded"
        return state if is_here else {}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None) -> None:
        if not self._parts_are_lost():
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        _log.error(
            "rank %d: %s was NOT saved after the exception, since ranks share the model, and the parts of others are "
            "out of reach. The checkpoint before it is the last",
            self.global_rank,
            filepath,
        )

    def _parts_are_lost(self) -> bool:
        """Whether an exception may have left ranks of one model in different places, so that none can ask another."""
        return self._device_mesh is not None and self._is_interrupted()
