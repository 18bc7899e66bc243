"""Writes the engine's schedule of a step down for the simulator, at any number of ranks and with any options.

The order is the engine's own: in the last backward a bucket is launched when its gradients and those of all buckets
before it are there; ranks agree on what was used; then this rank's part of each bucket is stepped, the last bucket
first, and its weights are gathered under what follows (``overlap_param_gather``). Bytes and hops are those of rings.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence

from ...core import (
    Bucket,
    BufferLayout,
    DistributedDataParallelConfig,
    ParamSpec,
    better_layout_order,
)
from ..planned_layout import planned_layout
from .simulator import Compute, Launch, Link, Operation, Phase, Processor, SimulatedStep, Wait, simulate

_FEW_RANKS = 4
"""As many agree on what was used in a ring, more by doubling; see ``GlooCollectives.all_reduce_max``."""


@dataclasses.dataclass(frozen=True)
class Work:
    """A rank's computation in a step, in milliseconds of its own time, which no other rank and no link is in.

    Attributes:
        params: trainable parameters in order of registration.
        ready: by parameter, the part of a backward, from 0 to 1, after which its gradient is there; those that get none
            are not in it.
        num_microbatches: of a step; all but the last are not synchronised.
        forward_ms, loss_ms, backward_ms: of a microbatch; the loss is between the other two.
        before_step_ms: between the last backward and the optimizer's step: clipping, hooks.
        step_ms_per_numel: of the optimizer, for each element that it steps.
        step_ms_per_bucket: of the optimizer, for each bucket, whatever its size.
        other_ms: between steps: loading, logging, zeroing.
    """

    params: tuple[ParamSpec, ...]
    ready: Mapping[int, float]
    num_microbatches: int
    forward_ms: float
    loss_ms: float
    backward_ms: float
    before_step_ms: float
    step_ms_per_numel: float
    step_ms_per_bucket: float
    other_ms: float

    def layout(self, config: DistributedDataParallelConfig, dp_size: int) -> BufferLayout:
        """The buckets on so many ranks, in the order in which gradients arrive where the engine would move to it.
        Raises ValueError if the options contradict the number of ranks."""
        layout = planned_layout(self.params, config, dp_size)
        # One rank sends nothing, and one bucket has no order.
        if not config.overlap_grad_reduce or dp_size == 1 or len(layout.buckets) == 1:
            return layout
        arrived = sorted(self.ready, key=lambda index: self.ready[index])
        order = better_layout_order(layout, config, arrived, [True] * len(self.params))
        return layout if order is None else planned_layout(self.params, config, dp_size, order)


@dataclasses.dataclass(frozen=True)
class Network:
    """Links of a rank: to its neighbours in an instance of the optimizer, and to other instances."""

    link: Link
    between_instances: Link | None = None


def simulate_step(
    work: Work, config: DistributedDataParallelConfig, dp_size: int, network: Network, processor: Processor
) -> SimulatedStep:
    """Simulates a step on so many ranks. Raises ValueError if the options contradict their number."""
    layout = work.layout(config, dp_size)
    return simulate(list(operations(work, layout, config, network)), processor)


def operations(
    work: Work, layout: BufferLayout, config: DistributedDataParallelConfig, network: Network
) -> Iterator[Operation]:
    """Yields what a rank does in a step, in order."""
    schedule = Schedule(work, layout, config, network)
    for microbatch in range(work.num_microbatches):
        yield from schedule.forward(is_first=microbatch == 0)
        yield Compute(work.loss_ms)
        # Pooled gradients cannot accumulate on a rank: every backward is reduced.
        if microbatch == work.num_microbatches - 1 or layout.piece_numel is not None:
            yield from schedule.synchronised_backward()
        else:
            yield Compute(work.backward_ms)
    yield Compute(work.before_step_ms)
    yield from schedule.step()
    yield Compute(work.other_ms)


@dataclasses.dataclass(frozen=True)
class Schedule:
    work: Work
    layout: BufferLayout
    config: DistributedDataParallelConfig
    network: Network

    def forward(self, *, is_first: bool) -> Iterator[Operation]:
        """A forward, which waits for the weights of a bucket where it first reads one."""
        total = self.work.forward_ms
        if not (is_first and self._gathers_under_forward):
            yield Compute(total)
            return
        # It reads parameters in the reverse of the order in which backward makes their gradients.
        reads = sorted((1.0 - self._complete_at(bucket), bucket.index) for bucket in self.layout.buckets)
        so_far = 0.0
        for place, index in reads:
            yield Compute((place - so_far) * total)
            yield Wait((("gather", index),), "parameters")
            so_far = place
        yield Compute((1.0 - so_far) * total)

    def synchronised_backward(self) -> Iterator[Operation]:
        total, so_far = self.work.backward_ms, 0.0
        keys: list[tuple[str, int, int]] = []
        for bucket in self.layout.buckets:
            # Without overlap none is launched before the end.
            ready = max(so_far, self._complete_at(bucket)) if self.config.overlap_grad_reduce else 1.0
            yield Compute((ready - so_far) * total)
            so_far = ready
            for number, phases in enumerate(self.reduction(bucket)):
                # No more pieces are staged than there are buffers for.
                if self.layout.piece_numel is not None and len(keys) >= 2:
                    yield Wait((keys[-2],), "gradients")
                keys.append(("reduce", bucket.index, number))
                yield Launch(keys[-1], phases)
        yield Compute((1.0 - so_far) * total)
        if self.config.find_unused_parameters and not self.config.static_graph:
            keys.append(("agree", 0, 0))
            yield Launch(keys[-1], self._agreement())
        yield Wait(tuple(keys), "gradients")

    def step(self) -> Iterator[Operation]:
        """This rank's part of each bucket, and its gather."""
        shards, work = self.layout.num_shards, self.work
        waits = []
        # The next forward needs the last buckets first.
        for bucket in reversed(self.layout.buckets):
            yield Compute(work.step_ms_per_bucket + bucket.shard_numel * work.step_ms_per_numel)
            if shards > 1 and self.config.overlap_param_gather:
                yield Launch(("gather", bucket.index), self.gather(bucket))
            waits.append(("gather", bucket.index))
        if shards > 1 and not self.config.overlap_param_gather:
            for bucket in reversed(self.layout.buckets):
                yield Launch(("gather", bucket.index), self.gather(bucket))
        if not self._gathers_under_forward:
            yield Wait(tuple(waits), "parameters")

    @property
    def _gathers_under_forward(self) -> bool:
        return self.layout.num_shards > 1 and self.config.overlap_param_gather == "forward"

    def _complete_at(self, bucket: Bucket) -> float:
        """The part of a backward after which a bucket's gradients are there; one that never comes holds it to the
        end."""
        return max(self.work.ready.get(index, 1.0) for index in bucket.params)

    # --- collectives -------------------------------------------------------------------------------------------------

    def reduction(self, bucket: Bucket) -> list[tuple[Phase, ...]]:
        """The phases of each piece of a bucket's reduction."""
        layout, buffer = self.layout, self.layout.buffers[bucket.buffer]
        ranks, shards, instances = bucket.domain.size, bucket.domain.num_shards, bucket.domain.num_instances
        if ranks == 1:
            return [()]
        outer = self.network.between_instances or self.network.link
        found: list[tuple[Phase, ...]] = []
        for numel in [(end - start) * shards for start, end in layout.pieces(bucket)]:
            if shards == 1:
                link = outer if self.network.between_instances else self.network.link
                found.append((_ring(link, ranks, 2, numel * buffer.grad_wire_dtype.itemsize),))
                continue
            phases = [_ring(self.network.link, shards, 1, numel * buffer.grad_wire_dtype.itemsize)]
            if instances > 1:
                shard_nbytes = numel // shards * buffer.sum_dtype.itemsize
                phases.append(_ring(outer, instances, 2, shard_nbytes))
            found.append(tuple(phases))
        return found

    def gather(self, bucket: Bucket) -> tuple[Phase, ...]:
        nbytes = bucket.numel * self.layout.buffers[bucket.buffer].dtype.itemsize
        return (_ring(self.network.link, bucket.domain.num_shards, 1, nbytes),)

    def _agreement(self) -> tuple[Phase, ...]:
        """A byte a parameter: the hops take the time."""
        ranks = self.layout.dp_size
        if ranks == 1:
            return ()
        hops = 2 * (ranks - 1) if ranks <= _FEW_RANKS else math.ceil(math.log2(ranks))
        link = self.network.between_instances or self.network.link
        return (Phase(link, hops, float(len(self.layout.params))),)


def _ring(link: Link, ranks: int, num_rounds: int, nbytes: int) -> Phase:
    """A reduce-scatter or an all-gather over a ring has one round, an all-reduce two."""
    return Phase(link, num_rounds * (ranks - 1), num_rounds * nbytes * (ranks - 1) / ranks)


# --- the best options ------------------------------------------------------------------------------------------------

WORTH_IT = 0.95
"""The part of the step with the user's own options that others must get below to be worth writing down; as ``tune``."""


@dataclasses.dataclass(frozen=True)
class Setting:
    """Options that were simulated, and their step."""

    bucket_size: int | None
    overlap_param_gather: bool | str
    step: SimulatedStep


def settings(
    work: Work,
    config: DistributedDataParallelConfig,
    dp_size: int,
    network: Network,
    processor: Processor,
    sizes: Sequence[int | None] | None = None,
) -> list[Setting]:
    """Simulates bucket sizes, each with both places for the gathers, the fastest first.

    Args:
        sizes: in elements, None for the default; by default that, the user's own, and parts of the model.

    Raises:
        ValueError: if the options contradict the number of ranks.
    """
    if sizes is None:
        numel = sum(spec.numel for spec in work.params)
        parts = [size for size in (numel // 2**power for power in range(8)) if size >= 2**14]
        sizes = list(dict.fromkeys([config.bucket_size, None, *parts]))
    overlaps: list[bool | str] = [config.overlap_param_gather]
    if work.layout(config, dp_size).num_shards > 1:
        overlaps += [overlap for overlap in ("step", "forward") if overlap != config.overlap_param_gather]
    found = []
    for size in sizes:
        for overlap in overlaps:
            options = dataclasses.replace(config, bucket_size=size, overlap_param_gather=overlap)  # type: ignore[arg-type]
            step = simulate_step(work, options, dp_size, network, processor)
            found.append(Setting(size, overlap, step))
    return sorted(found, key=lambda setting: setting.step.step_ms)


def advice(found: Sequence[Setting], config: DistributedDataParallelConfig) -> str:
    """Says which of the simulated options to write down: the fewest that are within 1 % of the best."""
    own = next(
        s for s in found if (s.bucket_size, s.overlap_param_gather) == (config.bucket_size, config.overlap_param_gather)
    )
    near = [s for s in found if s.step.step_ms <= 1.01 * found[0].step.step_ms]
    best = min(near, key=lambda s: _changes(s, config).count("="))
    if best.step.step_ms >= WORTH_IT * own.step.step_ms:
        return "leave the options as they are: no other is more than 5 % faster in the simulation"
    return f"write down {_changes(best, config)}: {best.step.step_ms:.1f} ms for {own.step.step_ms:.1f}"


def _changes(setting: Setting, config: DistributedDataParallelConfig) -> str:
    changes = []
    if setting.bucket_size != config.bucket_size:
        changes.append(
            f"bucket_size={setting.bucket_size if setting.bucket_size is None else f'{setting.bucket_size:_}'}"
        )
    if setting.overlap_param_gather != config.overlap_param_gather:
        changes.append(f"overlap_param_gather={setting.overlap_param_gather!r}")
    return ", ".join(changes)
