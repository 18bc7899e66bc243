"""``bucket_size="auto"``: measures the link at the start and a few backwards, and then proposes one other layout.

All ranks propose the same: they time collectives together, and take rank 0's backwards.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from ..collectives import Collectives, Handle
from ..config import DistributedDataParallelConfig
from ..layout import BufferLayout, build_layout, default_bucket_size
from .size_choice import BackwardTimes, BucketSizeChoice, Link, choose_bucket_size, fit_link

_NUM_SKIPPED = 1
"""Synchronised backwards: in the first one memory and kernels are made."""
_NUM_MEASURED = 3  # the median of three ignores one slow one
_SAMPLE_NUMELS = (2**10, 2**12, 2**14, 2**16, 2**18, 2**20)
_NUM_SAMPLES = 3  # of each size, for the same reason
_LONG_S = 0.1
"""Larger samples are left out once one takes longer: a slow link needs none to be known."""


class BucketSizeTuner:
    """Belongs to one wrapped model.

    Args:
        layout: the present one, with the default bucket size.
        config: the options, with ``bucket_size="auto"``.
        collectives: of all data-parallel ranks. Making this is collective.
        shard_collectives: those that gradients and parameters are sent by, where there are shards.
        device: the model's.
        tell: gets the reasons for the choice, on rank 0.
    """

    def __init__(
        self,
        layout: BufferLayout,
        config: DistributedDataParallelConfig,
        collectives: Collectives,
        shard_collectives: Collectives,
        device: torch.device,
        tell: Callable[[str], None],
    ) -> None:
        self._config, self._collectives, self._device, self._tell = config, collectives, device, tell
        self._num_reductions = 0
        self._clock = _Clock(device)
        self._backwards: list[BackwardTimes] = []
        self._what, self._reduce_link, self._gather_link = self._measure_links(layout, shard_collectives)

    def start(self) -> None:
        """A backward that will be synchronised has reached its first parameter."""
        self._clock.start()

    def note(self, param: int) -> None:
        """A parameter's gradient is there."""
        self._clock.note(param)

    def stop(self) -> None:
        """The backward has ended, but for reductions."""
        if self._num_reductions >= _NUM_SKIPPED:
            self._backwards.append(self._clock.stop())

    def propose(self, layout: BufferLayout, move: Callable[[BufferLayout], bool]) -> bool:
        """Makes the choice when enough was seen; called after each synchronised backward. Collective then.

        Args:
            layout: the present one.
            move: changes over to another one; whether that was possible.

        Returns:
            Whether the choice was made, so that there is nothing left to do.
        """
        self._num_reductions += 1
        # Counted in reductions, which all ranks have the same number of: what follows is collective.
        if self._num_reductions < _NUM_SKIPPED + _NUM_MEASURED:
            return False
        # Rank 0's for all: each rank measured its own, and must come to the same layout.
        times = self._collectives.all_gather_objects(self._median())[0]
        if times is None:
            if self._collectives.rank == 0:
                self._tell("bucket_size='auto': the default is kept, since no synchronised backward could be watched")
            return True
        choice = self._choose(layout, times)
        # A move of nothing would still stop all ranks for a gather of everything.
        moved = choice.layout.buckets == layout.buckets or move(choice.layout)
        if self._collectives.rank == 0:
            reasons = self._describe(choice, times)
            self._tell(reasons if moved else f"{reasons}. Not taken: the optimizer keeps more than state of tensors")
        return True

    def _choose(self, layout: BufferLayout, times: BackwardTimes) -> BucketSizeChoice:
        def layout_with(bucket_size: int) -> BufferLayout:
            return build_layout(layout.params, self._config, layout.dp_size, layout.param_order, bucket_size)

        # No gradient is then sent before the end: as if all of them came there.
        if not self._config.overlap_grad_reduce:
            times = BackwardTimes({}, times.total_s)
        return choose_bucket_size(
            layout_with,
            [self._default_size(layout)],
            times,
            self._reduce_link,
            self._gather_link,
            gather_hidden=self._config.overlap_param_gather == "forward",
        )

    def _default_size(self, layout: BufferLayout) -> int:
        return default_bucket_size(sum(spec.numel for spec in layout.params), layout.dp_size)

    def _median(self) -> BackwardTimes | None:
        """The medians over backwards, of the parameters whose gradient came each time."""
        if not self._backwards:
            return None
        always = set.intersection(*(set(times.ready_s) for times in self._backwards))
        ready = {index: statistics.median(times.ready_s[index] for times in self._backwards) for index in always}
        return BackwardTimes(ready, statistics.median(times.total_s for times in self._backwards))

    def _measure_links(self, layout: BufferLayout, shard_collectives: Collectives) -> tuple[str, Link, Link | None]:
        collectives, buffer = self._collectives, layout.buffers[0]
        mean = 1.0 / collectives.size

        def reduce_scatter(tensor: Tensor) -> Handle:
            # Timed is the collective that will be used: an exchange and a sum in fp32 is not gloo's or NCCL's
            # reduce-scatter.
            if not buffer.sums_apart:
                return shard_collectives.reduce_scatter(tensor, mean)
            sums = torch.zeros(tensor.numel() // layout.num_shards, dtype=buffer.sum_dtype, device=self._device)
            return shard_collectives.reduce_scatter_into(sums, tensor, mean)

        def measure(start: Callable[[Tensor], Handle], dtype: torch.dtype) -> Link:
            return measure_link(start, collectives, dtype, self._device)

        if layout.num_shards == 1:
            return "all-reduce", measure(lambda t: collectives.all_reduce(t, mean), buffer.grad_dtype), None
        gather_link = measure(shard_collectives.all_gather, buffer.dtype)
        return "reduce-scatter", measure(reduce_scatter, buffer.grad_dtype), gather_link

    def _describe(self, choice: BucketSizeChoice, times: BackwardTimes) -> str:
        link, chosen = self._reduce_link, choice.bucket_size
        rate = f"{1e-9 / link.seconds_per_byte:.3g} GB/s" if link.seconds_per_byte > 0.0 else "no time a byte"
        others = {min(choice.exposed_s), self._default_size(choice.layout), max(choice.exposed_s)} - {chosen}
        compared = "; ".join(f"{size:,} would leave {choice.exposed_s[size] * 1e3:.3g}" for size in sorted(others))
        return (
            f"bucket_size='auto': {chosen:,} elements, {len(choice.layout.buckets)} bucket(s), which leave an "
            f"estimated {choice.exposed_s[chosen] * 1e3:.3g} ms of communication exposed in a step or paid by the "
            f"processor ({compared}). "
            f"Measured: {self._what} {link.latency_s * 1e3:.3g} ms + {rate}, {link.cpu_s * 1e3:.3g} ms of processor "
            f"time each, backward {times.total_s * 1e3:.3g} ms"
        )


class _Clock:
    """Notes when gradients arrive. On CUDA events say it, since the host runs ahead of the device."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._start: float | torch.cuda.Event = 0.0
        self._noted: list[tuple[int, float | torch.cuda.Event]] = []

    def start(self) -> None:
        self._start, self._noted = self._now(), []

    def note(self, param: int) -> None:
        self._noted.append((param, self._now()))

    def stop(self) -> BackwardTimes:
        end = self._now()
        if self._is_cuda:
            torch.cuda.synchronize()
        # A parameter noted twice keeps the later moment: until then its bucket cannot go.
        ready: dict[int, float] = {param: self._since_start_s(moment) for param, moment in self._noted}
        return BackwardTimes(ready, self._since_start_s(end))

    def _now(self) -> float | torch.cuda.Event:
        if not self._is_cuda:
            return time.perf_counter()
        # On the stream of the gradients: it is passed when they are there, not when the host queued them.
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _since_start_s(self, moment: float | torch.cuda.Event) -> float:
        if isinstance(moment, float):
            assert isinstance(self._start, float)
            return moment - self._start
        assert isinstance(self._start, torch.cuda.Event)
        return 1e-3 * float(self._start.elapsed_time(moment))


def measure_link(
    start: Callable[[Tensor], Handle], collectives: Collectives, dtype: torch.dtype, device: torch.device
) -> Link:
    """Times a collective at several sizes, and fits; processor time is that at the smallest. Collective; the same
    result on every rank.

    Args:
        start: starts it on a 1-D tensor of ``dtype``, whose values do not matter.
        collectives: agree on each time: a collective lasts as long as on its slowest rank.
    """
    samples: list[tuple[int, float]] = []
    cpu_s = 0.0
    for numel in _SAMPLE_NUMELS:
        # So that every rank's part has at least as many elements, and they divide.
        numel *= collectives.size
        tensor = torch.zeros(numel, dtype=dtype, device=device)
        start(tensor).wait()  # the first makes connections and memory
        taken = torch.zeros(_NUM_SAMPLES + 1, dtype=torch.float64)
        begun_cpu = time.process_time()
        for number in range(_NUM_SAMPLES):
            _synchronize(device)
            begun = time.perf_counter()
            start(tensor).wait()
            _synchronize(device)
            taken[number] = time.perf_counter() - begun
        taken[-1] = (time.process_time() - begun_cpu) / _NUM_SAMPLES
        # Before the fit, so that every rank fits the same samples and comes to the same link.
        collectives.host.all_reduce_max(taken).wait()
        # Of the smallest: what a collective costs before it sends anything, which is paid once a bucket.
        cpu_s = cpu_s or float(taken[-1])
        # The fit divides by it; a clock may not have moved in so short a time.
        seconds = max(float(taken[:-1].median()), 1e-9)
        samples.append((tensor.nbytes, seconds))
        if seconds > _LONG_S:
            break
    return dataclasses.replace(fit_link(samples), cpu_s=cpu_s)


def _synchronize(device: torch.device) -> None:
    """A CUDA collective that was waited for is done for the device, not for the host."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
