"""The engine's collectives over all ranks, one set for all that the doors set up in a process."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch
from torch.distributed import ProcessGroup

from .core import Collectives, make_collectives, private_group

_COLLECTIVES: WeakKeyDictionary[ProcessGroup, Collectives] = WeakKeyDictionary()


def engine_collectives(device: torch.device) -> Collectives:
    """Collectives on a group for the engine alone, since a framework's on the default group would wait behind ours.

    One for all fits in this process: what a Trainer made for itself could be freed only by ending the default group.
    The first call after ``init_process_group`` is collective.
    """
    world = torch.distributed.group.WORLD
    assert world is not None, "the framework initialises torch.distributed before it sets a model up"
    if world not in _COLLECTIVES:
        _COLLECTIVES[world] = make_collectives(private_group(None, device), device)
    return _COLLECTIVES[world]


def forget_engine_collectives() -> None:
    """A collective may have been cut off on some rank: whoever comes next gets a group of its own."""
    world = torch.distributed.group.WORLD
    if world is not None:
        _COLLECTIVES.pop(world, None)
