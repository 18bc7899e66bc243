"""K: torch.compile around the engine, and CUDA graphs."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn

import megastrategy
from megastrategy.core import Event, EventKind

from ..context import Context
from ..models import SEED, Chain, Gpt
from ..ranks import FAKE_SIZE, Place, Rank
from ..training import wrap, wrap_in_ddp

CLOSE = 1e-4
"""Relative: a compiler may fuse and so round otherwise; AdamW's first steps are signs."""
_STEPS = 4
_ORDERS = "compiled-after-wrap", "compiled-before-wrap"


_FAKE = f"one-of-{FAKE_SIZE}"


def run(context: Context) -> None:
    """The whole section."""
    compiled = [f"{order}{ending}" for order in _ORDERS for ending in ("", f".{_FAKE}")]
    graphed = ["whole-step-graph", "graphed-before-wrap", "graphed-after-wrap", f"graphed-after-wrap.{_FAKE}"]
    graphed.append("graphed-under-ddp")
    for name in context.cases([*compiled, *graphed]):
        if name in graphed and context.is_host:
            context.skip(name, "the host has no CUDA graphs")
            continue
        what, _, way = name.partition(".")
        with context.attempt(name):
            if what in _ORDERS:
                _compile(context, name, what, context.place("fake" if way else None))
            elif what == "whole-step-graph":
                [found] = context.ranks(replay_a_step, place=context.place("alone"))
                context.check(name, found, 1e-6, unit="relative")
            elif what == "graphed-before-wrap":
                context.check_equal(name, "equal or refused", context.ranks(wrap_graphed)[0])
            elif what == "graphed-under-ddp":
                context.measure(name, context.ranks(graph_under_ddp, place=context.place("alone"))[0])
            else:
                [worst] = context.ranks(graph_wrapped, place=context.place("fake" if way else "alone"))
                context.check(name, worst, CLOSE, unit="relative")


def _compile(context: Context, name: str, order: str, place: Place) -> None:
    # On the host the compiler's tracing is what is tried: its code generation takes minutes there, and is not ours.
    found = context.ranks(train_compiled, order, "aot_eager" if context.is_host else "inductor", place=place)
    context.check(f"{name}.parity", max(one["difference"] for one in found), CLOSE, unit="relative")
    context.measure(f"{name}.launched-before-end", min(one["early"] for one in found), "of buckets")
    context.measure(f"{name}.graphs", found[0]["graphs"])


def train_compiled(rank: Rank, order: str, backend: str) -> dict[str, Any]:
    """Compares losses with a run that is not compiled; counts buckets launched before backward ended."""
    plain, _, _ = _train(rank, "", backend)
    began = time.perf_counter()
    losses, early, graphs = _train(rank, order, backend)
    difference = max(abs(a - b) / max(abs(b), 1e-8) for a, b in zip(losses, plain, strict=True))
    return {"difference": difference, "early": early, "graphs": graphs, "seconds": time.perf_counter() - began}


def _train(rank: Rank, order: str, backend: str) -> tuple[list[float], float, int]:
    """The losses, the share of buckets that were launched before the last gradient of a backward, and graphs."""
    events: list[Event] = []
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(SEED)
    module: Any = Gpt()
    x = module.sample(torch.Generator().manual_seed(rank.number)).to(rank.device.torch_device)
    module = module.to(rank.device.torch_device)
    if order == "compiled-before-wrap":
        module = torch.compile(module, backend=backend)
    model = wrap(rank, module, {"bucket_size": 20_000}, listener=events.append)
    optimizer = megastrategy.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-3), model)
    called: Any = torch.compile(model, backend=backend) if order == "compiled-after-wrap" else model
    losses = []
    for _ in range(_STEPS):
        optimizer.zero_grad()
        events.clear()
        loss = called(x)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    early = _share_before_last_gradient(events)
    graphs = int(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    model.close()
    return losses, early, graphs


def _share_before_last_gradient(events: list[Event]) -> float:
    launches = [event.time_ns for event in events if event.kind is EventKind.REDUCE_START]
    gradients = [event.time_ns for event in events if event.kind is EventKind.GRAD_READY]
    if not launches or not gradients:
        return 0.0
    return sum(launch < max(gradients) for launch in launches) / len(launches)


def replay_a_step(rank: Rank) -> float:
    """A whole step of one rank as a CUDA graph, against the same steps without; the relative difference of weights."""
    plain, graphed = _steps(rank, graphed=False), _steps(rank, graphed=True)
    return float((plain - graphed).abs().max() / plain.abs().max())


def _steps(rank: Rank, *, graphed: bool) -> torch.Tensor:
    torch.manual_seed(SEED)
    device = rank.device.torch_device
    module = Chain(64).to(device)
    model = wrap(rank, module, {"static_graph": True})
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3, capturable=True)
    optimizer = megastrategy.DistributedOptimizer(inner, model)
    x = module.sample(torch.Generator().manual_seed(1)).to(device)

    def step() -> None:
        optimizer.zero_grad(set_to_none=False)
        model(x, 0, 0).backward()
        optimizer.step()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(4):
            step()
    torch.cuda.current_stream().wait_stream(side)
    if graphed:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        for _ in range(4):  # capturing has run nothing
            graph.replay()
    else:
        for _ in range(4):
            step()
    rank.device.synchronize()
    model.close()
    return torch.cat([param.detach().flatten() for param in module.parameters()])


def wrap_graphed(rank: Rank) -> str:
    """A module whose calls were graphed before it was wrapped: what is wrong with its training; empty if nothing."""
    torch.manual_seed(SEED)
    device = rank.device.torch_device
    x = torch.randn(4, 13, generator=torch.Generator().manual_seed(rank.number)).to(device)
    layers = [nn.Sequential(nn.Linear(13, 13), nn.Tanh(), nn.Linear(13, 1)).to(device) for _ in range(2)]
    layers[1].load_state_dict(layers[0].state_dict())
    torch.cuda.make_graphed_callables(layers[1], (x.clone(),))
    ended = []
    for layer in layers:
        try:
            model = wrap(rank, layer, {"bucket_size": 64})
        except ValueError as error:
            return "" if "graph" in str(error) else f"refused for another reason: {error}"
        optimizer = megastrategy.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2), model)
        for _ in range(4):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        model.close()
        ended.append(torch.cat([param.detach().flatten() for param in layer.parameters()]))
    difference = float((ended[0] - ended[1]).abs().max())
    return "" if difference < 1e-5 else f"weights differ by {difference:.3g}: the graph reads memory that was moved"


def graph_wrapped(rank: Rank) -> float:
    """The largest relative difference of weights between steps with a graphed layer and steps without.

    The layer's calls are graphed after the first step of the wrapped model, on the loop's own stream, as the refusal of
    a layer that was graphed before advises."""
    ended = []
    for graphed in (False, True):
        torch.manual_seed(SEED)
        device = rank.device.torch_device
        module = Chain(64).to(device)
        x = module.sample(torch.Generator().manual_seed(rank.number)).to(device)
        rank.device.synchronize()
        with rank.device.streams.stream(rank.device.streams.Stream(device)):
            model = wrap(rank, module, {"bucket_size": 5000})
            optimizer = megastrategy.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2), model)
            for step in range(2 * _STEPS):
                if graphed and step == 1:
                    _capture(module, x)
                optimizer.zero_grad()
                model(x, step, rank.number).backward()
                optimizer.step()
            model.close()
            ended.append(torch.cat([param.detach().flatten() for param in module.parameters()]))
        rank.device.synchronize()
    return float((ended[0] - ended[1]).abs().max() / ended[0].abs().max())


def graph_under_ddp(rank: Rank) -> str:
    """Says whether torch DDP captures the same layer after a step on the default stream."""
    module = Chain(64).to(rank.device.torch_device)
    x = module.sample(torch.Generator().manual_seed(rank.number)).to(rank.device.torch_device)
    model = wrap_in_ddp(rank, module, device_ids=[rank.device.index])
    model(x, 0, rank.number).backward()
    try:
        _capture(module, x)
    except RuntimeError as error:
        return f"raises {type(error.__context__ or error).__name__}"
    return "captures"


def _capture(module: Chain, x: torch.Tensor) -> None:
    # Its input has a gradient in the model, and so in the graph.
    torch.cuda.make_graphed_callables(module.layers[1], (x.clone().requires_grad_(),))
