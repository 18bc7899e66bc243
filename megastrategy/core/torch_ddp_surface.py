"""Translates torch DDP's arguments and 16-bit hooks to the configuration, and answers reads of its attributes."""

from __future__ import annotations

import difflib
import functools
import math
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn, TypeGuard

import torch
from torch import nn
from torch.distributed.algorithms.join import _JoinConfig
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from .collectives import world_group
from .config import DistributedDataParallelConfig, field_names

_MODULE = "torch.distributed.algorithms.ddp_comm_hooks.default_hooks"
_WIRE_DTYPES: Mapping[str, str | None] = {
    "allreduce_hook": None,  # torch DDP's default
    "fp16_compress_hook": "fp16",
    "bf16_compress_hook": "bf16",
    "fp16_compress_wrapper": "fp16",
    "bf16_compress_wrapper": "bf16",
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


def _index(model: Any) -> int | None:
    return None if model.device.type == "cpu" else (model.device.index or 0)


def bucket_bytes(model: Any) -> list[int]:
    """Returns the size of every bucket of gradients."""
    layout = model.layout
    return [bucket.numel * layout.buffers[bucket.buffer].grad_dtype.itemsize for bucket in layout.buckets]


DDP_ATTRIBUTES: dict[str, Callable[[Any], Any]] = {
    "process_group": lambda model: world_group(),  # the engine's own groups have the same ranks
    "find_unused_parameters": lambda model: model.ddp_config.find_unused_parameters,
    "static_graph": lambda model: model.ddp_config.static_graph or model.static_graph_is_declared,
    "broadcast_buffers": lambda model: model.ddp_config.broadcast_buffers,
    "forward_sync_buffers": lambda model: model.ddp_config.broadcast_buffers,
    "gradient_as_bucket_view": lambda model: True,
    "bucket_bytes_cap": lambda model: max(bucket_bytes(model), default=0),
    "bucket_bytes_cap_default": lambda model: model.ddp_config.bucket_size is None,
    "use_side_stream_for_tensor_copies": lambda model: False,
    "require_forward_param_sync": lambda model: model.buffers_differ,
    "device_ids": lambda model: None if model.device.type == "cpu" else [_index(model)],
    "output_device": _index,
    "device_type": lambda model: model.device.type,
    "dim": lambda model: 0,
    "parameters_to_ignore": lambda model: set(getattr(model.module, "_ddp_params_and_buffers_to_ignore", ())),
    "modules_buffers": lambda model: list(model.module.buffers()),
    "_module_parameters": lambda model: list(model.module.parameters()),
    "named_module_buffers": lambda model: dict(model.module.named_buffers()),
    "reducer": lambda model: model.engine.reducer,
    "_sync_buffers": lambda model: model.engine.broadcast_buffers,
    "scatter": lambda model: types.MethodType(TorchDDP.scatter, model),  # these three need only the device
    "to_kwargs": lambda model: types.MethodType(TorchDDP.to_kwargs, model),
    "gather": lambda model: types.MethodType(TorchDDP.gather, model),
    "join_device": lambda model: model.device,
    "join_process_group": lambda model: world_group(),
    "_distributed_rank": lambda model: model.engine.collectives.rank,
    "_static_graph_delay_allreduce_enqueued": lambda model: True,  # the first backward needs no preparation
}
"""torch DDP's attributes that have a meaning here, each with its value."""

UNUSED_DDP_ATTRIBUTES: dict[str, Callable[[], Any]] = {
    "mixed_precision": lambda: None,
    "bucket_bytes_cap_list": list,
    "broadcast_bucket_size": lambda: 250 * 1024 * 1024,
    "skip_all_reduce_unused_params": lambda: False,
    "is_multi_device_module": lambda: False,
    "batched_grad_copy": lambda: False,
    "lazy_bucket_allocation": lambda: False,
    "require_manual_backward_finalization": lambda: False,  # backward ends with all gradients reduced
    "should_finalize_after_backward": lambda: False,
    "_require_manual_backward_finalization": lambda: False,
    "_join_config": _JoinConfig.construct_disabled_join_config,
    "_use_python_reducer": lambda: False,
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
"""Attributes of features that are not used here, with torch's value for that."""

REDUCER_ATTRIBUTES = ("logger", "_bucket_config")

DDP_FUNCTIONS = frozenset(
    name
    for name, value in vars(TorchDDP).items()
    if callable(value) and not (name.startswith("__") or hasattr(nn.Module, name) or name in DDP_ATTRIBUTES)
)
"""torch DDP's functions, except those of every module and those that have a meaning here."""


def ddp_attribute(model: Any, name: str) -> Any:
    """Returns this engine's value of an attribute of torch DDP's.

    Raises:
        AttributeError: if it belongs to torch's reducer, with the alternative; and for a name that torch
            DDP does not have.
    """
    if name in REDUCER_ATTRIBUTES:
        raise AttributeError(
            f"{name} belongs to torch DDP's reducer, and this model is reduced by megastrategy: "
            "_get_ddp_logging_data() returns its figures, layout.buckets its buckets"
        )
    if name in DDP_ATTRIBUTES:
        return DDP_ATTRIBUTES[name](model)
    if name in UNUSED_DDP_ATTRIBUTES:
        return UNUSED_DDP_ATTRIBUTES[name]()
    if name in DDP_FUNCTIONS:
        return functools.partial(refuse_function, name)
    raise AttributeError(f"{type(model).__name__!r} object has no attribute {name!r}")


def refuse_function(name: str, *_: Any, **__: Any) -> NoReturn:
    """Raises the error of a function of torch DDP's that would have nothing to work on."""
    if name == "_register_builtin_comm_hook":
        refuse_comm_hook(name)
    raise NotImplementedError(
        f"{name}() belongs to torch DDP's reducer, and this model is reduced by megastrategy. Leave the call out; "
        "communication hooks, join() and optimizers fused into backward need torch's own DDP (strategy='ddp', "
        "accelerate's own Accelerator)"
    )


def logging_data(model: Any) -> dict[str, Any]:
    """Returns the entries of torch DDP's ``_get_ddp_logging_data()`` that exist here, under its names."""
    layout, collectives = model.layout, model.engine.collectives
    return {
        "world_size": collectives.size,
        "rank": collectives.rank,
        "module_name": type(model.module).__name__,
        "num_parameter_tensors": len(layout.params),
        "bucket_sizes": ", ".join(map(str, bucket_bytes(model))),
        "broadcast_buffers": model.ddp_config.broadcast_buffers,
        "find_unused_parameters": model.ddp_config.find_unused_parameters,
        "gradient_as_bucket_view": True,
    }


def refuse_comm_hook(name: str = "register_comm_hook") -> NoReturn:
    """Raises the error of a communication hook, with the alternative."""
    raise NotImplementedError(
        f"{name}() belongs to torch DDP's reducer, and this model is reduced by megastrategy. Instead of "
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
    if chosen.get("static_graph") and arguments.get("find_unused_parameters") is False:
        # torch DDP's default, passed with static_graph=True: there the pair means just static_graph.
        del chosen["find_unused_parameters"]
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
            names = list(dict.fromkeys([*known, *beside]))
            near = difflib.get_close_matches(name, names, n=1)
            # The whole list after one near name would hide it.
            hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(names)}"
            raise ValueError(f"unknown argument {name!r}: {hint}")
    return chosen


def _bucket_size_from_mib(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
        raise ValueError(f"bucket_cap_mb={value!r}: expected a positive number of MiB")
    # Four bytes an element, in every wire dtype; a fraction of an element counts as one.
    return max(1, int(value * 2**20 / 4))


def translate_comm_hook(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Replaces ``ddp_comm_hook`` and ``ddp_comm_wrapper`` by ``grad_wire_dtype`` if these are torch's own for 16 bits;
    other arguments, and other hooks, stay.

    Raises:
        ValueError: if the arguments also select an all-reduce, or a different ``grad_wire_dtype``.
    """
    hook, wrapper = arguments.get("ddp_comm_hook"), arguments.get("ddp_comm_wrapper")
    # By name: importing them takes a tenth of a second, also for users without a hook.
    if (
        not _is_known(hook)
        or not (wrapper is None or _is_known(wrapper))
        or arguments.get("ddp_comm_state") is not None
    ):
        return dict(arguments)
    dtype = _WIRE_DTYPES[(wrapper or hook).__name__]
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
    """Returns the line that says what the hook in the arguments became; "" without a hook, or for
    one that rounds nothing."""
    if (hook := arguments.get("ddp_comm_hook")) is None:
        return ""
    name = (arguments.get("ddp_comm_wrapper") or hook).__name__
    if (dtype := _WIRE_DTYPES[name]) is None:
        return ""
    return (
        f"megatron_ddp: torch DDP's {name} became grad_wire_dtype={dtype!r}: gradients are sent in 16 bits, and summed "
        "in 32 by the rank that steps with them"
    )


def _is_known(hook: Any) -> TypeGuard[Callable[..., Any]]:
    return getattr(hook, "__module__", None) == _MODULE and getattr(hook, "__name__", None) in _WIRE_DTYPES
