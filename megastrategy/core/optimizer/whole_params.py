"""Parameters that an optimizer steps whole: their gradients come to the owners.

[Note: whole parameters]
Gradients are reduce-scattered flat while backward runs, as all others are. At the step every rank sends the parts that
it holds to the owners (:mod:`.owners`), bucket by bucket in the order in which buckets are stepped, and all of it at
once: an owner that has nothing of a bucket does not wait for those who have. The user's optimizer steps the parameter
itself on its owner, of its own shape, in the memory that the model reads; a 16-bit one has an fp32 main param there.
The gather then brings each rank what the others stepped, shards and whole parameters alike
(:meth:`.Collectives.gather_spans`). Sent a rank a step, in bytes an fp32 element: ``4(d - 1)/d`` for the reduction,
``4(d - 1)/d**2`` to owners, less by what they hold already, and ``4(d - 1)/d`` for the gather. While it steps, an owner
has the gradients of what it owns a second time: ``4/d`` bytes an element.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Iterable, Sequence

import torch
from torch import Tensor

from ..buffers import slice_view
from ..collectives import Handle
from ..engine import Engine
from ..errors import OptimizerNotShardableError
from ..events import EventKind, profiler_range
from ..layout import Bucket, Owners, Part, Spans
from ..shards import ParamShard
from ..trials import Findings


@dataclasses.dataclass
class _Coming:
    """The gradients of parameters in one bucket, on their way to their owners.

    Attributes:
        owned: those that this rank owns.
        handle: None if each lies at its owner already, and nothing is sent.
        sent: kept until it has gone.
        received: one part after the other.
        parts: of which parameters these are.
    """

    owned: list[int]
    handle: Handle | None = None
    sent: Tensor | None = None
    received: Tensor | None = None
    parts: Sequence[Part] = ()


@dataclasses.dataclass(frozen=True, eq=False)
class WholeParam:
    """A parameter that this rank steps whole, and its gradient, of its shape; like a run of shards.

    Attributes:
        bucket, group: their numbers.
        start: the place of the first element in the bucket's buffer.
        times: as a run's.
    """

    bucket: int
    group: int
    start: int
    shard: ParamShard
    grad: Tensor
    times: int = 1

    @property
    def main(self) -> Tensor:
        return self.shard.main

    @property
    def weights(self) -> Tensor | None:
        """The weights that ``main`` stands for; None if it is the weights."""
        return None if self.shard.main is self.shard.weights else self.shard.weights

    @property
    def keeps_remainder(self) -> bool:
        return self.shard.keeps_remainder

    @property
    def bits(self) -> None:
        """Main params of what is stepped whole are kept in fp32."""

    @property
    def tensors(self) -> list[Tensor]:
        return [self.shard.main]

    def set_grad(self) -> None:
        self.main.grad = self.grad.to(self.main.dtype)


class WholeParams:
    """The parameters of one optimizer that it steps whole; see [Note: whole parameters].

    Attributes:
        indices: of all of them, in the layout, whichever rank owns them.
        groups: the numbers of the groups whose parameters are stepped whole.
        num_tensors: how many numbers the optimizer keeps for each element, by a parameter's number of dimensions.
    """

    def __init__(self, engine: Engine, findings: Findings | None) -> None:
        self._engine = engine
        self.indices: set[int] = set()
        self.groups = set(findings.whole_groups) if findings is not None else set[int]()
        self.num_tensors = findings.whole_tensors if findings is not None else {}
        self._coming: dict[int, _Coming] = {}  # by bucket
        self._spans: dict[int, Spans] = {}  # by bucket, what each rank steps of it
        self._spans_are_of: tuple[Owners, Sequence[int]] | None = None

    @property
    def owns_any(self) -> bool:
        """Whether this rank steps some of them."""
        rank_of, rank = self._engine.owners.rank_of, self._engine.shard_collectives.rank
        return any(rank_of[index] == rank for index in self.indices)

    def check(self, indices: Iterable[int], kind: str) -> None:
        """Raises OptimizerNotShardableError where a parameter would have to be whole and no rank has all of it.

        ``kind``: the optimizer's class, for the message.
        """
        engine = self._engine
        for index in sorted(indices):
            if engine.local_parts.is_cut(engine.params[index]):
                raise OptimizerNotShardableError(
                    f"{kind} updates parameters as wholes, and parameter {engine.layout.params[index].name!r} is "
                    "tensor-parallel: each rank has a part of it, and none all. Give tensor-parallel parameters a "
                    "group or an optimizer that updates every element by itself (AdamW, SGD), or leave the parameter "
                    "out of the plan of parallelize_module"
                )

    def add(self, indices: Collection[int]) -> None:
        """Gives parameters owners. Collective; the same ones on all ranks."""
        self.indices.update(indices)
        self._engine.assign_owners(set(indices))

    def check_not_owned(self, indices: Collection[int]) -> None:
        """Raises ValueError if another optimizer has taken one of these, which this one steps as shards: what it does
        to its shard would not be gathered."""
        rank_of = self._engine.owners.rank_of
        if rank_of and (taken := [index for index in indices if index in rank_of and index not in self.indices]):
            raise ValueError(
                f"parameter {self._engine.layout.params[taken[0]].name!r} is in two optimizers, of which one steps it "
                "whole and this one as flat shards: leave it in one of them"
            )

    def own_shards(self, indices: Collection[int]) -> dict[int, ParamShard]:
        """Makes what this rank steps of these parameters: those that it owns."""
        engine, shards = self._engine, dict[int, ParamShard]()
        assert engine.param_buffers is not None, "sharded"
        rank_of, rank = engine.owners.rank_of, engine.shard_collectives.rank
        for index in sorted(index for index in indices if rank_of[index] == rank):
            spec, slot = engine.layout.params[index], engine.layout.slots[index]
            flat = engine.param_buffers.flats[slot.buffer]
            weights = slice_view(flat, slot.start, spec.shape, spec.stride, spec.numel)
            main, keeps_remainder = weights, engine.layout.sends_weight_changes(index)
            if engine.layout.has_separate_main(index):
                main = torch.zeros_like(weights) if keeps_remainder else weights.to(torch.float32, copy=True)
            shards[index] = ParamShard(index, 0, spec.numel, main, weights, keeps_remainder=keeps_remainder)
        return shards

    def spans(self, bucket: int, indices: Sequence[int]) -> Spans | None:
        """The parts of a bucket that each rank steps of these parameters; None where each steps its shard of all."""
        owners = self._engine.owners
        place = owners.layout.buckets[bucket]
        if not owners.rank_of or owners.rank_of.keys().isdisjoint(place.params):
            return None
        # Computed once for a layout and a set of parameters: a bucket may have a thousand.
        if self._spans_are_of is None or self._spans_are_of[0] is not owners or self._spans_are_of[1] != indices:
            self._spans, self._spans_are_of = {}, (owners, list(indices))
        if bucket not in self._spans:
            self._spans[bucket] = owners.stepped_spans(place, set(indices))
        return self._spans[bucket]

    def start(self, buckets: Sequence[int], indices: set[int]) -> None:
        """Sends the reduced gradients of ``indices`` in these buckets to their owners. Collective: the same on all
        ranks, whichever of them have a gradient."""
        owners = self._engine.owners
        self._coming.clear()  # of a step that failed
        for number in buckets:
            bucket = owners.layout.buckets[number]
            if whole := [index for index in bucket.params if index in indices and index in self.indices]:
                self._coming[number] = self._start(bucket, whole)

    def _start(self, bucket: Bucket, indices: Sequence[int]) -> _Coming:
        engine, owners = self._engine, self._engine.owners
        collectives, reduced = engine.shard_collectives, engine.grad_buffers.reduced
        coming = _Coming([index for index in indices if owners.rank_of[index] == collectives.rank])
        if all(map(owners.is_held_by_owner, indices)):
            return coming
        to, of = owners.parts_to_send(indices, collectives.rank), owners.parts_to_receive(indices, collectives.rank)
        held = [reduced(bucket.index, part.start, part.end) for part in itertools.chain(*to)]
        nothing = torch.empty(0, dtype=owners.layout.buffers[bucket.buffer].sum_dtype, device=engine.device)
        coming.sent = torch.cat(held) if held else nothing
        coming.parts = list(itertools.chain(*of))
        coming.received = nothing.new_empty(sum(part.numel for part in coming.parts))
        sizes, sizes_of = ([sum(part.numel for part in parts) for parts in by_rank] for by_rank in (to, of))
        with profiler_range("send to owners", bucket.index):
            coming.handle = collectives.all_to_all(coming.received, coming.sent, sizes_of, sizes)
        return coming

    def arrived(self, bucket: int) -> dict[int, Tensor]:
        """Waits for a bucket's gradients, and returns those of the parameters that this rank owns, by index, each in
        its parameter's shape and strides. Where all of one was here already, it is a view."""
        if (coming := self._coming.pop(bucket, None)) is None:
            return {}
        engine, layout, pieces = self._engine, self._engine.layout, dict[int, list[tuple[int, Tensor]]]()
        for index in coming.owned:
            own = layout.owned_range(index, engine.shard_collectives.rank)
            pieces[index] = [] if own is None else [(own[0], engine.grad_buffers.reduced(bucket, *own))]
        if coming.handle is not None:
            self._wait(coming.handle)
            assert coming.received is not None, "there is memory for what comes"
            for part, came in zip(coming.parts, coming.received.split([p.numel for p in coming.parts]), strict=True):
                pieces[part.param].append((part.start, came))
        return {index: self._joined(index, found) for index, found in pieces.items()}

    def _wait(self, handle: Handle) -> None:
        self._engine.emit(EventKind.WAIT_START, 0)
        try:
            with profiler_range("wait for gradients"):
                handle.wait()
        finally:
            self._engine.emit(EventKind.WAIT_END, 0)

    def _joined(self, index: int, pieces: Sequence[tuple[int, Tensor]]) -> Tensor:
        engine = self._engine
        spec = engine.layout.params[index]
        if not spec.numel:  # any rank may own it, and none holds a part
            return torch.empty_strided(spec.shape, spec.stride, dtype=spec.grad_dtype, device=engine.device)
        by_address = [piece for _, piece in sorted(pieces, key=lambda pair: pair[0])]
        flat = by_address[0] if len(by_address) == 1 else torch.cat(by_address)
        return flat.as_strided(spec.shape, spec.stride)
