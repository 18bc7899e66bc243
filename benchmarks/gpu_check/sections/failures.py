"""P: if one rank fails, the others end soon, with a reason, and the device is free."""

from __future__ import annotations

import os
import signal
from typing import Any, Literal

import torch

import megastrategy

from ..context import Context
from ..devices import MIB
from ..models import Chain, microbatch
from ..ranks import Outcome, Rank, try_ranks
from ..training import wrap

How = Literal["raises", "is killed", "skips a backward"]
WITHIN_S = 30.0
"""From the first failure to the end of the last rank."""
_FAILS_AT, _STEPS = 3, 8
_REASONS: dict[How, str] = {
    "raises": "CollectiveError",
    "is killed": "CollectiveError",
    "skips a backward": "MicrobatchMismatchError",
}
"""The error of the ranks that did nothing wrong."""
_CONFIGS: dict[str, dict[str, Any]] = {
    "default": {},
    "gather-forward": {"overlap_param_gather": True},
    "all-reduce": {"use_distributed_optimizer": False},
}
_LEFT_MIB = 64.0


def run(context: Context) -> None:
    """The whole section."""
    alone = context.place("alone")
    [before] = context.ranks(free_bytes, place=alone)
    cases = {f"{name}.{how.replace(' ', '-')}": (how, config) for name, config in _CONFIGS.items() for how in _REASONS}
    for full in context.cases(cases):
        how, config = cases[full]
        with context.attempt(full):
            place = context.place(timeout_s=120.0)  # ends after what is asserted, or it would end the waits itself
            outcomes = try_ranks(place, fail, how, config, grace_s=2 * WITHIN_S)
            _check(context, full, how, _REASONS[how], outcomes)
    [after] = context.ranks(free_bytes, place=alone)
    left = (before - after) / MIB
    if context.is_host:
        context.measure("left-behind", left, "MiB", "of the machine's memory, where others work too")
    else:
        context.check("left-behind", left, _LEFT_MIB, unit="MiB")


def _check(context: Context, name: str, how: How, error: str, outcomes: list[Outcome]) -> None:
    failing = len(outcomes) - 1
    others = [outcome for rank, outcome in enumerate(outcomes) if rank != failing]
    first = outcomes[failing].seconds if how != "skips a backward" else min(outcome.seconds for outcome in outcomes)
    context.check(f"{name}.others-end", max(one.seconds for one in others) - first, WITHIN_S, unit="s")
    wrong = [one.error or "returned" for one in others if not one.error.startswith(error)]
    context.check_equal(f"{name}.reason", error, "; ".join(wrong)[:600])


def fail(rank: Rank, how: How, config: dict[str, Any]) -> None:
    """Trains, until the last rank fails."""
    module = Chain().to(rank.device.torch_device)
    model = wrap(rank, module, {"bucket_size": 200, **config})
    optimizer = megastrategy.DistributedOptimizer(torch.optim.AdamW(model.parameters()), model)
    for step in range(_STEPS):
        # As doors count them: so a rank that skips a backward is noticed, and not only one that is gone.
        model.microbatch = step
        fails = step == _FAILS_AT and rank.number == rank.size - 1
        if fails and how == "skips a backward":
            continue
        if fails and how == "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        loss = model(microbatch(module, rank.number, step, 0, torch.float32).to(rank.device.torch_device), step, 0)
        if fails:
            raise RuntimeError("this rank gives up")
        loss.backward()
        optimizer.step()
    model.finish_param_gather()
    rank.device.synchronize()


def free_bytes(rank: Rank) -> int:
    """Returns what is free, after the device has shown that it works."""
    a = torch.ones(64, 64, device=rank.device.torch_device)
    if float((a @ a).sum()) != 64.0**3:
        raise RuntimeError("the device multiplies wrongly")
    rank.device.synchronize()
    return rank.device.free_bytes()
