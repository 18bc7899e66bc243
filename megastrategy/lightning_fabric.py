"""The door to ``lightning_fabric``, the package that ``lightning.fabric`` mirrors; ``pytorch_lightning`` brings it."""

from __future__ import annotations

from ._versions import LIGHTNING, require

require("lightning_fabric", LIGHTNING)

from lightning_fabric.plugins import TorchCheckpointIO
from lightning_fabric.strategies.ddp import DDPStrategy
from lightning_fabric.utilities.imports import _IS_INTERACTIVE

from ._lightning.checkpoint_io import WholeFileIO
from ._lightning.fabric_strategy import MAIN_PARAMS_KEY, weighing
from ._lightning.fabric_tensor_parallel import FabricTensorParallelStrategy
from ._lightning.notebooks import PointsToNotebookNames
from ._lightning.signature import strategy_class

__all__ = ["MAIN_PARAMS_KEY", "MegatronDDPStrategy"]


class _CheckpointIO(WholeFileIO, TorchCheckpointIO):
    """Saves and loads for a strategy of this package that was given no other plugin."""


@strategy_class
class MegatronDDPStrategy(PointsToNotebookNames, FabricTensorParallelStrategy, DDPStrategy):  # type: ignore[misc]  # typed against the mirror
    __doc__ = FabricTensorParallelStrategy.__doc__

    _default_io = _CheckpointIO
    _is_interactive = _IS_INTERACTIVE
    _incompatible = RuntimeError
    _user = "Fabric"

    backward = weighing(DDPStrategy.backward)
