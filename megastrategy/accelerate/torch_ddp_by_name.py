"""Makes a prepared model an instance of torch's DDP, and answers where torch's attributes are asked for.

[Note: an instance of torch's DDP]
``accelerate``, ``transformers``, ``diffusers``, PEFT and torch's own checkpoint helpers find the user's module by
``isinstance(model, torch.nn.parallel.DistributedDataParallel)`` and then ``model.module``, many of them without asking
the Accelerator. A wrapper that is a plain Module would come back from ``extract_model_from_parallel`` as it was, and
nothing short of patching those packages would change that.

So the wrapper is an instance of torch's class, of which it has nothing but the name. Its ``__init__`` is not run, and
there is no reducer of torch's behind it. Therefore every function of torch's that the engine does not define itself is
refused by name. Lightning's doors use the engine's own class, since there ``DDPStrategy`` would reach for that reducer.

[Note: torch's attributes]
Who has found an instance of torch's DDP also reads what torch's ``__init__`` sets (sentence-transformers' cached losses
read four of them). Each has one of three answers, and a test looks for names of the installed torch that have none:

- What has a meaning here is the engine's value. Setting it does what it does under torch, or is refused: a value that
  nobody reads would be silently without effect.
- What describes a feature that this engine has not is torch's value for "not used".
- What belongs to torch's reducer is an AttributeError that says so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch.distributed.algorithms.join import _JoinConfig
from torch.nn import Module

from ..core import SHOWN, DistributedDataParallel, field_names

TorchDDP = torch.nn.parallel.DistributedDataParallel


def _refuse(name: str) -> Callable[..., NoReturn]:
    def refused(self: Any, *_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError(
            f"{name}() belongs to torch DDP's reducer, and this model is reduced by megastrategy. Communication hooks, "
            "join() and optimizers fused into backward need accelerate's own Accelerator"
        )

    return refused


class TorchDDPByName(TorchDDP):
    """Comes after the engine's class in the order of look-up, and hides what torch's class would do."""

    def __init__(self) -> None:
        Module.__init__(self)

    def __getstate__(self) -> Any:
        return Module.__getstate__(self)

    def __setstate__(self, state: Any) -> None:
        Module.__setstate__(self, state)

    @property
    def require_forward_param_sync(self) -> bool:
        """Whether the next forward broadcasts the module's buffers, where ``broadcast_buffers`` is on."""
        return bool(self.__dict__.get("_buffers_differ", True))

    @require_forward_param_sync.setter
    def require_forward_param_sync(self, value: bool) -> None:
        self._buffers_differ = bool(value)


_OWN = ("require_forward_param_sync", "reducer")

for _name, _value in vars(TorchDDP).items():
    if callable(_value) and not (
        _name.startswith("__")
        or hasattr(Module, _name)
        or hasattr(DistributedDataParallel, _name)
        or _name in vars(TorchDDPByName)
        or _name in SHOWN
    ):
        setattr(TorchDDPByName, _name, _refuse(_name))


# --- see [Note: torch's attributes] ----------------------------------------------------------------------------------


_BEHIND_THE_MODULES = ("dim", "use_side_stream_for_tensor_copies")
_ENGINES: dict[str, Callable[[Any], Any]] = {
    **{name: value for name, value in SHOWN.items() if name not in (*_OWN, *_BEHIND_THE_MODULES)},
    "_static_graph_delay_allreduce_enqueued": lambda model: True,  # no first backward has to be prepared
    "batched_grad_copy": lambda model: False,
    "is_multi_device_module": lambda model: False,
    "require_manual_backward_finalization": lambda model: False,  # backward ends with all gradients reduced
    "should_finalize_after_backward": lambda model: False,
}
"""Attributes that have a meaning here, each with the engine's value. The module's own stand behind, as under torch."""

NOT_USED: dict[str, Callable[[], Any]] = {
    "dim": lambda: 0,
    "mixed_precision": lambda: None,
    "bucket_bytes_cap_list": list,
    "broadcast_bucket_size": lambda: 250 * 1024 * 1024,
    "use_side_stream_for_tensor_copies": lambda: False,
    "skip_all_reduce_unused_params": lambda: False,
    "_join_config": _JoinConfig.construct_disabled_join_config,
    "_use_python_reducer": lambda: False,
    "lazy_bucket_allocation": lambda: False,
    "_require_manual_backward_finalization": lambda: False,
    "_delay_all_reduce_params": list,
    "_delay_all_reduce_all_params": lambda: False,
    "_delay_grad_buffer": lambda: None,
    "_delay_grad_views": list,
    "_comm_hooks": list,
    "_accum_grad_hooks": list,
    "_has_rebuilt_buckets": lambda: False,
    "_lazy_init_ran": lambda: True,
    "_ddp_sink_clone": lambda: False,
}
"""Features of torch's that are not used, with torch's value for that. An attribute of the module's goes before them:
``model.dim`` is more likely to mean its width than the dimension along which torch's DDP would scatter."""


def _engines_value(name: str, value: Callable[[Any], Any]) -> property:
    option = {"forward_sync_buffers": "broadcast_buffers"}.get(name, name)
    way_out = "Leave it as it is"
    if option in field_names():
        way_out = f"Set it before prepare(): MegatronDDPPlugin({option}=...), or the launcher's {option}: in its file"

    def refuse(self: Any, given: Any) -> None:
        if not isinstance(given, bool | int | str | None) or given != value(self):
            raise AttributeError(
                f"{name}={given!r}: a prepared model was laid out for {value(self)!r}, and nobody would ask again. "
                f"{way_out}"
            )

    return property(value, refuse)


for _name, _read in _ENGINES.items():
    setattr(TorchDDPByName, _name, _engines_value(_name, _read))
