"""One training loop for torch DDP and for ours, so that a comparison compares engines and nothing else."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from megastrategy import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from megastrategy.core.collectives import Collectives, make_collectives
from megastrategy.core.events import Listener

from . import optimizers
from .models import WholeGrads, awkward_model, images, whole_numbers
from .ranks import run_ranks, with_instances

Groups = list[dict[str, Any]]
MakeOptimizer = Callable[[Iterable[Any]], torch.optim.Optimizer]


@dataclasses.dataclass(frozen=True)
class Run:
    """Says what is trained: everything except the engine.

    ``optimizer``: a class of torch.optim, or of :mod:`.optimizers`.
    ``groups``: 1 for all parameters in one group, 3 for three with hyper-parameters of their own.
    ``accumulate``: microbatches a step; every fourth step has one less, as the last window of an epoch may.
    ``used``: the parameters of a backward differ from step to step and from rank to rank ("some"), from rank to rank
    only ("same"), or are all there are ("all"; those that some rank never uses are frozen).
    ``largest_whole``: instead of :class:`AwkwardModel`, :class:`WholeGrads` of inputs up to this, one a microbatch.
    """

    optimizer: str = "AdamW"
    options: tuple[tuple[str, Any], ...] = ()
    groups: int = 1
    accumulate: int = 1
    steps: int = 8
    clip_norm: float | None = None
    dtype: torch.dtype = torch.float32
    used: Literal["some", "same", "all"] = "some"
    largest_whole: int | None = None

    def make_module(self) -> nn.Module:
        if self.largest_whole is None:
            module: nn.Module = awkward_model().to(self.dtype)
            seldom = [module.rank_zero, module.never]
        else:
            module = WholeGrads(self.dtype)
            seldom = [module.rank_one, module.never]
        for part in seldom if self.used == "all" else []:
            part.requires_grad_(False)
        return module

    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        kind = getattr(torch.optim, self.optimizer, None) or getattr(optimizers, self.optimizer)
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

    def num_microbatches(self, step: int) -> int:
        return max(1, self.accumulate - (step % 4 == 3))

    def arguments(self, rank: int, step: int, microbatch: int) -> tuple[Tensor, int, int]:
        """Makes what the module is called with."""
        if self.largest_whole is None:
            x = images(rank, step, microbatch, self.dtype)
        else:
            x = whole_numbers(rank, step, microbatch, self.dtype, batch=1, largest=self.largest_whole)
        return x, {"some": step, "same": 0, "all": 1}[self.used], rank


@dataclasses.dataclass
class Outcome:
    """Holds what a rank ended with. Tensors are copies.

    ``main_params``: with 16-bit weights, of ours, on rank 0.
    """

    weights: dict[str, Tensor]
    losses: list[float]
    norms: list[Tensor]
    optimizer_state: dict[str, Any]
    main_params: dict[str, Tensor] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class Training:
    """A run on one rank, step by step, under either engine.

    ``after_backward`` is called after each backward with whether it was the step's last.
    """

    run: Run
    rank: int
    module: nn.Module
    model: Any
    optimizer: Any
    clip: Callable[[], Tensor]
    after_backward: Callable[[bool], object] = lambda last: None
    losses: list[float] = dataclasses.field(default_factory=list)
    norms: list[Tensor] = dataclasses.field(default_factory=list)

    def step(self, step: int, *, zero_grad: bool = True) -> None:
        run, microbatches = self.run, self.run.num_microbatches(step)
        if zero_grad:
            self.optimizer.zero_grad()
        for microbatch in range(microbatches):
            last = microbatch == microbatches - 1
            with contextlib.nullcontext() if last else self.model.no_sync():
                loss = self.model(*run.arguments(self.rank, step, microbatch)) / microbatches
                loss.backward()
            self.after_backward(last)
        self.losses.append(loss.item())
        if run.clip_norm is not None:
            self.norms.append(self.clip().clone())
        self.optimizer.step()

    def weights(self) -> dict[str, Tensor]:
        """Copies of parameters and module buffers."""
        return {name: value.detach().clone() for name, value in self.module.state_dict().items()}

    def finish(self) -> Outcome:
        """Ours is closed, so that weights are read from a plain module."""
        state, main_params = self.optimizer.state_dict(), {}
        if isinstance(self.model, DistributedDataParallel):
            main_params = self.optimizer.main_params()
            self.model.close()
        return Outcome(self.weights(), self.losses, self.norms, state, main_params)


@functools.cache
def train_with_ddp(run: Run, size: int, **options: bool) -> list[Outcome]:
    """Trains under torch DDP; outcomes by rank. Cached: a reference is trained once for all comparisons with it."""

    def train(rank: int, group: ProcessGroup) -> Outcome:
        module = run.make_module()
        model = TorchDDP(module, process_group=group, find_unused_parameters=True, **options)
        optimizer = run.make_optimizer(model)
        params = [param for group in optimizer.param_groups for param in group["params"]]
        clip = functools.partial(torch.nn.utils.clip_grad_norm_, params, run.clip_norm or 0.0)
        training = Training(run, rank, module, model, optimizer, clip)
        for step in range(run.steps):
            training.step(step)
        return training.finish()

    return run_ranks(size, train)


def start_ours(
    run: Run,
    rank: int,
    group: ProcessGroup,
    config: DistributedDataParallelConfig,
    double: Callable[[Collectives], Collectives] | None = None,
    listener: Listener | None = None,
) -> Training:
    """Wraps the module; with a double, that is put around the real collectives."""
    module = run.make_module()
    instances, collectives = config.num_distributed_optimizer_instances, None
    if 1 < instances < group.size():
        collectives = with_instances(group, instances)
    elif double is not None:
        collectives = make_collectives(group, torch.device("cpu"))
    if double is not None and collectives is not None:
        collectives = double(collectives)
    model = DistributedDataParallel(module, config, group, collectives=collectives, listener=listener)
    optimizer = DistributedOptimizer(run.make_optimizer(model), model)
    clip = functools.partial(optimizer.clip_grad_norm_, run.clip_norm or 0.0)
    return Training(run, rank, module, model, optimizer, clip)


def train_with_ours(run: Run, size: int, config: DistributedDataParallelConfig) -> list[Outcome]:
    """Trains under this engine; outcomes by rank."""

    def train(rank: int, group: ProcessGroup) -> Outcome:
        training = start_ours(run, rank, group, config)
        for step in range(run.steps):
            training.step(step)
        return training.finish()

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


def assert_close(
    ours: list[Outcome], reference: list[Outcome], relative: float, exact: list[Outcome] | None = None
) -> None:
    """Asserts weights within ``relative`` of the largest weight of each tensor, plus the reference's own error.

    That error is its difference from ``exact``, its run in a wider dtype. All ranks of ours are equal to the bit."""
    for rank, (mine, theirs) in enumerate(zip(ours, reference, strict=True)):
        for name, value in theirs.weights.items():
            is_buffer = "running" in name or "num_batches" in name
            difference = (mine.weights[name].double() - value.double()).abs().max().item()
            # statistics are means of activations of size 1, so their own size says nothing
            size = 1.0 if is_buffer else value.double().abs().max().item()
            own = 0.0 if exact is None else (exact[rank].weights[name].double() - value.double()).abs().max().item()
            assert difference <= relative * size + own, f"rank {rank}: {name} differs by {difference:.3g}"
            if not is_buffer:
                assert torch.equal(mine.weights[name], ours[0].weights[name]), (
                    f"{name} differs between ranks 0 and {rank}"
                )


def load_in_order(ours: Any, file: dict[str, Any], order: tuple[str, ...]) -> None:
    """Loads the parts of a file, "model", "optimizer" and "main", into ``ours.module`` and ``ours.optimizer``."""
    loads = {
        "model": ours.module.load_state_dict,
        "optimizer": ours.optimizer.load_state_dict,
        "main": ours.optimizer.load_main_params,
    }
    for part in order:
        loads[part](file[part])
