"""``accelerator.loss_tokens(n)``: averages by tokens, on any number of processes.

In one process accelerate leaves models alone, and so do we. A model whose losses are counted there gets an engine
beside it that sends nothing and shards nothing: it corrects the gradients that the user's own optimizer steps with.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import Module

from ..core import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    SingleRankCollectives,
    announce_tokens,
    weigh_announced,
    weigh_by_tokens,
)
from .prepared_model import PREPARED

_CONFIG = DistributedDataParallelConfig(
    use_distributed_optimizer=False, use_contiguous_buffers=False, overlap_grad_reduce=False
)


class CountsTokens:
    """Lets an Accelerator average by tokens; comes before accelerate's own class."""

    # accelerate's
    _models: list[Any]
    use_distributed: bool
    sync_gradients: bool

    def loss_tokens(self, num_tokens: float | Tensor) -> None:
        """Counts, inside ``accumulate``, the tokens over which the loss of the next ``backward`` is a mean; see
        :meth:`~megastrategy.DistributedDataParallel.weigh_by_tokens`."""
        announce_tokens(num_tokens, self._counting())

    def weigh_by_tokens(self, loss: Tensor, num_tokens: float | Tensor) -> Tensor:
        """As :meth:`loss_tokens`, for a backward that is not the Accelerator's."""
        return weigh_by_tokens(loss, num_tokens, self._counting())

    def _counting(self) -> list[DistributedDataParallel]:
        # Not all that are open: another Accelerator's know nothing of this loss.
        own: list[DistributedDataParallel] = [*PREPARED.of(self._models)]
        if self.use_distributed:
            return own
        known = {id(param) for prepared in own for param in prepared.engine.params}
        for model in self._models:
            params = [param for param in model.parameters() if param.requires_grad]
            if params and not any(id(param) in known for param in params):
                own.append(self._beside(model))
        return own

    def _beside(self, model: Module) -> DistributedDataParallel:
        engines = self._engines_beside
        if (beside := engines.get(model)) is None:
            beside = engines[model] = DistributedDataParallel(model, _CONFIG, collectives=SingleRankCollectives())
        # What a forward tells the engine of a wrapped model.
        beside.require_backward_grad_sync = self.sync_gradients
        beside.engine.reducer.before_forward()
        beside.engine.check_params()
        return beside

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Runs as accelerate's does, with the gradients of a loss that is weighed."""
        beside = list(self._engines_beside.values())
        for model in beside:
            model.watch_backward(loss)
        weigh_announced(loss, [*PREPARED.of(self._models), *beside])
        super().backward(loss, **kwargs)  # type: ignore[misc]

    def free_memory(self, *objects: Any) -> Any:
        """Forgets all models as accelerate's does."""
        while self._engines_beside:
            self._engines_beside.popitem()[1].close()
        return super().free_memory(*objects)  # type: ignore[misc]

    @property
    def _engines_beside(self) -> dict[Module, DistributedDataParallel]:
        known: dict[Module, DistributedDataParallel] = self.__dict__.setdefault("megatron_ddp_engines_beside", {})
        return known
