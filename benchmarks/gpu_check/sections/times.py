"""J: the time of a step beside torch DDP's and FSDP2's, in turns in one process."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch

from megastrategy import DistributedOptimizer
from megastrategy.core import devices, memory_use

from ..context import Context
from ..models import Chain, Gpt, Model
from ..ranks import Rank
from ..training import wrap
from .work import Size, ddp, made_on, ours, steps_of, timed_cases

OVER_DDP = 1.03
Step = Callable[[], object]

_VARIANTS: dict[str, dict[str, Any]] = {
    "ours": {},
    "ours-static-graph": {"static_graph": True},
    "ours-gather-forward": {"overlap_param_gather": True},
    "ours-all-reduce": {"use_distributed_optimizer": False},
}


def run(context: Context) -> None:
    """The whole section."""
    rounds, steps, batch = (3, 2, 2) if context.is_host else (5, 4, 8)
    cases = {
        f"{name}.{precision}": (place, size, precision)
        for name, (place, size) in timed_cases(context).items()
        for precision in (("fp32",) if context.is_host else ("bf16-autocast", "fp32"))
    }
    for name in context.cases([*cases, "offload", "accumulation"]):
        with context.attempt(name):
            if name == "offload":
                _offload(context, rounds)
            elif name == "accumulation":
                _accumulation(context, rounds)
            else:
                place, size, precision = cases[name]
                found = context.ranks(time_in_turns, size, batch, precision, rounds, steps, place=place)
                _say(context, name, found)


def _accumulation(context: Context, rounds: int) -> None:
    numel = 2**12 if context.is_host else 2**22
    [times] = context.ranks(time_accumulation, numel, rounds, place=context.place("alone"))
    for name, ms in times.items():
        context.measure(f"accumulation.{name}", ms, "ms", f"32 gradients in bf16 of {numel} elements into fp32")


def _offload(context: Context, rounds: int) -> None:
    """On one GPU as the first of several ranks: alone nothing is offloaded, and two would time gloo."""
    width, depth = (256, 4) if context.is_host else (4096, 12)
    place = context.place("fake") if context.num_gpus == 1 else context.place()
    found = context.ranks(time_offload, width, depth, rounds, place=place)
    for name in found[0]:
        context.measure(f"offload.{name}", max(one[name] for one in found), "ms", "AdamW's state, of fp32 weights")


def _say(context: Context, name: str, found: list[dict[str, list[float]]]) -> None:
    # The slowest rank makes the step; ratios are of one round.
    by_engine = {
        engine: [max(times) for times in zip(*(one[engine] for one in found), strict=True)] for engine in found[0]
    }
    for engine, times in by_engine.items():
        context.measure(
            f"{name}.{engine}", statistics.median(times), "ms", f"from {min(times):.3g} to {max(times):.3g}"
        )
    for engine in [engine for engine in by_engine if engine != "ddp"]:
        ratio = statistics.median(a / b for a, b in zip(by_engine[engine], by_engine["ddp"], strict=True))
        if engine == "ours" and not context.is_host:
            context.check(f"{name}.{engine}-to-ddp", ratio, OVER_DDP)
        else:
            context.measure(f"{name}.{engine}-to-ddp", ratio)


def time_in_turns(
    rank: Rank, size: Size, batch: int, precision: str, rounds: int, steps: int
) -> dict[str, list[float]]:
    """Milliseconds a step by engine, a figure a round."""
    from ...measure import order_of_round  # imports all engines of the benchmark, which no other section needs

    engines = _engines(rank, size, batch, precision)
    times: dict[str, list[float]] = {name: [] for name in engines}
    for number in range(rounds):
        for name in order_of_round(list(engines), number):
            engines[name]()  # what the one before has left in caches is not in this one's time
            rank.device.synchronize()
            first = rank.device.mark()
            for _ in range(steps):
                engines[name]()
            times[name].append(rank.device.ms_between(first, rank.device.mark()) / steps)
    return times


def time_accumulation(rank: Rank, numel: int, rounds: int) -> dict[str, float]:
    """Milliseconds in which autograd adds 16-bit gradients to fp32 ones: in fp32, as here, and where ``grad_dtype`` is
    None, which adds them as they come."""
    device, times = rank.device.torch_device, dict[str, float]()
    for name, grad_dtype in {"in-fp32": torch.float32, "as-they-come": None}.items():
        params = [torch.zeros(numel, dtype=torch.bfloat16, device=device, requires_grad=True) for _ in range(32)]
        grads = [torch.ones(numel, dtype=torch.bfloat16, device=device) for _ in params]
        for param in params:
            param.grad_dtype = grad_dtype
            param.grad = torch.zeros(numel, device=device)
        found = []
        for _ in range(rounds + 1):
            rank.device.synchronize()
            first = rank.device.mark()
            torch.autograd.backward(params, grads)
            found.append(rank.device.ms_between(first, rank.device.mark()))
        times[name] = statistics.median(found[1:])
        if float(params[0].grad[0]) != rounds + 1 or params[0].grad.dtype != torch.float32:
            raise RuntimeError(f"{name}: something else was accumulated")
    return times


def time_offload(rank: Rank, width: int, depth: int, rounds: int) -> dict[str, float]:
    """Milliseconds of the optimizer's step alone, on the device and on the host; and of copies of gradients and weights
    both ways at once, than which no step on the host can be faster."""
    device = rank.device
    x = torch.randn(1, width, device=device.torch_device)
    steps: dict[str, Callable[[], float]] = {}
    nbytes = 0
    for name, offloads in {"on-device": False, "on-host": True}.items():
        module = made_on(rank, lambda: Chain(width, depth))
        model = wrap(rank, module, (("offload_optimizer_states", offloads),))
        optimizer = DistributedOptimizer(torch.optim.AdamW(model.parameters(), fused=True), model)
        # Pinned main params and gradients: a step copies gradients to the host and weights back.
        nbytes = memory_use(model.layout, rank.number, 0, device=device.torch_device).host_bytes // 2

        def step(model: Any = model, optimizer: Any = optimizer) -> float:
            optimizer.zero_grad()
            model(x, 0, rank.number).backward()
            device.synchronize()
            first = device.mark()
            optimizer.step()
            model.finish_param_gather()
            return float(device.ms_between(first, device.mark()))

        steps[name] = step
    steps["copies-both-ways"] = _copies(rank, nbytes)
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds + 2):
        for name, run in steps.items():
            times[name].append(run())
    return {name: statistics.median(found[2:]) for name, found in times.items()}


def _copies(rank: Rank, nbytes: int) -> Callable[[], float]:
    """Makes a call that copies that many bytes from pinned memory, and as many there, at once; in milliseconds."""
    device, streams = rank.device, [rank.device.streams.Stream(rank.device.torch_device) for _ in range(2)]
    on_host = [devices.pinned_memory(nbytes, torch.uint8, device.torch_device) for _ in streams]
    on_device = [torch.empty(nbytes, dtype=torch.uint8, device=device.torch_device) for _ in streams]
    ways = [(on_device[0], on_host[0]), (on_host[1], on_device[1])]

    def run() -> float:
        present = device.streams.current_stream()
        device.synchronize()
        first = device.mark()
        for stream, (place, value) in zip(streams, ways, strict=True):
            stream.wait_stream(present)
            with device.streams.stream(stream):
                place.copy_(value, non_blocking=True)
        for stream in streams:
            present.wait_stream(stream)
        return float(device.ms_between(first, device.mark()))

    return run


def _engines(rank: Rank, size: Size, batch: int, precision: str) -> dict[str, Step]:
    def in_autocast(step: Step) -> Step:
        if precision == "fp32":
            return step

        def run() -> None:
            with torch.autocast(rank.device.type, torch.bfloat16):
                step()

        return run

    adamw = {"fused": True, "foreach": False}

    def make() -> Model:
        return Gpt(size, batch)

    engines = {"ddp": ddp(rank, make, **adamw), "fsdp2": _fsdp2(rank, size, batch)}
    chosen = _VARIANTS if rank.size > 1 else {"ours": {}, "ours-static-graph": _VARIANTS["ours-static-graph"]}
    for name, config in chosen.items():
        engines[name] = ours(rank, make, config, **adamw)[1]
    return {name: in_autocast(step) for name, step in engines.items()}


def _fsdp2(rank: Rank, size: Size, batch: int) -> Step:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    module: Any = made_on(rank, lambda: Gpt(size, batch))
    x = module.sample(torch.Generator().manual_seed(rank.number)).to(rank.device.torch_device)
    mesh = init_device_mesh(rank.device.type, (rank.size,))
    for block in module.model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=False)
    model: Any = fully_shard(module, mesh=mesh, reshard_after_forward=False)
    step = steps_of(rank, model, torch.optim.AdamW(model.parameters(), fused=True), x)
    for _ in range(3):
        step()
    return step
