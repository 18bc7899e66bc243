"""The door to Fabric: translates its calls into the engine's, and computes nothing.

``lightning.fabric`` and ``lightning_fabric`` are the same code in two packages whose classes do not know each other.
This module imports neither: :mod:`megastrategy.fabric` and :mod:`megastrategy.lightning_fabric` put the class before
their package's ``DDPStrategy``.

[Note: why Fabric's strategy holds weak references]
A Fabric has no end: models and optimizers are set up at any time and dropped when the user drops them. So the strategy
finds the model of an optimizer and the sharded optimizer around a user's own by weak references.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Unpack, cast

import torch
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.distributed.constants import default_pg_timeout
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from .._checkpoints.directories import (
    OptimizerInDirectory,
    StateDictType,
    check_state_dict_type,
    existing_directory,
    load_extra,
    refuse_storage_options,
    written_by,
)
from .._checkpoints.directory_writer import save_directory
from .._checkpoints.files import trainable_weights, unmapped_copy
from .._checkpoints.foreign import describe_value
from .._checkpoints.not_tensors import MAIN_PARAMS_KEY, NOT_TENSORS
from .._faults.process_collectives import checkpoint_collectives, enter_barrier
from .._prepared_models import PreparedModels
from .._replicas import Replicas
from .._unsharded_optimizers import UnshardedOptimizers
from ..core import (
    CheckpointError,
    Directory,
    DistributedDataParallel,
    DistributedDataParallelConfig,
    DistributedOptimizer,
    OpenDirectory,
    adapt_scaler,
    announce_tokens,
    forget_announced,
    names_elsewhere,
    place_at,
)
from ..data import sampler_of
from .launchers import refuse_notebook
from .meshes import ModelMesh, allocate, empty_init_context, is_on_meta
from .signature import ALL_REDUCE_OPTION, NO_SCALER, StrategyOptions, read_options

if TYPE_CHECKING:
    from lightning.fabric.accelerators.accelerator import Accelerator
    from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment, Precision
    from lightning.fabric.strategies.ddp import DDPStrategy as _Base
    from torch.distributed.device_mesh import DeviceMesh
else:
    _Base = object  # each of two packages puts its own there

_SAVE_ON_ALL_RANKS = "Call fabric.save(...) on every rank, not under `if fabric.is_global_zero:`: rank 0 writes"


def forgetting(backward: Callable[..., None]) -> Callable[..., None]:
    """Makes a strategy's ``backward`` forget the tokens of a loss that has not reached some of several models.

    Fabric compares the function with its own, and would refuse ``loss.backward()``, which "ddp" allows, with another.
    """

    @functools.wraps(backward)
    def run_and_forget(self: FabricStrategy, tensor: Tensor, *args: Any, **kwargs: Any) -> None:
        backward(self, tensor, *args, **kwargs)
        forget_announced(self._models.open())

    return run_and_forget


class FabricStrategy(_Base):
    """Megatron-LM's data parallelism for ``Fabric(strategy=...)``, in place of ``"ddp"``.

    Args:
        accelerator, parallel_devices, cluster_environment, checkpoint_io, precision: as for ``DDPStrategy``.
        process_group_backend, timeout, start_method: as there. The groups of the engine have the ``timeout``, too.
        state_dict_type: "full" saves one file, as ``DDPStrategy`` does; "sharded" a directory that every rank writes
            its part of. Either is loaded.
        tensor_parallel_size: ranks that share what ``parallelize_fn`` cuts over ``device_mesh["tensor_parallel"]``.
        pipeline_parallel_size, stage_order, context_parallel_size, expert_parallel_size: as for a Trainer's strategy.
        replicas: jobs that train the same model, each with a Fabric of its own, and may end and come back; see
            docs/replicas.md. Loaders that Fabric sets up are divided among the ranks of all, and one of them saves.
        options: every field of :class:`~megastrategy.DistributedDataParallelConfig`, and of torch DDP's arguments
            ``find_unused_parameters``, ``static_graph``, ``broadcast_buffers``, ``gradient_as_bucket_view`` and
            ``bucket_cap_mb``.

    Raises:
        ValueError: for an unknown or unsupported option, by name, with the reason or the nearest known name.
    """

    # the package's own; each address sets it
    _is_interactive: ClassVar[bool]

    def __init__(
        self,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision: Precision | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
        state_dict_type: StateDictType = "full",
        tensor_parallel_size: int = 1,
        pipeline_parallel_size: int = 1,
        stage_order: Sequence[int] | None = None,
        context_parallel_size: int = 1,
        expert_parallel_size: int = 1,
        parallelize_fn: Callable[[Any, DeviceMesh], Module] | None = None,
        replicas: Replicas | None = None,
        **options: Unpack[StrategyOptions],
    ) -> None:
        self.state_dict_type = check_state_dict_type(state_dict_type)
        self.tensor_parallel_size = tensor_parallel_size
        self.pipeline_parallel_size = pipeline_parallel_size
        self._mesh = ModelMesh(
            tensor_parallel_size, pipeline_parallel_size, stage_order, context_parallel_size, expert_parallel_size
        )
        if parallelize_fn is not None and tensor_parallel_size == 1:
            raise ValueError(
                "parallelize_fn is given and tensor_parallel_size is 1: there is nothing to parallelise over. Pass "
                "tensor_parallel_size, or leave parallelize_fn out"
            )
        self._parallelize_fn = parallelize_fn
        self.config: DistributedDataParallelConfig = self._mesh.checked(read_options(self, options))
        self.replicas = self._mesh.checked_replicas(replicas)
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision=precision,
            process_group_backend=process_group_backend,
            timeout=timeout,
            start_method=start_method,
        )
        self._backward_sync_control = BackwardSyncControl()  # type: ignore[assignment]
        self._models = PreparedModels[DistributedDataParallel]()
        self._unsharded_optimizers = UnshardedOptimizers(rank_zero_warn)

    def __getstate__(self) -> dict[str, Any]:
        """Leaves the optimizers out: launchers that spawn copy the strategy, and so does a copy of a set-up model."""
        return self.__dict__ | {"_unsharded_optimizers": UnshardedOptimizers(rank_zero_warn)}

    # --- setup -------------------------------------------------------------------------------------------------------

    def _configure_launcher(self) -> None:
        super()._configure_launcher()
        if self._is_interactive:
            refuse_notebook(self, "Fabric", self._start_method, RuntimeError)

    @property
    def device_mesh(self) -> DeviceMesh | None:
        """All ranks, as ("pipeline_parallel", "data_parallel", "context_parallel", "tensor_parallel") without those
        whose size is 1, except the second; None where every rank is a data-parallel rank, and before
        ``fabric.launch()``."""
        return self._mesh.mesh

    @property
    def expert_mesh(self) -> DeviceMesh | None:
        """All ranks, as ("expert_data_parallel", "expert_parallel"): experts are divided over the second. None without
        ``expert_parallel_size``, and before ``fabric.launch()``."""
        return self._mesh.expert_mesh

    def setup_environment(self) -> None:
        super().setup_environment()
        self._mesh.make(self.world_size, self.root_device)

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """By data-parallel rank: all ranks that share a model or a sequence get the same batches. Those of all replicas
        divide them."""
        kwargs: dict[str, Any] = self._mesh.sampler_ranks() or super().distributed_sampler_kwargs
        return kwargs if self.replicas is None else self.replicas.sampler_ranks(**kwargs)

    def module_init_context(self, empty_init: bool | None = None) -> AbstractContextManager[Any]:
        on_meta = self._parallelize_fn is not None and empty_init
        precision_context = self.precision.module_init_context
        base_context = super().module_init_context
        context: AbstractContextManager[Any] = (
            empty_init_context(precision_context()) if on_meta else base_context(empty_init)
        )
        return context

    def module_to_device(self, module: Module) -> None:
        if self._parallelize_fn is None or not is_on_meta(module):
            super().module_to_device(module)

    def setup_module(self, module: Module) -> DistributedDataParallel:
        """Wraps the model. One that is set up already keeps its engine, which then serves both setups.

        Raises:
            ValueError: if gradients are to be checked for infinities that fp16's scaler makes on purpose, or if an
                optimizer that was set up before would find no gradients, or step 16-bit weights without their main
                params.
        """
        scaler = getattr(self.precision, "scaler", None)
        whose = f"the GradScaler of {type(self.precision).__name__}"
        adapt_scaler(scaler, self.config, whose, NO_SCALER)
        # a model that is set up already was parallelised when it came first
        if self._parallelize_fn is not None and not self._models.wrappers_of([module]):
            module = self._parallelised(module, self._parallelize_fn)
        wrapper = self._models.fitting(module, self.config)
        if wrapper is not None:
            return wrapper
        self._mesh.check_precision(self.precision.precision)
        ranks = self._mesh.engine_ranks(module, self.root_device)
        ranks |= {"all_reduce_option": ALL_REDUCE_OPTION, "replicas": self.replicas}
        wrapped = DistributedDataParallel(module, self.config, **ranks)
        if self.replicas is not None and scaler is not None:
            self.replicas.register("scaler", scaler.state_dict, scaler.load_state_dict)
        right_order = (
            "call fabric.setup(model, optimizer), or fabric.setup_module(model) before "
            "fabric.setup_optimizers(optimizer)"
        )
        self._unsharded_optimizers.refuse_earlier(wrapped, "set up", right_order)
        return self._models.add(module, wrapped)

    def _parallelised(self, module: Module, parallelize_fn: Callable[[Any, DeviceMesh], Module]) -> Module:
        assert self._mesh.mesh is not None, "Fabric launches before it sets a model up"
        module = parallelize_fn(module, self._mesh.mesh)
        if not isinstance(module, Module):
            raise TypeError(f"parallelize_fn returned {type(module).__name__}: expected the module")
        if is_on_meta(module):
            allocate(module, self.root_device)
        return module

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Shards the optimizer over the ranks of the model that its parameters belong to, set up before it.

        One that has no parameter of a model is returned unchanged, as under "ddp". With all-reduce the model may come
        later: the optimizer steps the Parameters themselves.
        """
        owners = self._models.owners(optimizer, "set up")
        # parallelize_module replaces the Parameters that an earlier optimizer holds
        if self._parallelize_fn is not None and self._models.open() and not owners:
            raise ValueError(
                f"this {type(optimizer).__name__} has no parameter of a model that was set up, since parallelize_fn "
                "makes new ones. Call model = fabric.setup(module) first, build the optimizer on model.parameters(), "
                "and call fabric.setup_optimizers(optimizer)"
            )
        if not owners:
            return self._unsharded_optimizers.add(optimizer)
        return self._models.shard(optimizer, owners[0], rank_zero_info) if len(owners) == 1 else optimizer

    def process_dataloader(self, dataloader: Any) -> Any:
        """Divides a :class:`~megastrategy.data.ResumableSampler` among the data-parallel ranks."""
        dataloader = super().process_dataloader(dataloader)
        sampler = sampler_of(dataloader)
        if sampler is not None:
            sampler.divide(**self.distributed_sampler_kwargs)
        return dataloader

    def teardown(self) -> None:
        """Closes all models, so that they are plain modules. Fabric never calls it; a user may."""
        if self.replicas is not None:
            self.replicas.close()
        for model in self._models.open():
            model.close()
        super().teardown()

    # --- training ----------------------------------------------------------------------------------------------------

    def clip_gradients_norm(
        self,
        module: Module,
        optimizer: Optimizer,
        max_norm: float | int,
        norm_type: float | int = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor:
        distributed = self._distributed(optimizer)
        if not isinstance(distributed, DistributedOptimizer):
            return super().clip_gradients_norm(module, optimizer, max_norm, norm_type, error_if_nonfinite)
        self.precision.unscale_gradients(distributed)
        return distributed.clip_grad_norm_(max_norm, float(norm_type), error_if_nonfinite)

    def clip_gradients_value(self, module: Module, optimizer: Optimizer, clip_val: float | int) -> None:
        distributed = self._distributed(optimizer)
        if not isinstance(distributed, DistributedOptimizer):
            super().clip_gradients_value(module, optimizer, clip_val)
            return
        self.precision.unscale_gradients(distributed)
        distributed.clip_grad_value_(clip_val)

    def count_tokens(self, num_tokens: float | Tensor) -> None:
        """Counts the tokens over which the loss of the next backward is a sum, for every model that was set up; see
        :meth:`~megastrategy.DistributedDataParallel.count_tokens`."""
        announce_tokens(num_tokens, self._models.open())

    def full_grad(self, param: Parameter) -> Tensor | None:
        """Returns a parameter's full reduced gradient; ``.grad`` is a placeholder under reduce-scatter. Collective.

        Raises:
            ValueError: if it is not a trainable parameter of a model that was set up.
        """
        for model in self._models.open():
            if any(candidate is param for candidate in model.engine.params):
                return model.full_grad(param)
        raise ValueError(
            f"a parameter of shape {tuple(param.shape)} is not a trainable parameter of a model that was set up"
        )

    def _distributed(self, optimizer: Any) -> Any:
        """Finds the sharded optimizer around one of the user's, who may hold both; returns anything else unchanged."""
        return self._models.sharded(optimizer) or optimizer

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Waits as "ddp" does."""
        enter_barrier("fabric.barrier()")
        super().barrier(*args, **kwargs)

    # --- checkpoints -------------------------------------------------------------------------------------------------

    def get_module_state_dict(self, module: Module) -> dict[str, Any | Tensor]:
        """Returns the weights that one process would have: of a tensor-parallel model on rank 0 only, and for a
        directory this rank's parts. Collective."""
        if not self._mesh.shares_model or self.state_dict_type == "sharded":
            return super().get_module_state_dict(unwrapped(module))
        return self._mesh.full_weights(unwrapped(module))

    def load_module_state_dict(self, module: Module, state_dict: dict[str, Any | Tensor], strict: bool = True) -> None:
        if not self._mesh.shares_model:
            super().load_module_state_dict(unwrapped(module), state_dict, strict)
        else:
            self._mesh.load_weights(unwrapped(module), state_dict, strict)
        # fp32 values that the module has just rounded; main params in the file come later, and replace them
        for optimizer, model in self._models.optimizers():
            if model is module:
                optimizer.load_main_params(trainable_weights(unwrapped(module), state_dict))

    def get_optimizer_state(self, optimizer: Optimizer) -> dict[str, Tensor]:
        """Gathers torch's own format, full-shaped, on rank 0; on other ranks without the state. Collective."""
        return super().get_optimizer_state(self._distributed(optimizer))

    def save_checkpoint(
        self,
        path: str | Path,
        state: dict[str, Module | Optimizer | Any],
        storage_options: Any = None,
        filter: dict[str, Callable[[str, Any], bool]] | None = None,
    ) -> None:
        """Adds the fp32 main params under a key of their own, which "ddp" leaves in the remainder. Of replicas only the
        leader gathers and writes."""
        if self.replicas is not None and not self.replicas.writes:
            return
        optimizers = {key: self._distributed(value) for key, value in state.items()}
        distributed = {key: value for key, value in optimizers.items() if isinstance(value, DistributedOptimizer)}
        for value in distributed.values():
            value.require_all_ranks("fabric.save()", _SAVE_ON_ALL_RANKS)  # which ends in a barrier
        if self.state_dict_type == "sharded":
            refuse_storage_options(storage_options)
            self._save_directory(place_at(self.broadcast(path)), state, filter or {})
            return
        # collective, so for every optimizer on every rank, although only rank 0 gets a result
        gathered = {key: value.main_params() for key, value in distributed.items()}
        main_params = {key: params for key, params in gathered.items() if params}
        if main_params:
            state = {**state, MAIN_PARAMS_KEY: main_params}
        super().save_checkpoint(path, state, storage_options, filter)

    def _save_directory(
        self, path: Directory, state: Mapping[str, Any], filter: Mapping[str, Callable[[str, Any], bool]]
    ) -> None:
        modules: dict[str, dict[str, Any]] = {}
        written: dict[str, dict[str, Any]] = {}
        extra: dict[str, Any] = {}
        for key, item_of_state in state.items():
            value: Any = self._distributed(item_of_state)
            keeps = filter.get(key, lambda name, item: True)
            # all ranks write these together; everything else is rank 0's, in ``meta.pt``
            if isinstance(item_of_state, Module):
                saved = self.get_module_state_dict(value)
                modules[key] = {name: item for name, item in saved.items() if keeps(name, item)}
                is_first = self._mesh.is_first_replica(self.global_rank)
                written[key] = written_by(modules[key], unwrapped(item_of_state), is_first)
                continue
            if isinstance(value, DistributedOptimizer):
                written[key] = {k: v for k, v in value.sharded_state_dict().items() if keeps(k, v)}
                continue
            saved = value.state_dict() if hasattr(value, "state_dict") and hasattr(value, "load_state_dict") else value
            extra[key] = {k: v for k, v in saved.items() if keeps(k, v)} if isinstance(saved, dict) else saved
        save_directory(written, extra | self._mesh.not_tensors(modules), path, checkpoint_collectives())

    def _read_directory(self, path: Directory, state: Any, weights_only: bool | None) -> dict[str, Any]:
        """Reads a directory, except the states of optimizers in ``state``, which are read in part later."""
        items = state.items() if isinstance(state, dict) else ()
        optimizer_keys = {key for key, value in items if isinstance(self._distributed(value), DistributedOptimizer)}
        modules = {key: unwrapped(value) for key, value in items if isinstance(value, Module)}
        extra = load_extra(path, weights_only)
        directory = OpenDirectory(path)
        values_by_key = extra.pop(NOT_TENSORS, {})

        def read(key: str) -> Any:
            if key in optimizer_keys:
                return OptimizerInDirectory(directory, key)
            apart_from_tensors = values_by_key.get(key, {})
            module = modules.get(key)
            if module is None:
                return directory.read(key) | apart_from_tensors
            return directory.read_weights(key, module, names_elsewhere(module)) | apart_from_tensors

        return extra | {key: read(key) for key in directory.keys}

    def load_checkpoint(
        self,
        path: str | Path,
        state: Module | Optimizer | dict[str, Module | Optimizer | Any] | None = None,
        strict: bool = True,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Loads ``state``, one object after the other, weights before optimizers' shards of a directory.

        Modules and sharded optimizers copy theirs out of the mapped file; all else is copied to memory of its own.

        Raises:
            CheckpointError: if the file is none, or holds the weights or the optimizer of another model.
            KeyError: if ``strict``, and a key of ``state`` is not there.
        """
        directory = existing_directory(path)
        if directory is not None:
            loaded = self._read_directory(directory, state, weights_only)
        else:
            loaded = super().load_checkpoint(path, None, strict, weights_only)
        # the user may keep it longer than the file exists
        if not state:
            return cast(dict[str, Any], unmapped_copy(loaded))
        if not isinstance(state, dict):
            self._load_objects({"": self._distributed(state)}, {"": loaded}, strict, path)
            return {}
        if not isinstance(loaded, dict):
            raise CheckpointError(f"{path}: expected a dictionary with {list(state)}, got {describe_value(loaded)}")
        saved = dict(loaded)
        objects = {key: self._distributed(value) for key, value in state.items()}
        main_params: Mapping[str, dict[str, Tensor]] = saved.pop(MAIN_PARAMS_KEY, {})
        state.update(self._load_objects(objects, saved, strict, path))
        # after all weights: a main param counts where the present weight is its rounding
        for key, params in main_params.items():
            optimizer = objects.get(key)
            if isinstance(optimizer, DistributedOptimizer):
                optimizer.load_main_params(params)
        return cast(dict[str, Any], unmapped_copy(saved))

    def _load_objects(
        self, objects: dict[str, Any], saved: dict[str, Any], strict: bool, path: str | Path
    ) -> dict[str, Any]:
        """Removes the states of ``objects`` from ``saved`` and loads them; returns values that cannot load."""
        missing = [key for key in objects if key not in saved]
        if strict and missing:
            raise KeyError(f"{path} has no {missing[0]!r}, only {sorted(saved)}; strict=False loads what is there")
        objects = {key: value for key, value in objects.items() if key in saved}
        sharded = {id(optimizer) for optimizer, model in self._models.optimizers() if model.layout.num_shards > 1}
        # a directory's optimizers are read now, and changed below: their files may be damaged
        read = {
            key: value.read_sharded(*saved[key])
            for key, value in objects.items()
            if isinstance(saved[key], OptimizerInDirectory)
        }
        values = {}
        for key, value in objects.items():
            saved_value = saved.pop(key)
            if isinstance(value, Module):
                self.load_module_state_dict(value, saved_value, strict)
            elif key in read:
                continue
            elif id(value) in sharded:
                # each rank copies its part out of the mapped file; all other objects may keep the tensors
                value.load_state_dict(saved_value)
            elif hasattr(value, "state_dict") and hasattr(value, "load_state_dict"):
                value.load_state_dict(unmapped_copy(saved_value))
            else:
                values[key] = unmapped_copy(saved_value)
        # after the weights, whose rounded values would otherwise replace the main params
        for apply in read.values():
            apply()
        return values

    # --- names -------------------------------------------------------------------------------------------------------

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """``import megastrategy`` registers the names, lazily; DDPStrategy's own must not be registered again."""


class BackwardSyncControl:
    """Blocks the synchronisation of backward for ``fabric.no_backward_sync``; Fabric's knows torch's wrapper."""

    def no_backward_sync(self, module: Module, enabled: bool) -> AbstractContextManager[None]:
        if not enabled:
            return nullcontext()
        if not isinstance(module, DistributedDataParallel):
            raise TypeError(
                "blocking the synchronisation of backward needs a model that fabric.setup() or fabric.setup_module() "
                f"returned under this strategy, got {type(module).__name__}"
            )
        return module.no_sync()


def unwrapped(module: Module) -> Module:
    """Returns the user's module."""
    return module.module if isinstance(module, DistributedDataParallel) else module
