"""Collectives of gloo, with rings instead of its own reduce-scatter and all-gather."""

from __future__ import annotations

import concurrent.futures
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from ..layout import Spans
from .backend import max_options
from .gloo_references import GlooReferences
from .gloo_rings import GlooRings
from .interface import CHECK_PEERS_S, Collectives, Handle
from .part_sums import add_parts_
from .process_groups import PROBE_TAG
from .rank_check import RankCheck
from .worker import Worker

_RING_AT_MOST = 4
"""The largest number of ranks whose maximum uses gloo's own ring, of at most 6 hops."""


class GlooCollectives(Collectives):
    """Gloo, with :class:`~.gloo_rings.GlooRings` for reduce-scatter and all-gather.

    One thread runs everything in order, so the caller's thread (autograd's, during backward) continues; the thread
    mostly waits outside of the GIL.

    Args:
        runner: has the thread for these, too, if they are of some of its ranks; kept by the owner of these.
    """

    def __init__(
        self, group: ProcessGroup, rank_check: RankCheck | None = None, runner: GlooCollectives | None = None
    ) -> None:
        super().__init__(group, rank_check)
        self._runner = None if runner is None else weakref.ref(runner)
        self._worker: Worker | None = None
        # In the worker's thread, which uses scratch memory for one collective at a time.
        self._gloo_references: GlooReferences = GlooReferences() if runner is None else runner._gloo_references
        self._scratch: dict[torch.dtype, Tensor] = {} if runner is None else runner._scratch
        self._rings = GlooRings(group, self._scratch, self._gloo_references)
        self._probes: list[Any] = []  # kept, since gloo would wait for a dropped one

    def all_reduce(self, tensor: Tensor, scale: float) -> Handle:
        def run() -> None:
            # A factor of one would be a pass over the tensor that changes no bit.
            if scale != 1.0:
                tensor.mul_(scale)
            self.group.allreduce([self._sent(tensor)]).wait()

        return self._start("all-reduce", run)

    def all_reduce_max(self, tensor: Tensor) -> Handle:
        # A ring has 2 (size - 1) hops, which take the time of small messages: 254 of them before each batch, and after
        # each backward, of 128 ranks. With few ranks gloo's own ring, a single call, is faster.
        if self.size > _RING_AT_MOST:
            return self._start("all-reduce", lambda: self._rings.all_reduce_max(tensor))
        return self._start("all-reduce", lambda: self.group.allreduce([self._sent(tensor)], max_options()).wait())

    def reduce_scatter(self, tensor: Tensor, scale: float) -> Handle:
        return self._start("reduce-scatter", lambda: self._rings.reduce_scatter(tensor, scale))

    def reduce_scatter_into(self, sums: Tensor, tensor: Tensor, scale: float) -> Handle:
        return self._start("reduce-scatter", lambda: add_parts_(sums, self._rings.all_to_all(tensor), scale))

    def all_gather(self, tensor: Tensor) -> Handle:
        return self._start("all-gather", lambda: self._rings.all_gather(tensor))

    def gather_spans(self, tensor: Tensor, spans: Spans) -> Handle:
        return self._start("all-gather", lambda: self._rings.gather_spans(tensor, spans))

    def all_to_all(
        self, received: Tensor, tensor: Tensor, received_sizes: Sequence[int], sizes: Sequence[int]
    ) -> Handle:
        parts = tensor.split(list(sizes))
        coming = received.split(list(received_sizes))
        return self._start("all-to-all", lambda: self._rings.exchange_parts(parts, coming))

    def broadcast(self, tensor: Tensor) -> Handle:
        options = dist.BroadcastOptions()
        return self._start("broadcast", lambda: self.group.broadcast([self._sent(tensor)], options).wait())

    def close(self) -> None:
        super().close()
        if self._worker is not None:
            _end(self._worker, self._gloo_references)
            self._worker = None
        self._scratch.clear()

    def _start(self, what: str, run: Callable[[], object]) -> Handle:
        runner = None if self._runner is None else self._runner()
        if runner is not None:
            return runner._start(what, run)
        if self._worker is None:
            # At the first use, and again after close(), which promises that these may be used afterwards.
            self._worker = Worker()
            # At exit too: a thread that the interpreter stops inside a call of the backend would end the process badly.
            weakref.finalize(self, _end, self._worker, self._gloo_references)
        # Counted in the caller's thread, in the order of the program: ranks compare the number.
        self._count(what)
        return _FutureHandle(what, self._worker.submit(run), self, self.progress.num_started)

    def probe(self, rank: int) -> None:
        """Raises a RuntimeError if the rank's process has ended: gloo then refuses to begin a message. No
        rank receives this one."""
        self._probes.append(self.group.send([torch.zeros(1, dtype=torch.uint8, device="cpu")], rank, PROBE_TAG))

    def _finish_started(self) -> None:
        if self._worker is not None:
            # An empty job behind all others. Failed ones count as finished; their handles raise.
            future = self._worker.submit(lambda: None)
            _FutureHandle(self.progress.last_started, future, self, self.progress.num_started).wait_for_end()

    def _give_up(self, what: str, reason: str) -> NoReturn:
        if self._worker is not None:
            self._worker.stop()  # its job may end only with a peer's process: close() must not wait
            self._worker = None
        super()._give_up(what, reason)

    def _sent(self, tensor: Tensor) -> Tensor:
        # see gloo_references' [Note: gloo releases tensors after completion]
        return self._gloo_references.view_for_gloo(tensor)


class HostCollectives(GlooCollectives):
    """Gloo for the hosts of a device's ranks, which exchange few bytes, and wait for each other in each step."""

    def all_reduce_max(self, tensor: Tensor) -> Handle:
        return self._start("all-reduce", lambda: self._rings.all_reduce_max(tensor))


class _FutureHandle(Handle):
    def __init__(self, what: str, future: Future[tuple[int, int]], collectives: GlooCollectives, number: int) -> None:
        self._what = what
        self._future = future
        self._collectives = collectives
        self._number = number

    def wait_for_end(self) -> None:
        """Returns when it has ended or failed. Raises CollectiveError if it will do neither."""
        # Peers are checked in every wait: a peer that raised and is still alive would block this rank
        # until the group's timeout.
        while not (self._future.done() or concurrent.futures.wait([self._future], CHECK_PEERS_S).done):
            self._collectives.check_peers(self._what, self._number)

    def wait(self) -> None:
        with self._collectives.translated_errors(self._what):
            self.wait_for_end()
            self.ran_ns = self._future.result()


def _end(worker: Worker, references: GlooReferences) -> None:
    """Ends the thread; see gloo_references' [Note: gloo releases tensors after completion]."""
    if worker.close():
        references.wait_until_released(Worker.CLOSE_TIMEOUT_S)
