"""torch DDP's hooks that send gradients in 16 bits, as the option that takes their place."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeGuard

_MODULE = "torch.distributed.algorithms.ddp_comm_hooks.default_hooks"
_WIRE_DTYPES: Mapping[str, str | None] = {
    "allreduce_hook": None,  # what torch DDP does without one
    "fp16_compress_hook": "fp16",
    "bf16_compress_hook": "bf16",
    "fp16_compress_wrapper": "fp16",
    "bf16_compress_wrapper": "bf16",
}


def translate_comm_hook(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Puts ``grad_wire_dtype`` in the place of ``ddp_comm_hook`` and ``ddp_comm_wrapper``, where these are torch's own
    for 16 bits; all other arguments, and other hooks, are as they were.

    Raises:
        ValueError: if the arguments ask for an all-reduce, or for another ``grad_wire_dtype``, as well.
    """
    hook, wrapper = arguments.get("ddp_comm_hook"), arguments.get("ddp_comm_wrapper")
    # By name: importing them takes a tenth of a second, which nobody without a hook shall wait for.
    if (
        not _is_known(hook)
        or not (wrapper is None or _is_known(wrapper))
        or arguments.get("ddp_comm_state") is not None
    ):
        return dict(arguments)
    dtype = _WIRE_DTYPES[_what_rounds(arguments).__name__]
    rest = {name: value for name, value in arguments.items() if not name.startswith("ddp_comm_")}
    if dtype is None:
        return rest
    if rest.get("use_distributed_optimizer") is False:
        raise ValueError(
            f"ddp_comm_hook={hook.__name__} contradicts use_distributed_optimizer=False: an all-reduce sends gradients "
            "as they are. Leave use_distributed_optimizer on (gradients are then sent in 16 bits and summed in 32), or "
            "drop the hook"
        )
    if rest.get("grad_wire_dtype") not in (None, dtype):
        other = rest["grad_wire_dtype"]
        raise ValueError(f"ddp_comm_hook={hook.__name__} contradicts grad_wire_dtype={other!r}: pass one of the two")
    return {**rest, "grad_wire_dtype": dtype}


def describe_translation(arguments: Mapping[str, Any]) -> str:
    """The line that says what the hook in the arguments became; "" if there is none, or one that rounds nothing."""
    if arguments.get("ddp_comm_hook") is None:
        return ""
    name = _what_rounds(arguments).__name__
    if (dtype := _WIRE_DTYPES[name]) is None:
        return ""
    return (
        f"megatron_ddp: torch DDP's {name} became grad_wire_dtype={dtype!r}: gradients are sent in 16 bits, and summed "
        "in 32 by the rank that steps with them"
    )


def _what_rounds(arguments: Mapping[str, Any]) -> Callable[..., Any]:
    """The wrapper around the hook, or the hook itself if there is none."""
    wrapper: Callable[..., Any] | None = arguments.get("ddp_comm_wrapper")
    return arguments["ddp_comm_hook"] if wrapper is None else wrapper


def _is_known(hook: Any) -> TypeGuard[Callable[..., Any]]:
    return getattr(hook, "__module__", None) == _MODULE and getattr(hook, "__name__", None) in _WIRE_DTYPES
