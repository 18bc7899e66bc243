"""Keeps the process groups of this process, for all models and fits that the doors set up in it.

They belong to the default group: when that is destroyed and made anew, they are made anew, too.
"""

from __future__ import annotations

import dataclasses
from weakref import WeakKeyDictionary

import torch
from torch.distributed import ProcessGroup

from ..core import Collectives, host_collectives, make_collectives, private_group
from .failure_watch import FailureWatch


def exception_name() -> str:
    """Returns the name of the exception that is being handled; equal on ranks that are in step."""
    state = _state()
    return _name(state.num_setups, state.num_exceptions)


def end_run(run: str) -> None:
    """Records that this rank has ended a fit or the like, for ranks that wait for it; ``run`` says which, and where."""
    if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
        _state().failure_watch.end_run(run)


def ended_run() -> str:
    """Returns which rank has ended its run before a collective that this rank has started; empty if none has."""
    return _state().failure_watch.ended_run()


@dataclasses.dataclass
class _State:
    collectives: Collectives | None = None
    call_check_collectives: Collectives | None = None
    checkpoint_collectives: Collectives | None = None
    failure_watch: FailureWatch = dataclasses.field(default_factory=lambda: FailureWatch(exception_name))
    num_setups: int = 0
    num_exceptions: int = 0  # since the last set-up, since ranks may differ in an exception after the last collective

    def count_together(self) -> None:
        """Makes a rank that waits before a batch, or in a framework's collective, see who saves without it."""
        # One count: a program starts the collectives of both groups in one order, the same on all ranks.
        if self.collectives is not None and self.call_check_collectives is not None:
            self.call_check_collectives.progress = self.collectives.progress
            self.call_check_collectives.rank_check = self.collectives.rank_check


_STATES: WeakKeyDictionary[ProcessGroup, _State] = WeakKeyDictionary()


def _state() -> _State:
    """Returns the state of the present default group. Without a group it is new and not kept: no rank has to agree with
    it."""
    world = torch.distributed.group.WORLD
    return _State() if world is None else _STATES.setdefault(world, _State())


def engine_collectives(device: torch.device, *, agreed: bool = False) -> Collectives:
    """Returns collectives on a group for the engine only: on the default group a framework's would wait behind them.

    One group serves all fits of this process, since one for each fit could be freed only by destroying the default
    group. Collective. If any rank has given the last one up, all make a new one; ``agreed`` says that all have one or
    none, and saves asking.
    """
    assert torch.distributed.is_initialized(), "the framework does so before it sets a model up"
    state = _state()
    if not agreed:
        _give_up_unless_all_have(state.collectives, device)
    if state.collectives is None:
        state.collectives = state.failure_watch.watch(make_collectives(private_group(None, device), device))
        state.count_together()
    return state.collectives


def enter_barrier(barrier: str) -> None:
    """Reports a barrier of the framework's, which all ranks enter: a rank in it is then known to be past the place
    where another rank saves without it."""
    collectives = _state().collectives
    if collectives is not None and collectives.rank_check is not None:
        collectives.rank_check.enter_barrier(barrier)


def give_up_engine_collectives() -> None:
    """Drops all groups after an exception, since a collective may have been cut off in them on some rank.

    They are not destroyed: gloo ends a process that destroys a group while a peer is sending into it.
    """
    state = _state()
    state.collectives = state.call_check_collectives = state.checkpoint_collectives = None
    state.failure_watch.forget()


def _give_up_unless_all_have(collectives: Collectives | None, device: torch.device) -> None:
    has_one = torch.tensor([collectives is not None], dtype=torch.uint8, device=device)
    torch.distributed.all_reduce(has_one, torch.distributed.ReduceOp.MIN)
    if not has_one.item():
        give_up_engine_collectives()


def call_check_collectives(device: torch.device) -> Collectives:
    """Returns the gloo group in which ranks compare calls before each collective of the framework and each batch.

    On the engine's group they would wait for gradients and weights.

    Collective. If any rank dropped the group after an exception, all make a new one.
    """
    state = _state()
    _give_up_unless_all_have(state.call_check_collectives, device)
    if state.call_check_collectives is None:
        state.call_check_collectives = state.failure_watch.watch(host_collectives())
        state.count_together()
    return state.call_check_collectives


def checkpoint_collectives() -> Collectives:
    """The gloo group for saving, which may go on in the background while the engine trains.

    Collective where there is none yet.
    """
    state = _state()
    if state.checkpoint_collectives is None:
        state.checkpoint_collectives = host_collectives()
    return state.checkpoint_collectives


def begin_setup() -> tuple[str, str]:
    """Counts a fit, validation or the like that begins.

    Returns its name, and the name of the exception that ended the last one here, empty if none did. Both are equal on
    ranks that are in step.
    """
    state = _state()
    last = _name(state.num_setups, state.num_exceptions - 1) if state.num_exceptions else ""
    state.num_setups += 1
    state.num_exceptions = 0
    return f"{state.num_setups}", last


def count_exception() -> None:
    """Counts an exception that was dealt with: the next one gets a name of its own."""
    _state().num_exceptions += 1


def _name(num_setups: int, num_exceptions: int) -> str:
    return f"{num_setups}.{num_exceptions}"
