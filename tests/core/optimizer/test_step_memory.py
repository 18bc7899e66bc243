"""Optimizers that give parameters other memory, or keep gradients, train as under torch DDP, which gives them both."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megastrategy import DistributedDataParallelConfig, DistributedOptimizer
from tests.support.optimizers import Simple
from tests.support.ranks import run_ranks
from tests.support.training import Run, train_with_ddp, train_with_ours
from tests.support.whole_params import SOME, assert_same, model_on, same, train


class InPlace(Simple):
    """Half of the last gradient is taken back; ``by_norm`` makes it one of whole parameters."""

    def update(self, param: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        self.move(param, self.direction(grad, self.exchange(state, grad), group), group["lr"])

    def exchange(self, state: dict[str, Any], grad: Tensor) -> Tensor:
        """Returns the last gradient, and keeps this one."""
        last: Tensor = state.get("last", torch.zeros_like(grad))
        state["last"] = grad.clone()
        return last

    def direction(self, grad: Tensor, last: Tensor, group: dict[str, Any]) -> Tensor:
        return (grad - 0.5 * last) / (grad.norm() + 1e-3 if group["by_norm"] else 1)

    def move(self, param: Tensor, direction: Tensor, lr: float) -> None:
        param.sub_(direction * lr)


class ReplacesWeights(InPlace):
    """As SAM's, which puts back what it has kept."""

    def move(self, param: Tensor, direction: Tensor, lr: float) -> None:
        param.data = param.data - direction * lr


class KeepsAView(InPlace):
    def exchange(self, state: dict[str, Any], grad: Tensor) -> Tensor:
        last: Tensor = state.get("last", torch.zeros_like(grad))
        state["last"] = grad.detach()
        return last


class KeepsAList(InPlace):
    def exchange(self, state: dict[str, Any], grad: Tensor) -> Tensor:
        history = state.setdefault("history", {"last": [torch.zeros_like(grad)]})["last"]
        history[:] = [*history[-1:], grad]
        return history[0]


@dataclasses.dataclass(frozen=True)
class OneOf(Run):
    kind: type[InPlace] = InPlace
    by_norm: bool = False

    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return self.kind(model.parameters(), lr=0.02, by_norm=self.by_norm)


@pytest.mark.parametrize(
    ("kind", "by_norm", "gather"),
    [
        (ReplacesWeights, False, False),
        (KeepsAView, False, False),
        (KeepsAView, True, False),
        (KeepsAList, True, False),
        (ReplacesWeights, True, True),
    ],
)
def test_equal_to_torch_ddp_to_the_bit_on_two_ranks(kind: type[InPlace], by_norm: bool, gather: Any) -> None:
    run = OneOf(kind=kind, by_norm=by_norm)
    config = DistributedDataParallelConfig(bucket_size=SOME, overlap_param_gather=gather)
    ours, reference = train_with_ours(run, 2, config), train_with_ddp(run, 2)
    assert_same(ours, reference)


@pytest.mark.parametrize(
    ("kind", "by_norm", "options", "ranks", "dtype"),
    [
        (ReplacesWeights, False, {}, 2, torch.float32),
        (ReplacesWeights, True, {"grad_buffer": "pooled"}, 2, torch.bfloat16),
        (ReplacesWeights, False, {"use_distributed_optimizer": False}, 2, torch.bfloat16),
        (KeepsAView, False, {}, 1, torch.bfloat16),
        (KeepsAView, False, {"grad_buffer": "pooled"}, 2, torch.float32),
        (KeepsAView, True, {"use_distributed_optimizer": False}, 2, torch.float32),
        (KeepsAList, True, {}, 2, torch.bfloat16),
    ],
    ids=str,
)
def test_step_memory_is_that_of_a_step_in_place(
    kind: type[InPlace], by_norm: bool, options: dict[str, Any], ranks: int, dtype: torch.dtype
) -> None:
    """Shards, main params that every rank has, and the Parameters themselves."""

    def run(rank: int, group: ProcessGroup) -> None:
        ends = []
        for one in (kind, InPlace):
            module, model = model_on(group, dtype, **options)
            optimizer = DistributedOptimizer(one(module.parameters(), lr=0.02, by_norm=by_norm), model)
            train(model, optimizer, rank, range(4), accumulate=2)
            ends.append(([param.detach().clone() for param in module.parameters()], optimizer.main_params()))
        assert same(*ends)

    run_ranks(ranks, run)
