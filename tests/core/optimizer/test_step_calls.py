"""However many tensors it steps, an optimizer is called once a step, and so are hooks and wrappers around it."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed import ProcessGroup

from tests.support.many_params import ALL, Many, Setup, reference
from tests.support.ranks import run_ranks


class CountsCalls(torch.optim.SGD):
    """Gives another result if it is called more than once a step."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)
        self.calls = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.calls += 1
        for group in self.param_groups:
            group["lr"] = 0.1 / self.calls
        super().step()


def test_an_optimizer_that_counts_its_calls_is_called_once_a_step() -> None:
    expected, _ = reference(Many(12), [(ALL, 1.0)] * 3, CountsCalls)

    def run(rank: int, group: ProcessGroup) -> None:
        setup = Setup(group, Many(12), CountsCalls, bucket_size=300)
        for _ in range(3):
            setup.step(ALL, 1.0)
            assert len(setup.stepped) == 1
        for param, value in zip(setup.module.parameters(), expected, strict=True):
            assert torch.equal(param.detach(), value)

    run_ranks(2, run)
