"""Parameters of one element and of none are written by every engine, and read by every other."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from tests.support.interchange import (
    Engine,
    MakeOptimizer,
    World,
    amsgrad,
    assert_same_checkpoint,
    momentum,
    nadam,
    read,
)
from tests.support.optimizers import LambWithMoments
from tests.support.ranks import run_ranks


class Sizes(nn.Module):
    """Parameters of shapes (), (1,) and (65,): on two ranks one of them has a single element of the last."""

    def __init__(self, *shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.params = nn.ParameterList([torch.full(shape, 0.5 + place) for place, shape in enumerate(shapes)])

    def forward(self, images: Tensor, step: int, rank: int) -> Tensor:
        return torch.stack([(param.sin() * (rank + 2) * (step + 1)).sum() for param in self.params]).sum()


class Counting(torch.optim.SGD):
    """Keeps its count in a tensor of shape (1,), as some third-party optimizers do."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self.state[param].setdefault("count", torch.zeros(1)).add_(1)


def counting(module: nn.Module) -> torch.optim.Optimizer:
    return Counting(module.parameters(), lr=0.1, momentum=0.9)


def lamb(module: nn.Module) -> torch.optim.Optimizer:
    return LambWithMoments(module.parameters(), lr=0.01)


def asgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.ASGD(module.parameters(), lr=0.01)


SHAPES: dict[str, list[tuple[int, ...]]] = {
    "scalar": [()],
    "one": [(1,)],
    "one-and-scalar": [(1,), ()],
    "two-dims-of-one": [(1, 1)],
    "last-element-alone": [(65,)],
    "mixed": [(65,), (), (1,), (3, 2)],
    "empty": [(3,), (0,), (2, 0)],
}
TORCHS, THIRD_PARTY, WHOLE = [amsgrad, momentum, nadam, asgd], [counting], [lamb]


def cases() -> list[Any]:
    return [
        pytest.param(shapes, optimizers, id=f"{name}-{kind}")
        for (name, shapes), (kind, optimizers) in itertools.product(
            SHAPES.items(), (("torch", TORCHS), ("counting", THIRD_PARTY), ("whole", WHOLE))
        )
    ]


@pytest.mark.sample(2)
@pytest.mark.parametrize(("shapes", "optimizers"), cases())
def test_parameters_of_one_element_and_of_none(shapes: list[tuple[int, ...]], optimizers: list[MakeOptimizer]) -> None:
    """A counter and the state of one element have one shape; still everything comes back, from DDP and from ours."""
    worlds = [World("ddp", 2), World("rs", 2), World("ar", 2), World("rs", 3)]

    def write(rank: int, group: ProcessGroup, world: World) -> list[bytes]:
        files = []
        for make_optimizer in optimizers:
            engine = Engine(world, group, make_optimizer, Sizes(*shapes))
            engine.train(range(2))
            files.append(engine.save())
        return files

    def copy(rank: int, group: ProcessGroup, world: World) -> list[list[bytes]]:
        engines = [Engine(world, group, make_optimizer, Sizes(*shapes)) for make_optimizer in optimizers]
        copies = []
        for writer in worlds:
            for engine, file in zip(engines, files[writer], strict=True):
                engine.load(file)
            copies.append([engine.save() for engine in engines])
        return copies

    files = {world: run_ranks(world.size, functools.partial(write, world=world))[0] for world in worlds}
    for ours, theirs in zip(files[World("rs", 2)], files[World("ddp", 2)], strict=True):
        assert_same_checkpoint(read(ours), read(theirs))
    for reader in worlds:
        copied = run_ranks(reader.size, functools.partial(copy, world=reader))[0]
        for writer, copies in zip(worlds, copied, strict=True):
            for again, saved in zip(copies, files[writer], strict=True):
                assert_same_checkpoint(read(again), read(saved))
