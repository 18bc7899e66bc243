"""A thread that runs the host's collectives while its caller continues."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future

import torch

from ..errors import CollectiveError


class Worker:
    """One thread that runs jobs in order. A daemon: a rank whose peers are gone must be able to exit.

    After a job has failed, later ones fail at once and are not begun: the ranks are not at the same place any more, and
    a rank that waited in a later collective would block others that need it in the failed one.
    """

    CLOSE_TIMEOUT_S = 5.0

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[tuple[Future[tuple[int, int]], Callable[[], object]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="megastrategy-gloo", daemon=True)
        self._thread.start()

    def submit(self, run: Callable[[], object]) -> Future[tuple[int, int]]:
        """Queues ``run``. The result is its begin and end, by ``time.perf_counter_ns()``."""
        future: Future[tuple[int, int]] = Future()
        self._jobs.put((future, run))
        return future

    def stop(self) -> None:
        """Lets the thread end after the queued jobs; may be called again."""
        self._jobs.put(None)

    def close(self) -> bool:
        """Ends the thread after the queued jobs, and returns whether it has ended. Waits only for a short time, since
        after an error on another rank a job may never end."""
        self.stop()
        if threading.current_thread() is not self._thread:  # the last reference may go there
            # Bounded: its job may wait for a rank that is gone, and gloo cannot be interrupted.
            self._thread.join(self.CLOSE_TIMEOUT_S)
        return not self._thread.is_alive()

    def _run(self) -> None:
        # A text and a class, not the exception, whose frames would keep tensors and groups alive.
        failure = ""
        kind = RuntimeError
        while (job := self._jobs.get()) is not None:
            future, run = job
            del job
            begun_ns = time.perf_counter_ns()
            try:
                if failure:
                    raise kind(failure)
                # Grad mode is per thread, and on in a new one: in-place arithmetic on tensors that
                # require gradients would raise.
                with torch.no_grad():
                    run()
            except BaseException as error:  # noqa: BLE001 - raised where the future is waited for
                if not failure:
                    # The same kind, so that a wait for a later job also reports a failed collective.
                    kind = CollectiveError if isinstance(error, CollectiveError) else RuntimeError
                    failure = f"one before it had failed: {error}"
                del run
                future.set_exception(error)
            else:
                del run  # before the caller goes on, whose next tensors would be alive beside these
                future.set_result((begun_ns, time.perf_counter_ns()))
            del future  # or the idle thread would keep its result
