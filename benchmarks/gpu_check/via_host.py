"""Collectives in host memory for tensors on an accelerator, so that two ranks share one GPU.

[Note: collectives through host memory]
Gloo and the rings read and write host memory, and know no streams. A thread runs the collectives in the order of their
start: it waits until the caller's stream has reached the place where the collective was started, copies to pinned
memory on a stream of its own, lets the host's collective run, copies back on that stream, and records an event.
``wait()`` waits for the host's part, and makes the caller's current stream wait for the event. So a tensor is in flight
from start to wait, as with NCCL, and a missing wait shows.

The pinned memory is reused without a wait of the host: both copies are on one stream, the next copy to it is queued
behind the last one from it, and the host's part has ended before that.
"""

from __future__ import annotations

import contextlib
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megastrategy.core import collectives as package
from megastrategy.core import devices
from megastrategy.core.collectives import CALL_ON_EVERY_RANK, Collectives, Handle, Worker, instanced
from megastrategy.core.collectives.interface import Watchdog
from megastrategy.core.layout import Spans

_POLL_S = 5e-5
"""Between two checks whether the device has copied: a fifth of gloo's time for its smallest message."""

_ALL = slice(None)


class ViaHostCollectives(Collectives):
    """Copies to the host, and runs the collectives there; see [Note: collectives through host memory].

    Args:
        real: the collectives of host memory; closed with these.
        streams: ``Stream``, ``Event``, ``stream`` and ``current_stream`` of the device.
        staging: shares its thread, stream and memory; instances of the optimizer use those of all ranks, so that all
            collectives of a rank run in one order.
    """

    def __init__(
        self,
        real: Collectives,
        device: torch.device,
        streams: Any = None,
        staging: ViaHostCollectives | None = None,
    ) -> None:
        super().__init__(real.group, real.rank_check)
        self.real, self.progress = real, real.progress
        self.device, self.streams = device, streams or torch.get_device_module(device)
        self._staging = staging
        self._worker: Worker | None = None
        self._stream: Any = None
        self._memory: list[Tensor] = []  # pinned, in bytes: for each tensor of one collective

    @property
    def watchdog(self) -> Watchdog | None:
        """The host's, since a rank waits for others there."""
        return self.real.watchdog

    @watchdog.setter
    def watchdog(self, watchdog: Watchdog | None) -> None:
        self.real.watchdog = watchdog

    @property
    def is_rank_zero(self) -> bool:
        return self.real.is_rank_zero

    def all_reduce(self, tensor: Tensor, scale: float) -> Handle:
        return self._start(lambda copy: self.real.all_reduce(copy, scale), (tensor, _ALL, _ALL))

    def all_reduce_max(self, tensor: Tensor) -> Handle:
        return self._start(self.real.all_reduce_max, (tensor, _ALL, _ALL))

    def reduce_scatter(self, tensor: Tensor, scale: float) -> Handle:
        def run(copy: Tensor) -> Handle:
            return self.real.reduce_scatter(copy, scale)

        return self._start(run, (tensor, _ALL, self._own(tensor)))

    def reduce_scatter_into(self, sums: Tensor, tensor: Tensor, scale: float) -> Handle:
        def run(sums_copy: Tensor, copy: Tensor) -> Handle:
            return self.real.reduce_scatter_into(sums_copy, copy, scale)

        # The sums are copied as well: additions on the device would give different bits than the host's.
        return self._start(run, (sums, _ALL, _ALL), (tensor, _ALL, slice(0)))

    def all_gather(self, tensor: Tensor) -> Handle:
        return self._start(self.real.all_gather, (tensor, self._own(tensor), _ALL))

    def gather_spans(self, tensor: Tensor, spans: Spans) -> Handle:
        # All of it is copied both ways, or elements outside of the spans would be replaced by old host memory.
        return self._start(lambda copy: self.real.gather_spans(copy, spans), (tensor, _ALL, _ALL))

    def all_to_all(
        self, received: Tensor, tensor: Tensor, received_sizes: Sequence[int], sizes: Sequence[int]
    ) -> Handle:
        def run(coming: Tensor, copy: Tensor) -> Handle:
            return self.real.all_to_all(coming, copy, received_sizes, sizes)

        return self._start(run, (received, slice(0), _ALL), (tensor, _ALL, slice(0)))

    def broadcast(self, tensor: Tensor) -> Handle:
        return self._start(self.real.broadcast, (tensor, _ALL if self.rank == 0 else slice(0), _ALL))

    def require_all_ranks(self, what: str, remedy: str = CALL_ON_EVERY_RANK) -> None:
        self._finish_started()
        self.real.require_all_ranks(what, remedy)

    def probe(self, rank: int) -> None:
        self.real.probe(rank)

    def close(self) -> None:
        if self._worker is not None:
            self._worker.close()
            self._worker = None
        self._memory.clear()
        self.real.close()

    @property
    def _owner(self) -> ViaHostCollectives:
        return self._staging or self

    def _own(self, tensor: Tensor) -> slice:
        numel = tensor.numel() // self.size
        return slice(self.rank * numel, (self.rank + 1) * numel)

    def _submit(self, run: Callable[[], object]) -> Future[tuple[int, int]]:
        if self._worker is None:
            self._worker = Worker()
            # At exit too: the process would crash if the interpreter stopped the thread in a call of the device.
            weakref.finalize(self, self._worker.close)
        return self._worker.submit(run)

    def _finish_started(self) -> None:
        # Failed ones raise where they are waited for.
        with contextlib.suppress(RuntimeError):
            self._owner._submit(lambda: None).result()

    def _start(self, run: Callable[..., Handle], *copied: tuple[Tensor, slice, slice]) -> Handle:
        """Starts ``run`` on host copies of tensors; ``copied`` has the tensors with the elements to
        copy there, and back."""
        owner = self._owner
        tensors = [tensor for tensor, _, _ in copied]
        # Data that ranks agree on is on the host already. It goes through the thread too, and must
        # not overtake earlier collectives.
        if all(tensor.device.type == "cpu" != self.device.type for tensor in tensors):
            return _ViaHostHandle(owner._submit(lambda: run(*tensors).wait()))
        ready, done = self.streams.Event(), self.streams.Event()
        # In the caller's thread, whose stream has just written the tensors.
        ready.record(self.streams.current_stream(self.device))
        future = owner._submit(lambda: owner._carry_out(run, copied, ready, done))
        return _ViaHostHandle(future, lambda: done.wait(self.streams.current_stream(self.device)))

    def _carry_out(
        self, run: Callable[..., Handle], copied: Sequence[tuple[Tensor, slice, slice]], ready: Any, done: Any
    ) -> None:
        if self._stream is None:
            self._stream = self.streams.Stream(self.device)
        copies = [self._host_memory(place, tensor) for place, (tensor, _, _) in enumerate(copied)]
        is_on_host = self.streams.Event()
        with self.streams.stream(self._stream):
            ready.wait(self._stream)
            for (tensor, there, _), copy in zip(copied, copies, strict=True):
                copy[there].copy_(tensor.detach()[there], non_blocking=True)
            is_on_host.record(self._stream)
            # Polled, since a wait would hold the GIL on some devices, and block backward. On the stream's
            # device: a thread begins on the first device, where a query would create a context, which takes
            # memory of another rank.
            while not is_on_host.query():
                time.sleep(_POLL_S)
        run(*copies).wait()
        with self.streams.stream(self._stream):
            for (tensor, _, back), copy in zip(copied, copies, strict=True):
                tensor.detach()[back].copy_(copy[back], non_blocking=True)
            done.record(self._stream)

    def _host_memory(self, place: int, tensor: Tensor) -> Tensor:
        """Returns host memory for the ``place``-th tensor of a collective, pinned if a device copies from it."""
        nbytes = tensor.numel() * tensor.dtype.itemsize
        if place == len(self._memory):
            self._memory.append(torch.empty(0, dtype=torch.uint8, device="cpu"))
        if self._memory[place].numel() < nbytes:
            self._memory[place] = devices.pinned_memory(nbytes, torch.uint8, self.device)
        return self._memory[place][:nbytes].view(tensor.dtype)


class _ViaHostHandle(Handle):
    def __init__(self, future: Future[tuple[int, int]], then: Callable[[], object] = lambda: None) -> None:
        self._future, self._then = future, then

    def wait(self) -> None:
        # Peers are checked in the thread, by the host's collective, and its error is raised here.
        self.ran_ns = self._future.result()
        # For every stream that waits: a reader on another one must not see incomplete results.
        self._then()


# --- in place of the engine's own -------------------------------------------------------------------------------------

_make_collectives = package.make_collectives
_like = package._like
_make_instance_collectives = instanced.make_instance_collectives
_destroy_instances = instanced.destroy_instances


def install() -> None:
    """Lets the engine in this process send tensors on an accelerator by gloo. Elsewhere it refuses that."""
    modules = [module for name, module in sys.modules.items() if name.partition(".")[0] == "megastrategy"]
    for original, other in (
        (_make_collectives, make_collectives),
        (_like, like),
        (_make_instance_collectives, make_instance_collectives),
        (_destroy_instances, destroy_instances),
    ):
        for module in modules:
            for name in [name for name, value in vars(module).items() if value is original]:
                setattr(module, name, other)


def make_collectives(group: ProcessGroup, device: torch.device) -> Collectives:
    if device.type == "cpu" or group.size() == 1 or group._get_backend(device).name() != "gloo":
        return _make_collectives(group, device)
    real = _make_collectives(group, torch.device("cpu"))
    return ViaHostCollectives(real, device)


def like(every: Collectives, group: ProcessGroup) -> Collectives:
    if not isinstance(every, ViaHostCollectives):
        return _like(every, group)
    return ViaHostCollectives(_like(every.real, group), every.device, every.streams)


def make_instance_collectives(every: Collectives, instance: ProcessGroup, across: ProcessGroup) -> Collectives:
    if not isinstance(every, ViaHostCollectives):
        return _make_instance_collectives(every, instance, across)
    real = _make_instance_collectives(every.real, instance, across)
    return ViaHostCollectives(real, every.device, every.streams, staging=every)


def destroy_instances(every: Collectives) -> None:
    if isinstance(every, ViaHostCollectives):
        every.real.instances = {
            key: made.real if isinstance(made, ViaHostCollectives) else made for key, made in every.instances.items()
        }
        every.instances.clear()
        _destroy_instances(every.real)
    else:
        _destroy_instances(every)
