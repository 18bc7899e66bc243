"""Loops with Fabric and with Accelerate that are cut within an epoch and gone on with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from .accelerate_loops import make_accelerator
from .fabric_loops import make_fabric
from .resumed_fits import Part, resumable_loader

EPOCHS = 2


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1))


def step(model: nn.Module, features: torch.Tensor, part: Part, optimizer: Any, backward: Any) -> None:
    loss = model(features).square().mean()
    optimizer.zero_grad()
    backward(loss)
    optimizer.step()
    part.losses.append(loss.item())


def with_fabric(
    size: int, file: str, *, cut: int | None = None, resume: bool = False, sharded: bool = False, **loader: Any
) -> Part:
    """Ends after batch ``cut`` of its own, when it has saved."""
    fabric = make_fabric("megatron_ddp", {"state_dict_type": "sharded" if sharded else "full"})
    model = make_model()
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    data = fabric.setup_dataloaders(
        resumable_loader(size, **loader), use_distributed_sampler="batch_sampler" not in loader
    )
    sampler = data.sampler if "batch_sampler" not in loader else data.batch_sampler.sampler
    state = {"model": model, "optimizer": optimizer, "sampler": sampler}
    if resume:
        fabric.load(file, state)
    part = Part([], [], [], [])
    while sampler.epoch < EPOCHS:
        epoch = sampler.epoch
        for numbers, features in data:
            part.trained.append((epoch, numbers.tolist()))
            step(model, features, part, optimizer, fabric.backward)
            if len(part.trained) == cut:
                fabric.save(file, state)
                return part
    return part


def with_accelerate(
    size: int,
    folder: str,
    *,
    cut: int | None = None,
    resume: bool = False,
    sharded: bool = False,
    skip: int = 0,
    options: dict[str, Any] | None = None,
    **loader: Any,
) -> Part:
    """The same; ``skip`` is what a script that knows its step asks accelerate to skip."""
    plugin = {"state_dict_type": "sharded" if sharded else "full"}
    accelerator = make_accelerator("megatron_ddp", plugin, **options or {})
    model, given = make_model(), resumable_loader(size, **loader)
    sampler = given.sampler if "batch_sampler" not in loader else given.batch_sampler.sampler
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, data = accelerator.prepare(model, optimizer, given)
    if resume:
        accelerator.load_state(folder)
    part = Part([], [], [], [])
    for epoch in range(sampler.epoch, EPOCHS):
        active = accelerator.skip_first_batches(data, skip) if skip and not part.trained else data
        for numbers, features in active:
            part.trained.append((epoch, numbers.tolist()))
            step(model, features, part, optimizer, accelerator.backward)
            if len(part.trained) == cut:
                accelerator.save_state(folder)
                return part
    return part


def place_in(folder: str) -> Any:
    return torch.load(Path(folder) / "megatron_ddp_samplers.bin", weights_only=True)
