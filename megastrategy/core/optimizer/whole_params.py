"""Parameters that an optimizer steps whole: their gradients are sent to their owners.

[Note: whole parameters]
Gradients are reduce-scattered flat while backward runs, as all others are. In the step every rank sends its parts to
the owners (layout), bucket by bucket in the order of the step, and all of it at once: an owner that has nothing
in a bucket does not wait for the others. The user's optimizer steps the parameter on its owner, in its shape, in the
memory that the model reads; a 16-bit one has an fp32 main param there. The gather then sends each rank what the others
stepped, shards and whole parameters alike (:meth:`.Collectives.gather_spans`). Bytes sent by a rank in a step, for an
fp32 element: ``4(d - 1)/d`` for the reduction, ``4(d - 1)/d**2`` to owners, less what they have already, and
``4(d - 1)/d`` for the gather. During the step an owner has a second copy of the gradients that it owns: ``4/d`` bytes
an element.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Collection, Iterable, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..buffers import slice_view
from ..collectives import Handle
from ..engine import Engine
from ..errors import OptimizerNotShardableError
from ..events import EventKind, profiler_range
from ..layout import Bucket, Owners, Part, Spans
from ..shards import ParamShard
from ..trials import Findings


@dataclasses.dataclass
class _Incoming:
    """The gradients of parameters in one bucket, on their way to their owners.

    Attributes:
        owned: the parameters that this rank owns.
        handle: None if each owner has all of its gradients already, and nothing is sent.
        sent: referenced until the collective ends.
        received: the received parts, one after the other.
        parts: the places of the received parts.
    """

    owned: list[int]
    handle: Handle | None = None
    sent: Tensor | None = None
    received: Tensor | None = None
    parts: Sequence[Part] = ()


@dataclasses.dataclass(frozen=True, eq=False)
class WholeParam:
    """A parameter that this rank steps whole, and its gradient in its shape, with the attributes of a FlatRun."""

    bucket: int
    group: int
    start: int
    shard: ParamShard
    grad: Tensor

    @property
    def main(self) -> Tensor:
        return self.shard.main

    @property
    def weights(self) -> Tensor | None:
        """The weights that ``main`` is the main param of; None if it is the weights themselves."""
        return None if self.shard.main is self.shard.weights else self.shard.weights

    @property
    def tensors(self) -> list[Tensor]:
        return [self.shard.main]

    def set_grad(self) -> None:
        self.main.grad = self.grad.to(self.main.dtype)


class WholeParams:
    """The parameters of one optimizer that it steps whole; see [Note: whole parameters].

    Attributes:
        indices: of all of them, on whichever rank their owners are.
        groups: the numbers of the groups whose parameters are stepped whole.
        num_tensors: how many state tensors of a parameter's size the optimizer keeps, by number of dimensions.
    """

    def __init__(self, engine: Engine, findings: Findings | None) -> None:
        self._engine = engine
        self.indices: set[int] = set()
        self.groups = set(findings.whole_groups) if findings is not None else set[int]()
        self.num_tensors = findings.whole_tensors if findings is not None else {}
        self._incoming: dict[int, _Incoming] = {}  # by bucket
        self._spans: dict[int, Spans] = {}  # by bucket, for each rank
        self._spans_are_of: tuple[Owners, Sequence[int]] | None = None

    def check_not_tensor_parallel(self, indices: Iterable[int], kind: str) -> None:
        """Raises OptimizerNotShardableError if a parameter is tensor-parallel; ``kind``: the optimizer, for errors."""
        engine = self._engine
        for index in sorted(indices):
            if engine.local_parts.is_cut(engine.params[index]):
                raise OptimizerNotShardableError(
                    f"{kind} updates parameters as wholes, and parameter {engine.layout.params[index].name!r} is "
                    f"{engine.model_parallel.kind_of_parts}: each rank has a part of it, and none all. Give such "
                    "parameters a group or an optimizer that updates every element by itself (AdamW, SGD), or leave "
                    "the parameter undivided"
                )

    def check_groups(self, optimizer: Optimizer, sharded_index: Callable[[Tensor], int | None]) -> None:
        """Raises OptimizerNotShardableError if a parameter with flat shards was put into a group of whole parameters.

        Its shards would be stepped as if they were parameters.
        """
        for number, group in enumerate(optimizer.param_groups):
            for index in map(sharded_index, group["params"] if number in self.groups else ()):
                if index is not None and index not in self.indices:
                    raise OptimizerNotShardableError(
                        f"parameter {self._engine.layout.params[index].name!r} is divided into flat shards, and is in "
                        f"group {number} now, which {type(optimizer).__name__} steps whole: put it there before the "
                        "optimizer is wrapped"
                    )

    def assign_owners(self, indices: Collection[int]) -> None:
        """Assigns owners to parameters. Collective; the same parameters on all ranks."""
        self.indices.update(indices)
        self._engine.assign_owners(set(indices))

    def check_not_owned(self, indices: Collection[int]) -> None:
        """Raises ValueError if another optimizer steps one of these whole: this one's shards would not be gathered."""
        rank_of = self._engine.owners.rank_of
        if rank_of and (taken := [index for index in indices if index in rank_of and index not in self.indices]):
            raise ValueError(
                f"parameter {self._engine.layout.params[taken[0]].name!r} is in two optimizers: one steps it whole, "
                "and this one as flat shards. Leave it in one of them"
            )

    def make_shards(self, indices: Collection[int]) -> dict[int, ParamShard]:
        """Returns the parameters that this rank owns, with their main params."""
        engine, shards = self._engine, dict[int, ParamShard]()
        assert engine.param_buffers is not None, "sharded"
        rank_of, rank = engine.owners.rank_of, engine.shard_collectives.rank
        for index in sorted(index for index in indices if rank_of[index] == rank):
            spec, slot = engine.layout.params[index], engine.layout.slots[index]
            flat = engine.param_buffers.flats[slot.buffer]
            weights = slice_view(flat, slot.start, spec.shape, spec.stride, spec.numel)
            main = weights.to(torch.float32, copy=True) if engine.layout.has_separate_main(index) else weights
            shards[index] = ParamShard(index, 0, spec.numel, main, weights)
        return shards

    def spans(self, bucket: int, indices: Sequence[int]) -> Spans | None:
        """Returns the parts of a bucket that each rank steps of these parameters; None where each steps its shard."""
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

    def send_grads(self, buckets: Sequence[int], indices: set[int]) -> None:
        """Starts to send the reduced gradients of ``indices`` in these buckets to their owners. Collective.

        ``indices`` are the same on all ranks, also where only some of these have a gradient.
        """
        owners = self._engine.owners
        self._incoming.clear()  # a step that failed may leave some
        for number in buckets:
            bucket = owners.layout.buckets[number]
            if whole := [index for index in bucket.params if index in indices and index in self.indices]:
                self._incoming[number] = self._send(bucket, whole)

    def _send(self, bucket: Bucket, indices: Sequence[int]) -> _Incoming:
        engine, owners = self._engine, self._engine.owners
        collectives, reduced = engine.shard_collectives, engine.grad_buffers.reduced
        incoming = _Incoming([index for index in indices if owners.rank_of[index] == collectives.rank])
        if all(map(owners.is_held_by_owner, indices)):
            return incoming
        to, of = owners.parts_to_send(indices, collectives.rank), owners.parts_to_receive(indices, collectives.rank)
        held = [reduced(bucket.index, part.start, part.end) for part in itertools.chain(*to)]
        nothing = torch.empty(0, dtype=owners.layout.buffers[bucket.buffer].sum_dtype, device=engine.device)
        incoming.sent = torch.cat(held) if held else nothing
        incoming.parts = list(itertools.chain(*of))
        incoming.received = nothing.new_empty(sum(part.numel for part in incoming.parts))
        sizes, sizes_of = ([sum(part.numel for part in parts) for parts in by_rank] for by_rank in (to, of))
        with profiler_range("send to owners", bucket.index):
            incoming.handle = collectives.all_to_all(incoming.received, incoming.sent, sizes_of, sizes)
        return incoming

    def wait_for_grads(self, bucket: int) -> dict[int, Tensor]:
        """Waits for the gradients in a bucket of the parameters that this rank owns, and returns them by index.

        Each has its parameter's shape and strides. It is a view if this rank had all of it.
        """
        if (incoming := self._incoming.pop(bucket, None)) is None:
            return {}
        engine, layout, parts = self._engine, self._engine.layout, dict[int, list[tuple[int, Tensor]]]()
        for index in incoming.owned:
            own = layout.owned_range(index, engine.shard_collectives.rank)
            parts[index] = [] if own is None else [(own[0], engine.grad_buffers.reduced(bucket, *own))]
        if incoming.handle is not None:
            self._wait(incoming.handle)
            assert incoming.received is not None, "it is set with the handle"
            values = incoming.received.split([part.numel for part in incoming.parts])
            for part, value in zip(incoming.parts, values, strict=True):
                parts[part.param].append((part.start, value))
        return {index: self._joined(index, found) for index, found in parts.items()}

    def _wait(self, handle: Handle) -> None:
        self._engine.emit(EventKind.WAIT_START, 0)
        try:
            with profiler_range("wait for gradients"):
                handle.wait()
        finally:
            self._engine.emit(EventKind.WAIT_END, 0)

    def _joined(self, index: int, parts: Sequence[tuple[int, Tensor]]) -> Tensor:
        engine = self._engine
        spec = engine.layout.params[index]
        if not spec.numel:  # any rank may own it, and no rank has a part
            return torch.empty_strided(spec.shape, spec.stride, dtype=spec.grad_dtype, device=engine.device)
        by_address = [part for _, part in sorted(parts, key=lambda pair: pair[0])]
        flat = by_address[0] if len(by_address) == 1 else torch.cat(by_address)
        return flat.as_strided(spec.shape, spec.stride)
