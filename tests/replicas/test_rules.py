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


def differ(culprit: int, width: int, seed: int, num_steps: int, address: str) -> str:
    """A replica trains for so many steps with the other, comes back as another one, which ends with an error, and comes
    back as it was. The other trains all the time, until the culprit ends both."""
    groups = [dist.new_group([rank]) for rank in range(2)]
    message = ""
    if dist.get_rank() == culprit:
        if num_steps:
            replicas, model, optimizer = make(address, groups)
            while replicas.step < num_steps:
                step(model, optimizer)
            replicas.close()
            model.close()
        replicas, model, optimizer = make(address, groups, width=width, seed=seed)
        with pytest.raises(ReplicaMismatchError) as error:  # the first batches may be dropped
            train_on(model, optimizer)
        message = str(error.value)
        replicas.close()
        model.close()
    replicas, model, optimizer = make(address, groups)
    while not replicas.should_stop:
        step(model, optimizer)
        if dist.get_rank() == culprit and replicas.members == (0, 1) and not replicas.dropped:
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
    for options, message in (
        ({"slot": 2}, r"slot=2: expected a number from 0 to 1"),
        ({"minimum": 3}, r"minimum=3: expected a number from 1 to of=2"),
        ({"backend": "mpi"}, r"backend='mpi'"),
    ):
        with pytest.raises(ValueError, match=message):
            Replicas(**{"of": 2, "slot": 0, "lighthouse": "http://localhost:1", **options})  # type: ignore[arg-type]
