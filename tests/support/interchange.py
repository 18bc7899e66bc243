"""Engines that write and read one another's checkpoints, on one rank and more."""

from __future__ import annotations

import dataclasses
import functools
import io
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from megastrategy import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from tests.support.models import awkward_model, images
from tests.support.optimizers import LambWithMoments, MatricesAndRest
from tests.support.ranks import run_ranks
from tests.support.training import assert_same_state

ENGINES = ("ddp", "rs", "ar")
BUCKET_SIZES = (1, 200, 10**9, 500)  # by number of ranks - 1, so that files move between layouts of every kind


@dataclasses.dataclass(frozen=True)
class World:
    """Who writes or reads: torch DDP ("ddp"; on one rank nothing but torch), ours with reduce-scatter ("rs") or with
    all-reduce ("ar")."""

    engine: str
    size: int

    def __str__(self) -> str:
        return f"{self.engine}-{self.size}"


WORLDS = [World(engine, size) for engine, size in itertools.product(ENGINES, (1, 2, 3, 4))]


def amsgrad(module: nn.Module) -> torch.optim.Optimizer:
    """Three groups with equal hyper-parameters, an empty one, one of its own; parameters not in order, frozen ones
    too."""
    params = list(module.parameters())
    groups = [
        {"params": params[1::2]},
        {"params": params[::4]},
        {"params": []},
        {"params": params[2::4], "lr": 0.02},
    ]
    return torch.optim.AdamW(groups, lr=0.01, amsgrad=True)


def momentum(module: nn.Module) -> torch.optim.Optimizer:
    """Named parameters: the groups have their names."""
    return torch.optim.SGD(module.named_parameters(), lr=0.05, momentum=0.9)


def adagrad(module: nn.Module) -> torch.optim.Optimizer:
    """Has state before the first step, also for parameters that are never used or frozen."""
    return torch.optim.Adagrad(module.parameters(), lr=0.02, initial_accumulator_value=0.1)


def nadam(module: nn.Module) -> torch.optim.Optimizer:
    """Two counters of shape () for each parameter; one is not called ``step``."""
    return torch.optim.NAdam(module.parameters(), lr=0.01)


def lamb(module: nn.Module) -> torch.optim.Optimizer:
    """Steps whole parameters, which sharded have an owner each."""
    return LambWithMoments(module.parameters(), lr=0.02)


def matrices_and_rest(module: nn.Module) -> torch.optim.Optimizer:
    """One group of whole parameters, one of shards."""
    params = list(module.parameters())
    matrices = [param for param in params if param.dim() > 1]
    return MatricesAndRest([{"params": matrices, "by_row": True}, {"params": [p for p in params if p.dim() < 2]}])


MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]
OPTIMIZERS: list[MakeOptimizer] = [amsgrad, momentum, adagrad, nadam, lamb, matrices_and_rest]


class Engine:
    """One rank's model and optimizer in a world, with the same few calls whatever the engine is."""

    def __init__(
        self, world: World, group: ProcessGroup, make_optimizer: MakeOptimizer, module: nn.Module | None = None
    ) -> None:
        self.module = module = awkward_model() if module is None else module
        self.model: Any = module
        self.rank = group.rank()
        if world.engine == "ddp":
            if world.size > 1:
                self.model = TorchDDP(module, process_group=group, find_unused_parameters=True)
            self.optimizer = make_optimizer(module)
        else:
            config = DistributedDataParallelConfig(
                bucket_size=BUCKET_SIZES[world.size - 1], use_distributed_optimizer=world.engine == "rs"
            )
            self.model = DistributedDataParallel(module, config, group)
            self.optimizer = DistributedOptimizer(make_optimizer(module), self.model)

    def train(self, steps: range) -> list[float]:
        losses = []
        dtype = next(self.module.parameters()).dtype
        for step in steps:
            self.optimizer.zero_grad()
            loss = self.model(images(self.rank, step, 0, dtype), step, self.rank)
            loss.backward()
            self.optimizer.step()
            losses.append(loss.item())
        return losses

    def save(self) -> bytes:
        """As a user would, on all ranks; what rank 0 writes is the checkpoint."""
        checkpoint = {"model": self.module.state_dict(), "optimizer": self.optimizer.state_dict()}
        if isinstance(self.optimizer, DistributedOptimizer) and (main_params := self.optimizer.main_params()):
            checkpoint["main_params"] = main_params
        file = io.BytesIO()
        torch.save(checkpoint, file)
        return file.getvalue()

    def load(self, file: bytes) -> None:
        checkpoint = torch.load(io.BytesIO(file), weights_only=True)
        self.module.load_state_dict(checkpoint["model"])
        self.optimizer.load_state_dict(checkpoint["optimizer"])
        if isinstance(self.optimizer, DistributedOptimizer):
            self.optimizer.load_main_params(checkpoint.get("main_params", {}))


def read(file: bytes) -> dict[str, Any]:
    checkpoint: dict[str, Any] = torch.load(io.BytesIO(file), weights_only=True)
    return checkpoint


@functools.cache
def written_by(
    world: World, make_optimizer: MakeOptimizer, steps: int = 3, dtype: torch.dtype = torch.float32
) -> bytes:
    """Rank 0's file after some steps (by default an even number of uses of the odd branch, so states differ)."""

    def run(rank: int, group: ProcessGroup) -> bytes:
        engine = Engine(world, group, make_optimizer, awkward_model().to(dtype))
        engine.train(range(steps))
        return engine.save()

    return run_ranks(world.size, run)[0]


def assert_same_checkpoint(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    """Structure, groups, values to the bit, dtypes, shapes and strides; every tensor in memory of its own size."""
    assert actual.keys() == expected.keys()
    for part in ("model", "main_params"):
        assert list(actual.get(part, {})) == list(expected.get(part, {}))
        for name, value in expected.get(part, {}).items():
            assert_same_tensor(actual[part][name], value, f"{part} {name}")
    assert_same_state(actual["optimizer"], expected["optimizer"])
    for index, values in expected["optimizer"]["state"].items():
        for key, value in values.items():
            assert_same_tensor(actual["optimizer"]["state"][index][key], value, f"{key} of parameter {index}")


def assert_same_tensor(actual: Any, expected: Any, where: str) -> None:
    if isinstance(expected, Tensor):
        assert actual.dtype == expected.dtype, where
        assert actual.stride() == expected.stride(), where
        assert torch.equal(actual, expected), where
        assert actual.untyped_storage().nbytes() == actual.nbytes, f"{where}: the file holds more than the tensor"


def tensors_in(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else []
    return [tensor for item in items for tensor in tensors_in(item)]
