"""The hook through which other jobs that train the same model join in: each reduced shard, before it is final.

FSDP2 has the same hook (``FSDPModule.set_all_reduce_hook``), and torchft is used through it there. The hook may also
compress, or average only now and then, as DiLoCo does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Protocol

import torch
from torch import Tensor

from .. import devices
from ..collectives import Handle, Worker


class ReplicaHook(Protocol):
    """Connects each rank to the rank of the same number in other jobs, called replicas.

    Every replica makes the same calls in the same order.
    """

    def begin(self) -> None:
        """Called before each forward that trains. A batch begins with the first one after :meth:`commit`."""

    def reduce(self, shard: Tensor) -> None:
        """Replaces a reduced shard, on its device, by the mean over replicas. Called by a thread and, on a device, on a
        stream of its own, while backward goes on."""

    def any_of(self, flags: bytes) -> bytes:
        """Returns for each flag whether it is set in any replica. Called by the same thread."""

    def commit(self, *, is_refused: bool) -> bool:
        """Called when all gradients of a batch are reduced. Returns whether optimizers step; otherwise the batch is
        dropped. ``is_refused``: this replica has dropped it, and raises an error when the hook has returned."""


class HookQueue:
    """Calls the hook's methods in order, each shard's when it is reduced inside the replica."""

    def __init__(self, hook: ReplicaHook, device: torch.device) -> None:
        self.hook = hook
        self.device = device
        self._worker = Worker()
        self._error: BaseException | None = None
        self.stream = torch.get_device_module(device).Stream(device)  # that of torch.cpu does nothing

    def _submit(self, call: Callable[[], object]) -> Future[tuple[int, int]]:
        def run() -> None:
            try:
                call()
            except BaseException as error:
                self._error = self._error or error
                raise

        return self._worker.submit(run)

    def wait(self, future: Future[tuple[int, int]]) -> tuple[int, int]:
        """Returns the begin and the end of a call, or raises the first error: later calls fail as a consequence."""
        try:
            return future.result()
        except BaseException as error:  # noqa: BLE001 - raised again
            raise self._error or error from None

    def start(self, shard: Tensor, inside: Handle) -> Handle:
        """Returns the reduction of ``shard`` inside this replica, and then over all."""

        def reduce() -> None:
            with devices.on_stream(self.stream, self.device):  # waits for this bucket, not for the queued backward
                inside.wait()
                self.hook.reduce(shard)

        return _Hooked(self, self._submit(reduce), inside)

    def any_of(self, flags: bytes) -> bytes:
        """Calls the hook's method of this name, after all shards."""
        results: list[bytes] = []
        self.wait(self._submit(lambda: results.append(self.hook.any_of(flags))))
        return results[0]

    def means_of(self, numbers: Sequence[float]) -> list[float]:
        """Returns the means over replicas."""
        tensor = torch.tensor(numbers, dtype=torch.float64, device=self.device)
        self.wait(self._submit(lambda: self.hook.reduce(tensor)))
        return tensor.tolist()

    def stop(self) -> None:
        """Ends the thread after the queued calls."""
        self._worker.stop()


class _Hooked(Handle):
    def __init__(self, queue: HookQueue, future: Future[tuple[int, int]], inside: Handle) -> None:
        self._queue = queue
        self._future = future
        self._inside = inside

    def wait(self) -> None:
        self.ran_ns = self._queue.wait(self._future)
        self._inside.wait()
        devices.current_stream(self._queue.device).wait_stream(self._queue.stream)
