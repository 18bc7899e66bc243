"""What replicas refuse, and with which words: another model, and numbers that contradict each other."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, GradientState
from torch import nn
from torch.utils.data import DataLoader

from megastrategy import Replicas
from megastrategy.accelerate import Accelerator, MegatronDDPPlugin
from megastrategy.errors import ReplicaMismatchError
from tests.support.replicas import SmallTraining, run_in_replicas


def differ(culprit: int, width: int, seed: int, num_steps: int, address: str) -> str:
    """A replica trains for so many steps with the other, comes back as another one, which ends with an error, and comes
    back as it was. The other trains all the time, until the culprit ends both."""
    groups = [dist.new_group([rank]) for rank in range(2)]
    slot = dist.get_rank()
    message = ""
    if slot == culprit:
        if num_steps:
            training = SmallTraining(address, slot, groups)
            while training.replicas.step < num_steps:
                training.step()
            training.close()
        training = SmallTraining(address, slot, groups, width=width, seed=seed)
        try:
            while True:  # the first batches may be dropped
                training.step()
        except ReplicaMismatchError as error:
            message = str(error)
        training.close()
    training = SmallTraining(address, slot, groups)
    replicas = training.replicas
    while not replicas.should_stop:
        training.step()
        if slot == culprit and replicas.members == (0, 1) and not replicas.dropped:
            replicas.stop()
    replicas.finish()
    return message


@pytest.mark.parametrize(
    ("culprit", "width", "seed", "num_steps", "what"),
    [(1, 5, 0, 0, "another model"), (1, 4, 1, 0, "another weights at the start"), (0, 5, 0, 2, "another model")],
    ids=["model", "weights", "model-on-return"],
)
def test_other_replica_ends_and_the_rest_go_on(culprit: int, width: int, seed: int, num_steps: int, what: str) -> None:
    message = run_in_replicas(differ, 1, culprit, width, seed, num_steps)[culprit][0]
    assert f"replica {culprit} has {what}" in message
    assert f"than replicas [{1 - culprit}]" in message


def test_contradicting_numbers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NUM_REPLICA_GROUPS", "REPLICA_GROUP_ID", "TORCHFT_LIGHTHOUSE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ValueError, match="pass it, or set NUM_REPLICA_GROUPS"):
        Replicas()
    monkeypatch.setenv("NUM_REPLICA_GROUPS", "two")
    with pytest.raises(ValueError, match=r"'two'.*NUM_REPLICA_GROUPS"):
        Replicas()
    for options, message in (
        ({"slot": 2}, r"slot=2: expected a number from 0 to 1"),
        ({"backend": "mpi"}, r"backend='mpi'"),
    ):
        with pytest.raises(ValueError, match=message):
            Replicas(**{"of": 2, "slot": 0, "lighthouse": "http://localhost:1", **options})  # type: ignore[arg-type]


def end_within_a_step(address: str) -> str:
    """Both replicas train one epoch of two windows, and then one that ends within a window."""
    training = SmallTraining(address, dist.get_rank(), [dist.new_group([rank]) for rank in range(2)])
    replicas, model = training.replicas, training.model

    def train_an_epoch(num_batches: int) -> None:
        for number in replicas.batches(range(num_batches)):
            with contextlib.nullcontext() if number % 2 else model.no_sync():
                model(torch.ones(2, 3)).square().mean().backward()
            if number % 2:
                training.optimizer.step()

    train_an_epoch(4)
    assert (replicas.step, replicas.epoch) == (2, 1)
    with pytest.raises(ValueError, match="ended within a step") as error:
        train_an_epoch(3)
    training.close()
    return str(error.value)


def test_epoch_that_ends_within_a_step_is_refused() -> None:
    for (message,) in run_in_replicas(end_within_a_step, 1):
        assert "epoch 1 ended within a step" in message


def test_accelerators_own_division_is_refused() -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    replicas = Replicas(2, 0, lighthouse="http://localhost:1")
    accelerator = Accelerator(cpu=True, megatron_ddp_plugin=MegatronDDPPlugin(replicas=replicas))
    loader = DataLoader(range(8), batch_size=2)  # type: ignore[arg-type] # a sequence is a dataset
    schedule = torch.optim.lr_scheduler.StepLR(torch.optim.SGD([nn.Parameter(torch.ones(1))]), 1)
    for call, message in (
        (lambda: accelerator.prepare(loader), r"a prepared DataLoader.*replicas\.sampler_ranks.*in_replica=True"),
        (lambda: accelerator.prepare(schedule), r"a prepared schedule.*register_for_checkpointing"),
        (lambda: accelerator.skip_first_batches(loader, 1), r"skip_first_batches\(\).*replicas\.batch"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    prepared = accelerator.prepare_data_loader(loader, in_replica=True)
    assert [batch.tolist() for batch in prepared] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    AcceleratorState._reset_state(reset_partial_state=True)
