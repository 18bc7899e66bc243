"""Lets ranks save, or begin the next fit, after an exception on one of them.

A collective may have been cut off anywhere by then. So ranks communicate over the key-value store that
torch.distributed was started with, and wait for each other for a bounded time. If all come, with states that belong
together, a checkpoint can be saved although its optimizer state is sharded. If all have left the run that the exception
ended, the next fit can begin. If not, all ranks raise, and none hangs.
"""

from __future__ import annotations

import pickle
import re
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch.distributed.distributed_c10d import PrefixStore

from ..core import CollectiveError, num_collectives
from . import processes

PATIENCE = timedelta(seconds=20)
"""The longest that a rank waits for the others. Those that were interrupted too (a signal, an error on all ranks) come
at once. One that waits for a failed rank, in a collective of the engine or of the Trainer, comes after
FailureWatch.GRACE_S. One that waits in a collective of user code comes only when that rank's process ends."""

POLL_S = 0.02
PROCESS_POLL_S = 0.5
"""How often a waiting rank looks whether the others' processes have ended."""
_MAX_CAUSE_CHARS = 400
_MAX_CHAIN_CHARS = 1000
_LEFT_OUT = " ... "
_TRACEBACK = "Traceback (most recent call last)"


def report_failure(name: str, exception: BaseException, *, leaves: bool = False) -> str:
    """Records why this rank stops; returns the first failure if that was a different one, else an empty string.

    The ranks after the first most often fail in some collective, whose error does not name the cause.

    Args:
        name: of the exception, see :func:`~megastrategy._faults.process_collectives.exception_name`.
        exception: this rank's.
        leaves: this rank has left the run that the exception ended.
    """
    if not _has_other_ranks():
        return ""
    while isinstance(exception, CollectiveError) and exception.__context__ and not exception.__suppress_context__:
        exception = exception.__context__  # a rank that fails may clean up, and enter another collective there
    what = describe(exception)
    # A killed rank reports nothing, and the failed collectives of the others follow from its end.
    reason = ended_process() if isinstance(exception, CollectiveError) else ""
    store = store_of(f"exception/{name}")
    try:
        # ranks fail at the same moment, too. The store decides which was first, so all name the same one
        first = store.compare_set("first", "", reason or f"rank {torch.distributed.get_rank()}: {what}").decode()
        # the others learn at once that this rank will not come to save, or that it may begin the next fit
        if leaves:
            store.set(f"left/{torch.distributed.get_rank()}", _point())
    except RuntimeError:  # the process that held the store has ended
        return ""
    # an error that all ranks raise needs no note on any of them
    return "" if first.partition(": ")[2] == what else first


def describe(exception: BaseException) -> str:
    """Returns class and message of an exception and its causes, the root cause first, in at most 1,000 characters.

    Of a data loader's worker all errors are in the message, as tracebacks.
    """
    chain = [exception]
    while cause := (chain[-1].exceptions[0] if isinstance(chain[-1], BaseExceptionGroup) else chain[-1].__cause__):
        if any(cause is each for each in chain):
            break
        chain.append(cause)
    root = chain[-1]
    text = ", which led to ".join(_line_of(each) for each in reversed(chain))
    if len(chain) == 1 and (context := root.__context__) is not None and not root.__suppress_context__:
        # Named second: an error in a fallback may have little to do with the one that it replaces.
        text = f"{text}, raised while handling {_line_of(context)}"
    return _shorten(text, _MAX_CHAIN_CHARS)


def _line_of(exception: BaseException) -> str:
    """Returns class and message in at most 400 characters, with the end of a longer message first."""
    name = type(exception).__name__
    try:
        message = str(exception).strip()
    except Exception as error:  # noqa: BLE001 - user code, whatever it raises
        message = f"(its __str__ raises {type(error).__name__})"
    lines = message.splitlines()
    if len(lines) > 1 and (_TRACEBACK in message or len(message) > _MAX_CAUSE_CHARS):
        last = (_errors_in_tracebacks(message) or lines[-1].strip()).removeprefix(f"{name}: ")
        last = _shorten(last, _MAX_CAUSE_CHARS)
        rest = _MAX_CAUSE_CHARS - len(last)
        message = f"{last} ({lines[0][:rest]})" if rest > 0 else last
    message = _shorten(message, _MAX_CAUSE_CHARS)
    return f"{name}: {message}" if message else name


def _shorten(text: str, max_chars: int) -> str:
    """Returns the beginning and the end of a longer text: either may have the reason."""
    if len(text) <= max_chars:
        return text
    num_last = (max_chars - len(_LEFT_OUT)) // 2
    return f"{text[: max_chars - len(_LEFT_OUT) - num_last]}{_LEFT_OUT}{text[-num_last:]}"


def _errors_in_tracebacks(message: str) -> str:
    """Returns the errors that end the tracebacks in a message, the root cause first."""
    errors = []
    # The frames and errors of a group are behind a margin.
    for traceback in re.sub(r"^ +\| ", "", message, flags=re.MULTILINE).split(_TRACEBACK)[1:]:
        after_frames = re.search(r"^\S.*", traceback.partition("\n")[2], re.MULTILINE | re.DOTALL)
        if after_frames is not None:
            errors.append(re.split(r"\n\n(?:The above exception|During handling)", after_frames[0])[0].strip())
    return ", which led to ".join(errors)


def report_stop(name: str) -> None:
    """Records that this rank stops for SIGTERM, on its own, between two batches of evaluation.

    ``name`` is the name of the exception that it raises.
    """
    store_of(f"exception/{name}").compare_set("stopped", "", f"rank {torch.distributed.get_rank()} stopped for SIGTERM")


def first_failure(name: str) -> str:
    """Returns the first failure that was recorded for an exception; empty if there is none, or the store is gone."""
    store = store_of(f"exception/{name}")
    try:
        return store.get("first").decode() if store.check(["first"]) else ""
    except RuntimeError:
        return ""


def ended_process() -> str:
    """Returns which ranks' processes have ended; empty if none is known to have, or the store is gone."""
    try:
        ended = _say_ended(range(torch.distributed.get_world_size()))
    except (RuntimeError, ValueError):  # the store is gone, or the group was destroyed
        return ""
    return f"{ended} (killed, out of memory, or its script has ended)" if ended else ""


def _ended_ranks(ranks: Sequence[int]) -> list[int]:
    """Returns the ranks whose process is known to have ended."""
    store = store_of("processes")
    registered = [rank for rank in ranks if store.check([f"{rank}"])]
    return [rank for rank in registered if processes.has_ended(store.get(f"{rank}").decode())]


def _say_ended(ranks: Sequence[int]) -> str:
    """Says which of the ranks' processes have ended; empty if none is known to have."""
    ended = _ended_ranks(ranks)
    return f"the process of rank(s) {ended} has ended" if ended else ""


class _ProcessWatch:
    """Looks at most once in :data:`PROCESS_POLL_S` whether the processes of other ranks have ended."""

    def __init__(self) -> None:
        self._next_look = time.monotonic()

    def ended_ranks(self, ranks: Sequence[int]) -> list[int]:
        """Returns the ranks whose process has ended; none between two looks."""
        if time.monotonic() < self._next_look:
            return []
        self._next_look = time.monotonic() + PROCESS_POLL_S
        return _ended_ranks(ranks)


def first_stopped(name: str) -> str:
    """Returns the first rank that called :func:`report_stop`, and why it stopped; empty if there is none."""
    store = store_of(f"exception/{name}")
    return store.get("stopped").decode() if store.check(["stopped"]) else ""


def join_setup(setup: str, last_exception: str, patience: timedelta) -> None:
    """Records that this rank begins a fit, validation or the like.

    After an exception other ranks may still be in the run that it ended here, waiting for this rank in a collective;
    this rank's next one would be matched with that, and both would hang. So it first waits until every rank has left
    that run too, or has come here.

    Args:
        setup: the name of the set-up.
        last_exception: the name of the exception that ended the last run on this rank, or an empty string.
        patience: the longest wait for the others then.

    Raises:
        RuntimeError: if the ranks cannot begin together.
    """
    if not _has_other_ranks():
        return
    try:
        problem = _join_setup(setup, last_exception, patience)
    except RuntimeError as error:
        problem = f"the store of torch.distributed is gone: {error}"
    if problem and last_exception:
        raise RuntimeError(
            f"rank {torch.distributed.get_rank()} of {torch.distributed.get_world_size()}: the ranks cannot go on "
            f"together after the exception that ended the last fit (or validation, test, prediction): {problem}. End "
            "this process, so that the others learn of it, and start all ranks anew"
        )


def _join_setup(setup: str, last_exception: str, patience: timedelta) -> str:
    rank, came = torch.distributed.get_rank(), store_of(f"setup/{setup}")
    store_of("processes").set(f"{rank}", processes.identity())
    # written in every set-up, after an exception or not: ranks that caught one read it from ranks that did not
    came.set(f"{rank}", _point())
    # a rank that caught no exception has completed its run, and does not wait
    if not last_exception:
        return ""
    left = store_of(f"exception/{last_exception}/left")
    others = [other for other in range(torch.distributed.get_world_size()) if other != rank]
    deadline = time.monotonic() + patience.total_seconds()
    watch = _ProcessWatch()
    # either key proves that a rank has left the interrupted run: it reported so, or it began the next set-up
    while missing := [other for other in others if not (left.check([f"{other}"]) or came.check([f"{other}"]))]:
        if watch.ended_ranks(missing):
            return _say_ended(missing)
        if time.monotonic() > deadline:
            return f"rank(s) {missing} have not left it within {patience.total_seconds():g} s, and wait for this one"
        time.sleep(POLL_S)
    for other in others:
        both = left if left.check([f"{other}"]) else came
        here, there = both.get(f"{rank}").decode(), both.get(f"{other}").decode()
        # a rank that began one collective more than this one leaves a half-done one behind. The next of the default
        # group would be matched with that, so ranks hang or read each other's bytes
        if here != there:
            return (
                f"rank {rank} left it after {here} collectives of the default group (with gloo sends and receives are "
                f"counted, too), and rank {other} after {there}"
            )
    return ""


def _has_other_ranks() -> bool:
    return torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1


def store_of(what: str) -> PrefixStore:
    """Returns a part of the key-value store that torch.distributed was started with."""
    return PrefixStore(f"megastrategy/{what}", torch.distributed.distributed_c10d._get_default_store())


def _point() -> str:
    """Returns the number of collectives that this rank has started in the default group."""
    world = torch.distributed.group.WORLD
    assert world is not None
    return f"{num_collectives(world)}"


class StoreAllGather:
    """Gathers values of all ranks over the store after one exception, once their states are found equal.

    Args:
        name: of the exception, see :func:`~megastrategy._faults.process_collectives.exception_name`.
        state: a short text that must be equal on all ranks for them to save together.
        patience: the longest wait for the others.

    Attributes:
        problem: the reason why ranks cannot save together, or an empty string.
    """

    def __init__(self, name: str, state: str, patience: timedelta) -> None:
        self._rank, self._size = torch.distributed.get_rank(), torch.distributed.get_world_size()
        self._store = store_of(f"exception/{name}")
        self._num_gathers = 0
        self.problem = ""
        states = self.all_gather(state, patience)
        if not self.problem and len(set(states)) > 1:
            by_rank = "; ".join(f"rank {rank}: {theirs}" for rank, theirs in enumerate(states))
            self.problem = f"the ranks were interrupted at different points ({by_rank})"

    def all_gather(self, value: Any, patience: timedelta) -> list[Any]:
        """Returns every rank's picklable ``value``, by rank, when all have called this; ``[value]`` if there is a
        problem.

        A rank that waited in vain, or whose store has ended, has a problem from then on, and reports it to the others,
        which then have it too.
        """
        if self.problem:
            return [value]
        self._num_gathers += 1
        try:
            return self._gather(f"{self._num_gathers}", value, patience)
        except RuntimeError as error:
            self.problem = f"the store of torch.distributed is gone: {error}"
            return [value]

    def _gather(self, key: str, value: Any, patience: timedelta) -> list[Any]:
        store, deadline = self._store, time.monotonic() + patience.total_seconds()
        # the value before the count: a rank that is counted can be read
        store.set(f"{key}/{self._rank}", pickle.dumps(value))  # type: ignore[arg-type]  # bytes are taken
        store.add(f"{key}/arrived", 1)
        others = [rank for rank in range(self._size) if rank != self._rank]
        watch = _ProcessWatch()
        # ``add`` of 0 reads the count; ``get`` would block before the first write. An outcome ends the wait also for a
        # rank that came after the others had given up
        while store.add(f"{key}/arrived", 0) < self._size and not store.check([f"{key}/outcome"]):
            # a rank that left or ended without its value never comes, so there is no need to wait for it
            gone = [rank for rank in others if store.check([f"left/{rank}"])] + watch.ended_ranks(others)
            # read afterwards: a rank may have sent its value just before it left
            is_in_vain = any(not store.check([f"{key}/{rank}"]) for rank in gone)
            if is_in_vain or time.monotonic() > deadline:
                store.compare_set(f"{key}/outcome", "", "given up")
            time.sleep(POLL_S)
        # the first writer decides for all. Otherwise one rank could save with others that had given it up
        if store.compare_set(f"{key}/outcome", "", "complete") != b"complete":
            # none may be missing: the last rank can come just after another has given up
            missing = [rank for rank in range(self._size) if not store.check([f"{key}/{rank}"])]
            who = f"rank(s) {missing} did" if missing else f"rank {self._rank} or another did"
            self.problem = _say_ended(missing) or f"{who} not come within {patience.total_seconds():g} s"
            return [value]
        return [pickle.loads(store.get(f"{key}/{rank}")) for rank in range(self._size)]
