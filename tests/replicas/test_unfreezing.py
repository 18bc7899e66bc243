"""Layers that are unfrozen, and groups that are added to an optimizer, before a replica comes back."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import BaseFinetuning
from torch import Tensor, nn

from megastrategy import DistributedDataParallel, DistributedOptimizer
from megastrategy.core import Collectives, Replicas
from megastrategy.errors import LayoutMismatchError
from tests.support.replica_loops import replicas_at
from tests.support.replica_processes import Kill, Place, logged_steps, run_with_kills
from tests.support.replica_trainer import Fit, Module
from tests.support.replicas import (
    PATIENCE_S,
    Case,
    Hook,
    HookedLink,
    assert_equal,
    loss_of,
    mean_grads,
    members_by_step,
    outcome_of,
    results,
    run_replicas,
)

UNFREEZES_IN = 1


def optimizer_of(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.05, momentum=0.9)


def schedule_of(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.9)


def add_backbone(optimizer: torch.optim.Optimizer, backbone: nn.Module) -> None:
    backbone.requires_grad_(True)
    optimizer.add_param_group({"params": list(backbone.parameters()), "lr": 0.01})


def replay_of(case: Case, steps: Mapping[tuple[int, int], Sequence[int]]) -> tuple[list[Tensor], list[float]]:
    """Weights and learning rates after a training in one process, with the same replicas in each step."""
    module = case.module()
    assert isinstance(module, nn.Sequential)
    module[0].requires_grad_(False)
    optimizer = optimizer_of(module)
    schedule = schedule_of(optimizer)
    for (epoch, number), members in sorted(steps.items()):
        if (epoch, number) == (UNFREEZES_IN, 0):
            add_backbone(optimizer, module[0])
        trained = [param for param in module.parameters() if param.requires_grad]

        def losses_of(slot: int, rank: int, place: tuple[int, int] = (epoch, number)) -> list[Tensor]:
            return [loss_of(module(case.batch(*place, slot, rank)))]

        for param, grad in zip(trained, mean_grads(trained, members, case.ranks, losses_of), strict=True):
            param.grad = grad
        optimizer.step()
        schedule.step()
    return [param.detach() for param in module.parameters()], [group["lr"] for group in optimizer.param_groups]


def loop_of(place: Place, hook: Hook) -> Any:
    """A plain loop, in which a process that comes back knows nothing of what the others have unfrozen."""
    case = place.case
    module = case.module()
    assert isinstance(module, nn.Sequential)
    module[0].requires_grad_(False)
    replicas = replicas_at(place, hook)
    model = DistributedDataParallel(module, case.config(), replicas=replicas)
    optimizer = DistributedOptimizer(optimizer_of(module), model)
    schedule = schedule_of(optimizer)
    replicas.register("schedule", schedule.state_dict, schedule.load_state_dict)
    steps = []
    with place.log() as log:
        for epoch in replicas.epochs(case.num_epochs):
            if epoch == UNFREEZES_IN and not module[0].weight.requires_grad:
                add_backbone(optimizer, module[0])
            for batch in replicas.batches(case.batches(epoch, place.slot, place.rank)):
                optimizer.zero_grad()
                loss_of(model(batch)).backward()
                steps.append((epoch, replicas.batch, replicas.members, not replicas.is_skipped))
                optimizer.step()
                schedule.step()
                log(steps[-1])
                hook("after step")
                place.wait_for_others(replicas)
    rates = [group["lr"] for group in optimizer.param_groups]
    return {**outcome_of(module, optimizer), "steps": steps, "rates": rates}


class Finetuning(BaseFinetuning):
    """The same, as Lightning's callbacks do it."""

    def freeze_before_training(self, pl_module: pl.LightningModule) -> None:
        self.freeze(pl_module.module[0])  # type: ignore[index]

    def finetune_function(self, pl_module: pl.LightningModule, epoch: int, optimizer: Any) -> None:
        if epoch == UNFREEZES_IN:
            self.unfreeze_and_add_param_group(pl_module.module[0], optimizer, lr=0.01)  # type: ignore[index]


class Finetuned(Module):
    def configure_optimizers(self) -> Any:
        optimizer = optimizer_of(self.module)
        return [optimizer], [{"scheduler": schedule_of(optimizer), "interval": "step"}]


def finetuning(folder: Path) -> list[pl.Callback]:
    return [Finetuning()]


@pytest.mark.sample(2)
@pytest.mark.parametrize("train", [loop_of, Fit(Finetuned, finetuning)], ids=("loop", "fit"))
@pytest.mark.parametrize("step", [8, 11, 13], ids=("before", "at the border", "after"))
@pytest.mark.parametrize("ranks", [1, 2])
def test_one_that_comes_back_trains_what_the_others_have_unfrozen(
    train: Any, step: int, ranks: int, tmp_path: Path
) -> None:
    case = Case(ranks=ranks, num_epochs=3, num_batches=10)
    found = run_with_kills(case, [Kill(1, ranks - 1, "before vote", step)], tmp_path, train=train)
    for mine, theirs in zip(*found, strict=True):
        assert_equal(mine, theirs)
    steps = members_by_step(logged_steps(tmp_path))
    assert sorted(steps) == [(epoch, batch) for epoch in range(3) for batch in range(10)]
    assert (0,) in steps.values(), "the other one went on alone"
    assert steps[2, 9] == (0, 1), "it came back"
    weights, rates = replay_of(case, steps)
    for weight, expected in zip(found[1][0]["weights"], weights, strict=True):
        assert torch.equal(weight, expected)
    for by_rank in found:
        for mine in by_rank:
            if "rates" in mine:
                assert mine["rates"] == rates
            else:
                [schedule] = mine["schedules"]
                assert schedule["_last_lr"] == rates


@pytest.mark.parametrize("where", [(0,), (1,), (0, 1)])
def test_a_layer_that_one_replica_unfreezes_alone_ends_no_process(where: tuple[int, ...]) -> None:
    """Before the second batch, which is in a window already. Sums of other sizes would end the others' processes."""
    case = Case("momentum", num_epochs=1, options={"bucket_size": 10_000})

    def job(slot: int, rank: int, address: str, collectives: Collectives) -> Any:
        module, points = case.module(), list[str]()
        assert isinstance(module, nn.Sequential)
        module[0].requires_grad_(False)
        replicas = Replicas(HookedLink(slot, address, points.append), of=case.of, slot=slot, patience_s=PATIENCE_S)
        model = DistributedDataParallel(module, case.config(), collectives=collectives, replicas=replicas)
        optimizer = DistributedOptimizer(optimizer_of(module), model)
        steps = []
        with contextlib.closing(replicas):
            for batch in replicas.batches(case.batches(0, slot, rank)):
                if replicas.batch == 1 and slot in where:
                    add_backbone(optimizer, module[0])
                optimizer.zero_grad()
                loss_of(model(batch)).backward()
                steps.append(replicas.members)
                optimizer.step()
        return steps, outcome_of(module, optimizer)

    outcomes = [by_rank[0] for by_rank in run_replicas(case, job)]
    if len(where) == 2:
        [[first], [second]] = results([[each] for each in outcomes])
        assert_equal(first[1], second[1])
        assert first[0] == [(0, 1)] * 4
        return
    assert isinstance(outcomes[1], LayoutMismatchError)
    assert outcomes[0][0] == [(0, 1), (0,), (0,), (0,)]


@pytest.mark.sample(2)
@pytest.mark.parametrize(("unfreezes_in", "is_stepped"), [(0, False), (2, True)])
def test_an_unfrozen_layer_that_another_optimizer_steps_is_refused(unfreezes_in: int, *, is_stepped: bool) -> None:
    """Its step would be made twice by a replica that takes the others' weights. One that none steps does no harm: a
    finetuning callback leaves such batch norms."""
    options = {"use_distributed_optimizer": False}  # weights are taken in their own memory, which counts as a change
    case, stepped = Case("momentum", num_epochs=1, num_batches=6, options=options), list[int]()

    def job(slot: int, rank: int, address: str, collectives: Collectives) -> Any:
        module = case.module()
        assert isinstance(module, nn.Sequential)
        module[0].requires_grad_(False)
        link = HookedLink(slot, address, lambda point: None)
        link.failing_votes = {2} if slot == 1 else ()
        replicas = Replicas(link, of=case.of, slot=slot, patience_s=PATIENCE_S)
        model = DistributedDataParallel(module, case.config(), collectives=collectives, replicas=replicas)
        optimizer = DistributedOptimizer(optimizer_of(module), model)
        other = torch.optim.SGD(module[0].parameters(), lr=0.1)
        with contextlib.closing(replicas):
            for batch in replicas.batches(case.batches(0, slot, rank)):
                module[0].requires_grad_(replicas.batch >= unfreezes_in)
                optimizer.zero_grad()
                loss_of(model(batch)).backward()
                optimizer.step()
                if is_stepped:
                    other.step()
                    other.zero_grad()
                stepped.append(replicas.batch)
                grads = [None if param.grad is None else param.grad.clone() for param in module.parameters()]
        return grads

    [[first], [second]] = run_replicas(case, job)
    if is_stepped:
        for error in (first, second):
            assert isinstance(error, ValueError)
            assert "and 0.weight was changed by an optimizer that is not one" in str(error)
    else:
        [[first], [second]] = results([[first], [second]])
        assert all(map(torch.equal, first, second))
    assert len(stepped) == 2 * (unfreezes_in + 2 if is_stepped else case.num_batches)
