"""The replicas that train one model together, each a job of its own that may end and come back.

[Note: a window of replicas]
A window lasts from a meeting to the vote that follows: one batch, or with ``no_sync`` the microbatches whose gradients
are reduced together. Before its first batch the replicas meet (:meth:`.ReplicaLink.meet`), and one that has fewer steps
takes the state of another. When the sums of its synchronised backward have ended, complete or not, the replicas
exchange :mod:`.replica_facts`, and the ranks of each replica vote. If all ranks say yes, its gradients are final. If
not, the replica meets those that are left, and repeats the sums from a copy of its own: no batch is lost. Other
replicas may have voted yes, with this one's gradients in their sums. Then this one is a step behind. It takes their
state, which is after the step, and its coming ``optimizer.step()`` does nothing. Nor does it if fewer than ``minimum``
are left: none that joins now has the microbatches of the window, or the steps of the batch, so this one is lost.

A batch may have several windows, one for each of several optimizers. A later one begins with its backward, after the
step of the one before: the replicas meet, and none joins. What a replica that did not step loses is then what an
optimizer has changed, which it takes over, and never a gradient that is still to be stepped with.

[Note: a meeting of all replicas]
If all replicas are members, none can join, and it is enough that the members hear of each other. They send the number
of their batch (:meth:`.ReplicaLink.confirm`), which takes a third of the time of a question to the lighthouse and needs
no lighthouse. If one has ended, or has another number, that fails, and the replicas meet: the number is another one,
too, where one has come to the end and the others have not. A replica that comes here has completed what it did before,
such as a checkpoint that it writes for all.

After a layer was unfrozen sums have other sizes, and gloo ends a process that gets one of another size than its own. So
replicas whose layout has changed leave the group and meet in a new one, where layouts are compared first.

[Note: when the loop's state is taken]
The state of the loop (its place, schedules, hyper-parameters) is that of another replica between two windows. A replica
that is in the middle of a window loads it when its own program begins the next one, too: otherwise a schedule would
step twice.

[Note: why a process joins with step 0]
Whatever checkpoint a process has loaded, it joins without a step. So it is never ahead of replicas that train, and an
old file cannot overwrite their weights. Only if no replica has a step, at the start of all, do the states that they
bring count. Then all have to be equal: the first exchange compares a digest of them.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import hashlib
import os
import pickle
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

from torch import Tensor

from ..collectives import Collectives, ReplicaLink, Worker
from ..errors import CollectiveError, ReplicaMismatchError
from .replica_facts import NO_FLAGS, WORD, Flag, ReplicaFacts, check_facts, exchange

T = TypeVar("T")

_PROBE_S = 0.25
"""Seconds between two questions whether the replica's other ranks are alive, while this one waits with them."""
_AGAIN_S = 0.1
"""Seconds between two meetings while replicas are missing."""
NOTICE = 4096


class ReplicaModel(Protocol):
    """The members of a wrapped model that :class:`Replicas` uses."""

    @property
    def ranks(self) -> Collectives:
        """The ranks of this replica."""

    def state(self) -> Any:
        """Returns this rank's part of the model's and the optimizers' state; tensors are not copied."""

    def load(self, state: Any) -> None:
        """Replaces the state by that of the rank at the same place in another replica. Collective over the ranks."""

    def begin_window(self) -> None:
        """Comes before each batch with which a window begins.

        Raises:
            ValueError: if another optimizer than the model's steps a trained parameter.
        """

    def groups(self) -> Any:
        """Returns which parameters are trained, and the optimizers' groups: names and hyper-parameters."""

    def load_groups(self, groups: Any) -> None:
        """Replaces them by another replica's. Collective over the ranks."""

    def layout_digest(self) -> bytes:
        """Returns a digest of everything that has to be equal before tensors are summed."""

    def drop_unfinished(self) -> None:
        """Drops the gradients of a backward that raised."""

    def state_digest(self) -> bytes:
        """Returns a digest of :meth:`state`."""


class Replicas:
    """The replicas that train one model together; see [Note: a window of replicas].

    Args:
        link: this rank's connection to the others.
        of: the number of replicas that start together.
        slot: this replica's number, from 0; one that comes back has the same.
        minimum: the number of replicas below which nothing is stepped: they drop the batch and wait before the next.
        patience_s: the seconds for which missing replicas are waited for, at the start and below ``minimum``.

    Attributes:
        epoch, batch: the loop's place: the present epoch, and the batches of it so far. After :meth:`stop` that of the
            first batch that was not trained.
        should_stop: whether some replica's :meth:`stop` was called, and the present batch was the last.
        is_skipped: whether no optimizer of this replica steps in this window: others have, and their state was taken,
            or fewer than ``minimum`` are left.
        num_taken: the number of times that the state of another replica was taken.
        notice: at most :data:`NOTICE` bytes that are the leader's in all replicas after each meeting of new members.
    """

    def __init__(self, link: ReplicaLink, *, of: int, slot: int, minimum: int = 1, patience_s: float = 600.0) -> None:
        if not 1 <= minimum <= of:
            raise ValueError(f"minimum={minimum}: expected a number from 1 to of={of}")
        if not 0 <= slot < of:
            raise ValueError(f"slot={slot}: expected a number from 0 to {of - 1}, since of={of}")
        self.of, self.slot, self.minimum = of, slot, minimum
        self.epoch = self.batch = 0
        self.should_stop = self.is_skipped = False
        self.num_taken = 0
        self.notice = b""
        self.link, self._patience_s = link, patience_s
        self._model: ReplicaModel | None = None
        self._registered: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {}
        self._phase = "not joined"  # then "between", "open" (a window), "closed"
        self._has_started = self._wants_stop = self._has_stepped = self._joins = self._has_checked = False
        self._num_batches = self._most_batches = 0  # of the epoch, here and in any member; 0 for loaders without length
        self._taken: dict[str, Any] = {}  # parts of another replica's state that are still to be loaded
        self._history = self._numbers = bytes(WORD)
        self._layout = b""  # its digest, in this window

    @functools.cached_property
    def worker(self) -> Worker:
        """The thread in which everything between replicas is done, in order."""
        # Not before it is used: a launcher may fork or copy this process's objects into others first.
        return Worker()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Makes this object None in copies and pickles of objects that refer to it, once it has a model."""
        return (type(None), ()) if self._model is not None else super().__reduce_ex__(protocol)

    # --- for the training loop ---------------------------------------------------------------------------------------

    @property
    def members(self) -> tuple[int, ...]:
        """The slots of the replicas that train now, the leader's first."""
        return self.link.members

    @property
    def is_leader(self) -> bool:
        """True for one of the replicas that train now, which writes checkpoints and logs."""
        return bool(self.members) and self.link.place == 0

    def writes_in(self, call: str) -> bool:
        """Returns whether this replica writes the file of a ``call`` that all make: the leader does.

        Raises:
            ValueError: before the first batch, when there is no leader yet.
        """
        if not self.members:
            raise ValueError(
                f"{call} before the first batch of replicas.batches(loader): of the replicas the leader writes, and "
                "which one that is, is unknown until they have met. Call it in the loop or after it"
            )
        return self.is_leader

    def sampler_ranks(self, num_replicas: int, rank: int) -> dict[str, int]:
        """Returns these arguments of a DistributedSampler, given those of this replica's ranks, for all ranks of all
        replicas."""
        return {"num_replicas": self.of * num_replicas, "rank": self.slot * num_replicas + rank}

    def register(self, name: str, get: Callable[[], Any], put: Callable[[Any], object]) -> None:
        """Adds state of the training loop that a replica takes over, such as that of a learning rate's schedule.

        Every replica registers the same names before its first batch.

        Args:
            get: returns the state, which is pickled. A scheduler's ``state_dict``, for example. It is called between
                two batches: once before the second one, and later in another thread, on some ranks only.
            put: replaces it, between two batches. A scheduler's ``load_state_dict``, for example.
        """
        if name in self._registered:
            raise ValueError(f"{name!r} is registered already: give each state a name of its own")
        self._registered[name] = get, put

    def epochs(self, num: int) -> Iterator[int]:
        """Yields the numbers of the epochs that are left, up to ``num``, and leaves the replicas after the last one.

        A replica that comes back joins here, and begins with the epoch that the others are in.
        """
        self.begin_batch()
        while self.epoch < num and not self.should_stop:
            epoch = self.epoch
            yield epoch
            if self.epoch == epoch and not self.should_stop:
                self.epoch, self.batch = epoch + 1, 0
        self.finish()

    def batches(self, loader: Iterable[T]) -> Iterator[T]:
        """Yields the batches of one epoch that are left; the replicas meet before each is fetched.

        A replica that has come back fetches and drops those before the loop's place. To be called once an epoch.
        """
        is_first = self._phase == "not joined"
        self.begin_batch()
        if is_first and self.epoch:
            self.close()
            raise ValueError(
                f"the other replicas are in epoch {self.epoch}, where this loop does not begin: write the loop over "
                "epochs as for epoch in replicas.epochs(num_epochs)"
            )
        epoch, iterator, fetched = self.epoch, iter(loader), 0
        self._num_batches = _length_of(loader)
        try:
            while True:
                self.begin_batch()
                self._check_place(epoch, fetched)
                if self.should_stop:
                    return
                while fetched < self.batch and next(iterator, _END) is not _END:
                    fetched += 1
                if (batch := next(iterator, _END)) is _END:
                    self._check_length()
                    return
                fetched += 1
                try:
                    yield batch
                finally:  # also if the loop is left here
                    self.batch += 1
        finally:
            self._num_batches = self._most_batches = 0
            if not self.should_stop:  # a checkpoint after a stop has the place at which to go on
                self.epoch, self.batch = epoch + 1, 0

    def note_lengths(self, every: Sequence[ReplicaFacts]) -> None:
        """Notes the most batches that the loader of any member has in this epoch."""
        self._most_batches = max(facts.num_batches for facts in every)

    def _check_length(self) -> None:
        # The others would go on alone, and if it is the last epoch, each would end with weights of its own.
        if 0 < self._num_batches < self._most_batches:
            self.close()
            raise ReplicaMismatchError(
                f"replica {self.slot} has read all {self._num_batches} batches of its loader, and that of another "
                f"replica has {self._most_batches}: give each as many, by a DistributedSampler for example"
            )

    def _check_place(self, epoch: int, fetched: int) -> None:
        if self.epoch != epoch or self.batch < fetched:
            self.close()
            raise ReplicaMismatchError(
                f"replica {self.slot} was at batch {fetched} of epoch {epoch}, the others are at batch {self.batch} "
                f"of epoch {self.epoch}: it was stopped for too long to go on from here. Start it again"
            )

    def stop(self) -> None:
        """Makes all replicas end after the same batch: the present one, or the next if this one is reduced already.

        For a signal that all of them get; a replica that ends alone needs nothing.
        """
        self._wants_stop = True

    def finish(self) -> None:
        """Leaves the other replicas after the last batch. Collective over this replica's ranks."""
        # Rank 0 ends the connection for all of them, and some may still wait in a meeting.
        self._attached.ranks.max_of_bytes([0])
        self.close()

    def close(self) -> None:
        """Leaves the other replicas, which go on without waiting. May be called again."""
        self._phase = "closed"
        self.link.leave()
        self.worker.stop()

    # --- a window ----------------------------------------------------------------------------------------------------

    def attach(self, model: ReplicaModel) -> None:
        """Sets the model whose gradients are averaged over the replicas."""
        if self._phase == "closed":
            raise ValueError("these replicas were left: make new ones for another training")
        if self._model is not None:
            raise ValueError(
                "replicas=: these replicas have a model already, and one model is supported: wrap one module that "
                "contains them all (torch.nn.ModuleDict)"
            )
        self._model = model

    @property
    def _attached(self) -> ReplicaModel:
        if self._model is None:
            raise ValueError("no model trains with these replicas: DistributedDataParallel(..., replicas=replicas)")
        return self._model

    def begin_batch(self) -> None:
        """Comes before a batch is fetched: the replicas meet if a window begins. Collective over this replica's ranks.

        Raises:
            ReplicaMismatchError, LayoutMismatchError: if this replica does not fit to the others.
            CollectiveError: if too few replicas come in time.
        """
        model = self._attached
        if self._phase == "closed":
            raise ValueError("these replicas were left: make new ones for another training")
        with self.leaving_after_an_error():
            model.drop_unfinished()
            if self._phase != "open" or self.is_skipped:  # the meeting after a vote that said no began a window, too
                model.begin_window()
            if self._phase != "open":
                self._check_registered()
                if self._phase == "not joined":
                    self.link.join(model.ranks, self._state)
                self._begin_window(joins=True)
            self._begin()

    def _begin(self) -> None:
        self._load_registered()
        self.is_skipped = self._has_stepped = False

    @property
    def is_in_window(self) -> bool:
        """Whether a batch has begun whose step is still to come: then :meth:`begin_batch` meets no others."""
        return self._phase == "open"

    def begin_backward(self) -> bool:
        """Comes before the first gradient of a backward. Collective over this replica's ranks.

        Returns whether a window begins in the middle of a batch, in which the replicas meet.

        Raises:
            ValueError: outside of a batch, and before the step of a synchronised backward.
            ReplicaMismatchError: if the others have gone on without this replica.
        """
        if self._phase == "open" and not self.is_skipped:
            if self._attached.layout_digest() != self._layout:
                with self.leaving_after_an_error(), self._taking_none():
                    self._begin_window(joins=False)
            return False
        if self._phase not in ("open", "between") or not self._has_stepped:
            raise ValueError(
                "a backward outside of replicas.batches(loader), or between a synchronised backward and its step: with "
                "replicas, each step has one synchronised backward before it, the others are under no_sync()"
            )
        with self.leaving_after_an_error():
            if self._phase == "between":
                with self._taking_none():
                    self._begin_window(joins=False)
            self._begin()
        return True

    @contextlib.contextmanager
    def _taking_none(self) -> Iterator[None]:
        before = self.num_taken
        yield
        if self.num_taken > before:
            raise ReplicaMismatchError(
                f"replica {self.slot} was stopped for too long in the middle of a batch, and the others went on "
                "without it. Start it again"
            )

    def exchange(self, facts: ReplicaFacts, numbers: bytes) -> tuple[list[ReplicaFacts], bytes] | None:
        """Returns the facts of all members, and the maxima of their ``numbers``; None if that failed."""
        return self.watched(lambda: exchange(self.link, facts, numbers))

    def facts(self, *, flags: Flag = NO_FLAGS) -> ReplicaFacts:
        """Returns this replica's facts, without those of a backward."""
        digest = self._attached.layout_digest()
        return ReplicaFacts(
            self._history, digest, self._numbers, self._batch_number, num_batches=self._num_batches, flags=flags
        )

    @property
    def _batch_number(self) -> int:
        epoch, batch = self._taken.get("place", (self.epoch, self.batch))
        return int(epoch * 2**32 + batch)

    def max_of_bytes(self, numbers: bytes) -> bytes | None:
        """Returns the maxima over the replicas, byte by byte; None if one has ended.

        The ranks at one place of all replicas call it alike, with as many bytes, at one point of the training.
        """
        return self.watched(lambda: self.link.max_of_bytes(numbers))

    def check(self, every: Sequence[ReplicaFacts]) -> None:
        """Raises the error of this replica if its facts are not those of most members."""
        check_facts(every, self.link.place, self.slot)

    @property
    def wants_stop(self) -> bool:
        """Whether :meth:`stop` was called on this rank."""
        return self._wants_stop

    def vote(self) -> bool:
        """Returns whether this replica's sums are complete on all of its ranks; then the window ends.

        Collective over them.
        """
        if not self.link.vote():
            return False
        self._history = _chained(self._history, repr((self.link.step, self.members)))
        self._phase = "between"
        return True

    def meet_again(self) -> bool:
        """Meets the members that are left after a vote that said no. Collective over this replica's ranks.

        Returns True if the others have stepped: this replica has their state now, and :meth:`load_taken` is to come.
        """
        before = self.num_taken
        self._meet(joins=False)
        self.is_skipped = self.num_taken > before
        if self.is_skipped and len(self.members) < self.minimum:
            self._phase = "between"  # the others wait before their next batch, so this replica does, too
        return self.is_skipped

    def drop_below_minimum(self) -> bool:
        """Returns whether fewer than ``minimum`` replicas are left; then the window ends without a step."""
        if len(self.members) >= self.minimum:
            return False
        self.link.pass_step()  # one that joins now is behind, and takes this one's place in the loop
        self.is_skipped, self._phase = True, "between"
        return True

    def load_taken(self) -> None:
        """Loads the model's state, if :meth:`meet_again` has taken one. Collective over this replica's ranks."""
        if "model" in self._taken:
            self._attached.load(self._taken.pop("model"))

    def note_step(self, numbers: str) -> None:
        """Adds the hyper-parameters of an optimizer's step to the digest that replicas compare.

        Not if this replica does not step: if others have, it has taken their digest.
        """
        self._has_stepped = True
        if not self.is_skipped:
            self._numbers = _chained(self._numbers, numbers)

    def note_scaler(self) -> None:
        """Comes before a gradient scaler steps an optimizer or leaves the step out, as all replicas do alike."""
        self._has_stepped = True

    def abandon(self) -> None:
        """Leaves the group of members in the middle of a window, after an error: their sums fail at once."""
        if self._phase == "open":
            self.link.undo_meeting()
            self._phase = "between"

    @contextlib.contextmanager
    def leaving_after_an_error(self) -> Iterator[None]:
        """Leaves the others if this fails: they would wait until this process ends."""
        try:
            yield
        except BaseException:
            self.close()
            raise

    # --- meetings ----------------------------------------------------------------------------------------------------

    def _begin_window(self, *, joins: bool) -> None:
        model = self._attached
        has_changed = self._layout not in (b"", model.layout_digest())
        if has_changed:
            self.link.leave_group()
        if has_changed or not self._are_all_there():
            self._meet(joins=joins)
        self._phase, self._layout = "open", model.layout_digest()

    def _are_all_there(self) -> bool:
        """Returns whether all replicas are members and have come here; see [Note: a meeting of all replicas]."""
        are_members = len(self.members) >= self.of
        # Of fewer, a decision between two windows may have failed, perhaps for one rank only. The lighthouse has to
        # make them another group.
        has_failed = self.link.failure != ""
        if are_members:
            has_failed = not self.watched(lambda: self.link.confirm(self._batch_number.to_bytes(8, "big")))
        if self._attached.ranks.max_of_bytes([has_failed]) == [0]:
            return are_members
        self.link.undo_meeting()
        return False

    def _meet(self, *, joins: bool) -> None:
        """Meets, until enough replicas are there and connected; if none ``joins``, any number is enough."""
        deadline, ranks = time.monotonic() + self._patience_s, self._attached.ranks
        minimum = self.minimum if joins else 1
        while True:
            known, self._joins = self.link.number, joins
            state = self.watched(functools.partial(self.link.meet, joins=joins))
            if joins and state is not None and not state["joins"]:
                raise ReplicaMismatchError(
                    f"replica {self.slot} came back in the middle of a batch of the others, as may happen after the "
                    "lighthouse was started again: it ends here. Started again, it joins at the beginning of a batch"
                )
            has_started = self._has_started or self.link.step > 0
            wanted = minimum if has_started else self.of
            if self.link.number == known and has_started and state is None and len(self.members) >= wanted:
                return
            # Other ranks of this replica may have failed to connect, or to get their state: then all meet again.
            failed, is_late = map(bool, ranks.max_of_bytes([self.link.failure != "", time.monotonic() > deadline]))
            if not failed:
                self._take_over(state)
                has_come = len(self.members) >= wanted
                starts = has_started or has_come or (is_late and len(self.members) >= minimum)
                notice = (self.notice if self.is_leader else b"").ljust(NOTICE, b"\0")
                every = self.exchange(self._first_facts(starts=starts), notice)
                # Another replica may have ended for some ranks of this one only, and all have to go on alike.
                failed = ranks.max_of_bytes([every is None]) != [0]
                if every is not None and not failed:
                    self.check(every[0])
                    self.note_lengths(every[0])
                    is_shared = self._is_a_slot_shared(is_newest=state is not None, starts=not has_started)
                    self.notice = every[1].rstrip(b"\0")
                    may_start = any(Flag.STARTS in facts.flags for facts in every[0]) and not is_shared
                    if may_start and len(self.members) >= minimum:
                        self._has_started = True
                        return
            if is_late:
                reason = self.link.failure or "start the missing ones again, or pass a smaller minimum"
                raise CollectiveError(
                    f"replica {self.slot}: {len(self.members)} of {self.of} replicas are there, and "
                    f"minimum={self.minimum}. They did not begin within {self._patience_s:g} s: {reason}"
                )
            if failed:
                self.link.undo_meeting()
            time.sleep(_AGAIN_S)

    def _is_a_slot_shared(self, *, is_newest: bool, starts: bool) -> bool:
        """Returns whether two members have one slot, after an exchange: one that was killed may be a member till then.

        Raises:
            ReplicaMismatchError: in that one of them that came last.
        """
        is_second = self.members.index(self.slot) != self.link.place
        if self.members.count(self.slot) > 1 and (is_newest or (starts and is_second)):
            raise ReplicaMismatchError(
                f"slot={self.slot} (REPLICA_GROUP_ID): another process is this replica already, and both would read "
                f"the same data. Give each replica a number of its own, from 0 to {self.of - 1}"
            )
        return len(set(self.members)) < len(self.members)

    def _first_facts(self, *, starts: bool) -> ReplicaFacts:
        if self._history == bytes(WORD):
            # Before the first step: everything that has to be equal, since no replica takes another's state.
            self._history = self._attached.state_digest()
        return self.facts(flags=Flag.STARTS if starts else NO_FLAGS)

    def _state(self) -> dict[str, Any]:
        """Returns what another replica takes over."""
        return {
            "model": self._attached.state(),
            "groups": self._attached.groups(),
            "registered": {name: get() for name, (get, _) in self._registered.items()},
            "place": (self.epoch, self.batch),
            "digests": (self._history, self._numbers),
            "stops": self.should_stop,
            "joins": self._joins,
        }

    def _take_over(self, state: dict[str, Any] | None) -> None:
        if state is None:
            return
        self._taken, self.num_taken = state, self.num_taken + 1
        self._history, self._numbers = state["digests"]
        if self._phase != "open":
            self._load_registered()  # first: they may unfreeze parameters
            self.load_taken()

    def _check_registered(self) -> None:
        """Raises ValueError for state that could not be sent: otherwise all would end when one comes back."""
        # After this process's first step: what a loop registers may not exist before.
        if self._has_checked or not self._has_stepped:
            return
        self._has_checked = True
        for name, (get, _) in self._registered.items():
            try:
                with open(os.devnull, "wb") as nowhere:
                    _Checker(nowhere).dump(get())
            except Exception as error:
                raise ValueError(
                    f"replicas.register({name!r}, get, put): a replica that comes back would get the state that get() "
                    f"returns, and it cannot be sent: {type(error).__name__}: {error}"
                ) from error

    def _load_registered(self) -> None:
        """Loads the state of the training loop, between two batches: before, the program would count a batch twice."""
        if "registered" not in self._taken:
            return
        theirs = self._taken.pop("registered")
        if theirs.keys() != self._registered.keys():
            raise ReplicaMismatchError(
                f"replica {self.slot} has registered {sorted(self._registered)}, and the others {sorted(theirs)}: "
                "register the same names in all replicas, before the first batch"
            )
        for name, (_, put) in self._registered.items():
            put(theirs[name])
        # With the loop's state: a schedule of this program's may still change them for the batch that others stepped.
        self._attached.load_groups(self._taken.pop("groups"))
        self.epoch, self.batch = self._taken.pop("place")
        self.should_stop = self._taken.pop("stops")

    def watched(self, call: Callable[[], T]) -> T:
        """Calls the link, and looks meanwhile whether the replica's other ranks are alive: the link waits for all.

        Raises:
            CollectiveError: if a rank has ended. The others are not told otherwise, and wait for this replica.
        """
        ranks, results = self._attached.ranks, list[T]()
        job = self.worker.submit(lambda: results.append(call()))
        while not concurrent.futures.wait([job], _PROBE_S).done:
            for rank in (rank for rank in range(ranks.size) if rank != ranks.rank):
                try:
                    ranks.probe(rank)
                except RuntimeError as error:
                    self.close()
                    raise CollectiveError(
                        f"replica {self.slot}, rank {ranks.rank}: rank {rank} of this replica has ended, and so this "
                        f"rank ends. The backend said: {error}"
                    ) from error
        job.result()
        return results[0]


class _Checker(pickle.Pickler):
    """Pickles all but tensors, which can always be sent."""

    def persistent_id(self, value: Any) -> str | None:
        return "a tensor" if isinstance(value, Tensor) else None


_END: Any = object()


def _length_of(loader: Iterable[Any]) -> int:
    try:
        return len(loader)  # type: ignore[arg-type]
    except Exception:  # noqa: BLE001 - a generator, a DataLoader of an IterableDataset, or a class of the user's
        return 0


def _chained(word: bytes, text: str) -> bytes:
    return hashlib.sha256(word + text.encode()).digest()[:WORD]
