"""M: what two ranks save, one rank resumes, and what it costs to bring state to the host."""

from __future__ import annotations

import dataclasses
import hashlib
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

import megastrategy
from megastrategy.core.collectives.tensor_parts import bytes_of

from ..context import Context
from ..devices import MIB
from ..models import Chain, make_model, microbatch
from ..ranks import Rank
from ..training import wrap
from ..versions import has_numpy

_STEPS = 3
_KINDS = {"fp32": torch.float32, "bf16": torch.bfloat16}


def run(context: Context) -> None:
    """The whole section."""
    folder = Path(tempfile.mkdtemp(prefix="gpu-check-"))
    try:
        for dtype in _KINDS:
            if not has_numpy():
                context.skip(dtype, "numpy is not installed, which torch needs for directories")
                continue
            with context.attempt(dtype):
                _resumes(context, dtype, folder / dtype)
        with context.attempt("speed"):
            _speed(context)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


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


def _make(rank: Rank, dtype: str) -> tuple[Any, Any, Any]:
    module = make_model("awkward", _KINDS[dtype]).to(rank.device.torch_device)
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

_SHARE_OF_A_COPY = 0.4
"""The share of the rate of one copy to pinned memory that is expected: the state is gathered, copied and cut."""


def _speed(context: Context) -> None:
    width, depth = (128, 4) if context.is_host else (4096, 12)
    place = context.place("alone")
    [found] = context.ranks(time_state, width, depth, place=place)
    for name in ("copy", "state"):
        context.measure(f"speed.{name}", found[name], "GB/s", f"{found['mib']:.0f} MiB")
    share = found["state"] / found["copy"]
    if context.is_host:
        context.measure("speed.state-to-copy", share)
    else:
        context.check("speed.state-to-copy", share, _SHARE_OF_A_COPY, at_least=True)


def time_state(rank: Rank, width: int, depth: int) -> dict[str, float]:
    """GB/s of a copy to pinned memory, and of the optimizer's state on its way into a checkpoint."""
    device = rank.device
    model = wrap(rank, Chain(width, depth).to(device.torch_device))
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
    nbytes = sum(tensor.nbytes for tensor in _tensors(copied))
    source = torch.empty(64 * MIB if device.type == "cuda" else MIB, dtype=torch.uint8, device=device.torch_device)
    target = torch.empty(source.shape, dtype=torch.uint8, pin_memory=device.type == "cuda")
    target.copy_(source, non_blocking=True)
    device.synchronize()
    began = time.perf_counter()
    target.copy_(source, non_blocking=True)
    device.synchronize()
    copy_s = time.perf_counter() - began
    model.close()
    return {"copy": source.nbytes / copy_s / 1e9, "state": nbytes / min(seconds) / 1e9, "mib": nbytes / MIB}


def _tensors(value: Any) -> list[Tensor]:
    """All tensors in it."""
    if isinstance(value, dict):
        return [tensor for item in value.values() for tensor in _tensors(item)]
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in _tensors(item)]
    value = getattr(value, "local", value)
    return [value] if isinstance(value, Tensor) else []
