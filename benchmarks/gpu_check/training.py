"""Trains a recipe under this engine, under torch DDP and in the obvious way, on one rank, and compares."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import megastrategy
from megastrategy.core.collectives import (
    BackendCollectives,
    Collectives,
    GlooCollectives,
)
from megastrategy.core.collectives.part_sums import bytes_of
from megastrategy.core.collectives.process_groups import private_group
from megastrategy.core.layout.layout import BufferLayout

from .models import Model, make_model, microbatch
from .ranks import Rank
from .via_host import ViaHostCollectives, make_collectives

Options = tuple[tuple[str, Any], ...]
Late = Literal["nothing", "results", "gradients", "one rank"]
"""The part that sleeps: none; results before they are delivered; gradients before they are accumulated; one rank,
another in each step. No bit may depend on it."""
SLEEP_MS = 2.0

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """Says what is trained: everything but who trains it.

    Attributes:
        model: a key of ``MODELS``.
        dtype: of the weights, a key of ``DTYPES``.
        autocast: the dtype of an autocast forward; fp16 goes with a GradScaler.
        optimizer: a class of torch.optim.
        options: its arguments.
        accumulate: microbatches a step.
        config: fields of the engine's configuration.
    """

    model: str = "awkward"
    dtype: str = "fp32"
    autocast: torch.dtype | None = None
    optimizer: str = "AdamW"
    options: Options = (("lr", 0.01),)
    steps: int = 4
    accumulate: int = 1
    config: Options = ()

    def make_optimizer(self, params: Iterable[Any]) -> torch.optim.Optimizer:
        kind: type[torch.optim.Optimizer] = getattr(torch.optim, self.optimizer)
        return kind(params, **dict(self.options))


@dataclasses.dataclass
class Trained:
    """The end of a training: parameters and module buffers, and the loss of each step."""

    tensors: dict[str, Tensor]
    losses: list[float]

    def digest(self) -> str:
        """Equal for equal bits."""
        found = hashlib.sha256(repr(self.losses).encode())
        return _digest(found, self.tensors)

    def digest_of_params(self) -> str:
        """Equal for equal bits of what all ranks share: losses are a rank's own, and so is what BatchNorm has seen."""
        shared = {name: tensor for name, tensor in self.tensors.items() if not name.startswith("norm.")}
        return _digest(hashlib.sha256(), shared)


def _digest(found: Any, tensors: Mapping[str, Tensor]) -> str:
    for name, tensor in tensors.items():
        found.update(name.encode())
        found.update(bytes_of(tensor))
    return str(found.hexdigest())


class _Sleepy(GlooCollectives):
    """Delivers results late, by times of its own."""

    def __init__(self, group: Any, rank_check: Any) -> None:
        super().__init__(group, rank_check)
        self._random = random.Random(group.rank())

    def _start(self, what: str, run: Callable[[], object]) -> Any:
        pause_s = self._random.random() * SLEEP_MS / 1e3

        def late() -> None:
            run()
            time.sleep(pause_s)

        return super()._start(what, late)


def collectives_for(rank: Rank, late: Late = "nothing") -> Collectives | None:
    """Makes what the engine is given; None where it shall find out itself, which is what users have."""
    on_host = rank.device.type == "cpu"
    if rank.way in ("alone", "fake") or (not on_host and (rank.way == "backend" or late != "results")):
        return None
    group = private_group(None, rank.device.torch_device)
    # With its roll call and what else it takes to watch others.
    made = make_collectives(group, rank.device.torch_device)
    if rank.way == "backend":
        return BackendCollectives(group, made.rank_check)
    kind = _Sleepy if late == "results" else GlooCollectives
    return ViaHostCollectives(kind(group, made.rank_check), rank.device.torch_device, rank.device.streams)


def wrap(
    rank: Rank, module: nn.Module, config: Options | Mapping[str, Any] = (), late: Late = "nothing", **more: Any
) -> megastrategy.DistributedDataParallel:
    """The engine around a module, connected as the ranks are."""
    options = megastrategy.DistributedDataParallelConfig(**dict(config))
    return megastrategy.DistributedDataParallel(module, options, collectives=collectives_for(rank, late), **more)


def let_gradients_sleep(rank: Rank, module: nn.Module, late: Late) -> Callable[[int], None]:
    """Registers hooks that hold the stream up before gradients are accumulated. Call the result with each step."""
    step_now = 0

    def pause(grad: Tensor, number: int) -> None:
        whose = step_now % rank.size
        if late == "gradients" or whose == rank.number:
            chosen = random.Random(1_000 * step_now + 10 * number + rank.number)
            if chosen.random() < 0.5:
                rank.device.sleep(chosen.random() * SLEEP_MS)

    def begin(step: int) -> None:
        nonlocal step_now
        step_now = step

    if late in ("gradients", "one rank"):
        for number, param in enumerate(param for param in module.parameters() if param.requires_grad):
            param.register_hook(lambda grad, number=number: pause(grad, number))
    return begin


def _scaler(recipe: Recipe, kind: type[torch.amp.GradScaler], device: str) -> torch.amp.GradScaler:
    # Small enough to grow and to shrink in a few steps.
    return kind(device, enabled=recipe.autocast is torch.float16, init_scale=2.0**14, growth_interval=3)


def _train(
    rank: Rank,
    recipe: Recipe,
    model: Any,
    module: Model,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    begin: Callable[[int], None] = lambda step: None,
    end: Callable[[int], None] = lambda step: None,
) -> list[float]:
    losses = []
    device, dtype = rank.device.torch_device, DTYPES[recipe.dtype]
    for step in range(recipe.steps):
        begin(step)
        optimizer.zero_grad()
        for number in range(recipe.accumulate):
            last = number == recipe.accumulate - 1
            x = microbatch(module, rank.number, step, number, dtype).to(device)
            autocast = torch.autocast(device.type, recipe.autocast, enabled=recipe.autocast is not None)
            with contextlib.nullcontext() if last else model.no_sync():
                with autocast:
                    loss = model(x, step, rank.number)
                scaler.scale(loss / recipe.accumulate).backward()
        losses.append(loss.detach())
        scaler.step(optimizer)
        scaler.update()
        end(step)
    return [float(loss) for loss in losses]


def _trained(module: nn.Module, losses: list[float]) -> Trained:
    return Trained({name: value.detach().clone() for name, value in module.state_dict().items()}, losses)


def train_ours(
    rank: Rank, recipe: Recipe, late: Late = "nothing", layouts: list[BufferLayout] | None = None
) -> Trained:
    """Under this engine. ``layouts`` gets that of each step."""
    module = make_model(recipe.model, DTYPES[recipe.dtype]).to(rank.device.torch_device)
    begin = let_gradients_sleep(rank, module, late)
    model = wrap(rank, module, recipe.config, late)
    optimizer = megastrategy.DistributedOptimizer(recipe.make_optimizer(model.parameters()), model)
    scaler = _scaler(recipe, megastrategy.GradScaler, rank.device.type)

    def end(step: int) -> None:
        if layouts is not None:
            layouts.append(model.layout)

    losses = _train(rank, recipe, model, module, optimizer, scaler, begin, end)
    model.close()
    return _trained(module, losses)


def wrap_in_ddp(rank: Rank, module: nn.Module, **options: Any) -> TorchDDP:
    """torch DDP around a module; a fake rank's gradients stay as they are, see [Note: ways to connect ranks]."""
    model = TorchDDP(module, **options)
    if rank.way == "fake":
        # An all-reduce of torch's fake backend has no result, which DDP's own hook takes for granted.
        model.register_comm_hook(rank, _leave_unreduced)
    return model


# Without annotations: DDP compares them with its own types, and here they are strings.
def _leave_unreduced(rank, bucket):  # type: ignore[no-untyped-def]
    future = torch.futures.Future(devices=[rank.device.torch_device] if rank.device.type != "cpu" else None)
    future.set_result(bucket.buffer())
    return future


def train_ddp(rank: Rank, recipe: Recipe, layouts: Sequence[BufferLayout] = ()) -> Trained:
    """Under torch DDP, with the same optimizer. ``layouts``: of a fake rank, by step."""
    module = make_model(recipe.model, DTYPES[recipe.dtype]).to(rank.device.torch_device)
    model = wrap_in_ddp(rank, module, find_unused_parameters=True)
    optimizer = recipe.make_optimizer(model.parameters())
    scaler = _scaler(recipe, torch.amp.GradScaler, rank.device.type)

    def end(step: int) -> None:
        if layouts:
            repeat_first_shard(module, layouts[step])

    losses = _train(rank, recipe, model, module, optimizer, scaler, end=end)
    return _trained(module, losses)


@torch.no_grad()
def repeat_first_shard(module: nn.Module, layout: BufferLayout) -> None:
    """Gives contiguous parameters the values that a fake rank gathers: its shard of a bucket, once for each rank."""
    params = dict(module.named_parameters())
    for bucket in layout.buckets:
        of_bucket = [(params[layout.params[index].name], layout.slots[index]) for index in bucket.params]
        values = of_bucket[0][0].new_zeros(bucket.numel)
        for param, slot in of_bucket:
            values[slot.start - bucket.start : slot.end - bucket.start] = param.flatten()
        shards = values.view(layout.num_shards, -1)
        shards.copy_(shards[0].clone())
        for param, slot in of_bucket:
            param.copy_(values[slot.start - bucket.start : slot.end - bucket.start].view_as(param))


def train_obviously(rank: Rank, recipe: Recipe, layouts: Sequence[BufferLayout] = ()) -> Trained:
    """With nothing but an all-gather: the mean over ranks of fp32 gradients, and fp32 copies of 16-bit weights."""
    sent_grads = dict(recipe.config).get("grad_wire_dtype")
    device, dtype = rank.device.torch_device, DTYPES[recipe.dtype]
    module = make_model(recipe.model, dtype).to(device)
    params = [param for param in module.parameters() if param.requires_grad]
    mains = [nn.Parameter(param.detach().to(torch.float32, copy=True)) for param in params]
    optimizer = recipe.make_optimizer(mains)
    losses = []
    for step in range(recipe.steps):
        _broadcast(rank, list(module.buffers()))
        sums: list[Tensor | None] = [None] * len(params)
        for number in range(recipe.accumulate):
            loss = module(microbatch(module, rank.number, step, number, dtype).to(device), step, rank.number)
            (loss / recipe.accumulate).backward()
            for place, param in enumerate(params):
                grad, param.grad = param.grad, None
                if grad is not None:
                    before = sums[place]
                    sums[place] = grad.float() if before is None else before + grad.float()
        losses.append(float(loss.detach()))
        for main, grad in zip(mains, _means(rank, params, sums, sent_grads), strict=True):
            main.grad = grad
        optimizer.step()
        with torch.no_grad():
            for param, main in zip(params, mains, strict=True):
                param.copy_(main)
        if layouts:
            repeat_first_shard(module, layouts[step])
    return _trained(module, losses)


def _means(rank: Rank, params: list[nn.Parameter], grads: list[Tensor | None], sent: str | None) -> list[Tensor | None]:
    used = gather(rank, torch.tensor([grad is not None for grad in grads], dtype=torch.int64))
    sent_dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(sent or "")
    means: list[Tensor | None] = []
    for place, (param, grad) in enumerate(zip(params, grads, strict=True)):
        if not any(int(flags[place]) for flags in used):
            means.append(None)
            continue
        # A rank that has not used it adds zero, as under torch DDP.
        own = grad if grad is not None else torch.zeros_like(param, dtype=torch.float32)
        if rank.way == "fake":
            means.append(own)
            continue
        parts = [part * (1.0 / rank.size) for part in gather(rank, own if sent is None else own.to(sent_dtype).float())]
        means.append(sum(parts[1:], parts[0]).to(param.device))
    return means


def gather(rank: Rank, tensor: Tensor) -> list[Tensor]:
    """Every rank's tensor, by rank; by way of the host where gloo connects the ranks."""
    if rank.way == "fake":
        return [tensor] * rank.size
    where = torch.device("cpu") if rank.device.backend(rank.way) == "gloo" else rank.device.torch_device
    tensor = tensor.detach().to(where).contiguous()
    found = [torch.empty_like(tensor) for _ in range(rank.size)]
    dist.all_gather(found, tensor)
    return found


def _broadcast(rank: Rank, tensors: list[Tensor]) -> None:
    for tensor in tensors:
        tensor.copy_(gather(rank, tensor)[0])


def num_differing(mine: Trained, theirs: Trained) -> int:
    """Elements, and losses, that are not equal to the bit; names that only one has count as one."""
    count = len(mine.tensors.keys() ^ theirs.tensors.keys())
    count += sum(a != b for a, b in zip(mine.losses, theirs.losses, strict=True))
    for name in mine.tensors.keys() & theirs.tensors.keys():
        a, b = mine.tensors[name], theirs.tensors[name]
        count += int((a != b).sum()) if a.shape == b.shape and a.dtype == b.dtype else 1
    return count


def largest_difference(mine: Trained, theirs: Trained) -> float:
    """Finds that of any tensor, relative to its largest element; infinite if they are not of the same model."""
    if mine.tensors.keys() != theirs.tensors.keys():
        return float("inf")
    worst = 0.0
    for name, b in theirs.tensors.items():
        a, size = mine.tensors[name].double(), float(b.double().abs().max())
        worst = max(worst, float((a - b.double()).abs().max()) / max(size, 1e-8))
    return worst


def where_different(mine: Trained, theirs: Trained) -> str:
    """Names what differs, by how much; empty if nothing does."""
    names = [
        f"{name} by {float((mine.tensors[name].double() - value.double()).abs().max()):.3g}"
        for name, value in theirs.tensors.items()
        if name in mine.tensors and not torch.equal(mine.tensors[name], value)
    ]
    return ", ".join(names[:6]) + (" and others" if len(names) > 6 else "")
