"""Errors name the option, the parameter and what to do, and no rank is left waiting for another."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms import Join

from megastrategy import DistributedDataParallel, DistributedOptimizer
from megastrategy._lightning.signature import ALL_REDUCE_OPTION
from megastrategy.core.errors import DirectUseError
from tests.doors.features.manual import Manual
from tests.support.comparison import assert_equal

from ..fabric_loops import make_fabric
from ..fits import AwkwardModule, Fit, fit
from ..rank_processes import Ranks, assert_failed


def fit_of(make_module: Any) -> Fit:
    return fit("megatron_ddp", module=make_module())


class StepsTheInnerOptimizer(Manual):
    """Keeps what it made in ``configure_optimizers``, and steps that: under "ddp" it is what ``optimizers()`` wraps."""

    def configure_optimizers(self) -> Any:
        self.own = super().configure_optimizers()
        return self.own

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        self.own.zero_grad()
        self.manual_backward(self.loss(batch))
        self.own.step()


def test_stepping_the_inner_optimizer_names_the_right_one(ranks: Ranks) -> None:
    for outcome in ranks.outcomes(fit_of, StepsTheInnerOptimizer):
        assert_failed(outcome, "self.optimizers() in a LightningModule", kind="DirectUseError")


def step_the_inner_optimizer() -> None:
    fabric = make_fabric("megatron_ddp")
    net = nn.Linear(3, 2)
    inner = torch.optim.AdamW(net.parameters())
    model, _ = fabric.setup(net, inner)
    fabric.backward(model(torch.ones(1, 3)).sum())
    with pytest.raises(DirectUseError, match=r"what fabric\.setup\(\) .*returned"):
        inner.step()


def test_stepping_the_inner_optimizer_in_fabric_names_what_setup_returned(ranks: Ranks) -> None:
    ranks.run(step_the_inner_optimizer)


def join_in_a_plain_loop() -> None:
    make_fabric("ddp")  # for a process group
    model = DistributedDataParallel(nn.Linear(3, 2))
    optimizer = DistributedOptimizer(torch.optim.AdamW(model.parameters()), model)
    for join in (model.join, lambda: Join([model, optimizer]), lambda: Join([optimizer])):
        with pytest.raises(NotImplementedError, match=r"(?s)belongs to torch DDP.*DistributedSampler.*drop_last=True"):
            join()
    model.close()


def test_join_of_torch_ddp_is_refused_with_the_way_out(ranks: Ranks) -> None:
    ranks.run(join_in_a_plain_loop)


class StrangersParameter(AwkwardModule):
    """Its optimizer has a parameter that it has not, which gets gradients or none."""

    def __init__(self, gets_gradients: bool) -> None:
        super().__init__()
        self.gets_gradients = gets_gradients
        self.stranger = [nn.Parameter(torch.zeros(3, 5))]  # in a list, so that it is not registered

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if not self.gets_gradients:
            return loss
        return loss + ((self.global_rank + 1) * self.stranger[0] - 1).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([*self.parameters(), *self.stranger], lr=0.1)


def fit_stranger(name: str, gets_gradients: bool, **options: Any) -> tuple[Fit, Tensor]:
    module = StrangersParameter(gets_gradients)
    return fit(name, module=module, **options), module.stranger[0].detach()


@pytest.mark.sample(1)
@pytest.mark.parametrize("gets_gradients", [True, False])
@pytest.mark.parametrize("sharded", [True, False])
def test_a_parameter_that_is_not_the_modules_is_stepped_as_under_ddp(
    ranks: Ranks, sharded: bool, gets_gradients: bool
) -> None:
    """Its gradient is not reduced, and a warning says so."""
    options = {"strategy_options": {"use_distributed_optimizer": sharded}}
    ours = ranks.run(fit_stranger, "megatron_ddp", gets_gradients, **options)
    theirs = ranks.run(fit_stranger, "ddp", gets_gradients)
    for (fit_ours, stranger), (fit_theirs, its_stranger) in zip(ours, theirs, strict=True):
        assert_equal(fit_ours.weights, fit_theirs.weights)
        assert torch.equal(stranger, its_stranger)
    assert torch.equal(ours[0][1], ours[1][1]) == (not gets_gradients)
    told = [[text for text in result.warnings if "belong to no wrapped model" in text] for result, _ in ours]
    assert [len(texts) for texts in told] == [int(gets_gradients), 0], "once, on rank 0"
    assert all("parameter 11 of group 0, of shape (3, 5)" in text for text in told[0])


def test_an_unused_parameter_against_a_promise_is_named(ranks: Ranks) -> None:
    """Under ddp that is an error in the next forward, without a name; here it comes at once, on both ranks."""
    for outcome in ranks.outcomes(fit, "megatron_ddp", strategy_options={"find_unused_parameters": False}):
        assert_failed(outcome, "'side.weight'", kind="UnusedParameterError")


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
        for number, copy in enumerate(trainer.optimizers[0].copies):  # type: ignore[attr-defined]
            pl_module.register_buffer(f"average_{number}", copy)


def fit_with_an_optimizer_around(name: str, **options: Any) -> Fit:
    return fit(name, callbacks=[AroundTheTrainers()], strategy_options=options)


def test_an_optimizer_around_the_trainers_is_refused_with_the_way_out(ranks: Ranks) -> None:
    expected = ranks.run(fit_with_an_optimizer_around, "ddp")
    for outcome in ranks.outcomes(fit_with_an_optimizer_around, "megatron_ddp"):
        assert_failed(
            outcome,
            "this Averaging steps a DistributedOptimizer, its attribute 'inner'",
            "assigned to trainer.optimizers: assign none, and average",
            ALL_REDUCE_OPTION,
        )
    actual = ranks.run(fit_with_an_optimizer_around, "megatron_ddp", use_distributed_optimizer=False)
    for mine, theirs in zip(actual, expected, strict=True):
        assert_equal(mine.weights, theirs.weights)
