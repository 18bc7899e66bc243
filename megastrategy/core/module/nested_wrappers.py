"""Raises an error if the wrapped model is inside of torch DDP.

Checked in a forward: when the model is wrapped, its caller does not exist yet.
"""

from __future__ import annotations

from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP


def check_not_inside_torch_ddp(model: nn.Module) -> None:
    """Raises ValueError if ``model`` is called inside of a module that torch DDP wraps: both would reduce."""
    outer = TorchDDP._active_ddp_module  # the torch DDP whose forward is running, or a GraphSplits
    if isinstance(outer, nn.Module) and any(child is model for child in outer.modules()):
        raise ValueError(
            f"this model is inside a DistributedDataParallel of torch's (around a {type(outer.module).__name__}), and "
            "both would reduce its gradients. Leave one out: train with this one alone, around the whole module, or "
            "give torch's the plain module (model.close(), then model.module)"
        )
