"""What a process keeps about the world of ranks it is in, over all that the doors set up in it."""

from __future__ import annotations

import dataclasses
from weakref import WeakKeyDictionary

import torch
from torch.distributed import ProcessGroup

from ..core import Collectives, KnownFindings, host_collectives, make_collectives, private_group
from .deadlocks import WaitsInVain


def exception_name() -> str:
    """A name for the exception that is being dealt with; equal on ranks that are in step."""
    state = _state()
    return _name(state.num_setups, state.num_exceptions)


def is_awaited() -> bool:
    """Whether another rank is known to wait in a collective that this one has not started."""
    return _state().waits_in_vain.is_awaited()


@dataclasses.dataclass
class _State:
    collectives: Collectives | None = None
    meeting_collectives: Collectives | None = None
    agreement_collectives: Collectives | None = None
    checkpoint_collectives: Collectives | None = None
    waits_in_vain: WaitsInVain = dataclasses.field(default_factory=lambda: WaitsInVain(exception_name))
    known_findings: KnownFindings = dataclasses.field(default_factory=KnownFindings)
    num_setups: int = 0
    num_exceptions: int = 0  # since the last set-up, since ranks may differ in an exception after the last collective


_STATES: WeakKeyDictionary[ProcessGroup, _State] = WeakKeyDictionary()


def _state() -> _State:
    """Of the world there is now; lost without one, where there are no other ranks to agree with."""
    world = torch.distributed.group.WORLD
    return _State() if world is None else _STATES.setdefault(world, _State())


def engine_collectives(device: torch.device, *, agreed: bool = False) -> Collectives:
    """Collectives on a group for the engine alone, since a framework's on the default group would wait behind ours.

    One for all fits in this process: what a Trainer made for itself could be freed only by ending the default group.
    Made anew if any rank has given the last one up; ``agreed`` says that all have or none. Collective.
    """
    assert torch.distributed.is_initialized(), "the framework does so before it sets a model up"
    state = _state()
    if not agreed:
        _give_up_unless_all_have(state.collectives, device)
    if state.collectives is None:
        collectives = make_collectives(private_group(None, device), device)
        state.collectives = state.waits_in_vain.watch("for gradients or weights", collectives)
    return state.collectives


def give_up_engine_collectives() -> None:
    """After an exception: a collective may have been cut off on some rank.

    The group is left alone, since gloo ends a process that destroys one while a peer is sending into it.
    """
    state = _state()
    state.collectives = state.meeting_collectives = None
    state.agreement_collectives = state.checkpoint_collectives = None
    state.waits_in_vain.forget()


def _give_up_unless_all_have(collectives: Collectives | None, device: torch.device) -> None:
    has_one = torch.tensor([collectives is not None], dtype=torch.uint8, device=device)
    torch.distributed.all_reduce(has_one, torch.distributed.ReduceOp.MIN)
    if not has_one.item():
        give_up_engine_collectives()


def meeting_collectives(device: torch.device) -> Collectives:
    """Collectives between host memories, to meet in before a collective of the framework's. Made anew if any rank has
    given the last one up. Collective.

    Those for :func:`agreement_collectives` are made with it, since all ranks are known to be here: ``new_group`` waits
    for one that failed before it until the process group's timeout.
    """
    state = _state()
    _give_up_unless_all_have(state.meeting_collectives, device)
    if state.meeting_collectives is None:
        watch = state.waits_in_vain.watch
        state.meeting_collectives = watch("for all ranks, in a collective of the framework", host_collectives())
        state.agreement_collectives = watch("before the next batch", host_collectives())
    return state.meeting_collectives


def agreement_collectives() -> Collectives:
    """Collectives between host memories, for what ranks agree on before a batch: on the engine's they would wait for
    gradients and weights. Collective where there are none yet."""
    state = _state()
    if state.agreement_collectives is None:
        state.agreement_collectives = state.waits_in_vain.watch("before the next batch", host_collectives())
    return state.agreement_collectives


def checkpoint_collectives() -> Collectives:
    """Collectives between host memories, for saving alone, since that may go on while the engine trains. Collective
    where there are none yet."""
    state = _state()
    if state.checkpoint_collectives is None:
        state.checkpoint_collectives = host_collectives()
    return state.checkpoint_collectives


def known_findings() -> KnownFindings:
    """What trials of optimizers showed in this process."""
    return _state().known_findings


def begin_setup() -> tuple[str, str]:
    """A fit, validation or the like begins: a name for it, and one for the exception that ended the last one here,
    empty if none did. Equal on ranks that are in step."""
    state = _state()
    last = _name(state.num_setups, state.num_exceptions - 1) if state.num_exceptions else ""
    state.num_setups += 1
    state.num_exceptions = 0
    return f"{state.num_setups}", last


def count_exception() -> None:
    """The exception was dealt with."""
    _state().num_exceptions += 1


def _name(num_setups: int, num_exceptions: int) -> str:
    return f"{num_setups}.{num_exceptions}"
