"""The door to ``lightning.fabric``."""

from __future__ import annotations

from ._versions import LIGHTNING, require

require("lightning.fabric", LIGHTNING)

from lightning.fabric.plugins import TorchCheckpointIO
from lightning.fabric.strategies.ddp import DDPStrategy
from lightning.fabric.utilities.imports import _IS_INTERACTIVE

from ._checkpoints.not_tensors import MAIN_PARAMS_KEY
from ._lightning.checkpoint_io import CompleteFileIO, with_default
from ._lightning.fabric_strategy import FabricStrategy, forgetting
from ._lightning.signature import strategy_class

__all__ = ["MAIN_PARAMS_KEY", "MegatronDDPStrategy"]


class _CheckpointIO(CompleteFileIO, TorchCheckpointIO):
    """Saves and loads for a strategy of this package without another plugin."""


@strategy_class
class MegatronDDPStrategy(FabricStrategy, DDPStrategy):
    __doc__ = FabricStrategy.__doc__

    checkpoint_io = with_default(_CheckpointIO)
    _is_interactive = _IS_INTERACTIVE

    backward = forgetting(DDPStrategy.backward)
