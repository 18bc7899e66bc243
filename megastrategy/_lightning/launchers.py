"""Refuses processes that a strategy cannot train in: a notebook with the wrong start method, a worker of Ray Train."""

from __future__ import annotations

import sys
from typing import Any

import torch

from megastrategy_autoload import START_METHODS


def refuse_notebook(strategy: Any, user: str, start_method: str, error: type[Exception]) -> None:
    """Raises where Lightning would, whose error names the strategies of torch DDP. ``user``: Trainer or Fabric."""
    launcher = strategy.launcher
    if launcher is None or launcher.is_interactive_compatible:
        return
    names = " or ".join(f"'{name}'" for name in START_METHODS if name.endswith("_notebook"))
    raise error(
        f"{type(strategy).__name__} with start_method={start_method!r} is not compatible with an interactive "
        f"environment. Run your code as a script, or choose a notebook-compatible strategy: `{user}(strategy="
        f"{names})`, or with options `MegatronDDPStrategy(start_method='fork', ...)`. In case you are spawning "
        f"processes yourself, make sure to include the {user} creation inside the worker function."
    )


def refuse_ray_worker(strategy: Any, error: type[Exception]) -> None:
    """Raises in a worker of Ray Train, unless the strategy is Ray's.

    Ray starts the processes, gives each one device, and makes the default group. Lightning's own strategies look for
    the device by the local rank, and fail with an IndexError, or train on each rank separately.
    """
    if not _is_of_ray(type(strategy)) and _is_in_ray(strategy):
        raise error(
            f"{type(strategy).__name__} does not find its ranks and its device in a worker of Ray Train: pass "
            "Trainer(strategy=megastrategy.ray.RayMegatronDDPStrategy(...), which takes the same options, "
            "plugins=[ray.train.lightning.RayLightningEnvironment()], devices='auto'), and give the Trainer to "
            "ray.train.lightning.prepare_trainer"
        )


def _is_in_ray(strategy: Any) -> bool:
    if _is_of_ray(type(strategy.cluster_environment)):
        return True
    # Without that plugin: a group of more ranks than this Trainer knows of was made before it.
    if "ray.train" not in sys.modules or not torch.distributed.is_initialized():
        return False
    return bool(torch.distributed.get_world_size() != strategy.num_nodes * strategy.num_processes)


def _is_of_ray(cls: type) -> bool:
    return any(base.__module__.partition(".")[0] == "ray" for base in cls.__mro__)
