"""Facts that replicas exchange in each step, and their consequences: threads, each a replica."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megastrategy import GradScaler
from megastrategy.core import Collectives
from megastrategy.core.sync.replica_facts import ReplicaFacts, check_facts
from megastrategy.errors import (
    LayoutMismatchError,
    LossTokensError,
    MicrobatchMismatchError,
    NonFiniteGradError,
    ReplicaMismatchError,
)
from tests.support.replicas import Case, Run, assert_equal, loss_of, prepare, results, run_replicas

Step = Callable[[Run, int, Tensor], None]
"""Called with the training, the number of its batch and the batch: does all of a step after zero_grad."""


def outcomes_of(case: Case, step: Step, **more: Any) -> list[Any]:
    """The outcomes of a training with this step, or its errors, by slot."""

    def job(slot: int, rank: int, address: str, collectives: Collectives) -> Any:
        module = more["module"](slot) if "module" in more else None
        run = prepare(case, slot, rank, address, collectives, more.get("hook", lambda point: None), module=module)
        more.get("prepared", lambda run: None)(run)
        with contextlib.closing(run.replicas):  # an error in a step ends a process, and this is a thread
            for epoch in run.replicas.epochs(case.num_epochs):
                for batch in run.replicas.batches(case.batches(epoch, slot, rank)):
                    run.optimizer.zero_grad()
                    step(run, run.replicas.batch, batch)
                    run.steps.append((epoch, run.replicas.batch, run.replicas.members, not run.replicas.is_skipped))
        return run.outcome()

    return [by_rank[0] for by_rank in run_replicas(case, job)]


def equal(outcomes: list[Any]) -> list[Any]:
    found = [each[0] for each in results([[each] for each in outcomes])]
    for other in found[1:]:
        assert_equal(found[0], other)
    return found


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.left, self.right = nn.Linear(8, 8), nn.Linear(8, 2), nn.Linear(8, 2)
        with torch.no_grad():
            for number, param in enumerate(self.parameters()):
                param.fill_(0.1 * (number + 1))

    def forward(self, inputs: Tensor, *, left: bool, right: bool) -> Tensor:
        hidden = self.trunk(inputs)
        return torch.stack([head(hidden) for head, is_used in ((self.left, left), (self.right, right)) if is_used])


def test_a_parameter_that_one_replica_used_is_stepped_by_all_and_one_that_none_used_by_none() -> None:
    case = Case("momentum", num_epochs=1, num_batches=3)
    before: dict[int, Tensor] = {}

    def step(run: Run, number: int, batch: Tensor) -> None:
        weight = run.module.right.weight  # type: ignore[union-attr]
        before[number] = weight.detach().clone()
        # in the first batch both use the right head, in the second one does, and in the third none
        outputs = run.model(batch, left=True, right=number == 0 or (number == 1 and run.slot == 1))
        loss_of(outputs).backward()
        assert (weight.grad is not None) == (number < 2)
        run.optimizer.step()
        if number == 2:
            assert torch.equal(weight, before[number]), "momentum must not move it"
        else:
            assert not torch.equal(weight, before[number])

    equal(outcomes_of(case, step, module=lambda slot: TwoHeads()))


def test_nan_in_one_replica_is_rejected_by_all() -> None:
    case = Case(num_epochs=1, options={"check_for_nan_in_grad": True})
    errors: list[str] = []

    def step(run: Run, number: int, batch: Tensor) -> None:
        loss = loss_of(run.model(batch)) * (float("nan") if (number, run.slot) == (1, 1) else 1.0)
        try:
            loss.backward()
        except NonFiniteGradError as error:
            errors.append(str(error))
            return
        run.optimizer.step()

    equal(outcomes_of(case, step))
    assert len(errors) == 2
    assert sum("another replica" in error for error in errors) == 1


def test_a_step_that_overflows_in_one_replica_is_skipped_by_all() -> None:
    case = Case(num_epochs=2, num_batches=3)
    scalers: list[GradScaler] = []

    def prepared(run: Run) -> None:
        run.scaler = GradScaler("cpu", init_scale=1024.0, growth_interval=2)  # type: ignore[attr-defined]
        run.replicas.register("scaler", run.scaler.state_dict, run.scaler.load_state_dict)  # type: ignore[attr-defined]
        scalers.append(run.scaler)  # type: ignore[attr-defined]

    def step(run: Run, number: int, batch: Tensor) -> None:
        scaler: GradScaler = run.scaler  # type: ignore[attr-defined]
        loss = loss_of(run.model(batch)) * (float("inf") if (number, run.slot) == (1, 1) else 1.0)
        before = [param.detach().clone() for param in run.module.parameters()]
        scaler.scale(loss).backward()
        scaler.step(run.optimizer)
        scaler.update()
        run.model.finish_param_gather()
        is_skipped = all(torch.equal(old, new) for old, new in zip(before, run.module.parameters(), strict=True))
        assert is_skipped == (number == 1)

    equal(outcomes_of(case, step, prepared=prepared))
    # Halved in each epoch's second batch, and doubled after two steps in a row: the third and the next first one.
    assert [scaler.get_scale() for scaler in scalers] == [512.0, 512.0]


def test_losses_are_weighed_by_the_tokens_of_all_replicas() -> None:
    """As one replica would weigh them that had all samples in one batch."""
    case = Case("momentum", num_epochs=1)
    sizes = {0: 6, 1: 2}

    def step(run: Run, number: int, batch: Tensor) -> None:
        kept = batch[: sizes[run.slot]]
        run.model.weigh_by_tokens(loss_of(run.model(kept)), len(kept)).backward()
        run.optimizer.step()

    found = equal(outcomes_of(case, step))
    module = case.module()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
    for number in range(case.num_batches):
        optimizer.zero_grad()
        batches = [case.batch(0, number, slot, 0)[:size] for slot, size in sizes.items()]
        loss_of(module(torch.cat(batches))).backward()
        optimizer.step()
    for weight, expected in zip(found[0]["weights"], module.parameters(), strict=True):
        torch.testing.assert_close(weight, expected, rtol=1e-5, atol=1e-6)


def test_the_row_of_most_members_counts_and_at_a_tie_that_of_the_first() -> None:
    """Two lines of steps of one length: the smaller one ends."""
    one, other = (ReplicaFacts(history, bytes(8), bytes(8), 3) for history in (b"one line", b"another."))
    check_facts([one, other, one], 0, 0)
    with pytest.raises(ReplicaMismatchError, match=r"replica 5 of 3 .* divided into two groups"):
        check_facts([one, other, one], 1, 5)
    check_facts([one, other], 0, 0)
    with pytest.raises(ReplicaMismatchError):
        check_facts([one, other], 1, 1)


def test_histories_name_the_members_of_each_step() -> None:
    """Replicas that made the same steps in two groups do not take each other's part: see the test above."""
    histories: dict[int, set[bytes]] = {}

    def step(run: Run, number: int, batch: Tensor) -> None:
        loss_of(run.model(batch)).backward()
        run.optimizer.step()

    for num_replicas in (1, 2):
        runs: list[Run] = []
        outcomes_of(Case(of=num_replicas, num_epochs=1), step, prepared=runs.append)
        histories[num_replicas] = {run.replicas._history for run in runs}
    assert len(histories[1]) == len(histories[2]) == 1
    assert histories[1] != histories[2]


def test_losses_counted_by_one_replica_alone_are_rejected_by_both() -> None:
    case = Case(num_epochs=1, num_batches=2)

    def step(run: Run, number: int, batch: Tensor) -> None:
        loss = loss_of(run.model(batch))
        (run.model.weigh_by_tokens(loss, 6) if run.slot else loss).backward()

    assert all(isinstance(error, LossTokensError) for error in outcomes_of(case, step))


def test_module_buffers_are_those_of_the_leader() -> None:
    case = Case()

    def module(slot: int) -> nn.Module:
        return nn.Sequential(case.module(), nn.BatchNorm1d(4))

    def step(run: Run, number: int, batch: Tensor) -> None:
        loss_of(run.model(batch)).backward()
        run.optimizer.step()

    found = equal(outcomes_of(case, step, module=module))
    assert int(found[0]["buffers"][-1]) == case.num_epochs * case.num_batches
    assert found[0]["buffers"][0].abs().sum() > 0


def test_a_replica_with_another_learning_rate_ends() -> None:
    case = Case(num_epochs=1)

    def step(run: Run, number: int, batch: Tensor) -> None:
        loss_of(run.model(batch)).backward()
        if run.slot == 1 and number == 1:
            run.optimizer.param_groups[0]["lr"] *= 2
        run.optimizer.step()

    first, second = outcomes_of(case, step)
    assert isinstance(second, ReplicaMismatchError)
    assert "learning rate" in str(second)
    assert [members for _, _, members, _ in first["steps"]] == [(0, 1), (0, 1), (0, 1), (0,)]


def test_replicas_that_begin_differently_do_not_train() -> None:
    case = Case(num_epochs=1)

    def module(slot: int) -> nn.Module:
        made = case.module()
        with torch.no_grad():
            made[0].weight[0, 0] += slot  # type: ignore[index]
        return made

    def step(run: Run, number: int, batch: Tensor) -> None:
        loss_of(run.model(batch)).backward()
        run.optimizer.step()

    first, second = outcomes_of(case, step, module=module)
    assert isinstance(second, ReplicaMismatchError)
    assert "began with other weights" in str(second)
    assert all(members == (0,) for _, _, members, _ in first["steps"])


def test_a_replica_with_another_layout_does_not_train() -> None:
    case = Case(num_epochs=1)

    def module(slot: int) -> nn.Module:
        made = case.module()
        made[0].bias.requires_grad_(slot == 0)  # type: ignore[index]
        return made

    def step(run: Run, number: int, batch: Tensor) -> None:
        loss_of(run.model(batch)).backward()
        run.optimizer.step()

    first, second = outcomes_of(case, step, module=module)
    assert isinstance(second, LayoutMismatchError)
    assert first["steps"]


def test_a_replica_that_skips_a_batch_ends() -> None:
    case = Case(num_epochs=1)

    def step(run: Run, number: int, batch: Tensor) -> None:
        if (run.slot, number) == (1, 1):
            return
        loss_of(run.model(batch)).backward()
        run.optimizer.step()

    first, second = outcomes_of(case, step)
    assert isinstance(second, MicrobatchMismatchError)
    assert len(first["steps"]) == case.num_batches


@pytest.mark.parametrize("short", [0, 1])
@pytest.mark.parametrize("num_epochs", [1, 2])
def test_a_replica_whose_loader_is_shorter_ends_with_an_error(num_epochs: int, short: int) -> None:
    """Also in the last epoch, where it would have come to its end with other weights than the others."""
    case = Case(num_epochs=num_epochs)

    def job(slot: int, rank: int, address: str, collectives: Collectives) -> Any:
        run = prepare(case, slot, rank, address, collectives)
        with contextlib.closing(run.replicas):
            for epoch in run.replicas.epochs(num_epochs):
                for batch in run.replicas.batches(case.batches(epoch, slot, rank)[: 3 if slot == short else 4]):
                    run.train_on(batch)
        return run.steps

    outcomes = [by_rank[0] for by_rank in run_replicas(case, job)]
    assert isinstance(outcomes[short], ReplicaMismatchError)
    assert "has read all 3 batches of its loader, and that of another replica has 4" in str(outcomes[short])
    assert len(outcomes[1 - short]) == 4 * num_epochs


def test_a_replica_whose_loader_is_shorter_does_not_come_to_its_end_when_it_comes_back() -> None:
    """It joins where its own loader has ended. Taken for complete, it would have ended the others' job."""
    case, has_joined = Case(num_epochs=1), threading.Event()
    batches = {0: 60 * case.batches(0, 0, 0)[:1], 1: case.batches(0, 1, 0)[:3]}

    def job(slot: int, rank: int, address: str, collectives: Collectives) -> Any:
        ends = []
        for life in range(slot + 1):
            run = prepare(case, slot, rank, address, collectives)
            with contextlib.closing(run.replicas), contextlib.suppress(ReplicaMismatchError):
                for _ in run.replicas.epochs(1):
                    if life == 1:
                        has_joined.set()
                    for batch in run.replicas.batches(batches[slot]):
                        run.train_on(batch)
                        if run.replicas.batch >= 3 and not has_joined.is_set():
                            time.sleep(0.1)  # for the other one to come back meanwhile
                ends.append(life)
        return ends

    assert [by_rank[0] for by_rank in run_replicas(case, job)] == [[0], []]
    assert has_joined.is_set()


def test_a_stop_of_one_replica_ends_all_after_the_same_batch() -> None:
    case = Case(num_epochs=2)

    def step(run: Run, number: int, batch: Tensor) -> None:
        if (run.slot, run.replicas.epoch, number) == (1, 1, 1):
            run.replicas.stop()
        loss_of(run.model(batch)).backward()
        run.optimizer.step()

    runs: list[Run] = []
    found = equal(outcomes_of(case, step, prepared=runs.append))
    assert all(len(each["steps"]) == case.num_batches + 2 for each in found)
    assert [(run.replicas.epoch, run.replicas.batch) for run in runs] == [(1, 2), (1, 2)], "where to go on"


def test_a_vote_that_differs_is_adopted_and_a_schedule_steps_once() -> None:
    case = Case(num_epochs=1, num_batches=6)
    schedulers: dict[int, Any] = {}
    failures = threading.local()

    def prepared(run: Run) -> None:
        scheduler = torch.optim.lr_scheduler.StepLR(run.optimizer.optimizer, 1, 0.9)
        run.replicas.register("schedule", scheduler.state_dict, scheduler.load_state_dict)
        schedulers[run.slot] = scheduler
        link: Any = run.replicas.link

        def hook(point: str) -> None:
            # after the exchange, so that the other one has everything
            failures.count = getattr(failures, "count", 0) + (point == "before vote")
            if run.slot == 1 and point == "before vote" and failures.count == 3:
                link.fail()

        link.hook = hook

    def step(run: Run, number: int, batch: Tensor) -> None:
        loss_of(run.model(batch)).backward()
        run.optimizer.step()
        schedulers[run.slot].step()

    first, second = equal(outcomes_of(case, step, prepared=prepared))
    assert [has_part for *_, has_part in second["steps"]] == [True, True, False, True, True, True]
    assert all(has_part for *_, has_part in first["steps"])
    assert schedulers[0].last_epoch == schedulers[1].last_epoch == case.num_batches
    assert schedulers[0].get_last_lr() == schedulers[1].get_last_lr()


def test_microbatches_are_one_window() -> None:
    case = Case("momentum", num_epochs=1, num_batches=6)

    def step(run: Run, number: int, batch: Tensor) -> None:
        raise AssertionError

    def job(slot: int, rank: int, address: str, collectives: Collectives) -> Any:
        run = prepare(case, slot, rank, address, collectives)
        meetings: list[str] = []
        run.replicas.link.hook = meetings.append  # type: ignore[attr-defined]
        for epoch in run.replicas.epochs(1):
            for batch in run.replicas.batches(case.batches(epoch, slot, rank)):
                if run.replicas.batch % 3 < 2:
                    with run.model.no_sync():
                        loss_of(run.model(batch)).backward()
                    continue
                loss_of(run.model(batch)).backward()
                run.optimizer.step()
                run.optimizer.zero_grad()
        assert meetings.count("after meeting") >= 3
        assert meetings.count("after vote") == 2
        return run.outcome()

    first, second = results(run_replicas(case, job))
    assert_equal(first[0], second[0])


@pytest.mark.parametrize(
    ("what", "message"),
    [("twice", "each step has one synchronised backward"), ("kept", "zero_grad"), ("unsynchronised", "no_sync")],
)
def test_uses_that_replicas_do_not_allow_are_refused(what: str, message: str) -> None:
    case = Case(of=1, num_epochs=1, num_batches=2)

    def step(run: Run, number: int, batch: Tensor) -> None:
        if what == "unsynchronised":
            with run.model.no_sync():
                loss_of(run.model(batch)).backward()
            run.optimizer.step()
        loss_of(run.model(batch)).backward()
        if what == "twice":
            loss_of(run.model(batch)).backward()
        run.optimizer.step()
        if what == "kept":
            run.optimizer.zero_grad = lambda: None  # type: ignore[method-assign]

    (error,) = outcomes_of(case, step)
    assert isinstance(error, ValueError)
    assert message in str(error)
