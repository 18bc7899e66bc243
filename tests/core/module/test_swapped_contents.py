"""``torch.utils.swap_tensors`` of a wrapped model's parameters, also in ``load_state_dict`` and ``Module.to``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import ProcessGroup

from megastrategy import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from tests.support.engines import engines
from tests.support.ranks import run_ranks

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
