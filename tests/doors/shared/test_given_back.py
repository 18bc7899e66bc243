"""An optimizer outlives its fit: the next fit goes on with it, or user code by hand, as under "ddp"."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.comparison import assert_equal

from ..accelerate_loops import Worlds, adamw, inputs, make_accelerator, net_of, sgd
from ..fabric_loops import AwkwardNet, make_fabric, step_with
from ..fits import AwkwardModule, loader, make_strategy, make_trainer
from ..matrix import MODES
from ..rank_processes import Ranks, number_of_ranks

both_modes = pytest.mark.parametrize("options", MODES.values(), ids=MODES)
both_numbers_of_ranks = pytest.mark.parametrize("pool", ["ranks", "one_rank"])


def found(module: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    """Returns copies of the weights, and of the optimizer's state in the order of its parameters."""
    optimizer.state_dict()  # the first use on all ranks gathers the state
    params = [param for group in optimizer.param_groups for param in group["params"]]
    state = [dict(optimizer.state.get(param, {})) for param in params]
    return copy.deepcopy([dict(module.state_dict()), state])


def step_by_hand(module: nn.Module, params: list[nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
    for number, param in enumerate(params):
        param.grad = torch.full_like(param, 0.01 * number)
    optimizer.step()
    optimizer.zero_grad()


# --- Lightning -------------------------------------------------------------------------------------------------------


class KeepsItsOptimizer(AwkwardModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.optimizer = adamw([param for param in self.parameters() if param.requires_grad])

    def configure_optimizers(self) -> Any:
        return self.optimizer


def fit(module: AwkwardModule, name: str, options: dict[str, Any], **trainer_options: Any) -> Any:
    trainer = make_trainer(make_strategy(name, **options), max_epochs=1, **trainer_options)
    trainer.fit(module, loader(number_of_ranks()))
    return trainer


def three_fits(name: str, options: dict[str, Any]) -> list[Any]:
    module = KeepsItsOptimizer()
    for _ in range(3):
        fit(module, name, options)
    return found(module, module.optimizer)


def after_an_error(name: str, options: dict[str, Any]) -> list[Any]:
    """The second fit goes on from the state that the first had when it failed on all ranks."""

    class Fails(KeepsItsOptimizer):
        fails = True

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if batch_idx == 3 and self.fails:
                raise ZeroDivisionError("on purpose")
            return super().training_step(batch, batch_idx)

    module = Fails()
    with pytest.raises(ZeroDivisionError):
        fit(module, name, options)
    module.fails = False
    fit(module, name, options)
    return found(module, module.optimizer)


# --- Fabric ----------------------------------------------------------------------------------------------------------


def set_up_again_and_again(name: str, options: dict[str, Any]) -> list[Any]:
    """One optimizer for three rounds, each with a Fabric of its own; the module is changed in between."""
    net = AwkwardNet()
    own = sgd([param for param in net.parameters() if param.requires_grad])
    for _ in range(3):
        fabric = make_fabric(name, options)
        model, optimizer = fabric.setup(net, own)
        step_with(fabric, model, optimizer)
        del model, optimizer, fabric
        gc.collect()
    step_by_hand(net, [param for param in net.parameters() if param.requires_grad], own)
    return found(net, own)


@pytest.mark.sample(1)
@both_modes
@both_numbers_of_ranks
@pytest.mark.parametrize(
    "job",
    [
        three_fits,
        after_an_error,
        set_up_again_and_again,
    ],
)
def test_an_optimizer_outlives_its_fit_and_its_fabric(
    request: pytest.FixtureRequest, pool: str, job: Callable[..., Any], options: dict[str, Any]
) -> None:
    processes: Ranks = request.getfixturevalue(pool)
    theirs = processes.run(job, "ddp", {})
    for mine, reference in zip(processes.run(job, "megatron_ddp", options), theirs, strict=True):
        assert_equal(mine, reference)


# --- Accelerate ------------------------------------------------------------------------------------------------------


def freed(name: str, plugin: dict[str, Any]) -> list[Any]:
    """Trains twice with one optimizer, and goes on by hand."""
    net = net_of()
    own = adamw(net.parameters())
    for _ in range(2):
        accelerator = make_accelerator(name, plugin)
        model, optimizer = accelerator.prepare(net, own)
        for step in range(3):
            accelerator.backward(model(inputs(accelerator, step)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        model, optimizer = accelerator.free_memory(model, optimizer)
    step_by_hand(net, list(net.parameters()), own)
    return found(net, own)


@both_modes
@pytest.mark.parametrize("size", [1, 2])
def test_an_optimizer_outlives_free_memory(worlds: Worlds, size: int, options: dict[str, Any]) -> None:
    theirs = worlds.run(freed, "ddp", {}, size=size)
    for mine, reference in zip(worlds.run(freed, "megatron_ddp", options, size=size), theirs, strict=True):
        assert_equal(mine, reference)
