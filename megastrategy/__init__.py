"""Megatron-LM's data parallelism as a drop-in strategy for PyTorch Lightning, and for plain torch loops.

``import megastrategy`` makes ``Trainer(strategy="megatron_ddp")`` known, and imports torch but no framework.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import _registration
from .core import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer, GradScaler

if TYPE_CHECKING:
    from .lightning import MegatronDDPStrategy

__version__ = "0.1.0"
__all__ = [
    "DistributedDataParallel",
    "DistributedDataParallelConfig",
    "DistributedOptimizer",
    "GradScaler",
    "MegatronDDPStrategy",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name == "MegatronDDPStrategy":
        from .lightning import MegatronDDPStrategy

        return MegatronDDPStrategy
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


_registration.register_strategy_names()
