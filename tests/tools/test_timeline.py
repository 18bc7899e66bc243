"""The timeline: spans, steps, and exposed communication, as they are made of events."""

from __future__ import annotations

import pytest

from megastrategy.core import Event
from megastrategy.tools.timeline import Lane, ModelEvents, average, bucket_times, spans_of, steps_of

from .timeline_events import (
    BACKWARD,
    FORWARD,
    GATHER,
    MS,
    STEP,
    WAIT,
    at,
    collective,
    in_ms,
    in_order,
    one_step,
    span,
)

# --- spans -----------------------------------------------------------------------------------------------------------


def test_each_lane_has_its_spans_and_collectives_are_shown_when_they_ran() -> None:
    by_lane = {lane: in_ms(span for span in spans_of(one_step()) if span.lane is lane) for lane in Lane}
    assert by_lane[Lane.COMPUTE] == [("forward", 0, 20), ("backward", 22, 62), ("step", 63, 84)]
    assert by_lane[Lane.WAITING] == [("wait for gradients", 52.5, 61.5), ("wait for parameters", 86, 100)]
    assert by_lane[Lane.COMMUNICATION] == [
        ("reduce bucket 0", 30, 45),
        ("reduce bucket 1", 45, 60),
        ("gather bucket 1", 85, 92),
        ("gather bucket 0", 92, 99),
    ]


# --- steps and exposed communication ---------------------------------------------------------------------------------


def test_a_step_lasts_until_the_parameters_are_there_and_waiting_in_it_is_exposed() -> None:
    [step] = steps_of(one_step())
    assert (step.step_ms, step.exposed_ms) == (100.0, 23.0)
    mean = average([step])
    assert (mean.exposed_gradients_ms, mean.exposed_parameters_ms, mean.exposed_share) == (9.0, 14.0, 0.23)


def test_accumulated_microbatches_belong_to_the_step_that_uses_them() -> None:
    silent = in_order(span(FORWARD, 0, 20, 1), span(BACKWARD, 22, 50))
    [step] = steps_of([*silent, *one_step(after=60)])
    assert (step.step_ms, average([step]).exposed_share) == (160.0, 23 / 160)


def test_parameters_that_the_next_forward_waits_for_count_in_the_step_of_that_forward() -> None:
    """``overlap_param_gather=True``."""
    lazy = in_order(
        [at(0, "forward_start", 1), at(12, "forward_end", 1)],
        span(WAIT, 3, 10, 1),
        collective(GATHER, 0, -11, (-11, 9), 10),
        span(BACKWARD, 12, 30),
        span(STEP, 30, 40),
    )
    shifted = [Event(e.kind, e.index, e.time_ns + 50 * MS) for e in lazy]  # its gather starts in this step
    first, second = steps_of(sorted([*lazy, *shifted], key=lambda event: event.time_ns))
    assert (first.step_ms, first.exposed_parameters_ns, second.exposed_parameters_ns) == (40.0, 7 * MS, 7 * MS)


def test_a_plain_optimizer_tells_nothing_so_its_steps_end_with_a_synchronised_backward() -> None:
    def microbatch(after: float, synchronised: int) -> list[Event]:
        backward = [at(12, "backward_start"), at(30, "backward_end", synchronised)]
        return in_order(span(FORWARD, 0, 10, 1), backward, span(WAIT, 25, 29, 0), after=after)

    events = [*microbatch(0, 0), *microbatch(40, 1), *microbatch(100, 0), *microbatch(150, 1)]
    assert [step.step_ms for step in ModelEvents(events, has_optimizer=False).steps] == [70.0, 80.0]
    assert ModelEvents(events).steps == []


def test_a_bucket_is_hidden_where_its_rank_did_not_wait() -> None:
    times = bucket_times(ModelEvents([*one_step(), *one_step(after=200)], (4096, 8192), (1024, 2048)))
    assert [(t.what, t.bucket, t.count, t.nbytes) for t in times] == [
        ("reduce", 0, 2, 4096),
        ("reduce", 1, 2, 8192),
        ("gather", 0, 2, 1024),
        ("gather", 1, 2, 2048),
    ]
    assert [(t.ran_ms, t.launch_to_done_ms) for t in times] == [(15, 15), (15, 20), (7, 13.5), (7, 7)]
    # of 15 ms the last 7.5 are waited for; of the gather's 7 the first is not
    assert [t.hidden_share for t in times] == pytest.approx([1.0, 0.5, 0.0, 1 / 7])
