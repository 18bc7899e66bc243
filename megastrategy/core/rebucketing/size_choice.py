"""Chooses the bucket size that leaves the least communication exposed, by what was measured of link and backward.

A collective of b bytes is taken to last ``latency + b / bandwidth`` (the alpha-beta model), collectives to run one
after the other, and a bucket's reduction to start when its last gradient has arrived and all buckets before it were
launched. Small buckets pay the latency more often, large ones start late: the last bucket is never hidden. Each
collective also costs processor time, hidden or not, which is counted as if it were taken from training. What the model
leaves out is that a link is shared.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from ..layout import BufferLayout

MIN_BUCKET_NUMEL = 2**14
"""Below this a collective is latency alone on every link there is."""
WORTH_IT = 0.98
"""A smaller bucket than the largest good one must leave this much less exposed."""


@dataclasses.dataclass(frozen=True)
class Link:
    """The time that a collective takes, ``latency_s + num_bytes * seconds_per_byte``, and the processor time of a small
    one, ``cpu_s``."""

    latency_s: float
    seconds_per_byte: float
    cpu_s: float = 0.0

    def time_s(self, num_bytes: int) -> float:
        return self.latency_s + num_bytes * self.seconds_per_byte


@dataclasses.dataclass(frozen=True)
class BackwardTimes:
    """One backward, in seconds from its start.

    Attributes:
        ready_s: by parameter (index in the layout), when its gradient was there. A bucket with one whose gradient never
            came is launched at the end.
        total_s: when it ended.
    """

    ready_s: Mapping[int, float]
    total_s: float


@dataclasses.dataclass(frozen=True)
class BucketSizeChoice:
    """The size that was chosen, and those that it was compared with.

    Attributes:
        bucket_size: elements.
        layout: the plan with it.
        exposed_s: by bucket size that was considered, what would be exposed in a step, with the processor time that
            is paid for each bucket.
    """

    bucket_size: int
    layout: BufferLayout
    exposed_s: dict[int, float]


def fit_link(samples: Sequence[tuple[int, float]]) -> Link:
    """The link that is nearest to the samples (bytes, seconds), in the least squares of the relative errors.

    Neither latency nor time a byte is negative.
    """
    # minimise the sum of ((latency + rate * x - t) / t)^2: linear in both, with weights 1/t
    rows = [(1.0 / seconds, num_bytes / seconds) for num_bytes, seconds in samples]
    aa = sum(a * a for a, _ in rows)
    ab = sum(a * b for a, b in rows)
    bb = sum(b * b for _, b in rows)
    a1, b1 = sum(a for a, _ in rows), sum(b for _, b in rows)
    determinant = aa * bb - ab * ab
    # Relative: samples of about one size fix no slope, and rounding would choose one.
    if determinant > 1e-9 * aa * bb:
        latency, rate = (a1 * bb - b1 * ab) / determinant, (b1 * aa - a1 * ab) / determinant
        if latency >= 0.0 and rate >= 0.0:
            return Link(latency, rate)
        # Noise made large messages look cheaper: all of it is latency. Else the latency was negative, and all of it is
        # rate.
        if rate < 0.0:
            return Link(a1 / aa, 0.0)
    return Link(0.0, b1 / bb)


def exposed_s(layout: BufferLayout, times: BackwardTimes, link: Link) -> float:
    """The time for which reductions go on after the backward has ended."""
    # Two clocks: when the link is free, and when the bucket and all before it were complete. A bucket starts at the
    # later.
    free_s = launched_s = 0.0
    for bucket in layout.buckets:
        launched_s = max(launched_s, *(times.ready_s.get(index, times.total_s) for index in bucket.params))
        num_bytes = bucket.numel * layout.buffers[bucket.buffer].grad_dtype.itemsize
        free_s = max(free_s, launched_s) + link.time_s(num_bytes)
    return max(0.0, free_s - times.total_s)


def gather_s(layout: BufferLayout, link: Link, *, hidden: bool) -> float:
    """The time for which gathers keep the step waiting; ``hidden``: under the next forward, but for the first."""
    # The last bucket has the first layers, which the forward reads at once: nothing hides its gather.
    buckets = layout.buckets[-1:] if hidden else layout.buckets
    return sum(link.time_s(bucket.numel * layout.buffers[bucket.buffer].dtype.itemsize) for bucket in buckets)


def choose_bucket_size(
    layout_with: Callable[[int], BufferLayout],
    known_sizes: Sequence[int],
    times: BackwardTimes,
    reduce_link: Link,
    gather_link: Link | None,
    *,
    gather_hidden: bool,
) -> BucketSizeChoice:
    """The largest of the sizes that expose about the least.

    Args:
        layout_with: the plan with a bucket size (elements).
        known_sizes: sizes to consider beside the powers of two.
        times: of a backward.
        reduce_link: for the gradients' collective.
        gather_link: for the parameters' collective; None if parameters are not gathered.
        gather_hidden: whether gathers go on under the next forward.
    """
    total_numel = sum(spec.numel for spec in layout_with(1).params)
    sizes = set(known_sizes)
    size = MIN_BUCKET_NUMEL
    # Up to one that takes the whole model, which is the best where nothing overlaps.
    while size < 2 * total_numel:
        sizes.add(size)
        size *= 2
    layouts = {size: layout_with(size) for size in sorted(sizes)}
    exposed = {}
    for size, layout in layouts.items():
        # Processor time counts for every bucket: while a thread of gloo's adds, training does not have that core.
        exposed[size] = exposed_s(layout, times, reduce_link) + reduce_link.cpu_s * len(layout.buckets)
        if gather_link is not None:
            exposed[size] += gather_s(layout, gather_link, hidden=gather_hidden)
            exposed[size] += gather_link.cpu_s * len(layout.buckets)
    least = min(exposed.values())
    # The largest of the good ones: each bucket less is a collective less that the model's constants can be wrong about.
    best = max(size for size, seconds in exposed.items() if seconds * WORTH_IT <= least)
    return BucketSizeChoice(best, layouts[best], exposed)
