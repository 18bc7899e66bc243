"""Accelerate's own ``ParallelismConfig``, and models that torch or Transformers have cut over its ``"tp"`` dimension.

Does nothing where no such configuration is given.
"""

from __future__ import annotations

import contextlib
import functools
import os
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import Module

from .._faults.process_collectives import engine_collectives
from ..core import DistributedDataParallelConfig, SingleRankCollectives, cut_state, dtensors_of
from .plugin import MegatronDDPPlugin
from .prepared_model import PreparedModel

_OTHERS = {"cp_size": "context parallelism", "sp_size": "sequence parallelism over devices (Ulysses)"}


def check_parallelism(arguments: dict[str, Any]) -> None:
    """Refuses what a ``ParallelismConfig``, given or in the environment, asks for beside data and tensor parallelism.

    Raises:
        ValueError: by the name of the size.
    """
    given = arguments.get("parallelism_config")
    launched = os.environ.get("ACCELERATE_USE_PARALLELISM_CONFIG", "false").lower() == "true"
    for name, what in _OTHERS.items():
        # where accelerate launch passes its file on
        size = int(os.environ.get(f"PARALLELISM_CONFIG_{name.upper()}", "1")) if launched else 1
        if (size := size if given is None else getattr(given, name)) > 1:
            raise ValueError(
                f"ParallelismConfig({name}={size}) asks for {what}, which this engine has not: leave {name} at 1, or "
                "use accelerate's own Accelerator. dp_replicate_size, dp_shard_size and tp_size are understood"
            )


class TensorParallel:
    """Lets an Accelerator know ``parallelism_config``; comes before accelerate's own class."""

    parallelism_config: Any
    torch_device_mesh: Any
    distributed_type: Any
    use_distributed: bool
    device: torch.device
    unwrap_model: Callable[..., Module]
    is_main_process: bool
    is_local_main_process: bool
    project_configuration: Any

    megatron_ddp_plugin: MegatronDDPPlugin
    megatron_ddp_config: DistributedDataParallelConfig
    _models: list[Any]

    @property
    def multi_device(self) -> bool:
        """As accelerate's; with a ``parallelism_config`` also on CPUs, for which accelerate has no mesh of its own."""
        on_cpus = str(self.distributed_type.value) == "MULTI_CPU" and self.parallelism_config is not None
        return on_cpus or bool(super().multi_device)  # type: ignore[misc]

    def _instances(self) -> dict[str, int]:
        """The number of optimizer instances that ``dp_replicate_size`` times ``dp_shard_size`` means."""
        config = self.parallelism_config
        if config is None or not (config.dp_replicate_enabled and config.dp_shard_enabled):
            return {}
        return {"num_distributed_optimizer_instances": config.dp_replicate_size}

    def _prepare_tp(self, *args: Any) -> tuple[Any, ...]:
        # accelerate's looks for the parameters of optimizers by address, and empties them; here they are in place
        return args

    def _has_tensor_ranks(self) -> bool:
        config = self.parallelism_config
        return config is not None and config.tp_enabled

    def _wrap(self, model: Module) -> PreparedModel:
        way_out = self.megatron_ddp_plugin.all_reduce_option
        if self._has_tensor_ranks():
            if not dtensors_of(model):
                raise ValueError(
                    f"ParallelismConfig(tp_size={self.parallelism_config.tp_size}) and a {type(model).__name__} that "
                    "has no tensor-parallel parameter: load it with from_pretrained(..., distributed_config="
                    "DistributedConfig(tp_size=...)), or call parallelize_module(model, "
                    'accelerator.torch_device_mesh["tp"], plan) before it is prepared'
                )
            group = self._data_parallel_group()
            made = PreparedModel(model, self.megatron_ddp_config, process_group=group, all_reduce_option=way_out)
            take_whole_states(model)
            return made
        collectives = engine_collectives(self.device) if self.use_distributed else SingleRankCollectives()
        return PreparedModel(model, self.megatron_ddp_config, collectives=collectives, all_reduce_option=way_out)

    def _data_parallel_group(self) -> ProcessGroup:
        mesh, names = self.torch_device_mesh, self.parallelism_config.dp_dim_names
        if names:
            with warnings.catch_warnings():
                # accelerate flattens both dimensions into "dp", and keeps the result nowhere but in the mesh
                warnings.filterwarnings("ignore", "Slicing a flattened dim")
                group: ProcessGroup = mesh[names[0] if len(names) == 1 else "dp"].get_group()
            return group
        from torch.distributed.device_mesh import init_device_mesh

        # every rank is a tensor rank of one group, and has itself for its data-parallel ranks
        return init_device_mesh(self.device.type, (1, mesh.size()), mesh_dim_names=("dp", "tp"))["dp"].get_group()

    def get_state_dict(self, model: Any, unwrap: bool = True) -> Any:
        """Returns as accelerate's does; of a tensor-parallel model whole weights, on the host, where they are saved: on
        the main process, and with ``save_on_each_node`` on every node's. Collective then.

        Other processes get an empty dictionary.
        """
        inner = self.unwrap_model(model)
        if not dtensors_of(inner):
            return super().get_state_dict(model, unwrap)  # type: ignore[misc]
        on_each_node = self.project_configuration.save_on_each_node
        return whole_state(inner, keeps=self.is_main_process or (on_each_node and self.is_local_main_process))

    def load_state(self, *args: Any, **kwargs: Any) -> Any:
        """Loads as accelerate's does; a tensor-parallel model takes its parts of whole weights."""
        with _showing_ties_alone([model for model in self._models if dtensors_of(model)]):
            return super().load_state(*args, **kwargs)  # type: ignore[misc]


def whole_state(module: Module, *, keeps: bool) -> OrderedDict[str, Any]:
    """The module's state with whole weights, copied to the host, if this rank keeps it; empty if not. Collective.

    torch's own gives it to rank 0 alone, or to all ranks.
    """
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    whole: OrderedDict[str, Any] = OrderedDict()
    parts: dict[str, Any] = get_model_state_dict(module)
    for name, value in parts.items():
        # all ranks take part for every name, and hold one whole weight at a time
        full = value.full_tensor() if hasattr(value, "full_tensor") else value
        if keeps:
            whole[name] = full.to("cpu", copy=True) if isinstance(full, Tensor) else full
    # a tied weight is one tensor again, of which accelerate keeps one name, in an OrderedDict alone
    first: dict[int, str] = {}
    for name, param in module.named_parameters(remove_duplicate=False):
        if name in whole:
            whole[name] = whole[first.setdefault(id(param), name)]
    return whole


@contextlib.contextmanager
def _showing_ties_alone(models: Sequence[Module]) -> Iterator[None]:
    """Lets safetensors, which asks a model's state what shares memory, see that of tensors with memory of their own:
    DTensors have no address, and their parts lie in one buffer."""
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


def take_whole_states(model: Module) -> None:
    """Lets ``load_state_dict`` of a tensor-parallel module take whole tensors, as files have: each rank its part."""
    known = (getattr(hook, "hook", None) for hook in model._load_state_dict_pre_hooks.values())
    if cut_in_place not in known:
        model.register_load_state_dict_pre_hook(cut_in_place)


def cut_in_place(module: Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Puts this rank's parts in the place of whole tensors, before torch loads them; as a hook of the module."""
    # torch has made a copy of the caller's dictionary, and hands it on to the submodules
    own = {
        name: state[prefix + name]
        for name, _ in module.named_parameters(remove_duplicate=False)
        if prefix + name in state
    }
    state.update((prefix + name, part) for name, part in cut_state(module, own).items())
