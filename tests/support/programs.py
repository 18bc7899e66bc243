"""Runs a short program of user code under torch DDP and under ours, and compares what it returns, to the bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from megastrategy import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer

from .gradients import batch
from .models import two_layers
from .ranks import run_ranks

MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


class Trainee:
    """A wrapped model and its optimizer, on one rank.

    Attributes:
        inner: the user's optimizer; ``optimizer`` itself under torch DDP.
        is_ours: whether the engine is ours.
    """

    def __init__(self, rank: int, group: ProcessGroup, make: MakeOptimizer, options: dict[str, Any] | None) -> None:
        self.rank, self.module, self.is_ours = rank, two_layers(), options is not None
        self.inner = make(list(self.module.parameters()))
        self.model: Any
        self.optimizer: Any
        if options is None:
            self.model, self.optimizer = TorchDDP(self.module, process_group=group), self.inner
        else:
            self.model = DistributedDataParallel(self.module, DistributedDataParallelConfig(**options), group)
            self.optimizer = DistributedOptimizer(self.inner, self.model)
        self._num_steps = 0

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            self.optimizer.zero_grad()
            self.model(batch(self.rank, self._num_steps)).square().mean().backward()
            self.optimizer.step()
            self._num_steps += 1

    def weights(self) -> dict[str, Tensor]:
        return {name: value.detach().clone() for name, value in self.module.state_dict().items()}


Program = Callable[[Trainee], Any]
"""Trains, does what user code does, and returns what is compared besides the weights."""


def run_program(
    program: Program, make: MakeOptimizer, size: int, options: dict[str, Any] | None
) -> list[tuple[Any, dict[str, Tensor]]]:
    """Returns, by rank, what the program returned, and the weights. ``options``: of ours; None for torch DDP."""

    def run(rank: int, group: ProcessGroup) -> tuple[Any, dict[str, Tensor]]:
        trainee = Trainee(rank, group, make, options)
        return program(trainee), trainee.weights()

    return run_ranks(size, run)


def assert_like_torch_ddp(
    program: Program, make: MakeOptimizer, size: int = 2, *, sharded: bool = True, **options: Any
) -> None:
    """The program returns the same, and leaves the same weights on every rank, under both."""
    expected = run_program(program, make, size, None)
    # Several buckets, since steps may be made bucket by bucket.
    ours = run_program(program, make, size, {"bucket_size": 1, "use_distributed_optimizer": sharded, **options})
    for rank, ((own, weights), (theirs, expected_weights)) in enumerate(zip(ours, expected, strict=True)):
        assert own == theirs, f"rank {rank}"
        for name, value in expected_weights.items():
            assert torch.equal(weights[name], value), f"rank {rank}: {name}"
