"""The door to ``lightning.pytorch``."""

from __future__ import annotations

from lightning.pytorch.core.optimizer import LightningOptimizer, _MockOptimizer
from lightning.pytorch.strategies import DDPStrategy

from ._trainer_strategy import MAIN_PARAMS_KEY, TrainerStrategy

__all__ = ["MAIN_PARAMS_KEY", "MegatronDDPStrategy"]


class MegatronDDPStrategy(TrainerStrategy, DDPStrategy):
    __doc__ = TrainerStrategy.__doc__

    _lightning_optimizer = LightningOptimizer
    _mock_optimizer = _MockOptimizer
