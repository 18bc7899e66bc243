"""Translates torch DDP's arguments and 16-bit hooks to the configuration."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn, TypeGuard

import torch

from .config import DistributedDataParallelConfig, field_names, refuse_unknown_option

_MODULE = "torch.distributed.algorithms.ddp_comm_hooks.default_hooks"
_WIRE_DTYPES: Mapping[str, str | None] = {
    "allreduce_hook": None,  # torch DDP's default
    "fp16_compress_hook": "fp16",
    "bf16_compress_hook": "bf16",
}

_HOOKS = (
    "buckets are reduced by this engine alone, which translates torch's fp16_compress_hook and bf16_compress_hook; "
    "other communication hooks and model averaging need strategy='ddp'. Fewer bytes on slow links: "
    "grad_wire_dtype='bf16'"
)
_REFUSED_DDP_ARGUMENTS = {
    "ddp_comm_hook": _HOOKS,
    "ddp_comm_state": _HOOKS,
    "ddp_comm_wrapper": _HOOKS,
    "model_averaging_period": _HOOKS,
    "mixed_precision": "choose the precision in the framework (bf16-true keeps fp32 main params) or by autocast",
    "delay_all_reduce_named_params": "freeze what must not be reduced, or leave it out of the wrapped module",
    "param_to_hook_all_reduce": "freeze what must not be reduced, or leave it out of the wrapped module",
    "device_mesh": "pass the data-parallel process group",
    "device_ids": "the module's own device is used: move it there first",
    "output_device": "the module's own device is used: move it there first",
    "lazy_bucket_allocation": "grad_buffer='pooled' takes a bucket's memory when its gradients come, and gives it back",
    "bucket_cap_mb_list": "buckets have one size: pass bucket_size (elements) or bucket_cap_mb",
    "dim": "inputs are not scattered; a sampler gives every rank its part",
    "check_reduction": "it has had no effect in torch for years: leave it out",
    "init_sync": "parameters and buffers are always broadcast from rank 0 at the start: leave it out",
    "skip_all_reduce_unused_params": "every bucket is always reduced, the same collectives on all ranks: leave it out",
}
_DEFAULTS_OF_REFUSED = {
    "dim": 0,
    "init_sync": True,
    "check_reduction": False,
    "skip_all_reduce_unused_params": False,
    "lazy_bucket_allocation": False,
}
"""torch's defaults that are not None."""


def config_with(config: Any, options: Mapping[str, Any], device: torch.device) -> DistributedDataParallelConfig:
    """Returns the configuration of a model on ``device``: ``config``, or that of torch DDP's arguments, whose
    ``device_ids`` may be passed as ``config``.

    Raises:
        ValueError: if both are given, or for an argument that cannot have its effect here.
    """
    rest = dict(options)
    if isinstance(config, list | tuple):
        rest, config = {"device_ids": config, **rest}, None
    if not isinstance(config, DistributedDataParallelConfig | None):
        raise ValueError(f"config: expected a DistributedDataParallelConfig, got {type(config).__name__}")
    for name in ("device_ids", "output_device"):
        value = rest.pop(name, None)
        given = value if isinstance(value, list | tuple) else [] if value is None else [value]
        if any(_device(each, device) != device for each in given) or len(given) > 1:
            raise ValueError(
                f"{name}={value!r}: the module is on {device}, where it stays, with its outputs. Leave {name} out, or "
                "move the module first"
            )
    if rest.pop("dim", 0) != 0:
        raise ValueError(f"dim={options['dim']!r}: a rank has one device, and its batch is not split: leave dim out")
    if config is not None and rest:
        raise ValueError(
            f"{', '.join(rest)}: pass torch DDP's arguments or a DistributedDataParallelConfig, which has fields for "
            "them, not both"
        )
    return config_from_arguments(rest) if config is None else config


def _device(given: Any, own: torch.device) -> torch.device | None:
    """Returns the device that is meant; None for a number if devices have none."""
    if isinstance(given, int):
        return None if own.type == "cpu" else torch.device(own.type, given)
    device = torch.device(given)
    return own if device.type == own.type and device.index is None else device


def refuse_comm_hook() -> NoReturn:
    """Raises the error of a communication hook, with the alternative."""
    raise NotImplementedError(
        "register_comm_hook() belongs to torch DDP's reducer, and this model is reduced by megastrategy. Instead of "
        "fp16_compress_hook or bf16_compress_hook set grad_wire_dtype='fp16' or 'bf16' before the wrap (a field of "
        "DistributedDataParallelConfig and of the plugin, an argument of the strategy); leave allreduce_hook out"
    )


def config_from_arguments(arguments: Mapping[str, Any], beside: Iterable[str] = ()) -> DistributedDataParallelConfig:
    """Builds a config from keyword arguments that may be the config's fields or torch DDP's.

    Of torch DDP's, ``find_unused_parameters``, ``static_graph`` and ``broadcast_buffers`` (``forward_sync_buffers``
    overrides it) are fields here too; ``gradient_as_bucket_view`` and ``batched_grad_copy`` are accepted and have no
    effect (gradients are always in the buckets); ``bucket_cap_mb`` (MiB of fp32 gradients) sets ``bucket_size``,
    unless it is None; ``ddp_comm_hook`` sets ``grad_wire_dtype`` if it is one of torch's that send 16 bits. All others
    are refused by name.

    Args:
        arguments: by name.
        beside: further names that the caller knows, for the hint at a misspelt argument.

    Raises:
        ValueError: for an unknown argument, with the nearest known name; and for one of torch DDP's that has no
            counterpart here, with the reason, unless it has torch's default value.
    """
    arguments = translate_comm_hook(arguments)
    chosen = _fields_in(arguments, beside)
    # After the fields, as in torch: the newer argument overrides broadcast_buffers.
    if arguments.get("forward_sync_buffers") is not None:
        chosen["broadcast_buffers"] = arguments["forward_sync_buffers"]
    cap = arguments.get("bucket_cap_mb")
    if cap is not None:
        # Neither is more recent than the other, so either could be meant.
        if chosen.get("bucket_size") is not None:
            raise ValueError("bucket_cap_mb and bucket_size both set the size of a bucket: pass one of the two")
        chosen["bucket_size"] = _bucket_size_from_mib(cap)
    return DistributedDataParallelConfig(**chosen)


def _fields_in(arguments: Mapping[str, Any], beside: Iterable[str]) -> dict[str, Any]:
    """Returns the config's fields among the arguments; raises for arguments that are neither fields nor torch's."""
    known = field_names()
    chosen: dict[str, Any] = {}
    for name, value in arguments.items():
        if name == "broadcast_buffers" and value is None:
            continue  # torch's default beside forward_sync_buffers, which means True
        if name in known:
            chosen[name] = value
        elif name in ("gradient_as_bucket_view", "batched_grad_copy"):
            if not isinstance(value, bool):
                raise ValueError(f"{name}={value!r}: expected True or False")
        elif name in _REFUSED_DDP_ARGUMENTS:
            # By identity: False == 0. The default of an argument that is not listed is None.
            if value is _DEFAULTS_OF_REFUSED.get(name):
                continue  # torch's default
            raise ValueError(f"{name}={value!r} is torch DDP's and not supported here: {_REFUSED_DDP_ARGUMENTS[name]}")
        elif name not in ("bucket_cap_mb", "forward_sync_buffers"):
            refuse_unknown_option(name, [*known, *beside])
    return chosen


def _bucket_size_from_mib(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
        raise ValueError(f"bucket_cap_mb={value!r}: expected a positive number of MiB")
    # Four bytes an element, in every wire dtype; a fraction of an element counts as one.
    return max(1, int(value * 2**20 / 4))


def translate_comm_hook(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Replaces ``ddp_comm_hook`` by ``grad_wire_dtype`` if it is one of torch's own for 16 bits; other arguments, and
    other hooks, stay.

    Raises:
        ValueError: if the arguments also select an all-reduce, or a different ``grad_wire_dtype``.
    """
    hook = arguments.get("ddp_comm_hook")
    # By name: importing them takes a tenth of a second, also for users without a hook.
    if not _is_known(hook):
        return dict(arguments)
    dtype = _WIRE_DTYPES[hook.__name__]
    rest = {name: value for name, value in arguments.items() if name != "ddp_comm_hook"}
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


def _is_known(hook: Any) -> TypeGuard[Callable[..., Any]]:
    return getattr(hook, "__module__", None) == _MODULE and getattr(hook, "__name__", None) in _WIRE_DTYPES
