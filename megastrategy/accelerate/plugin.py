"""The options of the door to Accelerate, and the engines that exclude them."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_type_hints

from .._checkpoints.directories import check_state_dict_type
from .._replicas import Replicas
from ..core import (
    DistributedDataParallelConfig,
    check_expert_options,
    config_from_arguments,
    refuses_unknown_options,
)

if TYPE_CHECKING:
    ConfigFields = DistributedDataParallelConfig
else:
    _TYPES = get_type_hints(DistributedDataParallelConfig)
    ConfigFields = dataclasses.make_dataclass(
        "ConfigFields",
        [
            (field.name, _TYPES[field.name], dataclasses.field(default=field.default))
            for field in dataclasses.fields(DistributedDataParallelConfig)
        ],
        kw_only=True,
        frozen=True,
    )


@refuses_unknown_options
@dataclasses.dataclass(frozen=True, kw_only=True)
class MegatronDDPPlugin(ConfigFields):
    """Options for ``Accelerator(megatron_ddp_plugin=...)``: every field of
    :class:`~megastrategy.DistributedDataParallelConfig`, and those below.

    Raises:
        ValueError: for an unknown name, and for a value that cannot be, with the field, the value and the remedy.
    """

    bucket_cap_mb: float | None = None
    """MiB of fp32 gradients in a bucket, as for torch DDP, instead of ``bucket_size``."""

    gradient_as_bucket_view: bool = True
    """Accepted as torch DDP's; gradients always live in the buckets."""

    state_dict_type: Literal["full", "sharded"] = "full"
    """Chooses the output of ``save_state``: the files of torch DDP, or weights and optimizers as a directory that every
    rank writes its part of. Either is loaded."""

    expert_parallel_size: int = 1
    """The number of data-parallel ranks over which user code divides experts, by
    ``accelerator.expert_mesh["expert_parallel"]``."""

    replicas: Replicas | None = None
    """The jobs that train the same model, each with an Accelerator of its own, and may end and come back: a
    ``megastrategy.Replicas``; see docs/replicas.md."""

    _all_reduce_option: ClassVar[str] = "MegatronDDPPlugin(use_distributed_optimizer=False)"

    def __post_init__(self) -> None:
        check_state_dict_type(self.state_dict_type)
        size: object = self.expert_parallel_size
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ValueError(f"expert_parallel_size={size!r}: expected a number of ranks, 1 for no divided experts")
        if not isinstance(self.replicas, Replicas | None):
            raise ValueError(f"replicas={self.replicas!r}: expected a megastrategy.Replicas, which a script makes")
        if self.replicas is not None and size > 1:
            raise ValueError(f"replicas= and expert_parallel_size={size} are not supported together: leave one out")
        config = self.config()
        if size > 1:
            check_expert_options(config, "expert_parallel_size")

    @property
    def all_reduce_option(self) -> str:
        """Returns the way to an all-reduce, in the form in which these options came, for errors that it solves."""
        return self._all_reduce_option

    def launched_with(self, file: Path | None) -> MegatronDDPPlugin:
        """Marks these options as those of the launcher's file and environment. Returns them."""
        where = "in the file that --config names" if file is None else f"in {file}"
        text = (
            f"`use_distributed_optimizer: false` under megatron_ddp_config: {where}, or "
            "MEGATRON_DDP_USE_DISTRIBUTED_OPTIMIZER=false in the environment"
        )
        object.__setattr__(self, "_all_reduce_option", text)
        return self

    def options(self) -> dict[str, Any]:
        """Returns the engine's options that differ from the defaults."""
        values = {field.name: (getattr(self, field.name), field.default) for field in dataclasses.fields(self)}
        del values["state_dict_type"], values["expert_parallel_size"], values["replicas"]
        return {name: value for name, (value, default) in values.items() if value != default}

    def config(self, **defaults: Any) -> DistributedDataParallelConfig:
        """Makes the engine's configuration. ``defaults`` hold where this plugin leaves an option as it is."""
        options = self.options()
        if options.get("bucket_size") is not None:
            defaults.pop("bucket_cap_mb", None)
        return config_from_arguments(defaults | options)


def refuse_other_engines(arguments: dict[str, Any]) -> None:
    environment = {
        "deepspeed_plugin": "ACCELERATE_USE_DEEPSPEED",
        "deepspeed_plugins": "ACCELERATE_USE_DEEPSPEED",
        "fsdp_plugin": "ACCELERATE_USE_FSDP",
        "megatron_lm_plugin": "ACCELERATE_USE_MEGATRON_LM",
        "torch_tp_plugin": "",
    }
    # accelerate launch passes its file on in the environment, where the arguments show nothing
    for name, variable in environment.items():
        where = f"{name}=" if arguments.get(name) is not None else ""
        if not where and variable and os.environ.get(variable, "false").lower() in ("true", "1"):
            where = f"the environment's {variable} (of accelerate's configuration)"
        if where:
            raise ValueError(
                f"megastrategy's Accelerator was given {where}, another engine than its own: a model is trained by "
                "one. Drop it (distributed_type: MULTI_GPU or MULTI_CPU in accelerate's configuration), or use "
                "accelerate's own Accelerator"
            )
