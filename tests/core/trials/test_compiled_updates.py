"""Trials of optimizers whose update is compiled: they compile nothing, and leave the compiler as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megastrategy.core.trials.probe import probe


class Compiled(torch.optim.Optimizer):
    """Steps each matrix by its row norms, in a function that is compiled for each shape anew, as Dion's Muon is."""

    def __init__(self, params: Any, lr: float = 0.1, *, by_rows: bool = True) -> None:
        super().__init__(params, {"lr": lr})
        self.num_graphs = [0]

        def backend(graph: Any, inputs: Any) -> Any:
            self.num_graphs[0] += 1
            return graph.forward

        def update(grad: Tensor) -> Tensor:
            return grad / (1 + grad.norm(dim=-1, keepdim=True)) if by_rows else grad.sign()

        self.update = torch.compile(update, fullgraph=True, dynamic=False, backend=backend)

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.add_(self.update(param.grad), alpha=-group["lr"])


@pytest.mark.parametrize("by_rows", [True, False])
def test_trials_compile_nothing(by_rows: bool) -> None:
    weight = torch.nn.Parameter(torch.ones(3, 4))
    optimizer = Compiled([weight], by_rows=by_rows)
    found = probe(optimizer, torch.device("cpu"), torch.float32)
    assert found.reason is None
    assert bool(found.whole_groups) == by_rows
    assert optimizer.num_graphs == [0]
    # and afterwards it is compiled as ever
    weight.grad = torch.ones(3, 4)
    optimizer.step()
    assert optimizer.num_graphs == [1]
