"""Ranks agree between their hosts: in a steady step nothing waits for the device, and a peer that is gone is noticed in
bounded time. A double represents the device."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megastrategy import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer, GradScaler
from megastrategy.core.errors import CollectiveError, MicrobatchMismatchError, NonFiniteGradError
from tests.support.budgets import work_as_on_an_accelerator
from tests.support.devices import DeviceCollectives
from tests.support.doubles import REDUCTIONS, RecordingCollectives
from tests.support.engines import engines
from tests.support.models import two_layers
from tests.support.ranks import run_ranks, try_ranks

MODES = engines("reduce-scatter", "all-reduce", "pooled", "forward")
CPU = torch.device("cpu")
BOUND_S = 30.0  # a second or two on an idle machine


def wrap(
    group: ProcessGroup, collectives: RecordingCollectives | None, **options: Any
) -> tuple[DistributedDataParallel, DistributedOptimizer]:
    config = DistributedDataParallelConfig(**{"bucket_size": 100, **options})
    model = DistributedDataParallel(two_layers(), config, group, collectives=collectives)
    return model, DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2), model)


def backward(model: DistributedDataParallel, rank: int, step: int) -> None:
    generator = torch.Generator().manual_seed(10 * step + rank)
    model(torch.randn(4, 10, generator=generator)).square().mean().backward()


def step_once(optimizer: DistributedOptimizer) -> None:
    optimizer.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize(("mode", "size"), [("reduce-scatter", 2), ("all-reduce", 3), ("pooled", 2), ("forward", 2)])
def test_backward_ends_with_one_host_exchange(mode: str, size: int) -> None:
    """And with the same bits as where the device is the host."""

    def where_the_host_sends(rank: int, group: ProcessGroup) -> list[Tensor]:
        model, optimizer = wrap(group, None, **MODES[mode])
        for step in range(4):
            backward(model, rank, step)
            step_once(optimizer)
        return [param.detach().clone() for param in model.parameters()]

    def on_a_device(rank: int, group: ProcessGroup) -> list[Tensor]:
        device = DeviceCollectives(group)
        model, optimizer = wrap(group, device, **MODES[mode])
        for step in range(4):
            before = device.hosts.progress.num_started
            device.calls.clear()
            backward(model, rank, step)
            # The first backward may move everything to other buckets.
            assert step == 0 or {call.name for call in device.calls} <= set(REDUCTIONS)
            step_once(optimizer)
            assert step == 0 or device.hosts.progress.num_started == before + 1
            assert device.hosts.progress.last_started == "all-reduce"
            assert not device.named("all_reduce_max"), "the ranks agree on their hosts"
        assert device.num_waits == 0, "the host never waits for the device"
        model.close()
        return [param.detach().clone() for param in model.parameters()]

    for expected, weights in zip(run_ranks(size, where_the_host_sends), run_ranks(size, on_a_device), strict=True):
        assert all(torch.equal(*pair) for pair in zip(expected, weights, strict=True))


def test_errors_are_gathered_between_hosts() -> None:
    def run(rank: int, group: ProcessGroup) -> None:
        device = DeviceCollectives(group)
        model, _ = wrap(group, device, check_for_nan_in_grad=True)
        backward(model, rank, 0)
        device.calls.clear()
        model.microbatch = rank
        with pytest.raises(MicrobatchMismatchError, match="rank 0 is at number 0, rank 1 is at number 1"):
            backward(model, rank, 1)
        model.microbatch = 0
        with pytest.raises(NonFiniteGradError, match=r"rank 1, parameter '2\.bias'"):
            (model(torch.ones(2, 10)) * (math.nan if rank == 1 else 1.0)).sum().backward()
        assert {call.name for call in device.calls} <= set(REDUCTIONS)
        assert device.num_waits == device.num_aborts == 0

    run_ranks(2, run)


def test_rank_with_failed_peer_gives_up() -> None:
    """Its peer lives, so that no connection breaks; the watchdog knows. The device is not asked, and aborted."""
    failed, given_up = threading.Event(), threading.Event()

    def run(rank: int, group: ProcessGroup) -> None:
        device = DeviceCollectives(group)
        model, _ = wrap(group, device)
        backward(model, rank, 0)
        if rank == 1:
            failed.set()
            assert given_up.wait(BOUND_S)
            device.is_stalled = True
            backward(model, rank, 1)  # which ends the thread that the other left in gloo
            return
        device.hosts.watchdog = lambda what, number: "rank 1: ValueError: bad" if failed.is_set() else ""
        device.is_stalled = True
        began = time.monotonic()
        with pytest.raises(CollectiveError, match="rank 0 of 2: all-reduce was given up: rank 1: ValueError: bad"):
            backward(model, rank, 1)
        given_up.set()
        assert time.monotonic() - began < BOUND_S
        assert (device.num_aborts, device.num_waits) == (1, 0)

    run_ranks(2, run)


def scaled_step(optimizer: DistributedOptimizer) -> None:
    scaler = GradScaler("cpu", init_scale=1.0)
    scaler.scale(torch.ones(1))  # makes its scale
    scaler.step(optimizer)


@pytest.mark.parametrize("how", ["close", "save over others"])
def test_failed_backward_aborts_device_collectives(how: str) -> None:
    """And nothing is, where the last backward has ended."""

    def run(rank: int, group: ProcessGroup) -> None:
        device = DeviceCollectives(group)
        model, _ = wrap(group, device)
        backward(model, rank, 0)
        assert device.num_aborts == 0

        def fail(_: Tensor) -> None:
            raise ValueError("bad")

        hook = model.module[0].weight.register_hook(fail)  # the last gradient: buckets before it are on the wire
        with pytest.raises(ValueError, match="bad"):
            backward(model, rank, 1)
        hook.remove()
        assert device.num_aborts == 0
        if how == "close":
            model.close()
        else:
            model.engine.use_for_checkpoints(device)
        assert device.num_aborts == 1

    run_ranks(2, run)


READS: dict[str, Callable[[DistributedOptimizer], object]] = {
    "a checkpoint": lambda optimizer: optimizer.state_dict(),
    "its parts": lambda optimizer: optimizer.sharded_state_dict(),
    "error_if_nonfinite": lambda optimizer: optimizer.clip_grad_norm_(1.0, error_if_nonfinite=True),
    "a scaler": scaled_step,
}


@pytest.mark.parametrize("read", READS)
def test_host_reads_wait_once_in_bounded_time(read: str) -> None:
    """Without a fault it waits; then the device stalls, as NCCL does where a peer is gone: no call fails, and nothing
    comes. The watchdog is called, and its reason is in the error."""

    def run(rank: int, group: ProcessGroup) -> None:
        device = DeviceCollectives(group)
        model, optimizer = wrap(group, device)
        backward(model, rank, 2)
        step_once(optimizer)  # so that there is a state to save
        for step in range(2):
            if step == 1:
                device.watchdog = lambda what, number: f"rank 1: ValueError: bad ({what}, {number > 0})"
            backward(model, rank, step)
            device.num_waits = 0
            device.is_stalled = step == 1
            began = time.monotonic()
            if step == 0:
                READS[read](optimizer)
            else:
                before = [param.detach().clone() for param in model.parameters()]
                with pytest.raises(CollectiveError, match=f"rank {rank} of 2: .* given up: rank 1: ValueError: bad"):
                    READS[read](optimizer)
                assert device.num_aborts == 1
                assert all(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True)), "no step"
            assert device.num_waits > 0
            assert time.monotonic() - began < BOUND_S

    run_ranks(2, run)


@pytest.mark.parametrize("mode", ["forward", "pooled"])
def test_a_look_for_nan_waits_in_bounded_time(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its findings are read at the end of a backward, behind weights or sums that other ranks send."""
    work_as_on_an_accelerator(monkeypatch)

    def run(rank: int, group: ProcessGroup) -> None:
        device = DeviceCollectives(group)
        model, _ = wrap(group, device, check_for_nan_in_grad=True, **MODES[mode])
        backward(model, rank, 0)
        assert (device.num_aborts, device.num_waits) == (0, 1)
        gives_up(device, "check_for_nan_in_grad was given up", lambda: backward(model, rank, 1))

    run_ranks(2, run)


def gives_up(device: DeviceCollectives, said: str, read: Callable[[], object]) -> None:
    """The read waits once for the device, which is stalled, until the watchdog knows of a failure."""
    device.watchdog = lambda what, number: f"rank 1: ValueError: bad ({what})"
    device.is_stalled = True
    num_waits, began = device.num_waits, time.monotonic()
    with pytest.raises(CollectiveError, match=f"{said}: rank 1: ValueError: bad"):
        read()
    assert time.monotonic() - began < BOUND_S
    assert (device.num_aborts, device.num_waits) == (1, num_waits + 1)


READS_BETWEEN_STEPS: dict[str, Callable[[DistributedDataParallel], object]] = {
    "count_tokens": lambda model: model.count_tokens(torch.tensor(3)),
    "check_replicas": lambda model: model.check_replicas(),
}


@pytest.mark.parametrize("name", READS_BETWEEN_STEPS)
def test_reads_between_steps_wait_in_bounded_time(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    work_as_on_an_accelerator(monkeypatch)

    def run(rank: int, group: ProcessGroup) -> None:
        device = DeviceCollectives(group)
        model, optimizer = wrap(group, device)
        backward(model, rank, 0)
        step_once(optimizer)
        gives_up(device, "was given up", lambda: READS_BETWEEN_STEPS[name](model))

    run_ranks(2, run)


def test_timeout_ends_wait_without_watchdog() -> None:
    def run(rank: int, group: ProcessGroup) -> None:
        device = DeviceCollectives(group)
        device.is_stalled = True
        if rank == 0:
            with pytest.raises(CollectiveError, match="the device has not done it within 2 s, the group's timeout"):
                device.wait_for_device(CPU, "all-gather")
            assert device.num_aborts == 1

    run_ranks(2, run, timeout_s=2.0)


def test_ended_peer_ends_wait_without_watchdog() -> None:
    began = time.monotonic()

    def run(rank: int, group: ProcessGroup) -> None:
        device = DeviceCollectives(group)
        assert device.max_of_bytes([rank, 7]) == [1, 7]  # all are connected
        if rank == 1:
            raise ValueError("bad")
        device.is_stalled = True
        device.wait_for_device(CPU, "all-gather")

    waited, _ = try_ranks(2, run, timeout_s=600.0)
    assert isinstance(waited, CollectiveError)
    assert "all-gather did not complete" in str(waited)
    assert time.monotonic() - began < 4 * BOUND_S
