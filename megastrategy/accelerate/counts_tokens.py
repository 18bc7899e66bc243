"""``accelerator.loss_tokens(n)``: averages by tokens, on any number of processes.

In one process accelerate leaves models alone, and so do we. A model whose losses are counted there gets an engine
beside it that sends nothing and shards nothing: it weighs the gradients that the user's own optimizer steps with.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import Module

from ..core import DistributedDataParallel, DistributedDataParallelConfig, LoneCollectives
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
        """Tells, inside ``accumulate`` and before ``backward``, over how many tokens the loss is a mean; see
        :meth:`DistributedDataParallel.loss_tokens <megastrategy.DistributedDataParallel.loss_tokens>`."""
        # Not all that are open: another Accelerator's know nothing of this loss.
        own = PREPARED.of(self._models)
        for prepared in own:
            prepared.loss_tokens(num_tokens)
        if self.use_distributed:
            return
        known = {id(param) for prepared in own for param in prepared.engine.params}
        for model in self._models:
            params = [param for param in model.parameters() if param.requires_grad]
            if params and not any(id(param) in known for param in params):
                self._count_alone(model, num_tokens)

    def _count_alone(self, model: Module, num_tokens: float | Tensor) -> None:
        engines = self._engines_beside
        if (beside := engines.get(model)) is None:
            beside = engines[model] = DistributedDataParallel(model, _CONFIG, collectives=LoneCollectives())
        # What a forward tells the engine of a wrapped model.
        beside.require_backward_grad_sync = self.sync_gradients
        beside.engine.reducer.before_forward()
        beside.engine.check_params()
        beside.loss_tokens(num_tokens)

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Runs as accelerate's does."""
        for beside in self._engines_beside.values():
            beside.watch_backward(loss)
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
