"""Ranks of a section: processes that take a device, connect, run a function, and return what it returns.

[Note: ways to connect ranks]
``alone`` is one rank. ``staged`` ranks may share one GPU: gloo carries copies in pinned memory. ``backend`` is NCCL, on
the host gloo's own collectives, which are used as NCCL's are. ``fake`` is rank 0 of several whose peers do not exist,
on torch's fake backend: one rank alone is not sharded, and this one has the shards, gathers, pooled buckets and state
on the host of a rank among many, with all of their work and memory, and no wire. Its peers are taken to hold what it
holds: a mean over ranks is its own gradient, and a gather repeats its part. All device work is done in ranks: the
process of a section only starts them, so that it can fork.
"""

from __future__ import annotations

import dataclasses
import datetime
import faulthandler
import importlib
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.distributed as dist

from . import via_host
from .children import ask_where, end_with_parent
from .devices import DEVICES, Device

Way = Literal["alone", "staged", "backend", "fake"]
"""See [Note: ways to connect ranks]."""

FAKE_SIZE = 8
"""The ranks among which a fake one is the first."""

GRACE_S = 15.0
"""The time that the other ranks have after the first has failed."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place:
    """The devices that ranks run on, and how they are connected.

    Attributes:
        kind: of device.
        method: to start processes, see ``children``.
        num_gpus: rank r works on the device r modulo this.
        timeout_s: the process group's.
        environment: variables that are set before anything touches the device.
        binds: whether the process group gets the device, as under Lightning; torch then connects at once.
        has_group: False leaves the process group to the function, with the variables that torchrun sets.
    """

    kind: str
    method: str
    way: Way
    size: int
    num_gpus: int = 1
    timeout_s: float = 60.0
    environment: tuple[tuple[str, str], ...] = ()
    binds: bool = False
    has_group: bool = True

    @property
    def num_processes(self) -> int:
        return 1 if self.way == "fake" else self.size


@dataclasses.dataclass(frozen=True)
class Rank:
    """Given first to a function that runs on a rank. There is a default process group over all ranks, unless its place
    has none."""

    number: int
    size: int
    way: Way
    device: Device


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The end of a rank.

    Attributes:
        result: what the function returned.
        error: type and text of what it raised, or how its process ended; empty if it returned.
        trace: where it raised.
        seconds: from the start of all.
    """

    result: Any = None
    error: str = ""
    trace: str = ""
    seconds: float = 0.0


class RanksFailedError(RuntimeError):
    """Some rank raised, ended or hung; says which."""


def run_ranks(place: Place, function: Callable[..., Any], *arguments: Any, within_s: float = 300.0) -> list[Any]:
    """Calls ``function(rank, *arguments)`` on each rank; returns the results by rank, plain values all.

    Raises:
        RanksFailedError: if any rank does not return.
    """
    outcomes = try_ranks(place, function, *arguments, within_s=within_s)
    failed = {rank: outcome for rank, outcome in enumerate(outcomes) if outcome.error}
    if failed:
        first = min(failed.values(), key=lambda outcome: outcome.seconds)
        errors = [f"rank {rank} after {outcome.seconds:.1f} s: {outcome.error}" for rank, outcome in failed.items()]
        raise RanksFailedError("\n".join([*errors, first.trace]))
    return [outcome.result for outcome in outcomes]


def try_ranks(
    place: Place, function: Callable[..., Any], *arguments: Any, within_s: float = 300.0, grace_s: float = GRACE_S
) -> list[Outcome]:
    """As :func:`run_ranks`, but a failure is an outcome. No process outlives the call.

    Args:
        within_s: for all; who has not come then is ended.
        grace_s: for the others, after the first failure.
    """
    context = multiprocessing.get_context(place.method)
    connections, processes = [], []
    began = time.monotonic()
    for number in range(place.num_processes):
        ours, theirs = context.Pipe()
        process = context.Process(target=_rank_main, args=(place, number, theirs, function, arguments))
        process.start()
        theirs.close()
        connections.append(ours)
        processes.append(process)
    try:
        # Not in a rank: one that is killed shall not take it along. After the forks, since it has a thread.
        timeout = datetime.timedelta(seconds=place.timeout_s)
        store = dist.TCPStore("127.0.0.1", 0, None, is_master=True, timeout=timeout, wait_for_workers=False)
        for connection in connections:
            connection.send(store.port)
        return _collect(processes, connections, began, within_s, grace_s)
    finally:
        for process, connection in zip(processes, connections, strict=True):
            process.join(2)
            if process.is_alive():
                process.kill()
            process.join()
            connection.close()


def _collect(
    processes: list[Any], connections: list[Any], began: float, within_s: float, grace_s: float
) -> list[Outcome]:
    outcomes: dict[int, Outcome] = {}
    deadline = began + within_s
    while len(outcomes) < len(processes) and (left := deadline - time.monotonic()) > 0:
        missing = [rank for rank in range(len(processes)) if rank not in outcomes]
        waited = [connections[rank] for rank in missing] + [processes[rank].sentinel for rank in missing]
        ready = multiprocessing.connection.wait(waited, left)
        for rank in missing:
            if connections[rank] in ready or processes[rank].sentinel in ready:
                outcomes[rank] = _outcome(processes[rank], connections[rank], time.monotonic() - began)
                if outcomes[rank].error:
                    deadline = min(deadline, time.monotonic() + grace_s)
    if len(outcomes) < len(processes):
        ask_where([processes[rank].pid for rank in range(len(processes)) if rank not in outcomes])
    hung = Outcome(error="Hung: said nothing until it was ended", seconds=time.monotonic() - began)
    return [outcomes.get(rank, hung) for rank in range(len(processes))]


def _outcome(process: Any, connection: Any, seconds: float) -> Outcome:
    try:
        if connection.poll():
            return dataclasses.replace(connection.recv(), seconds=seconds)
    except (EOFError, OSError):
        pass  # it ended without a word
    process.join(5)
    return Outcome(error=f"Ended: its process ended with exit status {process.exitcode}", seconds=seconds)


def _rank_main(
    place: Place, number: int, connection: Any, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    end_with_parent()
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # a fresh interpreter's default is to end
    os.environ.update(place.environment)
    _set_environment()
    try:
        device = DEVICES[place.kind]()
        device.take(number % place.num_gpus)
        if place.way == "staged":
            via_host.install()
        (_connect if place.has_group else _set_torchrun_variables)(place, number, device, connection.recv())
        result = function(Rank(number, place.size, place.way, device), *arguments)
        device.synchronize()
    except BaseException as error:  # noqa: BLE001 - an outcome, whatever it is
        connection.send(Outcome(error=f"{type(error).__name__}: {error}", trace=traceback.format_exc()))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)  # groups may wait for ranks that are gone, and would keep it
    connection.send(Outcome(result=result))
    if dist.is_initialized():
        dist.destroy_process_group()


def _set_environment() -> None:
    """Before anything touches a device or connects; what the user has set stays."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # else cuBLAS may add in another order each time
    if sys.platform.startswith("linux"):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # whatever this machine's name resolves to


def _connect(place: Place, number: int, device: Device, port: int) -> None:
    if place.way == "fake":
        importlib.import_module("torch.testing._internal.distributed.fake_pg")  # makes the backend known
        # Not a FakeStore, which cannot be cloned for a group of the engine's own.
        dist.init_process_group(device.backend(place.way), store=dist.HashStore(), rank=number, world_size=place.size)
        return
    timeout = datetime.timedelta(seconds=place.timeout_s)
    store = dist.TCPStore("127.0.0.1", port, None, is_master=False, timeout=timeout, wait_for_workers=False)
    bound: torch.device | None = device.torch_device if place.binds and device.type != "cpu" else None
    dist.init_process_group(
        device.backend(place.way), store=store, rank=number, world_size=place.size, timeout=timeout, device_id=bound
    )


def _set_torchrun_variables(place: Place, number: int, device: Device, port: int) -> None:
    """The store is in the process that started the ranks, as it is in torchrun's agent."""
    os.environ.update(
        {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
        | {"RANK": str(number), "WORLD_SIZE": str(place.size), "TORCHELASTIC_RUN_ID": "gpu-check"}
        | {"LOCAL_RANK": str(number), "LOCAL_WORLD_SIZE": str(place.size), "GROUP_RANK": "0"}
    )
