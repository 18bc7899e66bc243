"""torch's gradient scaler, which sees the gradients of all shards."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..config import DistributedDataParallelConfig


class GradScaler(torch.amp.GradScaler):
    """``torch.amp.GradScaler`` for sharded optimizers: same interface, same ``state_dict``.

    A :class:`~megastrategy.DistributedOptimizer` unscales the shard it owns and agrees with the other ranks on
    non-finite gradients, so a step is skipped by all ranks or by none, and the scale stays equal. Other optimizers
    are treated as torch treats them.
    """

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        # By name and not by class: a framework's wrapper around the optimizer forwards attributes.
        unscale: Any = getattr(optimizer, "unscale_grads_", None)
        if unscale is None:
            per_device: dict[torch.device, Tensor] = super()._unscale_grads_(
                optimizer, inv_scale, found_inf, allow_fp16
            )
            return per_device
        found: Tensor = unscale(inv_scale)
        # torch adds these up over devices, and skips if the sum is not zero. This one is the same on all ranks already.
        return {found.device: found}

    def _maybe_opt_step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        # torch's read on the host cannot be interrupted. If a rank is gone, that is found here instead.
        wait: Any = getattr(optimizer, "wait_for_found_inf", None)
        if wait is not None:
            wait()
        return super()._maybe_opt_step(optimizer, *args, **kwargs)


def adapt_scaler(
    scaler: Any, config: DistributedDataParallelConfig, whose: str, way_out: str
) -> type[torch.amp.GradScaler] | None:
    """Makes the scaler of a framework a :class:`GradScaler`, if it is one of torch's that scales.

    The object stays, with its options and state, since a framework, a checkpoint and the user may hold it. A class of
    the user's own keeps its methods, behind those that read the other ranks' shards.

    Args:
        scaler: may be None, or anything else that a precision plugin has as its scaler.
        config: of the model whose gradients it scales.
        whose: the scaler's owner and name there, for the error.
        way_out: how to use a precision without a scaler, for the error.

    Returns:
        The class that it had, to restore it; None if it was not changed.

    Raises:
        ValueError: if gradients are checked for infinities, which a scaler produces on purpose.
    """
    if not isinstance(scaler, torch.amp.GradScaler) or not scaler.is_enabled():
        return None
    if config.check_for_nan_in_grad:
        raise ValueError(
            f"check_for_nan_in_grad=True contradicts {whose}, which meets infinite gradients on purpose, to find the "
            f"largest scale: drop the option (such steps are skipped), or {way_out}"
        )
    if isinstance(scaler, GradScaler):
        return None
    kind = type(scaler)
    scaler.__class__ = GradScaler if kind is torch.amp.GradScaler else type(kind.__name__, (GradScaler, kind), {})
    return kind
