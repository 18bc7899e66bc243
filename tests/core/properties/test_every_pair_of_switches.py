"""Every switch of the configuration with every other: under collectives that record and that fail.

A row's training has to meet torch DDP's result to the bit; see :attr:`Row.run`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import threading
import time
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from megastrategy import DistributedDataParallelConfig
from megastrategy.core.collectives import Collectives
from megastrategy.core.collectives.worker import Worker
from megastrategy.core.config import field_names
from megastrategy.core.data_path.reduced_grad import ReducedGrad
from megastrategy.core.errors import CollectiveError
from megastrategy.core.events import Event, EventKind
from megastrategy.core.layout import build
from megastrategy.core.layout.layout import BufferLayout
from tests.support.doubles import (
    REDUCTIONS,
    Call,
    FailingCollectives,
    OutOfLuckError,
    RecordingCollectives,
)
from tests.support.ranks import run_ranks, try_ranks
from tests.support.switches import SWITCHES
from tests.support.training import (
    Outcome,
    Run,
    Training,
    assert_same_bits,
    start_ours,
    train_with_ddp,
)


@dataclasses.dataclass(frozen=True)
class Row:
    """A value for every switch."""

    config: DistributedDataParallelConfig
    dtype: torch.dtype

    def __str__(self) -> str:
        """Names the values that differ from the defaults."""
        chosen = [f"{self.dtype}".removeprefix("torch.")]
        for field in dataclasses.fields(self.config):
            value = getattr(self.config, field.name)
            if value != field.default and isinstance(value, bool):
                chosen.append(field.name if value else f"no {field.name}")
            elif value != field.default:
                chosen.append(f"{field.name}={value}")
        return ", ".join(chosen)

    @property
    def num_ranks(self) -> int:
        """Two in each instance."""
        return 2 * self.config.num_distributed_optimizer_instances

    @property
    def grads_have_sixteen_bits(self) -> bool:
        return self.dtype == torch.bfloat16 and not self.config.grad_reduce_in_fp32

    @property
    def rounds_grads(self) -> bool:
        """Whether gradients are sent in fewer bits than they have."""
        return self.config.grad_wire_dtype is not None and not self.grads_have_sixteen_bits

    @property
    def run(self) -> Run:
        """Chooses what is trained, so that torch DDP's result has to be met to the bit.

        Parameters are used as the row promises. fp32 on two ranks, where a sum has one order only: the awkward model,
        whose every operation rounds; pooled gradients of one microbatch a step, since of several the mean over ranks
        is taken first, which rounds elsewhere. In all other rows sums over ranks have another order than torch DDP's,
        or another dtype: there gradients are integers, whose sums are not rounded, of up to 127 (two microbatches
        are 8 bits, of several ranks more than bf16 has) unless they are summed in bf16 itself. So they are where
        something is sent in fewer bits; they do not depend on the weights, then.
        """
        config, pooled = self.config, self.config.grad_buffer == "pooled"
        used = "same" if config.static_graph else "some" if config.find_unused_parameters else "all"
        options = (("lr", 0.01), ("weight_decay", 0.01))
        if self.dtype == torch.float32 and self.num_ranks == 2 and not self.rounds_grads:
            return Run("AdamW", options, groups=3, accumulate=1 if pooled else 2, steps=6, used=used)
        in_bf16 = self.grads_have_sixteen_bits and not (pooled or config.reduce_scatter_with_fp32_accumulation)
        largest = 15 if in_bf16 else 127
        return Run(
            "AdamW", options, groups=3, accumulate=2, steps=6, dtype=self.dtype, used=used, largest_whole=largest
        )


WHOLE: dict[str, Any] = {"use_distributed_optimizer": False}
FLATTENED: dict[str, Any] = {**WHOLE, "use_contiguous_buffers": False, "overlap_grad_reduce": False}
SUMS_IN_16_BITS: dict[str, Any] = {"grad_reduce_in_fp32": False}
SUMS_IN_32_BITS: dict[str, Any] = {**SUMS_IN_16_BITS, "reduce_scatter_with_fp32_accumulation": True}
POOLED: dict[str, Any] = {"grad_buffer": "pooled"}
BF16_WIRE: dict[str, Any] = {"grad_wire_dtype": "bf16"}
ON_HOST: dict[str, Any] = {"offload_optimizer_states": True}
INSTANCES: dict[str, Any] = {"num_distributed_optimizer_instances": 2}
UNDER_FORWARD: dict[str, Any] = {"overlap_param_gather": True}
LATE: dict[str, Any] = {"overlap_grad_reduce": False}
STATIC: dict[str, Any] = {"static_graph": True}
ALL_USED: dict[str, Any] = {"find_unused_parameters": False}
OWN_BUFFERS: dict[str, Any] = {"broadcast_buffers": False}
CHECKED: dict[str, Any] = {"check_for_nan_in_grad": True}


def row(dtype: torch.dtype, bucket_size: int | None, *options: dict[str, Any]) -> Row:
    merged = {name: value for each in options for name, value in each.items()}
    return Row(DistributedDataParallelConfig(bucket_size=bucket_size, **merged), dtype)


FP32, BF16, EACH, SOME, ONE = torch.float32, torch.bfloat16, 1, 200, 10**9
ROWS = [
    row(BF16, ONE, SUMS_IN_16_BITS, LATE, INSTANCES, BF16_WIRE, POOLED, STATIC),
    row(FP32, None, UNDER_FORWARD, ON_HOST, OWN_BUFFERS, ALL_USED, CHECKED),
    row(FP32, EACH, FLATTENED),
    row(
        *(BF16, EACH, SUMS_IN_32_BITS, INSTANCES, UNDER_FORWARD, BF16_WIRE, ON_HOST, POOLED),
        *(OWN_BUFFERS, ALL_USED, STATIC, CHECKED),
    ),
    row(BF16, SOME, SUMS_IN_16_BITS, FLATTENED, UNDER_FORWARD, OWN_BUFFERS, ALL_USED, STATIC, CHECKED),
    row(BF16, SOME, SUMS_IN_32_BITS, BF16_WIRE, ON_HOST, POOLED),
    row(FP32, None, INSTANCES, BF16_WIRE, POOLED, ALL_USED, STATIC),
    row(BF16, ONE, SUMS_IN_32_BITS, LATE, INSTANCES, ON_HOST, OWN_BUFFERS, CHECKED),
    row(FP32, ONE, WHOLE, UNDER_FORWARD),
    row(BF16, None, SUMS_IN_32_BITS, LATE, BF16_WIRE, CHECKED),
    row(FP32, SOME, INSTANCES, POOLED, OWN_BUFFERS),
    row(BF16, None, FLATTENED),
    row(FP32, ONE, FLATTENED, ALL_USED),
    # the awkward model, whose every operation rounds
    row(FP32, SOME, LATE, ON_HOST),
    row(FP32, None, ON_HOST, POOLED, OWN_BUFFERS, CHECKED),
    row(FP32, EACH, POOLED),
]
"""Any two values of two switches meet in one of the first thirteen, if they may be chosen together."""

IN_FORWARD = "forward_sync_buffers"
BROADCAST_BUFFERS = IN_FORWARD if IN_FORWARD in inspect.signature(TorchDDP).parameters else "broadcast_buffers"
"""The switch of torch DDP, which has a newer name since 2.13 and warns of the older."""


@pytest.fixture(autouse=True)
def small_default_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """``bucket_size=None`` means several buckets for these small models as well."""

    def default_bucket_size(total_numel: int, dp_size: int) -> int:
        return total_numel // 8

    monkeypatch.setattr(build, "default_bucket_size", default_bucket_size)


def test_every_field_of_the_configuration_is_a_switch() -> None:
    assert SWITCHES.keys() - {"dtype"} == set(field_names())


# --- recording -------------------------------------------------------------------------------------------------------


class Watched:
    """One rank's training under recording collectives, which are counted after every backward and every step."""

    def __init__(self, row: Row, rank: int, group: ProcessGroup) -> None:
        self.row, self.events = row, list[Event]()
        self.collectives: RecordingCollectives

        def record(real: Collectives) -> Collectives:
            self.collectives = RecordingCollectives(group, real)
            return self.collectives

        self.training = start_ours(row.run, rank, group, row.config, record, self.events.append)
        self.model = self.training.model
        self.training.after_backward = self.check_backward
        self.seen = len(self.collectives.calls)
        self.layout: BufferLayout = self.model.layout  # it may become another at the end of a backward
        self.num_synced = 0

    def new_calls(self) -> list[Call]:
        calls = self.collectives.calls[self.seen :]
        self.seen += len(calls)
        return calls

    def new_events(self) -> list[EventKind]:
        kinds = [event.kind for event in self.events]
        self.events.clear()
        return kinds

    def check_backward(self, last: bool) -> None:
        """Every bucket, or piece of one, was reduced once, if the backward is synchronised; and what was used was
        agreed on as the configuration says."""
        config, plan, calls, events = self.row.config, self.layout, self.new_calls(), self.new_events()
        self.layout = self.model.layout
        is_pooled = config.grad_buffer == "pooled"
        reductions = [call for call in calls if call.name in REDUCTIONS]
        agreements = [call for call in calls if call.name == "all_reduce_max"]
        if not (last or is_pooled):
            assert not reductions
            assert not agreements
            return
        expected = []
        for bucket in plan.buckets:
            pieces = [(end - start) * plan.num_shards for start, end in plan.pieces(bucket)]
            assert sum(pieces) == bucket.numel
            assert is_pooled or len(pieces) == 1
            expected += pieces
        assert [call.numel for call in reductions] == expected
        sent_in = torch.bfloat16 if self.row.grads_have_sixteen_bits or self.row.rounds_grads else torch.float32
        assert {call.dtype for call in reductions} == {sent_in}
        numel = sum(buffer.numel for buffer in plan.buffers)
        assert sum(call.nbytes for call in reductions) == numel * sent_in.itemsize
        assert {call.name for call in reductions} == {self.kind_of_reduction()}
        self.num_synced += 1
        if self.num_synced > 1:  # the first agrees on a move, too
            agrees = config.check_for_nan_in_grad or (config.find_unused_parameters and not config.static_graph)
            sizes = [len(plan.params) + len(plan.buckets) + 6] if agrees else []  # a byte each
            assert [call.nbytes for call in agreements] == sizes
        self.check_overlap(events)
        self.check_memory_of_grads()

    def kind_of_reduction(self) -> str:
        config = self.row.config
        if not config.use_distributed_optimizer:
            return "all_reduce"
        has_separate_sums = config.grad_buffer == "pooled" or config.reduce_scatter_with_fp32_accumulation
        has_separate_sums |= self.row.rounds_grads
        return "reduce_scatter_into" if has_separate_sums else "reduce_scatter"

    def check_overlap(self, events: list[EventKind]) -> None:
        """The first reduction starts before the last gradient is there; if no bucket waits for a gradient that does not
        come, and if there are several."""
        begun = events[: events.index(EventKind.REDUCE_START)]
        is_early = begun.count(EventKind.GRAD_READY) < events.count(EventKind.GRAD_READY)
        if not self.row.config.overlap_grad_reduce:
            assert not is_early
        elif self.row.run.used == "all" and len(self.layout.buckets) > 1 and self.num_synced > 1:
            assert is_early

    def check_memory_of_grads(self) -> None:
        """Whole gradients are in buffers, as the layout says, or where autograd put them; of parts none is shown."""
        shown = [(param.grad, slot) for param, slot in zip(self.model.engine.params, self.layout.slots, strict=True)]
        if self.row.config.use_distributed_optimizer:
            assert {type(grad) for grad, _ in shown} <= {type(None), ReducedGrad}
            return
        starts = {grad.data_ptr() - slot.start * grad.element_size() for grad, slot in shown if grad is not None}
        if self.row.config.use_contiguous_buffers:
            assert len(starts) == len(self.layout.buffers)
        else:
            assert len(starts) > len(self.layout.buffers)

    def step(self, step: int) -> None:
        """Every bucket of new weights was gathered once in the step, and module buffers were sent before it."""
        config, sent = self.row.config, len(self.collectives.named("broadcast"))
        self.training.step(step)
        if step > 0:  # the order of buckets is broadcast too, once
            assert (len(self.collectives.named("broadcast")) > sent) == config.broadcast_buffers
        gathers = [call for call in self.new_calls() if call.name == "all_gather"]
        sharded = config.use_distributed_optimizer
        numels = [bucket.numel for bucket in self.layout.buckets]
        assert [call.numel for call in gathers] == (numels[::-1] if sharded else [])
        assert {call.dtype for call in gathers} <= {self.row.dtype}
        events = self.new_events()
        assert EventKind.GATHER_START not in events[: events.index(EventKind.STEP_END)]
        awaited = any(type(param) is not torch.nn.Parameter for param in self.model.engine.params)
        assert awaited == (sharded and config.overlap_param_gather)


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_recorded(row: Row) -> None:
    """All ranks launch the same collectives in the same order; each backward and each step exactly those of the
    layout; and the result is torch DDP's to the bit."""

    def train(rank: int, group: ProcessGroup) -> tuple[Outcome, list[tuple[Any, ...]], int]:
        watched = Watched(row, rank, group)
        for step in range(row.run.steps):
            watched.step(step)
        # without those of state_dict(), which is of an instance, and pickles what that has
        calls = [(call.name, call.numel, call.dtype) for call in watched.collectives.calls]
        outcome = watched.training.finish()
        return outcome, calls, watched.num_synced

    outcomes, calls, num_synced = zip(*run_ranks(row.num_ranks, train), strict=True)
    for rank, launched in enumerate(calls):
        assert launched == calls[0], f"rank {rank} launched other collectives than rank 0"
    microbatches = sum(map(row.run.num_microbatches, range(row.run.steps)))
    assert set(num_synced) == {microbatches if row.config.grad_buffer == "pooled" else row.run.steps}
    assert_torch_ddps(row, list(outcomes))


def assert_torch_ddps(row: Row, ours: list[Outcome], **changes: Any) -> None:
    """Weights, module buffers, losses and optimizer state are torch DDP's to the bit, of a run with ``changes``.

    With 16-bit weights it is main params that are torch DDP's weights in fp32; the weights are their rounding.
    """
    run = dataclasses.replace(row.run, dtype=torch.float32, **changes)
    options = {} if row.config.broadcast_buffers else {BROADCAST_BUFFERS: False}
    reference = train_with_ddp(run, row.num_ranks, **options)
    if row.dtype == torch.bfloat16:
        for name, value in ours[0].main_params.items():
            assert torch.equal(value, reference[0].weights[name]), f"main param {name}"
        trained = {name for name, param in run.make_module().named_parameters() if param.requires_grad}
        assert ours[0].main_params.keys() == trained
        reference = [
            dataclasses.replace(theirs, weights=rounded(theirs.weights, row.dtype), losses=mine.losses)
            for theirs, mine in zip(reference, ours, strict=True)
        ]
    assert_same_bits(ours, reference)


def rounded(weights: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    return {name: value.to(dtype) if value.is_floating_point() else value for name, value in weights.items()}


# --- failing ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Point:
    """The ``number``-th collective of these names from the beginning of ``step`` on."""

    names: tuple[str, ...]
    step: int
    number: int = 1

    def is_in(self, row: Row) -> bool:
        """Whether the row's training has such a collective."""
        config = row.config
        if "all_gather" in self.names:
            return config.use_distributed_optimizer
        if "all_reduce_max" in self.names:
            return config.check_for_nan_in_grad or (config.find_unused_parameters and not config.static_graph)
        return "broadcast" not in self.names or config.broadcast_buffers


FIRST_REDUCTION, LATER_REDUCTION = Point(REDUCTIONS, 0), Point(REDUCTIONS, 1, 2)  # that of step 2, with one bucket
AGREEMENT, GATHER, BROADCAST = Point(("all_reduce_max",), 1), Point(("all_gather",), 1), Point(("broadcast",), 1)
CASES = [
    pytest.param(ROWS[0], FIRST_REDUCTION, True, 0, id="first reduction"),
    pytest.param(ROWS[3], LATER_REDUCTION, False, 1, id="later reduction"),
    pytest.param(ROWS[5], AGREEMENT, True, 1, id="agreement"),
    pytest.param(ROWS[1], GATHER, False, 0, id="gather"),
    pytest.param(ROWS[8], BROADCAST, True, 1, id="broadcast"),
]
"""Whether the connection breaks, or the collective does not start; and on which rank."""


@functools.cache
def weights_after(row: Row, num_steps: int) -> dict[str, Tensor]:
    """The parameters after a run without failures, on any rank."""

    def train(rank: int, group: ProcessGroup) -> dict[str, Tensor]:
        training = start_ours(row.run, rank, group, row.config)
        for step in range(num_steps):
            training.step(step)
        training.model.close()
        return parameters(training)

    return run_ranks(row.num_ranks, train)[0]


def parameters(training: Training) -> dict[str, Tensor]:
    return {name: param.detach().clone() for name, param in training.module.named_parameters()}


@pytest.mark.parametrize(("row", "point", "on_the_wire", "culprit"), CASES)
def test_one_rank_fails(row: Row, point: Point, on_the_wire: bool, culprit: int) -> None:
    """Every rank ends in an error, long before the group's timeout, with nothing half done and no thread left."""
    has_failed: list[bool] = []

    def train(rank: int, group: ProcessGroup) -> None:
        collectives: FailingCollectives
        events: list[Event] = []

        def failing(real: Collectives) -> Collectives:
            nonlocal collectives
            collectives = FailingCollectives(group, real)
            return collectives

        training = start_ours(row.run, rank, group, row.config, failing, events.append)
        try:
            for step in range(3):
                if (rank, step) == (culprit, point.step):
                    collectives.fail_at(point.number, point.names, on_the_wire=on_the_wire)
                training.step(step)
            training.model.finish_param_gather()
        finally:
            if rank == culprit:
                has_failed.append(collectives.has_failed)
            assert_nothing_half_done(row, training, events)

    before = set(threading.enumerate())
    start = time.monotonic()
    # a worker in a collective with ranks that wait for others ends with them
    with mock.patch.object(Worker, "CLOSE_TIMEOUT_S", 0.5):
        outcomes = try_ranks(row.num_ranks, train, timeout_s=60)
    assert time.monotonic() - start < 30
    assert has_failed == [True]
    for rank, outcome in enumerate(outcomes):
        expected = OutOfLuckError if rank == culprit and not on_the_wire else CollectiveError
        assert isinstance(outcome, expected), f"rank {rank}: {outcome!r}\n{getattr(outcome, '__notes__', '')}"
    assert_threads_end(before)


def assert_nothing_half_done(row: Row, training: Training, events: list[Event]) -> None:
    """On a rank that caught the error: what was waited for is said to have ended, the weights are those of the last
    whole step unless the engine says that they were changing, and a closed model is a plain one."""
    model, module, optimizer = training.model, training.module, training.optimizer
    waits = [(event.kind, event.index) for event in events if event.kind in (EventKind.WAIT_START, EventKind.WAIT_END)]
    starts, ends = waits[::2], waits[1::2]
    assert [(EventKind.WAIT_END, index) for _, index in starts] == ends, "each wait ends before the next"
    with contextlib.suppress(CollectiveError):
        model.finish_param_gather()  # its failure is reported once
    assert all(type(param) is torch.nn.Parameter for param in module.parameters()), "no read waits for them any more"
    begun, done = optimizer.num_steps
    assert begun - done in (0, 1)
    if begun == done:
        expected = weights_after(row, done)
        for name, value in parameters(training).items():
            assert torch.equal(value, expected[name]), f"{name} after {done} steps"
    calls = model.engine.collectives.calls
    num_calls = len(calls)
    model.close()
    assert all(param.grad is None for param in module.parameters())
    module(*training.run.arguments(training.rank, 0, 0)).backward()
    assert any(param.grad is not None for param in module.parameters())
    assert len(calls) == num_calls, "a plain module sends nothing"


def assert_threads_end(before: set[threading.Thread]) -> None:
    """The engine's threads that were started since; they may be ending."""
    deadline = time.monotonic() + 10.0
    while left := [t for t in set(threading.enumerate()) - before if t.name.startswith("megastrategy")]:
        assert time.monotonic() < deadline, f"{left} are left behind"
        time.sleep(0.01)


@pytest.mark.parametrize("row", [ROWS[0], ROWS[3], ROWS[8], ROWS[9]], ids=str)
def test_user_repeats_a_failed_step(row: Row) -> None:
    """A collective that all ranks failed to start, in backward or at its end, does not change the result of the step.

    The step is tried again from its first microbatch, without zeroing gradients, and has torch DDP's bits: nothing that
    was on the wire or half summed is left in it."""
    failures = {1: FIRST_REDUCTION, 2: LATER_REDUCTION, 4: AGREEMENT}

    def train(rank: int, group: ProcessGroup) -> Outcome:
        collectives: FailingCollectives

        def failing(real: Collectives) -> Collectives:
            nonlocal collectives
            collectives = FailingCollectives(group, real)
            return collectives

        training = start_ours(row.run, rank, group, row.config, failing)
        for step in range(row.run.steps):
            buffers = [buffer.clone() for buffer in training.module.buffers()]
            point = failures.get(step)
            if point is not None and point.is_in(row):
                plan = training.model.layout
                num_pieces = sum(len(plan.pieces(bucket)) for bucket in plan.buckets)
                collectives.fail_at(
                    num_pieces if point is LATER_REDUCTION else 1, point.names
                )  # the last of a backward
                with pytest.raises(OutOfLuckError):
                    training.step(step)
                assert training.optimizer.num_steps == (step, step)
                for buffer, value in zip(training.module.buffers(), buffers, strict=True):
                    buffer.copy_(value)  # what forwards have seen is theirs
                training.step(step, zero_grad=False)
            else:
                training.step(step)
        return training.finish()

    assert_torch_ddps(row, run_ranks(row.num_ranks, train))
