"""``accelerator.loss_tokens(n)``: averages by tokens, on any number of processes.

In one process accelerate does not wrap models, and neither does this. A model whose losses are counted there gets an
engine that sends nothing and shards nothing: it corrects the gradients that the user's own optimizer steps with.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.nn import Module

from ..core import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    SingleRankCollectives,
    weigh_announced,
)
from .prepared_model import PREPARED

_CONFIG = DistributedDataParallelConfig(
    use_distributed_optimizer=False, use_contiguous_buffers=False, overlap_grad_reduce=False
)


class LossTokens:
    """Weighs the losses of one Accelerator by their tokens."""

    def __init__(self) -> None:
        self._engines: dict[Module, DistributedDataParallel] = {}

    def models(self, modules: Sequence[Module], in_one_process: bool, syncs: bool) -> list[DistributedDataParallel]:
        """Lists the engines of an Accelerator's prepared modules. ``syncs``: whether the next backward ends a window of
        accumulation."""
        # not all open ones: a different Accelerator's have another loss
        models: list[DistributedDataParallel] = [*PREPARED.wrappers_of(modules)]
        if in_one_process:
            prepared_params = {id(param) for prepared in models for param in prepared.engine.params}
            for module in modules:
                params = [param for param in module.parameters() if param.requires_grad]
                if params and not any(id(param) in prepared_params for param in params):
                    models.append(self._engine_for(module, syncs))
        return models

    def _engine_for(self, module: Module, syncs: bool) -> DistributedDataParallel:
        engine = self._engines.get(module)
        if engine is None:
            engine = self._engines[module] = DistributedDataParallel(
                module, _CONFIG, collectives=SingleRankCollectives()
            )
        # a wrapped model's forward does this
        engine.require_backward_grad_sync = syncs
        engine.engine.backwards.before_forward()
        engine.engine.check_params()
        return engine

    def before_backward(self, loss: Tensor, modules: Sequence[Module]) -> None:
        """Weighs a loss whose tokens were counted."""
        for model in self._engines.values():
            model.watch_backward(loss)
        weigh_announced(loss, [*PREPARED.wrappers_of(modules), *self._engines.values()])

    def close(self) -> None:
        """Forgets all models."""
        while self._engines:
            self._engines.popitem()[1].close()
