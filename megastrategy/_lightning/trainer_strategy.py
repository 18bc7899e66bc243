"""The door to a Lightning Trainer: translates its calls into the engine's, and computes nothing.

``lightning.pytorch`` and ``pytorch_lightning`` are the same code in two packages whose classes do not know each
other. This module imports neither: :mod:`megastrategy.lightning` and :mod:`megastrategy.pytorch_lightning` put the
class before their package's ``DDPStrategy``.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar, Unpack

import torch
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.distributed.constants import default_pg_timeout
from torch.nn import Module

from .._checkpoints.directories import (
    DirectorySaver,
    StateDictType,
    check_state_dict_type,
    existing_directory,
    load_trainer_directory,
    refuse_storage_options,
    remove_directory,
)
from .._faults.interfaces import add_way_out
from .._faults.process_collectives import begin_setup, count_exception, end_run, ended_run, exception_name
from .._faults.recovery import PATIENCE, ended_process, first_failure, join_setup, report_failure
from .._replicas import Replicas
from .._unsharded_optimizers import UnshardedOptimizers
from ..core import (
    CollectiveError,
    Directory,
    DistributedDataParallel,
    DistributedDataParallelConfig,
    DistributedOptimizer,
    Engine,
    Event,
    adapt_scaler,
    announce_tokens,
    combine_listeners,
    place_at,
    to_host,
)
from ..data import sampler_of
from .checked_collectives import CheckedCollectives
from .grad_norms import named_grad_norms
from .launchers import refuse_notebook, refuse_ray_worker
from .meshes import (
    ModelMesh,
    allocate,
    check_trainer,
    empty_init_context,
    is_on_meta,
    leave_in_place,
)
from .precision import EnginePrecision, add_engine_clipping, remove_engine_clipping
from .schedulers import with_users_optimizers
from .signals import SignalAgreement
from .signature import ALL_REDUCE_OPTION, NO_SCALER, SAVE_ON_ALL_RANKS, StrategyOptions, read_options
from .trainer_checkpoints import add_main_params, check_directory_io, load_optimizer_states, take_tensors, unmapped
from .trainer_replicas import TrainerReplicas

if TYPE_CHECKING:
    import lightning.pytorch as pl
    from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
    from lightning.pytorch.core.optimizer import LightningOptimizer, _MockOptimizer
    from lightning.pytorch.plugins.precision import Precision
    from lightning.pytorch.strategies import DDPStrategy as _Base
    from torch.distributed.device_mesh import DeviceMesh
else:
    _Base = object  # each of two packages puts its own there

T = TypeVar("T")
_log = logging.getLogger("megastrategy")


class TrainerStrategy(_Base):
    """Megatron-LM's data parallelism for ``Trainer(strategy=...)``, in place of ``"ddp"``.

    Args:
        accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin: as for ``DDPStrategy``.
        process_group_backend, timeout, start_method: as there. The groups of the engine have the ``timeout``, too.
        state_dict_type: "full" saves one file, as ``DDPStrategy`` does; "sharded" a directory that every rank writes
            its part of, in the background if the Trainer has the plugin ``AsyncCheckpointIO``. Either is loaded.
        tensor_parallel_size: ranks that share what ``configure_model`` cuts over ``device_mesh["tensor_parallel"]``.
        pipeline_parallel_size: ranks that have a stage each of its Pipeline over ``device_mesh["pipeline_parallel"]``;
            ``stage_order``, by stage: which of so many blocks of ranks has it.
        context_parallel_size: ranks that get one batch, each for its part of the sequences.
        expert_parallel_size: data-parallel ranks that have the experts that ``configure_model`` divides over
            ``strategy.expert_mesh["expert_parallel"]``.
        replicas: the jobs of this training, each with ranks of its own, that go on if one of them ends; see
            docs/replicas.md.
        options: every field of :class:`~megastrategy.DistributedDataParallelConfig`, and of torch DDP's arguments
            ``find_unused_parameters``, ``static_graph``, ``broadcast_buffers``, ``gradient_as_bucket_view`` and
            ``bucket_cap_mb``.

    Raises:
        ValueError: for an unknown or unsupported option, by name, with the reason or the nearest known name.
    """

    strategy_name = "megatron_ddp"

    patience: timedelta = PATIENCE
    """The longest that a rank which saves after an exception waits for the others to come and save, too."""

    # the package's own classes; each address sets them
    _lightning_optimizer: ClassVar[type[LightningOptimizer]]
    _mock_optimizer: ClassVar[type[_MockOptimizer]]
    _engine_precision: ClassVar[type[EnginePrecision]]
    _async_io: ClassVar[type]
    _sigterm_exception: ClassVar[type[BaseException]]
    _misconfiguration: ClassVar[type[Exception]]
    _is_interactive: ClassVar[bool]

    def __init__(
        self,
        accelerator: pl.accelerators.Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
        state_dict_type: StateDictType = "full",
        tensor_parallel_size: int = 1,
        pipeline_parallel_size: int = 1,
        stage_order: Sequence[int] | None = None,
        context_parallel_size: int = 1,
        expert_parallel_size: int = 1,
        replicas: Replicas | None = None,
        **options: Unpack[StrategyOptions],
    ) -> None:
        self.state_dict_type = check_state_dict_type(state_dict_type)
        self.tensor_parallel_size = tensor_parallel_size
        self.pipeline_parallel_size = pipeline_parallel_size
        self._mesh = ModelMesh(
            tensor_parallel_size, pipeline_parallel_size, stage_order, context_parallel_size, expert_parallel_size
        )
        self.config: DistributedDataParallelConfig = self._mesh.checked(read_options(self, options))
        self.replicas = self._mesh.checked_replicas(replicas)
        self._replicas = TrainerReplicas(self.replicas)
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            process_group_backend=process_group_backend,
            timeout=timeout,
            start_method=start_method,
        )
        self._engine: Engine | None = None  # of the last fit; closed after it
        self._unsharded_optimizers = UnshardedOptimizers(rank_zero_warn)
        self._scalers_class: type[torch.amp.GradScaler] | None = None  # the plugin's before the fit
        self._checked = CheckedCollectives(self, self._mesh)
        self._signals: SignalAgreement | None = None
        self._directory_saver = DirectorySaver()
        self._listeners: list[Callable[[Event], None]] = []

    # --- setup -------------------------------------------------------------------------------------------------------

    def _configure_launcher(self) -> None:
        refuse_ray_worker(self, self._misconfiguration)  # before ranks and devices are asked for
        super()._configure_launcher()
        if self._is_interactive:
            refuse_notebook(self, "Trainer", self._start_method, self._misconfiguration)

    @property
    def device_mesh(self) -> DeviceMesh | None:
        """All ranks, as ("pipeline_parallel", "data_parallel", "context_parallel", "tensor_parallel") without those
        whose size is 1, except the second; None where every rank is a data-parallel rank, and before there are
        processes."""
        return self._mesh.mesh

    @property
    def expert_mesh(self) -> DeviceMesh | None:
        """All ranks, as ("expert_data_parallel", "expert_parallel"): experts are divided over the second. None without
        ``expert_parallel_size``, and before the processes exist."""
        return self._mesh.expert_mesh

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """By data-parallel rank: all ranks that share a model or a sequence get the same batches.

        Replicas divide the batches of training. Each evaluates all samples, so that what callbacks monitor is equal.
        """
        kwargs: dict[str, Any] = self._mesh.sampler_ranks() or super().distributed_sampler_kwargs
        return self._replicas.sampler_ranks(self.lightning_module, kwargs)

    def process_dataloader(self, dataloader: object) -> object:
        assert self.lightning_module is not None
        sampler = sampler_of(dataloader)
        if sampler is not None:
            sampler.divide(**self.distributed_sampler_kwargs)
        return super().process_dataloader(dataloader)

    @contextlib.contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        # trainer.init_module(empty_init=True) enters it
        precision_context = self.precision_plugin.tensor_init_context
        on_meta = empty_init and self._mesh.cuts_layers
        with empty_init_context(precision_context()) if on_meta else super().tensor_init_context(empty_init):
            yield

    def _setup_model(self, model: Module) -> DistributedDataParallel:
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        if self._mesh.shares_model:
            check_trainer(self._mesh, trainer, self.precision_plugin.precision)
        self._checked.check("setup")
        wrapped = DistributedDataParallel(
            model,
            self.config,
            **self._mesh.engine_ranks(model, self.root_device, agreed=True),
            listener=combine_listeners(self._listeners),
            all_reduce_option=ALL_REDUCE_OPTION,
            replicas=self.replicas,
        )
        self._engine = self._checked.engine = wrapped.engine
        return wrapped

    def add_listener(self, listener: Callable[[Event], None]) -> None:
        """Calls ``listener`` with the engine's events in the next fit, until its teardown.

        Raises:
            RuntimeError: if the model is set up already. A callback's ``setup`` comes before.
        """
        if isinstance(self.model, DistributedDataParallel):
            raise RuntimeError("the model is set up already: add listeners before, in a callback's setup() for one")
        self._listeners.append(listener)

    def _register_ddp_hooks(self) -> None:
        """Communication hooks belong to torch DDP; they were refused at construction."""

    def setup(self, trainer: pl.Trainer) -> None:
        # configure_model has cut the modules that were made on meta, so that only the parts need memory
        if self._mesh.shares_model and self.model is not None and is_on_meta(self.model):
            allocate(self.model, self.root_device)
        if not self._mesh.shares_model or trainer.state.fn == "fit":
            super().setup(trainer)
            self._signals = SignalAgreement(trainer, self._checked.call_check, self._sigterm_exception, self._replicas)
            self._replicas.join(trainer)
            return
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        self._mesh.set_up_evaluation(self)

    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        super().setup_optimizers(trainer)
        if isinstance(self.model, DistributedDataParallel):
            self.model.engine.announce(rank_zero_info)

    @property
    def lr_scheduler_configs(self) -> list[Any]:
        """Lightning's list itself, to which callbacks append; no hook reports a new one, so each access looks."""
        return with_users_optimizers(self._lr_scheduler_configs)

    @lr_scheduler_configs.setter
    def lr_scheduler_configs(self, configs: list[Any]) -> None:
        self._lr_scheduler_configs = configs

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        optimizers: list[torch.optim.Optimizer] = super().optimizers
        return optimizers

    @optimizers.setter
    def optimizers(self, optimizers: list[torch.optim.Optimizer]) -> None:
        """Users assign ``trainer.optimizers`` to start anew in mid-training."""
        model = self.model
        if isinstance(model, DistributedDataParallel) and not model.is_closed:
            raw = [opt._optimizer if isinstance(opt, self._lightning_optimizer) else opt for opt in optimizers]
            optimizers = self._unsharded_optimizers.add_or_shard_all(raw, model, self._mock_optimizer)
        super(TrainerStrategy, type(self)).optimizers.fset(self, optimizers)  # type: ignore[attr-defined]

    def setup_precision_plugin(self) -> None:
        super().setup_precision_plugin()
        plugin = self.precision_plugin
        # evaluation wraps no model, and has no gradients to clip or to scale
        if not isinstance(self.model, DistributedDataParallel):
            return
        # the plugin's own clipping reads `.grad`, a placeholder under reduce-scatter
        add_engine_clipping(plugin, self._engine_precision)
        scaler = getattr(plugin, "scaler", None)
        whose = f"the GradScaler of {type(plugin).__name__}"
        self._scalers_class = adapt_scaler(scaler, self.config, whose, NO_SCALER)

    def teardown(self) -> None:
        trainer = self._checked.trainer
        if trainer is not None and not trainer.interrupted:
            function = trainer.state.fn  # None in a strategy that is torn down outside of a run
            what = "run" if function is None else function.value
            end_run(f"its {what} after {trainer.global_step} steps")
        plugin = self.precision_plugin
        # a plugin may be shared with the next Trainer, under "ddp" perhaps
        remove_engine_clipping(plugin, self._engine_precision)
        self._replicas.leave()
        if self._signals is not None:
            self._signals.remove()
            self._signals = None
        self._checked.store_gather = None
        self._listeners = []
        if self._scalers_class is not None:
            plugin.scaler.__class__ = self._scalers_class  # type: ignore[attr-defined]
            self._scalers_class = None
        if isinstance(self.model, DistributedDataParallel):
            self.model.close()
            self.model = self.lightning_module
        with leave_in_place(self, self._mesh.shares_model):
            super().teardown()
        try:
            # raises if the save in the background failed, so it comes when the module is the user's again
            self._directory_saver.wait()
        finally:
            self._checked.stop()

    # --- training ----------------------------------------------------------------------------------------------------

    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._replicas.step(functools.partial(super().optimizer_step, *args, **kwargs))

    def on_train_end(self) -> None:
        self._replicas.finish()
        super().on_train_end()

    def pre_backward(self, closure_loss: Tensor) -> None:
        """Shows the loss to the engine; in manual optimization no forward of the wrapper has prepared its backward."""
        module = self.lightning_module
        wrapped = self.model
        if module is None or not isinstance(wrapped, DistributedDataParallel):
            return
        if module.automatic_optimization:
            wrapped.engine.backwards.watch(closure_loss)
        else:
            wrapped.watch_backward(closure_loss)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Keeps module buffers of ranks apart in manual optimization, as "ddp" does: it broadcasts them before the
        first forward only."""
        module = self.lightning_module
        wrapped = self.model
        if module is None or module.automatic_optimization or not isinstance(wrapped, DistributedDataParallel):
            return super().training_step(*args, **kwargs)
        with wrapped.engine.backwards.backwards_inside_forward():
            outputs = super().training_step(*args, **kwargs)
        wrapped.leave_buffers_apart()
        return outputs

    def post_backward(self, closure_loss: Tensor) -> None:
        """Does nothing: gradients are final when backward returns, before ``on_after_backward``."""

    def count_tokens(self, num_tokens: float | Tensor) -> None:
        """Counts, in ``training_step`` or before ``manual_backward``, the tokens over which the next loss is a sum.

        See :meth:`~megastrategy.DistributedDataParallel.count_tokens`. Does nothing outside of a fit, so that a step
        may be shared with evaluation.
        """
        module = self.lightning_module
        if module is not None and isinstance(self.model, DistributedDataParallel):
            # The Trainer divides the loss, but not in manual optimization.
            divisor = module.trainer.accumulate_grad_batches if module.automatic_optimization else 1
            announce_tokens(num_tokens, [self.model], divisor)

    def full_grad(self, param: torch.nn.Parameter) -> Tensor | None:
        """Returns a parameter's full reduced gradient, for which ``.grad`` is a placeholder. Collective."""
        if not isinstance(self.model, DistributedDataParallel):
            raise RuntimeError("full_grad() works during a fit, between a backward and the next zero_grad")
        return self.model.full_grad(param)

    def grad_norm(self, norm_type: float | str = 2.0) -> dict[str, Tensor]:
        """Returns the norms of ``lightning.pytorch.utilities.grad_norm(module, norm_type)`` under "ddp", in every mode.

        For ``self.log_dict(self.trainer.strategy.grad_norm())`` in ``on_before_optimizer_step``. Collective with
        reduce-scatter.
        """
        return named_grad_norms(self.model, float(norm_type))

    # --- collectives, by the names under which Lightning calls them --------------------------------------------------

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        if self._checked.gather_if_interrupted(None) is None:
            self._checked.check("barrier")
            super().barrier(*args, **kwargs)

    def broadcast(self, obj: T, src: int = 0) -> T:
        values = self._checked.gather_if_interrupted(obj)
        if values is not None:
            value: T = values[src] if len(values) > 1 else obj
            return value
        self._checked.check("broadcast")
        return super().broadcast(obj, src)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        decisions = self._checked.gather_if_interrupted(decision)
        if decisions is not None:
            return bool(min(decisions) if all else max(decisions))
        # Over all ranks, where a sum of logged values may be over those with other samples.
        vote = torch.tensor(int(decision), device=self.root_device)
        world = torch.distributed.group.WORLD
        votes = int(self.reduce(vote, world, torch.distributed.ReduceOp.SUM))
        return votes == self.world_size if all else votes > 0

    def reduce(self, tensor: Tensor, group: Any = None, reduce_op: Any = "mean") -> Tensor:
        """Reduces over data-parallel and context ranks where no group is given: ranks that share a model have the same
        samples, which a logged sum must count once.

        Returns this rank's own value after an exception. ModelCheckpoint asks for all metrics then, and the ranks may
        have different ones left to reduce.
        """
        if self._checked.is_interrupted:
            return tensor
        self._checked.check_on_host("reduce", tensor, group)
        return super().reduce(tensor, self._mesh.data_group if group is None else group, reduce_op)

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Returns ``(1, *shape)`` after an exception if the others do not come, as on one rank."""
        if self._checked.after_exception() is not None:
            values = self._checked.gather_if_interrupted(tensor.detach().cpu()) or []
            return torch.stack(values).to(tensor.device)
        self._checked.check_on_host("all_gather", tensor, group)
        return super().all_gather(tensor, group, sync_grads)

    # --- after an exception ------------------------------------------------------------------------------------------

    def setup_environment(self) -> None:
        """Waits, after an exception, until all ranks have left the failed run.

        Otherwise a collective of that run could be matched with one of the next run.

        Raises:
            RuntimeError: if not all have, in bounded time. The processes must be started anew.
        """
        try:
            super().setup_environment()
        except RuntimeError as error:
            add_way_out(error)
            raise
        last_run = exception_name()
        join_setup(*begin_setup(), self.patience)
        try:
            self._checked.start()
        except RuntimeError as error:  # a rank that raised in the last run, which ended here, is gone
            if reason := first_failure(last_run) or ended_process():
                raise CollectiveError(
                    f"rank {self.global_rank} of {self.world_size}: another rank does not come to this run, since the "
                    f"last one has failed there: {reason}"
                ) from error
            raise
        self._mesh.make(self.world_size, self.root_device, self.lightning_module)

    def on_exception(self, exception: BaseException) -> None:
        """Reports which rank failed first, and why; the next fit gets a new group."""
        self._replicas.leave(exception)
        first = report_failure(exception_name(), exception, leaves=True)
        if isinstance(exception, CollectiveError):
            # The process of a rank that has ended its run may be gone before its end is noticed.
            first = ended_run() or first or ended_process()
        if first and first not in str(exception):
            exception.add_note(f"the first failure among the ranks: {first}")
            _log.error("rank %d stops; the first failure among the ranks: %s", self.global_rank, first)
        self._checked.give_up()
        count_exception()

    # --- checkpoints -------------------------------------------------------------------------------------------------

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Returns the weights that one process would have; for a sharded checkpoint this rank's parts. Collective."""
        if self._mesh.shares_model and self._checked.why_not_saved():
            return {}
        if not self._mesh.shares_model or self.state_dict_type == "sharded":
            state: dict[str, Any] = super().lightning_module_state_dict()
            return state
        assert self.lightning_module is not None
        return self._mesh.full_weights(self.lightning_module)

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Gathers torch's own format, full-shaped, on rank 0; on other ranks without the state. Collective.

        For a sharded checkpoint this rank's part, by parameter name.
        """
        # Lightning's wrapper would run the methods on a copy of the attributes, not on the engine's object
        if isinstance(optimizer, self._lightning_optimizer):
            optimizer = optimizer._optimizer
        # :meth:`save_checkpoint` finds the same, and writes nothing
        if not self._replicas.writes or self._checked.why_not_saved():
            return {}
        if isinstance(optimizer, DistributedOptimizer):
            optimizer.require_all_ranks("saving a checkpoint", SAVE_ON_ALL_RANKS)  # which ends in a barrier
            if self.state_dict_type == "sharded":
                return optimizer.sharded_state_dict()
        state = optimizer.state_dict()
        return {} if self._mesh.shares_model and not self.is_global_zero and self.state_dict_type == "full" else state

    @property
    def is_global_zero(self) -> bool:
        """Whether this is rank 0, of the leader if there are replicas."""
        return super().is_global_zero and self._replicas.writes

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None) -> None:
        """Adds the fp32 main params under a key of their own, which "ddp" ignores. Of replicas the leader writes.

        After an exception on some rank the shards of the others may be out of reach. Then nothing is written, rather
        than half a state, and the reason is logged on every rank.
        """
        if not self._replicas.writes or self._checked.cannot_save(filepath):
            return
        if self.state_dict_type == "sharded":
            refuse_storage_options(storage_options)
            self._save_directory(checkpoint, filepath)
            return
        if "optimizer_states" in checkpoint:
            add_main_params(checkpoint, self.optimizers)
        if self._engine is not None and self._engine.is_closed:
            self._engine.collectives.close()  # the fit is over, and gathering has woken them
        if isinstance(self._checkpoint_io, self._async_io) and self.root_device.type != "cpu":
            checkpoint = {**checkpoint, "state_dict": to_host(checkpoint["state_dict"])}  # it would clone on the device
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def _save_directory(self, checkpoint: dict[str, Any], filepath: str | Path) -> None:
        in_background = isinstance(self._checkpoint_io, self._async_io)
        check_directory_io(self._checkpoint_io, in_background)
        assert self.lightning_module is not None
        state = take_tensors(checkpoint, self.lightning_module, self._mesh, self.global_rank)
        path, is_apart = self._directory_to_save(filepath)
        # after the fit nothing waits for it; and Ray moves the parts to one place once this returns
        in_background &= self._engine is not None and not self._engine.is_closed and not is_apart
        self._directory_saver.save(state, checkpoint, path, in_background=in_background, is_apart=is_apart)

    def _directory_to_save(self, filepath: str | Path) -> tuple[Directory, bool]:
        """Returns the directory, and whether each rank has one of its own for its part. Collective."""
        return place_at(super().broadcast(filepath)), False

    def remove_checkpoint(self, filepath: str | Path) -> None:
        """Removes a checkpoint, once its replacement is complete."""
        self._directory_saver.run_after_save(functools.partial(self._remove_now, filepath))

    def _remove_now(self, filepath: str | Path) -> None:
        directory = existing_directory(filepath) if self.is_global_zero else None
        if directory is not None:
            remove_directory(directory)
        else:
            super().remove_checkpoint(filepath)

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Leaves weights and states that this class loads in the mapped file. The rest, which callbacks and hooks may
        keep, is copied to memory of its own.

        Raises:
            CheckpointError: if the file is not a Trainer's.
        """
        self._directory_saver.wait()
        path = existing_directory(checkpoint_path)
        if path is not None:
            return load_trainer_directory(path, self.lightning_module, weights_only)
        return unmapped(super().load_checkpoint(checkpoint_path, weights_only), checkpoint_path)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        assert self.lightning_module is not None
        if not self._mesh.shares_model:
            super().load_model_state_dict(checkpoint, strict)
        else:
            self._mesh.load_weights(self.lightning_module, checkpoint["state_dict"], strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Loads all optimizers' states. What another replica has given is there already.

        Raises:
            CheckpointError: if one does not fit. The weights are the file's by then: Lightning loads them first.
        """
        module = self.lightning_module
        load = super().load_optimizer_state_dict
        assert module is not None
        if checkpoint["optimizer_states"]:
            load_optimizer_states(checkpoint, module, self.optimizers, self._engine, load)

    # --- names -------------------------------------------------------------------------------------------------------

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """``import megastrategy`` registers the names, lazily; DDPStrategy's own must not be registered again."""
