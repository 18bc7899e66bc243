"""Training under collectives that deliver as late as they may, or at once, with a guard over memory in flight."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import Parameter

from megastrategy import DistributedDataParallelConfig
from tests.support.chosen_collectives import Choice, choosing
from tests.support.engines import engines
from tests.support.in_flight import MAIN, InFlightGuard, Streams
from tests.support.lazy_collectives import Delivery
from tests.support.ranks import run_ranks
from tests.support.training import Outcome, Run, assert_same_bits, start_ours, train_with_ddp

CONFIGS = {
    **engines("reduce-scatter", "all-reduce", "flattened", "pooled", "forward"),
    "fp32 sums": {"reduce_scatter_with_fp32_accumulation": True, "grad_reduce_in_fp32": False},
}


def train(choice: Choice, run: Run, options: dict[str, Any]) -> list[Outcome]:
    """The outcomes by rank."""
    config = DistributedDataParallelConfig(**{"bucket_size": 200, **options})

    def on_rank(rank: int, group: ProcessGroup) -> Outcome:
        training = start_ours(run, rank, group, config)
        guard = InFlightGuard()
        with guard:
            for step in range(run.steps):
                training.step(step)
        assert guard.num_checked > 100 * run.steps
        return training.finish()

    with choosing(choice):
        return run_ranks(2, on_rank)


@pytest.mark.parametrize(
    ("delivery", "backend", "name"),
    [
        ("at-wait", "rings", "reduce-scatter"),
        ("at-wait", "rings", "pooled"),
        ("at-wait", "rings", "forward"),
        ("at-wait", "rings", "fp32 sums"),
        ("at-launch", "process-group", "all-reduce"),
        ("at-random", "rings", "flattened"),
    ],
)
def test_training_equals_ddp_to_the_bit(delivery: Delivery, backend: str, name: str) -> None:
    """In any mode; and no operator of the engine's, of autograd's or of the optimizer's touches what is in flight."""
    # Pooled gradients add up means over ranks, and DDP's mean is of what was added up.
    run = Run(steps=6, accumulate=1 if "grad_buffer" in CONFIGS[name] else 2)
    assert_same_bits(train(Choice(delivery, backend), run, CONFIGS[name]), train_with_ddp(run, 2))


@pytest.mark.parametrize(
    ("delivery", "backend", "grad_buffer", "overlap"),
    [("at-wait", "rings", "contiguous", False), ("at-launch", "process-group", "pooled", True)],
)
def test_rounding_is_the_same_whenever_results_come(
    delivery: Delivery, backend: str, grad_buffer: str, overlap: str
) -> None:
    rounding = {"grad_wire_dtype": "bf16"}
    options, run = {**rounding, "grad_buffer": grad_buffer, "overlap_param_gather": overlap}, Run(steps=6)
    assert_same_bits(train(Choice(delivery, backend), run, options), train(Choice(None, backend), run, options))


@pytest.mark.parametrize("is_first", [True, False])
def test_params_arrive_on_the_stream_of_the_loop(monkeypatch: pytest.MonkeyPatch, is_first: bool) -> None:
    """A reader on another stream, an average of the weights say, waits for both."""
    streams_of: dict[str, Streams] = {}
    monkeypatch.setattr(
        torch.cpu, "current_stream", lambda device=None: streams_of[threading.current_thread().name].current_stream
    )

    def run(rank: int, group: ProcessGroup) -> None:
        streams = streams_of[threading.current_thread().name] = Streams()
        config = DistributedDataParallelConfig(bucket_size=200, overlap_param_gather=True)
        with InFlightGuard(streams):
            training = start_ours(Run(), rank, group, config)
            training.step(0)
            params = list(training.module.parameters())
            assert any(type(param) is not Parameter for param in params), "on their way"
            if not is_first:
                training.module(*training.run.arguments(rank, 1, 0))
            with streams.on("average"):
                streams.wait_for(MAIN)
                total = sum(param.detach().double().sum() for param in params)
                assert isinstance(total, Tensor)
                assert total.isfinite()
            training.module(*training.run.arguments(rank, 1, 0))
        training.finish()

    with choosing(Choice("at-wait")):
        run_ranks(2, run)
