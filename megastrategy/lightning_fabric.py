"""The door to ``lightning_fabric``, the package that ``lightning.fabric`` mirrors; ``pytorch_lightning`` brings it."""

from __future__ import annotations

from lightning_fabric.strategies.ddp import DDPStrategy

from ._fabric_strategy import MAIN_PARAMS_KEY, FabricStrategy
from ._strategy_class import strategy_class

__all__ = ["MAIN_PARAMS_KEY", "MegatronDDPStrategy"]


@strategy_class
class MegatronDDPStrategy(FabricStrategy, DDPStrategy):  # type: ignore[misc]  # typed against the mirror
    __doc__ = FabricStrategy.__doc__
