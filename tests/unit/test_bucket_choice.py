"""The choice of a bucket size is arithmetic on what was measured, so it is checked against schedules written out."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megastrategy.core.config import DistributedDataParallelConfig
from megastrategy.core.layout import BufferLayout, ParamSpec, build_layout, contiguous_stride
from megastrategy.core.rebucketing.size_choice import (
    MIN_BUCKET_NUMEL,
    BackwardTimes,
    Link,
    choose_bucket_size,
    exposed_s,
    fit_link,
    gather_s,
)

FP32 = (torch.float32, torch.float32)
NUMEL = 2**15
"""Of each parameter of the models here: no padding anywhere."""


def layout_of(num_params: int, bucket_size: int, dp_size: int = 2) -> BufferLayout:
    specs = [ParamSpec(f"p{i}", (NUMEL,), contiguous_stride((NUMEL,)), *FP32) for i in range(num_params)]
    return build_layout(specs, DistributedDataParallelConfig(bucket_size=bucket_size), dp_size)


def evenly(num_params: int, apart_s: float, total_s: float) -> BackwardTimes:
    """Gradients that arrive in the reverse order of registration, one after the other."""
    return BackwardTimes({index: apart_s * (num_params - index) for index in range(num_params)}, total_s)


@given(st.floats(0.0, 1.0), st.floats(1e-12, 1e-6))
@settings(deadline=None)
def test_a_link_that_is_linear_is_found(latency_s: float, seconds_per_byte: float) -> None:
    link = Link(latency_s, seconds_per_byte)
    found = fit_link([(num_bytes, link.time_s(num_bytes)) for num_bytes in (2**12, 2**14, 2**16, 2**18, 2**22)])
    for num_bytes in (2**12, 2**22):
        assert found.time_s(num_bytes) == pytest.approx(link.time_s(num_bytes), rel=1e-6)


@given(st.lists(st.floats(1e-6, 1.0), min_size=1, max_size=6))
@settings(deadline=None)
def test_no_noise_makes_time_negative(seconds: list[float]) -> None:
    link = fit_link([(2 ** (12 + 2 * place), taken) for place, taken in enumerate(seconds)])
    assert link.latency_s >= 0.0
    assert link.seconds_per_byte >= 0.0


def test_no_other_link_is_nearer_to_samples_with_noise() -> None:
    samples = [(2**12, 1.3e-4), (2**14, 1.6e-4), (2**16, 4.1e-4), (2**18, 8.2e-4), (2**20, 4.4e-3)]

    def error(link: Link) -> float:
        return sum((link.time_s(num_bytes) / seconds - 1.0) ** 2 for num_bytes, seconds in samples)

    found = fit_link(samples)
    assert found.latency_s > 0.0
    assert found.seconds_per_byte > 0.0
    for latency in (0.99, 1.0, 1.01):
        for rate in (0.99, 1.0, 1.01):
            assert error(found) <= error(Link(found.latency_s * latency, found.seconds_per_byte * rate))


def test_reductions_run_one_after_the_other_and_never_before_their_gradients() -> None:
    """Four buckets of a parameter each, gradients at 1, 2, 3, 4 s, the end at 5 s.

    At 0.5 s a reduction the last runs from 4.0 to 4.5 s; at 2 s they run from 1 to 9 s; at 1.5 s from 1 to 7 s.
    """
    layout, times = layout_of(4, NUMEL), evenly(4, 1.0, 5.0)
    assert len(layout.buckets) == 4
    assert exposed_s(layout, times, Link(0.5, 0.0)) == 0.0
    assert exposed_s(layout, times, Link(2.0, 0.0)) == pytest.approx(4.0)
    assert exposed_s(layout, times, Link(0.5, 1.0 / (4 * NUMEL))) == pytest.approx(2.0)


def test_a_bucket_waits_for_those_before_it() -> None:
    """The gradient that the first bucket needs comes last: nothing is sent before 9 s."""
    layout = layout_of(3, NUMEL)
    times = BackwardTimes({0: 1.0, 1: 2.0, 2: 9.0}, 9.0)
    assert layout.buckets[0].params == (2,)
    assert exposed_s(layout, times, Link(1.0, 0.0)) == pytest.approx(3.0)


def test_a_bucket_whose_gradient_never_came_is_sent_at_the_end() -> None:
    layout = layout_of(3, NUMEL)
    assert exposed_s(layout, BackwardTimes({0: 3.0, 1: 2.0}, 4.0), Link(1.0, 0.0)) == pytest.approx(3.0)
    assert exposed_s(layout, BackwardTimes({1: 2.0, 2: 1.0}, 4.0), Link(1.0, 0.0)) == pytest.approx(1.0)


def test_gathers_keep_a_step_waiting_for_all_buckets_or_for_the_first_forward_needs() -> None:
    layout, link = layout_of(3, NUMEL), Link(0.25, 1.0 / (4 * NUMEL))
    assert gather_s(layout, link, hidden=False) == pytest.approx(3 * 1.25)
    assert gather_s(layout, link, hidden=True) == pytest.approx(1.25)


@pytest.mark.parametrize(
    ("latency_s", "seconds_per_byte", "expected"),
    [
        (0.0, 1e-8, NUMEL),  # bytes alone count: the last bucket shall be small (no bucket is smaller than a parameter)
        (10.0, 0.0, 16 * NUMEL),  # latency alone counts: one bucket
        (0.0, 0.0, 16 * NUMEL),  # nothing counts: as few collectives as can be
    ],
)
def test_latency_makes_buckets_large_and_bytes_make_them_small(
    latency_s: float, seconds_per_byte: float, expected: int
) -> None:
    choice = choose_bucket_size(
        lambda size: layout_of(16, size),
        [],
        evenly(16, 0.01, 0.161),
        Link(latency_s, seconds_per_byte),
        None,
        gather_hidden=False,
    )
    assert choice.layout.buckets == layout_of(16, expected).buckets
    assert choice.exposed_s[choice.bucket_size] == min(choice.exposed_s.values())


def test_processor_time_is_paid_for_each_bucket_hidden_or_not() -> None:
    """All reductions but the last are hidden, 4 ms a parameter. At 1 ms a bucket sixteen cost 4 + 16 ms, eight 8 + 8,
    four 16 + 4; at 20 ms four cost 16 + 80, two 32 + 40, one 64 + 20."""
    rate = 4e-3 / (4 * NUMEL)

    def choose(cpu_s: float) -> int:
        choice = choose_bucket_size(
            lambda size: layout_of(16, size),
            [],
            evenly(16, 0.02, 0.32),
            Link(0.0, rate, cpu_s),
            None,
            gather_hidden=False,
        )
        return len(choice.layout.buckets)

    assert choose(0.0) == 16
    assert choose(1e-3) == 8
    assert choose(20e-3) == 2
    assert choose(1.0) == 1


@given(st.floats(0.0, 0.1), st.floats(0.0, 1e-6), st.booleans(), st.booleans())
@settings(deadline=None, max_examples=50)
def test_no_size_that_was_considered_is_clearly_better(
    latency_s: float, seconds_per_byte: float, gathers: bool, hidden: bool
) -> None:
    link = Link(latency_s, seconds_per_byte)
    choice = choose_bucket_size(
        lambda size: layout_of(8, size),
        [3 * NUMEL],
        evenly(8, 0.01, 0.08),
        link,
        link if gathers else None,
        gather_hidden=hidden,
    )
    assert {MIN_BUCKET_NUMEL, 3 * NUMEL, 8 * NUMEL} <= set(choice.exposed_s)
    assert choice.exposed_s[choice.bucket_size] * 0.98 <= min(choice.exposed_s.values())
    assert choice.layout.buckets == layout_of(8, choice.bucket_size).buckets
