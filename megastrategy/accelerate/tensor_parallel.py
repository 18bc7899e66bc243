"""Accelerate's ``ParallelismConfig``, and models that torch or Transformers have cut over its ``"tp"`` dimension, or
over the expert mesh."""

from __future__ import annotations

import contextlib
import functools
import os
import warnings
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import Module

from .._expert_mesh import EXPERT, check_has_experts, make_expert_mesh
from .._faults.process_collectives import engine_collectives
from ..core import SingleRankCollectives, cut_state, dtensors_of
from .prepared_model import PreparedModel

_REFUSED = {
    "cp_size": "context parallelism, which accelerate has on accelerators only with FSDP2: leave cp_size at 1, and cut "
    "sequences in a plain loop, or by MegatronDDPStrategy(context_parallel_size=...) in Lightning or Fabric",
    "sp_size": "sequence parallelism over devices (Ulysses), which this engine lacks: leave sp_size at 1, or use "
    "accelerate's own Accelerator. dp_replicate_size, dp_shard_size, tp_size, and cp_size on CPUs, are understood",
}


def check_parallelism(arguments: dict[str, Any]) -> None:
    """Refuses sizes of a ``ParallelismConfig``, given or in the environment, that this engine or accelerate lacks.

    Raises:
        ValueError: by the name of the size.
    """
    given = arguments.get("parallelism_config")
    launched = _is_set("ACCELERATE_USE_PARALLELISM_CONFIG")
    on_cpus = arguments.get("cpu") or _is_set("ACCELERATE_USE_CPU") or not torch.accelerator.is_available()
    for name, what in _REFUSED.items():
        # where accelerate launch passes its file on
        size = int(os.environ.get(f"PARALLELISM_CONFIG_{name.upper()}", "1")) if launched else 1
        size = size if given is None else getattr(given, name)
        if size > 1 and not (name == "cp_size" and on_cpus):
            raise ValueError(f"ParallelismConfig({name}={size}) asks for {what}")


def _is_set(variable: str) -> bool:
    return os.environ.get(variable, "false").lower() in ("true", "1")


def expert_mesh_of(accelerator: Any, size: int) -> Any:
    """Returns the mesh of ``expert_parallel_size``; None if that is 1. Collective.

    Raises:
        ValueError: if the processes cannot be divided so, or tensor ranks are asked for as well.
    """
    config = accelerator.parallelism_config
    if size > 1 and config is not None and config.tp_enabled:
        raise ValueError(
            f"MegatronDDPPlugin(expert_parallel_size={size}) and ParallelismConfig(tp_size={config.tp_size}) are not "
            "supported together: leave one of them at 1"
        )
    return make_expert_mesh(size, accelerator.num_processes, accelerator.device.type, "the number of processes")


def optimizer_instances(config: Any) -> dict[str, int]:
    """Translates ``dp_replicate_size`` times ``dp_shard_size`` of a ``ParallelismConfig`` to this engine's option."""
    if config is None or not (config.dp_replicate_enabled and config.dp_shard_enabled):
        return {}
    return {"num_distributed_optimizer_instances": config.dp_replicate_size}


def wrap(model: Module, accelerator: Any) -> PreparedModel:
    """Wraps a model over the data-parallel ranks, and the context ranks, of an Accelerator.

    Raises:
        ValueError: if there are tensor ranks, and the model has no tensor-parallel parameter, or no divided experts.
    """
    config = accelerator.megatron_ddp_config
    parallelism = accelerator.parallelism_config
    way_out = accelerator.megatron_ddp_plugin.all_reduce_option
    expert_mesh = accelerator.expert_mesh
    if parallelism is None or not parallelism.tp_enabled:
        collectives = engine_collectives(accelerator.device) if accelerator.use_distributed else SingleRankCollectives()
        if expert_mesh is not None:
            check_has_experts(model, expert_mesh[EXPERT].size(), "accelerator")
        replicas = accelerator.megatron_ddp_plugin.replicas
        ranks = {"collectives": collectives, "expert_mesh": expert_mesh, "replicas": replicas}
        prepared = PreparedModel(model, config, **ranks, all_reduce_option=way_out)
        if expert_mesh is not None:
            load_full_states(model)
        return prepared
    if not dtensors_of(model):
        raise ValueError(
            f"ParallelismConfig(tp_size={parallelism.tp_size}) and a {type(model).__name__} that has no "
            "tensor-parallel parameter: load it with from_pretrained(..., distributed_config="
            "DistributedConfig(tp_size=...)), or call parallelize_module(model, "
            'accelerator.torch_device_mesh["tp"], plan) before it is prepared'
        )
    group = _data_parallel_group(accelerator.torch_device_mesh, parallelism.dp_cp_dim_names, accelerator.device)
    prepared = PreparedModel(model, config, process_group=group, all_reduce_option=way_out)
    load_full_states(model)
    return prepared


def _data_parallel_group(mesh: Any, names: Sequence[str], device: torch.device) -> ProcessGroup:
    if names:
        with warnings.catch_warnings():
            # accelerate flattens the dimensions into "dp_cp", and keeps the result only in the mesh
            warnings.filterwarnings("ignore", "Slicing a flattened dim")
            group: ProcessGroup = mesh[names[0] if len(names) == 1 else "dp_cp"].get_group()
        return group
    from torch.distributed.device_mesh import init_device_mesh

    # all ranks are tensor ranks of one group, and each is its own only data-parallel rank
    return init_device_mesh(device.type, (1, mesh.size()), mesh_dim_names=("dp", "tp"))["dp"].get_group()


def full_state(module: Module, *, keeps: bool) -> OrderedDict[str, Any]:
    """Returns the module's state with full weights, copied to the host, or empty if not ``keeps``. Collective.

    torch's own function returns it on rank 0 only, or on all ranks.
    """
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    state: OrderedDict[str, Any] = OrderedDict()
    parts: dict[str, Any] = get_model_state_dict(module)
    for name, value in parts.items():
        # all ranks take part for every name, and hold one full weight at a time
        full = value.full_tensor() if hasattr(value, "full_tensor") else value
        if keeps:
            state[name] = full.to("cpu", copy=True) if isinstance(full, Tensor) else full
    # a tied weight is one tensor again; accelerate keeps one of its names, only in an OrderedDict
    first: dict[int, str] = {}
    for name, param in module.named_parameters(remove_duplicate=False):
        if name in state:
            state[name] = state[first.setdefault(id(param), name)]
    return state


@contextlib.contextmanager
def showing_only_ties(models: Sequence[Module]) -> Iterator[None]:
    """Hides DTensors from safetensors, which searches a model's state for shared memory: DTensors have no address, and
    their parts are in one buffer."""
    for model in models:
        own: dict[int, Tensor] = {}
        shown = {
            name: own.setdefault(id(value), torch.zeros(1)) for name, value in model.state_dict(keep_vars=True).items()
        }
        model.__dict__["state_dict"] = functools.partial(dict, shown)
    try:
        yield
    finally:
        for model in models:
            del model.__dict__["state_dict"]


def load_full_states(model: Module) -> None:
    """Lets ``load_state_dict`` of a tensor-parallel module load full tensors, as in files: each rank its part."""
    hooks = (getattr(hook, "hook", None) for hook in model._load_state_dict_pre_hooks.values())
    if cut_in_place not in hooks:
        model.register_load_state_dict_pre_hook(cut_in_place)


def cut_in_place(module: Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Replaces full tensors by this rank's parts before torch loads them; a hook of the module."""
    # torch has made a copy of the caller's dictionary, and hands it on to the submodules
    own = {
        name: state[prefix + name]
        for name, _ in module.named_parameters(remove_duplicate=False)
        if prefix + name in state
    }
    state.update((prefix + name, part) for name, part in cut_state(module, own).items())
