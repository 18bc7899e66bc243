"""Makes a prepared model an instance of torch's DDP, and answers where torch's attributes are asked for.

[Note: an instance of torch's DDP]
``accelerate``, ``transformers``, ``diffusers``, PEFT and torch's own checkpoint helpers find the user's module by
``isinstance(model, torch.nn.parallel.DistributedDataParallel)`` and then ``model.module``, many of them without asking
the Accelerator. A wrapper that is a plain Module would come back from ``extract_model_from_parallel`` as it was, and
nothing short of patching those packages would change that.

So the wrapper is an instance of torch's class, and has nothing else of it: its ``__init__`` is not run, there is no
reducer of torch's behind it, and torch's functions that the engine does not define itself end in an AttributeError.
Lightning's doors use the engine's own class, since there ``DDPStrategy`` would reach for that reducer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import Module

TorchDDP = torch.nn.parallel.DistributedDataParallel


class TorchDDPByName(TorchDDP):
    """Comes after the engine's class in the order of look-up, and hides the methods of torch's class."""

    def __init__(self) -> None:
        Module.__init__(self)

    def __getstate__(self) -> Any:
        return Module.__getstate__(self)

    def __setstate__(self, state: Any) -> None:
        Module.__setstate__(self, state)
