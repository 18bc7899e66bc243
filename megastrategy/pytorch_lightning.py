"""The door to ``pytorch_lightning``, the package that ``lightning.pytorch`` mirrors."""

from __future__ import annotations

from ._versions import LIGHTNING, require

require("pytorch_lightning", LIGHTNING)

from lightning_fabric.plugins import TorchCheckpointIO
from lightning_fabric.utilities.exceptions import MisconfigurationException
from lightning_fabric.utilities.imports import _IS_INTERACTIVE
from pytorch_lightning import Callback
from pytorch_lightning.core.optimizer import LightningOptimizer, _MockOptimizer
from pytorch_lightning.plugins import AsyncCheckpointIO
from pytorch_lightning.plugins.precision import Precision
from pytorch_lightning.strategies import DDPStrategy
from pytorch_lightning.utilities.exceptions import SIGTERMException

from ._checkpoints.not_tensors import MAIN_PARAMS_KEY
from ._lightning.checkpoint_io import CompleteFileIO, with_default
from ._lightning.communication_monitor import TrainerMonitor
from ._lightning.precision import EnginePrecision
from ._lightning.signature import strategy_class
from ._lightning.stop_saver import StopSaver
from ._lightning.trainer_strategy import TrainerStrategy

__all__ = ["MAIN_PARAMS_KEY", "CommunicationMonitor", "MegatronDDPStrategy", "SaveOnStop"]


class _Precision(EnginePrecision, Precision):  # type: ignore[misc]  # typed against the mirror
    """Adds the engine's clipping to a precision plugin of this package for a fit."""


class _CheckpointIO(CompleteFileIO, TorchCheckpointIO):
    """Saves and loads for a strategy of this package without another plugin."""


@strategy_class
class MegatronDDPStrategy(TrainerStrategy, DDPStrategy):  # type: ignore[misc]  # typed against the mirror
    __doc__ = TrainerStrategy.__doc__

    _lightning_optimizer = LightningOptimizer  # type: ignore[assignment]
    _mock_optimizer = _MockOptimizer  # type: ignore[assignment]
    _engine_precision = _Precision
    checkpoint_io = with_default(_CheckpointIO)
    _is_interactive = _IS_INTERACTIVE
    _misconfiguration = MisconfigurationException
    _async_io = AsyncCheckpointIO
    _sigterm_exception = SIGTERMException


class CommunicationMonitor(TrainerMonitor, Callback):  # type: ignore[misc]  # typed against the mirror
    __doc__ = TrainerMonitor.__doc__

    _misconfiguration = MisconfigurationException


class SaveOnStop(StopSaver, Callback):  # type: ignore[misc]  # typed against the mirror
    __doc__ = StopSaver.__doc__

    _sigterm_exception = SIGTERMException
