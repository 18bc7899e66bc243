"""One training loop for torch DDP and for ours, so that a comparison compares engines and nothing else."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from megastrategy import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer

from .models import awkward_model, images
from .ranks import run_ranks, with_instances

Groups = list[dict[str, Any]]
MakeOptimizer = Callable[[Iterable[Any]], torch.optim.Optimizer]


@dataclasses.dataclass(frozen=True)
class Run:
    """What is trained: everything except the engine.

    ``groups``: 1 for all parameters in one group, 3 for three with hyper-parameters of their own.
    ``accumulate``: microbatches a step; every fourth step has one less, as the last window of an epoch may.
    """

    optimizer: str = "AdamW"
    options: tuple[tuple[str, Any], ...] = ()
    groups: int = 1
    accumulate: int = 1
    steps: int = 12
    clip_norm: float | None = None
    dtype: torch.dtype = torch.float32

    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        kind = getattr(torch.optim, self.optimizer)
        params = list(model.parameters())
        if self.groups == 1:
            return kind(params, **dict(self.options))
        scalars = [param for param in params if param.dim() == 0]
        others = [param for param in params if param.dim() > 0]
        groups = [
            {"params": others[::2]},
            {"params": others[1::2], "lr": 0.003},
            {"params": scalars, "lr": 0.02},
        ]
        return kind(groups, **dict(self.options))


@dataclasses.dataclass
class Outcome:
    """What a rank ended with. Tensors are copies."""

    weights: dict[str, Tensor]
    losses: list[float]
    norms: list[Tensor]
    optimizer_state: dict[str, Any]


def _train(
    run: Run, rank: int, model: Any, optimizer: Any, clip: Callable[[], Tensor]
) -> tuple[list[float], list[Tensor]]:
    losses, norms = [], []
    for step in range(run.steps):
        microbatches = max(1, run.accumulate - (step % 4 == 3))
        optimizer.zero_grad()
        for microbatch in range(microbatches):
            last = microbatch == microbatches - 1
            with contextlib.nullcontext() if last else model.no_sync():
                loss = model(images(rank, step, microbatch, run.dtype), step, rank) / microbatches
                loss.backward()
        losses.append(loss.item())
        if run.clip_norm is not None:
            norms.append(clip().clone())
        optimizer.step()
    return losses, norms


def _outcome(module: nn.Module, losses: list[float], norms: list[Tensor], state: dict[str, Any]) -> Outcome:
    return Outcome({name: value.detach().clone() for name, value in module.state_dict().items()}, losses, norms, state)


@functools.cache
def train_with_ddp(run: Run, size: int) -> list[Outcome]:
    """By rank. Cached: a reference is trained once for all that is compared with it."""

    def train(rank: int, group: ProcessGroup) -> Outcome:
        module = awkward_model().to(run.dtype)
        model = TorchDDP(module, process_group=group, find_unused_parameters=True)
        optimizer = run.make_optimizer(model)
        params = [param for group in optimizer.param_groups for param in group["params"]]
        clip = functools.partial(torch.nn.utils.clip_grad_norm_, params, run.clip_norm or 0.0)
        losses, norms = _train(run, rank, model, optimizer, clip)
        return _outcome(module, losses, norms, optimizer.state_dict())

    return run_ranks(size, train)


def train_with_ours(run: Run, size: int, config: DistributedDataParallelConfig) -> list[Outcome]:
    """By rank; afterwards the module is closed, so weights are read from a plain module."""

    def train(rank: int, group: ProcessGroup) -> Outcome:
        module = awkward_model().to(run.dtype)
        instances = config.num_distributed_optimizer_instances
        collectives = with_instances(group, instances) if 1 < instances < size else None
        model = DistributedDataParallel(module, config, group, collectives=collectives)
        optimizer = DistributedOptimizer(run.make_optimizer(model), model)
        losses, norms = _train(run, rank, model, optimizer, lambda: optimizer.clip_grad_norm_(run.clip_norm or 0.0))
        state = optimizer.state_dict()
        model.close()
        return _outcome(module, losses, norms, state)

    return run_ranks(size, train)


def assert_same_bits(ours: list[Outcome], reference: list[Outcome]) -> None:
    """Weights, module buffers and losses of every rank, and rank 0's optimizer state, equal to the bit."""
    for rank, (mine, theirs) in enumerate(zip(ours, reference, strict=True)):
        assert mine.weights.keys() == theirs.weights.keys()
        for name, value in theirs.weights.items():
            assert torch.equal(mine.weights[name], value), (
                f"rank {rank}: {name} differs by {(mine.weights[name] - value).abs().max().item():.3g}"
            )
            assert mine.weights[name].stride() == value.stride(), f"rank {rank}: strides of {name} changed"
        assert mine.losses == theirs.losses, f"rank {rank}: losses differ"
    assert_same_state(ours[0].optimizer_state, reference[0].optimizer_state)


def assert_same_state(mine: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Two optimizer state dicts are equal: keys, shapes, dtypes, values to the bit, groups."""
    assert mine["param_groups"] == theirs["param_groups"]
    assert mine["state"].keys() == theirs["state"].keys()
    for index, values in theirs["state"].items():
        assert mine["state"][index].keys() == values.keys(), f"state of parameter {index}"
        for key, value in values.items():
            here = mine["state"][index][key]
            if isinstance(value, Tensor):
                assert here.shape == value.shape, f"{key} of parameter {index}"
                assert here.dtype == value.dtype, f"{key} of parameter {index}"
                assert torch.equal(here, value), f"{key} of parameter {index}"
            else:
                assert here == value, f"{key} of parameter {index}"


def assert_close(ours: list[Outcome], reference: list[Outcome], relative: float) -> None:
    """Weights within ``relative`` of the largest weight of each tensor; all ranks of ours equal to the bit."""
    for rank, (mine, theirs) in enumerate(zip(ours, reference, strict=True)):
        for name, value in theirs.weights.items():
            is_buffer = "running" in name or "num_batches" in name
            difference = (mine.weights[name].double() - value.double()).abs().max().item()
            # statistics are means of activations of size 1, so their own size says nothing
            size = 1.0 if is_buffer else value.double().abs().max().item()
            assert difference <= relative * size, f"rank {rank}: {name} differs by {difference:.3g}"
            if not is_buffer:
                assert torch.equal(mine.weights[name], ours[0].weights[name]), (
                    f"{name} differs between ranks 0 and {rank}"
                )
