"""Backwards that no forward of the wrapped model prepared, or several did, are sent or not as under torch DDP."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils.checkpoint import checkpoint

from megastrategy import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from tests.support.doubles import RecordingCollectives
from tests.support.engines import engines
from tests.support.ranks import run_ranks

ENGINES = {
    **engines("reduce-scatter", bucket_size=1),
    **engines("late"),
    **engines("all-reduce", bucket_size=1),
    **engines("forward", "flattened", "pooled"),
}


class Net(nn.Module):
    """A layer whose gradient is copied into its buffer, small ones, and one that only a flag uses."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(10, 8), nn.Linear(8, 3)
        self.seldom = nn.Linear(3, 3)
        generator = torch.Generator().manual_seed(0)
        for param in self.parameters():
            nn.init.normal_(param, std=0.03, generator=generator)

    def forward(self, x: Tensor, seldom: bool = False) -> Tensor:
        x = torch.tanh(self.second(self.first(x)))
        return self.seldom(x) if seldom else x


class Loop:
    """A loop on one rank, under torch DDP (without options) or ours, and what it saw."""

    def __init__(self, rank: int, group: ProcessGroup, options: Mapping[str, Any] | None) -> None:
        self.rank, self.net = rank, Net()
        inner = torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9)
        self.is_ours = options is not None
        self.model: Any
        self.optimizer: Any
        if options is None:
            self.model = TorchDDP(self.net, process_group=group, find_unused_parameters=True)
            self.optimizer = inner
        else:
            self.model = DistributedDataParallel(self.net, DistributedDataParallelConfig(**options), group)
            self.optimizer = DistributedOptimizer(inner, self.model)
        self.found: list[Tensor | None] = []

    def batch(self, number: int) -> Tensor:
        return torch.randn(4, 10, generator=torch.Generator().manual_seed(100 * self.rank + number))

    def loss(self, number: int, *, raw: bool = False, seldom: bool = False) -> Tensor:
        return (self.net if raw else self.model)(self.batch(number), seldom).square().mean()

    def see_local(self) -> None:
        """Notes the very ``.grad`` of each parameter."""
        self.found += [None if param.grad is None else param.grad.clone() for param in self.net.parameters()]

    def see(self) -> None:
        """Notes the gradients, by the engine's method where they may be scattered. Collective."""
        grads = [self.model.full_grad(param) if self.is_ours else param.grad for param in self.net.parameters()]
        self.found += [None if grad is None else grad.clone() for grad in grads]

    def train(self, steps: int = 2, first: int = 40) -> None:
        """Ordinary steps, with an ordinary accumulation in each."""
        for step in range(first, first + steps):
            self.optimizer.zero_grad()
            with self.model.no_sync():
                self.loss(2 * step).backward()
            self.loss(2 * step + 1).backward()
            self.see()
            self.optimizer.step()
        self.found += [param.detach().clone() for param in self.net.parameters()]


def saliency_on_rank_zero(loop: Loop) -> None:
    for step in range(2):
        loop.train(1, step)
        loop.optimizer.zero_grad()
        if loop.rank == 0:
            x = loop.batch(70).requires_grad_()
            loop.net(x).sum().backward()
            assert x.grad is not None
            loop.found.append(x.grad)
            loop.see_local()
            loop.net.zero_grad()


def saliency_that_is_dropped_by_the_optimizer(loop: Loop) -> None:
    loop.train(1)
    if loop.rank == 1:
        loop.optimizer.zero_grad()
        loop.loss(70, raw=True).backward()
        loop.loss(71, raw=True).backward()
        loop.see_local()


def gradients_before_the_first_forward(loop: Loop) -> None:
    loop.loss(70, raw=True).backward()
    loop.see_local()
    loop.see()
    loop.optimizer.zero_grad()


def left_for_the_next_backward(loop: Loop) -> None:
    loop.train(1)
    loop.optimizer.zero_grad()
    if loop.rank == 0:
        loop.loss(70, raw=True, seldom=True).backward()
    loop.loss(71).backward()
    loop.see()
    loop.optimizer.step()


def between_a_forward_and_its_backward(loop: Loop) -> None:
    loss = loop.loss(70)
    loop.loss(71, raw=True).backward()
    loop.see()
    loss.backward()
    loop.see()


def two_forwards_two_backwards(loop: Loop) -> None:
    one, other = loop.loss(70), loop.loss(71)
    one.backward()
    other.backward()
    loop.see()


def second_backward_on_one_rank(loop: Loop) -> None:
    loss = loop.loss(70)
    loss.backward(retain_graph=True)
    loop.see()
    if loop.rank == 0:
        loss.backward()
    loop.see()


def two_forwards_one_backward(loop: Loop) -> None:
    (loop.loss(70) + loop.loss(71)).backward()
    loop.see()


def forward_and_another_under_no_sync(loop: Loop) -> None:
    one = loop.loss(70)
    with loop.model.no_sync():
        other = loop.loss(71)
    (one + other).backward()
    loop.see()


def forward_without_a_backward(loop: Loop) -> None:
    loop.loss(70)
    with loop.model.no_sync():
        loop.loss(71).backward()
    loop.see()


def backward_under_no_sync_of_a_forward_outside(loop: Loop) -> None:
    loss = loop.loss(70)
    with loop.model.no_sync():
        loss.backward()
    loop.see()


def in_a_checkpoint(loop: Loop) -> None:
    for number in range(2):
        loop.optimizer.zero_grad()
        x = loop.batch(70 + number).requires_grad_()
        checkpoint(loop.model, x, use_reentrant=False, preserve_rng_state=False).square().mean().backward()
        loop.see()


def adversarial_example(loop: Loop) -> None:
    """The gradient of the input by a backward of the module itself, whose others are dropped (FGSM)."""
    for number in range(2):
        x = loop.batch(70 + number).requires_grad_()
        loop.net(x).square().mean().backward()
        assert x.grad is not None
        loop.optimizer.zero_grad()
        loop.model(x.detach() + 0.1 * x.grad.sign(), False).square().mean().backward()
        loop.see()
        loop.optimizer.step()


Scenario = Callable[[Loop], None]
SCENARIOS: list[Scenario] = [
    saliency_on_rank_zero,
    saliency_that_is_dropped_by_the_optimizer,
    gradients_before_the_first_forward,
    left_for_the_next_backward,
    between_a_forward_and_its_backward,
    two_forwards_two_backwards,
    second_backward_on_one_rank,
    two_forwards_one_backward,
    forward_and_another_under_no_sync,
    forward_without_a_backward,
    backward_under_no_sync_of_a_forward_outside,
    in_a_checkpoint,
    adversarial_example,
]


def play(scenario: Scenario, size: int, options: Mapping[str, Any] | None) -> list[list[Tensor | None]]:
    def run(rank: int, group: ProcessGroup) -> list[Tensor | None]:
        loop = Loop(rank, group, options)
        scenario(loop)
        loop.train()
        if loop.is_ours:
            loop.model.close()
        return loop.found

    return run_ranks(size, run)


@functools.cache
def under_torch_ddp(scenario: Scenario, size: int) -> list[list[Tensor | None]]:
    return play(scenario, size, None)


@pytest.mark.parametrize(
    ("size", "options"),
    [
        pytest.param(2, ENGINES["reduce-scatter"], id="2-reduce-scatter"),
        pytest.param(2, ENGINES["all-reduce"], id="2-all-reduce"),
        pytest.param(2, ENGINES["flattened"], id="2-flattened"),
        pytest.param(2, ENGINES["pooled"], id="2-pooled"),
    ],
)
def test_as_under_torch_ddp(size: int, options: Mapping[str, Any]) -> None:
    """And the training that follows is right."""
    exact = not options.get("use_distributed_optimizer", True)
    for scenario in SCENARIOS:
        for mine, reference in zip(play(scenario, size, options), under_torch_ddp(scenario, size), strict=True):
            for number, (here, there) in enumerate(zip(mine, reference, strict=True)):
                name = f"{scenario.__name__}, {number}"
                assert (here is None) == (there is None), name
                if here is not None and there is not None:
                    # Scattered gradients are scaled where they are added to, and sums of microbatches are of means.
                    bound = 0.0 if exact else 2e-6 * there.abs().max().item()
                    torch.testing.assert_close(here, there, rtol=0, atol=bound, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("options", [{}, {"use_distributed_optimizer": False}], ids=str)
def test_cached_loss_reduces_once_a_step(options: dict[str, Any]) -> None:
    """The forwards are made once more inside of the loss's backward, all but the last under ``no_sync``."""

    def run(rank: int, group: ProcessGroup) -> int:
        collectives = RecordingCollectives(group)
        model = DistributedDataParallel(
            nn.Linear(3, 2), DistributedDataParallelConfig(**options), collectives=collectives
        )
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)

        def replay(scale: torch.Tensor) -> None:
            with torch.enable_grad():
                with model.no_sync():
                    (model(torch.ones(4, 3)).sum() * scale).backward()
                (model(torch.ones(4, 3)).sum() * scale).backward()

        for _ in range(3):
            loss = torch.zeros((), requires_grad=True)
            loss.register_hook(replay)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        num_reductions = len(collectives.named("reduce_scatter", "all_reduce"))
        assert len(model.layout.buckets) == 1
        model.close()
        return num_reductions

    assert run_ranks(2, run) == [3, 3]
