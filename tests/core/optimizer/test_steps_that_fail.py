"""A step that raises, and whose error is caught: ranks launch the same collectives, wherever each of them failed."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megastrategy import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from tests.support.optimizers import Simple
from tests.support.ranks import run_ranks
from tests.support.whole_params import SOME, batch


class NoRootError(Exception):
    """A matrix has no root."""


class Fails(Simple):
    """As Lamb with momentum; it raises once it is armed, after its first parameter or before."""

    fails: str | None = None

    def update(self, param: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if self.fails == "before":
            raise NoRootError
        size = grad.norm() + 1e-3 if group["by_norm"] else 1.0
        param.sub_(state.setdefault("momentum", torch.zeros_like(param)).mul_(0.9).add_(grad / size), alpha=group["lr"])
        if self.fails == "after":
            raise NoRootError


def train(
    group: ProcessGroup, rank: int, *, by_norm: bool, num_params: int, armed: set[int], fails: str, **options: Any
) -> list[Tensor]:
    """Eight layers; the optimizer has some of their weights; the third of five steps fails on some ranks."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(10, 8), *(nn.Linear(8, 8) for _ in range(6)), nn.Linear(8, 7))
    model = DistributedDataParallel(module, DistributedDataParallelConfig(bucket_size=SOME, **options), group)
    assert len(model.layout.buckets) > 1
    inner = Fails([layer.weight for layer in list(module)[-num_params:]], lr=0.02, by_norm=by_norm)
    optimizer = DistributedOptimizer(inner, model)
    for step in range(5):
        model.zero_grad()
        model(batch(rank, step)).square().mean().backward()
        inner.fails = fails if step == 2 and rank in armed else None
        with contextlib.suppress(NoRootError):
            optimizer.step()
        if step == 2:
            begun, done = optimizer.num_steps
            assert (done < begun) == (rank in armed and bool(optimizer._impl.runs))
    assert torch.stack([param.detach().isfinite().all() for param in module.parameters()]).all()
    return [param.detach().clone() for param in module.parameters()]


@pytest.mark.parametrize(
    ("by_norm", "gather", "num_params", "armed", "fails"),
    [
        pytest.param(False, False, 1, {0, 1, 2}, "before", id="False-False-1-{0, 1, 2}-before"),
        pytest.param(False, False, 8, {0, 1, 2}, "before", id="False-False-8-{0, 1, 2}-before"),
        pytest.param(True, True, 2, {1}, "after", id="True-True-2-{1}-after"),
    ],
)
def test_training_goes_on_and_ranks_are_equal(
    by_norm: bool, gather: Any, num_params: int, armed: set[int], fails: str
) -> None:
    def run(rank: int, group: ProcessGroup) -> list[Tensor]:
        return train(
            group, rank, by_norm=by_norm, num_params=num_params, armed=armed, fails=fails, overlap_param_gather=gather
        )

    first, *others = run_ranks(3, run, timeout_s=5.0)
    for other in others:
        assert all(map(torch.equal, first, other))
