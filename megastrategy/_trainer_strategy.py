"""The door to a Lightning Trainer: translates its calls into the engine's, and computes nothing.

``lightning.pytorch`` and ``pytorch_lightning`` are the same code in two packages whose classes do not know each
other. What is here imports neither: :mod:`megastrategy.lightning` and :mod:`megastrategy.pytorch_lightning` put it in
front of their package's ``DDPStrategy``.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor
from torch.distributed.constants import default_pg_timeout
from torch.nn import Module

from ._world import engine_collectives, forget_engine_collectives
from .core import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    DistributedOptimizer,
    GradScaler,
    config_from_arguments,
    describe_setup,
    probe_state_tensors,
)

if TYPE_CHECKING:
    import lightning.pytorch as pl
    from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
    from lightning.pytorch.core.optimizer import LightningOptimizer, _MockOptimizer
    from lightning.pytorch.plugins.precision import Precision
    from lightning.pytorch.strategies import DDPStrategy as _Base
else:
    _Base = object

MAIN_PARAMS_KEY = "megatron_ddp_main_params"
"""In a checkpoint of 16-bit weights: for each optimizer the fp32 main params by parameter name, whole."""


class TrainerStrategy(_Base):
    """Megatron-LM's data parallelism for ``Trainer(strategy=...)``, in place of ``"ddp"``.

    Args:
        accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin, process_group_backend,
            timeout, start_method: as for ``DDPStrategy``.
        options: every field of :class:`~megastrategy.DistributedDataParallelConfig`, and of torch DDP's arguments
            ``find_unused_parameters``, ``static_graph``, ``broadcast_buffers``, ``gradient_as_bucket_view`` and
            ``bucket_cap_mb``.

    Raises:
        ValueError: for an unknown or unsupported option, by name, with the reason or the nearest known name.
    """

    strategy_name = "megatron_ddp"

    # what the package calls these; set by the class that is made from this one
    _lightning_optimizer: ClassVar[type[LightningOptimizer]]
    _mock_optimizer: ClassVar[type[_MockOptimizer]]

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
        **options: Any,
    ) -> None:
        self.config: DistributedDataParallelConfig = config_from_arguments(options)
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
        self._wrapped: DistributedDataParallel | None = None
        self._replaced_scaler: torch.amp.GradScaler | None = None

    # --- setup -------------------------------------------------------------------------------------------------------

    def _setup_model(self, model: Module) -> DistributedDataParallel:  # type: ignore[override]
        self._wrapped = DistributedDataParallel(model, self.config, collectives=engine_collectives(self.root_device))
        return self._wrapped

    def _register_ddp_hooks(self) -> None:
        """Communication hooks belong to torch DDP; they were refused at construction."""

    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        super().setup_optimizers(trainer)
        model = self.model
        if not isinstance(model, DistributedDataParallel):
            return
        optimizers = [opt._optimizer if isinstance(opt, self._lightning_optimizer) else opt for opt in self.optimizers]
        real = [opt for opt in optimizers if not isinstance(opt, self._mock_optimizer)]
        state_tensors = max((probe_state_tensors(opt) for opt in real), default=None, key=lambda count: count or 0)
        self.optimizers = [
            opt if isinstance(opt, self._mock_optimizer) else DistributedOptimizer(opt, model) for opt in optimizers
        ]
        rank_zero_info(
            describe_setup(model.layout, model.collectives.rank, self.config.overlap_grad_reduce, state_tensors)
        )

    def setup_precision_plugin(self) -> None:
        super().setup_precision_plugin()
        plugin = self.precision_plugin
        if not isinstance(self.model, DistributedDataParallel):
            return
        # The plugin goes through `.grad`, None under reduce-scatter. Bound on this instance, removed by teardown.
        plugin.clip_grad_by_norm = partial(_clip_grad_by_norm, plugin)  # type: ignore[method-assign]
        plugin.clip_grad_by_value = partial(_clip_grad_by_value, plugin)  # type: ignore[method-assign]
        scaler = getattr(plugin, "scaler", None)
        if isinstance(scaler, torch.amp.GradScaler) and not isinstance(scaler, GradScaler):
            self._replaced_scaler = scaler
            plugin.scaler = GradScaler.like(scaler)  # type: ignore[attr-defined]

    def on_exception(self, exception: BaseException) -> None:
        """A collective may have been cut off on some rank: the next fit gets a group of its own."""
        forget_engine_collectives()

    def teardown(self) -> None:
        plugin = self.precision_plugin
        for name in ("clip_grad_by_norm", "clip_grad_by_value"):
            plugin.__dict__.pop(name, None)
        scaler = getattr(plugin, "scaler", None)
        if self._replaced_scaler is not None and scaler is not None:
            if scaler._scale is not None:
                self._replaced_scaler.load_state_dict(scaler.state_dict())
            plugin.scaler, self._replaced_scaler = self._replaced_scaler, None  # type: ignore[attr-defined]
        if isinstance(self.model, DistributedDataParallel):
            self.model.close()
            self.model = self.lightning_module
        super().teardown()

    # --- training ----------------------------------------------------------------------------------------------------

    def pre_backward(self, closure_loss: Tensor) -> None:
        """Shows the loss to the engine; in manual optimization it is not an output of the wrapped forward."""
        if isinstance(self.model, DistributedDataParallel):
            self.model.watch_backward(closure_loss)

    def post_backward(self, closure_loss: Tensor) -> None:
        """Gradients are final when backward returns, before ``on_after_backward``: nothing is left to do here."""

    def full_grad(self, param: torch.nn.Parameter) -> Tensor | None:
        """The whole reduced gradient of a parameter, where ``param.grad`` is None under reduce-scatter. Collective."""
        if not isinstance(self.model, DistributedDataParallel):
            raise RuntimeError("full_grad() is there during a fit, between a backward and the next zero_grad")
        return self.model.full_grad(param)

    # --- checkpoints -------------------------------------------------------------------------------------------------

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """torch's own format, full-shaped, on rank 0; on other ranks without the state. Collective."""
        if isinstance(optimizer, self._lightning_optimizer):
            optimizer = optimizer._optimizer
        return optimizer.state_dict()

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None) -> None:
        """Adds the fp32 main params under a key of their own, which "ddp" ignores."""
        if "optimizer_states" in checkpoint:
            main_params = [opt.main_params() for opt in self.optimizers if isinstance(opt, DistributedOptimizer)]
            if any(main_params):
                checkpoint[MAIN_PARAMS_KEY] = main_params
        if self._wrapped is not None and self.model is not self._wrapped:
            self._wrapped.collectives.close()  # the fit is over, and gathering has woken them
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        super().load_optimizer_state_dict(checkpoint)
        optimizers = [opt for opt in self.optimizers if isinstance(opt, DistributedOptimizer)]
        for optimizer, main_params in zip(optimizers, checkpoint.get(MAIN_PARAMS_KEY, []), strict=False):
            optimizer.load_main_params(main_params)

    # --- names -------------------------------------------------------------------------------------------------------

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """``import megastrategy`` registers the names, lazily; DDPStrategy's own must not be registered again."""


def _clip_grad_by_norm(plugin: Precision, optimizer: Any, clip_val: int | float) -> None:
    if hasattr(optimizer, "clip_grad_norm_"):
        optimizer.clip_grad_norm_(clip_val)
    else:
        type(plugin).clip_grad_by_norm(plugin, optimizer, clip_val)


def _clip_grad_by_value(plugin: Precision, optimizer: Any, clip_val: int | float) -> None:
    if hasattr(optimizer, "clip_grad_value_"):
        optimizer.clip_grad_value_(clip_val)
    else:
        type(plugin).clip_grad_by_value(plugin, optimizer, clip_val)
