"""The door to ``pytorch_lightning``, the package that ``lightning.pytorch`` mirrors."""

from __future__ import annotations

from pytorch_lightning.core.optimizer import LightningOptimizer, _MockOptimizer
from pytorch_lightning.strategies import DDPStrategy

from ._trainer_strategy import MAIN_PARAMS_KEY, TrainerStrategy

__all__ = ["MAIN_PARAMS_KEY", "MegatronDDPStrategy"]


class MegatronDDPStrategy(TrainerStrategy, DDPStrategy):  # type: ignore[misc]  # typed against the mirror
    __doc__ = TrainerStrategy.__doc__

    _lightning_optimizer = LightningOptimizer  # type: ignore[assignment]
    _mock_optimizer = _MockOptimizer  # type: ignore[assignment]
