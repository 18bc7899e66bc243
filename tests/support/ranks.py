"""Ranks as threads, each over a gloo group of its own made on one HashStore: no default group, no processes, starts
in a tenth of a second."""

from __future__ import annotations

import collections
import functools
import gc
import threading
import time
import traceback
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import pytest
import torch
from torch.distributed import HashStore, PrefixStore, ProcessGroup, ProcessGroupGloo, Store

from megastrategy.core.collectives import BackendCollectives, Collectives, GlooCollectives
from megastrategy.core.collectives.instanced import make_instance_collectives

from . import chosen_collectives

T = TypeVar("T")

_making_operators = threading.RLock()


def _one_at_a_time(get: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
    @functools.wraps(get)
    def get_or_wait(self: Any, name: str) -> Any:
        with _making_operators:
            return vars(self)[name] if name in vars(self) else get(self, name)

    return get_or_wait


# Of an operator that two threads use first at once, torch makes two objects. It keeps the second, and a pointer to the
# first, which is gone: the next call in a dispatch mode gets any object in its place, or ends the process.
for _kind in (torch._ops._OpNamespace, torch._ops.OpOverloadPacket):
    _kind.__getattr__ = _one_at_a_time(_kind.__getattr__)  # type: ignore[method-assign]


def gloo_group(
    store: Store, rank: int, size: int, timeout_s: float = 30.0, connections: int | None = None
) -> ProcessGroup:
    """A process group that is in no registry of torch.distributed.

    Every two ranks have as many connections as in the engine's own groups, or so many."""
    options = ProcessGroupGloo._Options()
    options._timeout = timedelta(seconds=timeout_s)
    # A device, and with it an event loop, for each rank, as processes have
    device = ProcessGroupGloo.create_device(hostname="127.0.0.1")
    options._devices = [device] * (connections or (2 if size == 2 else 1))
    backend = ProcessGroupGloo(store, rank, size, options)
    group = ProcessGroup(store, rank, size)
    group._register_backend(torch.device("cpu"), ProcessGroup.BackendType.GLOO, backend)
    group._set_default_backend(ProcessGroup.BackendType.GLOO)
    return group


def with_instances(
    group: ProcessGroup, num_instances: int, kind: type[GlooCollectives] | type[BackendCollectives] | None = None
) -> Collectives:
    """Collectives over a group that no registry knows, divided into instances of consecutive ranks: its parts have to
    be made by hand as well."""
    rank, size = group.rank(), group.size() // num_instances
    store, timeout = group.get_group_store(), group._get_backend(torch.device("cpu")).options._timeout
    number, place = divmod(rank, size)
    instance = gloo_group(PrefixStore(f"instance {number}", store), place, size, timeout.total_seconds())
    across = gloo_group(PrefixStore(f"place {place}", store), number, num_instances, timeout.total_seconds())
    retire_with(group, instance, across)
    choice = chosen_collectives.chosen
    every = (kind or choice.kind)(group)
    every.instances[size] = make_instance_collectives(every, instance, across)
    return choice.around(every)


def retire_with(group: ProcessGroup, *others: ProcessGroup) -> None:
    """Ends groups that were made by hand beside ``group`` when that ends."""
    _parts.setdefault(group, []).extend(others)


_parts: weakref.WeakKeyDictionary[ProcessGroup, list[ProcessGroup]] = weakref.WeakKeyDictionary()
"""Made of a group by hand; they end with it."""

_GLOO_CRASHES_AMONG_THREADS = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 12)

_retired: collections.deque[tuple[ProcessGroup, ...]] = collections.deque(maxlen=8)
"""Groups whose ranks have ended. One that went at once could deadlock: its destructor waits for gloo's threads while
holding the GIL, which such a thread needs to let go of the last tensor. By the time they leave here they are idle.
"""


class RankError(AssertionError):
    """The errors, by rank."""


def _collect(alive: Callable[[], object], timeout_s: float = 5.0) -> None:
    """Collects garbage until the object is gone. Once may not do: while another thread collects (one of its finalizers
    may let go of the GIL), ``gc.collect()`` returns at once; and a collective that is still going on holds its group.
    """
    deadline = time.monotonic() + timeout_s
    gc.collect()
    while alive() is not None and time.monotonic() < deadline:
        time.sleep(0.01)
        gc.collect()


def run_ranks(size: int, run: Callable[[int, ProcessGroup], T], *, timeout_s: float = 30.0) -> list[T]:
    """``run(rank, group)`` on ``size`` threads; the results by rank, or a RankError with every rank's traceback."""
    outcomes = try_ranks(size, run, timeout_s=timeout_s)
    failed = {rank: outcome for rank, outcome in enumerate(outcomes) if isinstance(outcome, BaseException)}
    if failed:
        report = "\n".join(f"rank {rank}:\n{error.__notes__[-1]}" for rank, error in failed.items())
        raise RankError(report)
    return outcomes  # type: ignore[return-value]


def try_ranks(size: int, run: Callable[[int, ProcessGroup], T], *, timeout_s: float = 30.0) -> list[T | BaseException]:
    """Like :func:`run_ranks`, but exceptions are results, with their traceback as a note. A rank that ends in one
    gives up its group, which closes its connections as a dying process would.
    """
    if size > 1 and _GLOO_CRASHES_AMONG_THREADS:
        pytest.skip(
            "ranks are threads here, and gloo of torch 2.11 ends the interpreter among them: docs/project/versions.md"
        )
    store = HashStore()
    outcomes: list[T | BaseException] = [RankError("did not run")] * size

    def target(rank: int) -> None:
        group: ProcessGroup | None = None
        try:
            group = gloo_group(store, rank, size, timeout_s)
            with chosen_collectives.chosen.guard():
                outcomes[rank] = run(rank, group)
            _retired.append((group, *_parts.pop(group, [])))
        except BaseException as error:  # noqa: BLE001 - handed to the test, whatever it is
            error.add_note("".join(traceback.format_exception(error)))
            seen: BaseException | None = error
            while seen is not None:  # frames hold the group, and cleared ones their function, whose closure holds it
                traceback.clear_frames(seen.__traceback__)
                seen.__traceback__ = None
                seen = seen.__cause__ or seen.__context__
            if group is not None:
                _parts.pop(group, None)
            alive, group = weakref.ref(group) if group is not None else (lambda: None), None
            _collect(alive)
            outcomes[rank] = error

    threads = [threading.Thread(target=target, args=(rank,), name=f"rank-{rank}", daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout_s + 60)
    assert not any(thread.is_alive() for thread in threads), "a rank hangs beyond the group's timeout"
    return outcomes
