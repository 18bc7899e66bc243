"""Batches with two optimizers, each with a backward of its own, as in an adversarial training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megastrategy import DistributedDataParallel, DistributedOptimizer, GradScaler
from megastrategy.core import Collectives, Replicas
from tests.support.replica_processes import Kill, logged_steps, run_with_kills
from tests.support.replica_trainer import Fit, Log, Module
from tests.support.replicas import (
    OPTIMIZERS,
    PATIENCE_S,
    Case,
    HookedLink,
    assert_equal,
    loss_of,
    mean_grads,
    members_by_step,
    outcome_of,
    results,
    run_replicas,
)


class Pair(nn.Module):
    """Two networks, the second over what the first one makes."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        layers = case.module()
        assert isinstance(layers, nn.Sequential)
        self.parts = nn.ModuleList([layers[:2], layers[2:]])

    def forward(self, batch: Tensor, number: int) -> Tensor:
        made: Tensor = self.parts[0](batch)
        return made if number == 0 else self.parts[1](made.detach())  # type: ignore[no-any-return]

    def optimizers_of(self) -> list[torch.optim.Optimizer]:
        return [
            OPTIMIZERS[name](part.parameters()) for name, part in zip(("momentum", "adam"), self.parts, strict=True)
        ]


def replay_of_pair(case: Case, steps: Mapping[tuple[int, int], Sequence[int]]) -> list[Tensor]:
    """The weights after a training in one process, with the same replicas in each step."""
    pair = Pair(case)
    optimizers = pair.optimizers_of()
    for (epoch, place), members in sorted(steps.items()):
        number, part = divmod(place, 2)
        params = list(pair.parts[part].parameters())

        def losses_of(slot: int, rank: int, place: tuple[int, int] = (epoch, number), part: int = part) -> list[Tensor]:
            return [loss_of(pair(case.batch(*place, slot, rank), part))]

        for param, grad in zip(params, mean_grads(params, members, case.ranks, losses_of), strict=True):
            param.grad = grad
        optimizers[part].step()
    return [param.detach() for param in pair.parameters()]


class Loop:
    """A plain loop. ``zeroes``: whether gradients of zeros are kept, or None."""

    def __init__(
        self, case: Case, slot: int, rank: int, replicas: Replicas, collectives: Collectives | None, *, zeroes: bool
    ) -> None:
        self.case, self.slot, self.rank, self.replicas, self.zeroes = case, slot, rank, replicas, zeroes
        self.module = Pair(case)
        self.model = DistributedDataParallel(
            self.module, case.config(), collectives=collectives, replicas=self.replicas
        )
        self.optimizers = [DistributedOptimizer(one, self.model) for one in self.module.optimizers_of()]
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizers[0], 1000)
        self.replicas.register("schedule", self.schedule.state_dict, self.schedule.load_state_dict)
        self.steps: list[Any] = []

    def train(self, on_step: Any = lambda: None) -> dict[str, Any]:
        for epoch in self.replicas.epochs(self.case.num_epochs):
            for batch in self.replicas.batches(self.case.batches(epoch, self.slot, self.rank)):
                for part, optimizer in enumerate(self.optimizers):
                    loss_of(self.model(batch, part)).backward()
                    has_part = not self.replicas.is_skipped
                    self.steps.append((epoch, 2 * self.replicas.batch + part, self.replicas.members, has_part))
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=not self.zeroes)
                    if part == 0:
                        self.schedule.step()
                    on_step()
        assert self.schedule.last_epoch == self.case.num_epochs * self.case.num_batches
        return {**outcome_of(self.module, *self.optimizers), "steps": self.steps}


def check(case: Case, found: list[list[Any]], logged: Sequence[Sequence[Any]]) -> dict[tuple[int, int], Any]:
    for by_rank in found[1:]:
        for mine, theirs in zip(found[0], by_rank, strict=True):
            assert_equal(mine, theirs)
    steps = members_by_step(logged)
    assert sorted(steps) == [(e, b) for e in range(case.num_epochs) for b in range(2 * case.num_batches)]
    for weight, expected in zip(found[0][0]["weights"], replay_of_pair(case, steps), strict=True):
        assert torch.equal(weight, expected)
    return steps


@pytest.mark.parametrize("window", [5, 6], ids=("first", "second"))
@pytest.mark.parametrize("zeroes", [False, True], ids=("none", "zeros"))
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_replica_whose_vote_fails_takes_the_others_state_in_the_middle_of_a_batch(
    ranks: int, zeroes: bool, window: int
) -> None:
    """In the third batch, in the window of either optimizer. A schedule that stepped twice would be seen."""
    case = Case(ranks=ranks)

    def job(slot: int, rank: int, address: str, collectives: Collectives) -> Any:
        link = HookedLink(slot, address, lambda point: None)
        if (slot, rank) == (1, ranks - 1):
            link.failing_votes = {window}
        replicas = Replicas(link, of=case.of, slot=slot, patience_s=PATIENCE_S)
        return Loop(case, slot, rank, replicas, collectives, zeroes=zeroes).train()

    found = results(run_replicas(case, job))
    check(case, found, [outcome["steps"] for by_rank in found for outcome in by_rank])
    [left_out] = {place for place, (*_, has_part) in enumerate(found[1][0]["steps"], 1) if not has_part}
    assert left_out == window
    assert all(has_part for *_, has_part in found[0][0]["steps"])


@pytest.mark.parametrize("overflows_in", [0, 1])
def test_a_scaler_leaves_out_the_step_of_either_optimizer(overflows_in: int) -> None:
    """As at the start of a training in fp16. The other optimizer steps, in the same batch."""
    case, scales = Case(num_epochs=1), list[float]()

    def job(slot: int, rank: int, address: str, collectives: Collectives) -> Any:
        replicas = Replicas(HookedLink(slot, address, lambda point: None), of=case.of, slot=slot, patience_s=PATIENCE_S)
        loop = Loop(case, slot, rank, replicas, collectives, zeroes=False)
        scaler = GradScaler("cpu", init_scale=1024.0)
        replicas.register("scaler", scaler.state_dict, scaler.load_state_dict)
        for epoch in replicas.epochs(1):
            for batch in replicas.batches(case.batches(epoch, slot, rank)):
                for part, optimizer in enumerate(loop.optimizers):
                    overflows = (replicas.batch, part, slot) == (1, overflows_in, 1)
                    scaler.scale(loss_of(loop.model(batch, part)) * (float("inf") if overflows else 1.0)).backward()
                    before = [param.detach().clone() for param in loop.module.parts[part].parameters()]
                    scaler.step(optimizer)
                    optimizer.zero_grad()
                    is_left_out = all(map(torch.equal, before, loop.module.parts[part].parameters()))
                    assert is_left_out == ((replicas.batch, part) == (1, overflows_in))
                scaler.update()
        scales.append(scaler.get_scale())
        return outcome_of(loop.module, *loop.optimizers)

    [first], [second] = results(run_replicas(case, job))
    assert_equal(first, second)
    assert scales == [512.0, 512.0]


class Adversarial(Module):
    """The same by a Trainer, in manual optimization."""

    def __init__(self, case: Case, slot: int, rank: int) -> None:
        super().__init__(case, slot, rank)
        self.module = Pair(case)
        self.automatic_optimization = False

    def forward(self, batch: Tensor, number: int = 1) -> Tensor:  # type: ignore[override]
        outputs: Tensor = self.module(batch, number)
        return outputs

    def training_step(self, batch: Tensor, batch_idx: int) -> None:  # type: ignore[override]
        optimizers: Any = self.optimizers()
        [log] = [callback for callback in self.trainer.callbacks if isinstance(callback, Log)]  # type: ignore[attr-defined]
        for part, optimizer in enumerate(optimizers):
            self.toggle_optimizer(optimizer)
            self.manual_backward(loss_of(self(batch, part)))
            optimizer.step()
            optimizer.zero_grad()
            self.untoggle_optimizer(optimizer)
            log.note(self.current_epoch, 2 * batch_idx + part)

    def configure_optimizers(self) -> Any:
        return self.module.optimizers_of()


@pytest.mark.sample(1)
@pytest.mark.parametrize("point", ["before sum 0", "before vote", "after step"])
@pytest.mark.parametrize(("ranks", "step"), [(1, 5), (2, 6)])
def test_a_fit_with_two_optimizers(point: str, ranks: int, step: int, tmp_path: Path) -> None:
    """By a Trainer, in manual optimization."""
    case = Case(ranks=ranks, num_batches=10)
    found = run_with_kills(case, [Kill(1, 0, point, step)], tmp_path, train=Fit(Adversarial))
    steps = check(case, found, logged_steps(tmp_path))
    assert (0,) in steps.values()
    assert steps[1, 19] == (0, 1)
    assert found[0][0]["counters"] == found[1][0]["counters"] == (2, 40)
