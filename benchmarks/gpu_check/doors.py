"""Small fits under Lightning, Fabric and Accelerate, on a rank with a process group or on one where they make theirs.
Imported only by ranks of section O, since each of the three may be missing."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from .models import make_model
from .ranks import Rank

BATCHES, BATCH = 4, 4
WIDTH = 13

Fit = Callable[[Rank, str, str, int | None], tuple[dict[str, Tensor], bool]]
"""Takes the rank, the strategy ("ddp" or "megatron_ddp"), the precision, and which rank raises in the third batch.
Returns the weights, and whether all losses were finite."""


def settle_in(rank: Rank) -> None:
    """Frameworks take this process for one that torchrun started. Where ranks share a device each is a node of its
    own, since frameworks count devices by node."""
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    on_host = rank.device.type == "cpu"
    if on_host:
        os.environ["ACCELERATE_USE_CPU"] = "true"
    if not dist.is_initialized():
        return  # with variables of its place, as torchrun sets them
    local, of = (rank.number, rank.size) if on_host else (0, 1)
    os.environ.update(
        {"TORCHELASTIC_RUN_ID": "gpu-check", "GROUP_RANK": "0" if on_host else str(rank.number)}
        | {
            "RANK": str(rank.number),
            "WORLD_SIZE": str(rank.size),
            "LOCAL_RANK": str(local),
            "LOCAL_WORLD_SIZE": str(of),
        }
        | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}  # asked for, and not used: there is a group
    )


def describe_group() -> str:
    """The backend of the process group that a framework has made, and the device that it is bound to."""
    if not dist.is_initialized():
        return "no group"
    bound = dist.distributed_c10d._get_default_group().bound_device_id
    return f"{dist.get_backend()}, {'bound to no device' if bound is None else f'bound to {bound}'}"


def machine(rank: Rank) -> dict[str, Any]:
    """The arguments of a Trainer and of Fabric that say where it runs."""
    if rank.device.type == "cpu" or (rank.way == "backend" and not dist.is_initialized()):
        accelerator = "cpu" if rank.device.type == "cpu" else "gpu"
        return {"accelerator": accelerator, "devices": rank.size, "num_nodes": 1}
    return {"accelerator": "gpu", "devices": [rank.device.index], "num_nodes": rank.size}


def data(rank: Rank) -> DataLoader[Any]:
    """All ranks' batches; frameworks give each rank its part."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(BATCHES * BATCH * rank.size, WIDTH, generator=generator)
    return DataLoader(TensorDataset(x), batch_size=BATCH)


def _weights(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().float().cpu().clone() for name, value in module.state_dict().items()}


def _loss(module: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = module(x.to(next(module.parameters()).dtype), 0, 0)
    return loss


class GivesUpError(RuntimeError):
    """Raised on one rank, on purpose."""


def _maybe_give_up(rank: Rank, raises_on: int | None, batch: int) -> None:
    if raises_on == rank.number and batch == 2:
        raise GivesUpError(f"rank {rank.number} gives up on purpose")


def fit_lightning(
    rank: Rank, strategy: str, precision: str, raises_on: int | None = None
) -> tuple[dict[str, Tensor], bool]:
    """A Trainer's fit."""
    import lightning.pytorch as pl

    finite = True

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = make_model("chain")

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            nonlocal finite
            _maybe_give_up(rank, raises_on, batch_idx)
            loss = _loss(self.model, batch[0])
            finite &= bool(torch.isfinite(loss))
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)

    module = Module()
    trainer = pl.Trainer(
        strategy=strategy,
        precision=precision,  # type: ignore[arg-type]
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **machine(rank),
    )
    trainer.fit(module, data(rank))
    return _weights(module.model), finite


def fit_fabric(
    rank: Rank, strategy: str, precision: str, raises_on: int | None = None
) -> tuple[dict[str, Tensor], bool]:
    """A loop over Fabric."""
    from lightning.fabric import Fabric

    fabric = Fabric(strategy=strategy, precision=precision, **machine(rank))  # type: ignore[arg-type]
    fabric.launch()
    inner = make_model("chain")
    model, optimizer = fabric.setup(inner, torch.optim.SGD(inner.parameters(), lr=0.05, momentum=0.9))
    loader, finite = fabric.setup_dataloaders(data(rank)), True
    for number, (x,) in enumerate(loader):
        _maybe_give_up(rank, raises_on, number)
        loss = model(x, 0, 0)
        finite &= bool(torch.isfinite(loss))
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    return _weights(inner), finite


def fit_accelerate(
    rank: Rank, strategy: str, precision: str, raises_on: int | None = None
) -> tuple[dict[str, Tensor], bool]:
    """A loop over an Accelerator."""
    import accelerate
    from accelerate.state import AcceleratorState, GradientState, PartialState

    from megastrategy.accelerate import Accelerator

    for state in (AcceleratorState, PartialState, GradientState):
        state._shared_state.clear()  # as in a process of its own
    if rank.device.type != "cpu":
        os.environ["LOCAL_RANK"] = str(rank.device.index)  # which it takes for the number of the device
    kind = accelerate.Accelerator if strategy == "ddp" else Accelerator
    mixed = {"32-true": "no", "bf16-mixed": "bf16", "16-mixed": "fp16"}[precision]
    accelerator = kind(mixed_precision=mixed)
    inner = make_model("chain")
    model, optimizer, loader = accelerator.prepare(
        inner, torch.optim.SGD(inner.parameters(), lr=0.05, momentum=0.9), data(rank)
    )
    finite = True
    for number, (x,) in enumerate(loader):
        _maybe_give_up(rank, raises_on, number)
        loss = model(x, 0, 0)
        finite &= bool(torch.isfinite(loss))
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    return _weights(accelerator.unwrap_model(model)), finite


FITS: dict[str, Fit] = {"lightning": fit_lightning, "fabric": fit_fabric, "accelerate": fit_accelerate}
