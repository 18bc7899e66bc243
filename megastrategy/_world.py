"""The engine's collectives over all ranks, one set for all that the doors set up in a process."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch
from torch.distributed import ProcessGroup

from .core import Collectives, make_collectives, private_group

_COLLECTIVES: WeakKeyDictionary[ProcessGroup, Collectives] = WeakKeyDictionary()
_EXCEPTIONS: WeakKeyDictionary[ProcessGroup, int] = WeakKeyDictionary()


def engine_collectives(device: torch.device, *, fresh: bool = False) -> Collectives:
    """Collectives on a group for the engine alone, since a framework's on the default group would wait behind ours.

    One for all fits in this process: what a Trainer made for itself could be freed only by ending the default group.
    Made anew if any rank has given the last one up; ``fresh`` says that all have. Collective.
    """
    world = torch.distributed.group.WORLD
    assert world is not None, "the framework initialises torch.distributed before it sets a model up"
    if not fresh:
        has_one = torch.tensor([world in _COLLECTIVES], dtype=torch.uint8, device=device)
        torch.distributed.all_reduce(has_one, torch.distributed.ReduceOp.MIN)
        if not has_one.item():
            give_up_engine_collectives()
    if world not in _COLLECTIVES:
        _COLLECTIVES[world] = make_collectives(private_group(None, device), device)
    return _COLLECTIVES[world]


def give_up_engine_collectives() -> None:
    """After an exception: a collective may have been cut off on some rank.

    The group is left alone, since gloo ends a process that destroys one while a peer is sending into it.
    """
    world = torch.distributed.group.WORLD
    if world is not None:
        _COLLECTIVES.pop(world, None)


def count_exception() -> None:
    """An exception was dealt with; equal on ranks that are in step."""
    world = torch.distributed.group.WORLD
    if world is not None:
        _EXCEPTIONS[world] = num_exceptions() + 1


def num_exceptions() -> int:
    """How many exceptions were dealt with in this world."""
    world = torch.distributed.group.WORLD
    return 0 if world is None else _EXCEPTIONS.get(world, 0)
