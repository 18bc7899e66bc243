"""The collectives that the engine needs from a process group, for every backend.

Methods of the process group itself are called, never the functions of ``torch.distributed``, which look up the default
group; so ranks may be processes or threads. All operations are in place on 1-D contiguous tensors and return at once
with a :class:`Handle`; they run in the order of their start, which must be the same on every rank.

[Note: why ranks agree over their hosts]
On an accelerator ``Handle.wait`` orders the stream and returns: the host runs ahead. A rank whose peer is gone
would notice that only in a read of the device, inside C++, where it can neither be watched nor interrupted. So
ranks agree on their hosts (:attr:`Collectives.host`, gloo), where waits are watched and end in bounded time.
Nothing of the device is read for it, and its queue stays full. The exchange at the end of a backward comes before
any wait for that backward's work: a hung peer is noticed there. Where the host has to read a result of the device
nevertheless, :meth:`Collectives.wait_for_device` comes first.
"""

from __future__ import annotations

import contextlib
import pickle
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ..errors import CollectiveError, MegastrategyError
from ..layout import Spans
from .part_sums import coalesce_by_dtype
from .rank_check import CALL_ON_EVERY_RANK, Progress, RankCheck

CHECK_PEERS_S = 1.0  # between two checks of the peers while this rank waits
_POLL_S = 50e-6  # between two queries of the device: short for a step, long enough to free the core
_PROBE_S = 5.0  # a probe is a message that no rank receives, and gloo keeps each

COALESCED_BYTES = 64 * 2**20  # of tensors that are copied, and sent, at once


class Handle(ABC):
    """A started collective.

    Attributes:
        ran_ns: after :meth:`wait`, its begin and end (``time.perf_counter_ns()``) if known (gloo).
    """

    ran_ns: tuple[int, int] | None = None

    @abstractmethod
    def wait(self) -> None:
        """Returns when the result may be used (on CUDA: by work queued from now on). Raises
        CollectiveError if it failed."""


class Handles(Handle):
    """Several collectives, in the order of their start, as one."""

    def __init__(self, handles: Sequence[Handle]) -> None:
        self._handles = handles

    def wait(self) -> None:
        for handle in self._handles:
            handle.wait()
        # They run one after the other: the first begins the span, and the last ends it.
        ran = [handle.ran_ns for handle in self._handles]
        if ran[0] is not None and ran[-1] is not None:
            self.ran_ns = ran[0][0], ran[-1][1]


Watchdog = Callable[[str, int], str]
"""Called about once a second while this rank waits in a collective, with its name and number (from 1). Returns the
reason why it will never complete, or "": a backend notices that a peer's process died, but not that it raised and is
elsewhere."""


class Collectives(ABC):
    """The collectives of one process group.

    Args:
        group: its ranks, and how they send; None in a process without a process group, which is one rank.
        rank_check: checks before a collective call of the user's that all ranks make it; None without a store, as for a
            group that torch.distributed does not know.
        host: see the property; None for these collectives themselves.

    Attributes:
        name: this rank's, in messages; among all ranks, if these are some of them.
        progress: counts the collectives that this rank starts.
        instances: made from these for parts of the ranks, by size or by ranks (see :func:`.shard_collectives`).
        second: collectives on a second group of the same ranks (see :func:`.second_collectives`); None if not made.
        watchdog: called while this rank waits; without it, a wait ends only with a peer's process.
    """

    watchdog: Watchdog | None = None
    _host: Collectives | None = None
    second: Collectives | None = None

    def __init__(
        self, group: ProcessGroup | None = None, rank_check: RankCheck | None = None, host: Collectives | None = None
    ) -> None:
        if group is not None:
            self.group = group
        self.rank, self.size = (0, 1) if group is None else (group.rank(), group.size())
        self.name = f"rank {self.rank} of {self.size}"
        self.rank_check = rank_check
        self._host = host
        # One count for both: a check compares it with that of other ranks.
        self.progress = rank_check.progress if rank_check is not None else Progress()
        if host is not None:
            # One count for device and host, too: a program starts both in one order, the same on all ranks.
            self.progress = host.progress
        self.instances: dict[Any, Collectives] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        """Is None in copies and pickles of its owners (a Trainer in mid-fit): connections belong to this process, and
        a copy sends nothing."""
        return type(None), ()

    @property
    def is_rank_zero(self) -> bool:
        """Whether this rank receives a gather for one rank."""
        return self.rank == 0

    @property
    def host(self) -> Collectives:
        """The collectives of the same ranks for tensors in host memory: this object itself if it sends from there; see
        [Note: why ranks agree over their hosts]."""
        return self if self._host is None else self._host

    def require_all_ranks(self, what: str, remedy: str = CALL_ON_EVERY_RANK) -> None:
        """Returns when all ranks have reached the same collective call, which the user knows as ``what``.

        ``remedy`` says what to do, in the form of the door. Without a rank check all ranks are assumed to come.

        Raises:
            NotOnAllRanksError: if they do not come, within bounded time.
        """
        # Without a store ranks cannot be asked; the call itself then waits, as any collective does.
        if self.rank_check is None or self.size == 1:
            return
        self._finish_started()
        with self.translated_errors(what):
            self.rank_check.wait_for_all(what, self.probe, remedy)

    @contextlib.contextmanager
    def translated_errors(self, what: str) -> Iterator[None]:
        """Turns errors of a backend, or of a store that ended with its process, into CollectiveError."""
        try:
            yield
        except RuntimeError as error:
            self.raise_translated(what, error)

    def raise_translated(self, what: str, error: RuntimeError) -> NoReturn:
        """Raises CollectiveError for an error of a backend; an error of this package as it is."""
        if isinstance(error, MegastrategyError):  # it has a text already; CollectiveError is a RuntimeError, too
            raise error
        raise CollectiveError(
            f"{self.name}: {what} did not complete. Most often another rank ended with an error, was killed, had fewer "
            "batches than this rank, or is stuck longer than the group's timeout: look at the first error among the "
            f"ranks. The backend said: {error}"
        ) from error

    def _count(self, what: str) -> None:
        """Counts a collective that is started."""
        progress = self.progress
        progress.num_started += 1
        progress.last_started = what

    def check_peers(self, what: str, number: int) -> None:
        """Called while the ``number``-th collective that was started takes long.

        Raises:
            CollectiveError: if it will not complete.
        """
        # This rank waits here, so one whose check is before this collective would wait for it forever.
        if self.rank_check is not None:
            self.rank_check.report_waiting(what, number)
        # A backend cannot notice that a peer raised and is elsewhere while its process lives; the watchdog can.
        if self.watchdog is not None and (reason := self.watchdog(what, number)):
            self._give_up(what, reason)

    def _give_up(self, what: str, reason: str) -> NoReturn:
        self.abort()
        raise CollectiveError(f"{self.name}: {what} was given up: {reason}")

    def probe(self, rank: int) -> None:
        """Raises a RuntimeError if the rank's process has ended."""
        # A device's backend cannot tell. Without a host group either, the time limit of the rank check remains.
        if self.host is not self:
            self.host.probe(rank)

    def _finish_started(self) -> None:  # noqa: B027 - nothing is counted where waiting does not keep the host
        """Waits for the collectives that this rank has started."""

    def connect(self, device: torch.device, *, exchanges: bool) -> None:  # noqa: B027 - gloo's have met by then
        """Makes the ranks connect now for the collectives of buckets; with ``exchanges``, for
        :meth:`reduce_scatter_into`, too. A backend would connect when it is first used: in the first backward, when
        memory is at its peak. Collective."""

    @abstractmethod
    def all_reduce(self, tensor: Tensor, scale: float) -> Handle:
        """Replaces ``tensor`` by the sum over ranks of ``scale * tensor``."""

    @abstractmethod
    def all_reduce_max(self, tensor: Tensor) -> Handle:
        """Replaces ``tensor`` by the element-wise maximum over ranks."""

    @abstractmethod
    def reduce_scatter(self, tensor: Tensor, scale: float) -> Handle:
        """Replaces the rank-th of ``size`` equal parts of ``tensor`` by the sum over ranks of ``scale *`` that part.

        The rest of ``tensor`` is undefined, except for elements that are zero on all ranks, which stay zero."""

    @abstractmethod
    def reduce_scatter_into(self, sums: Tensor, tensor: Tensor, scale: float) -> Handle:
        """Adds the result of :meth:`reduce_scatter` for this rank's part of ``tensor`` to ``sums``.

        It is computed in the dtype of ``sums`` and in the order of the ranks. ``tensor`` is sent as it is, and
        undefined afterwards, except for zeros, which stay zero."""

    @abstractmethod
    def all_gather(self, tensor: Tensor) -> Handle:
        """Sends every rank's own part (rank-th of ``size`` equal parts) to all ranks; ``tensor`` is then equal
        everywhere."""

    @abstractmethod
    def gather_spans(self, tensor: Tensor, spans: Spans) -> Handle:
        """Sends every rank's own elements of ``tensor``, ``spans[rank]``, to all ranks; the other elements do not
        change. Spans are the same on every rank, do not overlap, and may have any length."""

    @abstractmethod
    def all_to_all(
        self, received: Tensor, tensor: Tensor, received_sizes: Sequence[int], sizes: Sequence[int]
    ) -> Handle:
        """Sends parts of ``tensor``, of ``sizes`` elements by rank, to the ranks, and receives theirs for this one into
        ``received``, of ``received_sizes`` elements by rank. A rank's part for itself has none."""

    @abstractmethod
    def broadcast(self, tensor: Tensor) -> Handle:
        """Replaces ``tensor`` by rank 0's."""

    def close(self) -> None:  # noqa: B027 - most have none
        """Releases threads and scratch memory, not the group, which belongs to the caller. May be called again,
        and used again afterwards."""

    def broadcast_all(self, tensors: Sequence[Tensor]) -> None:
        """Replaces every tensor (any shape and dtype) by rank 0's, in a few coalesced broadcasts per dtype."""
        for group in coalesce_by_dtype(tensors, COALESCED_BYTES):
            # A copy for all strides: a broadcast for each tensor would cost a round trip for each.
            flat = torch.cat([tensor.detach().reshape(-1) for tensor in group])
            # As bytes: gloo cannot send int16, uint16 or float8, the dtypes of a quantised model's frozen parameters.
            self.broadcast(flat.view(torch.uint8)).wait()
            received = flat.split([tensor.numel() for tensor in group])
            # One call: a kernel for each of hundreds of small buffers would take longer than sending them.
            torch._foreach_copy_(
                [tensor.detach() for tensor in group],
                [part.view(tensor.shape) for part, tensor in zip(received, group, strict=True)],
            )

    def max_of_bytes(self, numbers: Sequence[int]) -> list[int]:
        """Returns the maximum over ranks of ``numbers`` (0 to 255), element by element. Collective, between hosts; on
        one rank nothing is sent.

        Raises:
            CollectiveError: if the others do not come. Work on the device is then aborted: it waits for them, too.
        """
        if self.size == 1:
            return list(numbers)
        tensor = torch.tensor(numbers, dtype=torch.uint8, device="cpu")
        self.max_of_facts(tensor)
        agreed: list[int] = tensor.tolist()
        return agreed

    def max_of_facts(self, facts: Tensor) -> None:
        """Replaces ``facts``, uint8 in host memory, by the maximum over ranks; see :meth:`max_of_bytes`."""
        with self._aborting():
            self.host.all_reduce_max(facts).wait()

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        """Returns every rank's ``data``, by rank; lengths may differ. Collective, between hosts."""
        # Two rounds, since ranks must first agree on a size: gloo ends the process if sizes differ.
        lengths = torch.zeros(self.size, dtype=torch.int64, device="cpu")
        lengths[self.rank] = len(data)
        with self._aborting():
            self.host.all_gather(lengths).wait()
        sizes = [int(size) for size in lengths.tolist()]
        # At least one byte: backends do not promise that a gather of no elements works.
        width = max(1, max(sizes))
        received = bytearray(width * self.size)
        received[width * self.rank : width * self.rank + len(data)] = data
        # The tensor has the bytearray's memory, so received data is not copied.
        table = torch.frombuffer(received, dtype=torch.uint8)
        with self._aborting():
            self.host.all_gather(table).wait()
        return [bytes(received[width * rank : width * rank + size]) for rank, size in enumerate(sizes)]

    def all_gather_objects(self, value: Any) -> list[Any]:
        """Returns every rank's picklable ``value``, by rank. The bytes come from the group's own
        ranks and are trusted."""
        return [pickle.loads(data) for data in self.all_gather_bytes(pickle.dumps(value))]

    # --- the device --------------------------------------------------------------------------------------------------

    def wait_for_device(self, device: torch.device, what: str) -> None:
        """Returns when the device has done the work on its current stream, for a read by the host.

        Returns at once if the host does not run ahead of the device. See [Note: why ranks agree over their hosts].

        Args:
            what: the last of these collectives that is queued there, for the message.

        Raises:
            CollectiveError: if it will not end: another rank failed or ended, or the group's timeout has passed. Work
                on the device is aborted.
        """
        has_ended = self._end_of_queue(device)
        if has_ended is None:
            return
        timeout_s = self.group._get_backend(device).options._timeout.total_seconds()
        began = time.monotonic()
        next_glance = began + CHECK_PEERS_S
        next_probe = began + _PROBE_S
        # Polled, not synchronised: a synchronisation returns from C++ only when the device is done, perhaps never.
        while not has_ended():
            time.sleep(_POLL_S)
            now = time.monotonic()
            if now > next_glance:
                next_glance = now + CHECK_PEERS_S
                self.check_peers(what, self.progress.num_started)
            if now > next_probe:
                next_probe = now + _PROBE_S
                self._probe_others(what)
            if now > began + timeout_s:
                self._give_up(what, f"the device has not done it within {timeout_s:g} s, the group's timeout")

    def _probe_others(self, what: str) -> None:
        with self._aborting(), self.translated_errors(what):
            for other in range(self.size):
                if other != self.rank:
                    self.probe(other)

    def _end_of_queue(self, device: torch.device) -> Callable[[], bool] | None:
        """Returns a function that says whether the device has done the work queued now; None if the host
        does not run ahead."""
        return None

    def abort(self) -> None:  # noqa: B027 - where the host itself sends, nothing runs behind its back
        """Ends work on the device that will not complete. These collectives cannot be used afterwards."""

    @contextlib.contextmanager
    def _aborting(self) -> Iterator[None]:
        """Aborts work on the device if the ranks do not meet on the host."""
        try:
            yield
        except CollectiveError:
            # Its kernels wait for the rank that did not come here either, and would occupy the device forever. Not if
            # the host is the device: gloo ends by itself, and its worker knows which collective failed.
            if self.host is not self:
                self.abort()
            raise
