"""The base class by which a wrapped model is an instance of torch's DDP.

[Note: an instance of torch's DDP]
``torch.distributed.checkpoint.state_dict``, torch's pipelining, ``accelerate``, ``transformers``, ``diffusers`` and
PEFT find the user's module by ``isinstance(model, torch.nn.parallel.DistributedDataParallel)`` and then
``model.module``. From any other Module torch's checkpoint helpers return names that begin with ``module.``, and such a
directory does not load into a model that torch DDP wraps.

So the wrapper is an instance of torch's class, and has nothing else of it: its ``__init__`` is not run, there is no
reducer of torch's behind it, and torch's functions that the engine does not define itself end in an AttributeError.
Lightning's strategies are the engine's where ``DDPStrategy`` would reach for that reducer.
"""

from __future__ import annotations

from typing import Any

from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel as TorchDDP


class TorchDDPByName(TorchDDP):
    """Hides the methods of torch's class that every Module's life needs."""

    def __init__(self) -> None:
        Module.__init__(self)

    def __getstate__(self) -> Any:
        return Module.__getstate__(self)

    def __setstate__(self, state: Any) -> None:
        Module.__setstate__(self, state)
