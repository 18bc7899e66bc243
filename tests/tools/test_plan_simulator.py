"""The simulated step: schedules worked out by hand, its floors, and what may only make it shorter."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
import torch

from megastrategy import DistributedDataParallelConfig
from megastrategy.core.layout.layout import ParamSpec
from megastrategy.tools.plan.simulator import Compute, Launch, Link, Phase, Processor, Wait, simulate
from megastrategy.tools.plan.steps import Network, Work, advice, settings, simulate_step

LINK = Link(bytes_per_ms=10.0, hop_ms=1.0)


def launch(key: str, nbytes: float, hops: int = 1, link: Link = LINK) -> Launch:
    return Launch(key, (Phase(link, hops, nbytes),))


# --- by hand ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("step", "processor", "step_ms", "gradients_ms", "parameters_ms"),
    [
        # 5 ms; the collective's 1 + 2 of them are hidden.
        ([Launch("a", (Phase(LINK, 1, 20),)), Compute(5), Wait(("a",), "gradients")], Processor(), 5, 0, 0),
        # Nothing hides 3 ms.
        ([Compute(5), launch("a", 20), Wait(("a",), "gradients")], Processor(), 8, 3, 0),
        # The second waits for the first: 3 + 3 from 1 ms on, and 4 ms of work beside it.
        (
            [Compute(1), launch("a", 20), launch("b", 20), Compute(4), Wait(("a", "b"), "gradients")],
            Processor(), 7, 2, 0,
        ),
        # 10 bytes a millisecond take 0.4 of the only core: the program goes at 0.6 for 2 ms, and has 2.8 left.
        (
            [launch("a", 20, hops=0), Compute(4), Wait(("a",), "gradients")],
            Processor(cores=1, ms_per_byte=0.04), 4.8, 0, 0,
        ),
        # They would take 0.8 of it and get a half: 6.25 bytes a millisecond for 8 ms, the program the other half.
        (
            [launch("a", 50, hops=0), Compute(4), Wait(("a",), "gradients")],
            Processor(cores=1, ms_per_byte=0.08), 8, 0, 0,
        ),
        # Two ranks share a core. Alone the sender has all of the rank's half: 0.5 / 0.1 = 5 bytes a millisecond.
        ([Compute(2), launch("a", 20, hops=0), Wait(("a",), "parameters")], Processor(0.5, 0.1), 8, 0, 4),
        # Two phases one after the other, on two links.
        (
            [Launch("a", (Phase(LINK, 2, 10), Phase(Link(1.0, 0.5), 2, 3))), Wait(("a",), "gradients")],
            Processor(), 7, 7, 0,
        ),
        # What is waited for in the next step: 13 ms on the wire from 4 on, which ends in the next one's 8th.
        ([Compute(1), Wait(("a",), "parameters"), Compute(3), launch("a", 120)], Processor(), 16, 0, 12),
        ([Compute(0), Wait(("never launched",), "gradients"), Compute(3)], Processor(), 3, 0, 0),
    ],
)  # fmt: skip
def test_small_schedules_are_what_they_are_by_hand(
    step: list[Any], processor: Processor, step_ms: float, gradients_ms: float, parameters_ms: float
) -> None:
    found = simulate(step, processor)
    assert (found.step_ms, found.exposed_gradients_ms, found.exposed_parameters_ms) == pytest.approx(
        (step_ms, gradients_ms, parameters_ms)
    )


# --- the engine's schedule -------------------------------------------------------------------------------------------


def work_of(numels: list[int], *, num_microbatches: int = 1, **other: float) -> Work:
    """Parameters of these sizes, registered in this order, whose gradients come in the reverse of it, evenly."""
    specs = tuple(ParamSpec(str(n), (size,), (1,), torch.float32, torch.float32) for n, size in enumerate(numels))
    ready = {index: (len(numels) - index) / len(numels) for index in range(len(numels))}
    times = {"forward_ms": 10.0, "loss_ms": 1.0, "backward_ms": 20.0, "before_step_ms": 2.0, "other_ms": 3.0}
    times |= {"step_ms_per_numel": 0.0, "step_ms_per_bucket": 0.0} | other
    return Work(specs, ready, num_microbatches, **times)


FAST, SLOW = Network(Link(1e12)), Network(Link(1000.0, 0.5))
CONFIG = DistributedDataParallelConfig(bucket_size=1024, find_unused_parameters=False)


@pytest.mark.parametrize("dp_size", [1, 2, 8])
@pytest.mark.parametrize("num_microbatches", [1, 4])
def test_a_step_without_a_wire_is_its_work(dp_size: int, num_microbatches: int) -> None:
    """On d ranks the optimizer steps a d-th of 8 KiB elements."""
    work = work_of([1024] * 8, num_microbatches=num_microbatches, step_ms_per_numel=1e-3)
    network = FAST if dp_size > 1 else SLOW
    step = simulate_step(work, CONFIG, dp_size, network, Processor())
    assert step.step_ms == pytest.approx(num_microbatches * 31 + 5 + 8192e-3 / dp_size)
    assert step.exposed_ms == pytest.approx(0.0, abs=1e-6)


def test_only_the_last_bucket_and_the_gathers_show_where_the_rest_is_hidden() -> None:
    """Two ranks, eight buckets of 4 KiB: each is 2.048 + 0.5 ms on the wire, as long as the backward needs for one, but
    for 0.048. A gather waits for all of its bucket's step, of 3 ms."""
    work = work_of([1024] * 8, step_ms_per_bucket=3.0)
    step = simulate_step(work, CONFIG, 2, SLOW, Processor())
    on_wire = 4096 / 2 / 1000 + 0.5
    assert step.exposed_gradients_ms == pytest.approx(2.5 + 8 * on_wire - 20.0)
    assert step.exposed_parameters_ms == pytest.approx(on_wire), "seven of eight under the next one's step"
    assert step.step_ms == pytest.approx(31 + 5 + 24 + step.exposed_ms)
    assert step.sent_bytes == 2 * 8 * 4096 / 2


def test_gathers_under_the_forward_are_waited_for_where_it_reads() -> None:
    """The first layers' weights come first: with nothing of a step between, the forward waits for the first bucket
    alone, and then for what the wire is slower by."""
    config = dataclasses.replace(CONFIG, overlap_param_gather="forward")
    work = work_of([1024] * 8, other_ms=0.0)
    step = simulate_step(work, config, 2, SLOW, Processor())
    on_wire = 4096 / 2 / 1000 + 0.5
    # Seven eighths of the forward run before the last is read.
    assert step.exposed_parameters_ms == pytest.approx(8 * on_wire - 7 / 8 * 10.0)
    assert step.step_ms < simulate_step(work, CONFIG, 2, SLOW, Processor()).step_ms


@pytest.mark.parametrize(
    ("options", "dp_size", "sent"),
    [
        ({}, 4, 8 * 3 / 4),
        ({"use_distributed_optimizer": False}, 4, 8 * 3 / 4),
        ({"num_distributed_optimizer_instances": 2}, 8, 8 * 3 / 4 + 2 * 4 / 4 / 2),
        ({"grad_wire_dtype": "bf16"}, 4, 6 * 3 / 4),
        ({"grad_buffer": "pooled"}, 4, 4 * 3 / 4 * 3 + 4 * 3 / 4),
    ],
    ids=str,
)
def test_bytes_are_those_of_the_rings(options: dict[str, Any], dp_size: int, sent: float) -> None:
    """A parameter, in fp32; pooled gradients are sent with each of three microbatches."""
    config = dataclasses.replace(CONFIG, **options)
    step = simulate_step(work_of([1024] * 8, num_microbatches=3), config, dp_size, SLOW, Processor())
    assert step.sent_bytes == pytest.approx(sent * 8192)


def test_instances_send_the_shards_over_the_link_between_them() -> None:
    config = dataclasses.replace(CONFIG, num_distributed_optimizer_instances=2, overlap_grad_reduce=False)
    between = Link(100.0, 2.0)
    network = dataclasses.replace(SLOW, between_instances=between)
    step = simulate_step(work_of([8192]), config, 8, network, Processor())
    inside = 3 * 0.5 + 4 * 8192 * 3 / 4 / 1000
    across = 2 * 2.0 + 2 * (4 * 8192 / 4) / 2 / 100
    assert step.exposed_gradients_ms == pytest.approx(inside + across)
    assert step.exposed_parameters_ms == pytest.approx(inside)


# --- properties ------------------------------------------------------------------------------------------------------


def drawn(seed: int) -> tuple[Work, DistributedDataParallelConfig, int, Network, Processor]:
    draw = random.Random(seed)
    numels = [draw.randint(1, 200_000) for _ in range(draw.randint(1, 30))]
    times = {name: draw.uniform(0, 30) for name in ("forward_ms", "loss_ms", "backward_ms", "other_ms")}
    work = work_of(numels, num_microbatches=draw.choice([1, 2, 4]), step_ms_per_numel=draw.uniform(0, 1e-5), **times)
    late = {index: draw.random() for index in work.ready}
    work = dataclasses.replace(work, ready=late if draw.random() < 0.5 else work.ready)
    config = DistributedDataParallelConfig(
        bucket_size=draw.choice([None, 2**15, 2**18]),
        overlap_param_gather=draw.choice([False, "step", "forward"]),
        overlap_grad_reduce=draw.random() < 0.8,
        use_distributed_optimizer=draw.random() < 0.8,
    )
    processor = Processor(draw.choice([0.5, 1.0, 2.0]), draw.choice([0.0, 1e-6]))
    return (
        work,
        config,
        draw.choice([2, 3, 4, 16]),
        Network(Link(draw.uniform(1e3, 1e6), draw.uniform(0, 1))),
        processor,
    )


@pytest.mark.parametrize("seed", range(60))
def test_a_step_is_never_below_its_floors_nor_above_their_sum(seed: int) -> None:
    work, config, dp_size, network, processor = drawn(seed)
    step = simulate_step(work, config, dp_size, network, processor)
    own_share = min(1.0, processor.cores)
    sending = step.sent_bytes * processor.ms_per_byte
    close = 1 + 1e-9
    assert step.step_ms * close >= step.compute_ms / own_share
    assert step.step_ms * close >= step.wire_ms
    assert step.step_ms * close >= (step.compute_ms + sending) / processor.cores
    # Everything one after the other.
    assert step.step_ms <= (step.compute_ms / own_share + step.wire_ms + sending / processor.cores) * close
    # With the program the only one to wait, time is work, waiting, or being held up.
    assert step.step_ms == pytest.approx(step.compute_ms + step.exposed_ms + step.slowed_ms)


@pytest.mark.parametrize("seed", range(60))
def test_a_faster_link_and_more_cores_never_make_it_longer(seed: int) -> None:
    work, config, dp_size, network, processor = drawn(seed)

    def step_ms(network: Network, processor: Processor) -> float:
        return simulate_step(work, config, dp_size, network, processor).step_ms

    link = network.link
    links = [dataclasses.replace(link, bytes_per_ms=link.bytes_per_ms * factor) for factor in (1, 1.5, 4, 100)]
    by_link = [step_ms(Network(each), dataclasses.replace(processor, ms_per_byte=0.0)) for each in links]
    assert by_link == sorted(by_link, reverse=True)
    without_hops = step_ms(Network(dataclasses.replace(link, hop_ms=0.0)), processor)
    assert without_hops <= step_ms(network, processor) * (1 + 1e-9)
    more = step_ms(network, dataclasses.replace(processor, cores=processor.cores * 2))
    assert more <= step_ms(network, processor) * (1 + 1e-9)


# --- the best options ------------------------------------------------------------------------------------------------


def test_the_best_options_are_the_fastest_of_all_and_the_fewest_that_matter() -> None:
    work = work_of([100_000] * 40)
    config = DistributedDataParallelConfig(bucket_size=4_000_000, find_unused_parameters=False)
    slow = Network(Link(1e6, 0.1))
    found = settings(work, config, 2, slow, Processor())
    assert found[0].step.step_ms == min(setting.step.step_ms for setting in found)
    assert advice(found, config).startswith("write down bucket_size=")
    alone = settings(work, DistributedDataParallelConfig(), 2, Network(Link(1e12)), Processor())
    assert advice(alone, DistributedDataParallelConfig()).startswith("leave the options as they are")
    whole = DistributedDataParallelConfig(use_distributed_optimizer=False)
    assert {s.overlap_param_gather for s in settings(work, whole, 2, slow, Processor())} == {"step"}
