"""Answers for what scripts pass to torch DDP's constructor, and read from what it returns."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed.algorithms.join import _JoinConfig
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from .collectives.process_groups import world_group
from .config import DistributedDataParallelConfig
from .ddp_arguments import config_from_arguments


def config_with(config: Any, options: Mapping[str, Any], device: torch.device) -> DistributedDataParallelConfig:
    """Returns the configuration of a model on ``device``: ``config``, or that of torch DDP's arguments, whose
    ``device_ids`` may be in the place of ``config``.

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
    """The device that is meant; None for a number where devices have none."""
    if isinstance(given, int):
        return None if own.type == "cpu" else torch.device(own.type, given)
    device = torch.device(given)
    return own if device.type == own.type and device.index is None else device


def _index(model: Any) -> int | None:
    return None if model.device.type == "cpu" else (model.device.index or 0)


def bucket_bytes(model: Any) -> list[int]:
    """The size of every bucket of gradients."""
    layout = model.layout
    return [bucket.numel * layout.buffers[bucket.buffer].grad_dtype.itemsize for bucket in layout.buckets]


SHOWN: dict[str, Callable[[Any], Any]] = {
    "process_group": lambda model: world_group(),  # whose ranks are those of the engine's own groups
    "find_unused_parameters": lambda model: model.ddp_config.find_unused_parameters,
    "static_graph": lambda model: model.ddp_config.static_graph or model.static_graph_is_declared,
    "broadcast_buffers": lambda model: model.ddp_config.broadcast_buffers,
    "forward_sync_buffers": lambda model: model.ddp_config.broadcast_buffers,
    "gradient_as_bucket_view": lambda model: True,
    "bucket_bytes_cap": lambda model: max(bucket_bytes(model), default=0),
    "bucket_bytes_cap_default": lambda model: model.ddp_config.bucket_size is None,
    "use_side_stream_for_tensor_copies": lambda model: False,
    "require_forward_param_sync": lambda model: model.buffers_may_differ,
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
    "scatter": lambda model: types.MethodType(TorchDDP.scatter, model),  # these three need nothing but the device
    "to_kwargs": lambda model: types.MethodType(TorchDDP.to_kwargs, model),
    "gather": lambda model: types.MethodType(TorchDDP.gather, model),
    "join_device": lambda model: model.device,
    "join_process_group": lambda model: world_group(),
    "_distributed_rank": lambda model: model.engine.collectives.rank,
    "_static_graph_delay_allreduce_enqueued": lambda model: True,  # no first backward has to be prepared
}
"""torch DDP's attributes that have a meaning here, each with its value."""

NOT_USED: dict[str, Callable[[], Any]] = {
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

OF_TORCHS_REDUCER = ("logger", "_bucket_config")

DDP_FUNCTIONS = frozenset(
    name
    for name, value in vars(TorchDDP).items()
    if callable(value) and not (name.startswith("__") or hasattr(nn.Module, name) or name in SHOWN)
)
"""torch DDP's functions, but for those that every module has and those that have a meaning here."""


def shown(model: Any, name: str) -> Any:
    """Returns the value here of an attribute of torch DDP's.

    Raises:
        AttributeError: if it belongs to torch's reducer, with what takes its place; and for a name that is not torch's.
    """
    if name in OF_TORCHS_REDUCER:
        raise AttributeError(
            f"{name} belongs to torch DDP's reducer, and this model is reduced by megastrategy: "
            "_get_ddp_logging_data() returns its figures, layout.buckets its buckets"
        )
    if name in SHOWN:
        return SHOWN[name](model)
    if name in NOT_USED:
        return NOT_USED[name]()
    if name in DDP_FUNCTIONS:
        return functools.partial(refuse_function, name)
    raise AttributeError(f"{type(model).__name__!r} object has no attribute {name!r}")


def refuse_function(name: str, *_: Any, **__: Any) -> NoReturn:
    """Says that a function of torch DDP's has nothing to work on."""
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
    """Says what takes the place of a communication hook."""
    raise NotImplementedError(
        f"{name}() belongs to torch DDP's reducer, and this model is reduced by megastrategy. Instead of "
        "fp16_compress_hook or bf16_compress_hook set grad_wire_dtype='fp16' or 'bf16' before the wrap (a field of "
        "DistributedDataParallelConfig and of the plugin, an argument of the strategy); leave allreduce_hook out"
    )
