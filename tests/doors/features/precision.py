"""Every precision, with and without a loss scale, and users' plugins."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from ..fits import AwkwardModule, Fit, fit
from ..matrix import Beyond, Feature


def fit_once(name: str, strategy_options: dict[str, Any], **options: Any) -> Fit:
    return fit(name, strategy_options=strategy_options, max_epochs=1, **options)


# --- 16-mixed --------------------------------------------------------------------------------------------------------


def half_precision(**options: Any) -> MixedPrecision:
    """On CPU Lightning makes bf16 of "16-mixed" unless it is given a plugin with a scaler."""
    return MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", **{"init_scale": 1024.0, **options}))


class RecordScales(pl.Callback):
    """The loss scale after every batch, and whether the batch moved any weight."""

    def __init__(self) -> None:
        self.scales: list[float] = []
        self.moved: list[bool] = []
        self._before: list[Tensor] = []

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        self._before = [param.detach().clone() for param in pl_module.parameters()]

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        plugin = trainer.precision_plugin
        assert isinstance(plugin, MixedPrecision)
        assert plugin.scaler is not None
        self.scales.append(plugin.scaler.get_scale())
        self.moved.append(any(not torch.equal(a, b) for a, b in zip(self._before, pl_module.parameters(), strict=True)))


class Overflows(AwkwardModule):
    """The gradient of one element is infinite on the last rank in the fourth batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if self.trainer.global_rank == self.trainer.world_size - 1 and batch_idx == 3 and self.current_epoch == 0:
            loss = loss + torch.tensor(float("inf")) * self.out.bias[3]
        return loss


@dataclasses.dataclass
class Scaled:
    """A fit with a loss scale: the scale after every batch, whether its step was taken, and the scaler's last state."""

    fit: Fit
    scales: list[float]
    moved: list[bool]
    state: dict[str, Any]


def scaled(
    name: str, strategy_options: dict[str, Any], kind: type[AwkwardModule] = AwkwardModule, **options: Any
) -> Scaled:
    recorder, plugin = RecordScales(), half_precision(growth_interval=5)
    result = fit(
        name, strategy_options=strategy_options, module=kind(), plugins=[plugin], callbacks=[recorder], **options
    )
    if kind is Overflows:  # halved by the fourth batch; doubled after each five good ones from there
        assert recorder.scales == [1024.0] * 3 + [512.0] * 5 + [1024.0] * 5 + [2048.0]
        assert recorder.moved == [True] * 3 + [False] + [True] * 10
    return Scaled(result, recorder.scales, recorder.moved, plugin.state_dict())


class TwoScaled(AwkwardModule):
    """Two optimizers by hand, one loss scale: the first one's step is skipped in one batch, the second one's is not."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        features, tokens, targets = batch
        is_fourth = batch_idx == 3 and self.current_epoch == 0
        overflows = is_fourth and self.trainer.global_rank == self.trainer.world_size - 1
        before = self.scale.detach().clone(), self.inputs.weight.detach().clone()
        for number, optimizer in enumerate(self.optimizers()):
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            loss = F.cross_entropy(self(features, tokens), targets)
            self.manual_backward(loss * (float("inf") if number == 0 and overflows else 1.0))
            optimizer.step()
            self.untoggle_optimizer(optimizer)
        assert torch.equal(before[1], self.inputs.weight) == is_fourth
        assert not torch.equal(before[0], self.scale)

    def configure_optimizers(self) -> Any:
        trunk = [*self.inputs.parameters(), *self.norm.parameters()]
        rest = [*self.side.parameters(), *self.out.parameters(), *self.embed.parameters(), self.scale]
        return torch.optim.SGD(trunk, lr=0.01), torch.optim.SGD(rest, lr=0.01)


# --- 16-bit weights --------------------------------------------------------------------------------------------------


class MainParamAdamW(Optimizer):
    """AdamW over fp32 copies of 16-bit parameters, by hand: what a careful user writes under ``"ddp"``."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, options)
        self.pairs = [
            (param, nn.Parameter(param.detach().float())) for group in self.param_groups for param in group["params"]
        ]
        self.in_fp32 = torch.optim.AdamW([main for _, main in self.pairs], **options)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        for param, main in self.pairs:
            main.grad = None if param.grad is None else param.grad.float()
        self.in_fp32.step()
        for param, main in self.pairs:
            param.copy_(main)
        return result


SMALL_STEPS = {"lr": 5e-4, "weight_decay": 0.1}


def sixteen_bit(name: str, strategy_options: dict[str, Any], **options: Any) -> Fit:
    """``"ddp"`` reduces 16-bit gradients in 16 bit, which is asked for here too, and gets main params by hand."""
    kind = MainParamAdamW if name == "ddp" else torch.optim.AdamW
    module = AwkwardModule(optimizer=lambda params: kind(params, **SMALL_STEPS))
    reduced = {} if name == "ddp" else {"grad_reduce_in_fp32": False}
    return fit(name, strategy_options={**strategy_options, **reduced}, module=module, **options)


# --- plugins of users ------------------------------------------------------------------------------------------------


class Linear8(nn.Linear):
    """Represents a layer that computes in a narrow type: here it rounds its input to 8 bits of mantissa and back."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x.bfloat16().to(self.weight.dtype), self.weight, self.bias)


class EngineLikePrecision(Precision):
    """The overrides of transformer-engine's plugin, without its kernels: layers replaced, weights cast, contexts."""

    precision = "transformer-engine"  # type: ignore[assignment]

    def __init__(self, weights_dtype: torch.dtype) -> None:
        self.weights_dtype = weights_dtype
        self.calls: list[str] = []

    def convert_module(self, module: nn.Module) -> nn.Module:
        self.calls.append("convert_module")
        for child_name, child in list(module.named_children()):
            if type(child) is nn.Linear:
                replaced = Linear8(child.in_features, child.out_features, bias=child.bias is not None)
                replaced.load_state_dict(child.state_dict())
                replaced.requires_grad_(child.weight.requires_grad)
                if child_name == "head":
                    replaced.weight = child.weight  # tied to the embedding
                setattr(module, child_name, replaced)
        return module.to(dtype=self.weights_dtype)

    @contextlib.contextmanager
    def forward_context(self) -> Iterator[None]:  # type: ignore[override]
        self.calls.append("forward_context")
        before = torch.get_default_dtype()
        torch.set_default_dtype(self.weights_dtype)
        try:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                yield
        finally:
            torch.set_default_dtype(before)

    def convert_input(self, data: Any) -> Any:
        self.calls.append("convert_input")
        return [value.to(self.weights_dtype) if value.is_floating_point() else value for value in data]


class CountingPrecision(EngineLikePrecision):
    """Overrides everything around a step, and leaves the work to ``super()``."""

    def optimizer_step(self, optimizer: Any, model: Any, closure: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        self.calls.append("optimizer_step")
        return super().optimizer_step(optimizer, model, closure, **kwargs)

    def clip_gradients(self, *args: Any, **kwargs: Any) -> None:
        self.calls.append("clip_gradients")
        super().clip_gradients(*args, **kwargs)

    def clip_grad_by_norm(self, optimizer: Any, clip_val: float) -> None:
        self.calls.append("clip_grad_by_norm")
        super().clip_grad_by_norm(optimizer, clip_val / 2)


def own_plugin(name: str, strategy_options: dict[str, Any], **options: Any) -> tuple[Fit, list[str]]:
    """The fit, and which of the plugin's methods were called, in order."""
    plugin = CountingPrecision(torch.float32)
    module = AwkwardModule(optimizer=lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9))
    result = fit_once(name, strategy_options, module=module, plugins=[plugin], **options)
    return result, plugin.calls


NORM = {"gradient_clip_val": 0.5, "gradient_clip_algorithm": "norm"}
VALUE = {"gradient_clip_val": 0.02, "gradient_clip_algorithm": "value"}
BY_HAND = '`"ddp"` with fp32 main params written by hand; `grad_reduce_in_fp32=False` here, as under `"ddp"`'
OWN = "a user's `Precision`"

FEATURES = [
    Feature("Precision", "64-true", fit_once, {"precision": "64-true"}),
    Feature("Precision", "bf16-mixed", fit_once, {"precision": "bf16-mixed", "accumulate_grad_batches": 3}, often=True),
    Feature("Precision", "bf16-true", sixteen_bit, {"precision": "bf16-true"}, note=BY_HAND, often=True),
    Feature("Precision", "16-true", sixteen_bit, {"precision": "16-true", "max_epochs": 1}, note=BY_HAND),
    Feature("Precision", "16-mixed, loss scale growing", scaled, {}),
    Feature("Precision", "16-mixed, inf on one rank only", scaled, {"kind": Overflows}, often=True),
    Feature("Precision", "16-mixed, inf on one rank only, clipped by value", scaled, {"kind": Overflows, **VALUE}),
    Feature("Precision", "16-mixed, inf for one of two optimizers", scaled, {"kind": TwoScaled}, often=True),
    Feature("Precision", "16-mixed, accumulate_grad_batches", scaled, {"accumulate_grad_batches": 3}),
    Feature(
        "Precision",
        "replaced layers, contexts, converted input, overridden step and clipping",
        own_plugin,
        NORM,
        rtol=1e-6,
        note=f"{OWN} with the methods of transformer-engine's; its `super()` reaches the engine's clipping",
    ),
]

BEYOND = [
    Beyond(
        "bf16-true still learns if updates are smaller than a weight's last bit: fp32 main params",
        "lightning/test_lightning_teardown.py::test_16_bit_weights_equal_one_process",
    ),
]
