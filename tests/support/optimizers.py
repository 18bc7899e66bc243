"""Optimizers that are not element-wise, or keep what shards cannot save, each in the smallest form of its kind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

Closure = Callable[[], float] | None


def evaluated(closure: Closure) -> float | None:
    """The closure's result, as torch's optimizers call it before they look at any gradient."""
    with torch.enable_grad():
        return closure() if closure is not None else None


class Simple(torch.optim.Optimizer):
    """``update`` of each parameter that has a gradient."""

    def __init__(self, params: Any, lr: float = 0.1, **options: Any) -> None:
        super().__init__(params, {"lr": lr, **options})

    @torch.no_grad()
    def step(self, closure: Closure = None) -> float | None:  # type: ignore[override]
        loss = evaluated(closure)
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self.update(param, param.grad, self.state[param], group)
        return loss

    def update(self, param: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        raise NotImplementedError


class AdamByAnotherName(torch.optim.AdamW):
    """No class of torch's own, so that it is tested."""


def stepped(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """The parameters that have a gradient."""
    return (param for group in optimizer.param_groups for param in group["params"] if param.grad is not None)


class Lamb(Simple):
    """Layer-wise: the step is scaled by the norm of the whole parameter."""

    def update(self, param: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        param.sub_(grad / grad.norm(), alpha=group["lr"])


class GloballyNormalised(torch.optim.Optimizer):
    """Element-wise except for one number: the norm over all tensors of the optimizer, which a rank sees a part of."""

    scale = 1.0

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Closure = None) -> None:  # type: ignore[override]
        norm = torch.stack([param.grad.norm() for param in stepped(self) if param.grad is not None]).norm()
        for group in self.param_groups:
            for param in group["params"]:
                param.sub_(param.grad / norm, alpha=self.scale * group["lr"])


class NormalisedGroups(Simple):
    """With momentum, divided by the norm of all gradients of a group that says so: no rank can step a part of it."""

    @torch.no_grad()
    def step(self, closure: Closure = None) -> float | None:  # type: ignore[override]
        loss = evaluated(closure)
        for group in self.param_groups:
            grads = [param.grad for param in group["params"] if param.grad is not None]
            if group["by_norm"] and grads:
                group["norm"] = sum(grad.square().sum() for grad in grads).sqrt().item()  # one by one
        super().step()
        return loss

    def update(self, param: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        state["momentum"] = state.get("momentum", 0) * 0.9 + grad / group.get("norm", 1.0)
        param.sub_(state["momentum"], alpha=group["lr"])


class DistanceInGroup(Simple):
    """Steps as Prodigy and D-Adaptation: moves by 1e-6 at first; an estimate of the distance to go, from all
    parameters, grows in the group."""

    def __init__(self, params: Any, lr: float = 1.0) -> None:
        super().__init__(params, lr, d=1e-6, numerator=0.0)

    @torch.no_grad()
    def step(self, closure: Closure = None) -> None:  # type: ignore[override]
        group, weighted = self.param_groups[0], 0.0
        for param in stepped(self):
            state = self.state[param]
            state.setdefault("start", param.clone())
            state.setdefault("sum", torch.zeros_like(param)).add_(param.grad, alpha=group["d"])
            group["numerator"] += float((param.grad * (state["start"] - param)).sum())
            weighted += float(state["sum"].abs().sum())
        group["d"] = max(group["d"], group["numerator"] / max(weighted, 1e-30))
        for param in stepped(self):
            param.sub_(param.grad.sign(), alpha=group["lr"] * group["d"])


class TinySteps(GloballyNormalised):
    """Normalised over all parameters, a millionth at a time, without state: only a tiny movement shows it."""

    scale = 1e-5  # of a rate of 0.1


class DistanceOverGradients(Simple):
    """Steps as LDoG: by each parameter's largest distance from the start over the root of its squared gradients."""

    def update(self, param: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not state:
            state.update(start=param.clone(), distance=1e-6 * (1 + param.norm()), squares=torch.zeros(()))
        state["distance"] = torch.maximum(state["distance"], (param - state["start"]).norm())
        state["squares"] = state["squares"] + grad.square().sum()
        param.sub_(grad * state["distance"] / state["squares"].sqrt(), alpha=group["lr"])


class Projected(Simple):
    """Steps as SGDP and AdamP: takes the part along the weights out of the step, of matrices and only where gradient
    and weights are nearly orthogonal."""

    def update(self, param: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        step = state.setdefault("momentum", torch.zeros_like(param)).mul_(0.9).add_(grad)
        if param.dim() > 1:
            rows, weights = grad.flatten(1), param.flatten(1)
            cosine = torch.nn.functional.cosine_similarity(rows, weights, dim=1).abs()
            if cosine.max() < 0.1 / weights.shape[1] ** 0.5:
                unit = param / param.norm()
                step = step - unit * (unit * step).sum()
        param.sub_(step, alpha=group["lr"])


class NormHistory(Simple):
    """Steps as AdaNorm: a gradient smaller than the mean of its tensor's norms so far is scaled up to it."""

    def update(self, param: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        norm = grad.norm()
        mean = state.get("mean_norm", torch.zeros(())) * 0.95 + norm * 0.05
        state["mean_norm"] = mean
        param.sub_(grad * (mean / norm if mean > norm else 1.0), alpha=group["lr"])


class CautiousMask(Simple):
    """Steps where momentum and gradient agree, scaled up by how many elements of the tensor do."""

    def update(self, param: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        momentum = state.setdefault("momentum", torch.zeros_like(param)).mul_(0.9).add_(grad)
        mask = (momentum * grad > 0).float()
        param.sub_(momentum * mask / mask.mean(), alpha=group["lr"])


class CentredKernels(Simple):
    """Takes the mean out of the gradients of convolution kernels, and of nothing else."""

    def update(self, param: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if grad.dim() == 4:
            grad = grad - grad.mean(dim=(1, 2, 3), keepdim=True)
        param.sub_(grad, alpha=group["lr"])


class DecaysMatrices(Simple):
    """Decays weights that have rows, and no others."""

    def update(self, param: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if param.dim() > 1:
            param.mul_(1 - 0.1 * group["lr"])
        param.sub_(grad.sign(), alpha=group["lr"])


class DecaysByMean(torch.optim.Optimizer):
    """Steps as AdamS: Adam whose decay is divided by the root mean square of all gradients, which large ones hide."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Closure = None) -> None:  # type: ignore[override]
        grads = torch.cat([param.grad.reshape(-1) for param in stepped(self) if param.grad is not None])
        mean = grads.square().mean().sqrt()
        for group in self.param_groups:
            for param in group["params"]:
                param.mul_(1 - 1e-4 * group["lr"] / mean).sub_(param.grad.sign(), alpha=group["lr"])


class ProjectedGradients(Simple):
    """Steps as SGDP without momentum: cuts the part along the weights out of matrices' nearly orthogonal gradients."""

    def update(self, param: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if param.dim() > 1:
            rows, weights = grad.flatten(1), param.flatten(1)
            cosine = torch.nn.functional.cosine_similarity(rows, weights, dim=1)[:, None]
            if cosine.abs().max() < 0.1 / weights.shape[1] ** 0.5:
                along = cosine * rows.norm(dim=1, keepdim=True) / weights.norm(dim=1, keepdim=True)
                grad = grad - (along * weights).view_as(grad)
        param.sub_(grad, alpha=group["lr"])


class SecondDerivatives(Simple):
    """Steps as AdaHessian: differentiates the gradients once more, of parameters; shards have no graph behind them."""

    @torch.no_grad()
    def step(self, closure: Closure = None) -> None:  # type: ignore[override]
        params = [param for param in stepped(self) if param.requires_grad]
        if params:
            grads = [param.grad for param in params if param.grad is not None]
            with torch.enable_grad():
                for param, found in zip(params, torch.autograd.grad(sum(map(torch.sum, grads)), params), strict=True):
                    self.state[param]["curvature"] = found
        super().step()

    def update(self, param: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        param.sub_(grad / (1 + state.get("curvature", torch.zeros(())).abs()), alpha=group["lr"])


class ScaledByProportions(Simple):
    """A larger step for matrices with more rows than columns."""

    def update(self, param: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        scale = max(1.0, param.shape[0] / param.shape[-1]) ** 0.5 if param.dim() == 2 else 1.0
        param.sub_(grad, alpha=group["lr"] * scale)


class InBlocks(Simple):
    """Steps as 8-bit Adam: from 4,096 elements on the momentum is in 8 bits, with the largest of each block of 256."""

    def update(self, param: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if param.numel() < 4096:
            momentum = state.setdefault("momentum", torch.zeros_like(param)).mul_(0.9).add_(grad)
        else:
            blocks = -(-param.numel() // 256)
            if not state:
                state.update(momentum=torch.zeros_like(param, dtype=torch.int8), largest=torch.zeros(blocks))
            padded = torch.zeros(blocks * 256)
            padded[: param.numel()] = state["momentum"].reshape(-1)
            before = padded.view(-1, 256) * (state["largest"] / 127)[:, None]
            momentum = before.reshape(-1)[: param.numel()].view_as(param) * 0.9 + grad
            padded[: param.numel()] = momentum.reshape(-1)
            state["largest"] = padded.view(-1, 256).abs().amax(1)
            codes = padded.view(-1, 256) / (state["largest"] / 127).clamp(min=1e-30)[:, None]
            state["momentum"] = codes.round().reshape(-1)[: param.numel()].view_as(param).to(torch.int8)
        param.sub_(momentum, alpha=group["lr"])


class KeepsNested(Simple):
    """Element-wise in its steps; keeps a tensor inside a dictionary."""

    def update(self, param: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        inner = state.setdefault("inner", {})
        inner["momentum"] = inner.get("momentum", 0) * 0.9 + grad
        param.sub_(inner["momentum"], alpha=group["lr"])


class KeepsOwn(Simple):
    """Element-wise in its steps; keeps state that belongs to no tensor."""

    def update(self, param: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        self.state["calls"] = self.state.get("calls", 0) + 1  # type: ignore[index, arg-type]
        param.sub_(grad, alpha=group["lr"])


class SavesRenamed(Simple):
    """Element-wise in its steps; saves its state under another name, and finds it again."""

    def update(self, param: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        momentum = state.setdefault("momentum", torch.zeros_like(param)).mul_(0.9).add_(grad)
        param.sub_(momentum, alpha=group["lr"])

    def state_dict(self) -> dict[str, Any]:
        saved = super().state_dict()
        return saved | {"state": {key: {"renamed": value["momentum"]} for key, value in saved["state"].items()}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        state = {key: {"momentum": value["renamed"]} for key, value in state_dict["state"].items()}
        super().load_state_dict(state_dict | {"state": state})


class KeepsLargest(Simple):
    """Element-wise in its steps; an object of its own keeps the largest gradient that it saw."""

    class Watch:
        largest = 0.0

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr)
        self.watch = KeepsLargest.Watch()

    def update(self, param: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        self.watch.largest = max(self.watch.largest, float(grad.abs().max()))
        param.sub_(grad, alpha=group["lr"])


class Patient(Simple):
    """Adds gradients up, and moves, normalised over the tensor, on every eighth call."""

    def update(self, param: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        total = state.setdefault("total", torch.zeros_like(param)).add_(grad)
        state["calls"] = state.get("calls", 0) + 1
        if state["calls"] % 8 == 0:
            param.sub_(total / total.norm(), alpha=group["lr"])


class Averaging(Simple):
    """Steps as Schedule-Free: ``eval()`` moves the weights to an average, ``train()`` moves them back."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr, train_mode=False)

    def update(self, param: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not group["train_mode"]:
            raise RuntimeError("call train() first")
        param.sub_(grad, alpha=group["lr"])
        state["mean"] = state.get("mean", param.clone()).lerp(param, 0.1)

    def _swap(self, train_mode: bool) -> None:
        for group in self.param_groups:
            if group["train_mode"] != train_mode:
                group["train_mode"] = train_mode
                for param in group["params"]:
                    if "mean" in self.state[param]:
                        mean = self.state[param]["mean"]
                        self.state[param]["mean"] = param.detach().clone()
                        param.data.copy_(mean)

    def train(self) -> None:
        self._swap(True)

    def eval(self) -> None:
        self._swap(False)


class LookAhead(torch.optim.Optimizer):
    """Holds the optimizer that steps, and shares its groups."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        super().__init__(base.param_groups, {})
        self.base, self.param_groups = base, base.param_groups

    def step(self, closure: Closure = None) -> None:  # type: ignore[override]
        self.base.step()


class NeedsClosure(Simple):
    """Evaluates the model itself."""

    def step(self, closure: Callable[[], float]) -> float:  # type: ignore[override]
        return closure()


class LambWithMoments(Simple):
    """LAMB (You et al., 2020): Adam's step, scaled by the norm of the parameter over that of the step."""

    def update(self, param: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        first = state.setdefault("exp_avg", torch.zeros_like(param)).lerp_(grad, 0.1)
        second = state.setdefault("exp_avg_sq", torch.zeros_like(param)).lerp_(grad.square(), 0.05)
        count = state.setdefault("step", torch.zeros(())).add_(1)
        step = (first / (1 - 0.9**count)) / ((second / (1 - 0.95**count)).sqrt() + 1e-4)
        step = step + 0.01 * param
        trust = param.norm() / step.norm()
        param.sub_(step * torch.where(torch.isfinite(trust) & (trust > 0), trust, 1.0), alpha=group["lr"])


class Shampoo(Simple):
    """Shampoo (Gupta et al., 2018): a factor for each dimension, in a list; a root of each multiplies the step."""

    def update(self, param: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not state:
            state["factors"] = [torch.eye(size, dtype=param.dtype) * 1e-2 for size in param.shape]
            state["options"] = {"order": param.dim()}
        step = grad
        for dim, factor in enumerate(state["factors"]):
            rows = grad.movedim(dim, 0).reshape(param.shape[dim], -1)
            factor.add_(rows @ rows.T)
            values, vectors = torch.linalg.eigh(factor)
            root = vectors @ torch.diag(values.clamp_min(1e-6) ** (-0.5 / param.dim())) @ vectors.T
            step = (
                (root @ step.movedim(dim, 0).reshape(param.shape[dim], -1))
                .view(step.movedim(dim, 0).shape)
                .movedim(0, dim)
            )
        param.sub_(step, alpha=group["lr"])


class WrapsState(LambWithMoments):
    """Saves its state as bitsandbytes does: wrapped for each parameter, and unwrapped where it is loaded."""

    def state_dict(self) -> dict[str, Any]:
        saved = super().state_dict()
        return {**saved, "state": {number: {"wrapped": values} for number, values in saved["state"].items()}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        state = {number: dict(values["wrapped"]) for number, values in state_dict["state"].items()}
        super().load_state_dict({**state_dict, "state": state})


class Buffered(torch.optim.Optimizer):
    """As SPlus: ``eval()`` puts the weights into the state and others in their place, ``train()`` gives them back."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "train_mode": True})

    @torch.no_grad()
    def eval(self) -> None:
        for group in self.param_groups:
            for param in group["params"] if group["train_mode"] else ():
                self.state[param]["buffer"] = param.clone()
                param.mul_(0.5)
            group["train_mode"] = False

    @torch.no_grad()
    def train(self) -> None:
        for group in self.param_groups:
            for param in [] if group["train_mode"] else group["params"]:
                if "buffer" in self.state[param]:
                    param.copy_(self.state[param].pop("buffer"))
            group["train_mode"] = True

    @torch.no_grad()
    def step(self, closure: Closure = None) -> None:  # type: ignore[override]
        for param in stepped(self):
            assert param.grad is not None
            self.state[param]["last"] = param.grad.clone()
            param.sub_(param.grad, alpha=self.param_groups[0]["lr"])


class MatricesAndRest(torch.optim.Optimizer):
    """Both recipes in one class, as people write it: a group says whether its matrices are normalised by rows."""

    def __init__(self, groups: list[dict[str, Any]], lr: float = 0.01) -> None:
        super().__init__(groups, {"lr": lr, "by_row": False})

    @torch.no_grad()
    def step(self, closure: Closure = None) -> float | None:  # type: ignore[override]
        loss = evaluated(closure)
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                self.state[param].setdefault("step", torch.zeros(())).add_(1)
                momentum = self.state[param].setdefault("momentum", torch.zeros_like(param)).lerp_(param.grad, 0.1)
                if group["by_row"]:
                    param.sub_(momentum / (momentum.norm(dim=-1, keepdim=True) + 1e-2), alpha=group["lr"])
                else:
                    second = self.state[param].setdefault("square", torch.zeros_like(param)).lerp_(param.grad**2, 0.05)
                    param.sub_(momentum / (second.sqrt() + 1e-2), alpha=group["lr"])
        return loss


class CountsCalls(Simple):
    """Normalises by the norm of each parameter, less with each step of the group."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr, calls=0)

    @torch.no_grad()
    def step(self, closure: Closure = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["calls"] += 1
        super().step()

    def update(self, param: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        param.sub_(grad / (grad.norm() + 1e-4), alpha=group["lr"] / group["calls"] ** 0.5)
