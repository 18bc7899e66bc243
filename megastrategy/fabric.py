"""The door to ``lightning.fabric``."""

from __future__ import annotations

from lightning.fabric.strategies.ddp import DDPStrategy

from ._fabric_strategy import MAIN_PARAMS_KEY, FabricStrategy
from ._strategy_class import strategy_class

__all__ = ["MAIN_PARAMS_KEY", "MegatronDDPStrategy"]


@strategy_class
class MegatronDDPStrategy(FabricStrategy, DDPStrategy):
    __doc__ = FabricStrategy.__doc__
