"""Fits with a CommunicationMonitor, and what it logged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn
from torch.nn import functional as F

from megastrategy import CommunicationMonitor

from ..support.engines import engines
from .fits import fit
from .rank_processes import SIZE

MODES = engines("reduce-scatter", "all-reduce", "flattened")
ALIGNMENT = 128
"""A bucket's elements are rounded up to a multiple of it, with two ranks."""
Lines = list[tuple[int | None, dict[str, float]]]


class Net(pl.LightningModule):
    """With ``bucket_size=1`` each of its tensors is a bucket, of sizes known without asking the engine."""

    def __init__(self, hidden: int = 128, bias: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inputs = nn.Linear(5, hidden, bias=bias)
        self.outputs = nn.Linear(hidden, 11, bias=bias)

    def loss(self, batch: Any) -> Tensor:
        features, _, targets = batch
        return F.cross_entropy(self.outputs(torch.tanh(self.inputs(features.to(self.dtype)))).float(), targets)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        loss = self.loss(batch)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def padded_numel(*numels: int) -> int:
    return sum(-(-numel // ALIGNMENT) * ALIGNMENT for numel in numels)


NET_NUMEL = padded_numel(5 * 128, 128 * 11)
assert NET_NUMEL == 5 * 128 + 128 * 11, "no padding"
SENT_BYTES = 8 * NET_NUMEL * (SIZE - 1) / SIZE
"""A step of Net in fp32, reduce-scattered and gathered, or all-reduced."""


def monitored(
    module: Callable[[], pl.LightningModule] = Net, strategy_options: dict[str, Any] | None = None, **options: Any
) -> Lines:
    """The monitor's logged values on this rank, without their prefix."""
    result = fit(
        "megatron_ddp",
        strategy_options={"bucket_size": 1, **(strategy_options or {})},
        module=module(),
        callbacks=[CommunicationMonitor(), *options.pop("callbacks", [])],
        **options,
    )
    return lines_of(result.logged)


def lines_of(logged: Lines) -> Lines:
    prefix = "communication/"
    return [
        (step, {key.removeprefix(prefix): value for key, value in values.items()})
        for step, values in logged
        if any(key.startswith(prefix) for key in values)
    ]


def column(lines: Lines, name: str) -> list[float]:
    return [values[name] for _, values in lines]


def steps_of(lines: Lines) -> list[int | None]:
    return [step for step, _ in lines]


class Overflows(Net):
    """The gradient of one element is infinite on rank 1 in the fourth batch of the first epoch."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        loss = super().training_step(batch, batch_idx)
        if self.trainer.global_rank == 1 and batch_idx == 3 and self.current_epoch == 0:
            loss = loss + torch.tensor(float("inf")) * self.outputs.weight[0, 0]
        return loss


def half_precision(**options: Any) -> MixedPrecision:
    """On CPU Lightning makes bf16 of "16-mixed" unless it is given a plugin with a scaler."""
    return MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", **{"init_scale": 1024.0, **options}))


class WholeNorm(pl.Callback):
    """Logs the norm as ``CommunicationMonitor`` does, from the whole tensors of torch DDP."""

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: Any, optimizer: torch.optim.Optimizer) -> None:
        grads = [param.grad.flatten() for param in pl_module.parameters()]
        pl_module.log("communication/grad_norm", float(torch.cat(grads).norm()))


def norms_logged(strategy: str, callback: pl.Callback, **options: Any) -> Lines:
    result = fit(strategy, module=Net(), callbacks=[callback], gradient_clip_val=0.05, **options)
    return [(step, values) for step, values in lines_of(result.logged) if "grad_norm" in values]


def norms_of_both(**options: Any) -> tuple[Lines, Lines]:
    return norms_logged("megatron_ddp", CommunicationMonitor(), **options), norms_logged("ddp", WholeNorm(), **options)
