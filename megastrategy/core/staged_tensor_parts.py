"""The parameters of a stage whose layers are cut over tensor ranks; read only where a pipeline has some."""

from __future__ import annotations

from torch import nn
from torch.distributed import ProcessGroup

from .dtensor_parts import DTensorParts
from .stages import StagedModule, StageParts


class StagedTensorParts(StageParts, DTensorParts):
    """This tensor rank's parts of the parameters of one stage, of which some are DTensors, or none.

    Args:
        staged: with a tensor mesh, which its DTensors have; it or a module around it is ``module``.
        process_group: the data-parallel ranks; None for all.
    """

    def __init__(self, staged: StagedModule, module: nn.Module, process_group: ProcessGroup | None) -> None:
        StageParts.__init__(self, staged, module)
        DTensorParts.__init__(self, module, process_group, staged.tensor_mesh)
