"""An optimizer outlives its fit: user code goes on with its own object, by hand or in the next fit, as under "ddp"."""

from __future__ import annotations

import copy
import gc
import io
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


def by_hand_after_a_fit(name: str, options: dict[str, Any]) -> list[Any]:
    module = KeepsItsOptimizer()
    trainer = fit(module, name, options)
    after, saved = found(module, module.optimizer), io.BytesIO()
    if trainer.is_global_zero:  # on one rank only, as scripts save at their end
        torch.save(module.optimizer.state_dict(), saved)
        saved.seek(0)
        assert len(torch.load(saved)["state"]) == len(after[1])
        copy.deepcopy(module).optimizer.state_dict()
    step_by_hand(module, [param for param in module.parameters() if param.requires_grad], module.optimizer)
    trainer.optimizers[0].load_state_dict(trainer.optimizers[0].state_dict())
    return [*after, found(module, module.optimizer)]


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


def the_trainers_after_a_fit(name: str, options: dict[str, Any]) -> list[Any]:
    """User code has no reference of its own, and asks the Trainer, or its scheduler."""
    module = AwkwardModule(optimizer=adamw, scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2))
    trainer = fit(module, name, options)
    optimizer = trainer.lr_scheduler_configs[0].scheduler.optimizer
    step_by_hand(module, [param for param in module.parameters() if param.requires_grad], optimizer)
    trainer.optimizers[0].step()
    return found(module, optimizer)


def state_numel_of_a_fit(keeps: bool) -> int:
    """Returns the number of elements of state that this rank has after a fit."""
    module = KeepsItsOptimizer() if keeps else AwkwardModule(optimizer=adamw)
    trainer = fit(module, "megatron_ddp", {})
    state = trainer.optimizers[0].optimizer.state
    return sum(value.numel() for values in state.values() for value in values.values() if value.dim())


def test_a_fit_whose_optimizer_only_the_trainer_has_gathers_no_state(ranks: Ranks) -> None:
    """A sharded state may not fit on one rank; and the end of a fit is no place to find that out."""
    whole, parts = ranks.run(state_numel_of_a_fit, True), ranks.run(state_numel_of_a_fit, False)
    assert whole[0] == whole[1]
    assert sum(parts) < 1.5 * whole[0]  # frozen and unused ones have none, and elements that align have some


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


def torn_down(name: str, options: dict[str, Any]) -> list[Any]:
    fabric = make_fabric(name, options)
    net = AwkwardNet()
    own = sgd([param for param in net.parameters() if param.requires_grad])
    model, optimizer = fabric.setup(net, own)
    step_with(fabric, model, optimizer)
    fabric.strategy.teardown()
    after = found(net, own)
    step_by_hand(net, [param for param in net.parameters() if param.requires_grad], own)
    return [*after, found(net, own)]


@pytest.mark.sample(1)
@both_modes
@both_numbers_of_ranks
@pytest.mark.parametrize(
    "job",
    [
        three_fits,
        by_hand_after_a_fit,
        after_an_error,
        the_trainers_after_a_fit,
        set_up_again_and_again,
        torn_down,
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


def ended(name: str, plugin: dict[str, Any]) -> list[Any]:
    net = net_of()
    own = adamw(net.parameters())
    accelerator = make_accelerator(name, plugin)
    model, optimizer = accelerator.prepare(net, own)
    for step in range(3):
        accelerator.backward(model(inputs(accelerator, step)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    accelerator.end_training()
    assert not torch.distributed.is_initialized()
    after = copy.deepcopy(own.state_dict()["state"])
    step_by_hand(net, list(net.parameters()), own)
    return [after, found(net, own)]


@pytest.mark.sample(1)
@both_modes
def test_an_optimizer_outlives_end_training(options: dict[str, Any]) -> None:
    """The process group is gone then, so these processes serve no other test."""
    pools = Worlds(), Worlds()
    try:
        theirs, ours = pools[0].run(ended, "ddp", {}), pools[1].run(ended, "megatron_ddp", options)
    finally:
        for pool in pools:
            pool.close()
    assert_equal(ours, theirs)
