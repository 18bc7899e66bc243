"""Ends a rank's wait for another rank that failed, stopped, or ended its run.

A backend knows when the process at the other end dies. It does not know that this process is elsewhere by now. So a
rank that fails, stops or ends its run records that in the key-value store that torch.distributed was started with, and
a rank that waits for long reads it there.
"""

from __future__ import annotations

import contextlib
import functools
import pickle
import time
from collections.abc import Callable

import torch

from ..core import Collectives
from .recovery import first_failure, first_stopped, store_of


class FailureWatch:
    """Finds out why a rank waits in vain.

    Args:
        name: returns the name of the next exception, see :func:`~.process_collectives.exception_name`.
    """

    GRACE_S = 5.0
    """Seconds from another rank's failure until a waiting rank gives up. Collectives that can complete without that
    rank do so meanwhile, and ranks that fail alike come by themselves."""

    def __init__(self, name: Callable[[], str]) -> None:
        self._name = name
        self._failed_name = ""  # of the exception that another rank reported
        self._failed_at = 0.0
        self._groups: dict[str, Collectives] = {}
        self._ended = ""  # the exception in whose run this rank was last, if it has ended that run

    def watch(self, collectives: Collectives) -> Collectives:
        """Asks :meth:`_why_in_vain` from now on while a rank waits in ``collectives``."""
        name = collectives.group.group_name
        self._groups[name] = collectives
        # On an accelerator ranks wait on their hosts, in a group that counts with the device's.
        collectives.watchdog = collectives.host.watchdog = functools.partial(self._why_in_vain, name)
        return collectives

    def forget(self) -> None:
        """Drops the groups, whose collectives are given up."""
        self._groups.clear()

    def end_run(self, run: str) -> None:
        """Records that this rank has ended its fit, validation or the like, and the collectives that it has started.

        ``run`` says what has ended, and after how many steps.
        """
        self._ended = self._name()
        ends = store_of(f"exception/{self._ended}/ended")
        totals = {name: collectives.progress.num_started for name, collectives in self._groups.items()}
        end = pickle.dumps((torch.distributed.get_rank(), run, totals))
        # Rank 0's process has the store. It may have ended, after a complete run, before this rank gets here.
        with contextlib.suppress(torch.distributed.DistNetworkError):
            ends.set(f"{ends.add('num', 1) - 1}", end)  # type: ignore[arg-type]  # takes bytes

    def ended_run(self) -> str:
        """Returns which rank has ended its run before a collective that this rank has started; empty if none has."""
        name = self._name()
        if name == self._ended:
            return ""
        # The process that has the store may be the one that has ended.
        with contextlib.suppress(RuntimeError):
            for group, collectives in self._groups.items():
                if reason := self._ended_early(name, group, collectives.progress.num_started):
                    return reason
        return ""

    def _why_in_vain(self, group: str, what: str, number: int) -> str:
        """Says why a wait for the ``number``-th collective of a group is in vain; empty if it need not be."""
        name = self._name()
        try:
            if reason := first_stopped(name):
                return reason
            # All ranks may have ended the run, and save, or use the optimizer, or go on with a loop of their own.
            if name != self._ended and (reason := self._ended_early(name, group, number)):
                return reason
            return self._failure(name)
        except RuntimeError:  # the process that held the store ended, and the collective will fail
            return ""

    @staticmethod
    def _ended_early(name: str, group: str, number: int) -> str:
        """Returns which rank has ended its run without the ``number``-th collective of a group; empty if none has."""
        ends = store_of(f"exception/{name}/ended")
        for index in range(ends.add("num", 0)):
            if not ends.check([f"{index}"]):
                continue  # it is about to be written, and is read the next time
            rank, run, totals = pickle.loads(ends.get(f"{index}"))
            if totals.get(group, number) < number:
                return (
                    f"rank {rank} has ended {run}, and this rank goes on. Give all ranks the same number of batches (a "
                    "DistributedSampler, or drop_last=True), and stop on all ranks together: trainer.should_stop that "
                    "one rank sets stops that rank only, so reduce the decision first"
                )
        return ""

    def _failure(self, name: str) -> str:
        """Returns the first failure of another rank, some time after this rank has seen it; empty if there is none."""
        failure = first_failure(name)
        if failure and self._failed_name != name:
            self._failed_name = name
            self._failed_at = time.monotonic()
        return failure if failure and time.monotonic() - self._failed_at > self.GRACE_S else ""
