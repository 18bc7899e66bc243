"""The lazy collectives and the guard: what they see, and the engine under both."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import Parameter

from megastrategy import DistributedDataParallelConfig
from megastrategy.core.collectives import GlooCollectives, Handle
from megastrategy.core.data_path.bucket import Bucket
from megastrategy.core.data_path.gather import Gather
from megastrategy.core.layout.layout import Spans
from tests.support.chosen_collectives import Choice, choosing
from tests.support.engines import engines
from tests.support.in_flight import MAIN, InFlightGuard, Streams
from tests.support.lazy_collectives import Delivery, LazyCollectives, violations
from tests.support.ranks import run_ranks
from tests.support.training import Outcome, Run, assert_same_bits, start_ours, train_with_ddp


def lazy(group: ProcessGroup, delivery: Delivery = "at-wait", kind: Any = GlooCollectives) -> LazyCollectives:
    return LazyCollectives(kind(group), delivery)


# --- the double ------------------------------------------------------------------------------------------------------


# --- the engine under it ---------------------------------------------------------------------------------------------

CONFIGS = {
    **engines("reduce-scatter", "all-reduce", "flattened", "pooled", "forward"),
    "fp32 sums": {"reduce_scatter_with_fp32_accumulation": True, "grad_reduce_in_fp32": False},
}


def train(
    choice: Choice, run: Run, options: dict[str, Any], size: int = 2, *, is_guarded: bool = True
) -> list[Outcome]:
    """The outcomes by rank."""
    config = DistributedDataParallelConfig(**{"bucket_size": 200, **options})

    def on_rank(rank: int, group: ProcessGroup) -> Outcome:
        training = start_ours(run, rank, group, config)
        guard = InFlightGuard()
        with guard if is_guarded else contextlib.nullcontext():
            for step in range(run.steps):
                training.step(step)
        assert (guard.num_checked > 100 * run.steps) == is_guarded
        return training.finish()

    with choosing(choice):
        return run_ranks(size, on_rank)


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


class Forgotten(Handle):
    """A handle that is never waited for."""

    def __init__(self, handle: Handle) -> None:
        self._handle = handle

    def wait(self) -> None:
        """Returns at once."""


def forget_reductions(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wait for the first bucket is missing."""
    launch = Bucket.launch

    def launch_and_forget(self: Bucket) -> None:
        launch(self)
        if self.plan.index == 0 and self._work is not None:
            self._work = Forgotten(self._work)

    monkeypatch.setattr(Bucket, "launch", launch_and_forget)


def forget_gathers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wait for the first bucket's parameters is missing."""
    start = Gather.start

    def start_and_forget(self: Gather, buckets: Sequence[int], spans_of: Mapping[int, Spans]) -> None:
        start(self, buckets, spans_of)
        if 0 in self._works:
            self._works[0] = Forgotten(self._works[0])

    monkeypatch.setattr(Gather, "start", start_and_forget)


@pytest.mark.parametrize(
    ("overlap", "forget", "is_guarded"), [(False, forget_reductions, True), (True, forget_gathers, False)]
)
def test_a_missing_wait_is_seen(
    monkeypatch: pytest.MonkeyPatch, overlap: str, forget: Callable[[pytest.MonkeyPatch], None], is_guarded: bool
) -> None:
    """By the poison in the weights, and by the guard at the line."""
    # The guard watches steps, and it is the next one's forward that reads weights; the poison is looked at in the end.
    run, choice, options = Run(steps=1 + is_guarded), Choice("at-wait"), {"overlap_param_gather": overlap}
    assert_same_bits(train(choice, run, options), train_with_ddp(run, 2))
    forget(monkeypatch)
    with pytest.raises(AssertionError) as caught:
        assert_same_bits(train(choice, run, options, is_guarded=is_guarded), train_with_ddp(run, 2))
    if is_guarded:
        assert "touches memory in flight" in str(caught.value)
        assert f"{'reduce-scatter' if forget is forget_reductions else 'all-gather'} (launched at " in str(caught.value)
        assert "/megastrategy/core/" in str(caught.value)
    else:
        assert "differs by nan" in str(caught.value)
    violations.clear()


# --- the guard -------------------------------------------------------------------------------------------------------


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


# --- ranks that are threads ------------------------------------------------------------------------------------------
