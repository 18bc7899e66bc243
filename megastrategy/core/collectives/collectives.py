"""Every byte that leaves a rank goes through here, on gloo by way of ``gloo_rings``, and where the optimizer has
several instances, through ``instanced_collectives``. They and ``process_groups`` are the only files that call
torch.distributed.

Methods of the process group itself are called, never the functions of ``torch.distributed``, which look up the
default group; so ranks may be processes or threads. All operations are in place on 1-D contiguous tensors and return
at once with a :class:`Handle`; they run in the order in which they were started, which must be the same on every
rank.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import pickle
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from ..errors import CollectiveError, MegastrategyError
from .gloo_rings import GlooRings
from .lent_tensors import LentTensors
from .process_groups import host_group
from .roll_call import Meeting, Progress, RollCall
from .tensor_parts import add_parts_, chunks_by_dtype
from .worker import Worker

BROADCAST_CHUNK_BYTES = 64 * 2**20


class Handle(ABC):
    """A started collective.

    Attributes:
        ran_ns: after :meth:`wait`, when it began and ended (``time.perf_counter_ns()``), where that is known (gloo).
    """

    ran_ns: tuple[int, int] | None = None

    @abstractmethod
    def wait(self) -> None:
        """Returns when the result may be used (on CUDA: by work queued from now on). Raises CollectiveError if it
        failed."""


class Handles(Handle):
    """Several collectives, in the order of their start, as one."""

    def __init__(self, handles: Sequence[Handle]) -> None:
        self._handles = handles

    def wait(self) -> None:
        for handle in self._handles:
            handle.wait()
        ran = [handle.ran_ns for handle in self._handles]
        if ran[0] is not None and ran[-1] is not None:
            self.ran_ns = ran[0][0], ran[-1][1]


_PROBE_TAG = 2**31 - 1
"""No exchange counts so far."""


class Collectives(ABC):
    """What the engine asks of a process group.

    Args:
        group: its ranks, and how they send.
        roll_call: finds out before a collective that users call whether all ranks do; None where there is no store to
            meet in, as for a group that torch.distributed does not know.

    Attributes:
        roll_call: as passed.
        progress: counts the collectives that this rank starts.
        instances: made from these for parts of the ranks, by size (see :func:`.shard_collectives`).
        why_give_up: asked now and then by a caller that waits, with the collective's name and its number among those
            started, from 1: why it waits in vain, or an empty string. A backend knows when a peer's process ends, but
            not that it left what was begun together.
    """

    why_give_up: Callable[[str, int], str] | None = None

    def __init__(self, group: ProcessGroup, roll_call: RollCall | None = None) -> None:
        self.group = group
        self.rank: int = group.rank()
        self.size: int = group.size()
        self.roll_call = roll_call
        self.progress = roll_call.progress if roll_call is not None else Progress()
        self.instances: dict[int, Collectives] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        """In copies and pickles of what holds them, a Trainer in mid-fit for one, there is None: connections are of
        this process, and a copy sends nothing."""
        return type(None), ()

    @property
    def is_rank_zero(self) -> bool:
        """Whether this rank is the one that gets what is gathered for one."""
        return self.rank == 0

    @property
    def num_started(self) -> int:
        """How many collectives this rank has started."""
        return self.progress.num_started

    @property
    def last_started(self) -> Sequence[str]:
        """The kinds of the last of them, the newest last."""
        return self.progress.last_started

    def require_all_ranks(self, what: str) -> None:
        """Returns when all ranks are about to do the same, which is collective and called ``what`` by the user.

        Raises:
            NotOnAllRanksError: if they are not, within bounded time.
        """
        with self.meeting(what):
            pass

    @contextlib.contextmanager
    def meeting(self, what: str, **options: Any) -> Iterator[Meeting]:
        """As :meth:`.RollCall.meeting`. Where there is no roll call, all ranks are taken to come."""
        if self.roll_call is None or self.size == 1:
            yield Meeting(True)
            return
        self._finish_started()
        with contextlib.ExitStack() as stack:
            with self.named_failures(what):
                meeting = stack.enter_context(self.roll_call.meeting(what, self.probe, **options))
            yield meeting

    @contextlib.contextmanager
    def named_failures(self, what: str) -> Iterator[None]:
        """What a backend, or a store that ended with its process, raises becomes a CollectiveError."""
        try:
            yield
        except MegastrategyError:
            raise
        except RuntimeError as error:
            raise _failed(what, self, error) from error

    def _count(self, what: str) -> None:
        """A collective is started."""
        self.progress.start(what)
        if self.roll_call is not None:
            self.roll_call.resume()

    def probe(self, rank: int) -> None:  # noqa: B027 - a backend that cannot tell leaves it to the patience
        """Raises a RuntimeError if the rank's process has ended."""

    def _finish_started(self) -> None:  # noqa: B027 - nothing is counted where waiting does not keep the host
        """Waits for what this rank has started."""

    @abstractmethod
    def all_reduce(self, tensor: Tensor, scale: float, *, scale_sum: bool = False) -> Handle:
        """``tensor`` becomes the sum over ranks of ``scale * tensor``; with ``scale_sum``, ``scale`` times the sum."""

    @abstractmethod
    def all_reduce_max(self, tensor: Tensor) -> Handle:
        """``tensor`` becomes the element-wise maximum over ranks."""

    @abstractmethod
    def reduce_scatter(self, tensor: Tensor, scale: float, *, scale_sum: bool = False) -> Handle:
        """The rank-th of ``size`` equal parts of ``tensor`` becomes the sum over ranks of ``scale *`` that part (with
        ``scale_sum``, ``scale`` times the sum); the rest is undefined."""

    @abstractmethod
    def reduce_scatter_into(self, sums: Tensor, tensor: Tensor, scale: float, *, scale_sum: bool = False) -> Handle:
        """Adds to ``sums`` what :meth:`reduce_scatter` would leave in this rank's part of ``tensor``, computed in the
        dtype of ``sums`` and in the order of the ranks; ``tensor`` is sent as it is, and undefined afterwards."""

    @abstractmethod
    def all_gather(self, tensor: Tensor) -> Handle:
        """Every rank's own part (rank-th of ``size`` equal parts) reaches all ranks; ``tensor`` is then equal
        everywhere."""

    @abstractmethod
    def broadcast(self, tensor: Tensor) -> Handle:
        """``tensor`` becomes rank 0's."""

    def close(self) -> None:
        """Releases threads and scratch memory; the group stays the caller's. May be called again, and used again
        afterwards."""
        if self.roll_call is not None:
            self.roll_call.dismiss()

    def broadcast_all(self, tensors: Sequence[Tensor]) -> None:
        """Every tensor (any shape and dtype) becomes rank 0's, a few coalesced broadcasts a dtype."""
        for chunk in chunks_by_dtype(tensors, BROADCAST_CHUNK_BYTES):
            flat = torch.cat([tensor.detach().reshape(-1) for tensor in chunk])
            self.broadcast(flat).wait()
            start = 0
            for tensor in chunk:
                tensor.detach().copy_(flat[start : start + tensor.numel()].view(tensor.shape))
                start += tensor.numel()

    def all_gather_bytes(self, data: bytes, device: torch.device) -> list[bytes]:
        """Every rank's ``data``, by rank; lengths may differ."""
        lengths = torch.zeros(self.size, dtype=torch.int64, device=device)
        lengths[self.rank] = len(data)
        self.all_gather(lengths).wait()
        sizes = [int(size) for size in lengths.tolist()]
        width = max(1, max(sizes))
        table = torch.zeros(self.size, width, dtype=torch.uint8, device=device)
        table[self.rank, : len(data)] = torch.frombuffer(bytearray(data) or bytearray(1), dtype=torch.uint8)[
            : len(data)
        ].to(device)
        self.all_gather(table.view(-1)).wait()
        received = bytearray(width * self.size)
        torch.frombuffer(received, dtype=torch.uint8).copy_(table.view(-1))
        return [bytes(received[width * rank : width * rank + size]) for rank, size in enumerate(sizes)]

    def all_gather_objects(self, value: Any, device: torch.device) -> list[Any]:
        """Every rank's picklable ``value``, by rank. The bytes come from the group's own ranks and are trusted."""
        return [pickle.loads(data) for data in self.all_gather_bytes(pickle.dumps(value), device)]


def make_collectives(group: ProcessGroup, device: torch.device) -> Collectives:
    """The implementation for the backend that ``group`` uses on ``device``; none is used where a rank is alone."""
    if group.size() == 1:
        return LoneCollectives(group)
    backend = group._get_backend(device)
    known = dist.distributed_c10d._world.pg_map.get(group)
    roll_call = RollCall(known[1], group.rank(), group.size(), backend.options._timeout) if known is not None else None
    return (GlooCollectives if backend.name() == "gloo" else BackendCollectives)(group, roll_call)


def host_collectives() -> Collectives:
    """Over all ranks on a gloo group made for it, for tensors and objects in host memory. All ranks call it together.

    Raises:
        ValueError: if torch.distributed is not initialised.
    """
    return make_collectives(host_group(), torch.device("cpu"))


class LoneCollectives(Collectives):
    """One rank: nothing is sent, no thread is started, and nothing is counted, since there is nobody to keep step with.

    A sum over ranks is the tensor itself, and so is what is gathered or broadcast. Only a scale is left to apply.
    """

    def all_reduce(self, tensor: Tensor, scale: float, *, scale_sum: bool = False) -> Handle:
        if scale != 1.0:  # else a pass over the tensor that changes no bit
            tensor.mul_(scale)
        return _Done()

    def all_reduce_max(self, tensor: Tensor) -> Handle:
        return _Done()

    def reduce_scatter(self, tensor: Tensor, scale: float, *, scale_sum: bool = False) -> Handle:
        return self.all_reduce(tensor, scale)

    def reduce_scatter_into(self, sums: Tensor, tensor: Tensor, scale: float, *, scale_sum: bool = False) -> Handle:
        add_parts_(sums, [tensor], scale, scale_sum)
        return _Done()

    def all_gather(self, tensor: Tensor) -> Handle:
        return _Done()

    def broadcast(self, tensor: Tensor) -> Handle:
        return _Done()

    def broadcast_all(self, tensors: Sequence[Tensor]) -> None:
        """They are rank 0's: not even copied."""


class _Done(Handle):
    """Of what ended when it began."""

    def __init__(self) -> None:
        now_ns = time.perf_counter_ns()
        self.ran_ns = now_ns, now_ns

    def wait(self) -> None:
        """There is nothing to wait for."""


class BackendCollectives(Collectives):
    """The backend's own collectives (NCCL and others), asynchronous on its own streams."""

    def _begun(self, what: str, work: Any, then: Callable[[], object] | None = None) -> Handle:
        self._count(what)
        return WorkHandle(what, work, self, then)

    def all_reduce(self, tensor: Tensor, scale: float, *, scale_sum: bool = False) -> Handle:
        options = dist.AllreduceOptions()
        options.reduceOp, then = self._reduction(tensor, tensor, scale, scale_sum)
        return self._begun("all-reduce", self.group.allreduce([tensor], options), then)

    def all_reduce_max(self, tensor: Tensor) -> Handle:
        return self._begun("all-reduce", self.group.allreduce([tensor], _max_options()))

    def reduce_scatter(self, tensor: Tensor, scale: float, *, scale_sum: bool = False) -> Handle:
        own = tensor.chunk(self.size)[self.rank]
        options = dist.ReduceScatterOptions()
        options.reduceOp, then = self._reduction(tensor, own, scale, scale_sum)
        return self._begun("reduce-scatter", self.group._reduce_scatter_base(own, tensor, options), then)

    def reduce_scatter_into(self, sums: Tensor, tensor: Tensor, scale: float, *, scale_sum: bool = False) -> Handle:
        received = torch.empty_like(tensor)
        work = self.group.alltoall_base(received, tensor, [], [], dist.AllToAllOptions())
        parts = received.chunk(self.size)
        return self._begun("reduce-scatter", work, lambda: add_parts_(sums, parts, scale, scale_sum))

    def _reduction(
        self, tensor: Tensor, result: Tensor, scale: float, scale_sum: bool
    ) -> tuple[dist.ReduceOp, Callable[[], object] | None]:
        """The operation for the backend, and what is left to be done when it has ended."""
        if not scale_sum:
            tensor.mul_(scale)
            return dist.ReduceOp(dist.ReduceOp.SUM), None
        if scale == 1.0 / self.size and self.group._get_backend(tensor.device).name() == "nccl":
            return dist.ReduceOp(dist.ReduceOp.AVG), None
        return dist.ReduceOp(dist.ReduceOp.SUM), lambda: result.mul_(scale)

    def all_gather(self, tensor: Tensor) -> Handle:
        own = tensor.chunk(self.size)[self.rank]
        return self._begun("all-gather", self.group._allgather_base(tensor, own))

    def broadcast(self, tensor: Tensor) -> Handle:
        return self._begun("broadcast", self.group.broadcast([tensor], dist.BroadcastOptions()))


class GlooCollectives(Collectives):
    """Gloo, with :class:`~.gloo_rings.GlooRings` for reduce-scatter and all-gather.

    One thread carries out everything in order, so the caller's thread (autograd's, during backward) goes on; it mostly
    waits outside the GIL.
    """

    def __init__(self, group: ProcessGroup, roll_call: RollCall | None = None) -> None:
        super().__init__(group, roll_call)
        self._worker: Worker | None = None
        self._lent = LentTensors()  # in the worker's thread
        self._scratch: dict[torch.dtype, Tensor] = {}
        self._rings = GlooRings(group, self._scratch, self._lent)
        self._probes: list[Any] = []  # kept, as gloo would wait for them

    def all_reduce(self, tensor: Tensor, scale: float, *, scale_sum: bool = False) -> Handle:
        def run() -> None:
            if not scale_sum:
                tensor.mul_(scale)
            self.group.allreduce([self._lend(tensor)]).wait()
            if scale_sum:
                tensor.mul_(scale)

        return self._start("all-reduce", run)

    def all_reduce_max(self, tensor: Tensor) -> Handle:
        return self._start("all-reduce", lambda: self.group.allreduce([self._lend(tensor)], _max_options()).wait())

    def reduce_scatter(self, tensor: Tensor, scale: float, *, scale_sum: bool = False) -> Handle:
        return self._start("reduce-scatter", lambda: self._rings.reduce_scatter(tensor, scale, scale_sum=scale_sum))

    def reduce_scatter_into(self, sums: Tensor, tensor: Tensor, scale: float, *, scale_sum: bool = False) -> Handle:
        return self._start("reduce-scatter", lambda: add_parts_(sums, self._rings.all_to_all(tensor), scale, scale_sum))

    def all_gather(self, tensor: Tensor) -> Handle:
        return self._start("all-gather", lambda: self._rings.all_gather(tensor))

    def broadcast(self, tensor: Tensor) -> Handle:
        return self._start("broadcast", lambda: self._broadcast(tensor))

    def close(self) -> None:
        super().close()
        if self._worker is not None:
            _end(self._worker, self._lent)
            self._worker = None
        self._scratch.clear()

    def _start(self, what: str, run: Callable[[], object]) -> Handle:
        if self._worker is None:
            self._worker = Worker()
            # At exit too: a thread that the interpreter stops inside a call of the backend would end the process badly.
            weakref.finalize(self, _end, self._worker, self._lent)
        self._count(what)
        return _FutureHandle(what, self._worker.submit(run), self, self.num_started)

    def probe(self, rank: int) -> None:
        """Gloo refuses to begin a message on a connection that the other end has closed. Nobody receives this one."""
        self._probes.append(self.group.send([torch.zeros(1, dtype=torch.uint8)], rank, _PROBE_TAG))

    def _finish_started(self) -> None:
        if self._worker is not None:
            concurrent.futures.wait([self._worker.submit(lambda: None)])

    def glance(self, what: str, number: int) -> None:
        """Called while the ``number``-th collective that was started takes long.

        Raises:
            CollectiveError: if it will not complete.
        """
        if self.roll_call is not None:
            self.roll_call.say_where(f"waiting in {what}", number)
        if self.why_give_up is not None and (reason := self.why_give_up(what, number)):
            if self._worker is not None:
                self._worker.stop()  # what it is in ends with a peer's process; close() shall not wait for that
                self._worker = None
            raise CollectiveError(f"rank {self.rank} of {self.size}: {what} was given up: {reason}")

    def _broadcast(self, tensor: Tensor) -> None:
        self.group.broadcast([self._lend(tensor)], dist.BroadcastOptions()).wait()

    def _lend(self, tensor: Tensor) -> Tensor:
        """What a thread of gloo's is given in place of ``tensor``."""
        return self._lent.lend(tensor)


class WorkHandle(Handle):
    """Of something with a ``wait()``, as backends return it."""

    def __init__(
        self, what: str, work: Any, collectives: Collectives, then: Callable[[], object] | None = None
    ) -> None:
        self._what, self._work, self._collectives, self._then = what, work, collectives, then

    def wait(self) -> None:
        if self._work is None:  # a second wait of gloo's would write the result once more
            return
        try:
            self._work.wait()
        except RuntimeError as error:
            raise _failed(self._what, self._collectives, error) from error
        self._work = None
        if self._then is not None:
            self._then()
            self._then = None  # and with it the memory that it reads


class _FutureHandle(Handle):
    _GLANCE_S = 1.0

    def __init__(self, what: str, future: Future[tuple[int, int]], collectives: GlooCollectives, number: int) -> None:
        self._what, self._future, self._collectives, self._number = what, future, collectives, number

    def wait(self) -> None:
        try:
            while not (self._future.done() or concurrent.futures.wait([self._future], self._GLANCE_S).done):
                self._collectives.glance(self._what, self._number)
            self.ran_ns = self._future.result()
        except CollectiveError:
            raise
        except RuntimeError as error:
            raise _failed(self._what, self._collectives, error) from error


def _end(worker: Worker, lent: LentTensors) -> None:
    """See [Note: gloo lets go after it is done]."""
    if worker.close():
        lent.wait_until_returned(Worker.CLOSE_TIMEOUT_S)


def _max_options() -> dist.AllreduceOptions:
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
    return options


def _failed(what: str, collectives: Collectives, error: RuntimeError) -> CollectiveError:
    return CollectiveError(
        f"rank {collectives.rank} of {collectives.size}: {what} did not complete. Most often another rank ended with "
        "an error, was killed, or is stuck longer than the group's timeout: look at the first error among the "
        f"ranks. The backend said: {error}"
    )
