"""A module that is wrapped again is the new wrapper's, as under torch DDP, and so is a layer that two models share."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megastrategy import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from megastrategy.core.errors import ClosedError
from tests.support.models import two_layers
from tests.support.ranks import run_ranks

both_modes = pytest.mark.parametrize("sharded", [True, False], ids=["shards", "all-reduce"])


class Shared(nn.Module):
    """A head of its own on an encoder that other models have too."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder, self.head = encoder, nn.Linear(7, 2)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.head(self.encoder(x))
        return output


def wrap(module: nn.Module, group: ProcessGroup, sharded: bool) -> DistributedDataParallel:
    return DistributedDataParallel(module, DistributedDataParallelConfig(use_distributed_optimizer=sharded), group)


@pytest.mark.parametrize(("size", "sharded"), [(1, True), (2, False)])
def test_a_wrapper_that_has_lost_its_module_says_so(size: int, sharded: bool) -> None:
    def run(rank: int, group: ProcessGroup) -> None:
        module = two_layers()
        first = wrap(module, group, sharded)
        second = wrap(module, group, sharded)
        assert first.is_closed
        with pytest.raises(ClosedError, match=r"(?s)was wrapped again since.*Call the newest wrapper"):
            first(torch.ones(1, 10))
        second(torch.ones(1, 10)).sum().backward()
        grads = {name: second.full_grad(param) for name, param in module.named_parameters()}
        assert all(grad is not None for grad in grads.values())
        second.close()
        second.close()

    run_ranks(size, run)


@pytest.mark.parametrize(("size", "sharded"), [(1, True), (2, False)])
def test_layer_of_dropped_model_is_taken_over(size: int, sharded: bool) -> None:
    """The old wrapper is in a circle of references, as a LightningModule and its Trainer are."""

    def run(rank: int, group: ProcessGroup) -> None:
        encoder = two_layers()
        first = wrap(Shared(encoder), group, sharded)
        first.itself = [first]
        optimizer: Any = DistributedOptimizer(torch.optim.AdamW(first.parameters(), lr=0.1), first)

        del first
        second = wrap(Shared(encoder), group, sharded)
        assert optimizer.is_closed
        new = DistributedOptimizer(torch.optim.SGD(second.parameters(), lr=0.1), second)
        before = encoder[0].weight.detach().clone()
        second.module.head(second.module.encoder(torch.ones(1, 10))).sum().backward()
        new.step()
        assert not torch.equal(encoder[0].weight, before)

    run_ranks(size, run)


def test_a_wrapper_is_no_part_of_another_one() -> None:
    def run(rank: int, group: ProcessGroup) -> None:
        model = wrap(two_layers(), group, sharded=True)
        with pytest.raises(ValueError, match=r"the module is wrapped already.*\(its \.module\)"):
            wrap(model, group, sharded=True)
        with pytest.raises(ValueError, match="the submodule '0' is wrapped already"):
            wrap(nn.Sequential(model), group, sharded=True)
        model(torch.ones(1, 10)).sum().backward()
        model.close()
        wrap(model, group, sharded=True)

    run_ranks(2, run)
