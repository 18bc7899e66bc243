"""S: what a user asks first of a data-parallel engine: is it the same training, how fast, and in how much memory."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import statistics
import time
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import nn

import megastrategy
from megastrategy.core import memory_use

from ..context import Context
from ..models import Gpt
from ..ranks import FAKE_SIZE, Rank
from ..traces import record
from ..training import Recipe, num_differing, train_ddp, train_obviously, train_ours, where_different, wrap, wrap_in_ddp
from .work import Size, made_on

Figures = dict[str, float | str]
GIB = 2**30
WARM_UP = 4
"""Steps before anything is measured, the last of them with a peak of memory of its own."""
LEARNING_RATE = 1e-4


@dataclasses.dataclass(frozen=True)
class Engine:
    """Who trains: with fp32 weights under autocast to bf16, or with bf16 weights. Those torch DDP steps themselves, and
    this engine fp32 copies of them.

    Attributes:
        config: of this engine.
    """

    kind: Literal["ddp", "fsdp2", "ours"]
    dtype: torch.dtype = torch.float32
    config: dict[str, Any] = dataclasses.field(default_factory=dict)


def _in_bf16(**config: Any) -> Engine:
    return Engine("ours", torch.bfloat16, config)


ENGINES = {
    "ddp": Engine("ddp"),
    "fsdp2": Engine("fsdp2"),
    "ours": Engine("ours"),
    "ddp-bf16": Engine("ddp", torch.bfloat16),
    "ours-bf16": _in_bf16(),
    "gather-forward-bf16": _in_bf16(overlap_param_gather=True),
    "pooled-bf16": _in_bf16(grad_buffer="pooled"),
    "offload-bf16": _in_bf16(offload_optimizer_states=True),
}

MODELS: dict[str, tuple[Size, int]] = {
    "gpt-124m": ((50257, 1024, 768, 12), 8),
    "gpt-1300m": ((50257, 1024, 2048, 24), 4),
}
"""Vocabulary, context, width and depth; sequences a step."""
ON_HOST: dict[str, tuple[Size, int]] = {"gpt-tiny": ((64, 16, 64, 2), 2)}

_FAKE = f"one-of-{FAKE_SIZE}"
_TURNS: dict[str, tuple[str, ...]] = {
    "autocast": ("ddp", "ours"),
    f"{_FAKE}.bf16": ("ddp-bf16", "ours-bf16", "gather-forward-bf16"),
    f"{_FAKE}.less-memory": ("ddp-bf16", "pooled-bf16", "offload-bf16"),
    "bf16": ("ddp-bf16", "ours-bf16"),
    f"{_FAKE}.autocast": ("ddp", "ours"),
    f"{_FAKE}.fsdp2": ("ddp", "fsdp2"),
    "fsdp2": ("ddp", "fsdp2"),
}
"""Engines in memory together, each after the one that it is compared with; the most important first. Of 1.3 billion
parameters in fp32 each has 21 GB."""


def run(context: Context) -> None:
    """The whole section."""
    models = ON_HOST if context.is_host else MODELS
    rounds, steps = (2, 2) if context.is_host else (5, 4)
    turns = _TURNS
    if context.num_gpus > 1:  # all ranks are real
        turns = {name.removeprefix(f"{_FAKE}."): engines for name, engines in _TURNS.items()}
    for name in context.cases(["parity", *(f"{model}.{case}" for case in turns for model in models)]):
        with context.attempt(name):
            if name == "parity":
                _parity(context)
                continue
            model, _, case = name.partition(".")
            place = context.place("fake" if case.startswith(_FAKE) else "alone" if context.num_gpus == 1 else None)
            found = context.ranks(time_engines, *models[model], turns[case], rounds, steps, place=place)
            for engine in turns[case]:
                _say(context, f"{name}.{engine}", [one[engine] for one in found])


def _parity(context: Context) -> None:
    place = context.place("alone") if context.num_gpus == 1 else context.place()
    model = "gpt" if context.is_host else "gpt-wide"
    found = context.ranks(compare, model, place=place)
    for name, (_, where) in found[0].items():
        count = max(one[name][0] for one in found)
        if place.size <= 2:
            context.check(f"parity.{name}", count, 0, unit="elements", detail=where)
        else:
            context.measure(f"parity.{name}", count, "elements", "sums have another order")


def compare(rank: Rank, model: str) -> dict[str, tuple[int, str]]:
    """By precision: the elements that differ after six steps, and where."""
    rank.device.be_deterministic()
    recipe = Recipe(
        model=model,
        options=(("lr", LEARNING_RATE), ("fused", True)),
        steps=6,
        config=(("bucket_size", 1_000_000),),
    )
    found = {}
    for name, how in {"fp32": {}, "bf16-autocast": {"autocast": torch.bfloat16}, "bf16": {"dtype": "bf16"}}.items():
        one = dataclasses.replace(recipe, **how)  # type: ignore[arg-type]
        theirs = (train_obviously if one.dtype == "bf16" else train_ddp)(rank, one)
        mine = train_ours(rank, one)
        found[name] = num_differing(mine, theirs), where_different(mine, theirs)
    return found


def _say(context: Context, name: str, found: list[Figures]) -> None:
    """Says the figures of the slowest rank."""
    if error := next((str(one["error"]) for one in found if "error" in one), ""):
        context.check_equal(name, "trains", error)
        return
    slowest = max(found, key=lambda one: float(one["ms"]))
    context.measure(name, slowest["ms"], "ms", figures={key: value for key, value in slowest.items() if key != "ms"})


def time_engines(
    rank: Rank, size: Size, batch: int, names: tuple[str, ...], rounds: int, steps: int
) -> dict[str, Figures]:
    """Engines in turns in one process; the first is the one that the others are compared with."""
    made: dict[str, Callable[[], object]] = {}
    figures: dict[str, Figures] = {}
    for name in names:
        try:
            made[name], figures[name] = _make(rank, ENGINES[name], size, batch)
        except Exception as error:  # noqa: BLE001 - a line, and the next engine
            figures[name] = {"error": f"{type(error).__name__}: {error}"[:600]}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in made}
    for number in range(rounds):
        for name in list(made)[:: -1 if number % 2 else 1]:
            made[name]()  # what the one before has left in caches is not in this one's time
            times[name].append(_time(rank, made[name], steps))
    for name, found in times.items():
        ms = statistics.median(one for one, _ in found)
        line: Figures = {"ms": ms, "least_ms": min(found)[0], "host_ms": statistics.median(host for _, host in found)}
        if names[0] in times:
            pairs = zip(found, times[names[0]], strict=True)
            line[f"to_{names[0]}"] = statistics.median(a / b for (a, _), (b, _) in pairs)
        line["tokens_per_s"] = round(batch * size[1] / ms * 1e3)
        figures[name] = line | figures[name]
    return figures


def _make(rank: Rank, engine: Engine, size: Size, batch: int) -> tuple[Callable[[], object], Figures]:
    """A warm engine's step, and what can be said of it before times are taken."""
    device = rank.device
    gc.collect()
    before = device.allocated_bytes()
    module = made_on(rank, lambda: Gpt(size, batch).to(engine.dtype))
    x = module.sample(torch.Generator().manual_seed(rank.number)).to(device.torch_device)
    model = _wrapped(rank, engine, module)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    if engine.kind == "ours":
        optimizer = megastrategy.DistributedOptimizer(optimizer, model)
    is_mixed = engine.dtype == torch.float32 and engine.kind != "fsdp2"  # which casts by itself

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.bfloat16) if is_mixed else contextlib.nullcontext():
            loss = model(x, 0, rank.number)
        loss.backward()
        optimizer.step()

    for number in range(WARM_UP):
        if number == WARM_UP - 1:
            device.reset_peak()
        step()
        device.synchronize()
    held, peak = device.allocated_bytes() - before, device.peak_bytes() - before
    found: Figures = {"held_gib": held / GIB, "peak_gib": peak / GIB}
    if engine.kind == "ours":
        table = memory_use(model.layout, rank.number, 2, device=device.torch_device)
        found |= {"table_gib": table.total_bytes / GIB, "host_table_gib": table.host_bytes / GIB}
        found |= {"buckets": len(model.layout.buckets), "shards": model.layout.num_shards}
    trace = record(device, step)
    found |= {"kernels": len(trace.work), "copies": len(trace.copies), "busy_share": trace.busy_share}
    found |= {"host_reads": device.num_reads(step), "pinned_gib": device.pinned_bytes() / GIB}
    return step, found


def _wrapped(rank: Rank, engine: Engine, module: Gpt) -> Any:
    if engine.kind == "ours":
        return wrap(rank, module, engine.config)
    if engine.kind == "ddp":
        devices = None if rank.device.type == "cpu" else [rank.device.index]
        return wrap_in_ddp(rank, module, device_ids=devices, gradient_as_bucket_view=True)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh(rank.device.type, (rank.size,))
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    model: nn.Module = module
    for part in (*module.model.blocks, module):
        model = fully_shard(part, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    return model


def _time(rank: Rank, step: Callable[[], object], times: int) -> tuple[float, float]:
    """Milliseconds a step: of the device, and until the host has queued it."""
    rank.device.synchronize()
    began, first = time.perf_counter(), rank.device.mark()
    for _ in range(times):
        step()
    host_ms = 1e3 * (time.perf_counter() - began) / times
    return rank.device.ms_between(first, rank.device.mark()) / times, host_ms
