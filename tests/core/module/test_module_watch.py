"""A parameter or a submodule that is replaced in training is named, and swaps of parameters are refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megastrategy import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from megastrategy.core.errors import ParameterChangedError
from tests.support.engines import engines
from tests.support.processes import run_processes
from tests.support.ranks import run_ranks
from tests.support.tensor_parallel import Case, Trainee, meshes

MODES = engines("reduce-scatter", "all-reduce", "pooled", "forward")


class Net(nn.Module):
    """Three blocks in a list (the forward runs the present ones), a frozen layer, an auxiliary loss, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(3))
        self.frozen = nn.Linear(5, 5).requires_grad_(False)
        self.norm = nn.BatchNorm1d(5, affine=False)
        self.aux: nn.Module | None = nn.Linear(5, 2)
        self.head: nn.Module = nn.Linear(5, 3)
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for param in self.parameters():
                param.copy_(torch.randn(param.shape, generator=generator) * 0.4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        x = self.norm(self.frozen(x))
        loss = self.head(x).square().mean()
        return loss if self.aux is None else loss + self.aux(x).square().mean()


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * step + rank))


def linear(out: int) -> nn.Linear:
    layer = nn.Linear(5, out)
    with torch.no_grad():
        for number, param in enumerate(layer.parameters(), 1):
            param.copy_(torch.linspace(-0.1 * number, 0.3, param.numel()).view(param.shape))
    return layer


# --- replaced --------------------------------------------------------------------------------------------------------


def head(net: Net) -> None:
    net.head = linear(3)


def head_of_other_names(net: Net) -> None:
    net.head = nn.Sequential(nn.Dropout(0.0), linear(3))


def block(net: Net) -> None:
    net.blocks[2] = nn.Sequential(linear(5), nn.Tanh())


REPLACED: dict[Callable[[Net], None], tuple[str, str]] = {
    head: ("head.weight", "'head.weight'"),
    head_of_other_names: ("head.weight", "'head.1.weight'"),
    block: ("blocks.2.0.weight", "'blocks.2.0.weight'"),
}


@pytest.mark.parametrize(
    ("replace", "options"),
    [
        pytest.param(head, MODES["reduce-scatter"], id="head-reduce-scatter"),
        pytest.param(head_of_other_names, MODES["all-reduce"], id="head_of_other_names-all-reduce"),
        pytest.param(block, MODES["pooled"], id="block-pooled"),
    ],
)
def test_replaced_submodule_is_named(replace: Callable[[Net], None], options: dict[str, Any]) -> None:
    """Before every forward, so that catching it once does not help."""
    gone, came = REPLACED[replace]

    def run(rank: int, group: ProcessGroup) -> None:
        net = Net()
        model = DistributedDataParallel(net, DistributedDataParallelConfig(bucket_size=20, **options), group)
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
        model(batch(rank, 0)).backward()
        optimizer.step()
        replace(net)
        for _ in range(2):
            with pytest.raises(ParameterChangedError, match=f"'{gone}' was replaced") as caught:
                model(batch(rank, 1))
            assert came in str(caught.value)
            assert "wrap the model again" in str(caught.value)

    run_ranks(2, run)


# --- moved, gone, or come --------------------------------------------------------------------------------------------


def test_added_module_buffers_are_broadcast() -> None:
    def run(rank: int, group: ProcessGroup) -> Tensor:
        net = Net()
        model = DistributedDataParallel(net, process_group=group)
        model(batch(rank, 0)).backward()
        net.norm = nn.BatchNorm1d(5, affine=False)
        model(batch(rank, 1)).backward()
        model(batch(rank, 2)).backward()
        model.eval()
        model(batch(rank, 3))
        return net.norm.running_mean

    first, second = run_ranks(2, run)
    assert torch.equal(first, second)


# ``torch.utils.swap_tensors`` of a wrapped model's parameters, also in ``load_state_dict`` and ``Module.to``.


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
