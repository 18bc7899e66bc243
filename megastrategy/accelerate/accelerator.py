"""The door to Hugging Face Accelerate: its ``Accelerator`` with this engine where torch DDP would be.

    from megastrategy.accelerate import Accelerator, MegatronDDPPlugin

    accelerator = Accelerator(megatron_ddp_plugin=MegatronDDPPlugin(bucket_size=1_000_000), mixed_precision="bf16")

Nothing of accelerate is patched, and ``accelerator.distributed_type`` is what it is under torch DDP, since that is a
closed list which accelerate reads for many reasons; ``accelerator.state.megatron_ddp_plugin`` distinguishes the two.
``transformers.Trainer`` learns to save a sharded optimizer when the first of these Accelerators is made.
"""

from __future__ import annotations

import collections
import contextlib
import inspect
import itertools
import logging
import os
import sys
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import accelerate
import torch
from accelerate.logging import get_logger
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from accelerate.utils import (
    DistributedType,
    DynamoBackend,
    TorchDynamoPlugin,
    broadcast_object_list,
)
from accelerate.utils.other import has_compiled_regions, has_repeated_blocks, is_compiled_module
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from .._checkpoints.directories import written_by
from .._faults.process_collectives import checkpoint_collectives
from .._unsharded_optimizers import UnshardedOptimizers
from ..core import (
    Collectives,
    DistributedOptimizer,
    adapt_scaler,
    dtensors_of,
)
from ..data import sampler_of
from . import checkpoint
from .ddp_arguments import translated_arguments
from .plugin import MegatronDDPPlugin, refuse_other_engines
from .prepared_model import (
    PREPARED,
    PreparedModel,
    clip_norm_,
    clip_value_,
    has_parts_of_grads,
    trained_by,
)
from .replicas import AcceleratorReplicas
from .tensor_parallel import check_parallelism, expert_mesh_of, full_state, optimizer_instances, showing_only_ties, wrap
from .token_counts import TokenCounts
from .transformers_trainer import wrap_trainer

__all__ = ["Accelerator", "MegatronDDPPlugin"]

_log = get_logger(__name__)


class Accelerator(accelerate.Accelerator):  # type: ignore[misc]
    """``accelerate.Accelerator``, with all of its arguments and methods, training with Megatron-LM's data parallelism.

    Args:
        megatron_ddp_plugin: the options; by default those of the first Accelerator of this process, or the defaults. It
            may be among ``kwargs_handlers`` instead. ``DistributedDataParallelKwargs`` there mean what they mean
            for torch DDP, where the plugin does not say otherwise.

    In one process nothing is sharded or reduced, and models are not wrapped, as under accelerate; those with 16-bit
    weights are wrapped for their fp32 main params.

    Attributes:
        expert_mesh: all ranks, as ("expert_data_parallel", "expert_parallel"): experts are divided over the second.
            None without the plugin's ``expert_parallel_size``.

    Raises:
        ValueError: if another engine is asked for as well, by argument or environment.
    """

    __module__ = "megastrategy.accelerate"  # where it is public

    # accelerate's, which has no types
    step: int
    _models: list[Any]
    _optimizers: list[Any]

    def __init__(self, *args: Any, megatron_ddp_plugin: MegatronDDPPlugin | None = None, **kwargs: Any) -> None:
        # by name, as other engines may be asked for by position, too
        arguments = inspect.signature(accelerate.Accelerator.__init__).bind(self, *args, **kwargs).arguments
        handlers = list(arguments.get("kwargs_handlers") or ())
        given = [megatron_ddp_plugin, *(handler for handler in handlers if isinstance(handler, MegatronDDPPlugin))]
        plugins = [plugin for plugin in given if plugin is not None]
        if len(plugins) > 1:
            raise ValueError(f"{len(plugins)} MegatronDDPPlugins were given: pass one")
        if any(not isinstance(plugin, MegatronDDPPlugin) for plugin in plugins):
            raise ValueError(f"megatron_ddp_plugin: expected a MegatronDDPPlugin, got {type(plugins[0]).__name__}")
        refuse_other_engines(arguments)
        check_parallelism(arguments)
        wrap_trainer()
        # accelerate raises KeyError for a handler of a class that it does not know
        if "kwargs_handlers" in arguments:
            arguments["kwargs_handlers"] = [item for item in handlers if not isinstance(item, MegatronDDPPlugin)]
        del arguments["self"]
        super().__init__(**arguments)
        # the state is the process's: a Trainer makes an Accelerator of its own, and passes no plugin
        known = getattr(self.state, "megatron_ddp_plugin", None)
        self.megatron_ddp_plugin: MegatronDDPPlugin = plugins[0] if plugins else known or MegatronDDPPlugin()
        self.state.megatron_ddp_plugin = self.megatron_ddp_plugin
        kind = str(self.distributed_type.value)
        if kind != "NO" and not kind.startswith("MULTI_"):
            raise ValueError(f"this process is set up for {kind}, and models have one engine: use accelerate's own")
        self._warn_of_single_processes()
        self._replicas = AcceleratorReplicas(self)
        self.expert_mesh = expert_mesh_of(self, self.megatron_ddp_plugin.expert_parallel_size)
        self._unsharded_optimizers = UnshardedOptimizers(self._warn)
        ddp_arguments = translated_arguments(self.ddp_handler, self.megatron_ddp_plugin, self._inform)
        instances = optimizer_instances(self.parallelism_config)
        self.megatron_ddp_config = self.megatron_ddp_plugin.config(**ddp_arguments, **instances)
        self._token_counts = TokenCounts()
        self._adapt_scaler()

    # --- prepare -----------------------------------------------------------------------------------------------------

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Prepares as accelerate's does, in any order of arguments: models come before the optimizers they shard."""
        if device_placement is None or len(device_placement) == len(args):
            placements: Sequence[bool | None] = device_placement or [None] * len(args)
            args = tuple(
                self.prepare_model(item, device_placement=placement) if isinstance(item, Module) else item
                for item, placement in zip(args, placements, strict=True)
            )
        return super().prepare(*args, device_placement=device_placement)

    def prepare_model(self, model: Module, device_placement: bool | None = None, evaluation_mode: bool = False) -> Any:
        """Prepares a model as accelerate's does, with this engine. One that is prepared already keeps its engine."""
        if getattr(model, "_is_accelerate_prepared", False):
            inner = self.unwrap_model(model, keep_torch_compile=False)
            if inner not in self._models:
                self._models.append(inner)  # the user's module, as for torch DDP: hooks and files see it
            return model
        trains = any(param.requires_grad for param in model.parameters())
        # where one process was launched as one of several, accelerate's own would wrap it into torch DDP
        is_wrapped = self.distributed_type != DistributedType.NO or self._replicas.replicas is not None
        # there is nothing to reduce; in ``evaluation_mode`` accelerate places and casts it without torch DDP
        if evaluation_mode or not trains or not (is_wrapped or _has_16_bit_weights(model)):
            return super().prepare_model(model, device_placement, evaluation_mode or is_wrapped)
        known = PREPARED.fitting(model, self.megatron_ddp_config)
        if known is not None:
            self._models.append(model)
            return self._finish_model(known)
        with self._compiling_regions_only(model):
            placed: Module = super().prepare_model(model, device_placement, evaluation_mode=True)
        # It is not prepared, if it comes again without its wrapper. A traced module has its attributes elsewhere, and
        # cannot delete them.
        placed._is_accelerate_prepared = False  # type: ignore[assignment]
        vars(placed).pop("_is_accelerate_prepared", None)
        prepared = wrap(placed, self)
        if self.scaler is not None:
            self._replicas.add("scaler", self.scaler)
        right_order = "call accelerator.prepare(model, optimizer), or prepare the model before the optimizer"
        self._unsharded_optimizers.refuse_earlier(prepared, "prepared", right_order)
        return self._finish_model(PREPARED.add(model, prepared))

    def _finish_model(self, model: PreparedModel) -> Any:
        plugin = self.state.dynamo_plugin
        prepared: Any = model
        if plugin.backend != DynamoBackend.NO and not has_compiled_regions(model):
            prepared = torch.compile(model, **plugin.to_kwargs())
        prepared._is_accelerate_prepared = True
        return prepared

    @contextlib.contextmanager
    def _compiling_regions_only(self, model: Module) -> Iterator[None]:
        """Keeps accelerate from compiling a full model, which is compiled in its wrapper. Regions are compiled inside,
        since they are copies of modules."""
        plugin = self.state.dynamo_plugin
        if not (plugin.use_regional_compilation and has_repeated_blocks(model)):
            self.state.dynamo_plugin = TorchDynamoPlugin(backend=DynamoBackend.NO)
        try:
            yield
        finally:
            self.state.dynamo_plugin = plugin

    def unwrap_model(self, model: Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True) -> Any:
        """Unwraps as accelerate's does, and compiled regions inside of the wrapper, too."""
        inner = super().unwrap_model(model, keep_fp32_wrapper, keep_torch_compile)
        return inner if keep_torch_compile else inner.__dict__.get("_orig_mod", inner)

    def prepare_optimizer(self, optimizer: Optimizer, device_placement: bool | None = None) -> Any:
        """Shards the optimizer over the ranks of the model that its parameters belong to, prepared before it.

        One that has no parameter of a prepared model is not sharded, as under torch DDP.

        Raises:
            ValueError: if there is more than one such model.
            OptimizerNotShardableError: if its update of a parameter depends on other parameters.
        """
        if isinstance(optimizer, AcceleratedOptimizer):
            optimizer._is_accelerate_prepared = True  # which only prepare() sets
            if isinstance(optimizer.optimizer, DistributedOptimizer):  # its model may be gone, after an error
                models = PREPARED.owners(optimizer, "prepare")
                if len(models) == 1:
                    PREPARED.shard(optimizer.optimizer, models[0], self._inform)
            return super().prepare_optimizer(optimizer, device_placement)
        self._adapt_scaler()
        models = PREPARED.owners(optimizer, "prepare")
        if not models:
            optimizer = self._unsharded_optimizers.add(optimizer) if self.use_distributed else optimizer
            return super().prepare_optimizer(optimizer, device_placement)
        if len(models) > 1:
            return super().prepare_optimizer(optimizer, device_placement)
        # not placed: the engine has placed its state, and a round trip of the state would be a collective
        sharded = PREPARED.shard(optimizer, models[0], self._inform)
        return super().prepare_optimizer(sharded, device_placement=False)

    def prepare_data_loader(
        self,
        data_loader: Any,
        device_placement: bool | None = None,
        *args: Any,
        in_replica: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Prepares as accelerate's does.

        Of several replicas the processes of this one divide the loader, for an evaluation, which ``in_replica`` says.

        Raises:
            ValueError: for a loader whose sampler divides the samples itself, or with replicas without ``in_replica``.
        """
        if sampler_of(data_loader) is not None:
            raise ValueError(
                "a ResumableSampler divides the samples among the processes, and accelerate would do so again.\n"
                "Leave its loader out of accelerator.prepare(), iterate over sampler.batches(loader), and call "
                "accelerator.register_for_checkpointing(sampler). On the same number of processes "
                "DataLoaderConfiguration(use_stateful_dataloader=True) resumes with any sampler"
            )
        if not in_replica and not getattr(data_loader, "_is_accelerate_prepared", False):
            self._replicas.refuse(
                "a prepared DataLoader",
                "leave that of the training out of prepare(), build it with DistributedSampler(dataset, "
                "**replicas.sampler_ranks(accelerator.num_processes, accelerator.process_index)), and move its batches "
                "to accelerator.device. Prepare that of an evaluation by prepare_data_loader(loader, in_replica=True)",
            )
        return super().prepare_data_loader(data_loader, device_placement, *args, **kwargs)

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """Skips as accelerate's does.

        Raises:
            ValueError: with replicas.
        """
        self._replicas.refuse("skip_first_batches()", "set replicas.batch, which skips as many")
        return super().skip_first_batches(dataloader, num_batches)

    @property
    def multi_device(self) -> bool:
        """As accelerate's; with a ``parallelism_config`` also on CPUs, for which accelerate makes no mesh."""
        on_cpus = str(self.distributed_type.value) == "MULTI_CPU" and self.parallelism_config is not None
        return on_cpus or bool(super().multi_device)

    def _prepare_tp(self, *args: Any) -> tuple[Any, ...]:
        # accelerate's finds the parameters of optimizers by address, and empties them; here they are in place
        return args

    def end_training(self) -> None:
        """Ends as accelerate's does. Prepared models are closed before, while their ranks are connected."""
        self._replicas.close()
        for model in PREPARED.open():
            model.close()
        super().end_training()

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """Prepares as accelerate's does, and finds the optimizer that the scheduler was built on inside of ours."""
        if not isinstance(scheduler, AcceleratedScheduler):
            self._replicas.refuse(
                "a prepared schedule",
                "leave it out of prepare(), call accelerator.register_for_checkpointing(schedule), and step it if "
                "accelerator.sync_gradients",
            )
        prepared = super().prepare_scheduler(scheduler)
        known = PREPARED.sharded(getattr(scheduler, "optimizer", None))
        if isinstance(prepared, AcceleratedScheduler) and known is not None:
            prepared.optimizers = [item for item in self._optimizers if item.optimizer is known] or prepared.optimizers
        return prepared

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Registers as accelerate's does, and for a replica that comes back."""
        super().register_for_checkpointing(*objects)
        self._replicas.add("object", *objects)

    def _inform(self, text: str) -> None:
        """Logs on the main process. By default accelerate's loggers hide this level, and then stderr gets the text."""
        if not self.is_main_process:
            return
        if _log.isEnabledFor(logging.INFO) or logging.getLogger("megastrategy").level != logging.NOTSET:
            _log.info(text)
        else:
            sys.stderr.write(f"{text}\n")

    def _warn(self, text: str) -> None:
        if self.is_main_process:
            warnings.warn(text, stacklevel=2)

    def _warn_of_single_processes(self) -> None:
        """Warns, on rank 0 of the launcher, where each of its processes would train by itself."""
        world_size = os.environ.get("WORLD_SIZE", "1")
        is_launched = world_size.isdecimal() and int(world_size) > 1 and os.environ.get("RANK", "0") == "0"
        if is_launched and self.num_processes == 1:
            self._warn(
                f"WORLD_SIZE is {world_size}, but this Accelerator is of one process: without as many GPUs accelerate "
                "connects no processes, and each trains and saves by itself. On CPUs start them with megastrategy "
                "launch and use_cpu: true in its file, or set ACCELERATE_USE_CPU=true"
            )

    def _adapt_scaler(self) -> None:
        """Makes fp16's scaler see sharded gradients, so that all ranks skip the same steps."""
        adapt_scaler(self.scaler, self.megatron_ddp_config, "fp16's GradScaler", "use mixed_precision='bf16'")

    # --- gradients ---------------------------------------------------------------------------------------------------

    def count_tokens(self, num_tokens: float | Tensor) -> None:
        """Counts, inside ``accumulate``, the tokens over which the loss of the next ``backward`` is a sum; see
        :meth:`~megastrategy.DistributedDataParallel.count_tokens`."""
        self._token_counts.announce(num_tokens, self)

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Runs as accelerate's does; see :meth:`count_tokens`."""
        self._token_counts.before_backward(loss)
        super().backward(loss, **kwargs)
        self._token_counts.after_backward()

    def free_memory(self, *objects: Any) -> Any:
        """Forgets all models as accelerate's does."""
        self._token_counts.close()
        return super().free_memory(*objects)

    @contextlib.contextmanager
    def no_sync(self, model: Any) -> Iterator[None]:
        """Suspends synchronisation as accelerate's does, and that of replicas of one process."""
        with super().no_sync(model) if self._replicas.replicas is None else model.no_sync():
            yield

    @staticmethod
    @contextlib.contextmanager
    def trigger_sync_in_backward(model: Module) -> Iterator[None]:
        """Synchronises the next backward, as accelerate's does, although its forward ran under ``no_sync``."""
        prepared = _uncompiled(model)
        if not isinstance(prepared, PreparedModel):
            with accelerate.Accelerator.trigger_sync_in_backward(model):
                yield
            return
        before = prepared.require_backward_grad_sync
        prepared.require_backward_grad_sync = True
        prepared.engine.backwards.prepare_for_backward([])
        try:
            yield
        finally:
            prepared.require_backward_grad_sync = before

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Unscales as accelerate's does; the optimizer may be the user's own."""
        if optimizer is not None:
            given = optimizer if isinstance(optimizer, list | tuple) else [optimizer]
            optimizer = [PREPARED.sharded(item) or item for item in given]
        super().unscale_gradients(optimizer)

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Tensor | None:
        """Clips as accelerate's does, over any parameters together. Collective.

        Returns the norm of all of them, the same bits on every rank: a parameter whose gradient each rank has by itself
        enters it with the mean over the ranks of the powers of its norms.
        """
        norm: Tensor | None = self._clip(
            parameters,
            lambda parts, extra: clip_norm_(parts, extra, float(max_norm), float(norm_type)),
            lambda params: super(Accelerator, self).clip_grad_norm_(params, max_norm, norm_type),
        )
        return norm

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Clips as accelerate's does, over any parameters."""
        self._clip(
            parameters,
            lambda parts, extra: clip_value_(parts, extra, clip_value),
            lambda params: super(Accelerator, self).clip_grad_value_(params, clip_value),
        )

    def _clip(self, parameters: Any, ours: Callable[[Any, Any], Any], theirs: Callable[[Any], Any]) -> Any:
        params = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        # all-reduced gradients of whole parameters are in ``.grad``, where accelerate's clipping is right
        parts = trained_by([model for model in PREPARED.open() if has_parts_of_grads(model)], params)
        # within a window of accumulation each rank clips its own gradients, as under torch DDP
        if not parts or (not self.sync_gradients and all(model.engine.reducer.has_local_grads for model, _ in parts)):
            return theirs(params)
        extra = dict(zip(map(id, params), params, strict=True))
        for _, reduced in parts:
            collections.deque(map(extra.pop, map(id, reduced), itertools.repeat(None)), maxlen=0)
        self.unscale_gradients()
        return ours(parts, [param for param in extra.values() if param.requires_grad])

    @contextlib.contextmanager
    def join_uneven_inputs(self, joinables: Sequence[Any], even_batches: bool | None = None) -> Iterator[None]:
        """Joins as accelerate's does where batches are even. Uneven ones are for evaluation: a backward that reduces is
        refused.

        Raises:
            NotImplementedError: at a synchronised backward inside, if ranks are to run different numbers of batches.
        """
        engines = [model for model in map(_uncompiled, joinables) if isinstance(model, PreparedModel)]
        if not self.use_distributed or not engines:
            with super().join_uneven_inputs(joinables, even_batches):
                yield
            return
        wanted = self.even_batches if even_batches is None else even_batches
        # accelerate's would enter torch's Join, which needs torch's reducer: only its change to loaders is made here
        samplers: list[Any] = [getattr(loader, "batch_sampler", None) for loader in self._dataloaders]
        changed = [item for item in samplers if getattr(item, "even_batches", wanted) is not wanted]
        with contextlib.ExitStack() as uneven:
            for model in engines if not wanted else ():
                uneven.enter_context(model.uneven_batches())
            for sampler in changed:
                sampler.even_batches = wanted
            try:
                yield
            finally:
                for sampler in changed:
                    sampler.even_batches = not wanted

    # --- checkpoints -------------------------------------------------------------------------------------------------

    def save_state(self, output_dir: str | None = None, safe_serialization: bool = True, **kwargs: Any) -> Any:
        """Saves torch DDP's files, and fp32 main params beside them; with ``state_dict_type="sharded"`` a directory.

        All ranks call it together. Where nothing is sharded, and accelerate does not number the checkpoints, the main
        process may call it without the others, as under torch DDP; then it waits for no other rank.

        Of replicas the leader saves.

        Raises:
            NotOnAllRanksError: if not all ranks call it otherwise.
        """
        if not self._replicas.writes:
            return Path(str(output_dir))
        in_directory = self.megatron_ddp_plugin.state_dict_type == "sharded" and self.use_distributed
        optimizers = [checkpoint.sharded_inside(item) for item in self._optimizers]
        is_sharded = any(item is not None and item.is_sharded for item in optimizers)
        configuration = self.project_configuration
        if not (is_sharded or in_directory or configuration.automatic_checkpoint_naming):
            location = Path(super().save_state(output_dir, safe_serialization, **kwargs))
            for_node = configuration.save_on_each_node and self.is_local_main_process
            checkpoint.save_main_params(location, optimizers, for_node or self.is_main_process)
            return location
        with checkpoint.on_all_ranks(self._collectives()):
            if in_directory:
                return self._save_sharded(output_dir, safe_serialization, **kwargs)
            location = Path(super().save_state(output_dir, safe_serialization, **kwargs))
            checkpoint.save_main_params(location, optimizers, self.is_main_process)
            if configuration.save_on_each_node and self.use_distributed:
                checkpoint.copy_to_nodes(location, optimizers, self.is_local_main_process)
            self.wait_for_everyone()  # so that it may be loaded at once, which accelerate leaves to the user
        return location

    def save_model(self, *args: Any, **kwargs: Any) -> None:
        """Saves as accelerate's does; of replicas the leader."""
        if self._replicas.writes:
            super().save_model(*args, **kwargs)

    def get_state_dict(self, model: Any, unwrap: bool = True) -> Any:
        """Returns as accelerate's does; of a tensor-parallel model full weights, on the host, where they are saved: on
        the main process, and with ``save_on_each_node`` on every node's. Collective then.

        Other processes get an empty dictionary.
        """
        inner = self.unwrap_model(model)
        if not dtensors_of(inner):
            return super().get_state_dict(model, unwrap)
        on_each_node = self.project_configuration.save_on_each_node
        return full_state(inner, keeps=self.is_main_process or (on_each_node and self.is_local_main_process))

    def _collectives(self) -> Collectives | None:
        """Returns the collectives of the prepared models; None in one process, or where nothing is prepared."""
        if not self.use_distributed:
            return None
        return next((model.engine.collectives for model in PREPARED.wrappers_of(self._models)), None)

    def wait_for_everyone(self) -> None:
        """Waits as accelerate's does."""
        self._enter("accelerator.wait_for_everyone()")
        super().wait_for_everyone()

    def gather(self, *args: Any, **kwargs: Any) -> Any:
        """Gathers as accelerate's does."""
        self._enter("accelerator.gather()")
        return super().gather(*args, **kwargs)

    def reduce(self, *args: Any, **kwargs: Any) -> Any:
        """Reduces as accelerate's does, with its defaults."""
        self._enter("accelerator.reduce()")
        return super().reduce(*args, **kwargs)

    def _enter(self, barrier: str) -> None:
        """Reports a barrier, so that a rank in it is known to be past where another rank is."""
        collectives = self._collectives()
        if collectives is not None and collectives.rank_check is not None:
            collectives.rank_check.enter_barrier(barrier)

    def _save_sharded(self, *args: Any, **kwargs: Any) -> Path:
        models = self._models
        hooks = self._save_model_state_pre_hook
        states: list[dict[str, Any]] = [model.state_dict() for model in models]
        weights = list(states)
        with self._set_aside(hooks):
            location = Path(super().save_state(*args, **kwargs))
        for hook in hooks.values():
            hook(models, weights, str(location))  # which may remove weights that it saves itself
        states_by_id = {
            id(state): written_by(state, model, self.is_main_process)
            for state, model in zip(states, models, strict=True)
        }
        weights = [states_by_id.get(id(state), state) for state in weights]
        sharded = map(checkpoint.sharded_inside, self._optimizers)
        optimizers = [optimizer for optimizer in sharded if optimizer is not None]
        checkpoint.save_sharded(location, weights, optimizers, checkpoint_collectives())
        self.wait_for_everyone()
        return location

    def load_state(
        self, input_dir: str | None = None, load_kwargs: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        """Loads a checkpoint that this class or torch DDP saved on any number of ranks. All ranks call it."""
        folder = Path(os.path.expanduser(input_dir)) if input_dir is not None else self._latest_checkpoint()
        optimizers = [checkpoint.sharded_inside(item) for item in self._optimizers]
        kwargs.setdefault("map_location", "cpu")  # the host has room for the full state; each rank keeps its part
        if folder is not None and checkpoint.is_sharded(folder):
            models = list(self._models)
            # a hook may take a model out of the list, which it loads itself
            for hook in self._load_model_state_pre_hook.values():
                hook(models, str(folder))
            given = None if self.use_distributed else self.megatron_ddp_config
            with checkpoint.loading(self._optimizers, self._models, given) as loading:
                checkpoint.load_sharded(folder, models, loading)
            # then everything that is in no directory: schedulers, random states, the user's own objects
            with self._set_aside(self._load_model_state_pre_hook):
                super().load_state(str(folder), load_kwargs, **kwargs)
        else:
            with showing_only_ties([model for model in self._models if dtensors_of(model)]):
                super().load_state(input_dir if folder is None else str(folder), load_kwargs, **kwargs)
            if folder is not None:
                checkpoint.load_main_params(folder, optimizers)
        if self.use_distributed:
            # kept in each rank's file, and a rank that is new has none
            self.step = broadcast_object_list([self.step])[0]

    @contextlib.contextmanager
    def _set_aside(self, hooks: OrderedDict[int, Any]) -> Iterator[None]:
        """Hides models, sharded optimizers and hooks from accelerate, which then saves or loads everything else."""
        models = self._models
        optimizers = self._optimizers
        known = hooks.copy()
        sharded = [
            item for item in optimizers if not self.use_distributed or checkpoint.sharded_inside(item) is not None
        ]
        self._models = []
        self._optimizers = [item for item in optimizers if item not in sharded]
        hooks.clear()
        try:
            yield
        finally:
            self._models = models
            self._optimizers = optimizers
            hooks.update(known)

    def _latest_checkpoint(self) -> Path | None:
        """Finds the checkpoint that accelerate loads by default; None where it has none, and reports so itself."""
        if not self.project_configuration.automatic_checkpoint_naming:
            return None
        return checkpoint.latest(Path(self.project_dir) / "checkpoints")


def _has_16_bit_weights(model: Module) -> bool:
    return any(param.requires_grad and param.dtype in (torch.bfloat16, torch.float16) for param in model.parameters())


def _uncompiled(model: Any) -> Any:
    return model._orig_mod if isinstance(model, Module) and is_compiled_module(model) else model


def _signature(added: Iterable[inspect.Parameter]) -> inspect.Signature:
    base = inspect.signature(accelerate.Accelerator.__init__)
    return base.replace(parameters=[*base.parameters.values(), *added])


Accelerator.__init__.__signature__ = _signature(  # type: ignore[attr-defined]
    [item for item in inspect.signature(Accelerator.__init__).parameters.values() if item.kind is item.KEYWORD_ONLY]
)
