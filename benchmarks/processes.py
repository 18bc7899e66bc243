"""Ranks as processes: one core and one thread each, in a network namespace if there is a shaped network."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import datetime
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

_TIMEOUT = datetime.timedelta(seconds=180)
_STALL_S = 240.0
"""Without a word from any rank for this long a run is given up: longer than the groups' timeout, which says more."""
_CLONE_NEWNET = 0x40000000


class RankFailedError(RuntimeError):
    """A rank raised, or its process ended; the message is the reason, with its traceback."""


@dataclasses.dataclass(frozen=True)
class Place:
    """A place where a rank runs.

    Attributes:
        core: that it is pinned to; None where that is not possible.
        namespace: the file of its network namespace; None for the one that we are in.
        interface: that it sends through.
        address: rank 0's.
    """

    core: int | None
    namespace: Path | None
    interface: str
    address: str


@dataclasses.dataclass(frozen=True)
class Rank:
    """Given first to a function that runs on a rank.

    Attributes:
        say: sends a word on progress to the waiting process.
    """

    number: int
    size: int
    place: Place
    say: Callable[[str], None]


def loopback_places(num_ranks: int) -> list[Place]:
    """Ranks on this machine, over its loopback interface."""
    return [Place(_core(rank), None, "lo", "127.0.0.1") for rank in range(num_ranks)]


def namespace_places(namespaces: list[Path], interface: str, address: str) -> list[Place]:
    """A rank in each network namespace."""
    return [Place(_core(rank), path, interface, address) for rank, path in enumerate(namespaces)]


def _core(rank: int) -> int | None:
    if not hasattr(os, "sched_getaffinity"):
        return None
    cores = sorted(os.sched_getaffinity(0))
    return cores[rank % len(cores)]


def run_ranks(
    places: list[Place], function: Callable[..., Any], *arguments: Any, on_word: Callable[[str], None] = lambda _: None
) -> list[Any]:
    """Calls ``function(rank, *arguments)`` in a fresh process at each place and returns the results by rank.

    ``function`` and ``arguments`` are pickled; torch is imported already where it runs. A default gloo group over the
    ranks exists. No process outlives the call.

    Raises:
        RankFailedError: as soon as one rank fails, or if all of them fall silent.
    """
    # One thread a rank, also in libraries that look at the environment; and torch's warnings about its own groups.
    os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", TORCH_CPP_LOG_LEVEL="ERROR")
    context = multiprocessing.get_context("forkserver")
    # Before the fork, so that imports are in no rank's time and memory (the first step of an optimizer imports dynamo).
    context.set_forkserver_preload(["benchmarks.measure", "torch.distributed.optim", "torch._dynamo"])
    connections, processes = [], []
    try:
        for number, place in enumerate(places):
            ours, theirs = context.Pipe()
            # Not a daemon: it may have children (a compiler). It watches this process instead.
            process = context.Process(target=_rank_main, args=(number, place, len(places), theirs, function, arguments))
            process.start()
            theirs.close()
            connections.append(ours)
            processes.append(process)
        return _collect(connections, on_word)
    finally:
        for process in processes:
            if sys.exc_info()[0] is not None:
                process.kill()
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()
        for connection in connections:
            connection.close()


def run_shown(places: list[Place], function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Does what :func:`run_ranks` does, and shows the last word on stderr."""
    from rich.console import Console  # of the waiting process only: ranks count their memory

    with Console(stderr=True).status("starting") as status:
        return run_ranks(places, function, *arguments, on_word=status.update)


def _collect(connections: list[Any], on_word: Callable[[str], None]) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(connections):
        waiting = [connection for rank, connection in enumerate(connections) if rank not in results]
        ready = multiprocessing.connection.wait(waiting, _STALL_S)
        if not ready:
            missing = [rank for rank in range(len(connections)) if rank not in results]
            raise RankFailedError(f"ranks {missing} have said nothing for {_STALL_S:.0f} s")
        for connection in ready:
            assert isinstance(connection, multiprocessing.connection.Connection)
            rank = connections.index(connection)
            try:
                kind, value = connection.recv()
            except EOFError:
                raise RankFailedError(f"rank {rank}'s process ended without a result (see above)") from None
            if kind == "port":
                for other in connections[1:]:
                    other.send(value)
            elif kind == "word":
                on_word(value)
            elif kind == "error":
                raise RankFailedError(f"rank {rank}: {value}")
            else:
                results[rank] = value
    return [results[rank] for rank in range(len(connections))]


def _rank_main(
    number: int, place: Place, size: int, connection: Any, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to all; the process that started this one ends it
    try:
        _settle_in(place)
        threading.Thread(target=_end_with_parent, daemon=True).start()
        with _default_group(number, size, place, connection):
            rank = Rank(number, size, place, lambda word: connection.send(("word", word)))
            result = function(rank, *arguments)
        connection.send(("result", result))
    except Exception as error:  # noqa: BLE001 - raised again where the result is waited for
        connection.send(("error", f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))


def _settle_in(place: Place) -> None:
    """Enters namespace and core before anything starts a thread: they are the calling thread's, and inherited."""
    if place.namespace is not None:
        with place.namespace.open() as namespace:
            libc = ctypes.CDLL(None, use_errno=True)  # os.setns is there from Python 3.12 on
            if libc.setns(namespace.fileno(), _CLONE_NEWNET) != 0:
                raise OSError(ctypes.get_errno(), f"cannot enter {place.namespace}")
    if place.core is not None:
        os.sched_setaffinity(0, {place.core})
    os.environ["GLOO_SOCKET_IFNAME"] = place.interface
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.__stdout__.fileno() if sys.__stdout__ is not None else 1)  # gloo prints there once connected
    os.close(null)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


@contextlib.contextmanager
def _default_group(number: int, size: int, place: Place, connection: Any) -> Any:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if number == 0:
        store = dist.TCPStore(place.address, 0, size, is_master=True, timeout=_TIMEOUT, wait_for_workers=False)
        connection.send(("port", store.port))
    else:
        store = dist.TCPStore(place.address, connection.recv(), size, timeout=_TIMEOUT, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=number, world_size=size, timeout=_TIMEOUT)
    try:
        yield
        dist.barrier()  # the store ends with rank 0
    finally:
        dist.destroy_process_group()
