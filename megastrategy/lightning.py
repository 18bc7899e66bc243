"""The door to ``lightning.pytorch``."""

from __future__ import annotations

from ._versions import LIGHTNING, require

require("lightning.pytorch", LIGHTNING)

from lightning.fabric.plugins import TorchCheckpointIO
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.fabric.utilities.imports import _IS_INTERACTIVE
from lightning.pytorch import Callback
from lightning.pytorch.core.optimizer import LightningOptimizer, _MockOptimizer
from lightning.pytorch.plugins import AsyncCheckpointIO
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.exceptions import SIGTERMException

from ._checkpoints.not_tensors import MAIN_PARAMS_KEY
from ._lightning.checkpoint_io import CompleteFileIO, with_default
from ._lightning.communication_monitor import TrainerMonitor
from ._lightning.precision import EnginePrecision
from ._lightning.signature import strategy_class
from ._lightning.stop_saver import StopSaver
from ._lightning.trainer_strategy import TrainerStrategy

__all__ = ["MAIN_PARAMS_KEY", "CommunicationMonitor", "MegatronDDPStrategy", "SaveOnStop"]


class _Precision(EnginePrecision, Precision):
    """Adds the engine's clipping to a precision plugin of this package for a fit."""


class _CheckpointIO(CompleteFileIO, TorchCheckpointIO):
    """Saves and loads for a strategy of this package without another plugin."""


@strategy_class
class MegatronDDPStrategy(TrainerStrategy, DDPStrategy):
    __doc__ = TrainerStrategy.__doc__

    _lightning_optimizer = LightningOptimizer
    _mock_optimizer = _MockOptimizer
    _engine_precision = _Precision
    checkpoint_io = with_default(_CheckpointIO)
    _is_interactive = _IS_INTERACTIVE
    _misconfiguration = MisconfigurationException
    _async_io = AsyncCheckpointIO
    _sigterm_exception = SIGTERMException


class CommunicationMonitor(TrainerMonitor, Callback):
    __doc__ = TrainerMonitor.__doc__

    _misconfiguration = MisconfigurationException


class SaveOnStop(StopSaver, Callback):
    __doc__ = StopSaver.__doc__

    _sigterm_exception = SIGTERMException
