"""The sums of one model's reduced gradients over replicas, and the agreement that makes them final."""

from __future__ import annotations

import concurrent.futures
import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from ..buffers import GradBuffers, ReducedGrad
from ..collectives import Handle
from .agreement import Agreement
from .replica_facts import Flag, ReplicaFacts
from .replicas import ReplicaModel, Replicas


class Model(ReplicaModel, Protocol):
    """The members of a wrapped model that :class:`AcrossReplicas` uses."""

    def buffers(self) -> Sequence[Tensor]:
        """Returns the module's buffers that are the same on all ranks."""

    def add_optimizer(self, optimizer: Any) -> None:
        """Adds an optimizer to the state."""


class AcrossReplicas:
    """Adds up each reduced bucket over replicas while backward goes on, and again if a replica has ended.

    Args:
        model: the state that another replica may take over; module buffers in it become those of the leading replica.
    """

    def __init__(
        self,
        replicas: Replicas,
        model: Model,
    ) -> None:
        self.replicas, self.model, self._link = replicas, model, replicas.link
        replicas.attach(model)
        self._sums: list[Tensor] = []  # of the present window, by bucket
        self._kept: list[Tensor] = []  # this replica's own sums
        self._handles: list[Handle] = []
        self._begins_window = True

    def start(self, sums: Tensor, inside: Handle) -> Handle:
        """Starts to add up the next bucket's ``sums`` of this rank's shard, when those ``inside`` the replica end."""
        number = len(self._sums)
        self._sums.append(sums)
        if number == len(self._kept):
            self._kept.append(torch.empty_like(sums))

        def run() -> None:
            inside.wait()
            # A failed sum over replicas overwrites it in part.
            self._kept[number].copy_(sums)
            self._link.mean_(sums)

        self._handles.append(_QueuedHandle(self.replicas.worker.submit(run), inside))
        return self._handles[-1]

    def begin_backward(self, buffers: GradBuffers) -> None:
        """Comes before the first gradient of a backward is counted. Collective over this replica's ranks.

        Raises:
            ValueError: outside of a window, and if gradients of an earlier window are added to.
        """
        is_in_batch = self.replicas.begin_backward()
        if not self._begins_window:
            return
        self._begins_window = False
        for index, (param, has_grad) in enumerate(zip(buffers.params, buffers.has_grad, strict=True)):
            grad = param.grad
            is_kept = isinstance(grad, ReducedGrad) or (grad is not None and grad is buffers.views[index])
            if has_grad and is_kept and (param.requires_grad or is_in_batch) and index not in buffers.zeroed:
                raise ValueError(
                    f"parameter {buffers.layout.params[index].name!r}: gradients of a synchronised backward are there, "
                    "which a replica that comes back does not have, and this backward would add to them. Call "
                    "zero_grad() after each step, and accumulate microbatches under no_sync()"
                )

    def settle(self, agreed: Agreement, tokens: tuple[float, int]) -> tuple[Agreement, tuple[float, int]]:
        """Returns the facts of all replicas, and the sums of their ``tokens``, when all sums are complete.

        Collective over this replica's ranks, whose facts are ``agreed``. If other replicas have stepped without waiting
        for this one, or too few are left, the facts are this replica's, and so are the gradients: they are not stepped
        with.

        Raises:
            ReplicaMismatchError, LayoutMismatchError: if this replica does not fit to the others.
        """
        replicas = self.replicas
        with replicas.leaving_after_an_error():
            for handle in self._handles:
                handle.wait()
            while True:
                if replicas.drop_below_minimum():
                    self.forget()
                    return agreed, tokens
                every = replicas.exchange(_facts_of(agreed, tokens, replicas), bytes(agreed.used))
                buffers = self._leaders_buffers()
                if replicas.vote():
                    break
                has_stepped = replicas.meet_again()
                for sums, kept in zip(self._sums, self._kept, strict=False):
                    sums.copy_(kept)
                if has_stepped:
                    self.forget()
                    return agreed, tokens
                for sums in self._sums:
                    replicas.worker.submit(lambda sums=sums: self._link.mean_(sums))  # type: ignore[misc]
            self.forget()
            assert every is not None, "the vote would have said no"
            replicas.check(every[0])
            replicas.note_lengths(every[0])
            replicas.should_stop |= any(Flag.STOPS in facts.flags for facts in every[0])
        for buffer, received in buffers:
            buffer.copy_(received)
        return _joined(agreed, *every)

    def forget(self) -> None:
        """Ends the window's sums, which are complete."""
        self._sums, self._handles = [], []

    def abandon(self) -> None:
        """Gives up the window's sums after an error: other replicas must not wait for the buckets that do not come."""
        self._begins_window = True
        if self._sums:
            self.forget()
            self.replicas.abandon()

    def finish(self) -> None:
        """Ends a backward: loads the state of replicas that have stepped already, if there is any."""
        self._begins_window = True
        self.replicas.load_taken()

    def _leaders_buffers(self) -> list[tuple[Tensor, Tensor]]:
        """Returns the module's buffers and the leader's values, on rank 0, from which the others get them."""
        buffers = [buffer.data for buffer in self.model.buffers() if buffer.numel()]
        if self.model.ranks.rank or not buffers:
            return []
        # As bytes: any dtype, and exactly. The sum of the leader's and of zeros is the leader's.
        sent = torch.cat([buffer.cpu().contiguous().view(-1).view(torch.uint8) for buffer in buffers])
        if not self.replicas.is_leader:
            sent.zero_()
        self.replicas.watched(lambda: self._link.max_(sent))
        parts = sent.split([buffer.nbytes for buffer in buffers])
        return [
            (buffer, part.clone().view(buffer.dtype).view(buffer.shape))
            for buffer, part in zip(buffers, parts, strict=True)
        ]


class _QueuedHandle(Handle):
    """A sum over replicas, with the span of the sum inside this replica before it."""

    def __init__(self, future: concurrent.futures.Future[tuple[int, int]], inside: Handle) -> None:
        self._future, self._inside = future, inside

    def wait(self) -> None:
        self.ran_ns = self._future.result()
        self._inside.wait()
        if self._inside.ran_ns is not None:
            self.ran_ns = self._inside.ran_ns[0], self.ran_ns[1]


def _facts_of(agreed: Agreement, tokens: tuple[float, int], replicas: Replicas) -> ReplicaFacts:
    flags = {
        Flag.STOPS: any(agreed.others),
        Flag.NONFINITE: agreed.has_nonfinite,
        Flag.COUNTED: agreed.counting[0],
        Flag.UNCOUNTED: agreed.counting[1],
        Flag.LATE: any(agreed.late),
        Flag.MICROBATCHES_DIFFER: agreed.microbatch is None,
    }
    facts = replicas.facts(flags=Flag(sum(flag for flag, is_set in flags.items() if is_set)))
    weights, num = tokens
    return dataclasses.replace(facts, microbatch=agreed.microbatch or 0, token_weights=weights, num_losses=num)


def _joined(agreed: Agreement, every: Sequence[ReplicaFacts], used: bytes) -> tuple[Agreement, tuple[float, int]]:
    flags = Flag(0)
    for facts in every:
        flags |= facts.flags
    microbatches = {facts.microbatch for facts in every}
    differ = Flag.MICROBATCHES_DIFFER in flags or len(microbatches) > 1
    joined = dataclasses.replace(
        agreed,
        used=[bool(flag) for flag in used],
        late=[False] * len(agreed.late),
        microbatch=None if differ else agreed.microbatch,
        has_nonfinite=Flag.NONFINITE in flags,
        counting=(Flag.COUNTED in flags, Flag.UNCOUNTED in flags),
        is_late_refused=Flag.LATE in flags,
    )
    # In the order of the members, so that all have the same bits.
    return joined, (sum(facts.token_weights for facts in every), sum(facts.num_losses for facts in every))
