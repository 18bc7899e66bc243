"""Shards that rank 0 takes from ranks which are elsewhere.

[Note: handing over]
Rank 0 saves alone: ``if rank == 0: torch.save(optimizer.state_dict())``. The other ranks have gone on, into the next
backward, a barrier, or the end of the program. Their attendants (:mod:`.roll_call`) send what rank 0 asks for, over
connections that nothing else uses, so that nobody's collectives are mixed up.

What is read meanwhile does not change, for these reasons.

- Rank 0 names the state that it wants, by how many steps were begun and done and how often a state was loaded. A rank
  sends that or nothing: it compares under the lock that every change of the state needs, and keeps it until all is
  sent. A rank that is behind rank 0 is waited for. One that is ahead says so, and rank 0 raises.
- A rank cannot get ahead by training where rank 0 saves between a step and the next synchronised backward. Its next
  step ends the reduction of that backward first, in which rank 0 has to take part; forwards and backwards under
  ``no_sync`` change no state. It does get ahead where rank 0 saves between that backward and the step, or where it
  steps without any new gradient, and both end in the error.
- Weights that are still on their way (``overlap_param_gather``) are none of the shards' state: fp32 main params change
  in a step alone, and rank 0 has its own part of each gather behind it before it asks.
- Learning rates, and whatever else stands in the groups, are rank 0's own.
- Only what a caller does to tensors that it took out of ``optimizer.state`` itself is not seen.

Tensors on an accelerator are not handed over. The host of a rank runs ahead of its device there, so that the state of
which the next step is queued already is not to be told from the one before it.
"""

from __future__ import annotations

import contextlib
import functools
import pickle
import time
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import Store

from ..at_rest import AtRest, Version
from ..collectives import Collectives
from ..collectives.process_groups import Pair
from ..collectives.roll_call import CALL_ON_EVERY_RANK, RollCall
from ..errors import CollectiveError, NotOnAllRanksError
from ..gather_whole import packed, unpacked
from ..gathered_state import CollectiveGather, Gather
from ..layout import Bucket
from ..own_parts import Described, OwnParts

_POLL_S = 0.01
_END = -1  # for a bucket's number: rank 0 has all that it wants
_WHOLE = -2  # likewise: it wants the state of a parameter that the rank steps whole


class Lender(Protocol):
    """An optimizer on this rank's shards."""

    at_rest: AtRest

    def version(self) -> Version:
        """The version of its state."""

    def own_parts(self, what: str) -> OwnParts:
        """This rank's parts of a ``what``, :data:`STATE` or :data:`MAIN_PARAMS`. Changes nothing."""


class Lending:
    """The optimizers of this rank by number, counted alike on all ranks, and what its attendant does with them."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        # Weakly: the attendant's thread must not keep an optimizer, and its shards, that the program has dropped.
        self._lenders: WeakValueDictionary[int, Any] = WeakValueDictionary()
        self._num_lenders = 0
        self._pairs: dict[str, Pair] = {}  # by name
        self._num_failures = 0  # on rank 0, of exchanges

    def add(self, lender: Lender) -> int:
        """Its number."""
        number = self._num_lenders + 1
        # There before it is counted: the attendant's thread looks for what is counted.
        self._lenders[number] = lender
        self._num_lenders = number
        return number

    def __call__(self, request: dict[str, Any], store: Store) -> None:
        """Called by the attendant: hands over what is asked for, or says why it cannot."""
        if store.check([f"{request['key']}/over"]):
            return  # asked while there was no attendant
        # The lock outlives the search for a problem: released only when everything is sent, or nothing will be.
        with contextlib.ExitStack() as stack:
            lender, problem = self._find(request)
            if lender is not None:
                problem = _when_at_rest(lender, request)
                if not problem:
                    stack.callback(lender.at_rest.lock.release)
            if lender is not None and not problem:
                try:
                    parts = lender.own_parts(request["what"])
                    described = parts.describe()
                except Exception as error:  # noqa: BLE001 - raised on rank 0, which needs this
                    problem = f"it failed to read its state: {error!r}"
            # Before anything is sent, also if nothing will be: rank 0 waits for the answer of each.
            store.set(f"{request['key']}/answer/{self._rank}", problem)
            if not problem:
                try:
                    self._send(parts, described, request["pair"], store, request["timeout"])
                except RuntimeError:  # rank 0 ended or gave up, which this rank's main thread notices by itself
                    self._pairs.clear()

    def _find(self, request: dict[str, Any]) -> tuple[Lender | None, str]:
        """The optimizer that is asked for; or None, and why."""
        number, deadline = request["number"], time.monotonic() + request["patience_s"]
        # Ranks make them alike, but not at one time: rank 0 may be at its state_dict() while this one is still in the
        # constructor.
        while number > self._num_lenders:
            if time.monotonic() > deadline:
                return None, f"it has not made its optimizer, for {request['patience_s']:g} s"
            time.sleep(_POLL_S)
        return self._lenders.get(number), "its optimizer is no longer there"

    def pair_name(self, rank: int) -> str:
        """The name of the connection of rank 0 with another rank."""
        # A new name after a failure: under the old one the store still has the addresses of what broke.
        return f"megastrategy/pair/{rank}/{self._num_failures}"

    def pair(self, rank: int, store: Store, timeout: timedelta) -> Pair:
        """The connection of rank 0 with another rank, which makes its end of it meanwhile."""
        name = self.pair_name(rank)
        if name not in self._pairs:
            self._pairs[name] = Pair(store, name, 0, timeout)
        return self._pairs[name]

    def forget_pairs(self) -> None:
        """Drops rank 0's connections after an exchange that was cut off somewhere."""
        self._pairs.clear()
        self._num_failures += 1

    def _send(self, parts: OwnParts, described: Described, name: str, store: Store, timeout: timedelta) -> None:
        """Sends what rank 0 asks for, until it has all that it wants."""
        if name not in self._pairs:
            # Another name means that rank 0 gave the last connection up, so it is dropped here too.
            self._pairs = {name: Pair(store, name, 1, timeout)}
        pair, names = self._pairs[name], names_of(described)
        _send_bytes(pair, bytearray(pickle.dumps(described)))
        wanted = torch.zeros(2, dtype=torch.int64, device="cpu")
        while True:
            # Rank 0 asks bucket by bucket, so neither side holds more than one beside its own state.
            pair.receive(wanted)
            bucket, place = wanted.tolist()
            if bucket == _END:
                return
            if bucket == _WHOLE:
                assert parts.whole is not None, "it was described"
                _send_bytes(pair, packed([(place, parts.whole[place])]))
                continue
            pair.send(parts.part(parts.layout.buckets[bucket], *names[place]))


def _send_bytes(pair: Pair, data: bytearray) -> None:
    # The size first: gloo ends a process that receives another number of bytes than it expects.
    pair.send(torch.tensor([len(data)], device="cpu"))
    pair.send(torch.frombuffer(data, dtype=torch.uint8))


def _receive_bytes(pair: Pair) -> bytearray:
    numel = torch.zeros(1, dtype=torch.int64, device="cpu")
    pair.receive(numel)
    data = bytearray(int(numel.item()))
    pair.receive(torch.frombuffer(data, dtype=torch.uint8))
    return data


def _when_at_rest(lender: Lender, request: dict[str, Any]) -> str:
    """Waits for the state that is wanted, and holds its lock then; or says why that will not come."""
    wanted, deadline = request["version"], time.monotonic() + request["patience_s"]
    while True:
        version = lender.version()
        # Before the lock, which a step in progress holds: to say no takes no waiting.
        if version.num_begun > wanted.num_begun:
            return f"it has begun its step {version.num_begun}, and no longer has the state after {wanted.num_begun}"
        if version.num_replaced > wanted.num_replaced:
            return "it has loaded another state since"
        if lender.at_rest.lock.acquire(timeout=_POLL_S):
            # Again under the lock: between the look and the lock a step may have come and gone.
            if lender.version() == wanted:
                return ""
            lender.at_rest.lock.release()
        if time.monotonic() > deadline:
            return f"it has {version}, and not {wanted}, for {request['patience_s']:g} s"
        time.sleep(_POLL_S)


def names_of(described: Described) -> list[tuple[str, torch.dtype]]:
    """The names of what is kept for each element, in an order that sender and receiver have in common; also of tensors
    of one element, which may be a part of one."""
    singles = [(name, kind[0]) for _, kinds, _ in described.scalars for name, kind in kinds.items() if kind and kind[1]]
    return list(dict.fromkeys([name for names in described.params_by_keys for name in names] + singles))


class HandedOver:
    """Gathers from the attendants of the other owners; on rank 0.

    Args:
        every: all ranks.
        pairs: connections with the other owners, by rank.
    """

    is_root = True

    def __init__(self, every: Collectives, pairs: Mapping[int, Pair]) -> None:
        self._every, self._pairs = every, pairs
        self._described: dict[int, Described] = {}

    def receive_descriptions(self) -> None:
        """Receives what the others say that they have, which comes before any tensor."""
        for rank, pair in self._pairs.items():
            self._described[rank] = pickle.loads(_receive_bytes(pair))

    def everybody(self, own: Any) -> list[Any]:
        return [own, *self._described.values()]

    def bucket(self, bucket: Bucket, name: str, flat: Tensor) -> None:
        parts = flat.chunk(1 + len(self._pairs))
        for rank, pair in self._pairs.items():
            described = self._described[rank]
            # A rank without it is not asked: its place in the bucket stays zero, and is nobody's element.
            if (name, flat.dtype) in (names := names_of(described)):
                wanted = [bucket.index, names.index((name, flat.dtype))]
                with self._every.named_failures(f"an exchange with rank {rank}"):
                    pair.send(torch.tensor(wanted, dtype=torch.int64, device="cpu"))
                    pair.receive(parts[rank])

    def whole(self, own: Mapping[int, Mapping[str, Any]]) -> Iterator[tuple[int, Mapping[str, Any]]]:
        # Copied, as if it had come: what is saved must not change with the next step.
        yield from unpacked(packed(list(own.items())))
        for rank, pair in self._pairs.items():
            for index in self._described[rank].whole:
                with self._every.named_failures(f"an exchange with rank {rank}"):
                    pair.send(torch.tensor([_WHOLE, index], device="cpu"))
                    data = _receive_bytes(pair)
                yield from unpacked(data)

    def end(self) -> None:
        """The other ranks' states may change again."""
        for pair in self._pairs.values():
            with contextlib.suppress(RuntimeError):  # of a rank that has ended
                pair.send(torch.tensor([_END, 0], device="cpu"))


class Borrowing:
    """Brings one optimizer's state to rank 0; every rank has one.

    Args:
        lender: the optimizer.
        every: all ranks.
        owners: those among which elements are divided: ``every``, or the ranks of one instance.
        device: of the shards.
    """

    def __init__(self, lender: Lender, every: Collectives, owners: Collectives, device: torch.device) -> None:
        self._every, self._owners, self._device = every, owners, device
        self._roll_call: RollCall | None = every.roll_call if every.size > 1 else None
        self._number = 0
        if self._roll_call is not None:
            self._lending: Lending = self._roll_call.attend(functools.partial(Lending, every.rank))
            self._number = self._lending.add(lender)

    def is_over(self, every: Collectives) -> bool:
        """Whether it was made for these collectives."""
        return self._every is every

    @contextlib.contextmanager
    def gather(self, lender: Lender, what: str) -> Iterator[Gather | None]:
        """Enters a gather for a ``what``, :data:`STATE` or :data:`MAIN_PARAMS`; None where rank 0 has taken it already.

        Raises:
            NotOnAllRanksError: if the other ranks neither come nor have that state to hand over.
        """
        version, call = lender.version(), f"{what} of a sharded optimizer"
        # The module's note says why: on a device the host cannot tell which step's state it reads; nor can anybody
        # within a step.
        may_go_alone = self._device.type == "cpu" and version.is_at_rest
        with self._every.meeting(call, number=self._number, may_go_alone=may_go_alone) as meeting:
            if meeting.is_complete:
                yield CollectiveGather(self._owners, self._device)
            elif self._every.rank != 0:
                yield None
            else:
                assert self._roll_call is not None, "else there is nobody to be without"
                with self._handed_over(self._roll_call, what, call, meeting.key, version) as handed_over:
                    yield handed_over

    @contextlib.contextmanager
    def _handed_over(
        self, roll_call: RollCall, what: str, call: str, key: str, version: Version
    ) -> Iterator[HandedOver]:
        """Asks the other owners, on rank 0. Their states rest until this is left."""
        pairs: dict[int, Pair] = {}
        gathering, problems = HandedOver(self._every, pairs), []
        others = range(1, self._owners.size)  # rank 0's instance is the first
        request = {"kind": "hand over", "key": key, "number": self._number, "what": what, "version": version}
        limits = {"patience_s": roll_call.patience.total_seconds(), "timeout": roll_call.timeout}
        try:
            with self._every.named_failures(call):
                for rank in others:
                    roll_call.ask(rank, {**request, **limits, "pair": self._lending.pair_name(rank)})
                for rank in others:
                    problem = roll_call.answer(rank, key, self._every.probe)
                    if problem:
                        problems.append(f"rank {rank} cannot hand its part over: {problem}")
                    else:  # also where another rank cannot: this one waits for its release
                        pairs[rank] = self._lending.pair(rank, roll_call.store, roll_call.timeout)
                gathering.receive_descriptions()
            if problems:
                raise NotOnAllRanksError(
                    f"rank 0: {call} is spread over the ranks, was called on rank 0 alone, and {'; '.join(problems)}. "
                    + CALL_ON_EVERY_RANK
                )
            yield gathering
        # A message may be half read: whatever came next on that connection would be taken for something else.
        except CollectiveError:
            self._lending.forget_pairs()
            raise
        finally:
            # Also after an error: the others hold their locks, and could not step, until they hear this.
            gathering.end()
