"""An optimizer outlives its model's wrapper: after ``close()`` it is torch's own again, with all of its state."""

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
from torch.optim import Optimizer

from megastrategy import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from tests.support.engines import COMMON
from tests.support.models import two_layers
from tests.support.ranks import run_ranks


def adamw(params: Any) -> Optimizer:
    return torch.optim.AdamW(params, lr=0.01)


def adafactor(params: Any) -> Optimizer:
    """Steps parameters whole."""
    return torch.optim.Adafactor(params, lr=0.01)


def x_of(rank: int, step: int) -> Tensor:
    return torch.randn(4, 10, generator=torch.Generator().manual_seed(10 * step + rank))


class Loop:
    """Trains one module with one optimizer, wrapped several times, under either engine."""

    def __init__(self, rank: int, group: ProcessGroup, options: dict[str, Any] | None, make: Callable[[Any], Any]):
        self.rank, self.group, self.options = rank, group, options
        self.module = two_layers()
        frozen = nn.Linear(self.module[-1].out_features, 3).requires_grad_(False)
        for param in frozen.parameters():
            nn.init.constant_(param, 0.3)
        self.module.append(frozen)
        self.inner = make(self.module.parameters())
        self.step = 0

    def wrap(self) -> tuple[Any, Any]:
        if self.options is None:
            return TorchDDP(self.module, process_group=self.group), self.inner
        model = DistributedDataParallel(self.module, DistributedDataParallelConfig(**self.options), self.group)
        return model, DistributedOptimizer(self.inner, model)

    def train(self, model: Any, optimizer: Any, steps: int = 2, rank: int | None = None) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            model(x_of(self.rank if rank is None else rank, self.step)).square().mean().backward()
            optimizer.step()
            self.step += 1

    def found(self) -> list[Any]:
        """Weights, and the optimizer's state, in the order of its parameters."""
        params = list(self.module.parameters())
        self.inner.state_dict()  # the first use after close() gathers the state
        state = [dict(self.inner.state.get(p, {})) for p in params]
        return copy.deepcopy([p.detach() for p in params] + state)


Program = Callable[[Loop], None]


def play(program: Program, size: int, options: dict[str, Any] | None, make: Callable[[Any], Any]) -> list[list[Any]]:
    def on_rank(rank: int, group: ProcessGroup) -> list[Any]:
        loop = Loop(rank, group, options, make)
        program(loop)
        return loop.found()

    return run_ranks(size, on_rank)


@functools.cache
def reference(program: Program, size: int, make: Callable[[Any], Any]) -> list[list[Any]]:
    return play(program, size, None, make)


def assert_as_under_torch_ddp(
    program: Program, size: int, options: dict[str, Any], make: Callable[[Any], Any] = adamw
) -> None:
    for mine, theirs in zip(play(program, size, options, make), reference(program, size, make), strict=True):
        for one, other in zip(mine, theirs, strict=True):
            if isinstance(one, Tensor):
                assert torch.equal(one, other)
                continue
            assert one.keys() == other.keys()
            for name in one:
                assert one[name].shape == other[name].shape, name
                assert torch.equal(one[name], other[name]), name


def by_hand(loop: Loop) -> None:
    model, optimizer = loop.wrap()
    loop.train(model, optimizer)
    if loop.options is not None:
        model.close()
    loop.train(loop.module, loop.inner, rank=0)
    assert set(loop.inner.state) <= set(loop.module.parameters())


def by_the_face(loop: Loop) -> None:
    """The loop's only name for an optimizer is what was wrapped around it."""
    model, optimizer = loop.wrap()
    loop.train(model, optimizer)
    if loop.options is not None:
        model.close()
    loop.train(loop.module, optimizer, rank=0)
    optimizer.load_state_dict(optimizer.state_dict())
    torch.nn.utils.clip_grad_norm_(loop.module.parameters(), 0.1)
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    optimizer.step()


def wrapped_again(loop: Loop) -> None:
    for _ in range(3):
        model, optimizer = loop.wrap()
        loop.train(model, optimizer)
        if loop.options is not None:
            model.close()


def wrapped_again_without_close(loop: Loop) -> None:
    """As a loop over folds does, in which the last wrapper has a name until the next one is there."""
    for _ in range(3):
        model, optimizer = loop.wrap()
        loop.train(model, optimizer)
    if loop.options is not None:
        model.close()


@pytest.mark.parametrize(
    ("program", "size", "options"),
    [
        (by_hand, 2, COMMON["reduce-scatter"]),
        (by_the_face, 2, COMMON["forward"]),
        (wrapped_again, 1, COMMON["pooled"]),
        (wrapped_again_without_close, 2, COMMON["all-reduce"]),
    ],
)
def test_a_closed_model_gives_its_optimizer_back(program: Program, size: int, options: dict[str, Any]) -> None:
    assert_as_under_torch_ddp(program, size, options)


@pytest.mark.parametrize("program", [by_hand, wrapped_again])
def test_state_of_parameters_with_owners_comes_back(program: Program) -> None:
    assert_as_under_torch_ddp(program, 2, {"bucket_size": 100}, adafactor)


@pytest.mark.parametrize("options", [*COMMON.values(), {"offload_optimizer_states": True}], ids=str)
def test_closed_16_bit_model_has_state_in_its_dtype(options: dict[str, Any]) -> None:
    """Main params end with the wrapper. A checkpoint that is saved afterwards has them."""

    def run(rank: int, group: ProcessGroup) -> None:
        loop = Loop(rank, group, options, adamw)
        loop.module.bfloat16()
        model, optimizer = loop.wrap()
        for step in range(2):
            optimizer.zero_grad()
            model(x_of(rank, step).bfloat16()).square().mean().backward()
            optimizer.step()
        main_params = optimizer.main_params()
        model.close()
        loop.inner.state_dict()
        for param in list(loop.module.parameters())[:4]:
            state = loop.inner.state[param]
            assert state["exp_avg"].shape == param.shape
            assert state["exp_avg"].dtype == torch.bfloat16
        after = optimizer.main_params()
        assert after.keys() == main_params.keys()
        assert all(torch.equal(after[name], main_params[name]) for name in after)
        loop.module(x_of(0, 9).bfloat16()).square().mean().backward()
        loop.inner.step()

    run_ranks(2, run)


def test_optimizer_in_use_is_refused() -> None:
    def run(rank: int, group: ProcessGroup) -> None:
        loop = Loop(rank, group, {"bucket_size": 100}, adamw)
        model, _ = loop.wrap()
        with pytest.raises(ValueError, match=r"this AdamW is in a DistributedOptimizer already.*close\(\) the model"):
            DistributedOptimizer(loop.inner, model)

    run_ranks(2, run)


class Averaging(Optimizer):
    """As NeMo's averages of weights: around another optimizer, whose attributes it shows."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.copies = inner, [param.detach().clone() for param in params_of(inner)]

    def __getattr__(self, name: str) -> Any:
        if name == "inner":
            raise AttributeError(name)
        return getattr(self.inner, name)

    def step(self, closure: Any = None) -> Any:
        self.inner.step(closure)
        torch._foreach_lerp_(self.copies, [param.detach() for param in params_of(self.inner)], 0.1)


def params_of(optimizer: Any) -> list[Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


@pytest.mark.parametrize(
    ("size", "options"), [(2, COMMON["reduce-scatter"]), (1, COMMON["pooled"]), (2, COMMON["all-reduce"])], ids=str
)
def test_an_optimizer_around_ours_trains_as_it_is(size: int, options: dict[str, Any]) -> None:
    """As under torch DDP; a second of ours around it, which a Trainer makes, is refused with the way out."""

    def run(options: dict[str, Any] | None, rank: int, group: ProcessGroup) -> list[Tensor]:
        loop = Loop(rank, group, options, adamw)
        model, optimizer = loop.wrap()
        outer: Any = Averaging(optimizer)
        if options is not None and size > 1 and options.get("use_distributed_optimizer", True):
            text = r"this Averaging steps a DistributedOptimizer, its attribute 'inner'.*step\(\) of the"
            with pytest.raises(ValueError, match=rf"(?s){text}.*EMAWeightAveraging.*use_distributed_optimizer=False"):
                DistributedOptimizer(outer, model)
        elif options is not None:
            outer = DistributedOptimizer(outer, model)
        loop.train(model, outer)
        return [*outer.copies, *(param.detach().clone() for param in loop.module.parameters())]

    expected = run_ranks(size, functools.partial(run, None))
    for ours, theirs in zip(run_ranks(size, functools.partial(run, options)), expected, strict=True):
        assert all(map(torch.equal, ours, theirs))
