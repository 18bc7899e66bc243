"""Replicas that fail and come back, over torchft: the only file that knows its interface (0.2.0).

[Note: time-outs of replicas]
All time-outs follow from two numbers, since a wrong order of them is the usual reason for long waits. A replica that is
silent for ``heartbeat_s`` is taken for dead. ``skew_s`` is the longest time by which one replica may be later than
another: a validation, a checkpoint, a recovery. A sum, a recovery and the lighthouse's wait for a replica that is alive
take at most ``skew_s``. A replica whose vote said no waits twice as long for others, which may be that late, and each
waits ``patience_s`` for missing ones. The timeout of a replica's own process group has to be longer than ``skew_s``:
its ranks wait there for one that waits here.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import socket
import threading
import urllib.parse
import urllib.request
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import AllreduceOptions, ReduceOp, TCPStore  # type: ignore[attr-defined] # not in the stubs

from . import core
from ._faults.interfaces import could_not_connect, way_out

HEARTBEAT_S, SKEW_S, PATIENCE_S = 5.0, 60.0, 600.0
_INTERVAL_S = 0.1  # between two heartbeats
_log = logging.getLogger("megastrategy")
_OVERRIDES = (
    "TORCHFT_TIMEOUT_SEC",
    "TORCHFT_QUORUM_TIMEOUT_SEC",
    "TORCHFT_CONNECT_TIMEOUT_SEC",
    "TORCHFT_QUORUM_RETRIES",
)


class Replicas(core.Replicas):
    """The replicas that train a model together, each a job of its own that may end and come back.

    A replica has a complete sharded optimizer over its own ranks. If one ends, the others repeat the sums of the batch
    without it and go on; started again, it takes weights, optimizer state and the loop's place from them. See
    docs/replicas.md.

    Args:
        of: the number of replicas that start together. None: ``NUM_REPLICA_GROUPS`` in the environment.
        slot: this replica's number, from 0. None: ``REPLICA_GROUP_ID`` in the environment.
        lighthouse: the address of torchft's lighthouse. None: ``TORCHFT_LIGHTHOUSE`` in the environment.
        minimum: the number of replicas below which nothing is stepped: they drop the batch and wait before the next.
        heartbeat_s, skew_s, patience_s: seconds, see _replicas' [Note: time-outs of replicas]. None: 5, 60 and 600, or
            those of ``megastrategy replicas``, whose lighthouse has the same ones.
        host: the name or address of this machine for the other replicas. None: ``MEGASTRATEGY_HOST`` in the
            environment, or the machine's name.

    Raises:
        ValueError: for numbers that contradict each other, or are missing.
        ModuleNotFoundError: if torchft is not installed.
    """

    def __init__(
        self,
        of: int | None = None,
        slot: int | None = None,
        *,
        lighthouse: str | None = None,
        minimum: int = 1,
        heartbeat_s: float | None = None,
        skew_s: float | None = None,
        patience_s: float | None = None,
        host: str | None = None,
    ) -> None:
        of = _whole_number(of, "of", "NUM_REPLICA_GROUPS")
        slot = _whole_number(slot, "slot", "REPLICA_GROUP_ID")
        lighthouse = _address(_found(lighthouse, "lighthouse", "TORCHFT_LIGHTHOUSE"))
        heartbeat_s = _seconds(heartbeat_s, "MEGASTRATEGY_HEARTBEAT_S", HEARTBEAT_S)
        skew_s = _seconds(skew_s, "MEGASTRATEGY_SKEW_S", SKEW_S)
        patience_s = _seconds(patience_s, "MEGASTRATEGY_PATIENCE_S", PATIENCE_S)
        check_timeouts(heartbeat_s, skew_s, patience_s)
        for variable in _OVERRIDES:
            if variable in os.environ:
                raise ValueError(
                    f"{variable} is set, and torchft would use it and not heartbeat_s, skew_s, patience_s: remove it "
                    "from the environment"
                )
        host = host or os.environ.get("MEGASTRATEGY_HOST") or socket.gethostname()
        link = TorchftLink(slot, lighthouse, heartbeat_s, skew_s, patience_s, host)
        super().__init__(link, of=of, slot=slot, minimum=minimum, patience_s=patience_s)


def _found(given: Any, name: str, variable: str) -> Any:
    if given is None and not (given := os.environ.get(variable)):
        raise ValueError(
            f"Replicas({name}=): pass it, or set {variable}, as megastrategy replicas does for scripts that it starts"
        )
    return given


def _whole_number(given: Any, name: str, variable: str) -> int:
    found = _found(given, name, variable)
    try:
        return int(found)
    except ValueError:
        raise ValueError(f"{name}={found!r} ({variable}): expected a whole number") from None


def _address(found: Any) -> str:
    with contextlib.suppress(ValueError):  # of a port that is no number
        parts = urllib.parse.urlsplit(str(found))
        if parts.scheme in ("http", "https") and parts.hostname and parts.port != 0:
            return str(found)
    raise ValueError(
        f"lighthouse={str(found)!r} (TORCHFT_LIGHTHOUSE): expected an address such as http://machine:29510"
    )


def _seconds(given: float | None, variable: str, default: float) -> float:
    found = os.environ.get(variable, default) if given is None else given
    try:
        return float(found)
    except ValueError:
        raise ValueError(f"{variable}={found!r}: expected a number of seconds") from None


def check_timeouts(heartbeat_s: float, skew_s: float, patience_s: float) -> None:
    """Raises ValueError unless each is longer than the one before; see [Note: time-outs of replicas]."""
    ordered = {
        "10 heartbeats": 10 * _INTERVAL_S,
        "heartbeat_s": heartbeat_s,
        "skew_s": skew_s,
        "2 skew_s + heartbeat_s": 2 * skew_s + heartbeat_s,
        "patience_s": patience_s,
    }
    for (shorter, first), (longer, second) in zip(list(ordered.items()), list(ordered.items())[1:], strict=False):
        if not first <= second:
            raise ValueError(f"{longer}={second:g}: expected at least {first:g} seconds, the time of {shorter}")


def describe_timeouts(heartbeat_s: float, skew_s: float, patience_s: float) -> str:
    """Returns a line with all time-outs, from the shortest to the longest."""
    return (
        f"time-outs: a replica that is silent for {heartbeat_s:g} s is taken for dead; one that is alive is waited for "
        f"{skew_s:g} s in a sum or a recovery, {2 * skew_s + heartbeat_s:g} s after a failed vote; missing replicas "
        f"are waited for {patience_s:g} s"
    )


def start_lighthouse(bind: str, *, heartbeat_s: float = HEARTBEAT_S, skew_s: float = SKEW_S, minimum: int = 1) -> Any:
    """Starts torchft's lighthouse in this process; its ``address()`` is for all replicas, ``shutdown()`` ends it."""
    return _torchft("torchft.coordination").LighthouseServer(
        bind=bind,
        min_replicas=minimum,
        join_timeout_ms=int(1000 * skew_s),
        heartbeat_timeout_ms=int(1000 * heartbeat_s),
    )


def has_met(lighthouse: Any) -> bool:
    """Returns whether any replica has begun to train with this lighthouse."""
    with _open(f"{lighthouse.address()}/status", 10.0) as page:
        return b"quorum_id: 0 " not in page.read()


def _open(address: str, timeout_s: float) -> Any:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # not through a proxy
    return opener.open(address, timeout=timeout_s)


def _torchft(name: str) -> Any:
    # Otherwise each step writes some lines of the lighthouse and of each replica to stderr.
    os.environ.setdefault("RUST_LOG", "warn")
    logging.getLogger("torchft.manager").addFilter(_is_of_use)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != "torchft":
            raise
        raise ModuleNotFoundError(
            "megastrategy.Replicas needs torchft: pip install 'megastrategy[replicas]'", name="torchft"
        ) from error


def _is_of_use(record: logging.LogRecord) -> bool:
    return "NCCL flight recorder" not in record.getMessage()  # of each new group, also of gloo


def _ignore_request(handler: Any, *arguments: Any) -> None:
    """Logs nothing for each state that is sent: the standard library writes a line to stderr."""


class _InCallersThread:
    """Runs the Manager's jobs in the thread that submits them, which is a daemon and waits for them anyhow.

    The Manager's own thread would keep a rank alive, after an error, that waits there for one that has ended.
    """

    def submit(self, call: Callable[..., Any], **arguments: Any) -> Future[Any]:
        future = Future[Any]()
        try:
            future.set_result(call(**arguments))
        except BaseException as error:  # noqa: BLE001 - raised where the future is waited for
            future.set_exception(error)
        return future

    def shutdown(self, *, wait: bool) -> None:
        """Does nothing: there is no thread."""


class TorchftLink(core.ReplicaLink):
    """One rank's connection, through torchft's Manager and a gloo group that it makes for each quorum."""

    def __init__(
        self, slot: int, lighthouse: str, heartbeat_s: float, skew_s: float, patience_s: float, host: str
    ) -> None:
        # Its absence is reported at the start, not at the first batch.
        if not hasattr(_torchft("torchft").ProcessGroupGloo, "configure"):
            raise ImportError(
                "megastrategy.Replicas needs torchft 0.2, and this torchft has another interface, as its nightly "
                "builds do: pip install 'megastrategy[replicas]', without torchft-nightly"
            )
        self._slot, self._lighthouse, self._host = slot, lighthouse, host
        self._heartbeat_s, self._skew_s, self._patience_s = heartbeat_s, skew_s, patience_s
        self._manager: Any = None
        self._group: Any = None
        self._transport: Any = None
        self._store: TCPStore | None = None
        self._received: Any = None
        self._step_before = 0

    def join(self, ranks: core.Collectives, state: Callable[[], Any]) -> None:
        torchft = _torchft("torchft")
        self._check_timeout_of(ranks)
        self._ranks = ranks
        # A store of its own: that of the launcher may have the addresses of a process that has ended.
        if ranks.rank == 0:
            self._store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        host, port = ranks.all_gather_objects((self._host, self._store.port if self._store is not None else 0))[0]
        skew = timedelta(seconds=self._skew_s)
        self._group = _group(torchft, skew, self._set_members)
        self._transport = _transport(_torchft("torchft.checkpointing.http_transport"), skew, self._host)
        self._transport._server.RequestHandlerClass.log_request = _ignore_request
        try:
            self._manager = torchft.Manager(
                pg=self._group,
                load_state_dict=self._receive,
                state_dict=state,
                min_replica_size=1,  # the caller counts, since it also has to wait for more
                use_async_quorum=False,
                timeout=skew,
                quorum_timeout=timedelta(seconds=self._patience_s),
                connect_timeout=timedelta(seconds=min(self._skew_s, 10.0)),
                rank=ranks.rank,
                world_size=ranks.size,
                store_addr=host,
                store_port=port,
                lighthouse_addr=self._lighthouse,
                replica_id=f"replica{self._slot}",
                hostname=self._host,
                heartbeat_interval=timedelta(seconds=_INTERVAL_S),
                checkpoint_transport=self._transport,
                init_sync=False,  # states that differ at the start are an error, and are not mixed by rank
                # About one a second: a lighthouse may be started again, and torchft divides the time by the retries.
                quorum_retries=max(10, int(self._patience_s)),
            )
        except (RuntimeError, TimeoutError) as error:
            raise self._unreachable(error) from error
        self._manager._executor.shutdown()
        self._manager._executor = _InCallersThread()
        self._manager._client = _Client(self._manager, self._group)

    def _check_timeout_of(self, ranks: core.Collectives) -> None:
        if ranks.size > 1:
            timeout_s = ranks.host.group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
            if timeout_s <= self._skew_s:
                raise ValueError(
                    f"skew_s={self._skew_s:g}: expected less than {timeout_s:g} seconds, the timeout of the ranks' "
                    "process group, in which they wait for one that waits for other replicas. Pass a longer timeout to "
                    "init_process_group, MegatronDDPStrategy or accelerate's InitProcessGroupKwargs"
                )

    def _receive(self, state: Any) -> None:
        self._received = state

    def _set_members(self, place: int, members: tuple[int, ...]) -> None:
        self.place, self.number, self.members = place, self.number + 1, members

    @property
    def step(self) -> int:  # type: ignore[override]
        return int(self._manager.current_step())

    @property
    def failure(self) -> str:  # type: ignore[override]
        error = self._manager.errored()
        if error is None:
            return ""
        return f"{str(error.original_exception) or repr(error.original_exception)}{self._group.hint}"

    def meet(self, *, joins: bool) -> Any:
        self._received, self._step_before = None, self._manager.current_step()
        wait_s = self._patience_s if joins else 2 * self._skew_s + self._heartbeat_s
        try:
            self._manager.start_quorum(shrink_only=not joins, timeout=timedelta(seconds=wait_s))
        except (RuntimeError, TimeoutError) as error:
            raise self._unreachable(error) from error
        state, self._received = self._received, None
        return state

    def _unreachable(self, error: Exception) -> core.CollectiveError:
        address = urllib.parse.urlsplit(self._lighthouse)
        try:
            socket.create_connection(
                (address.hostname or "", address.port or 80), timeout=min(self._skew_s, 5.0)
            ).close()
            reason = (
                "It runs, so this replica was stopped for too long, and the others train without it: start it again"
            )
        except OSError as refused:
            reason = f"It does not answer ({refused}): start it at this address, and then the replicas that have ended"
        return core.CollectiveError(
            f"replica {self._slot}: there is no agreement with other replicas through the lighthouse at "
            f"{self._lighthouse}. {reason}.{self._group.hint} torchft said: {error}"
        )

    def undo_meeting(self) -> None:
        self._manager.load_state_dict({"step": self._step_before, "batches_committed": 0})
        self.leave_group()

    def leave_group(self) -> None:
        self._manager._commit_failures += 1  # otherwise the same members would not make a new group
        self._drop_group()

    def mean_(self, tensor: Tensor) -> None:
        if len(self.members) > 1:
            self._reduce(tensor, ReduceOp.SUM)
            tensor.div_(len(self.members))

    def max_(self, numbers: Tensor) -> None:
        self._reduce(numbers, ReduceOp.MAX)

    def _reduce(self, tensor: Tensor, kind: Any) -> None:
        # Not Manager.allreduce: its chain of futures takes 0.3 ms of each bucket's processor time.
        if len(self.members) == 1 or self.failure:
            return
        options = AllreduceOptions()
        options.reduceOp = kind
        try:
            self._group.allreduce([tensor], options).wait()
        except Exception as error:  # noqa: BLE001 - it is the vote's, as any error in a sum
            self._manager.report_error(error)
            self._drop_group()

    def _drop_group(self) -> None:
        # A member that has failed goes to its vote; one that has not would wait for it in the sum until the timeout.
        self._manager.report_error(RuntimeError("this replica has left its group of replicas"))
        self._manager._quorum_id = -1  # a lighthouse that was started again may give the next group this one's number
        self._group.abort()

    def vote(self) -> bool:
        # Manager.should_commit asks the same of the ranks through a server, which takes 0.9 ms.
        voted = self._ranks.max_of_bytes([self.failure != ""]) == [0]
        self._transport.disallow_checkpoint()  # later requests wait for the next state
        if voted:
            self.pass_step()
            self._manager._commit_failures = 0
        else:
            self.leave_group()  # members that voted yes would wait for this one in their next meeting
        return voted

    def pass_step(self) -> None:
        self._manager.load_state_dict({"step": self.step + 1, "batches_committed": 0})
        self._step_before = self.step

    def leave(self) -> None:
        if self._transport is None:
            return
        if self._manager is not None and self._manager._manager is not None:  # in rank 0, the heartbeat: it ends first
            self._manager._manager.shutdown()
        self._group.abort(errored=False)
        # Its server answers within half a second, and this rank may be about to raise an error.
        threading.Thread(target=_end_server, args=(self._transport,), daemon=True).start()
        self._transport = self._store = None


class _Client:
    """The Manager's client, which makes a new group also if a lighthouse that was started again counts from 1.

    torchft keeps a group while its number is the same, and finds addresses in the store by that number. Before the
    lighthouse was started again, another group may have had it. So a group is new if its members are others, or if this
    replica is behind, and its addresses are found by its step, too.
    """

    def __init__(self, manager: Any, group: Any) -> None:
        self._manager, self._group, self._client = manager, group, manager._client
        self._members: list[str] = []

    def _quorum(self, **arguments: Any) -> Any:
        quorum = self._client._quorum(**arguments)
        if quorum.heal or quorum.replica_ids != self._members:
            self._manager._quorum_id = -1
        self._members, self._group.step = quorum.replica_ids, quorum.max_step
        return quorum

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)


def _group(torchft: Any, timeout: timedelta, set_members: Callable[[int, tuple[int, ...]], None]) -> Any:
    """Returns the group of the ranks at one place of all replicas, which reports its members when they change."""

    class Group(torchft.ProcessGroupGloo):  # type: ignore[misc] # a class of no type
        step = 0
        hint = ""  # why its members did not connect

        def configure(
            self,
            store_addr: str,
            replica_id: str,
            rank: int,
            world_size: int,
            quorum_id: int,
            group_rank: int,
            group_world_size: int,
            global_ranks: Sequence[int],
        ) -> None:
            # Before it connects: a connection that fails is reported, and the members are the same.
            set_members(rank, tuple(number // group_world_size for number in global_ranks))
            store_addr = f"{store_addr}/{self.step}"
            self.hint = ""
            try:
                super().configure(
                    store_addr, replica_id, rank, world_size, quorum_id, group_rank, group_world_size, global_ranks
                )
            except RuntimeError as error:
                if could_not_connect(error):
                    self.hint = f" Replicas did not connect. If none has just ended: {way_out()}."
                    _log.warning("%s They try again. gloo said: %s", self.hint.strip(), error)
                raise

        def _create_pg(self, store: Any, rank: int, world_size: int) -> Any:
            # torchft's own would listen at a loopback address where the machine's name leads to one.
            is_chosen = bool(os.environ.get("GLOO_SOCKET_IFNAME"))
            return core.gloo_group(store, rank, world_size, timeout, finds_interface=not is_chosen)

    return Group(timeout=timeout)


def _transport(module: Any, timeout: timedelta, host: str) -> Any:
    """Returns the server of this rank's state, which other replicas reach by the name ``host``, without a proxy."""

    class Transport(module.HTTPTransport):  # type: ignore[misc] # a class of no type
        def address(self) -> str:
            return f"http://{host}:{self._server.socket.getsockname()[1]}/checkpoint/"

        @classmethod
        def _load_from_address(cls, address: str, timeout: timedelta) -> object:
            with _open(address, timeout.total_seconds()) as received, warnings.catch_warnings():
                warnings.filterwarnings("ignore", "The given buffer is not writable")  # torch's own reading
                return module._streaming_load(received, weights_only=False)

    return Transport(timeout=timeout, num_chunks=0)


def _end_server(transport: Any) -> None:
    transport.shutdown(wait=True)
    transport._server.server_close()
