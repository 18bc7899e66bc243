"""``Module.to`` and its kin put another tensor inside of each DTensor parameter, also where nothing is to be moved; its
hooks, and its gradient's dtype, are lost with the old one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.support.processes import run_processes
from tests.support.tensor_parallel import Case, Trainee, meshes

STEPS = 2


def to_same(model: Any) -> None:
    model.to("cpu")


def to_other_memory(model: Any) -> None:
    model._apply(torch.clone)  # what Module.to does with all tensors of a model that is moved, gradients too


def trained(mesh: Any, case: Case, move: Any) -> list[Tensor]:
    """This rank's parts of the weights after training in which the model was moved, before the first step and before
    the last microbatch."""
    trainee = Trainee.make(mesh, case)
    for step in range(STEPS):
        trainee.optimizer.zero_grad()
        for microbatch in range(case.accumulate):
            if move is not None and (step, microbatch) in ((0, 0), (STEPS - 1, case.accumulate - 1)):
                move(trainee.model)
            trainee.backward(step, microbatch)
        trainee.optimizer.clip_grad_norm_(0.1)
        trainee.optimizer.step()
    trainee.model.finish_param_gather()
    trainee.model.close()
    return [getattr(param, "_local_tensor", param).detach() for param in trainee.module.parameters()]


def answers(case: Case) -> list[list[Tensor]]:
    mesh = meshes(2)
    return [trained(mesh, case, move) for move in (None, to_same, to_other_memory)]


def test_moved_dtensor_model_trains_the_same() -> None:
    for expected, same, other in run_processes(4, answers, Case(accumulate=2)):
        torch.testing.assert_close(same, expected, rtol=0.0, atol=0.0)
        # torch adds a sum over tensor ranks up where it copies it, and what comes after to that.
        torch.testing.assert_close(other, expected, rtol=0.0, atol=1e-6)
