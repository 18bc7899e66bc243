"""N, L: models that use several streams, and weights that cuDNN wants in one piece."""

from __future__ import annotations

import contextlib
import warnings
from typing import Any, Literal

import torch

import megastrategy

from ..context import Context
from ..models import Branches, Model, make_model, microbatch
from ..ranks import Rank
from ..training import (
    Late,
    Recipe,
    Trained,
    let_gradients_sleep,
    num_differing,
    train_ddp,
    train_ours,
    where_different,
    wrap,
)

Where = Literal["one stream", "side branch", "side loop", "side reader"]
STEPS = 4


def run_streams(context: Context) -> None:
    """N: a branch, a whole loop and a reader on streams of their own change no bit."""
    cases: tuple[Where, ...] = ("side branch", "side loop", "side reader")
    lates: list[Late] = ["nothing", "results", "gradients"]
    if context.num_gpus > 1:
        lates.remove("results")  # NCCL's own stream cannot be held up
    turns = {
        f"gather-{place}.late-{late}": (overlap, late)
        for place, overlap in (("step", False), ("forward", True))
        for late in lates
    }
    for name in context.cases(turns):
        with context.attempt(name):
            found = context.ranks(compare_streams, cases, *turns[name])
            for case in cases:
                count = max(one[case][0] for one in found)
                where = next((one[case][1] for one in found if one[case][1]), "")
                context.check(f"{name}.{case.replace(' ', '-')}", count, 0, unit="elements", detail=where)


def compare_streams(rank: Rank, cases: tuple[Where, ...], gather: bool, late: Late) -> dict[str, tuple[int, str]]:
    """By case, the elements that differ from a run on one stream without delays."""
    rank.device.be_deterministic()
    plain = _train(rank, "one stream", gather, "nothing")
    found: dict[str, tuple[int, str]] = {}
    for case in cases:
        trained = _train(rank, case, gather, late)
        found[case] = num_differing(trained, plain), where_different(trained, plain)
    return found


def _train(rank: Rank, where: Where, gather: bool, late: Late) -> Trained:
    streams, device = rank.device.streams, rank.device.torch_device
    module = make_model("branches").to(device)
    assert isinstance(module, Branches)
    module.streams = streams
    if where == "side branch":
        module.side_stream = streams.Stream(device)
    begin = let_gradients_sleep(rank, module, late)
    model = wrap(rank, module, {"bucket_size": 1000, "overlap_param_gather": gather}, late)
    optimizer = megastrategy.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.01), model)
    average = make_model("branches").to(device).requires_grad_(False)  # the same weights; streams cannot be copied
    reader = streams.Stream(device) if where == "side reader" else None
    losses = []
    with _loop_on(rank, where):
        for step in range(STEPS):
            begin(step)
            optimizer.zero_grad()
            loss = model(microbatch(module, rank.number, step, 0, torch.float32).to(device), step, rank.number)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
            _average(rank, average, module, reader)
        rank.device.synchronize()
    model.close()
    tensors = {name: value.detach().clone() for name, value in module.state_dict().items()}
    tensors |= {f"average of {name}": value.detach().clone() for name, value in average.state_dict().items()}
    return Trained(tensors, [float(loss) for loss in losses])


@contextlib.contextmanager
def _loop_on(rank: Rank, where: Where) -> Any:
    if where != "side loop":
        yield
        return
    streams = rank.device.streams
    side = streams.Stream(rank.device.torch_device)
    side.wait_stream(streams.current_stream())
    with streams.stream(side):
        yield
    streams.current_stream().wait_stream(side)


def _average(rank: Rank, average: Model, module: Model, reader: Any) -> None:
    """An exponential moving average, the first to read the new weights; on a stream of its own, if there is one."""
    streams = rank.device.streams

    def update() -> None:
        with torch.no_grad():
            for mean, param in zip(average.parameters(), module.parameters(), strict=True):
                mean.lerp_(param.detach(), 0.1)

    if reader is None:
        update()
        return
    reader.wait_stream(streams.current_stream())
    with streams.stream(reader):
        update()
    # Code that changes weights while another stream reads them must order them: the next step comes after the reader.
    streams.current_stream().wait_stream(reader)


# --- L ---------------------------------------------------------------------------------------------------------------


def run_recurrent(context: Context) -> None:
    """L: an LSTM and a GRU train as under torch DDP, without a warning."""
    places = {"alone": context.place("alone"), "together": context.place()}
    configs: dict[str, dict[str, Any]] = {"sharded": {}, "all-reduce": {"use_distributed_optimizer": False}}
    for full in context.cases([f"{way}.{name}" for way in places for name in configs]):
        way, _, name = full.partition(".")
        with context.attempt(full):
            found = context.ranks(train_recurrent, tuple(configs[name].items()), place=places[way])
            count, where, told = found[0]
            if places[way].size <= 2:
                context.check(f"{full}.as-ddp", count, 0, unit="elements", detail=where)
            context.check_equal(f"{full}.warnings", "5 steps", told)


def train_recurrent(rank: Rank, config: tuple[tuple[str, Any], ...]) -> tuple[int, str, str]:
    """The elements that differ from torch DDP's, where, and what was warned of."""
    rank.device.be_deterministic()
    recipe = Recipe(model="recurrent", steps=5, options=(("lr", 0.01), ("foreach", True)), config=config)
    theirs = train_ddp(rank, recipe)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        mine = train_ours(rank, recipe)
    told = "; ".join(str(one.message).splitlines()[0] for one in caught if "contiguous" in str(one.message))
    return num_differing(mine, theirs), where_different(mine, theirs), told
