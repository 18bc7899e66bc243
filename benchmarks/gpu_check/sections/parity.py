"""B, C, D, E: what is trained equals torch DDP, and does not depend on when results come."""

from __future__ import annotations

import dataclasses
import threading
from typing import Any

import torch

from megastrategy.core.layout.layout import BufferLayout

from ..context import Context
from ..ranks import FAKE_SIZE, Rank
from ..training import (
    Late,
    Recipe,
    largest_difference,
    num_differing,
    train_ddp,
    train_obviously,
    train_ours,
    where_different,
)
from ..versions import SHARES_A_GPU, nccl_version

FAR = 1e-5
"""The largest relative difference after a few steps of SGD where the order of sums is another one."""

# --- B ---------------------------------------------------------------------------------------------------------------

_ADAMW = {"single": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}
OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    **{f"adamw-{name}": ("AdamW", {"lr": 0.01, **options}) for name, options in _ADAMW.items()},
    "adamw-capturable": ("AdamW", {"lr": 0.01, "capturable": True}),
    "sgd-momentum": ("SGD", {"lr": 0.05, "momentum": 0.9}),
}
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16-weights": {"dtype": "bf16"},
    "bf16-autocast": {"autocast": torch.bfloat16},
    "fp16-scaler": {"autocast": torch.float16},
}


_FAKE = f"one-of-{FAKE_SIZE}"


def run_alone(context: Context) -> None:
    """B: one rank, each optimizer in each precision, and the first of several, which is sharded; 16-bit weights against
    an obvious loop with fp32 copies, since torch DDP steps them themselves."""
    steps = 6 if context.is_host else 20
    for name in context.cases([*OPTIMIZERS, _FAKE]):
        if name == _FAKE:
            _compare_fake(context)
            continue
        kind, options = OPTIMIZERS[name]
        if context.is_host and options.get("capturable"):
            context.skip(name, "torch refuses capturable=True on the host")
            continue
        recipes = {
            precision: Recipe(optimizer=kind, options=tuple(options.items()), steps=steps, **how)
            for precision, how in PRECISIONS.items()
        }
        with context.attempt(name):
            [found] = context.ranks(compare_alone, recipes, place=context.place("alone"))
            for precision, (count, where) in found.items():
                context.check(f"{name}.{precision}", count, 0, unit="elements", detail=where)


def _compare_fake(context: Context) -> None:
    with context.attempt(_FAKE):
        [found] = context.ranks(compare_fake, place=context.place("fake"))
        for name, (count, where) in found.items():
            context.check(f"{_FAKE}.{name}", count, 0, unit="elements", detail=where)


def compare_fake(rank: Rank) -> dict[str, tuple[int, str]]:
    """By recipe: the elements that differ between a fake rank and torch DDP whose weights are gathered as its are."""
    rank.device.be_deterministic()
    found = {}
    for name, recipe in _fake_recipes().items():
        layouts: list[BufferLayout] = []
        mine = train_ours(rank, recipe, layouts=layouts)
        theirs = (train_obviously if recipe.dtype == "bf16" else train_ddp)(rank, recipe, layouts)
        found[name] = num_differing(mine, theirs), where_different(mine, theirs)
    return found


def _fake_recipes() -> dict[str, Recipe]:
    """Each optimizer's implementation, each precision, and what only a sharded rank has."""
    fused: dict[str, Any] = {"options": (("lr", 0.01), ("fused", True))}
    by_optimizer = {
        name: _recipe(how={"optimizer": kind, "options": tuple(options.items())})
        for name, (kind, options) in OPTIMIZERS.items()
        if not options.get("capturable")
    }
    by_precision = {name: _recipe(how={**fused, **how}) for name, how in PRECISIONS.items()}
    # Not buckets that move, whose gradients come from other ranks' shards.
    sharded = "gather-forward", "after-backward", "pooled", "pooled-bf16", "offloaded"
    return {**by_optimizer, **by_precision, **{name: RECIPES[name] for name in sharded}}


def compare_alone(rank: Rank, recipes: dict[str, Recipe]) -> dict[str, tuple[int, str]]:
    """By recipe: the elements that differ, and where."""
    rank.device.be_deterministic()
    found = {}
    for name, recipe in recipes.items():
        theirs = (train_ddp if recipe.dtype == "fp32" else train_obviously)(rank, recipe)
        mine = train_ours(rank, recipe)
        found[name] = num_differing(mine, theirs), where_different(mine, theirs)
    return found


# --- C, D, E ---------------------------------------------------------------------------------------------------------

_SGD: dict[str, Any] = {"optimizer": "SGD", "options": (("lr", 0.05), ("momentum", 0.9))}

_ADAFACTOR: dict[str, Any] = {"optimizer": "Adafactor", "options": (("lr", 0.02),)}
"""Steps whole parameters, each on its owner."""


def _recipe(
    model: str = "awkward", *, bucket_size: int = 200, how: dict[str, Any] | None = None, **config: Any
) -> Recipe:
    return Recipe(model=model, config=(("bucket_size", bucket_size), *config.items()), **(how or {}))


RECIPES: dict[str, Recipe] = {
    "contiguous": _recipe(),
    "accumulate": _recipe(how={"accumulate": 3}),
    "all-reduce": _recipe(use_distributed_optimizer=False),
    "gather-forward": _recipe(overlap_param_gather=True),
    "after-backward": _recipe(overlap_grad_reduce=False),
    "bf16-weights": _recipe(how={"dtype": "bf16", **_SGD}),
    "bf16-fp32-sums": _recipe(
        "chain",
        how={"dtype": "bf16", **_SGD},
        grad_reduce_in_fp32=False,
        reduce_scatter_with_fp32_accumulation=True,
    ),
    "pooled": _recipe(grad_buffer="pooled"),
    "pooled-bf16": _recipe(how={"dtype": "bf16", **_SGD}, grad_buffer="pooled"),
    "checked": _recipe(check_for_nan_in_grad=True),
    "late-bucket": _recipe("twice", how=_SGD),
    "moved-buckets": _recipe("gpt-reversed", bucket_size=20_000),
    "whole-params": _recipe(how=_ADAFACTOR),
    "whole-params-forward": _recipe(how=_ADAFACTOR, overlap_param_gather=True),
    "instances": _recipe(how=_SGD, num_distributed_optimizer_instances=2),
    "wire-16-bits": _recipe(how=_SGD, grad_wire_dtype="bf16"),
    "wire-16-bits-pooled": _recipe(how=_SGD, grad_wire_dtype="fp16", grad_buffer="pooled"),
    "offloaded": _recipe(offload_optimizer_states=True),
    "offloaded-bf16-forward": _recipe(
        how={"dtype": "bf16", **_SGD},
        offload_optimizer_states=True,
        overlap_param_gather=True,
    ),
}
"""The promises of the page of options, once each."""

_BY_HAND = {
    "bf16-weights",
    "bf16-fp32-sums",
    "pooled-bf16",
    "offloaded-bf16-forward",
    "late-bucket",
    *(name for name in RECIPES if name.startswith("wire-")),
}
"""torch DDP steps 16-bit weights themselves, and refuses a layer in two re-entrant checkpoints; it rounds nothing."""

_IN_ANOTHER_ORDER = {"late-bucket"}
"""A late gradient is averaged by itself, and added to the mean of what came before."""

SKEWS: tuple[Late, ...] = ("nothing", "results", "gradients", "one rank")


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Found on one rank.

    Attributes:
        num_differing: elements, from the reference.
        difference: from the reference, relative.
        where: the names that differ.
        digests: of everything, by skew.
        params: digests of what all ranks share, by skew.
    """

    num_differing: int
    difference: float
    where: str
    digests: dict[str, str]
    params: dict[str, str]


def compare(rank: Rank, name: str, recipe: Recipe, skews: tuple[Late, ...]) -> Comparison:
    """A recipe under each skew, the first against the reference."""
    rank.device.be_deterministic()
    theirs = (train_obviously if name in _BY_HAND else train_ddp)(rank, recipe)
    mine = {late: train_ours(rank, recipe, late) for late in skews}
    first = mine[skews[0]]
    return Comparison(
        num_differing(first, theirs),
        largest_difference(first, theirs),
        where_different(first, theirs),
        {late: trained.digest() for late, trained in mine.items()},
        {late: trained.digest_of_params() for late, trained in mine.items()},
    )


def run_several(context: Context) -> None:
    """C: two ranks that share one device, or one a GPU."""
    for name in context.cases(RECIPES):
        recipe, size = RECIPES[name], max(2, context.num_gpus)
        if name == "instances" and size < 4:
            if context.num_gpus > 1 and not context.is_host:
                context.skip(name, f"two instances of two ranks need 4 GPUs: NCCL takes one rank each, of {size}")
                continue
            size = 4
        _compare_on(context, name, recipe, context.place(size=size))


def _compare_on(context: Context, name: str, recipe: Recipe, place: Any) -> None:
    # NCCL delivers on its own stream, which no other code can hold up.
    skews = tuple(late for late in SKEWS if not (place.way == "backend" and late == "results"))
    if name == "instances" and place.size % 2:
        context.skip(name, f"{place.size} ranks are not two instances")
        return
    if place.size > 2:
        # AdamW begins with steps that are signs: a rounding near zero would show as a whole step.
        recipe = dataclasses.replace(recipe, **_SGD)
    with context.attempt(name):
        found = context.ranks(compare, name, recipe, skews, place=place)
        if place.size == 2 and name not in _IN_ANOTHER_ORDER:  # one addition has no order
            count = max(one.num_differing for one in found)
            context.check(f"{name}.as-reference", count, 0, unit="elements", detail=found[0].where)
        else:
            worst = max(one.difference for one in found)
            context.check(f"{name}.as-reference", worst, FAR, unit="relative", detail=found[0].where)
        changed = [late for late in skews if any(one.digests[late] != one.digests[skews[0]] for one in found)]
        late = f"bits change when late: {', '.join(changed)}" if changed else ""
        context.check_equal(f"{name}.whenever-it-comes", f"{len(skews)} skews", late)
        apart = [late for late in skews if len({one.params[late] for one in found}) > 1]
        context.check_equal(
            f"{name}.ranks-equal", f"{len(found)} ranks", f"weights differ between ranks: {apart}" if apart else ""
        )


ONE_GPU = (
    ("NCCL_MULTI_RANK_GPU_ENABLE", "1"),
    ("NCCL_NVLS_ENABLE", "0"),  # each rank would want all of the GPU's multicast objects
    ("NCCL_MAX_CTAS", "2"),  # kernels of both ranks have to fit on it at once
)


def why_no_second_rank(context: Context) -> str:
    """Why NCCL cannot connect two ranks here; empty if it can, or if gloo does."""
    if context.is_host or context.num_gpus > 1:
        return ""
    [version] = context.ranks(loaded_nccl, place=context.place("alone"))
    if tuple(version) >= SHARES_A_GPU:
        return ""
    needs = ".".join(map(str, SHARES_A_GPU))
    return f"NCCL {'.'.join(map(str, version))}: from {needs} on it takes two ranks on one GPU"


def run_nccl_on_one(context: Context) -> None:
    """D: C's recipes over NCCL itself, with two ranks on one GPU."""
    if context.num_gpus > 1:
        context.skip("all", "C's ranks are connected by NCCL already, with a GPU each")
        return
    if reason := why_no_second_rank(context):
        context.skip("all", reason)
        return
    for name in context.cases(RECIPES):
        if context.is_host and name not in ("contiguous", "pooled", "moved-buckets"):
            continue  # there it is the way that is tried, and C has had the recipes
        if name != "instances":  # four ranks' kernels would not fit
            place = context.place("backend", 2, environment=() if context.is_host else ONE_GPU)
            _compare_on(context, name, RECIPES[name], place)


def loaded_nccl(rank: Rank) -> tuple[int, ...]:
    """The version that ranks have."""
    return nccl_version()


# --- E ---------------------------------------------------------------------------------------------------------------


def run_sanitized(context: Context) -> None:
    """E: C's recipes while torch's sanitizer looks for accesses that no stream orders."""
    if context.is_host:
        context.skip("all", "the sanitizer looks at CUDA's streams")
        return
    for name in context.cases(["contiguous", "gather-forward", "pooled", "bf16-fp32-sums", "late-bucket", "offloaded"]):
        recipe = dataclasses.replace(RECIPES[name], steps=3)
        with context.attempt(name):
            reports = context.ranks(train_sanitized, recipe, place=context.place("staged", 2))
            context.check_equal(name, "2 ranks", "\n".join(report for report in reports if report))


def look_at_one_launch_at_a_time(events: Any) -> None:
    """Makes an event handler of torch's sanitizer usable by two threads.

    It numbers a launch, and reads the number again for each argument. A thread that comes in between would give one
    launch the other's number, and a wait for the first would seem to be missing.
    """
    lock, handle = threading.Lock(), events._handle_kernel_launch

    def locked(*arguments: Any) -> Any:
        with lock:
            return handle(*arguments)

    events._handle_kernel_launch = locked


def train_sanitized(rank: Rank, recipe: Recipe) -> str:
    """Returns what the sanitizer says; empty if nothing."""
    from torch.cuda import _sanitizer

    from megastrategy.core.data_path.reduced_grad import ReducedGrad

    from ..via_host import ViaHostCollectives

    # It asks each argument for its address, takes null for a tensor without memory, and knows those by their ids.
    ReducedGrad.data_ptr = lambda grad: 0  # type: ignore[method-assign,assignment] # of this process
    # Not by TORCH_CUDA_SANITIZER, which is read when torch is imported: a forked process has done that.
    _sanitizer.enable_cuda_sanitizer()
    look_at_one_launch_at_a_time(_sanitizer.cuda_sanitizer.dispatch.event_handler)
    carry_out = ViaHostCollectives._carry_out

    # The sanitizer is a dispatch mode, and those are of one thread: what the staging's own does is shown to it as well.
    def seen(self: ViaHostCollectives, *arguments: Any) -> None:
        with _sanitizer.cuda_sanitizer.dispatch:
            carry_out(self, *arguments)

    ViaHostCollectives._carry_out = seen  # type: ignore[method-assign,assignment] # of this process, which ends with this
    try:
        train_ours(rank, recipe)
        rank.device.synchronize()
    except _sanitizer.CUDASanitizerErrors as errors:
        return "\n".join(str(error) for error in errors.errors)
    except RuntimeError as error:  # the other rank has stopped at its report, which shall not be lost
        return f"rank {rank.number} was left alone: {error}"
    return ""
