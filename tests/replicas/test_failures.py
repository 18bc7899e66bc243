"""Failures that end no replica, or all: a dropped batch, too few replicas, and a lighthouse that is killed."""

from __future__ import annotations

import subprocess
import sys
import time
from typing import Any

import pytest
import torch.distributed as dist

from megastrategy.errors import CollectiveError, NonFiniteGradError
from tests.support.processes import run_processes
from tests.support.replicas import SKEW_S, SmallTraining, assert_equal, run_in_replicas, wait_until_asked

STEPS, FAILING = 6, 3
LIGHTHOUSE = """
import sys
from tests.support.replicas import HEARTBEAT_S, start_lighthouse
server = start_lighthouse(HEARTBEAT_S)
print(server.address(), flush=True)
sys.stdin.read()
"""


def reject_a_gradient(ranks: int, address: str) -> tuple[list[str], list[float], Any]:
    """Replica 1 rejects a gradient that is not finite in one rank, and goes on."""
    groups = [dist.new_group(list(range(slot * ranks, (slot + 1) * ranks))) for slot in range(2)]
    slot = dist.get_rank() // ranks
    training = SmallTraining(address, slot, groups)
    is_culprit = dist.get_rank() == 2 * ranks - 1
    messages: list[str] = []
    seconds = []
    time.sleep(slot)  # the other one waits for it
    while training.replicas.step < STEPS:
        start = time.monotonic()
        fails = slot == 1 and training.replicas.step == FAILING and not messages
        try:
            training.step(float("nan") if fails and is_culprit else 1.0)
        except NonFiniteGradError as error:
            messages.append(str(error))
        seconds.append(time.monotonic() - start)
    training.replicas.finish()
    return messages, seconds, [param.detach().clone() for param in training.model.parameters()]


@pytest.mark.parametrize("ranks", [1, 2])
def test_rejected_batch_keeps_no_replica_waiting(ranks: int) -> None:
    first, second = run_in_replicas(reject_a_gradient, ranks, ranks)
    for (messages, seconds, weights), (other_messages, other_seconds, other_weights) in zip(first, second, strict=True):
        assert messages == []
        assert len(other_messages) == 1
        assert_equal(weights, other_weights)
        # Gloo would wait for the skew. The lighthouse takes none of it, since both begin the next batch.
        assert max(seconds + other_seconds) < SKEW_S / 2


def fail_in_the_last_batch(address: str) -> str:
    """Replica 1 leaves, comes back when the other has made all steps, and refuses its gradient in that batch."""
    groups = [dist.new_group([rank]) for rank in range(2)]
    slot = dist.get_rank()
    training = SmallTraining(address, slot, groups)
    while training.replicas.step < FAILING:
        training.step()
    dist.barrier()
    if slot == 0:
        training.step()
        dist.barrier()
        wait_until_asked(address)
        training.replicas.finish()
        return ""
    training.replicas.close()
    dist.barrier()
    training = SmallTraining(address, slot, groups, patience_s=5.0)
    with pytest.raises(NonFiniteGradError):
        training.step(float("nan"))
    with pytest.raises(CollectiveError) as error:
        training.step()
    return str(error.value)


def test_replica_without_state_does_not_go_on_alone() -> None:
    message = run_in_replicas(fail_in_the_last_batch, 1)[1][0]
    assert message.startswith("replica 1: 2 replicas begin together, and after 5 s these are there: [1]")


def lose_the_lighthouse(ranks: int) -> tuple[str, float]:
    groups = [dist.new_group(list(range(slot * ranks, (slot + 1) * ranks))) for slot in range(2)]
    server = None
    place: list[Any] = [None]
    if dist.get_rank() == 0:
        server = subprocess.Popen(
            [sys.executable, "-c", LIGHTHOUSE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert server.stdout is not None, "a pipe"
        place = [server.stdout.readline().strip()]
    dist.broadcast_object_list(place)
    training = SmallTraining(place[0], dist.get_rank() // ranks, groups, skew_s=5.0)
    while training.replicas.step < FAILING:
        training.step()
    dist.barrier()
    if server is not None:
        server.kill()
        server.wait()
    dist.barrier()
    start = time.monotonic()
    try:
        while True:
            training.step()
    except CollectiveError as error:
        return str(error), time.monotonic() - start


@pytest.mark.parametrize("ranks", [1, 2])
def test_all_end_by_name_when_the_lighthouse_is_killed(ranks: int) -> None:
    for rank, (message, seconds) in enumerate(run_processes(2 * ranks, lose_the_lighthouse, ranks)):
        assert f"replica {rank // ranks}: there is no agreement with other replicas through the lighthouse" in message
        assert "It does not answer" in message
        assert seconds < SKEW_S / 2
