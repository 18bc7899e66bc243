"""Megatron-LM's data parallelism as a drop-in strategy for PyTorch Lightning, and for plain torch loops.

``import megastrategy`` makes ``Trainer(strategy="megatron_ddp")`` known. It imports neither torch nor a framework: a
name brings its module when it is first used.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING, Any

import megastrategy_autoload

if TYPE_CHECKING:
    from . import core as core
    from . import data as data
    from . import errors as errors
    from . import events as events
    from ._param_groups import no_decay_groups
    from ._replicas import Replicas
    from .core import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer, GradScaler
    from .lightning import CommunicationMonitor, MegatronDDPStrategy, SaveOnStop
    from .pipeline import Pipeline
    from .tools.plan.partitions import plan

__version__ = "0.1.0"
__all__ = [
    "CommunicationMonitor",
    "DistributedDataParallel",
    "DistributedDataParallelConfig",
    "DistributedOptimizer",
    "GradScaler",
    "MegatronDDPStrategy",
    "Pipeline",
    "Replicas",
    "SaveOnStop",
    "__version__",
    "no_decay_groups",
    "plan",
]

_MODULES = {
    "DistributedDataParallel": "core",
    "DistributedDataParallelConfig": "core",
    "DistributedOptimizer": "core",
    "GradScaler": "core",
    "Pipeline": "pipeline",
    "Replicas": "_replicas",
    "no_decay_groups": "_param_groups",
    "plan": "tools.plan.partitions",
}

if not TYPE_CHECKING:  # a checker would take every name for one that is there

    def __getattr__(name: str) -> Any:
        if name in ("CommunicationMonitor", "MegatronDDPStrategy", "SaveOnStop"):
            return getattr(_trainer_door(name), name)
        if name in _MODULES:
            return getattr(importlib.import_module(f".{_MODULES[name]}", __name__), name)
        if name in ("core", "data", "errors", "events"):
            return importlib.import_module(f".{name}", __name__)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _trainer_door(name: str) -> ModuleType:
    """Imports the module made for ``lightning.pytorch``, or for ``pytorch_lightning`` where only that is installed."""
    from ._versions import LIGHTNING, require

    for package in ("lightning.pytorch", "pytorch_lightning"):
        require(package, LIGHTNING)  # before its import, which an old one may fail by itself
        try:
            importlib.import_module(package)
        except ModuleNotFoundError as error:
            if error.name not in (package, package.split(".")[0]):
                raise  # it is installed, and lacks something
        else:
            return importlib.import_module(megastrategy_autoload.DOORS[package])
    raise ImportError(
        f"{name} is for a Trainer, and neither lightning nor pytorch_lightning is installed: "
        "pip install 'megastrategy[lightning]'"
    )


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


megastrategy_autoload.register_strategy_names()
