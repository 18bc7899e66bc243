"""F, H, G: what a steady step makes the host wait for, how much it launches, and how long the device idles between
backward and step."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import megastrategy

from ..context import Context
from ..counts import Operations
from ..models import Chain, Gpt, Model
from ..ranks import FAKE_SIZE, Place, Rank
from ..traces import Trace, record
from ..training import wrap, wrap_in_ddp

WARM_UP = 4
"""Steps before anything is counted: buckets have moved, optimizers have their state, libraries are loaded."""

Step = Callable[[], object]


def steps_of(
    rank: Rank,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    x: Tensor,
    clip: Callable[[], object] | None = None,
) -> Step:
    """One training step, whose parts are ranges in a trace."""

    def step() -> None:
        optimizer.zero_grad()
        loss = model(x, 0, rank.number)
        with torch.profiler.record_function("check: backward"):
            loss.backward()
        with torch.profiler.record_function("check: step"):
            if clip is not None:
                clip()
            optimizer.step()

    return step


def made_on(rank: Rank, make: Callable[[], Model]) -> Model:
    """A model that is made on the device: on the host a large one takes seconds of random numbers."""
    with rank.device.torch_device:
        return make()


def ours(
    rank: Rank, make: Callable[[], Model], config: dict[str, Any], *, clips: bool = False, **adamw: Any
) -> tuple[Any, Step]:
    """The engine, warm, and its step."""
    module = made_on(rank, make)
    dtype = next(module.parameters()).dtype
    x = module.sample(torch.Generator().manual_seed(rank.number))
    x = (x.to(dtype) if x.is_floating_point() else x).to(rank.device.torch_device)
    model = wrap(rank, module, config)
    inner = torch.optim.AdamW(model.parameters(), **{"foreach": True, **adamw})
    optimizer = megastrategy.DistributedOptimizer(inner, model)
    step = steps_of(rank, model, optimizer, x, (lambda: optimizer.clip_grad_norm_(1.0)) if clips else None)
    for _ in range(WARM_UP):
        step()
    model.finish_param_gather()
    rank.device.synchronize()
    return model, step


def ddp(rank: Rank, make: Callable[[], Model], **adamw: Any) -> Step:
    """torch DDP, warm."""
    module = made_on(rank, make)
    x = module.sample(torch.Generator().manual_seed(rank.number)).to(rank.device.torch_device)
    model = wrap_in_ddp(rank, module)
    step = steps_of(rank, model, torch.optim.AdamW(model.parameters(), **{"foreach": True, **adamw}), x)
    for _ in range(WARM_UP):
        step()
    rank.device.synchronize()
    return step


def repeated(step: Step, times: int) -> Step:
    """Several steps as one."""

    def run() -> None:
        for _ in range(times):
            step()

    return run


# --- F ---------------------------------------------------------------------------------------------------------------

_PROMISES: dict[str, dict[str, Any]] = {
    "default": {},
    "static-graph": {"static_graph": True},
    "all-used": {"find_unused_parameters": False},
    "gather-forward": {"overlap_param_gather": True},
    "pooled": {"grad_buffer": "pooled"},
}


def run_waits(context: Context) -> None:
    """F: steps 5 to 10 read nothing back from the device."""
    for way, place in {"alone": context.place("alone"), "together": context.place()}.items():
        for full in context.cases([f"{way}.{name}" for name in _PROMISES]):
            config = _PROMISES[full.partition(".")[2]]
            with context.attempt(full):
                found = context.ranks(reads_in_steady_steps, config, True, place=place)
                told = next(filter(None, found), "")
                if told:  # by clipping, or by everybody's step
                    plain = next(filter(None, context.ranks(reads_in_steady_steps, config, False, place=place)), "")
                    told += "\nwithout clipping: " + (plain or "nothing")
                context.check_equal(full, f"{WARM_UP + 2} steps", told)
    with context.attempt("a-read-is-seen"):
        found = context.ranks(sees_a_read, place=context.place("alone"))
        context.check_equal(
            "a-read-is-seen", "one read", "" if all(found) else "a read went unnoticed: F proves nothing"
        )


def reads_in_steady_steps(rank: Rank, config: dict[str, Any], clips: bool) -> str:
    """Returns what was read; empty if nothing."""
    model, step = ours(rank, Chain, {"bucket_size": 200, **config}, clips=clips)
    found = ""
    try:
        with rank.device.forbid_reads():
            for _ in range(WARM_UP + 2):
                step()
            model.finish_param_gather()
    except RuntimeError as error:
        found = str(error)
    rank.device.synchronize()
    model.close()
    return found


def sees_a_read(rank: Rank) -> bool:
    """Whether the device's own alarm goes off, and would in core."""
    namespace = {"__name__": "megastrategy.core.made_up", "tensor": torch.ones(1, device=rank.device.torch_device)}
    try:
        with rank.device.forbid_reads():
            exec("tensor.item()", namespace)  # as core's code would
    except RuntimeError:
        return True
    return False


# --- H ---------------------------------------------------------------------------------------------------------------

_DEPTH = 6
A, B, C = 60, 14, 16
"""Kernels a step: a few, for each parameter (forward, backward and clipping with them), and for each bucket (12 of them
AdamW's, foreach). None for an element."""

_KINDS: dict[str, dict[str, Any]] = {
    "default": {},
    "pooled": {"grad_buffer": "pooled"},
    "fp32-sums": {"grad_reduce_in_fp32": False, "reduce_scatter_with_fp32_accumulation": True},
    "all-reduce": {"use_distributed_optimizer": False},
}


def run_launches(context: Context) -> None:
    """H: kernels a step are bounded by parameters and buckets, at two widths."""
    # Multiples that leave no gap in a bucket, whatever the number of ranks: a gap is zeroed, by one kernel.
    narrow = 64 * context.place().size
    widths = narrow, narrow * (5 if context.is_host else max(2, 2304 // narrow))  # on a GPU 5M elements a bucket
    limit = A + B * 2 * _DEPTH + C * _DEPTH
    for name in context.cases(_KINDS):
        with context.attempt(name):
            found = context.ranks(count_launches, widths, _KINDS[name])[0]
            for width, (operations, _) in zip(widths, found, strict=True):
                context.check(f"{name}.operations-at-{width}", operations, limit)
            context.check(f"{name}.more-at-{widths[1]}", found[1][0] - found[0][0], 0, unit="operations")
            for width, (_, kernels) in zip(widths, found, strict=True):
                if context.is_host:
                    context.measure(f"{name}.kernels-at-{width}", kernels, detail="operators: the host has no kernels")
                else:
                    context.check(f"{name}.kernels-at-{width}", kernels, limit)


def count_launches(rank: Rank, widths: tuple[int, ...], config: dict[str, Any]) -> list[tuple[int, int]]:
    """By width: operations that are a kernel at least, and kernels, of one step."""
    found = []
    with rank.device.as_on_an_accelerator():
        for width in widths:
            numel = width * width + width

            def make(width: int = width) -> Model:
                return Chain(width, _DEPTH).to(torch.bfloat16)

            model, step = ours(rank, make, {"bucket_size": numel, **config}, clips=True)
            with Operations() as operations:
                step()
                model.finish_param_gather()
            trace = record(rank.device, step)
            found.append((operations.total, len(trace.work)))
            model.close()
    return found


# --- G ---------------------------------------------------------------------------------------------------------------

Size = tuple[int, int, int, int]
SIZES: dict[str, Size] = {"gpt-124m": (50257, 1024, 768, 12), "gpt-350m": (50257, 1024, 1024, 24)}
"""Vocabulary, context, width, depth."""
ON_HOST: dict[str, Size] = {"gpt-tiny": (64, 16, 64, 2)}

IDLE_MS, OVER_DDP_MS = 0.3, 0.2


def sizes(context: Context) -> dict[str, Size]:
    """The models that times are taken of."""
    return ON_HOST if context.is_host else SIZES


def timed_cases(context: Context) -> dict[str, tuple[Place, Size]]:
    """Lists by name the ranks and models of times: on all GPUs; or on one rank, and on the first of several."""
    places = {"": context.place()}
    if context.num_gpus == 1:
        places = {f".one-of-{FAKE_SIZE}": context.place("fake"), "": context.place("alone")}
    return {
        f"{name}{ending}": (place, size) for name, size in sizes(context).items() for ending, place in places.items()
    }


def run_idle(context: Context) -> None:
    """G: the device does not wait for the host between backward and step."""
    cases = timed_cases(context)
    for name in context.cases(cases):
        place, size = cases[name]
        with context.attempt(name):
            mine, theirs = context.ranks(idle_between, size, 2 if context.is_host else 8, place=place)[0]
            context.measure(f"{name}.ddp", theirs, "ms")
            if context.is_host:
                context.measure(f"{name}.ours", mine, "ms", "between operators: nothing runs behind the host's back")
            else:
                context.check(f"{name}.ours", mine, max(IDLE_MS, theirs + OVER_DDP_MS), unit="ms")


def idle_between(rank: Rank, size: Size, batch: int) -> tuple[float, float]:
    """Milliseconds between the last work of backward and the first of the step: ours, torch DDP's."""
    model, step = ours(rank, lambda: Gpt(size, batch), {}, fused=True, foreach=False)
    mine = _idle_ms(record(rank.device, repeated(step, 5)))
    model.close()
    del model, step
    theirs = ddp(rank, lambda: Gpt(size, batch), fused=True, foreach=False)
    return mine, _idle_ms(record(rank.device, repeated(theirs, 5)))


def _idle_ms(trace: Trace) -> float:
    gaps = []
    for backward, step in zip(trace.ranges("check: backward"), trace.ranges("check: step"), strict=True):
        before, after = trace.work_of(backward), trace.work_of(step)
        if not before or not after:
            raise RuntimeError("the trace has a backward or a step without work: its clocks or its ranges are not ours")
        gaps.append((min(span.start_us for span in after) - max(span.end_us for span in before)) / 1e3)
    return statistics.median(gaps)
