"""Collectives of torch's own backends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from ..layout import Spans
from .interface import Collectives, Handle
from .part_exchange import PartExchange
from .part_sums import add_parts_


class BackendCollectives(Collectives):
    """The backend's own collectives (NCCL and others), asynchronous on its own streams; see interface's [Note: why
    ranks agree over their hosts]."""

    _exchange: PartExchange | None = None
    _streams: Any = None  # those of a test, instead of the device's

    def abort(self) -> None:
        # They have groups of their own, and a kernel that spins in one keeps the device busy as well.
        for made in (*self.instances.values(), *([] if self.second is None else [self.second])):
            made.abort()
        self._abort_group(self.group)

    @staticmethod
    def _abort_group(group: ProcessGroup) -> None:
        for device in group._device_types:
            backend = group._get_backend(device)
            # Gloo runs nothing on a device; a group may have it for the host beside the device's backend.
            if backend.name() != "gloo":
                backend.abort()

    def connect(self, device: torch.device, *, exchanges: bool) -> None:
        every = torch.zeros(self.size, device=device)
        shard = every.chunk(self.size)[self.rank]
        # NCCL's memory does not come from torch's allocator: if that has taken all memory, connecting fails.
        with self.translated_errors("connecting"):
            self.group._reduce_scatter_base(shard, every, dist.ReduceScatterOptions()).wait()
            self.group._allgather_base(every, shard).wait()
            if exchanges:
                self._all_to_all(torch.empty_like(every), every).wait()

    def close(self) -> None:
        super().close()
        if self._exchange is not None:
            self._exchange.close()
            self._exchange = None
        if self.host is not self:
            self.host.close()

    def _end_of_queue(self, device: torch.device) -> Callable[[], bool] | None:
        if device.type == "cpu":
            return None
        streams = torch.get_device_module(device)
        event = streams.Event()
        event.record(streams.current_stream(device))
        ended: Callable[[], bool] = event.query
        return ended

    def _start(self, what: str, launch: Callable[..., Any], *args: Any) -> Handle:
        # NCCL connects when it starts, and notices a broken communicator then.
        try:
            work = launch(*args)
        except RuntimeError as error:
            self.raise_translated(what, error)
        self._count(what)
        return WorkHandle(what, work.wait, self)

    def all_reduce(self, tensor: Tensor, scale: float) -> Handle:
        tensor = as_real(tensor)
        options = dist.AllreduceOptions()
        _scale(tensor, scale)
        return self._start("all-reduce", self.group.allreduce, [tensor], options)

    def all_reduce_max(self, tensor: Tensor) -> Handle:
        return self._start("all-reduce", self.group.allreduce, [tensor], max_options())

    def reduce_scatter(self, tensor: Tensor, scale: float) -> Handle:
        tensor = as_real(tensor)
        options = dist.ReduceScatterOptions()
        shard = tensor.view(self.size, -1)[self.rank]  # chunk() would make a view for each rank
        _scale(tensor, scale)
        return self._start("reduce-scatter", self.group._reduce_scatter_base, shard, tensor, options)

    def reduce_scatter_into(self, sums: Tensor, tensor: Tensor, scale: float) -> Handle:
        # An exchange and not a reduction: a backend sums in the dtype that it sends, in an order of its own.
        sums = as_real(sums)
        tensor = as_real(tensor)
        if self._exchange is None:
            self._exchange = PartExchange(tensor.device, self._all_to_all, self._streams)
        exchange = self._exchange
        with self.translated_errors("reduce-scatter"):
            started = exchange.start(tensor, lambda parts: add_parts_(sums, parts, scale), self.size)
        self._count("reduce-scatter")
        return _ExchangeHandle(self, lambda: exchange.finish(started))

    def _all_to_all(self, received: Tensor, tensor: Tensor) -> Any:
        return self.group.alltoall_base(received, tensor, [], [], dist.AllToAllOptions())

    def all_gather(self, tensor: Tensor) -> Handle:
        tensor = as_real(tensor)
        shard = tensor.view(self.size, -1)[self.rank]
        return self._start("all-gather", self.group._allgather_base, tensor, shard)

    def gather_spans(self, tensor: Tensor, spans: Spans) -> Handle:
        # In place, without the scratch memory of an uneven gather: a broadcast for each span, all in flight at once.
        factor = 2 if tensor.is_complex() else 1
        tensor = as_real(tensor)
        works = list[Any]()
        with self.translated_errors("all-gather"):
            for rank, of_rank in enumerate(spans):
                options = dist.BroadcastOptions()
                options.rootRank = rank
                works += [self.group.broadcast([tensor[factor * a : factor * b]], options) for a, b in of_rank]
        self._count("all-gather")
        return WorkHandle("all-gather", lambda: [work.wait() for work in works], self)

    def all_to_all(
        self, received: Tensor, tensor: Tensor, received_sizes: Sequence[int], sizes: Sequence[int]
    ) -> Handle:
        factor = 2 if tensor.is_complex() else 1
        come = [factor * size for size in received_sizes]
        go = [factor * size for size in sizes]
        received = as_real(received)
        tensor = as_real(tensor)
        return self._start("all-to-all", self.group.alltoall_base, received, tensor, come, go, dist.AllToAllOptions())

    def broadcast(self, tensor: Tensor) -> Handle:
        tensor = as_real(tensor)
        return self._start("broadcast", self.group.broadcast, [tensor], dist.BroadcastOptions())


def as_real(tensor: Tensor) -> Tensor:
    """Returns the same memory as real numbers, two for a complex one. NCCL has no complex numbers, and torch hides that
    for some of its collectives only; sums, real factors and copies are the same for both."""
    return torch.view_as_real(tensor).view(-1) if tensor.is_complex() else tensor


class WorkHandle(Handle):
    """The handle of a collective that a function waits for."""

    def __init__(self, what: str, wait: Callable[[], object], collectives: Collectives) -> None:
        self._what = what
        self._collectives = collectives
        self._wait: Callable[[], object] | None = wait

    def wait(self) -> None:
        if self._wait is None:  # gloo writes the result once more in a second wait
            return
        try:
            self._wait()
        except RuntimeError as error:
            self._collectives.raise_translated(self._what, error)
        self._wait = None


class _ExchangeHandle(Handle):
    def __init__(self, collectives: Collectives, finish: Callable[[], object]) -> None:
        self._collectives = collectives
        self._finish = finish

    def wait(self) -> None:
        with self._collectives.translated_errors("reduce-scatter"):
            self._finish()


def max_options() -> dist.AllreduceOptions:
    """Returns the options of an all-reduce that computes the element-wise maximum."""
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
    return options


def _scale(tensor: Tensor, scale: float) -> None:
    """Scales before the sum, as torch DDP does, for the same bits; and a sum of 16-bit gradients overflows later."""
    if scale != 1.0:  # no pass over the tensor that changes no bit
        tensor.mul_(scale)
