"""The door to Ray Train's integration of Lightning, ``ray.train.lightning``.

Ray takes ``lightning.pytorch``, and ``pytorch_lightning`` where only that is installed; so does this. Its workers run
the training function in a thread that is not the main one, where no signal handler can be set. None is needed: Ray
ends a worker by ending its process, which the other ranks notice as they notice any other that is killed.
"""

from __future__ import annotations

import inspect
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.constants import default_pg_timeout

from ._versions import RAY, require
from .core import place_at

require("ray.train.lightning", RAY)

from ray.train.lightning import RayDDPStrategy

if TYPE_CHECKING:
    from .core import Directory

if TYPE_CHECKING or RayDDPStrategy.__base__.__module__.startswith("lightning."):
    from .lightning import MegatronDDPStrategy
else:
    from .pytorch_lightning import MegatronDDPStrategy

__all__ = ["RayMegatronDDPStrategy"]

_IN_TORCH_CONFIG = {"process_group_backend": "backend", "timeout": "timeout_s", "start_method": ""}
"""Arguments of other strategies, and their names in ``ray.train.torch.TorchConfig``."""


def _timeout_of_default_group() -> timedelta:
    """The one that Ray has made a group with by now, if this is a worker: ranks that meet wait for as long."""
    world = torch.distributed.group.WORLD
    if world is None:
        return default_pg_timeout
    found: timedelta = world._get_backend(world._device_types[0]).options._timeout
    return found


class RayMegatronDDPStrategy(MegatronDDPStrategy, RayDDPStrategy):  # type: ignore[misc]  # Ray has no types here
    """Megatron-LM's data parallelism in a worker of Ray Train, in place of ``ray.train.lightning.RayDDPStrategy``.

    ``ray.train.lightning.prepare_trainer`` accepts it. Device, ranks and sampler come from Ray, which has made the
    default group; backend and timeout are those of ``ray.train.torch.TorchConfig``, for the engine's groups too.

    With ``state_dict_type="sharded"`` a directory that differs from rank to rank, as that of
    ``RayTrainReportCallback`` does, gets only this rank's part. Ray puts the parts together when they are reported, so
    that hosts need no file system in common.

    Args:
        options: those of :class:`megastrategy.MegatronDDPStrategy`, without ``process_group_backend``, ``timeout`` and
            ``start_method``.

    Raises:
        ValueError: for these three, and as there.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        for name in _IN_TORCH_CONFIG.keys() & options.keys():
            theirs = _IN_TORCH_CONFIG[name]
            way_out = f"give TorchTrainer(torch_config=TorchConfig({theirs}=...))" if theirs else "leave it out"
            raise ValueError(f"{name}={options[name]!r}: Ray Train starts the ranks and connects them: {way_out}")
        options["timeout"] = _timeout_of_default_group()
        super().__init__(*arguments, **options)

    _given = inspect.signature(MegatronDDPStrategy.__init__)
    __init__.__signature__ = _given.replace(  # type: ignore[attr-defined]
        parameters=[item for name, item in _given.parameters.items() if name not in _IN_TORCH_CONFIG]
    )
    del _given

    def _directory_to_save(self, filepath: str | Path) -> tuple[Directory, bool]:
        place = place_at(filepath)
        # a store is the same for all, whatever the name
        parent = place.parent if isinstance(place, Path) else None
        of_rank_zero = self.broadcast(parent)
        # all ranks or none: otherwise each would wait for others to finish a directory that they do not have
        is_apart = self.reduce_boolean_decision(parent != of_rank_zero, all=False)
        return (place, True) if is_apart else super()._directory_to_save(filepath)
