"""Replicas that fail and come back, over torchft: the only file that knows torchft, and only its public interface.

torchft is used as with FSDP2: each rank of a replica sums with the same rank of the others. A quorum runs under the
forward, sums run under the backward, and the replica's ranks vote at the end of it.

[Note: a batch that fails]
If a sum fails, the replica votes no: its optimizers do not step, and the batch runs again with those that are left.
Others may have voted yes. Then this replica has fewer steps than they have, and takes their state in the next batch, as
one does that was started again: it contributes zeros to their sums, and loads the state when the ranks have voted yes.
If they vote no, a rank may have received a state that another rank did not get: all go back to their number of steps.

[Note: the first sum of a group]
Sums of different sizes end the processes of both sides inside gloo. So the first sum of a new group is a table with a
row for each replica, with digests of its layout and, before the first step, of its weights. A replica that differs from
most of those that have a part in the batch ends with an error, before it has sent anything else.

[Note: the state of the loop]
Registered states are read before each batch: they are sent to a replica that comes back in this batch, and are restored
before a batch runs again.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import copy
import importlib
import os
import socket
import time
import urllib.parse
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import AllreduceOptions, ReduceOp, TCPStore  # type: ignore[attr-defined] # not in the stubs

from .core import CollectiveError, DistributedDataParallel, ReplicaMismatchError

_CONNECT_S = 3.0
"""Seconds in which the members of a new group connect: they have heard of it at one time, and all are up. One that is
killed meanwhile is waited for so long; a shorter time than one needs costs a batch that runs again."""
_LOST_S = 5.0
"""Seconds of waiting for a quorum after which the lighthouse is asked whether it runs: torchft waits on without it."""
_AGAIN_S = 0.1
"""Seconds between two quorums while replicas are missing."""
T = TypeVar("T")


class _State(NamedTuple):
    """Reads and writes one of the loop's states; see :meth:`Replicas.register`."""

    get: Callable[[], Any]
    put: Callable[[Any], object]
    is_copied: bool = True


class Replicas:
    """The replicas that train one model together, each a job of its own that may end and come back.

    A hook of the wrapped model (``set_replica_hook``). If a replica ends, the others run that batch again without it;
    started again, it takes weights, optimizer state and the loop's place from them. See docs/replicas.md.

    Args:
        of: the number of replicas that start together. None: ``NUM_REPLICA_GROUPS`` in the environment.
        slot: this replica's number, from 0; the same when it comes back. None: ``REPLICA_GROUP_ID``.
        lighthouse: the address of torchft's lighthouse. None: ``TORCHFT_LIGHTHOUSE``.
        skew_s: the longest time by which one replica may be later than another.
        patience_s: the seconds for which missing replicas are waited for at the start.
        backend: "gloo" or "nccl", between replicas. A process group of NCCL may hang when a replica ends.
        process_group: all ranks of this replica. None: the default group, if there is one.

    Attributes:
        epoch, batch: the loop's place: the present epoch, and the batches of it so far.
        step: the number of steps that the replicas have made.
        dropped: whether the last batch was dropped, and no optimizer stepped.
        healed: whether the state of another replica was taken in the last batch.
        should_stop: whether some replica's :meth:`stop` was called, and the last batch was the last one.
        members: the slots of the replicas of the last batch.
        is_leader: True for one of those that made the last step, which writes checkpoints.

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
        skew_s: float = 60.0,
        patience_s: float = 600.0,
        backend: str = "gloo",
        process_group: Any = None,
    ) -> None:
        self.of = _setting(of, "of", "NUM_REPLICA_GROUPS", int)
        self.slot = _setting(slot, "slot", "REPLICA_GROUP_ID", int)
        self._lighthouse = _setting(lighthouse, "lighthouse", "TORCHFT_LIGHTHOUSE", str)
        if not 0 <= self.slot < self.of:
            raise ValueError(f"slot={self.slot}: expected a number from 0 to {self.of - 1}, since of={self.of}")
        if backend not in ("gloo", "nccl"):
            raise ValueError(f"backend={backend!r}: expected 'gloo' or 'nccl'")
        self._skew_s = skew_s
        self._patience_s = patience_s
        self._backend = backend
        self._ranks = process_group
        self.epoch = self.batch = self.step = 0
        self.dropped = self.healed = self.should_stop = self.is_leader = False
        self._torchft = _import_torchft()  # its absence is reported at the start, not at the first batch
        self._states: dict[str, _State] = {"place": _State(lambda: (self.epoch, self.batch), self._set_place)}
        self._model: DistributedDataParallel | None = None
        self._manager: Any = None
        self._group: Any = None
        self._loop: dict[str, Any] = {}  # the registered states when the batch began
        self._before: dict[str, int] = {}  # the Manager's state when the batch began
        self._received: dict[str, Any] | None = None
        self._is_open = False  # whether a quorum was asked for, and the vote has not come
        self._ends = False  # whether this replica has made its last step
        self._is_over = False  # whether any replica has
        self._has_left = False  # whether all have, and know the last step

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Makes this object None in copies and pickles of objects that refer to it, once it has a model."""
        return (type(None), ()) if self._model is not None else super().__reduce_ex__(protocol)

    def attach(self, model: DistributedDataParallel) -> None:
        """Joins the others with a wrapped model, before its first batch. Collective over this replica's ranks."""
        if self._model is not None:
            raise ValueError(
                "these replicas have a model already, and one model is supported: wrap one module that contains them "
                "all (torch.nn.ModuleDict; frozen ones need no wrapper), and make new Replicas for another training"
            )
        model.set_replica_hook(self)
        self._model = model
        self._waiter = concurrent.futures.ThreadPoolExecutor(1, "quorum")
        self._device = model.device if self._backend == "nccl" else torch.device("cpu")
        has_ranks = self._ranks is not None or dist.is_initialized()
        rank = dist.get_rank(self._ranks) if has_ranks else 0
        self._size = dist.get_world_size(self._ranks) if has_ranks else 1
        self._is_first_rank = rank == 0
        # A store of its own: a launcher's may have the addresses of a process that has ended.
        place = [(socket.gethostname(), 0)]
        if rank == 0:
            self._store = TCPStore(place[0][0], 0, is_master=True, wait_for_workers=False)
            place = [(place[0][0], self._store.port)]
        if self._size > 1:
            dist.broadcast_object_list(place, group=self._ranks, group_src=0)
        if rank != 0:
            self._store = TCPStore(place[0][0], place[0][1], is_master=False, wait_for_workers=False)
        timeout = timedelta(seconds=self._skew_s)
        # torchft's gloo has one timeout to connect and to sum, and sums may be given another; its NCCL connects later.
        self._group = _make_group(
            self._torchft, self._backend, timedelta(seconds=_CONNECT_S) if self._backend == "gloo" else timeout
        )
        try:
            self._manager = self._torchft.Manager(
                pg=self._group,
                load_state_dict=self._receive,
                state_dict=self._state,
                min_replica_size=1,  # it would not count one that comes back, which waits for a vote to get its state
                use_async_quorum=True,
                timeout=timeout,
                quorum_timeout=2 * timeout,  # the lighthouse waits for the skew; a process cannot end before
                connect_timeout=timedelta(seconds=min(self._skew_s, 10.0)),
                rank=rank,
                world_size=self._size,
                store_addr=place[0][0],
                store_port=place[0][1],
                lighthouse_addr=self._lighthouse,
                replica_id=f"replica{self.slot}",
                init_sync=False,  # it would mix states by rank: replicas begin with the same weights
            )
        except (RuntimeError, TimeoutError) as error:
            raise self._unreachable(error) from error

    def register(
        self, name: str, get: Callable[[], Any], put: Callable[[Any], object], *, is_copied: bool = True
    ) -> None:
        """Adds state of the loop that a replica takes over when it comes back, such as a schedule's.

        Every replica registers the same names before its first batch. ``get`` is called before each batch, ``put``
        with another replica's state at the end of a backward, or with this one's before a batch runs again. Without
        ``is_copied`` a large state is read only when it is sent, in another thread, and is not restored.
        """
        if name in self._states:
            raise ValueError(f"{name!r} is registered already: give each state a name of its own")
        self._states[name] = _State(get, put, is_copied)

    # --- the loop ----------------------------------------------------------------------------------------------------

    @property
    def members(self) -> tuple[int, ...]:
        return self._group.members if self._group is not None else ()

    def sampler_ranks(self, num_replicas: int, rank: int) -> dict[str, int]:
        """Returns these arguments of a DistributedSampler, given those of this replica's ranks, for all ranks of all
        replicas."""
        return {"num_replicas": self.of * num_replicas, "rank": self.slot * num_replicas + rank}

    @property
    def writes(self) -> bool:
        """Whether this replica writes files: the leader, and before the first step replica 0."""
        return self.is_leader if self.step else self.slot == 0

    def epochs(self, num: int) -> Iterator[int]:
        """Yields the numbers of the epochs that are left, up to ``num``, and leaves the replicas after the last one."""
        while self.epoch < num and not self.should_stop:
            yield self.epoch
        self.finish()

    def batches(self, loader: Iterable[T]) -> Iterator[T]:
        """Yields the batches of one epoch from the place of the others; those of a dropped step come again.

        One that comes back trains its first batch without effect, and goes on with the others' next one, also if that
        is in another epoch: ``set_epoch`` of the loader's sampler is called. Collective by the batches' steps.

        Raises:
            ValueError: if an epoch ends between the microbatches of a step.
        """
        window: list[T] = []  # since the last step
        is_there = False
        while not is_there:
            set_epoch(loader, self.epoch)
            is_there = True
            for index, batch in enumerate(loader):
                if index < self.batch:
                    continue
                window.append(batch)
                steps = self.step
                queue = [batch]
                while queue:
                    self.dropped = self.healed = False
                    batch = queue.pop(0)
                    yield batch
                    if self.dropped:
                        self.restore()
                        queue = [] if self.should_stop else list(window)
                    else:
                        self.batch += len(window) if self.healed else 1
                if self.should_stop:
                    return
                if self.step != steps:
                    window = []
                if self.healed:
                    is_there = False
                    break
        if window and self._is_open:
            raise ValueError(
                f"epoch {self.epoch} ended within a step, whose batches a failure in the next epoch would lose: step "
                "with its last batch too, or make the number of batches a multiple of those of a step"
            )
        self.epoch += 1
        self.batch = 0

    def stop(self) -> None:
        """Makes all replicas end after the same batch: this one, or the next if this one is reduced already."""
        self._store.set("wants_stop", "1")

    def finish(self) -> None:
        """Waits until all replicas have made the last step, and leaves them. Collective over this replica's ranks."""
        if self._model is None or self._manager is None:
            return
        self._ends = True
        if not self._has_left and len(self.members) > 1:
            # For a new group, in which the others hear of it; one that was to go on ends, too.
            self.commit(is_refused=True)
        while not self._has_left:
            self._meet()
            self._has_left = self.commit(is_refused=False) or self._is_over
        if self._size > 1:
            dist.barrier(self._ranks)  # rank 0 ends the connection for all, and others may wait for its answer
        self.close()

    def close(self) -> None:
        """Leaves the other replicas, which go on without waiting. May be called again."""
        if self._manager is not None:
            self._manager.shutdown(wait=False)
            self._waiter.shutdown(wait=False)
            self._group.abort(errored=False)
            self._manager = None

    # --- the hook ----------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        if self._is_open or self._manager is None:
            return
        self._before = self._manager.state_dict()
        self._loop = {name: copy.deepcopy(state.get()) for name, state in self._states.items() if state.is_copied}
        self._start_quorum()
        if not self.step:
            self._wait_for_others()

    def _start_quorum(self) -> None:
        self._is_open = True
        try:
            self._manager.start_quorum()
        except (RuntimeError, TimeoutError) as error:
            raise self._unreachable(error) from error
        self._quorum = self._waiter.submit(self._manager.wait_quorum)

    def _wait_for_quorum(self) -> None:
        try:
            while not concurrent.futures.wait([self._quorum], _LOST_S).done:
                if self._refusal() is not None:
                    self.close()  # ends what still waits, in all ranks
                    raise RuntimeError("the lighthouse was lost while a quorum was waited for")
            self._quorum.result()
        except (RuntimeError, TimeoutError) as error:
            raise self._unreachable(error) from error

    def _wait_for_others(self) -> None:
        """Waits until all replicas are there at the start."""
        deadline = time.monotonic() + self._patience_s
        # Only facts of the quorum, which all ranks of this replica have alike: they vote the same number of times.
        while True:
            self._wait_for_quorum()
            if self._ends or len(self.members) == self.of or not self._manager.is_participating():
                break
            if time.monotonic() > deadline:
                raise CollectiveError(
                    f"replica {self.slot}: {self.of} replicas begin together, and after {self._patience_s:g} s "
                    f"these are there: {list(self.members)}. Start the others, or pass another number (of=)"
                )
            self._manager.report_error(RuntimeError("more replicas are needed"))
            self._vote()
            time.sleep(_AGAIN_S)
            self._start_quorum()

    def reduce(self, shard: Tensor) -> None:
        self._sum(shard)
        num = self._manager.num_participants()
        if num > 1:
            shard.div_(num)

    def any_of(self, flags: bytes) -> bytes:
        wants_stop = self._is_first_rank and bool(self._store.check(["wants_stop"]))
        summed = torch.frombuffer(bytearray(flags + bytes([wants_stop])), dtype=torch.uint8).to(self._device)
        self._sum(summed)
        *found, stops = summed.tolist()
        if stops and self._is_first_rank:
            self._store.set("stop", "1")  # before the vote, after which the other ranks of this replica read it
        return bytes(map(bool, found))

    def commit(self, *, is_refused: bool) -> bool:
        self._meet()
        if is_refused:
            self._manager.report_error(RuntimeError("a rank has refused the gradients"))
        buffers = self._buffers_of_leader()
        committed = self._vote()
        if committed and self._manager.errored() is None and not self._is_over:
            for buffer, values in buffers:
                buffer.copy_(values.view(buffer.shape))
        if committed:
            if self._is_over or not self._ends:
                self.step = self._manager.current_step() - self._is_over  # the last vote of one that ends is no step
            self.should_stop = self._is_over or bool(self._store.check(["stop"]))
            self._has_left = self._is_over
        return committed and not self._is_over

    # --- sums --------------------------------------------------------------------------------------------------------

    def _meet(self) -> None:
        """Waits for the quorum; see [Note: the first sum of a group]."""
        if self._manager is None:
            raise ValueError("these replicas were left: make new ones for another training")
        self.begin()
        self._wait_for_quorum()
        if self._group.is_new and self._manager.errored() is None:
            self._group.is_new = False
            self._compare()

    def _sum(self, tensor: Tensor) -> None:
        """Adds up over the replicas that take part. After a failure nothing is sent any more."""
        self._meet()
        if self._is_over:
            return
        if not self._manager.is_participating():
            tensor.zero_()
        self._exchange(tensor)

    def _exchange(self, tensor: Tensor) -> None:
        # Not Manager.allreduce, whose chain of futures takes 0.3 ms of each bucket's processor time.
        if self._manager.errored() is not None or len(self.members) == 1:
            return
        try:
            self._group.allreduce([tensor], self._sum_options()).wait()
        except Exception as error:  # noqa: BLE001 - it is the vote's, as any error in a sum
            self._fail(error)

    def _sum_options(self) -> AllreduceOptions:
        options = AllreduceOptions()
        options.reduceOp = ReduceOp(ReduceOp.SUM)
        options.timeout = timedelta(seconds=self._skew_s)
        return options

    def _fail(self, error: Exception) -> None:
        self._manager.report_error(error)
        self._group.abort()  # others that wait for this replica in a sum give up, too

    def _compare(self) -> None:
        """Compares digests with the other members, and learns whether any of them has ended."""
        assert self._model is not None, "attached"
        has_part = self._manager.is_participating()
        is_new = self.step == 0 and has_part
        layout = _as_number(self._model.layout_digest())
        weights = _as_number(self._model.weights_digest()) if is_new else 0
        table = torch.zeros(self.of, 5, dtype=torch.float64, device=self._device)
        table[self.slot] = torch.tensor([1, layout, weights, self._ends, has_part], dtype=torch.float64)
        self._exchange(table)
        if self._manager.errored() is not None:
            return
        rows = {slot: row for slot, row in enumerate(table.tolist()) if row[0]}
        this_row = rows[self.slot]
        self._is_over = any(row[3] for row in rows.values())
        columns = {1: "model, options, or number of ranks", 2: "weights at the start"}
        unequal = [column for column in columns if len({row[column] for row in rows.values()} - {0.0}) > 1]
        if self._is_over or unequal:
            # A replica that leaves now would end the group before others have the table.
            with contextlib.suppress(RuntimeError):  # of one that has left after it: the table is complete here
                self._group.allreduce([torch.zeros(1, device=self._device)], self._sum_options()).wait()
        if this_row[0] > 1:
            self._fail(RuntimeError("two replicas have one number"))
            raise ReplicaMismatchError(f"two replicas have number {self.slot}: give each its own (REPLICA_GROUP_ID)")
        for column in unequal:
            self._fail(RuntimeError(f"a replica has another {columns[column]}, and ends"))
            right, _ = collections.Counter(row[column] for row in rows.values() if row[4]).most_common(1)[0]
            if this_row[column] not in (0, right):
                unequal_slots = [slot for slot, row in rows.items() if row[column] not in (0, this_row[column])]
                raise ReplicaMismatchError(
                    f"replica {self.slot} has another {columns[column]} than replicas {unequal_slots}. Build the same "
                    "in all, with the same seed (torch.manual_seed) or the same checkpoint"
                )

    # --- the vote ----------------------------------------------------------------------------------------------------

    def _vote(self) -> bool:
        """Returns whether all ranks of this replica have all sums, and loads another replica's state if it came."""
        try:
            committed = bool(self._manager.should_commit())
        except (RuntimeError, TimeoutError) as error:
            raise self._unreachable(error) from error
        received = self._received
        self._received = None
        self._is_open = False
        self.healed = committed and received is not None
        # If another replica has made the last step, a batch that began after it has no effect.
        self.dropped = not committed or (self._is_over and not self._ends)
        if received is not None and committed:
            assert self._model is not None, "attached"
            self._model.load_rank_state_dict(received["model"])
            self._loop = received["loop"]
            missing = self._states.keys() ^ self._loop.keys()
            if missing:
                raise ReplicaMismatchError(f"replica {self.slot}: not all replicas have registered {sorted(missing)}")
            self.restore()
        if not committed:  # see [Note: a batch that fails]
            self._manager.load_state_dict(self._before)
            self._group.abort()
        self.is_leader = self._manager.participating_rank() == 0
        return committed

    def _state(self) -> dict[str, Any]:
        assert self._model is not None, "attached"
        large = {name: state.get() for name, state in self._states.items() if not state.is_copied}
        return {"model": self._model.rank_state_dict(), "loop": self._loop | large}

    def _receive(self, state: Any) -> None:
        # Loading is collective over this replica's ranks: it waits for the vote, in which each says that it has one.
        self._received = state

    def restore(self) -> None:
        """Puts the registered states and the place back to those before a batch that was dropped."""
        for name, value in copy.deepcopy(self._loop).items():
            self._states[name].put(value)

    def _set_place(self, place: tuple[int, int]) -> None:
        self.epoch, self.batch = place

    # --- module buffers ----------------------------------------------------------------------------------------------

    def _buffers_of_leader(self) -> list[tuple[Tensor, Tensor]]:
        """Returns the buffers that a forward may change, each with the leader's values: not the masks and tables of
        positions in integers."""
        model = self._model
        if model is None or not model.ddp_config.broadcast_buffers or self._ends or self._manager.errored() is not None:
            return []
        buffers = [one.data for one in model.module.buffers() if one.is_floating_point() or one.numel() == 1]
        if not buffers:
            return []
        values = torch.cat([one.reshape(-1).to(self._device, torch.float64) for one in buffers])
        if self._manager.participating_rank() != 0:
            values.zero_()
        self._sum(values)
        return list(zip(buffers, values.split([one.numel() for one in buffers]), strict=True))

    # --- errors ------------------------------------------------------------------------------------------------------

    def _refusal(self) -> Exception | None:
        """Returns why the lighthouse does not answer; None if it does."""
        try:
            address = urllib.parse.urlsplit(self._lighthouse)
            socket.create_connection((address.hostname or "", address.port or 80), timeout=5.0).close()
        except (OSError, ValueError) as error:
            return error
        return None

    def _unreachable(self, error: Exception) -> CollectiveError:
        refusal = self._refusal()
        reason = "It runs, and the others may have gone on without this replica: start it again"
        if refusal is not None:
            reason = f"It does not answer ({refusal}): start it at this address, and then all replicas"
        return CollectiveError(
            f"replica {self.slot}: there is no agreement with other replicas through the lighthouse at "
            f"{self._lighthouse}. {reason}. torchft said: {error}"
        )


def _make_group(torchft: Any, backend: str, timeout: timedelta) -> Any:
    """Returns the group of the ranks of one number in all replicas."""
    base = {"gloo": torchft.ProcessGroupGloo, "nccl": torchft.ProcessGroupNCCL}[backend]

    class Group(base):  # type: ignore[misc,valid-type] # a class of no type
        """Knows its members, and whether they have exchanged nothing yet."""

        members: tuple[int, ...] = ()
        is_new = False

        def configure(self, *place: Any) -> None:
            # Before it connects: a connection that fails is the vote's, and all ranks of a replica have these members.
            *_, group_world_size, global_ranks = place
            self.members = tuple(number // group_world_size for number in global_ranks)
            self.is_new = True
            super().configure(*place)

    return Group(timeout=timeout)


def set_epoch(loader: Any, epoch: int) -> None:
    """Sets the epoch of a loader and its samplers, where they have one."""
    if hasattr(loader, "_num_iter_calls"):
        loader._num_iter_calls = epoch  # Fabric's loader sets this epoch in its samplers
    sampler = getattr(loader, "batch_sampler", None)
    owners: list[Any] = [loader, getattr(loader, "sampler", None), sampler, getattr(sampler, "sampler", None)]
    for owner in owners:
        if hasattr(owner, "set_epoch"):
            owner.set_epoch(epoch)


def _import_torchft() -> Any:
    # Otherwise each step writes some lines of the lighthouse and of each replica to stderr.
    os.environ.setdefault("RUST_LOG", "warn")
    try:
        return importlib.import_module("torchft")
    except ModuleNotFoundError as error:
        why = "megastrategy.Replicas needs torchft: pip install 'megastrategy[replicas]'"
        raise ModuleNotFoundError(why, name=error.name) from error


def _as_number(digest: str) -> int:
    return int(digest, 16) % (1 << 52)  # which fp64 represents


def _setting(value: Any, name: str, variable: str, kind: Callable[[Any], T]) -> T:
    value = os.environ.get(variable) if value is None else value
    with contextlib.suppress(ValueError):
        if value not in (None, ""):
            return kind(value)
    raise ValueError(f"Replicas({name}={value!r}): pass it, or set {variable}, as docs/replicas.md shows")
