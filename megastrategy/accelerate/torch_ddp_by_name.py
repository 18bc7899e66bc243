"""Makes a prepared model an instance of torch's DDP, and answers where torch's attributes are asked for.

[Note: an instance of torch's DDP]
``accelerate``, ``transformers``, ``diffusers``, PEFT and torch's own checkpoint helpers find the user's module by
``isinstance(model, torch.nn.parallel.DistributedDataParallel)`` and then ``model.module``, many of them without asking
the Accelerator. A wrapper that is a plain Module would come back from ``extract_model_from_parallel`` as it was, and
nothing short of patching those packages would change that.

So the wrapper is an instance of torch's class, and has nothing else of it. Its ``__init__`` is not run, and
there is no reducer of torch's behind it. Therefore every function of torch's that the engine does not define itself is
refused by name. Lightning's doors use the engine's own class, since there ``DDPStrategy`` would reach for that reducer.

[Note: torch's attributes]
Code that has found an instance of torch's DDP also reads attributes that torch's ``__init__`` sets
(sentence-transformers' cached losses read four of them). Each has one of three answers, and a test looks for names of
the installed torch that have none:

- An attribute with a meaning here has the engine's value. Setting it works as under torch, or is refused: a value that
  is never read would be silently without effect.
- An attribute of a feature that this engine lacks has torch's value for "not used"; an attribute of the module goes
  before it: ``model.dim`` is more likely to mean its width than the dimension along which torch's DDP would scatter.
- An attribute of torch's reducer is an AttributeError that says so.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import Module

from ..core import DDP_ATTRIBUTES, DDP_FUNCTIONS, DistributedDataParallel, field_names, refuse_function

TorchDDP = torch.nn.parallel.DistributedDataParallel


class TorchDDPByName(TorchDDP):
    """Comes after the engine's class in the order of look-up, and hides the methods of torch's class."""

    def __init__(self) -> None:
        Module.__init__(self)

    def __getstate__(self) -> Any:
        return Module.__getstate__(self)

    def __setstate__(self, state: Any) -> None:
        Module.__setstate__(self, state)

    @property
    def require_forward_param_sync(self) -> bool:
        """Whether the next forward broadcasts the module's buffers, where ``broadcast_buffers`` is on."""
        return bool(self.__dict__.get("buffers_differ", True))

    @require_forward_param_sync.setter
    def require_forward_param_sync(self, value: bool) -> None:
        self.buffers_differ = bool(value)


_OWN = ("require_forward_param_sync", "reducer")

for _name in DDP_FUNCTIONS - vars(TorchDDPByName).keys():
    if not hasattr(DistributedDataParallel, _name):
        setattr(TorchDDPByName, _name, staticmethod(functools.partial(refuse_function, _name)))


# --- see [Note: torch's attributes] ----------------------------------------------------------------------------------


_BEHIND_THE_MODULES = ("dim", "use_side_stream_for_tensor_copies")
_ENGINES: dict[str, Callable[[Any], Any]] = {
    name: value for name, value in DDP_ATTRIBUTES.items() if name not in (*_OWN, *_BEHIND_THE_MODULES)
}
"""Attributes with a meaning here, each with the engine's value. The module's own come after them, as under torch."""


def _engines_value(name: str, value: Callable[[Any], Any]) -> property:
    option = {"forward_sync_buffers": "broadcast_buffers"}.get(name, name)
    way_out = "Leave it as it is"
    if option in field_names():
        way_out = f"Set it before prepare(): MegatronDDPPlugin({option}=...), or the launcher's {option}: in its file"

    def refuse(self: Any, given: Any) -> None:
        if not isinstance(given, bool | int | str | None) or given != value(self):
            raise AttributeError(
                f"{name}={given!r}: a prepared model was laid out for {value(self)!r}, and it is not read again. "
                f"{way_out}"
            )

    return property(value, refuse)


for _name, _read in _ENGINES.items():
    setattr(TorchDDPByName, _name, _engines_value(_name, _read))
