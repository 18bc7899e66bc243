"""A parameter that has joined and was not stepped yet: no rank has a shard of it, and its state is whole on each."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megastrategy import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from megastrategy._checkpoints.directory_writer import save_directory
from megastrategy.core import OpenDirectory, to_host
from megastrategy.core.errors import CheckpointError
from tests.support import optimizers
from tests.support.directories import saving_among_threads
from tests.support.models import two_layers
from tests.support.ranks import run_ranks
from tests.support.whole_params import SOME, batch, muon_and_adamw_groups, same, train


def adamw(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.02)


def lamb(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return optimizers.LambWithMoments(params, lr=0.02)


def shampoo(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return optimizers.Shampoo(params, lr=0.02)


def wraps(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return optimizers.WrapsState(params, lr=0.02)


Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


class Training:
    """Two layers, whose first may be frozen when the model is wrapped."""

    def __init__(self, group: ProcessGroup, make: Make, dtype: torch.dtype, options: dict[str, Any], frozen: bool):
        self.rank, self.dtype = group.rank(), dtype
        self.module = two_layers().to(dtype)
        self.module[0].requires_grad_(not frozen)
        config = DistributedDataParallelConfig(bucket_size=SOME, **options)
        self.model = DistributedDataParallel(self.module, config, group)
        self.optimizer = DistributedOptimizer(make(list(self.module.parameters())), self.model)

    def train(self, steps: range) -> None:
        train(self.model, self.optimizer, self.rank, steps)
        self.model.finish_param_gather()

    def join(self) -> None:
        """The first layer trains from now on, and has its place in the model's buffers."""
        self.module[0].requires_grad_(True)
        self.model(batch(self.rank, 50, self.dtype)).square().mean().backward()

    def weights(self) -> dict[str, Tensor]:
        return copy.deepcopy(self.module.state_dict())

    def saved(self) -> Any:
        """The contents of a file, on every rank."""
        own = self.weights(), self.optimizer.state_dict(), self.optimizer.main_params()
        return copy.deepcopy(self.model.engine.collectives.all_gather_objects(own if self.rank == 0 else None)[0])

    def load(self, saved: Any) -> None:
        weights, state, main_params = copy.deepcopy(saved)
        self.module.load_state_dict(weights)
        self.optimizer.load_state_dict(state)
        self.optimizer.load_main_params(main_params)

    def write(self, path: Path) -> None:
        state = {"model": self.weights(), "optimizer": self.optimizer.sharded_state_dict()}
        save_directory(to_host(state), {}, path, self.model.engine.collectives)

    def read(self, path: Path) -> None:
        self.module.load_state_dict(OpenDirectory(path).read("model"))
        self.optimizer.load_sharded(path)


@pytest.mark.sample(2)
@pytest.mark.parametrize("make", [adamw, lamb, shampoo, muon_and_adamw_groups])
@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (torch.float32, {}),
        (torch.bfloat16, {}),
        (torch.bfloat16, {"use_distributed_optimizer": False}),
    ],
    ids=["fp32", "bf16", "bf16-whole"],
)
@pytest.mark.parametrize("loads", ["frozen", "joined"])
@pytest.mark.parametrize("directory", [False, True])
def test_state_of_a_parameter_that_has_joined_is_saved_and_loaded(
    make: Make, dtype: torch.dtype, options: dict[str, Any], loads: str, directory: bool, tmp_path: Path
) -> None:
    """Loaded while it was frozen, or after it has joined; saved before it is stepped; and stepped as if nothing was."""
    check_joining(make, dtype, options, loads, directory, tmp_path)


@pytest.mark.parametrize("options", [{}, {"use_distributed_optimizer": False}], ids=["sharded", "whole"])
@pytest.mark.parametrize("loads", ["frozen", "joined"])
@pytest.mark.parametrize("directory", [False, True])
def test_state_that_is_saved_in_another_form(
    options: dict[str, Any], loads: str, directory: bool, tmp_path: Path
) -> None:
    """The optimizer's own form is the file's, also for what is frozen, and where nothing is sharded."""
    check_joining(wraps, torch.float32, options, loads, directory, tmp_path)


def check_joining(
    make: Make, dtype: torch.dtype, options: dict[str, Any], loads: str, directory: bool, path: Path
) -> None:
    def run(rank: int, group: ProcessGroup) -> None:
        first = Training(group, make, dtype, options, frozen=False)
        first.train(range(3))
        saved = first.saved()
        first.write(path / "first")
        first.train(range(3, 5))
        uncut = first.saved()

        second = Training(group, make, dtype, options, frozen=True)
        for change in ("frozen", "joined"):
            if change == "joined":
                second.join()
            if change == loads:
                second.read(path / "first") if directory else second.load(saved)
        assert same(second.saved(), saved)
        second.write(path / "second")
        second.train(range(3, 5))
        assert same(second.saved(), uncut)

        third = Training(group, make, dtype, options, frozen=False)
        third.read(path / "second")
        assert same(third.saved(), saved)

    with saving_among_threads():
        run_ranks(2, run)


def test_a_main_param_of_another_shape_is_refused_at_once() -> None:
    """By the name, and nothing is changed: of a parameter with an owner, and of one that is frozen."""

    def run(rank: int, group: ProcessGroup) -> None:
        training = Training(group, lamb, torch.bfloat16, {}, frozen=True)
        training.train(range(2))
        before = training.saved()
        for name in ("2.weight", "0.weight"):
            with pytest.raises(CheckpointError, match=name):
                training.optimizer.load_main_params({"2.bias": torch.ones(7), name: torch.ones(4, 4)})
        assert same(training.saved(), before)

    run_ranks(2, run)
