"""Puts other collectives under whatever asks for some: pytest's options ``--collectives``, ``--backend`` and
``--in-flight-guard``.

Everything that wraps a model asks ``make_collectives`` and, for an optimizer in several instances,
``make_instance_collectives``. While a choice is made, both give what was chosen, in this process and in the processes
of ranks that are started for the doors' tests.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any, cast, get_args

import pytest
import torch
from torch.distributed import ProcessGroup

from megastrategy.core import collectives as package
from megastrategy.core.collectives import (
    BackendCollectives,
    Collectives,
    GlooCollectives,
    SingleRankCollectives,
    instanced,
)

from .in_flight import InFlightGuard
from .lazy_collectives import Delivery, LazyCollectives

DELIVERIES = [f"lazy-{delivery}" for delivery in get_args(Delivery)]
BACKENDS = ["rings", "process-group"]

make_collectives = package.make_collectives
make_instance_collectives = instanced.make_instance_collectives
destroy_instances = instanced.destroy_instances


@dataclasses.dataclass(frozen=True)
class Choice:
    """Says what collectives are made.

    Attributes:
        delivery: when lazy ones write their results; None for none around the real ones.
        backend: "process-group" for the backend's own collectives, as NCCL's are used, where those of gloo are rings.
        is_guarded: every rank that is a thread is under a guard, for what it touches in flight.
    """

    delivery: Delivery | None = None
    backend: str = "rings"
    is_guarded: bool = False

    @classmethod
    def of(cls, config: pytest.Config) -> Choice:
        """The choice of pytest's options; each is optional."""
        collectives, backend = config.getoption("collectives"), config.getoption("backend")
        delivery = cast(Delivery, collectives.removeprefix("lazy-")) if collectives else None
        return cls(delivery, backend or "rings", config.getoption("in_flight_guard"))

    def guard(self) -> contextlib.AbstractContextManager[Any]:
        """A context for a rank."""
        return InFlightGuard() if self.is_guarded else contextlib.nullcontext()

    def around(self, collectives: Collectives) -> Collectives:
        """Collectives that were made by hand become what was chosen, except for their backend."""
        if self.delivery is None or isinstance(collectives, (SingleRankCollectives, LazyCollectives)):
            return collectives
        return LazyCollectives(collectives, self.delivery)

    def make(self, group: ProcessGroup, device: torch.device) -> Collectives:
        """In place of ``make_collectives``."""
        made = make_collectives(group, device)
        if isinstance(made, GlooCollectives) and self.kind is not GlooCollectives:
            made = self.kind(group, made.rank_check)
        return self.around(made)

    @property
    def kind(self) -> type[GlooCollectives] | type[BackendCollectives]:
        """The class that sends over gloo."""
        return BackendCollectives if self.backend == "process-group" else GlooCollectives


chosen = Choice()


def chosen_collectives(group: ProcessGroup, device: torch.device) -> Collectives:
    """Makes collectives while a choice can be made."""
    return chosen.make(group, device)


def chosen_instance_collectives(every: Collectives, instance: ProcessGroup, across: ProcessGroup) -> Collectives:
    """Makes the collectives of an instance."""
    if not isinstance(every, LazyCollectives):
        return make_instance_collectives(every, instance, across)
    return every.add_instance(instance.size(), make_instance_collectives(every.real, instance, across))


def destroy_chosen_instances(every: Collectives) -> None:
    """Ends them."""
    destroy_instances(every.real if isinstance(every, LazyCollectives) else every)
    every.instances.clear()


def choose(choice: Choice) -> None:
    """From now on, here and in the processes of ranks that are started from here."""
    global chosen
    chosen = choice
    _take_over()


@contextlib.contextmanager
def choosing(choice: Choice) -> Iterator[None]:
    """In it something else is chosen: ``Choice()`` for the real ones."""
    global chosen
    before, chosen = chosen, choice
    _take_over()
    try:
        yield
    finally:
        chosen = before


def _take_over() -> None:
    for original, other in (
        (make_collectives, chosen_collectives),
        (make_instance_collectives, chosen_instance_collectives),
        (destroy_instances, destroy_chosen_instances),
    ):
        _replace(original, other)


def _replace(original: Callable[..., Any], other: Callable[..., Any]) -> None:
    """Wherever a module has the function by name, since modules import names."""
    functools.update_wrapper(other, original)
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in ("megastrategy", "tests") and module is not sys.modules[__name__]:
            for key in [key for key, value in vars(module).items() if value is original]:
                setattr(module, key, other)
