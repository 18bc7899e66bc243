"""Divided experts when something is wrong: infinite gradients, ranks that end, bytes on the wire that should not be."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megastrategy import GradScaler
from tests.support.experts import Case, Trainee, batch_of, train_alone
from tests.support.processes import run_processes
from tests.support.tensor_parallel import whole

RANKS = 4


# --- infinite gradients ----------------------------------------------------------------------------------------------


def scaled_steps(culprit: int, options: tuple[tuple[str, Any], ...]) -> tuple[list[bool], float, dict[str, Tensor]]:
    """Whether each step left the weights as they were, the scale at the end, and the weights.

    One rank's expert has an infinite gradient in step 1, which is trained again afterwards."""
    trainee = Trainee.make(Case(2, clip_norm=None, options=options))
    scaler, skipped = GradScaler("cpu", init_scale=1024.0), []
    up: Any = trainee.module.layers[1].up
    for number, step in enumerate((0, 1, 1, 2)):
        trainee.optimizer.zero_grad()
        hook = up.register_hook(lambda grad: grad * torch.inf) if (number, dist.get_rank()) == (1, culprit) else None
        before = {name: whole(param) for name, param in trainee.module.named_parameters()}
        x, y = batch_of(dist.get_rank(), step, 0)
        scaler.scale(trainee.module.loss(x, y, trainee.model)).backward()
        if hook is not None:
            hook.remove()
        scaler.step(trainee.optimizer)
        scaler.update()
        trainee.model.finish_param_gather()
        after = {name: whole(param) for name, param in trainee.module.named_parameters()}
        skipped.append(all(torch.equal(before[name], after[name]) for name in before))
    trainee.model.close()
    return skipped, scaler.get_scale(), after


@pytest.mark.parametrize(("culprit", "options"), [pytest.param(0, (), id="0-()")])
def test_infinite_expert_grad_skips_step_on_all(culprit: int, options: tuple[tuple[str, Any], ...]) -> None:
    expected = train_alone(Case(2, clip_norm=None, steps=3), RANKS)
    for skipped, scale, weights in run_processes(RANKS, scaled_steps, culprit, options):
        assert skipped == [False, True, False, False]
        assert scale == 512.0
        torch.testing.assert_close(weights, expected.weights, rtol=0.0, atol=1e-6)


# --- ranks that end --------------------------------------------------------------------------------------------------


def end_in_the_exchange(way: str) -> None:
    """Rank 3 ends while the others are in, or on their way to, the exchange of tokens of the second step."""
    trainee = Trainee.make(Case(2))
    trainee.train(range(1))

    def end(*_: Any) -> None:
        if way == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise RuntimeError("no more tokens")

    if dist.get_rank() == 3:
        trainee.module.layers[1].register_forward_pre_hook(end)
    trainee.train(range(1, 3))


@pytest.mark.parametrize(("way", "reason"), [("killed", "the process ended without a result")])
def test_killed_expert_rank_ends_the_others(way: str, reason: str) -> None:
    with pytest.raises(AssertionError) as raised:
        run_processes(RANKS, end_in_the_exchange, way)
    by_rank = str(raised.value).split("\nrank ")
    assert len(by_rank) == RANKS
    assert reason in by_rank[3]
    for said in by_rank[:3]:
        assert "no result within" not in said
        assert "Connection closed by peer" in said or "Connection reset by peer" in said, said


# --- bytes on the wire -----------------------------------------------------------------------------------------------
