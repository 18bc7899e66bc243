"""Modules that do more than hold dense layers: built late, copied, changed in mid-fit, compiled, parametrised."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins import LayerSync
from torch import Tensor, nn
from torch._dynamo.backends.registry import lookup_backend
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from ..fits import NUM_TOKENS, AwkwardModule, Fit, fit, weights_of
from ..matrix import Beyond, Feature

WIDTH = 9

Net = Callable[[Tensor, Tensor], Tensor]


class Classifier(pl.LightningModule):
    """Trains any module that makes logits from features (batch, 5) and tokens (batch,).

    Args:
        build: makes the module.
        optimizer: makes the optimizer from the parameters.
    """

    def __init__(
        self, build: Callable[[], nn.Module], optimizer: Callable[[Any], torch.optim.Optimizer] = torch.optim.AdamW
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = build()
        self.make_optimizer = optimizer
        self.losses: list[float] = []

    def forward(self, features: Tensor, tokens: Tensor) -> Tensor:
        return self.net(features, tokens)

    def loss(self, batch: Any) -> Tensor:
        features, tokens, targets = batch
        return F.cross_entropy(self(features, tokens), targets)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.make_optimizer([param for param in self.parameters() if param.requires_grad])


def trained(
    name: str,
    strategy_options: dict[str, Any],
    *,
    build: Callable[[], nn.Module],
    all_used: bool = False,
    optimizer: Callable[[Any], torch.optim.Optimizer] = torch.optim.AdamW,
    **trainer_options: Any,
) -> Fit:
    """A fit of a Classifier. ``all_used``: "ddp" looks for no unused parameters, which it cannot with re-entrant
    checkpoints."""
    return fitted(name, strategy_options, Classifier(build, optimizer), all_used, **trainer_options)


def fitted(
    name: str, strategy_options: dict[str, Any], module: pl.LightningModule, all_used: bool = False, **options: Any
) -> Fit:
    if name == "ddp" and all_used:
        strategy_options = {"find_unused_parameters": False, **strategy_options}
    before = weights_of(module)
    result = fit(name, strategy_options=strategy_options, module=module, **options)
    moved = [key for key in before if key in result.weights and not torch.equal(before[key], result.weights[key])]
    assert len(moved) >= len(before) // 3 or not before, "hardly anything was trained"
    return result


def wrap_again(trainer: pl.Trainer) -> None:
    """A user of "ddp" would have to do this when the set of trained parameters changes: only test references do."""
    strategy: Any = trainer.strategy
    strategy.model = None  # the wrapper that is there takes its hooks along
    strategy.model = strategy._setup_model(trainer.lightning_module)


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(5, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.out = nn.Linear(WIDTH, NUM_TOKENS)

    def forward(self, features: Tensor, tokens: Tensor) -> Tensor:
        return self.out(self.block(features))


# --- changed modules -------------------------------------------------------------------------------------------------


class BuiltLate(Classifier):
    """Its layers exist from ``configure_model`` on."""

    def __init__(self) -> None:
        super().__init__(nn.Identity)

    def configure_model(self) -> None:
        if isinstance(self.net, nn.Identity):
            torch.manual_seed(0)
            self.net = Plain()


def built_late(name: str, strategy_options: dict[str, Any]) -> Fit:
    result = fitted(name, strategy_options, BuiltLate())
    assert "net.out.weight" in result.weights
    return result


class Lazy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.LazyLinear(WIDTH), nn.Tanh(), nn.LazyLinear(NUM_TOKENS))

    def forward(self, features: Tensor, tokens: Tensor) -> Tensor:
        return self.block(features)


class CopyInBetween(Callback):
    """Copies the module in mid-fit and trains the copy by hand: gradients and weights of the fit must not notice."""

    def __init__(self) -> None:
        self.copies: list[dict[str, Tensor]] = []

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx % 3:
            return
        other: Any = copy.deepcopy(pl_module)
        optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
        features, tokens, targets = batch
        F.cross_entropy(other(features, tokens), targets).backward()
        optimizer.step()
        self.copies.append(weights_of(other))


def copied_during(name: str, strategy_options: dict[str, Any]) -> tuple[Fit, list[dict[str, Tensor]]]:
    copier = CopyInBetween()
    result = fitted(name, strategy_options, AwkwardModule(), callbacks=[copier], accumulate_grad_batches=2)
    assert len(copier.copies) == 2 * 3
    return result, copier.copies


class Repoints(Callback):
    """Gives parameters other memory, the same values on both ranks, in one of the hooks."""

    def __init__(self, hook: str) -> None:
        self.hook = hook

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        self._repoint("batch end", trainer, pl_module)

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._repoint("after backward", trainer, pl_module)

    def _repoint(self, hook: str, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if hook == self.hook and trainer.fit_loop.total_batch_idx % 3 == 0:
            for param in pl_module.parameters():
                param.data = param.data * 0.9


def repointed(name: str, strategy_options: dict[str, Any], *, hook: str) -> Fit:
    return fitted(name, strategy_options, AwkwardModule(), callbacks=[Repoints(hook)])


class Freezes(Callback):
    """Freezes a layer after three batches, and (``thaws``) lets it train again after three more."""

    def __init__(self, thaws: bool) -> None:
        self.thaws = thaws
        self.frozen: list[Tensor] = []

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        step = trainer.global_step
        if step == 3:
            pl_module.out.requires_grad_(False)
        if step == 6 and self.thaws:
            pl_module.out.requires_grad_(True)
        self.frozen.append(pl_module.out.weight.detach().clone())


def freezing(name: str, strategy_options: dict[str, Any], *, thaws: bool) -> tuple[Fit, list[Tensor]]:
    """A parameter that was trainable at the start stops, and perhaps starts again: "ddp" allows for that."""
    callback = Freezes(thaws)
    result = fitted(name, strategy_options, AwkwardModule(), callbacks=[callback])
    seen = callback.frozen
    assert torch.equal(seen[3], seen[5])
    assert torch.equal(seen[5], seen[-1]) != thaws
    return result, seen


class HeadLater(Classifier):
    """One layer gets gradients from the start and joins the optimizer, in a group of its own, in mid-fit."""

    def __init__(self) -> None:
        super().__init__(Plain)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.net.block.parameters(), lr=1e-2)

    def on_train_batch_end(self, *_: Any) -> None:
        if self.trainer.global_step == 4:
            self.trainer.optimizers[0].add_param_group({"params": list(self.net.out.parameters()), "lr": 3e-3})


def joining(name: str, strategy_options: dict[str, Any]) -> Fit:
    module = HeadLater()
    before = module.net.out.weight.detach().clone()
    result = fitted(name, strategy_options, module)
    assert not torch.equal(result.weights["net.out.weight"], before), "the new group was never stepped"
    return result


# --- checkpoints and adapters ----------------------------------------------------------------------------------------


class Checkpointed(nn.Module):
    """Two blocks behind activation checkpoints, a frozen one between them."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs = nn.Linear(5, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3))
        self.blocks[1].requires_grad_(False)
        self.out = nn.Linear(WIDTH, NUM_TOKENS)

    def forward(self, features: Tensor, tokens: Tensor) -> Tensor:
        hidden = self.inputs(features)
        for block in self.blocks:
            hidden = checkpoint(block, hidden, use_reentrant=True)
        return self.out(hidden)


# --- compiled --------------------------------------------------------------------------------------------------------


class Backend:
    """A backend of ``torch.compile`` that counts what it compiles."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.num_graphs = 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.num_graphs += 1
        return lookup_backend(self.name)(graph, inputs)


def compiled(name: str, strategy_options: dict[str, Any], *, whole: bool, backend: str = "aot_eager") -> Fit:
    """Lightning compiles the steps of an optimized module, and allows that for subclasses of its DDPStrategy only."""
    torch._dynamo.reset()
    counting = Backend(backend)
    module = Classifier(Plain)
    target: Any = module
    if whole:
        target = torch.compile(module, backend=counting)
    else:
        module.net.compile(backend=counting)
    # no validation: tracing Lightning's logging would take most of the time
    options = {"max_epochs": 1, "limit_train_batches": 3, "limit_val_batches": 0}
    result = fitted(name, strategy_options, target, **options)
    assert counting.num_graphs > 0
    torch._dynamo.reset()
    return dataclasses.replace(result, weights=weights_of(module), losses=module.losses)


# --- normalisation over the ranks ------------------------------------------------------------------------------------


class AllReduce(torch.autograd.Function):
    """The sum over the ranks, with a gradient: what SyncBatchNorm does, which torch has for accelerators only."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        total = x.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        total = grad.clone()
        dist.all_reduce(total)
        return total


class SyncedBatchNorm(nn.BatchNorm1d):
    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return super().forward(x)
        sums = AllReduce.apply(torch.cat([x.sum(0), x.square().sum(0), x.new_full((1,), len(x))]))
        mean, square = (sums[:-1] / sums[-1]).chunk(2)
        var = square - mean.square()
        with torch.no_grad():
            self.running_mean.lerp_(mean, 0.1)  # type: ignore[union-attr]
            self.running_var.lerp_(var, 0.1)  # type: ignore[union-attr]
        return (x - mean) * torch.rsqrt(var + self.eps) * self.weight + self.bias


class SyncOnCPU(LayerSync):
    """The layer of ``Trainer(sync_batchnorm=True)``, for a CPU."""

    def apply(self, model: nn.Module) -> nn.Module:
        for name, child in model.named_modules():
            if isinstance(child, nn.BatchNorm1d):
                synced = SyncedBatchNorm(child.num_features)
                synced.load_state_dict(child.state_dict())
                model.set_submodule(name, synced)
        return model

    def revert(self, model: nn.Module) -> nn.Module:
        return model


class Normalised(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.block.append(nn.BatchNorm1d(WIDTH))


def synced(name: str, strategy_options: dict[str, Any]) -> Fit:
    module = Classifier(Normalised)
    result = fitted(name, strategy_options, module, plugins=[SyncOnCPU()])
    assert isinstance(module.net.block[-1], SyncedBatchNorm)
    return result


# --- kinds of parameters ---------------------------------------------------------------------------------------------


class WithEmpty(Plain):
    """Parameters without elements, first, last and between, used and unused."""

    def __init__(self) -> None:
        super().__init__()
        self.a_empty = nn.Parameter(torch.zeros(0, 3))
        self.block.insert(1, nn.Linear(WIDTH, 0))
        self.block.insert(2, nn.Linear(0, WIDTH))
        self.z_empty = nn.Parameter(torch.zeros(4, 0))

    def forward(self, features: Tensor, tokens: Tensor) -> Tensor:
        return super().forward(features, tokens) + self.a_empty.sum()


class Sparse(nn.Module):
    """An embedding with sparse gradients, with rows that come twice in a batch, and a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(NUM_TOKENS, WIDTH, sparse=True)
        self.out = nn.Linear(WIDTH, NUM_TOKENS)

    def forward(self, features: Tensor, tokens: Tensor) -> Tensor:
        return self.out(self.embed(torch.stack([tokens, tokens, (tokens + 1) % NUM_TOKENS])).sum(0))


class Recurrent(nn.Module):
    """An LSTM, which keeps a list of its weights, and a transformer layer, which has a fast path in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(1, 8, num_layers=2, batch_first=True)
        self.layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True)
        self.out = nn.Linear(8, NUM_TOKENS)

    def forward(self, features: Tensor, tokens: Tensor) -> Tensor:
        return self.out(self.layer(self.lstm(features[:, :, None])[0]).mean(1))


# --- re-parametrised and hooked --------------------------------------------------------------------------------------


class Parametrised(Plain):
    def __init__(self) -> None:
        super().__init__()
        parametrizations.weight_norm(self.block[0])
        parametrizations.spectral_norm(self.block[2])
        parametrizations.orthogonal(self.out, orthogonal_map="householder")


class Hooked(Classifier):
    """Hooks of every kind: on modules, forward and backward, and on parameters, before and after accumulation."""

    def __init__(self) -> None:
        super().__init__(Plain)
        self.seen: list[str] = []
        block = self.net.block
        block[0].register_forward_pre_hook(lambda module, args: (args[0] * 1.5,))
        block[1].register_forward_hook(lambda module, args, output: output * 0.9)
        block[2].register_full_backward_hook(self._double)
        block[2].weight.register_hook(lambda grad: grad * 0.5)
        self.net.out.weight.register_post_accumulate_grad_hook(self._clamp)

    def _double(self, module: nn.Module, grad_input: Any, grad_output: Any) -> Any:
        self.seen.append("backward")
        return tuple(None if grad is None else grad * 2 for grad in grad_input)

    def _clamp(self, param: Tensor) -> None:
        self.seen.append("accumulated")
        assert param.grad is not None
        param.grad.clamp_(-0.02, 0.02)


def hooked(name: str, strategy_options: dict[str, Any]) -> tuple[Fit, list[str]]:
    module = Hooked()
    result = fitted(name, strategy_options, module)
    assert len(module.seen) == 2 * len(module.losses)
    return result, module.seen


# --- steps -----------------------------------------------------------------------------------------------------------


class Direct(Classifier):
    """Its step calls submodules, a functional call among them, not ``self``; it returns more than the loss."""

    def __init__(self) -> None:
        super().__init__(Plain)
        self.returned: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        features, _, targets = batch
        hidden = self.net.block[:2](features)
        weights = {"weight": self.net.block[2].weight * 0.5, "bias": self.net.block[2].bias}
        hidden = torch.func.functional_call(self.net.block[2], weights, hidden)
        logits = F.linear(hidden, self.net.out.weight, self.net.out.bias)
        loss = F.cross_entropy(logits, targets)
        self.losses.append(loss.item())
        return {"loss": loss, "logits": logits.detach()}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.returned.append({"loss": outputs["loss"], "logits": outputs["logits"]})


def direct(name: str, strategy_options: dict[str, Any]) -> tuple[Fit, list[Any]]:
    module = Direct()
    return fitted(name, strategy_options, module), module.returned


def _with(**options: Any) -> Mapping[str, Any]:
    return options


AREA = "Modules"

sgd = partial(torch.optim.SGD, lr=0.1)

FEATURES = [
    Feature(
        AREA, "torch.compile of the LightningModule", compiled, _with(whole=True), note="with the backend `aot_eager`"
    ),
    Feature(AREA, "torch.compile of a block", compiled, _with(whole=False), note="with the backend `aot_eager`"),
    Feature(AREA, "torch.compile of a block, inductor", compiled, _with(whole=False, backend="inductor")),
    Feature(
        AREA,
        "activation checkpoints, re-entrant, a frozen block",
        trained,
        _with(build=Checkpointed, all_used=True),
        note='under "ddp" with `find_unused_parameters=False` only',
    ),
    Feature(AREA, "sync_batchnorm", synced, note="with a LayerSync for the CPU, which torch's SyncBatchNorm refuses"),
    Feature(AREA, "configure_model", built_late),
    Feature(AREA, "deepcopy during a fit, trained by hand", copied_during, often=True),
    Feature(AREA, "`param.data = x` after a batch", repointed, _with(hook="batch end"), often=True),
    Feature(AREA, "`param.data = x` after backward", repointed, _with(hook="after backward")),
    Feature(AREA, "a layer frozen in mid-fit", freezing, _with(thaws=False)),
    Feature(AREA, "a layer frozen in mid-fit, and trained again", freezing, _with(thaws=True)),
    Feature(AREA, "add_param_group in mid-fit", joining, often=True),
    Feature(AREA, "parameters without elements", trained, _with(build=WithEmpty)),
    Feature(AREA, "sparse embeddings, SGD, few equal ids", trained, _with(build=Sparse, optimizer=sgd)),
    Feature(AREA, "LSTM and transformer layer", trained, _with(build=Recurrent), often=True),
    Feature(AREA, "weight_norm, spectral_norm, orthogonal", trained, _with(build=Parametrised)),
    Feature(AREA, "hooks on modules and parameters", hooked, often=True),
    Feature(AREA, "a step that calls submodules and returns a dictionary", direct),
]

BEYOND = [
    Beyond(
        "parameters or layers replaced in mid-fit (`load_state_dict(assign=True)`): an error names them, not a silent "
        "standstill",
        "lightning/test_changes_in_a_fit.py::test_replaced_parameters_are_refused_by_name",
    ),
]
