"""A loop that counts its tokens, in every kind of gradient buffer."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megastrategy import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer

from .doubles import RecordingCollectives
from .engines import engines
from .ragged_tokens import batch, count, token_model
from .ranks import with_instances

MODES = {
    **engines("reduce-scatter", "late", "forward", "pooled", "all-reduce", "flattened"),
    "sums apart": {"grad_wire_dtype": "fp16"},
}
WINDOWS = {1: [1, 1, 1, 1], 3: [3, 3, 3, 2]}
"""By microbatches a step; the last window of an epoch is a short one."""


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    # A large epsilon: Adam's first step is else the sign of the gradient, whatever its size.
    return torch.optim.AdamW(module.parameters(), lr=0.02, eps=1e-2)


class Setup:
    """A wrapped model on a rank."""

    def __init__(
        self,
        group: ProcessGroup,
        dtype: torch.dtype = torch.float32,
        *,
        recording: bool = False,
        make_optimizer: Callable[[nn.Module], torch.optim.Optimizer] = adamw,
        **options: Any,
    ) -> None:
        config = DistributedDataParallelConfig(**{"bucket_size": 60, **options})
        instances = config.num_distributed_optimizer_instances
        collectives = RecordingCollectives(group) if recording else None
        if instances > 1:
            collectives = with_instances(group, instances)  # type: ignore[assignment]
        self.rank = group.rank()
        self.collectives = collectives
        self.module = token_model().to(dtype)
        self.model = DistributedDataParallel(self.module, config, group, collectives=collectives)
        self.optimizer = DistributedOptimizer(make_optimizer(self.model), self.model)

    def backward(self, step: int, microbatch: int = 0, *, counts: bool = True, sync: bool = True) -> None:
        """A loss is counted before its forward or after it."""
        ids, labels = batch(self.rank, step, microbatch)
        with contextlib.nullcontext() if sync else self.model.no_sync():
            if counts and microbatch % 2:
                self.model.count_tokens((labels != -100).sum())
            loss = self.model(ids, labels, self.rank)
            if counts and not microbatch % 2:
                self.model.count_tokens(count(labels))
            loss.backward()

    def step(self, step: int, microbatches: int, *, counts: bool = True) -> None:
        self.optimizer.zero_grad()
        for microbatch in range(microbatches):
            self.backward(step, microbatch, counts=counts, sync=microbatch == microbatches - 1)

    def weights(self) -> dict[str, Tensor]:
        self.model.close()
        return {name: value.detach().clone() for name, value in self.module.state_dict().items()}

    def grads(self) -> list[Tensor | None]:
        return [self.model.full_grad(param) for param in self.module.parameters()]


def assert_same(one: list[Tensor | None], other: list[Tensor | None], *, absolute: float = 1e-9) -> None:
    """Gradients are equal to 1e-6, and absent where absent."""
    for mine, theirs in zip(one, other, strict=True):
        assert (mine is None) == (theirs is None)
        if mine is not None and theirs is not None:
            torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=absolute)
