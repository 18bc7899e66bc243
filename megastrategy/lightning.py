"""The door to ``lightning.pytorch``: translates the Trainer's calls into the engine's, and computes nothing."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal
from weakref import WeakKeyDictionary

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.pytorch.core.optimizer import LightningOptimizer, _MockOptimizer
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.strategies import DDPStrategy
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.constants import default_pg_timeout
from torch.nn import Module

from .core import (
    Collectives,
    DistributedDataParallel,
    DistributedDataParallelConfig,
    DistributedOptimizer,
    GradScaler,
    config_from_arguments,
    describe_setup,
    make_collectives,
    private_group,
    probe_state_tensors,
)

MAIN_PARAMS_KEY = "megatron_ddp_main_params"
"""In a checkpoint of 16-bit weights: for each optimizer the fp32 main params by parameter name, whole."""


class MegatronDDPStrategy(DDPStrategy):
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
        self._wrapped = DistributedDataParallel(model, self.config, collectives=_engine_collectives(self.root_device))
        return self._wrapped

    def _register_ddp_hooks(self) -> None:
        """Communication hooks belong to torch DDP; they were refused at construction."""

    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        super().setup_optimizers(trainer)
        model = self.model
        if not isinstance(model, DistributedDataParallel):
            return
        optimizers = [opt._optimizer if isinstance(opt, LightningOptimizer) else opt for opt in self.optimizers]
        real = [opt for opt in optimizers if not isinstance(opt, _MockOptimizer)]
        state_tensors = max((probe_state_tensors(opt) for opt in real), default=None, key=lambda count: count or 0)
        self.optimizers = [
            opt if isinstance(opt, _MockOptimizer) else DistributedOptimizer(opt, model) for opt in optimizers
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
        if (
            isinstance(plugin, MixedPrecision)
            and plugin.scaler is not None
            and not isinstance(plugin.scaler, GradScaler)
        ):
            self._replaced_scaler = plugin.scaler
            plugin.scaler = _sharded_scaler(plugin.scaler)

    def on_exception(self, exception: BaseException) -> None:
        """A collective may have been cut off on some rank: the next fit gets a group of its own."""
        world = torch.distributed.group.WORLD
        if world is not None:
            _COLLECTIVES.pop(world, None)

    def teardown(self) -> None:
        plugin = self.precision_plugin
        for name in ("clip_grad_by_norm", "clip_grad_by_value"):
            plugin.__dict__.pop(name, None)
        if self._replaced_scaler is not None and isinstance(plugin, MixedPrecision) and plugin.scaler is not None:
            if plugin.scaler._scale is not None:
                self._replaced_scaler.load_state_dict(plugin.scaler.state_dict())
            plugin.scaler, self._replaced_scaler = self._replaced_scaler, None
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
        if isinstance(optimizer, LightningOptimizer):
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


_COLLECTIVES: WeakKeyDictionary[ProcessGroup, Collectives] = WeakKeyDictionary()


def _engine_collectives(device: torch.device) -> Collectives:
    """A group for the engine alone, since Lightning's collectives on the default group would wait behind ours.

    One for all fits in this process: what a Trainer made for itself could be freed only by ending the default group.
    """
    world = torch.distributed.group.WORLD
    assert world is not None, "Lightning initialises torch.distributed before it sets the model up"
    if world not in _COLLECTIVES:
        _COLLECTIVES[world] = make_collectives(private_group(None, device), device)
    return _COLLECTIVES[world]


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


def _sharded_scaler(scaler: torch.amp.GradScaler) -> GradScaler:
    """A scaler of ours in the state of the given one."""
    ours = GradScaler(
        scaler._device,
        init_scale=scaler.get_scale(),
        growth_factor=scaler.get_growth_factor(),
        backoff_factor=scaler.get_backoff_factor(),
        growth_interval=scaler.get_growth_interval(),
        enabled=scaler.is_enabled(),
    )
    ours._init_growth_tracker = scaler._get_growth_tracker()
    return ours
