"""Megatron-LM's data parallelism as a drop-in strategy for PyTorch Lightning, and for plain torch loops.

``import megastrategy`` makes ``Trainer(strategy="megatron_ddp")`` known, and imports torch but no framework.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING, Any

import megastrategy_autoload

from .core import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer, GradScaler

if TYPE_CHECKING:
    from ._param_groups import no_decay_groups
    from ._replicas import Replicas
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


def __getattr__(name: str) -> Any:
    if name in ("CommunicationMonitor", "MegatronDDPStrategy", "SaveOnStop"):
        return getattr(_trainer_door(name), name)
    if name == "data":
        return importlib.import_module(".data", __name__)
    if name == "no_decay_groups":
        from ._param_groups import no_decay_groups

        return no_decay_groups
    if name == "Pipeline":
        from .pipeline import Pipeline

        return Pipeline
    if name == "Replicas":
        from ._replicas import Replicas

        return Replicas
    if name == "plan":
        # A tool, imported only when it is used.
        from .tools.plan.partitions import plan

        return plan
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
