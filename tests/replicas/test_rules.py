"""What replicas refuse, and with which words: another model, and numbers that contradict each other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megastrategy import DistributedDataParallel, DistributedOptimizer, Replicas
from megastrategy.errors import ReplicaMismatchError
from tests.support.replicas import SKEW_S, run_in_replicas


def make(
    address: str, groups: list[Any], *, width: int = 4, seed: int = 0, **options: Any
) -> tuple[Replicas, Any, Any]:
    slot = dist.get_rank()
    replicas = Replicas(
        2, slot, lighthouse=address, process_group=groups[slot], **{"skew_s": SKEW_S, "patience_s": 240.0, **options}
    )
    torch.manual_seed(seed)
    module = nn.Sequential(nn.Linear(3, width), nn.Linear(width, 1))
    model = DistributedDataParallel(module, process_group=groups[slot], replicas=replicas)
    return replicas, model, DistributedOptimizer(torch.optim.AdamW(model.parameters()), model)


def step(model: Any, optimizer: Any) -> None:
    model(torch.ones(2, 3)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def train_on(model: Any, optimizer: Any) -> None:
    while True:
        step(model, optimizer)


def differ_at_first(width: int, seed: int, address: str) -> str:
    """Replica 1 differs, ends with an error, and comes back with what the other has."""
    groups = [dist.new_group([rank]) for rank in range(2)]
    message = ""
    if dist.get_rank() == 1:
        replicas, model, optimizer = make(address, groups, width=width, seed=seed)
        with pytest.raises(ReplicaMismatchError) as error:  # the first batches may be dropped
            train_on(model, optimizer)
        message = str(error.value)
        replicas.close()
        model.close()
    replicas, model, optimizer = make(address, groups)
    while replicas.step < 3:
        step(model, optimizer)
    replicas.finish()
    return message


@pytest.mark.parametrize(("width", "seed", "what"), [(5, 0, "another model")])
def test_a_replica_that_differs_ends_and_the_other_goes_on(width: int, seed: int, what: str) -> None:
    _, (message,) = run_in_replicas(differ_at_first, 1, width, seed)
    assert f"replica 1 has {what}" in message
    assert "than replicas [0]" in message


def test_numbers_that_contradict_each_other_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NUM_REPLICA_GROUPS", "REPLICA_GROUP_ID", "TORCHFT_LIGHTHOUSE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ValueError, match="pass it, or set NUM_REPLICA_GROUPS"):
        Replicas()
    for options, message in (
        ({"slot": 2}, r"slot=2: expected a number from 0 to 1"),
        ({"minimum": 3}, r"minimum=3: expected a number from 1 to of=2"),
        ({"backend": "mpi"}, r"backend='mpi'"),
    ):
        with pytest.raises(ValueError, match=message):
            Replicas(**{"of": 2, "slot": 0, "lighthouse": "http://localhost:1", **options})  # type: ignore[arg-type]
