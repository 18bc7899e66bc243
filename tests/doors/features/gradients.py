"""Clipping, hooks that read and change gradients, and other uses of autograd."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from megastrategy.core.data_path.reduced_grad import ReducedGrad

from ..fits import AwkwardModule, Fit, fit
from ..matrix import Feature
from ..rank_processes import number_of_ranks

CLIP_NORM = 0.5
CLIP_VALUE = 0.02


def sgd(params: Any) -> Optimizer:
    """Not AdamW, which forgets a gradient's length."""
    return torch.optim.SGD(params, lr=0.05, momentum=0.9)


class Clipped(AwkwardModule):
    """``on_train_batch_end`` notes a weight, so that a step of another length shows at once."""

    def __init__(self) -> None:
        super().__init__(optimizer=sgd)
        self.trace: list[float] = []

    def on_train_batch_end(self, *_: Any) -> None:
        self.trace.append(self.scale.item())


class ClipsOddBatches(Clipped):
    """Overrides the hook as Lightning's documentation shows: now and then, through ``self.clip_gradients``."""

    def configure_gradient_clipping(
        self,
        optimizer: Any,
        gradient_clip_val: int | float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        if self.global_step % 2 == 1:
            self.clip_gradients(optimizer, gradient_clip_val=CLIP_VALUE, gradient_clip_algorithm="value")


class ClipsWithTheOptimizer(Clipped):
    """Under "ddp" with torch's function, which reads ``.grad``; under ours with the optimizer's own."""

    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        if hasattr(optimizer, "clip_grad_norm_"):
            optimizer.clip_grad_norm_(CLIP_NORM)
        else:
            torch.nn.utils.clip_grad_norm_(self.parameters(), CLIP_NORM)


class ClipsTheParameters(Clipped):
    """As in plain torch, which reads ``.grad``."""

    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        torch.nn.utils.clip_grad_norm_(self.parameters(), CLIP_NORM)


class ClippedByHand(Clipped):
    """Manual optimization: each of two optimizers clipped with its own value after its own backward."""

    algorithm = "value"
    clip_vals = (CLIP_VALUE, CLIP_VALUE / 4)

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        features, tokens, targets = batch
        for optimizer, clip_val in zip(self.optimizers(), self.clip_vals, strict=True):
            optimizer.zero_grad()
            loss = F.cross_entropy(self(features, tokens), targets)
            self.manual_backward(loss)
            self.clip_gradients(optimizer, gradient_clip_val=clip_val, gradient_clip_algorithm=self.algorithm)
            optimizer.step()
            self.losses.append(loss.item())

    def configure_optimizers(self) -> Any:
        trunk = [*self.inputs.parameters(), *self.norm.parameters()]
        rest = [*self.side.parameters(), *self.out.parameters(), *self.embed.parameters(), self.scale]
        return sgd(trunk), sgd(rest)


class ClippedByHandByNorm(ClippedByHand):
    algorithm = "norm"
    clip_vals = (CLIP_NORM, CLIP_NORM / 4)


def clipped(
    name: str, strategy_options: dict[str, Any], kind: type[Clipped] = Clipped, **options: Any
) -> tuple[Fit, list[float]]:
    """The fit, and a weight after every batch."""
    module = kind()
    result = fit(name, strategy_options=strategy_options, module=module, max_epochs=1, **options)
    return result, module.trace


def by(algorithm: str, **options: Any) -> dict[str, Any]:
    clip_val = CLIP_NORM if algorithm == "norm" else CLIP_VALUE
    return {"gradient_clip_val": clip_val, "gradient_clip_algorithm": algorithm, **options}


NORM = "the norm is summed by shards"


HOOKS = ("on_after_backward", "on_before_optimizer_step", "on_before_zero_grad")


# --- what hooks see --------------------------------------------------------------------------------------------------


class RecordGrads(pl.Callback):
    """Every parameter's gradient, each time one of the hooks runs.

    With reduce-scatter ``.grad`` is None after a synchronised backward, never a part of the truth, and ``full_grad``
    has all of it. Before that, and otherwise, ``.grad`` is what it is under "ddp".
    """

    def __init__(self, hook: str) -> None:
        self.hook = hook
        self.grads: list[dict[str, Tensor | None]] = []
        self.num_hidden = 0

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._record("on_after_backward", trainer, pl_module)

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        self._record("on_before_optimizer_step", trainer, pl_module)

    def on_before_zero_grad(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        self._record("on_before_zero_grad", trainer, pl_module)

    def _record(self, hook: str, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if hook != self.hook:
            return
        full_grad: Any = getattr(trainer.strategy, "full_grad", None)
        grads: dict[str, Tensor | None] = {}
        for name, param in pl_module.named_parameters():
            if isinstance(param.grad, ReducedGrad):
                grads[name] = full_grad(param)
                self.num_hidden += 1
            else:
                grads[name] = None if param.grad is None else param.grad.detach().clone()
        self.grads.append(grads)


def seen(name: str, strategy_options: dict[str, Any], hook: str, **options: Any) -> list[dict[str, Tensor | None]]:
    recorder = RecordGrads(hook)
    fit(name, strategy_options=strategy_options, callbacks=[recorder], **options)
    assert any(grad is not None for grads in recorder.grads for grad in grads.values())
    sharded = strategy_options.get("use_distributed_optimizer", False) and number_of_ranks() > 1
    assert (recorder.num_hidden > 0) == sharded
    return recorder.grads


class LogsNorms(AwkwardModule):
    """As Lightning's documentation does in this hook; with the strategy's function if gradients are shards."""

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        strategy: Any = self.trainer.strategy
        if any(isinstance(param.grad, ReducedGrad) for param in self.parameters()):
            self.log_dict(strategy.grad_norm())
        else:
            self.log_dict(grad_norm(self, 2.0))


# --- what hooks change -----------------------------------------------------------------------------------------------


class DropsGradients(AwkwardModule):
    """Leaves the output layer out of the first steps, as DINO does with its last layer."""

    def on_after_backward(self) -> None:
        if self.global_step < 3:
            for param in self.out.parameters():
                param.grad = None


class WritesGradients(AwkwardModule):
    """Replaces the gradients of two parameters; no rank had used one of them."""

    def on_after_backward(self) -> None:
        strategy: Any = self.trainer.strategy
        grad = strategy.full_grad(self.out.weight) if hasattr(strategy, "full_grad") else self.out.weight.grad
        self.out.weight.grad = -0.5 * grad
        self.side.weight.grad = torch.full_like(self.side.weight, 0.01)


class ScalesLocalGradients(AwkwardModule):
    """Writes into ``.grad`` between the microbatches of a window, where it is there in every mode."""

    def on_after_backward(self) -> None:
        if not self.trainer.fit_loop._should_accumulate():
            return
        for param in self.parameters():
            if param.grad is not None:
                param.grad.mul_(0.5)


class OwnBackward(AwkwardModule):
    """Overrides of how a batch is backed and stepped, as Lightning's documentation writes them."""

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        loss.mul(2.0).backward()

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        if batch_idx % 3 == 2:
            optimizer_closure()  # a batch without a step
        else:
            optimizer.step(closure=optimizer_closure)


class ZeroesInPlace(AwkwardModule):
    """``.grad`` stays a tensor of zeros, so that momentum goes on moving what a batch does not use."""

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Optimizer) -> None:
        optimizer.zero_grad(set_to_none=False)


class ZeroesNothing(AwkwardModule):
    """Gradients of all batches add up under "ddp"."""

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Optimizer) -> None:
        pass


def changed(name: str, strategy_options: dict[str, Any], kind: type[AwkwardModule], **options: Any) -> Fit:
    return fit(name, strategy_options=strategy_options, module=kind(optimizer=sgd), max_epochs=1, **options)


# --- autograd in other ways ------------------------------------------------------------------------------------------


class GradientPenalty(pl.LightningModule):
    """The norm of the loss's gradient by the weights is a part of the loss: backward through a backward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(5, 13), nn.Tanh(), nn.Linear(13, 11))
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        features, _, targets = batch
        loss = F.cross_entropy(self.net(features), targets)
        by_weight = torch.autograd.grad(loss, list(self.net.parameters()), create_graph=True)
        loss = loss + 0.1 * sum(grad.square().sum() for grad in by_weight)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Optimizer:
        return sgd(self.parameters())


def penalised(name: str, strategy_options: dict[str, Any]) -> Fit:
    return fit(name, strategy_options=strategy_options, module=GradientPenalty(), max_epochs=1)


def plain(name: str, strategy_options: dict[str, Any], **options: Any) -> Fit:
    return fit(name, strategy_options=strategy_options, max_epochs=1, **options)


FULL_GRAD = "with reduce-scatter through `strategy.full_grad`; `.grad` is a stand-in"
STRATEGY_NORM = "`lightning.pytorch.utilities.grad_norm`; with reduce-scatter `strategy.grad_norm`"
AREA = "Hooks and gradients"

FEATURES = [
    Feature("Clipping", "by value", clipped, by("value")),
    Feature("Clipping", "by norm", clipped, by("norm"), rtol=1e-6, note=NORM),
    Feature(
        "Clipping",
        "by norm, accumulated",
        clipped,
        by("norm", accumulate_grad_batches=3),
        rtol=1e-6,
        note=NORM,
        often=True,
    ),
    Feature(
        "Clipping",
        "configure_gradient_clipping with self.clip_gradients",
        clipped,
        {"kind": ClipsOddBatches},
    ),
    Feature(
        "Clipping",
        "configure_gradient_clipping with optimizer.clip_grad_norm_",
        clipped,
        {"kind": ClipsWithTheOptimizer},
        rtol=1e-6,
        note='under `"ddp"` with `torch.nn.utils.clip_grad_norm_`; with reduce-scatter that is refused',
        often=True,
    ),
    Feature(
        "Clipping",
        "configure_gradient_clipping with torch.nn.utils.clip_grad_norm_",
        clipped,
        {"kind": ClipsTheParameters},
        refused="self.clip_gradients",
        often=True,
    ),
    Feature("Clipping", "manual, per optimizer, by value", clipped, {"kind": ClippedByHand}),
    Feature(
        "Clipping",
        "manual, per optimizer, by norm",
        clipped,
        {"kind": ClippedByHandByNorm},
        rtol=1e-6,
        note=NORM,
        often=True,
    ),
    *(Feature(AREA, f"gradients in {hook}", seen, {"hook": hook}, note=FULL_GRAD) for hook in HOOKS),
    Feature(
        AREA,
        "gradients in on_after_backward, accumulated",
        seen,
        {"hook": "on_after_backward", "accumulate_grad_batches": 3},
        note="local and in `.grad` until the last microbatch; " + FULL_GRAD,
    ),
    Feature(AREA, "gradient norms logged", changed, {"kind": LogsNorms}, rtol=1e-6, note=STRATEGY_NORM, often=True),
    Feature(AREA, ".grad = None in on_after_backward", changed, {"kind": DropsGradients}, often=True),
    Feature(AREA, ".grad = tensor in on_after_backward", changed, {"kind": WritesGradients}, often=True),
    Feature(
        AREA,
        ".grad changed in place between microbatches",
        changed,
        {"kind": ScalesLocalGradients, "accumulate_grad_batches": 3},
    ),
    Feature(AREA, "backward and optimizer_step overridden", changed, {"kind": OwnBackward}),
    Feature(AREA, "optimizer.zero_grad(set_to_none=False)", changed, {"kind": ZeroesInPlace}),
    Feature(
        AREA,
        "optimizer_zero_grad overridden to do nothing",
        changed,
        {"kind": ZeroesNothing},
        rtol=1e-4,
        note="gradients of the whole epoch add up, and with them the rounding of several synchronised backwards",
    ),
    Feature(AREA, "Trainer(detect_anomaly=True)", plain, {"detect_anomaly": True}),
    Feature(AREA, "gradient penalty by the weights", penalised),
]
