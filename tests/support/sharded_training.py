"""Training that is saved in directories, with optimizers of shards and of whole parameters."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megastrategy import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from megastrategy._checkpoints.directory_writer import save_directory
from megastrategy.core import Collectives, OpenDirectory, host_collectives, to_host
from tests.support.models import AwkwardModel, awkward_model, images
from tests.support.optimizers import LambWithMoments, MatricesAndRest, Shampoo


def adamw(params: Any) -> torch.optim.Optimizer:
    first, second, *rest = params
    groups = [{"params": [second, first], "lr": 3e-3}, {"params": rest}, {"params": []}]
    return torch.optim.AdamW(groups, lr=1e-2, amsgrad=True)


def lamb(params: Any) -> torch.optim.Optimizer:
    """Steps whole parameters."""
    return LambWithMoments(params, lr=1e-2)


def shampoo(params: Any) -> torch.optim.Optimizer:
    """Steps whole parameters, and keeps lists and dictionaries."""
    return Shampoo(params, lr=1e-2)


def matrices_and_rest(params: Any) -> torch.optim.Optimizer:
    """Steps one group whole, one as shards."""
    every = list(params)
    matrices = [param for param in every if param.dim() > 1]
    return MatricesAndRest([{"params": matrices, "by_row": True}, {"params": [p for p in every if p.dim() < 2]}])


class Training:
    """The awkward model under the engine."""

    def __init__(
        self,
        dtype: torch.dtype = torch.float32,
        collectives: Collectives | None = None,
        *,
        bucket_size: int = 400,
        make: Callable[[Any], torch.optim.Optimizer] = adamw,
        **options: Any,
    ) -> None:
        self.dtype = dtype
        self.module: AwkwardModel = awkward_model().to(dtype)
        config = DistributedDataParallelConfig(bucket_size=bucket_size, **options)
        self.model = DistributedDataParallel(self.module, config, collectives=collectives)
        self.optimizer = DistributedOptimizer(make(self.module.parameters()), self.model)

    def train(self, steps: range) -> list[float]:
        losses = []
        rank = dist.get_rank()
        for step in steps:
            loss = self.model(images(rank, step, 0, self.dtype), step, rank)
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    def state(self) -> dict[str, Any]:
        return {"model": self.module.state_dict(), "optimizer": self.optimizer.sharded_state_dict()}

    def load(self, path: Path) -> None:
        self.module.load_state_dict(OpenDirectory(path).read("model"))
        self.optimizer.load_sharded(path)

    def whole(self) -> dict[str, Any]:
        """Everything there is, on rank 0."""
        return to_host(
            {
                "weights": self.module.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "main_params": self.optimizer.main_params(),
            }
        )


def assert_same(actual: Any, expected: Any, where: str = "", *, strides: bool = True) -> None:
    """Equal in structure, and in every bit of every tensor."""
    assert type(actual) is type(expected), where
    if isinstance(expected, dict):
        assert set(actual) == set(expected), where
        for key, value in expected.items():
            assert_same(actual[key], value, f"{where}[{key!r}]", strides=strides)
    elif isinstance(expected, list):
        assert len(actual) == len(expected), where
        for place, value in enumerate(expected):
            assert_same(actual[place], value, f"{where}[{place}]", strides=strides)
    elif isinstance(expected, Tensor):
        assert not strides or actual.stride() == expected.stride(), where
        torch.testing.assert_close(actual, expected, rtol=0, atol=0, msg=lambda text: f"{where}: {text}")
    else:
        assert actual == expected, where


def save_after_three(path: Path) -> dict[str, Any]:
    """Saves after three steps; what was saved."""
    training = Training()
    training.train(range(3))
    save_directory(training.state(), {"step": 3}, path, host_collectives())
    return training.whole()
