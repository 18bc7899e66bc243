"""Finds out how the groups of an optimizer can be divided among ranks, by trial steps instead of a list of names.

A group whose update is element-wise (:mod:`.elementwise`) is stepped as flat shards. One that steps each parameter by
itself (:mod:`.per_parameter`) is stepped as whole parameters, each by an owner. Any other group cannot be sharded.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Sequence
from typing import Any

import torch

from .elementwise import Findings, GroupProbe, check_no_inner_optimizer, trial_lr
from .identity import check_identity
from .isolation import Isolation
from .per_parameter import PerParameterProbe
from .trial import PROPORTIONS, SPIKE, Problem
from .values import NotForShardsError, equal

_COMPILER = threading.RLock()
"""torch.compile has one setting in a process, so that one thread at a time may change it and put it back."""


def probe(
    optimizer: torch.optim.Optimizer,
    device: torch.device,
    dtype: torch.dtype,
) -> Findings:
    """Steps copies of the optimizer on tensors made for it, together, alone, cut and in parts, and compares.

    The optimizer is left untouched; its class, hyper-parameters and other attributes are used, its state is not.
    ``device`` and ``dtype`` are those of the tensors that it will step.
    """
    with _COMPILER, _uncompiled():
        try:
            # Before any copy is stepped: these steps would reach the model's own weights, or call user code.
            check_no_inner_optimizer(optimizer)
            isolation = Isolation(optimizer, device)
            with isolation.open():
                try:
                    findings = _probe(optimizer, device, dtype, isolation)
                finally:
                    # Before other reasons, which were found by steps that could not do their work.
                    isolation.check()
        except NotForShardsError as error:
            return Findings(str(error))
        return findings


def _uncompiled() -> contextlib.AbstractContextManager[Any]:
    """Has functions that torch.compile made run as they are written while it is open.

    Hazard: an update that its optimizer compiles (Dion's Muon) would be compiled for each shape of the trials, which
    takes minutes, and beyond torch's limit of recompilations raises an error that says nothing about the update.
    """
    # A function can be compiled only where dynamo is imported; its import takes a second.
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else contextlib.nullcontext()


def _probe(
    optimizer: torch.optim.Optimizer,
    device: torch.device,
    dtype: torch.dtype,
    isolation: Isolation,
) -> Findings:
    check_identity(optimizer)
    small = Problem(device, dtype, is_small=True, scale=SPIKE)
    problem = Problem(device, dtype)
    others = Problem(device, dtype, shapes=[*PROPORTIONS], cuts=[*PROPORTIONS.values()])
    flat: list[Findings] = []
    whole: list[Findings] = []
    whole_groups = set[int]()
    for numbers in _alike(optimizer.param_groups):
        try:
            # First the small one: a step that makes a matrix of a flat tensor's elements would take gigabytes and
            # minutes for the larger one, and one that clips by a norm shows it only with large gradients.
            GroupProbe(optimizer, numbers[0], small, isolation).check_first_step()
            found = GroupProbe(optimizer, numbers[0], problem, isolation).findings()
            GroupProbe(optimizer, numbers[0], others, isolation).check_first_step()
            flat.append(found)
            continue
        except NotForShardsError as error:
            not_flat = error
        try:
            whole.append(PerParameterProbe(optimizer, numbers, device, dtype, isolation).findings())
        except NotForShardsError as error:
            if str(error) == str(not_flat):
                raise not_flat from None
            raise NotForShardsError(f"{not_flat}; nor can ranks step whole parameters each: {error}") from error
        whole_groups.update(numbers)
    return Findings(
        None,
        frozenset[str]().union(*(one.element_names for one in flat)),
        all(one.in_parts for one in flat + whole),
        frozenset[str]().union(*(one.changed_entries for one in flat + whole)),
        frozenset(whole_groups),
        {dim: max(one.whole_tensors.get(dim, 0) for one in whole) for one in whole for dim in one.whole_tensors},
    )


def _alike(groups: Sequence[dict[str, Any]]) -> list[list[int]]:
    """The numbers of groups whose options differ only in positive learning rates; the first has the largest."""
    chosen: list[tuple[list[int], dict[str, Any], float | None]] = []
    for number, group in enumerate(groups):
        options = {name: value for name, value in group.items() if name not in ("params", "lr", "initial_lr")}
        lr = trial_lr(group)
        for place, (numbers, other, other_lr) in enumerate(chosen):
            if (lr is None) == (other_lr is None) and equal(options, other):
                # Of groups that differ in it alone, the largest moves furthest above the rounding.
                if lr is not None and other_lr is not None and lr > other_lr:
                    chosen[place] = ([number, *numbers], options, lr)
                else:
                    numbers.append(number)
                break
        else:
            chosen.append(([number], options, lr))
    return sorted(numbers for numbers, _, _ in chosen)
