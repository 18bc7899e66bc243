"""A thread that runs the host's collectives while its caller goes on."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future

import torch

from ..errors import CollectiveError


class Worker:
    """One thread that runs what it is given, in order. A daemon: a rank whose peers are gone must be able to exit.

    What comes after something that failed fails at once, and is not begun: the ranks are not at the same place any
    more, and one that waited for the others in a later collective would keep those waiting that need it in this one.
    """

    CLOSE_TIMEOUT_S = 5.0

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[tuple[Future[tuple[int, int]], Callable[[], object]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="megastrategy-gloo", daemon=True)
        self._thread.start()

    def submit(self, run: Callable[[], object]) -> Future[tuple[int, int]]:
        """Queues ``run``. The result is when it began and ended, by ``time.perf_counter_ns()``."""
        future: Future[tuple[int, int]] = Future()
        self._jobs.put((future, run))
        return future

    def stop(self) -> None:
        """Lets the thread end after what is queued; may be called again."""
        self._jobs.put(None)

    def close(self) -> bool:
        """Ends the thread after what is queued, and says whether it has ended; after an error on another rank that may
        never come, so not waited for long."""
        self.stop()
        if threading.current_thread() is not self._thread:  # the last reference may go there
            # Bounded: what it is in may wait for a rank that is gone, and gloo cannot be interrupted.
            self._thread.join(self.CLOSE_TIMEOUT_S)
        return not self._thread.is_alive()

    def _run(self) -> None:
        # Words and a class, and no exception: its frames would keep tensors and groups alive.
        failure, kind = "", RuntimeError
        while (job := self._jobs.get()) is not None:
            future, run = job
            begun_ns = time.perf_counter_ns()
            try:
                if failure:
                    raise kind(failure)
                # Grad mode is each thread's own, and on in a new one: in-place arithmetic on what requires gradients
                # would raise.
                with torch.no_grad():
                    run()
            except BaseException as error:  # noqa: BLE001 - raised again by whoever waits
                if not failure:
                    # Of the same kind: whoever waits for a later one first must be told of a failed collective too.
                    kind = CollectiveError if isinstance(error, CollectiveError) else RuntimeError
                    failure = f"one before it had failed: {error}"
                future.set_exception(error)
            else:
                future.set_result((begun_ns, time.perf_counter_ns()))
            del future, run, job  # a thread that waits for work keeps no tensor alive
