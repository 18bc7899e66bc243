"""O: the doors, beside "ddp", in each precision; and that ranks end when another has failed."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable

import torch

from ..context import Context
from ..ranks import Place, Rank, try_ranks
from .failures import WITHIN_S

_PACKAGES = {"lightning": "lightning", "fabric": "lightning", "accelerate": "accelerate"}
_PRECISIONS = {
    "lightning": ("32-true", "bf16-mixed", "16-mixed", "bf16-true"),
    "fabric": ("32-true", "bf16-mixed", "16-mixed", "bf16-true"),
    "accelerate": ("32-true", "bf16-mixed", "16-mixed"),
}
_ROUNDED = 0.02
"""Relative, with bf16 weights: "ddp" steps those, and this engine fp32 copies of them."""
_FAR = 1e-5


def run(context: Context) -> None:
    """The whole section."""
    for name in context.cases([f"{door}.{case}" for case in _CASES for door in _PACKAGES]):
        door, _, case = name.partition(".")
        package = _PACKAGES[door]
        if importlib.util.find_spec(package) is None:
            context.skip(name, f"{package} is not installed")
            continue
        if case == "a-rank-raises" and door == "accelerate":
            continue  # whose loops are the user's: nothing watches them
        if context.is_host:
            # Once, and not in each rank. On a GPU it may touch the driver.
            importlib.import_module("lightning.pytorch" if package == "lightning" else package)
        _CASES[case](context, door)


def _own_group(context: Context, door: str) -> None:
    """As a user's script has it: the framework makes the group, of NCCL's on GPUs, and binds it to its device."""
    name = f"{door}.own-group"
    with context.attempt(name):
        is_one = context.num_gpus == 1 and not context.is_host
        place = context.place("alone" if is_one else "backend", has_group=False)
        theirs, mine = (
            context.ranks(fit_in_own_group, door, strategy, place=place) for strategy in ("ddp", "megatron_ddp")
        )
        context.measure(f"{name}.backend", mine[0][1])
        worst = max(_largest_difference(one, other) for (one, _), (other, _) in zip(mine, theirs, strict=True))
        context.check(f"{name}.32-true", worst, 0.0 if place.size <= 2 else _FAR, unit="relative")


def _largest_difference(mine: dict[str, list[float]], theirs: dict[str, list[float]]) -> float:
    """Relative to the largest weight of a tensor."""
    return max(
        max(abs(a - b) for a, b in zip(mine[name], values, strict=True)) / max(map(abs, values))
        for name, values in theirs.items()
    )


def fit_in_own_group(rank: Rank, door: str, strategy: str) -> tuple[dict[str, list[float]], str]:
    """Weights, and what the group was that the framework has made."""
    from ..doors import FITS, describe_group, settle_in

    settle_in(rank)
    rank.device.be_deterministic()
    weights, _ = FITS[door](rank, strategy, "32-true", None)
    return {name: value.flatten().tolist() for name, value in weights.items()}, describe_group()


def _alone(context: Context, door: str) -> None:
    _compare(context, door, "alone", context.place("alone"))


def _together(context: Context, door: str) -> None:
    _compare(context, door, "together", context.place())


def _compare(context: Context, door: str, way: str, place: Place) -> None:
    precisions = _PRECISIONS[door]
    if context.is_host:
        context.skip(f"{door}.{way}.16-mixed", "frameworks make bf16 of it on the host")
        precisions = tuple(name for name in precisions if name != "16-mixed")
    with context.attempt(f"{door}.{way}"):
        found = context.ranks(compare_fits, door, precisions, place=place)
        for precision in precisions:
            worst = max(one[precision] for one in found)
            limit = _ROUNDED if precision == "bf16-true" else 0.0 if place.size <= 2 else _FAR
            context.check(f"{door}.{way}.{precision}", worst, limit, unit="relative")


def _fails(context: Context, door: str) -> None:
    """One rank raises; the others end, with a reason."""
    name = f"{door}.a-rank-raises"
    with context.attempt(name):
        outcomes = try_ranks(context.place(timeout_s=120.0), fail_in_fit, door, grace_s=2 * WITHIN_S)
        *others, last = outcomes
        context.check(f"{name}.others-end", max(one.seconds for one in others) - last.seconds, WITHIN_S, unit="s")
        # Its process ends at once, so most often they hear of that, before its words come.
        wrong = [one.error or "returned" for one in others if not one.error.startswith("CollectiveError")]
        context.check_equal(f"{name}.reason", "CollectiveError", "; ".join(wrong)[:600])


_CASES: dict[str, Callable[[Context, str], None]] = {
    "own-group": _own_group,
    "alone": _alone,
    "together": _together,
    "a-rank-raises": _fails,
}


def compare_fits(rank: Rank, door: str, precisions: tuple[str, ...]) -> dict[str, float]:
    """By precision: the largest difference to "ddp"'s weights, relative to the largest weight of a tensor; infinite if
    a loss was not finite."""
    from ..doors import FITS, settle_in

    settle_in(rank)
    rank.device.be_deterministic()
    found = {}
    for precision in precisions:
        theirs, _ = FITS[door](rank, "ddp", precision, None)
        mine, finite = FITS[door](rank, "megatron_ddp", precision, None)
        differences = [float((mine[name] - theirs[name]).abs().max() / theirs[name].abs().max()) for name in theirs]
        found[precision] = max(differences) if finite and mine.keys() == theirs.keys() else math.inf
    return found


def fail_in_fit(rank: Rank, door: str) -> None:
    """Fits, and the last rank raises."""
    from ..doors import FITS, settle_in

    settle_in(rank)
    torch.manual_seed(0)
    FITS[door](rank, "megatron_ddp", "32-true", rank.size - 1)
