"""The door to ``lightning.fabric``."""

from __future__ import annotations

from ._versions import LIGHTNING, require

require("lightning.fabric", LIGHTNING)

from lightning.fabric.plugins import TorchCheckpointIO
from lightning.fabric.strategies.ddp import DDPStrategy
from lightning.fabric.utilities.imports import _IS_INTERACTIVE

from ._lightning.checkpoint_io import WholeFileIO
from ._lightning.fabric_strategy import MAIN_PARAMS_KEY, weighing
from ._lightning.fabric_tensor_parallel import FabricTensorParallelStrategy
from ._lightning.notebooks import PointsToNotebookNames
from ._lightning.signature import strategy_class

__all__ = ["MAIN_PARAMS_KEY", "MegatronDDPStrategy"]


class _CheckpointIO(WholeFileIO, TorchCheckpointIO):
    """Saves and loads for a strategy of this package that was given no other plugin."""


@strategy_class
class MegatronDDPStrategy(PointsToNotebookNames, FabricTensorParallelStrategy, DDPStrategy):
    __doc__ = FabricTensorParallelStrategy.__doc__

    _default_io = _CheckpointIO
    _is_interactive = _IS_INTERACTIVE
    _incompatible = RuntimeError
    _user = "Fabric"

    backward = weighing(DDPStrategy.backward)
