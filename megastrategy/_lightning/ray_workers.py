"""The strategy for a worker of Ray Train, named where another one would not find its ranks there."""

from __future__ import annotations

import sys
from typing import Any, ClassVar

import torch


class PointsToRayStrategy:
    """Comes in front of a package's ``DDPStrategy``, for a Trainer.

    Ray starts the processes, gives each one device, and makes the default group. Lightning's own strategies look for
    the device by the local rank, and fail with an IndexError, or train on each rank alone.
    """

    # the package's; set by the class that is made from this one
    _incompatible: ClassVar[type[Exception]]
    # of the DDPStrategy
    cluster_environment: Any
    num_nodes: int
    num_processes: int

    def _configure_launcher(self) -> None:
        """Refuses a worker of Ray's, before ranks and devices are asked for."""
        if not _is_of_ray(type(self)) and self._is_in_ray():
            raise self._incompatible(
                f"{type(self).__name__} does not find its ranks and its device in a worker of Ray Train: pass "
                "Trainer(strategy=megastrategy.ray.RayMegatronDDPStrategy(...), which takes the same options, "
                "plugins=[ray.train.lightning.RayLightningEnvironment()], devices='auto'), and give the Trainer to "
                "ray.train.lightning.prepare_trainer"
            )
        super()._configure_launcher()  # type: ignore[misc]

    def _is_in_ray(self) -> bool:
        if _is_of_ray(type(self.cluster_environment)):
            return True
        # Without that plugin: a group of more ranks than this Trainer knows of was made before it.
        if "ray.train" not in sys.modules or not torch.distributed.is_initialized():
            return False
        return torch.distributed.get_world_size() != self.num_nodes * self.num_processes


def _is_of_ray(cls: type) -> bool:
    return any(base.__module__.partition(".")[0] == "ray" for base in cls.__mro__)
