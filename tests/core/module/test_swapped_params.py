"""``torch.utils.swap_tensors`` of a wrapped model's parameters, also in ``load_state_dict`` and ``Module.to``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megastrategy import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from tests.support.engines import engines
from tests.support.processes import run_processes
from tests.support.ranks import run_ranks
from tests.support.tensor_parallel import Case, Trainee, meshes

MODES = engines("reduce-scatter", "all-reduce", "pooled", "forward")


@pytest.fixture
def swapping() -> Iterator[None]:
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(before)


SWAPS: dict[str, Callable[[nn.Module], Any]] = {
    "load_state_dict": lambda module: module.load_state_dict({k: v.clone() for k, v in module.state_dict().items()}),
    "to": lambda module: module.to(torch.float64),
    "swap_tensors": lambda module: torch.utils.swap_tensors(module.weight, nn.Parameter(torch.ones(4, 8))),
}


@pytest.mark.usefixtures("swapping")
@pytest.mark.parametrize(
    ("options", "swap"),
    [
        pytest.param(MODES["reduce-scatter"], "load_state_dict", id="reduce-scatter-load_state_dict"),
        pytest.param(MODES["forward"], "load_state_dict", id="forward-load_state_dict"),
        pytest.param(MODES["all-reduce"], "to", id="all-reduce-to"),
        pytest.param(MODES["pooled"], "swap_tensors", id="pooled-swap_tensors"),
    ],
)
def test_swapped_params_are_refused(options: dict[str, Any], swap: str) -> None:
    def run(rank: int, group: ProcessGroup) -> torch.Tensor:
        model = DistributedDataParallel(nn.Linear(8, 4), DistributedDataParallelConfig(**options), group)
        optimizer = DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=1e-2), model)

        def step() -> None:
            optimizer.zero_grad()
            model(torch.ones(2, 8) * (1 + rank)).square().mean().backward()
            optimizer.step()

        step()
        with pytest.raises(RuntimeError, match=r"[Ss]wap"):
            SWAPS[swap](model.module)
        step()  # the refused swap has changed nothing
        weights = model.module.weight.detach().clone()
        model.close()
        SWAPS[swap](model.module)  # a plain module again
        return weights

    first, second = run_ranks(2, run)
    assert torch.equal(first, second)


# ``Module.to`` and its kin put another tensor inside of each DTensor parameter, also where nothing is to be moved;
# its hooks, and its gradient's dtype, are lost with the old one.

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
