"""The door to a Lightning Trainer: translates its calls into the engine's, and computes nothing.

``lightning.pytorch`` and ``pytorch_lightning`` are the same code in two packages whose classes do not know each
other. What is here imports neither: :mod:`megastrategy.lightning` and :mod:`megastrategy.pytorch_lightning` put it in
front of their package's ``DDPStrategy``.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

import torch
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.distributed.constants import default_pg_timeout
from torch.nn import Module

from .._checkpoints.directories import (
    DirectorySaver,
    OptimizerInDirectory,
    StateDictType,
    check_state_dict_type,
    existing_directory,
    load_optimizers,
    load_trainer_directory,
    place_of_directory,
    refuse_storage_options,
    remove_directory,
    written_by,
)
from .._checkpoints.files import own_memory, trainable_weights
from .._checkpoints.validation import check_module_state, check_optimizer_state, describe_foreign
from .._faults.interfaces import add_way_out
from .._faults.process_collectives import (
    begin_setup,
    count_exception,
    engine_collectives,
    exception_name,
    known_findings,
)
from .._faults.recovery import PATIENCE, StoreExchange, join_setup, report_failure
from .._whole_optimizers import WholeOptimizers
from ..core import (
    CheckpointError,
    Directory,
    DistributedDataParallel,
    DistributedDataParallelConfig,
    DistributedOptimizer,
    Engine,
    Event,
    adapt_scaler,
    announce_tokens,
    combine_listeners,
    config_from_arguments,
    describe_translation,
    to_host,
    weigh_announced,
)
from .checked_collectives import CollectivesTogether
from .checkpoint_io import WholeFilesByDefault
from .grad_norms import named_grad_norms
from .meshes import ModelSizes, all_not_tensors, is_first_replica
from .precision import EnginePrecision, lend, take_back
from .ray_workers import PointsToRayStrategy
from .resumable_data import ResumesData
from .schedulers import SchedulersHoldUsersOptimizers
from .signals import SignalAgreement
from .signature import ALL_REDUCE_OPTION, NO_SCALER, argument_names

if TYPE_CHECKING:
    import lightning.pytorch as pl
    from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
    from lightning.pytorch.core.optimizer import LightningOptimizer, _MockOptimizer
    from lightning.pytorch.plugins.precision import Precision
    from lightning.pytorch.strategies import DDPStrategy as _Base
    from torch.distributed.device_mesh import DeviceMesh
else:
    _Base = object

T = TypeVar("T")
_log = logging.getLogger("megastrategy")

_SAVE_ON_ALL_RANKS = (
    "Call trainer.save_checkpoint(...) on every rank, not under `if trainer.is_global_zero:`: rank 0 writes"
)

MAIN_PARAMS_KEY = "megatron_ddp_main_params"
"""Key in a checkpoint of 16-bit weights: for each optimizer the fp32 main params by parameter name, whole."""

LEFT_BEHIND = "fp32 main params of 'megatron_ddp': without it training goes on from the 16-bit weights"
"""Key beside the callbacks' states. Lightning warns of those that nobody takes, so "ddp" says what it loses."""


class TrainerStrategy(
    PointsToRayStrategy, WholeFilesByDefault, CollectivesTogether, SchedulersHoldUsersOptimizers, ResumesData, _Base
):
    """Megatron-LM's data parallelism for ``Trainer(strategy=...)``, in place of ``"ddp"``.

    Args:
        accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin: as for ``DDPStrategy``.
        process_group_backend, timeout, start_method: as there. The groups of the engine have the ``timeout``, too.
        state_dict_type: "full" saves one file, as ``DDPStrategy`` does; "sharded" a directory that every rank writes
            its part of, in the background if the Trainer has the plugin ``AsyncCheckpointIO``. Either is loaded.
        tensor_parallel_size: ranks that share what ``configure_model`` cuts over ``device_mesh["tensor_parallel"]``.
        pipeline_parallel_size: ranks that have a stage each of its Pipeline over ``device_mesh["pipeline_parallel"]``;
            ``stage_order``, by stage: which of so many blocks of ranks has it.
        options: every field of :class:`~megastrategy.DistributedDataParallelConfig`, and of torch DDP's arguments
            ``find_unused_parameters``, ``static_graph``, ``broadcast_buffers``, ``gradient_as_bucket_view`` and
            ``bucket_cap_mb``.

    Raises:
        ValueError: for an unknown or unsupported option, by name, with the reason or the nearest known name.
    """

    strategy_name = "megatron_ddp"

    patience: timedelta = PATIENCE
    """The longest that a rank which saves after an exception waits for the others to come and save, too."""

    # what the package calls these; set by the class that is made from this one
    _lightning_optimizer: ClassVar[type[LightningOptimizer]]
    _mock_optimizer: ClassVar[type[_MockOptimizer]]
    _engine_precision: ClassVar[type[EnginePrecision]]
    _async_io: ClassVar[type]
    _sigterm_exception: ClassVar[type[BaseException]]
    _set_model_sizes: Callable[[ModelSizes], None]
    _device_mesh: DeviceMesh | None = None

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
        **options: Any,
    ) -> None:
        check_state_dict_type(state_dict_type)
        self.state_dict_type = state_dict_type
        self._set_model_sizes(ModelSizes(tensor_parallel_size, pipeline_parallel_size, stage_order))
        self.config: DistributedDataParallelConfig = config_from_arguments(options, argument_names(self))
        if translation := describe_translation(options):
            rank_zero_info(translation)
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
        self._whole_optimizers = WholeOptimizers(rank_zero_warn)
        self._scalers_class: type[torch.amp.GradScaler] | None = None  # what the plugin's was before the fit
        self._meeting: StoreExchange | None = None
        self._signal_agreement: SignalAgreement | None = None
        self._loaded_from = ""
        self._directory_saver = DirectorySaver()
        self._listeners: list[Callable[[Event], None]] = []

    # --- setup -------------------------------------------------------------------------------------------------------

    def _setup_model(self, model: Module) -> DistributedDataParallel:  # type: ignore[override]
        self.await_others("setup")
        wrapped = DistributedDataParallel(
            model,
            self.config,
            collectives=engine_collectives(self.root_device, agreed=True),
            listener=combine_listeners(self._listeners),
            all_reduce_option=ALL_REDUCE_OPTION,
        )
        self._engine = wrapped.engine
        self._engine.known_findings = known_findings()
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
        super().setup(trainer)
        self._signal_agreement = SignalAgreement(trainer, self._meeting_place, self._sigterm_exception)

    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        super().setup_optimizers(trainer)
        if isinstance(self.model, DistributedDataParallel):
            self.model.engine.announce(rank_zero_info)

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
            # of a fit before: the user's optimizer inside is one of torch's again
            raw = [opt.optimizer if isinstance(opt, DistributedOptimizer) and opt.is_closed else opt for opt in raw]
            as_they_are, make = (DistributedOptimizer, self._mock_optimizer), self._whole_optimizers.add_or_shard
            optimizers = [opt if isinstance(opt, as_they_are) else make(opt, model) for opt in raw]
        super(TrainerStrategy, type(self)).optimizers.fset(self, optimizers)  # type: ignore[attr-defined]

    def setup_precision_plugin(self) -> None:
        super().setup_precision_plugin()
        plugin = self.precision_plugin
        # evaluation wraps no model, and has no gradients to clip or to scale
        if not isinstance(self.model, DistributedDataParallel):
            return
        lend(plugin, self._engine_precision)  # its clipping goes through `.grad`, a stand-in under reduce-scatter
        scaler, whose = getattr(plugin, "scaler", None), f"the GradScaler of {type(plugin).__name__}"
        self._scalers_class = adapt_scaler(scaler, self.config, whose, NO_SCALER)

    def teardown(self) -> None:
        plugin = self.precision_plugin
        # a plugin may be shared with the next Trainer, under "ddp" perhaps
        take_back(plugin, self._engine_precision)
        if self._signal_agreement is not None:
            self._signal_agreement.remove()
            self._signal_agreement = None
        self._meeting = None
        self._listeners = []
        if self._scalers_class is not None:
            plugin.scaler.__class__, self._scalers_class = self._scalers_class, None  # type: ignore[attr-defined]
        if isinstance(self.model, DistributedDataParallel):
            self.model.close(give_back="used")  # a Trainer's own need no state on every rank
            self.model = self.lightning_module
        super().teardown()
        try:
            # raises if the save in the background failed, so it comes when the module is the user's again
            self._directory_saver.close()
        finally:
            self.end_together()

    # --- training ----------------------------------------------------------------------------------------------------

    def pre_backward(self, closure_loss: Tensor) -> None:
        """Shows the loss to the engine; in manual optimization no forward of the wrapper has prepared its backward."""
        module, wrapped = self.lightning_module, self.model
        if module is None or not isinstance(wrapped, DistributedDataParallel):
            return
        if module.automatic_optimization:
            wrapped.engine.reducer.watch(closure_loss)
        else:
            wrapped.watch_backward(closure_loss)
        weigh_announced(closure_loss, [wrapped])

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Leaves module buffers each rank's own in manual optimization, as "ddp" does: it broadcasts them before the
        first forward alone."""
        module, wrapped = self.lightning_module, self.model
        if module is None or module.automatic_optimization or not isinstance(wrapped, DistributedDataParallel):
            return super().training_step(*args, **kwargs)
        with wrapped.engine.reducer.backwards_inside_forward():
            outputs = super().training_step(*args, **kwargs)
        wrapped.leave_buffers_apart()
        return outputs

    def post_backward(self, closure_loss: Tensor) -> None:
        """Does nothing: gradients are final when backward returns, before ``on_after_backward``."""

    def loss_tokens(self, num_tokens: float | Tensor) -> None:
        """Notes, in ``training_step`` or before ``manual_backward``, over how many tokens the next loss is a mean.

        See :meth:`~megastrategy.DistributedDataParallel.weigh_by_tokens`. Does nothing outside of a fit, so that a step
        may be shared with evaluation.
        """
        if isinstance(self.model, DistributedDataParallel):
            announce_tokens(num_tokens, [self.model])

    def weigh_by_tokens(self, loss: Tensor, num_tokens: float | Tensor) -> Tensor:
        """As :meth:`loss_tokens`, where the loss is there already, such as in the loss function of a pipeline."""
        return self.model.weigh_by_tokens(loss, num_tokens) if isinstance(self.model, DistributedDataParallel) else loss

    def full_grad(self, param: torch.nn.Parameter) -> Tensor | None:
        """Returns a parameter's whole reduced gradient, for which ``.grad`` stands in. Collective."""
        if not isinstance(self.model, DistributedDataParallel):
            raise RuntimeError("full_grad() is there during a fit, between a backward and the next zero_grad")
        return self.model.full_grad(param)

    def grad_norm(self, norm_type: float | str = 2.0) -> dict[str, Tensor]:
        """Returns what ``lightning.pytorch.utilities.grad_norm(module, norm_type)`` would under "ddp", in every mode.

        For ``self.log_dict(self.trainer.strategy.grad_norm())`` in ``on_before_optimizer_step``. Collective with
        reduce-scatter.
        """
        return named_grad_norms(self.model, float(norm_type))

    # --- after an exception ------------------------------------------------------------------------------------------

    def setup_environment(self) -> None:
        """Waits, after an exception, until all ranks have left what it ended: the next collective must meet its own.

        Raises:
            RuntimeError: if not all have, in bounded time. The processes must be started anew.
        """
        try:
            super().setup_environment()
        except RuntimeError as error:
            add_way_out(error)
            raise
        join_setup(*begin_setup(), self.patience)
        self.begin_together()

    def on_exception(self, exception: BaseException) -> None:
        """Says which rank failed first, and why; the next fit gets a group of its own."""
        if first := report_failure(exception_name(), exception, leaves=True):
            exception.add_note(f"the first failure among the ranks: {first}")
            _log.error("rank %d stops; the first failure among the ranks: %s", self.global_rank, first)
        self.give_up_together()
        count_exception()

    def _meet_if_interrupted(self) -> StoreExchange | None:
        """Returns the meeting of all ranks after an exception; None where there is none, or nobody has to be met.

        Called by what callbacks do in ``on_exception``, most often saving a checkpoint, which needs all ranks.
        """
        if not self._is_interrupted() or self._engine is None or self._engine.collectives.size == 1:
            return None
        # one for an exception: several callbacks may save, and the ranks count their exchanges
        if self._meeting is None:
            if (exception := sys.exception()) is not None:
                report_failure(exception_name(), exception)  # before the others' failures that follow from it
            # the groups may hold a collective that was cut off, which would be matched with the first of the save
            self.give_up_together()
            steps = [opt.num_steps for opt in self.optimizers if isinstance(opt, DistributedOptimizer)]
            # whole optimizers are rank 0's to save, at whichever step the others stopped
            sharded = self._engine.layout.num_shards > 1
            state = f"steps begun and done: {steps}" if sharded else ""
            self._meeting = StoreExchange(exception_name(), state, self.patience)
            # all ranks may have stopped in the same step, when some buckets' weights were from before it
            if sharded and any(begun != done for begun, done in steps):
                self._meeting.problem = self._meeting.problem or "a step was under way"
            # ``agreed``: all ranks of the meeting have just given the old group up, and none need be asked
            if not self._meeting.problem:
                self._engine.save_over(engine_collectives(self.root_device, agreed=True))
        return self._meeting

    def _may_save(self) -> bool:
        """Whether the shards of all ranks can be had, and belong together."""
        meeting = self._meet_if_interrupted()
        if meeting is None or not meeting.problem:
            return True
        assert self._engine is not None, "ranks meet about a model that was set up"
        return self._engine.layout.num_shards == 1

    # --- checkpoints -------------------------------------------------------------------------------------------------

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Gathers torch's own format, full-shaped, on rank 0; on other ranks without the state. Collective.

        For a sharded checkpoint this rank's part, by parameter name.
        """
        # Lightning's wrapper would run the methods on a copy of the attributes, not on the engine's object
        if isinstance(optimizer, self._lightning_optimizer):
            optimizer = optimizer._optimizer
        # :meth:`save_checkpoint` finds the same, and writes nothing
        if not self._may_save():
            return {}
        if isinstance(optimizer, DistributedOptimizer):
            optimizer.require_all_ranks("saving a checkpoint", _SAVE_ON_ALL_RANKS)  # which ends in a barrier
            if self.state_dict_type == "sharded":
                return optimizer.sharded_state_dict()
        return optimizer.state_dict()

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None) -> None:
        """Adds the fp32 main params under a key of their own, which "ddp" ignores.

        After an exception on some rank the shards of the others may be out of reach. Then nothing is written, rather
        than half a state, and the reason is logged on every rank.
        """
        if (meeting := self._meet_if_interrupted()) is not None:
            meeting.exchange(None, self.patience)  # a hook that fails on some rank keeps it from coming here
        if not self._may_save():
            assert self._meeting is not None
            _log.error(
                "rank %d: %s was NOT saved after the exception, since the optimizer state is sharded over the ranks "
                "and %s. The checkpoint before it is the last",
                self.global_rank,
                filepath,
                self._meeting.problem,
            )
            return
        self.add_place(checkpoint)
        if self.state_dict_type == "sharded":
            refuse_storage_options(storage_options)
            self._save_directory(checkpoint, filepath)
            return
        if "optimizer_states" in checkpoint:
            main_params = [
                opt.main_params() if isinstance(opt, DistributedOptimizer) else {} for opt in self.optimizers
            ]
            if any(main_params):
                checkpoint[MAIN_PARAMS_KEY] = main_params
                checkpoint.setdefault("callbacks", {})[LEFT_BEHIND] = {}
        if self._engine is not None and self._engine.is_closed:
            self._engine.collectives.close()  # the fit is over, and gathering has woken them
        if isinstance(self._checkpoint_io, self._async_io) and self.root_device.type != "cpu":
            checkpoint = {**checkpoint, "state_dict": to_host(checkpoint["state_dict"])}  # it would clone on the device
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def _save_directory(self, checkpoint: dict[str, Any], filepath: str | Path) -> None:
        in_background = isinstance(self._checkpoint_io, self._async_io)
        if not (in_background or self._checkpoint_io is None or isinstance(self._checkpoint_io, self._default_io)):
            raise ValueError(
                f"state_dict_type='sharded' does not save through a CheckpointIO, but the Trainer has the plugin "
                f"{type(self._checkpoint_io).__name__}: leave it out, or choose state_dict_type='full'"
            )
        assert self.lightning_module is not None
        weights, states = checkpoint.pop("state_dict"), checkpoint.pop("optimizer_states", [])
        state = {"model": weights} | {f"optimizer_{number}": optimizer for number, optimizer in enumerate(states)}
        checkpoint |= all_not_tensors({"model": weights}, self._device_mesh)
        state["model"] = written_by(
            weights, self.lightning_module, is_first_replica(self._device_mesh, self.global_rank)
        )
        path, is_apart = self._directory_to_save(filepath)
        # after the fit nobody would wait for it; and parts are taken away to be put together once this returns
        in_background &= self._engine is not None and not self._engine.is_closed and not is_apart
        self._directory_saver.save(state, checkpoint, path, in_background=in_background, is_apart=is_apart)

    def _directory_to_save(self, filepath: str | Path) -> tuple[Directory, bool]:
        """Returns the directory, and whether each rank has one of its own for its part. Collective."""
        return place_of_directory(self.broadcast(filepath)), False

    def remove_checkpoint(self, filepath: str | Path) -> None:
        """Removes a checkpoint, not before what replaces it is complete."""
        self._directory_saver.then(functools.partial(self._remove_now, filepath))

    def _remove_now(self, filepath: str | Path) -> None:
        if self.is_global_zero and (path := existing_directory(filepath)) is not None:
            remove_directory(path)
        else:
            super().remove_checkpoint(filepath)

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Leaves what this class loads itself in the mapped file. Callbacks and hooks get the rest, in memory of its
        own, to keep.

        Raises:
            CheckpointError: if the file is not a Trainer's.
        """
        self._directory_saver.wait()
        if (path := existing_directory(checkpoint_path)) is not None:
            self._loaded_from = str(checkpoint_path)
            return self.take_place(load_trainer_directory(path, self.lightning_module, weights_only))
        checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        if not isinstance(checkpoint, dict) or not {"state_dict", "pytorch-lightning_version"} & set(checkpoint):
            raise CheckpointError(
                f"{checkpoint_path} is no checkpoint of a Trainer: expected a dictionary with 'state_dict', got "
                f"{describe_foreign(checkpoint)}. Bare weights are loaded by module.load_state_dict, before the fit"
            )
        self._loaded_from = str(checkpoint_path)
        mapped = {"state_dict", "optimizer_states", MAIN_PARAMS_KEY}
        checkpoint.get("callbacks", {}).pop(LEFT_BEHIND, None)
        return self.take_place({k: v if k in mapped else own_memory(v) for k, v in checkpoint.items()})

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        assert self.lightning_module is not None
        check_module_state(self.lightning_module, checkpoint["state_dict"], strict, self._loaded_from)
        super().load_model_state_dict(checkpoint, strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Loads all optimizers' states, or none.

        Raises:
            CheckpointError: if one does not fit. The weights are the file's by then: Lightning loads them first.
        """
        assert self.lightning_module is not None
        names = {param: name for name, param in self.lightning_module.named_parameters()}
        states = checkpoint["optimizer_states"]
        # a file without main params has fp32 weights, perhaps, which the cast to 16 bits rounded
        weights = trainable_weights(self.lightning_module, checkpoint["state_dict"])
        if any(isinstance(state, OptimizerInDirectory) for state in states):
            load_optimizers(self.optimizers, states, weights)
            return
        # all before any: Lightning loads one by one, and would change the first where the second does not fit
        cut = self._engine is not None and self._engine.layout.num_shards > 1
        for number, (optimizer, state) in enumerate(zip(self.optimizers, states, strict=False)):
            if isinstance(optimizer, DistributedOptimizer):
                check_optimizer_state(optimizer, state, names, f"optimizer {number} in {self._loaded_from}")
        with contextlib.ExitStack() as stack:
            for optimizer in self.optimizers:
                # Nothing is exchanged: the learning rate finder restores on a rank that has failed, and no other comes.
                if isinstance(optimizer, DistributedOptimizer):
                    stack.enter_context(optimizer.every_rank_has_state())
            self._load_optimizers(checkpoint, states, weights, cut=cut)

    def _load_optimizers(
        self, checkpoint: Mapping[str, Any], states: Sequence[Any], weights: Mapping[str, Tensor], *, cut: bool
    ) -> None:
        if self._engine is not None and self._engine.layout.offloads_state:  # Lightning would move it to the device
            for optimizer, state in zip(self.optimizers, states, strict=False):
                optimizer.load_state_dict(state)
        else:
            # shards are copied out of the mapped file; a whole optimizer keeps its own, so that must be no part of it
            super().load_optimizer_state_dict({**checkpoint, "optimizer_states": states if cut else own_memory(states)})
        saved = checkpoint.get(MAIN_PARAMS_KEY, [weights] * len(self.optimizers))
        for optimizer, main_params in zip(self.optimizers, saved, strict=False):
            if isinstance(optimizer, DistributedOptimizer):
                optimizer.load_main_params(main_params)

    # --- names -------------------------------------------------------------------------------------------------------

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """``import megastrategy`` registers the names, lazily; DDPStrategy's own must not be registered again."""
