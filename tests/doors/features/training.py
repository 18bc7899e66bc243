"""Plain fits: accumulation, validation between, every stage; optimizers that are replaced, or outlive their fit."""

from __future__ import annotations

import copy
import gc
import os
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from ..fabric_loops import AwkwardNet, adamw, make_fabric, sgd, step_with
from ..fits import AwkwardModule, Fit, fit, loader, make_strategy, make_trainer, weights_of
from ..matrix import Feature
from ..rank_processes import number_of_ranks


def plain(name: str, strategy_options: dict[str, Any], **trainer_options: Any) -> Fit:
    result = fit(name, strategy_options=strategy_options, **trainer_options)
    assert len(result.losses) == 14
    return result


def every_stage(name: str, strategy_options: dict[str, Any]) -> list[Any]:
    """Every stage with one Trainer, validation before the fit included, and fits of one module after each other."""
    module, data = AwkwardModule(), loader(number_of_ranks())
    trainer, again = (make_trainer(make_strategy(name, **strategy_options), max_epochs=1) for _ in range(2))
    metrics = [*trainer.validate(module, data, verbose=False)]
    trainer.fit(module, data, data)
    weights = [weights_of(module)]
    metrics += trainer.validate(module, data, verbose=False)
    metrics += trainer.test(module, data, verbose=False)
    again.fit(module, data, data)
    weights.append(weights_of(module))
    assert not torch.equal(*(each["out.weight"] for each in weights)), "the second fit trained nothing"
    predictions = again.predict(module, data)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, data)  # the first Trainer again: its strategy is set up a second time
    return [metrics, [*weights, weights_of(module)], predictions]


# --- optimizers that are not those of configure_optimizers -----------------------------------------------------------


class StartsAnew(pl.Callback):
    """Replaces the optimizer in mid-training."""

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.current_epoch == 1:
            trainer.optimizers = [torch.optim.SGD(pl_module.parameters(), lr=0.1, momentum=0.9)]


class Averaging(torch.optim.Optimizer):
    """Around another optimizer, whose attributes it shows, as NeMo's averages of weights."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.copies = inner, [param.detach().clone() for param in inner.param_groups[0]["params"]]

    def __getattr__(self, name: str) -> Any:
        if name == "inner":
            raise AttributeError(name)
        return getattr(self.inner, name)

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        result = self.inner.step(closure)
        torch._foreach_lerp_(self.copies, [param.detach() for param in self.inner.param_groups[0]["params"]], 0.1)
        return result


class AroundTheTrainers(pl.Callback):
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        trainer.optimizers = [Averaging(optimizer) for optimizer in trainer.optimizers]

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        for number, average in enumerate(trainer.optimizers[0].copies):  # type: ignore[attr-defined]
            pl_module.register_buffer(f"average_{number}", average)


def replaced(name: str, strategy_options: dict[str, Any], *, callback: type[pl.Callback]) -> Fit:
    return fit(name, strategy_options=strategy_options, callbacks=[callback()])


class StrangersParameter(AwkwardModule):
    """Its optimizer has a parameter that it has not, which gets gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.stranger = [nn.Parameter(torch.zeros(3, 5))]  # in a list, so that it is not registered

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss + ((self.global_rank + 1) * self.stranger[0] - 1).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([*self.parameters(), *self.stranger], lr=0.1)


def with_stranger(name: str, strategy_options: dict[str, Any]) -> tuple[Fit, Tensor]:
    module = StrangersParameter()
    result = fit(name, strategy_options=strategy_options, module=module)
    told = [text for text in result.warnings if "belong to no wrapped model" in text]
    once = name == "megatron_ddp" and number_of_ranks() > 1 and os.environ["LOCAL_RANK"] == "0"
    assert len(told) == int(once)
    assert all("parameter 11 of group 0, of shape (3, 5)" in text for text in told)
    return result, module.stranger[0].detach()


# --- after a fit -----------------------------------------------------------------------------------------------------


def weights_and_state(module: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    """Returns copies of the weights, and of the optimizer's state in the order of its parameters."""
    optimizer.state_dict()  # the first use on all ranks gathers the state
    params = [param for group in optimizer.param_groups for param in group["params"]]
    state = [dict(optimizer.state.get(param, {})) for param in params]
    return copy.deepcopy([dict(module.state_dict()), state])


def step_by_hand(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for number, param in enumerate(param for param in module.parameters() if param.requires_grad):
        param.grad = torch.full_like(param, 0.01 * number)
    optimizer.step()
    optimizer.zero_grad()


class KeepsItsOptimizer(AwkwardModule):
    """Raises in batch 3 of a fit if ``fails`` is set, and keeps its optimizer for the next fit."""

    def __init__(self, fails: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.fails = fails
        self.optimizer = adamw([param for param in self.parameters() if param.requires_grad])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == 3 and self.fails:
            raise ZeroDivisionError("on purpose")
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        return self.optimizer


def three_fits(name: str, strategy_options: dict[str, Any], *, fails: bool) -> list[Any]:
    """The second fit goes on from the state that the first had, also when that failed on all ranks."""
    module = KeepsItsOptimizer(fails)
    for _ in range(3):
        trainer = make_trainer(make_strategy(name, **strategy_options), max_epochs=1)
        if module.fails:
            with pytest.raises(ZeroDivisionError):
                trainer.fit(module, loader(number_of_ranks()))
            module.fails = False
        else:
            trainer.fit(module, loader(number_of_ranks()))
    return weights_and_state(module, module.optimizer)


def set_up_again_and_again(name: str, strategy_options: dict[str, Any]) -> list[Any]:
    """One optimizer for three rounds, each with a Fabric of its own, and then for a step by hand."""
    net = AwkwardNet()
    inner = sgd([param for param in net.parameters() if param.requires_grad])
    for _ in range(3):
        fabric = make_fabric(name, strategy_options)
        model, optimizer = fabric.setup(net, inner)
        step_with(fabric, model, optimizer)
        del model, optimizer, fabric
        gc.collect()
    step_by_hand(net, inner)
    return weights_and_state(net, inner)


FEATURES = [
    Feature("Training", "fit with validation", plain, often=True),
    Feature(
        "Training", "accumulate_grad_batches, short last window", plain, {"accumulate_grad_batches": 3}, often=True
    ),
    Feature("Training", "validate, test and predict around several fits of a module", every_stage, often=True),
    Feature("Training", "`trainer.optimizers = [...]` after an epoch", replaced, {"callback": StartsAnew}, often=True),
    Feature(
        "Training",
        "`trainer.optimizers = [...]`, an optimizer around the Trainer's",
        replaced,
        {"callback": AroundTheTrainers},
        refused="assigned to trainer.optimizers: assign none, and average",
    ),
    Feature(
        "Training",
        "a parameter of the optimizer that is not the module's",
        with_stranger,
        note="its gradient is not reduced; here a warning says so",
        often=True,
    ),
    Feature("After a fit", "an optimizer for three fits", three_fits, {"fails": False}),
    Feature("After a fit", "the same when the first fit has failed", three_fits, {"fails": True}, often=True),
    Feature("After a fit", "an optimizer for three Fabrics, and by hand", set_up_again_and_again, often=True),
]
