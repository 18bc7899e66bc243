"""``accelerator.count_tokens(n)``: averages by tokens, on any number of processes.

In one process accelerate does not wrap models, and neither does this. A model whose losses are counted there gets an
engine that sends nothing and shards nothing: it divides the gradients that the user's own optimizer steps with.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor
from torch.nn import Module

from ..core import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    SingleRankCollectives,
    announce_tokens,
    forget_announced,
)
from .prepared_model import PREPARED

if TYPE_CHECKING:
    from accelerate import Accelerator

_CONFIG = DistributedDataParallelConfig(
    use_distributed_optimizer=False, use_contiguous_buffers=False, overlap_grad_reduce=False
)


class TokenCounts:
    """Counts the tokens of one Accelerator's losses."""

    def __init__(self) -> None:
        self._engines: dict[Module, DistributedDataParallel] = {}  # in one process
        self._counting: list[DistributedDataParallel] = []  # from an announcement until the end of its backward

    def announce(self, num_tokens: float | Tensor, accelerator: Accelerator) -> None:
        """Counts the tokens of the next loss of the Accelerator's prepared modules."""
        modules = accelerator._models
        # not all open ones: a different Accelerator's have another loss
        models: list[DistributedDataParallel] = [*PREPARED.wrappers_of(modules)]
        if not accelerator.use_distributed:
            prepared_params = {id(param) for prepared in models for param in prepared.engine.params}
            for module in modules:
                params = [param for param in module.parameters() if param.requires_grad]
                if params and not any(id(param) in prepared_params for param in params):
                    models.append(self._engine_for(module, accelerator.sync_gradients))
        self._counting = models
        announce_tokens(num_tokens, models, accelerator.gradient_accumulation_steps)  # as ``backward`` divides the loss

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

    def before_backward(self, loss: Tensor) -> None:
        """Begins the backward of this loss."""
        for model in self._engines.values():
            model.watch_backward(loss)

    def after_backward(self) -> None:
        """Forgets the tokens of a loss that has not reached some of several models."""
        forget_announced(self._counting)
        self._counting = []

    def close(self) -> None:
        """Forgets all models."""
        self._counting = []
        while self._engines:
            self._engines.popitem()[1].close()
