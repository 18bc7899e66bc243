"""M: what two ranks save, one rank resumes, and what it costs to bring state to the host."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

import megastrategy
from megastrategy.core.collectives.part_sums import bytes_of

from ..context import Context
from ..devices import MIB
from ..models import Chain, make_model, microbatch
from ..ranks import FAKE_SIZE, Place, Rank
from ..training import wrap
from ..versions import has_numpy
from .work import made_on

_STEPS = 3
_FAKE = f"one-of-{FAKE_SIZE}"
_KINDS = {"fp32": torch.float32, "bf16": torch.bfloat16}


def run(context: Context) -> None:
    """The whole section."""
    folder = Path(tempfile.mkdtemp(prefix="gpu-check-"))
    try:
        for name in context.cases([*_KINDS, *(f"{dtype}.one-rank" for dtype in _KINDS), "speed", f"speed.{_FAKE}"]):
            with context.attempt(name):
                _run_case(context, name, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _run_case(context: Context, name: str, folder: Path) -> None:
    what, _, way = name.partition(".")
    if what == "speed":
        _speed(context, name, context.place("fake" if way else "alone"))
    elif way:
        [told] = context.ranks(save_and_resume, what, place=context.place("alone"))
        context.check_equal(f"{name}.goes-on", "state, weights", told)
    elif has_numpy():
        _resumes(context, what, folder / what)
    else:
        context.skip(what, "numpy is not installed, which torch needs for directories")


def save_and_resume(rank: Rank, dtype: str) -> str:
    """On one rank: state is saved, loaded again, and trained on; says what differs."""
    rank.device.be_deterministic()
    module, model, optimizer = _make(rank, dtype, "chain")
    _steps(rank, module, model, optimizer, range(_STEPS), dtype)
    weights = {name: value.clone() for name, value in module.state_dict().items()}
    # copied: on one rank it is the optimizer's own, which torch's load_state_dict would share
    state, main_params = copy.deepcopy(optimizer.state_dict()), optimizer.main_params()
    again, again_model, again_optimizer = _make(rank, dtype, "chain")
    again.load_state_dict(weights)
    again_optimizer.load_state_dict(state)
    again_optimizer.load_main_params(main_params)
    loaded = _digest([again_optimizer.state_dict()["state"], again_optimizer.main_params()])
    told = [] if loaded == _digest([state["state"], main_params]) else ["state that was loaded"]
    for one in ((module, model, optimizer), (again, again_model, again_optimizer)):
        _steps(rank, *one, range(_STEPS, _STEPS + 2), dtype)
    if _digest(module.state_dict()) != _digest(again.state_dict()):
        told.append("weights two steps later")
    model.close()
    again_model.close()
    return " and ".join(told)


def _resumes(context: Context, dtype: str, folder: Path) -> None:
    folder.mkdir()
    together, alone = context.place(), context.place("alone")
    saved = context.ranks(save_and_go_on, dtype, str(folder), place=together)
    whole = saved[0]
    for kind in ("file", "directory"):
        resumed = context.ranks(resume, dtype, str(folder), kind, place=together)
        ended = {one.ended for one in resumed} | {one.ended for one in saved}
        context.check_equal(
            f"{dtype}.{kind}.goes-on", f"{together.size} ranks", "" if len(ended) == 1 else "weights differ"
        )
        [one] = context.ranks(resume, dtype, str(folder), kind, place=alone)
        names = [name for name in ("weights", "state") if getattr(one, name) != getattr(whole, name)]
        told = f"{' and '.join(names)} are not those that were saved" if names else ""
        context.check_equal(f"{dtype}.{kind}.on-one-rank", f"{together.size} to 1", told)


@dataclasses.dataclass(frozen=True)
class State:
    """Digests: of the weights and of the optimizer's whole state where it was saved, and of the weights two steps
    later."""

    weights: str
    state: str
    ended: str


def _make(rank: Rank, dtype: str, name: str = "awkward") -> tuple[Any, Any, Any]:
    module = make_model(name, _KINDS[dtype]).to(rank.device.torch_device)
    model = wrap(rank, module, {"bucket_size": 200})
    optimizer = megastrategy.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.01, fused=True), model)
    return module, model, optimizer


def _steps(rank: Rank, module: Any, model: Any, optimizer: Any, steps: range, dtype: str) -> None:
    for step in steps:
        optimizer.zero_grad()
        x = microbatch(module, rank.number, step, 0, _KINDS[dtype]).to(rank.device.torch_device)
        model(x, step, rank.number).backward()
        optimizer.step()


def _digest(values: Any) -> str:
    """Hashes tensors and plain values, nested."""
    found = hashlib.sha256()

    def add(value: Any) -> None:
        if isinstance(value, Tensor):
            found.update(bytes_of(value))
        elif isinstance(value, dict):
            for key in sorted(value, key=repr):
                found.update(repr(key).encode())
                add(value[key])
        elif isinstance(value, list | tuple):
            for item in value:
                add(item)
        else:
            found.update(repr(value).encode())

    add(values)
    return found.hexdigest()


def save_and_go_on(rank: Rank, dtype: str, folder: str) -> State:
    """Saves one file and, in the background, one directory; goes on for two steps."""
    rank.device.be_deterministic()
    module, model, optimizer = _make(rank, dtype)
    _steps(rank, module, model, optimizer, range(_STEPS), dtype)
    weights = {name: value.cpu() for name, value in module.state_dict().items()}
    state, main_params = optimizer.state_dict(), optimizer.main_params()
    if rank.number == 0:
        torch.save({"weights": weights, "state": state, "main_params": main_params}, Path(folder) / "file")
    sharded = {"optimizer": optimizer.sharded_state_dict()}
    pending: Any = dcp.async_save(sharded, checkpoint_id=str(Path(folder) / "directory"), process_group=_hosts(rank))
    pending.result()  # before the tensors change: they are the optimizer's own until they have been copied
    before = _digest(weights), _digest([state["state"], main_params])
    _steps(rank, module, model, optimizer, range(_STEPS, _STEPS + 2), dtype)
    model.close()
    return State(*before, _digest(_shared(module)))


def _hosts(rank: Rank) -> Any:
    """A group that the background may use while training goes on; DCP's planning is on the host."""
    return dist.new_group(backend="gloo")


def resume(rank: Rank, dtype: str, folder: str, kind: str) -> State:
    """Loads on as many ranks as there are, and goes on for two steps."""
    rank.device.be_deterministic()
    saved = torch.load(Path(folder) / "file", map_location="cpu", weights_only=True)
    module, model, optimizer = _make(rank, dtype)
    module.load_state_dict(saved["weights"])
    if kind == "file":
        optimizer.load_state_dict(saved["state"])
        optimizer.load_main_params(saved["main_params"])
    else:
        optimizer.load_sharded(Path(folder) / "directory")
    weights = _digest({name: value.cpu() for name, value in module.state_dict().items()})
    state = _digest([optimizer.state_dict()["state"], optimizer.main_params()])
    _steps(rank, module, model, optimizer, range(_STEPS, _STEPS + 2), dtype)
    model.close()
    return State(weights, state, _digest(_shared(module)))


def _shared(module: torch.nn.Module) -> dict[str, Tensor]:
    return {name: value for name, value in module.state_dict().items() if not name.startswith("norm.")}


# --- speed -----------------------------------------------------------------------------------------------------------

_FIXED_S = 0.005
"""For names, views and launches, which do not depend on bytes, on a slow host."""
_SHARE_OF_THE_SLOWER = 0.6
"""The share of the rate of the slower of two steps that is expected, since one runs beside the other: a copy to pinned
memory, and the host's from there to pages that no process has used. The latter is the slower one on any fast link."""


def _speed(context: Context, name: str, place: Place) -> None:
    width, depth = (128, 4) if context.is_host else (4096, 12)
    [found] = context.ranks(time_state, width, depth, place=place)
    for what in ("copy", "fresh-pages", "state"):
        context.measure(f"{name}.{what}", found[what], "GB/s", f"{found['mib']:.0f} MiB")
    slower = min(found["copy"], found["fresh-pages"])
    if context.is_host:
        context.measure(f"{name}.state-to-slower", found["state"] / slower)
    else:
        gigabytes = found["mib"] * MIB / 1e9
        rate = gigabytes / (gigabytes / found["state"] - _FIXED_S)
        context.check(f"{name}.state-to-slower", rate / slower, _SHARE_OF_THE_SLOWER, at_least=True)


def time_state(rank: Rank, width: int, depth: int) -> dict[str, float]:
    """GB/s of a copy to pinned memory, of the host's into fresh pages, and of the optimizer's state on its way into a
    checkpoint."""
    device = rank.device
    module = made_on(rank, lambda: Chain(width, depth))
    model = wrap(rank, module)
    optimizer = megastrategy.DistributedOptimizer(torch.optim.AdamW(model.parameters(), fused=True), model)
    model(torch.randn(1, width, device=device.torch_device), 0, 0).backward()
    optimizer.step()
    seconds = []
    for _ in range(3):
        device.synchronize()
        began = time.perf_counter()
        state = optimizer.sharded_state_dict()
        copied = megastrategy.core.to_host(state)
        seconds.append(time.perf_counter() - began)
        sizes = [tensor.numel() for tensor in _tensors(copied)]
        nbytes = sum(tensor.nbytes for tensor in _tensors(copied))
        del state, copied  # else the next one's memory may be what this one has used
    source = torch.empty(64 * MIB if device.type == "cuda" else MIB, dtype=torch.uint8, device=device.torch_device)
    pinned = torch.empty(source.shape, dtype=torch.uint8, pin_memory=device.type == "cuda")
    copy_s = min(_seconds(rank, lambda: pinned.copy_(source, non_blocking=True)) for _ in range(3))
    # As many bytes in tensors as large, so that as much of it is memory that the process has not used.
    parts = [pinned.view(torch.float32)[: min(numel, pinned.numel() // 4)] for numel in sizes]
    fresh_s = min(_seconds(rank, lambda: [part.clone() for part in parts]) for _ in range(3))
    rates = {"copy": source.nbytes / copy_s, "fresh-pages": sum(p.nbytes for p in parts) / fresh_s}
    model.close()
    return {
        **{name: rate / 1e9 for name, rate in rates.items()},
        "state": nbytes / min(seconds) / 1e9,
        "mib": nbytes / MIB,
    }


def _seconds(rank: Rank, run: Callable[[], object]) -> float:
    """Times a call; its results are not freed in it."""
    rank.device.synchronize()
    began = time.perf_counter()
    made = run()
    rank.device.synchronize()
    seconds = time.perf_counter() - began
    del made
    return seconds


def _tensors(value: Any) -> list[Tensor]:
    """All tensors in it."""
    if isinstance(value, dict):
        return [tensor for item in value.values() for tensor in _tensors(item)]
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in _tensors(item)]
    value = getattr(value, "local", value)
    return [value] if isinstance(value, Tensor) else []
