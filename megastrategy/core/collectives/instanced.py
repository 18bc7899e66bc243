"""Collectives of one instance of the distributed optimizer, if there are several.

The d ranks are n instances of s = d/n consecutive ones (a node, for example), and every instance has a complete sharded
optimizer. A bucket is reduce-scattered inside each instance, and a rank's shard is then all-reduced over the n ranks at
its place in all instances; new weights are gathered inside an instance. Sent per rank and step, in bytes a parameter,
fp32: ``4(s - 1)/s`` for the reduce-scatter, the same for the gather, and ``2(n - 1)/n * 4/s`` between instances,
together ``8(d - 1)/d``: the same as with one instance, and ``8(n - 1)/d`` of it leaves the instance. With bf16 weights
the gather is half of that: ``6(s - 1)/s + 8(n - 1)/d``.

All owners of a shard get the same bits from an all-reduce, so their optimizers stay equal without a comparison.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from ..layout import Domain, Spans
from .backend import BackendCollectives, WorkHandle
from .fake import FakeCollectives
from .gloo import GlooCollectives
from .interface import Collectives, Handle, Handles
from .process_groups import destroy_group, part_of_group
from .rank_check import CALL_ON_EVERY_RANK


def shard_collectives(every: Collectives, domain: Domain, device: torch.device) -> Collectives:
    """Returns the collectives that reduce and gather the buckets of a domain: ``every``, or
    :class:`InstanceCollectives` of this rank's part of it. Those are made once for each ``every``, which keeps them.
    Making them is collective over all ranks.

    Raises:
        ValueError: if they have to be made from a group that torch.distributed does not know, and cannot divide.
    """
    members = domain.ranks_with(every.rank)
    num_shards = domain.num_shards
    is_of_all = len(members) == every.size
    if is_of_all and num_shards in (1, every.size):
        return every
    key = num_shards if is_of_all else (members, num_shards)
    # A second model on the same collectives uses them, too: each group costs a connection to each of its ranks.
    if key not in every.instances:
        instance, across = _divide(every.group, members, members.index(every.rank), num_shards, device)
        made = every.instances[key] = make_instance_collectives(every, instance, across)
        if isinstance(made, InstanceCollectives) and not is_of_all:
            first = members.index(every.rank) // num_shards * num_shards
            made.ranks = members[first : first + num_shards]
    return every.instances[key]


def make_instance_collectives(every: Collectives, instance: ProcessGroup, across: ProcessGroup) -> Collectives:
    """Makes the collectives of an ``instance``, this rank's, for the backend of ``every``, all ranks; ``across`` are
    the ranks at this rank's place in all instances. All groups are in order."""
    if isinstance(every, FakeCollectives):
        destroy_group(across)  # nothing crosses between instances either
        return FakeCollectives(instance)
    return InstanceCollectives(every, _part(every, instance), _part(every, across))


def _part(every: Collectives, group: ProcessGroup) -> Collectives:
    """Returns collectives over some of the ranks, whose progress and errors are in the numbers of all ranks."""
    # In the thread of all ranks' gloo, so that a failure in either ends what follows in both: a rank that continued to
    # a gather would wait for ranks that wait for it in the reduction.
    part = GlooCollectives(group, runner=every) if isinstance(every, GlooCollectives) else BackendCollectives(group)
    part.progress = every.progress
    part.name = every.name
    return part


def destroy_instances(every: Collectives) -> None:
    """Ends the groups that :func:`shard_collectives` made."""
    # The groups end with their model; a group that is left open keeps its sockets until the process ends.
    for made in every.instances.values():
        if isinstance(made, InstanceCollectives):
            destroy_group(made.across.group)
        if isinstance(made, InstanceCollectives | FakeCollectives):
            destroy_group(made.group)
    every.instances.clear()


def _divide(
    group: ProcessGroup, members: Sequence[int], place: int, size: int, device: torch.device
) -> tuple[ProcessGroup, ProcessGroup]:
    """Returns new groups over this rank's instance of ``size`` ranks and over the ranks at its place in all instances.
    They have the backend and the timeout of ``group``, which is the engine's own. ``place``: among ``members``."""
    if not dist.is_initialized() or group not in dist.distributed_c10d._world.pg_group_ranks:
        is_of_all = len(members) == group.size()
        option = f"num_distributed_optimizer_instances={group.size() // size}" if is_of_all else "expert_mesh"
        raise ValueError(
            f"{option} needs groups over parts of the ranks, and "
            "torch.distributed does not know the process group that was passed, which was made by hand: pass one of "
            "torch.distributed.new_group, or none for all ranks"
        )
    numbers = dist.get_process_group_ranks(group)
    ranks = [numbers[member] for member in members]
    number, place = divmod(place, size)
    # Names derived from the parent's, which is unique: torch would count groups, and counts differ between ranks.
    name = group.group_name if len(members) == group.size() else f"{group.group_name}, {len(ranks)} from {ranks[0]}"
    instance = part_of_group(group, ranks[number * size :][:size], f"{name}, instance {number} of {size}", device)
    across = part_of_group(group, ranks[place::size], f"{name}, place {place} of {size}", device)
    return instance, across


class InstanceCollectives(Collectives):
    """Reductions over all ranks, as those of ``every``; gathers, and so ``rank`` and ``size``, are of the instance.

    A reduction has two hops, inside the instance and across instances. On a device they run on a separate stream, which
    waits for the caller's stream; the host waits for nothing, and the caller's stream only in ``Handle.wait``. Two
    reductions never overlap, though one may be inside and the other between instances; gathers, and the ranks'
    agreements, are on communicators of their own. Untested and unmeasured on a device.

    Attributes:
        inside: the ranks of the instance.
        across: the ranks at this rank's place in all instances.
        ranks: the numbers that the instance's ranks have in ``every``.
    """

    def __init__(self, every: Collectives, inside: Collectives, across: Collectives) -> None:
        super().__init__(inside.group)
        # weak, since every.instances has this object
        self._every = weakref.ref(every)
        self.inside = inside
        self.across = across
        self.progress = every.progress
        self.ranks: Sequence[int] = range(every.rank - self.rank, every.rank - self.rank + self.size)
        self._streams: Any = None  # those of a test, instead of the device's
        self._stream: Any = None

    @property
    def every(self) -> Collectives:
        """The collectives of all ranks."""
        every = self._every()
        assert every is not None, "the owner of this object has it too"
        return every

    @property
    def _is_of_all_ranks(self) -> bool:
        return self.size * self.across.size == self.every.size

    # --- over all ranks ----------------------------------------------------------------------------------------------

    @property
    def is_rank_zero(self) -> bool:
        """Whether this is rank 0 of all ranks: the instances gather the same, and one of them keeps it."""
        return self.every.is_rank_zero

    def require_all_ranks(self, what: str, remedy: str = CALL_ON_EVERY_RANK) -> None:
        self.every.require_all_ranks(what, remedy)

    def wait_for_device(self, device: torch.device, what: str) -> None:
        # The watchdog of all ranks is used, and started collectives are counted there.
        self.every.wait_for_device(device, what)

    def all_reduce_max(self, tensor: Tensor) -> Handle:
        return self.every.all_reduce_max(tensor)

    def max_of_bytes(self, numbers: Sequence[int]) -> list[int]:
        return self.every.max_of_bytes(numbers)

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        # The hosts have one group, of all ranks: one for each instance would cost connections for a few bytes at a
        # checkpoint, in which all instances take part.
        by_rank = self.every.all_gather_bytes(data)
        return [by_rank[rank] for rank in self.ranks]

    def all_reduce(self, tensor: Tensor, scale: float) -> Handle:
        if self._is_of_all_ranks:
            return self.every.all_reduce(tensor, scale)
        return self._in_order(
            "all-reduce",
            tensor.device,
            lambda: self.inside.all_reduce(tensor, scale),
            lambda: self.across.all_reduce(tensor, 1.0),
        )

    def broadcast(self, tensor: Tensor) -> Handle:
        if self._is_of_all_ranks:
            return self.every.broadcast(tensor)
        return self._in_order(
            "broadcast",
            tensor.device,
            lambda: self.inside.broadcast(tensor),
            lambda: self.across.broadcast(tensor),
        )

    def reduce_scatter(self, tensor: Tensor, scale: float) -> Handle:
        # The rest of the tensor is undefined after the first hop: only this part crosses between instances.
        shard = tensor.view(self.size, -1)[self.rank]
        return self._in_order(
            "reduce-scatter",
            tensor.device,
            lambda: self.inside.reduce_scatter(tensor, scale),
            lambda: self.across.all_reduce(shard, 1.0),
        )

    def reduce_scatter_into(self, sums: Tensor, tensor: Tensor, scale: float) -> Handle:
        total = torch.zeros_like(sums)  # not sums, which has earlier results on all owners
        reduced = self._in_order(
            "reduce-scatter",
            tensor.device,
            lambda: self.inside.reduce_scatter_into(total, tensor, scale),
            lambda: self.across.all_reduce(total, 1.0),
        )

        def add() -> None:
            reduced.wait()
            with torch.no_grad():
                sums.add_(total)

        return WorkHandle("reduce-scatter", add, self.every)

    def _in_order(
        self, what: str, device: torch.device, inside: Callable[[], Handle], across: Callable[[], Handle]
    ) -> Handle:
        """Starts two hops, the second behind the first, without blocking the caller where that is possible."""
        if isinstance(self.inside, GlooCollectives):
            return Handles([inside(), across()])  # jobs of one thread

        def run() -> None:
            inside().wait()
            across().wait()

        # No stream orders the two hops on the host, so they are done before this returns; an error is raised in
        # wait(), as callers expect.
        if device.type == "cpu" and self._streams is None:
            return WorkHandle(what, run_now(run), self.every)
        streams = self._streams or torch.get_device_module(device)
        if self._stream is None:
            self._stream = streams.Stream(device)
        # The gradients were written on the caller's stream; without this the first hop would read incomplete ones.
        self._stream.wait_stream(streams.current_stream(device))
        with streams.stream(self._stream), torch.no_grad():
            run()
            # An event and not the work's own wait: it also covers what is queued after the collective, the
            # scaling and the sums.
            event = streams.Event()
            event.record(self._stream)
        # Explicitly: without an argument an event uses the stream of the current device, which need not be the model's.
        return WorkHandle(what, lambda: event.wait(streams.current_stream(device)), self.every)

    # --- inside the instance -----------------------------------------------------------------------------------------

    def all_gather(self, tensor: Tensor) -> Handle:
        return self.inside.all_gather(tensor)

    def gather_spans(self, tensor: Tensor, spans: Spans) -> Handle:
        return self.inside.gather_spans(tensor, spans)

    def all_to_all(
        self, received: Tensor, tensor: Tensor, received_sizes: Sequence[int], sizes: Sequence[int]
    ) -> Handle:
        return self.inside.all_to_all(received, tensor, received_sizes, sizes)

    def connect(self, device: torch.device, *, exchanges: bool) -> None:
        self.inside.connect(device, exchanges=exchanges)
        if not isinstance(self.across, GlooCollectives):
            self.across.all_reduce(torch.zeros(1, device=device), 1.0).wait()

    def abort(self) -> None:
        self.inside.abort()
        self.across.abort()


def run_now(run: Callable[[], object]) -> Callable[[], object]:
    """Runs at once, and returns a function that raises the error, where collectives raise it: in the wait."""
    done: Future[None] = Future()
    try:
        with torch.no_grad():
            run()
        done.set_result(None)
    except RuntimeError as error:
        done.set_exception(error)
    return done.result
