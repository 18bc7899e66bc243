"""Optimizers with modes (Schedule-Free's ``train()`` and ``eval()``), and other methods that users call on them."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from megastrategy import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from megastrategy.core.errors import DirectUseError, OptimizerNotShardableError, ReducedGradError
from megastrategy.core.judge.classification import classify
from tests.support.doubles import RecordingCollectives
from tests.support.gradients import batch
from tests.support.models import awkward_model, images, two_layers
from tests.support.optimizers_with_methods import Methods, ScheduleFree
from tests.support.ranks import run_ranks
from tests.support.training import assert_same_state

Weights = dict[str, Tensor]
Training = tuple[list[Weights], list[dict[str, Any]]]

SMALL = 200
"""A bucket size that gives both models several buckets."""


def weights_of(module: nn.Module) -> Weights:
    return {name: value.detach().clone() for name, value in module.named_parameters()}


def assert_same_weights(ours: list[list[Weights]], theirs: list[list[Weights]]) -> None:
    for rank, (mine, expected) in enumerate(zip(ours, theirs, strict=True)):
        assert len(mine) == len(expected)
        for moment, (one, other) in enumerate(zip(mine, expected, strict=True)):
            for name, value in other.items():
                assert torch.equal(one[name], value), f"rank {rank}, moment {moment}: {name}"


def make_optimizer(module: nn.Module) -> ScheduleFree:
    """Two groups, in which every parameter is that trains."""
    params = [param for param in module.parameters() if param.requires_grad]
    return ScheduleFree([{"params": params[::2]}, {"params": params[1::2], "lr": 0.02}], lr=0.05, weight_decay=0.01)


def train(module: nn.Module, model: Any, optimizer: Any, rank: int, epochs: range) -> Training:
    """Three steps an epoch, an evaluation after each; the weights seen in both modes, and the states in evaluation."""
    seen, states = [], []
    for epoch in epochs:
        optimizer.train()
        optimizer.train()  # once too often, as loops do that call it before each step
        seen.append(weights_of(module))
        for step in range(3 * epoch, 3 * epoch + 3):
            optimizer.zero_grad()
            model(images(rank, step, 0), step, rank).backward()
            optimizer.step()
        seen.append(weights_of(module))
        optimizer.eval()
        seen.append(weights_of(module))
        optimizer.eval()
        state = copy.deepcopy(optimizer.state_dict())
        # whole parameters that were looked up and never stepped have an empty entry under torch DDP
        state["state"] = {number: values for number, values in state["state"].items() if values}
        states.append(state)
        seen.append(weights_of(module))
    return seen, states


@functools.cache
def with_ddp(size: int) -> list[Training]:
    def run(rank: int, group: ProcessGroup) -> Training:
        module = awkward_model()
        model = TorchDDP(module, process_group=group, find_unused_parameters=True)
        return train(module, model, make_optimizer(module), rank, range(3))

    return run_ranks(size, run)


CONFIGS: dict[str, dict[str, Any]] = {
    "sharded": {},
    "overlap forward": {"overlap_param_gather": True},
    "pooled": {"grad_buffer": "pooled"},
    "one bucket": {"bucket_size": 10**9},
    "all-reduce": {"use_distributed_optimizer": False},
}


@pytest.mark.parametrize(
    ("name", "size"), [("sharded", 1), ("overlap forward", 2), ("pooled", 1), ("one bucket", 1), ("all-reduce", 1)]
)
def test_modes_are_those_of_torch_ddp_to_the_bit(name: str, size: int) -> None:
    """Weights on all ranks in both modes, and the state that is saved."""
    config = DistributedDataParallelConfig(**{"bucket_size": SMALL, **CONFIGS[name]})

    def run(rank: int, group: ProcessGroup) -> Training:
        module = awkward_model()
        model = DistributedDataParallel(module, config, group)
        return train(module, model, DistributedOptimizer(make_optimizer(module), model), rank, range(3))

    ours, theirs = run_ranks(size, run), with_ddp(size)
    assert_same_weights([seen for seen, _ in ours], [seen for seen, _ in theirs])
    for mine, expected in zip(ours[0][1], theirs[0][1], strict=True):
        assert_same_state(mine, expected)
    trained, evaluated = ours[0][0][1:3]
    assert any(not torch.equal(trained[key], evaluated[key]) for key in trained), "the modes differ"


@pytest.mark.parametrize("options", [{}, {"overlap_param_gather": True}], ids=str)
def test_modes_round_main_params_into_weights(options: dict[str, Any]) -> None:
    """To the bit as with an all-reduce, under which the optimizer steps whole main params."""

    def run(rank: int, group: ProcessGroup, **options: Any) -> tuple[list[Weights], dict[str, Tensor]]:
        module = two_layers().bfloat16()
        config = DistributedDataParallelConfig(bucket_size=SMALL, **options)
        model = DistributedDataParallel(module, config, group)
        optimizer: Any = DistributedOptimizer(ScheduleFree(module.parameters(), lr=0.05), model)
        seen = []
        for step in range(4):
            optimizer.train()
            seen.append(weights_of(module))
            optimizer.zero_grad()
            model(batch(rank, step).bfloat16()).square().sum().backward()
            optimizer.step()
            seen.append(weights_of(module))
            if step % 2:
                optimizer.eval()
                seen.append(weights_of(module))
        return seen, optimizer.main_params()

    outcomes = run_ranks(2, functools.partial(run, **options))
    expected = run_ranks(2, functools.partial(run, use_distributed_optimizer=False))
    assert_same_weights([seen for seen, _ in outcomes], [seen for seen, _ in expected])
    mains = outcomes[0][1]
    for name, value in outcomes[0][0][-1].items():
        assert torch.equal(mains[name].bfloat16(), value), name
        assert not torch.equal(mains[name], value.float()), "main params have more bits"


def one_step(rank: int, group: ProcessGroup, make: Callable[[Any], torch.optim.Optimizer], **options: Any) -> Any:
    """A wrapped model, its optimizer after a step with it, and what it sent from then on."""
    module = two_layers()
    collectives = RecordingCollectives(group)
    config = DistributedDataParallelConfig(**{"bucket_size": SMALL, **options})
    model = DistributedDataParallel(module, config, group, collectives=collectives)
    optimizer: Any = DistributedOptimizer(make(module.parameters()), model)
    model(torch.ones(2, 10)).square().sum().backward()
    optimizer.step()
    collectives.calls.clear()
    return module, model, optimizer, collectives


def test_mode_change_gathers_each_bucket_once() -> None:
    def run(rank: int, group: ProcessGroup) -> None:
        def make(params: Any) -> ScheduleFree:
            optimizer = ScheduleFree(params)
            optimizer.train()
            return optimizer

        _, model, optimizer, collectives = one_step(rank, group, make)
        optimizer.train()
        assert collectives.calls == [], "it was in training"
        optimizer.eval()
        assert [call.name for call in collectives.calls] == ["all_gather"] * len(model.layout.buckets)
        assert len(model.layout.buckets) > 1
        optimizer.eval()
        assert len(collectives.calls) == len(model.layout.buckets)

    run_ranks(2, run)


REFUSED: dict[str, tuple[Callable[[Any], object], type[Exception], str]] = {
    "first_step()": (lambda optimizer: optimizer.first_step(rho=0.1), ReducedGradError, "full_grad"),
    "center_momentum()": (lambda optimizer: optimizer.center_momentum(), DirectUseError, "was looked up"),
    "step_twice()": (lambda optimizer: optimizer.step_twice(), DirectUseError, "steps shards"),
    "reset()": (lambda optimizer: optimizer.reset(), OptimizerNotShardableError, "replaces the state"),
    "halved()": (
        lambda optimizer: optimizer.halved().__enter__(),
        OptimizerNotShardableError,
        "use the optimizer later",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_methods_needing_state_are_refused(name: str) -> None:
    use, kind, reason = REFUSED[name]

    def run(rank: int, group: ProcessGroup) -> None:
        module, _, optimizer, collectives = one_step(rank, group, Methods)
        before = weights_of(module), copy.deepcopy(optimizer.state_dict())
        collectives.calls[:] = []
        with pytest.raises(kind, match=reason):
            use(optimizer)
        assert collectives.calls == []
        for key, value in weights_of(module).items():
            assert torch.equal(value, before[0][key])
        assert_same_state(optimizer.state_dict(), before[1])

    run_ranks(2, run)


class ScaledByItsNorm(ScheduleFree):
    """Divides each weight by the norm of its tensor in evaluation."""

    @torch.no_grad()
    def eval(self) -> None:
        for group in self.param_groups:
            if group["train_mode"]:
                group["train_mode"] = False
                for param in group["params"]:
                    param.div_(param.norm())


def test_modes_not_for_shards_are_found_at_wrap() -> None:
    (one,) = classify(ScaledByItsNorm(two_layers().parameters(), lr=0.05), torch.device("cpu"), torch.float32)
    assert one.way == "whole"
    assert "an element changes" in one.reason
