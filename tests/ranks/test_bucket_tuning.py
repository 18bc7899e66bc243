"""``bucket_size="auto"`` on links and backwards whose times are made, by margins that no noise bridges."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megastrategy import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from megastrategy.core.collectives import Handle
from megastrategy.core.rebucketing.tuning import measure_link
from tests.support.doubles import RecordingCollectives
from tests.support.ranks import run_ranks

WIDTH, DEPTH = 128, 40
"""40 layers of 2**14 elements: the default bucket has 2**18 of the 655,360, and the first three have half of
that, which makes four."""
STEPS_TO_CHOICE = 4


class LinkCollectives(RecordingCollectives):
    """Large collectives take the time of a made link, in the worker's thread."""

    def __init__(self, group: ProcessGroup, latency_s: float, seconds_per_byte: float) -> None:
        super().__init__(group)
        self._latency_s, self._seconds_per_byte = latency_s, seconds_per_byte

    def _do(self, name: str, tensor: Tensor, *args: float, **options: bool) -> Handle:
        if tensor.nbytes > 2000:
            seconds = self._latency_s + tensor.nbytes * self._seconds_per_byte
            self._do_before("link", lambda: time.sleep(seconds))
        return super()._do(name, tensor, *args, **options)


class _SlowBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        time.sleep(ctx.seconds)
        return grad, None


class Tower(nn.Module):
    def __init__(self, backward_s: float = 0.0) -> None:
        super().__init__()
        self.backward_s = backward_s
        generator = torch.Generator().manual_seed(3)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH))
        for param in self.parameters():
            param.data = torch.randn(param.shape, generator=generator) / WIDTH**0.5

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(_SlowBackward.apply(x, self.backward_s)))
        return x


def train(
    group: ProcessGroup,
    rank: int,
    link: tuple[float, float] | None,
    num_steps: int,
    *,
    backward_s: float = 0.0,
    **options: Any,
) -> tuple[int, list[str], list[Tensor]]:
    """The number of buckets at the end, what was said, and the weights."""
    config = DistributedDataParallelConfig(**options)
    collectives = LinkCollectives(group, *link) if link is not None else RecordingCollectives(group)
    model = DistributedDataParallel(Tower(backward_s), config, collectives=collectives)
    told: list[str] = []
    model.engine.on_message = told.append
    optimizer = DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-3), model)
    generator = torch.Generator().manual_seed(rank)
    for step in range(num_steps):
        if step == STEPS_TO_CHOICE - 1 and options.get("grad_buffer") != "pooled":  # which reduces twice a step here
            assert not told, "it has not seen enough yet"
        optimizer.zero_grad()
        with model.no_sync():
            model(torch.randn(4, WIDTH, generator=generator)).square().mean().backward()
        model(torch.randn(4, WIDTH, generator=generator)).square().mean().backward()
        optimizer.step()
    num_buckets = len(model.layout.buckets)
    model.close()
    return num_buckets, told, [param.detach() for param in model.module.parameters()]


@pytest.mark.parametrize("sharded", [True, False])
@pytest.mark.parametrize(
    ("link", "backward_s", "num_buckets"),
    [
        ((0.06, 0.0), 0.0, range(1, 2)),  # a collective takes 60 ms, more than a backward: only one
        ((0.0, 6e-3 / (4 * WIDTH**2)), 6e-3, range(4, 41)),  # a layer as long as its backward: more than three
    ],
)
def test_the_link_decides(link: tuple[float, float], backward_s: float, num_buckets: range, sharded: bool) -> None:
    def run(rank: int, group: ProcessGroup) -> tuple[int, list[str]]:
        num_buckets, told, _ = train(
            group,
            rank,
            link,
            STEPS_TO_CHOICE,
            backward_s=backward_s,
            bucket_size="auto",
            use_distributed_optimizer=sharded,
            overlap_param_gather="forward" if sharded and backward_s else False,
        )
        return num_buckets, told

    (first, told), (second, silent) = run_ranks(2, run)
    assert first == second
    assert first in num_buckets
    assert not silent, "rank 0 speaks for all"
    assert len(told) == 1
    assert f"{first} bucket(s)" in told[0]
    assert ("reduce-scatter" if sharded else "all-reduce") in told[0]


def test_training_is_the_same_to_the_bit_across_the_change() -> None:
    """State and weights have moved to other shards in the midst of it."""

    def run(rank: int, group: ProcessGroup, link: tuple[float, float] | None, size: int | str | None) -> Any:
        num_buckets, _, weights = train(group, rank, link, STEPS_TO_CHOICE + 3, bucket_size=size)
        return num_buckets, weights

    tuned = run_ranks(2, lambda rank, group: run(rank, group, (0.03, 0.0), "auto"))
    fixed = run_ranks(2, lambda rank, group: run(rank, group, None, None))
    assert (tuned[0][0], fixed[0][0]) == (1, 4)
    for (_, ours), (_, theirs) in zip(tuned, fixed, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "options",
    [
        {"grad_buffer": "pooled"},
        {"average_in_collective": True, "overlap_param_gather": False},
        {"overlap_grad_reduce": False},
        {"find_unused_parameters": False},
        {"use_distributed_optimizer": False},
    ],
    ids=str,
)
def test_with_other_options_the_weights_are_those_of_fixed_buckets(options: dict[str, Any]) -> None:
    def run(rank: int, group: ProcessGroup, link: tuple[float, float] | None, size: int | str | None) -> Any:
        num_buckets, _, weights = train(group, rank, link, STEPS_TO_CHOICE + 2, bucket_size=size, **options)
        return num_buckets, weights

    tuned = run_ranks(2, lambda rank, group: run(rank, group, (0.02, 0.0), "auto"))
    fixed = run_ranks(2, lambda rank, group: run(rank, group, None, None))
    assert (tuned[0][0], fixed[0][0]) == (1, 4)
    for (_, ours), (_, theirs) in zip(tuned, fixed, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_an_optimizer_that_cannot_move_keeps_its_buckets_and_is_told_so() -> None:
    class Counting(torch.optim.SGD):
        """Keeps what no state dictionary has."""

        def __init__(self, params: Any) -> None:
            super().__init__(params, lr=0.1)
            self.num_calls = 0

        def step(self, closure: Any = None) -> Any:
            self.num_calls += 1
            return super().step(closure)

    def run(rank: int, group: ProcessGroup) -> tuple[int, list[str]]:
        config = DistributedDataParallelConfig(bucket_size="auto")
        model = DistributedDataParallel(Tower(), config, collectives=LinkCollectives(group, 0.03, 0.0))
        told: list[str] = []
        model.engine.on_message = told.append
        optimizer = DistributedOptimizer(Counting(model.parameters()), model)
        for _ in range(STEPS_TO_CHOICE):
            model(torch.ones(2, WIDTH)).sum().backward()
            optimizer.step()
        num_buckets = len(model.layout.buckets)
        model.close()
        return num_buckets, told

    (num_buckets, told), _ = run_ranks(2, run)
    assert num_buckets == 4
    assert "Not taken" in told[0]


def test_parameters_that_join_end_the_measurement() -> None:
    def run(rank: int, group: ProcessGroup) -> tuple[int, list[str]]:
        module = Tower()
        module.layers[0].requires_grad_(False)
        config = DistributedDataParallelConfig(bucket_size="auto")
        model = DistributedDataParallel(module, config, collectives=LinkCollectives(group, 0.03, 0.0))
        told: list[str] = []
        model.engine.on_message = told.append
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
        for step in range(STEPS_TO_CHOICE + 1):
            if step == 2:
                module.layers[0].requires_grad_(True)
            model(torch.ones(2, WIDTH)).sum().backward()
            optimizer.step()
        num_buckets = len(model.layout.buckets)
        model.close()
        return num_buckets, told

    assert run_ranks(2, run) == [(5, []), (5, [])]


def test_a_link_is_as_slow_as_on_its_slowest_rank_and_measured_alike_on_all() -> None:
    def run(rank: int, group: ProcessGroup) -> tuple[float, float]:
        collectives = LinkCollectives(group, 0.02 + 0.02 * rank, 0.0)
        link = measure_link(collectives.all_gather, collectives, torch.float32, torch.device("cpu"))
        collectives.close()
        return link.latency_s, link.seconds_per_byte

    first, second = run_ranks(2, run)
    assert first == second
    assert first[0] > 0.03


def test_one_rank_has_nothing_to_measure() -> None:
    def run(rank: int, group: ProcessGroup) -> list[str]:
        _, told, _ = train(group, rank, None, STEPS_TO_CHOICE, bucket_size="auto")
        return told

    assert run_ranks(1, run) == [[]]
