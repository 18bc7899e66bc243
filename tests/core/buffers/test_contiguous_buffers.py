"""First gradients are copied into their bucket, not added to zeros; see contiguous_buffers' [Note: first gradients are
copied, not added to zeros]."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from megastrategy.core.buffers.contiguous_buffers import ContiguousGradBuffers
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megastrategy import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from tests.support.data_path import NEW
from tests.support.ranks import run_ranks

MODES: dict[str, dict[str, Any]] = {
    "scattered": {},
    "all-reduce": {"use_distributed_optimizer": False},
    "rounded": {"grad_wire_dtype": "bf16"},
}
X = torch.ones(3, 20)


class TwoLayers(nn.Module):
    """Layers of 20 x 20, which are copied, with biases, which are added to zeros; the second one may be left out."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.first, self.second = nn.Linear(20, 20), nn.Linear(20, 20)
        for param in self.parameters():
            param.data = torch.randn(param.shape, generator=generator)

    def forward(self, x: Tensor, uses_second: bool = True) -> Tensor:
        x = self.first(x)
        return (self.second(x) if uses_second else x).sum()


def wrap(group: ProcessGroup, **options: Any) -> tuple[TwoLayers, DistributedDataParallel, DistributedOptimizer]:
    module = TwoLayers()
    model = DistributedDataParallel(module, DistributedDataParallelConfig(bucket_size=500, **options), group)
    return module, model, DistributedOptimizer(torch.optim.SGD(module.parameters(), lr=0.0), model)


class Zeroed(TorchDispatchMode):
    """Counts the elements that are set to zero."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (torch.ops.aten.zero_, torch.ops.aten._foreach_zero_):
            self.numel += sum(leaf.numel() for leaf in tree_leaves(args))
        return func(*args, **(kwargs or {}))


@pytest.mark.skipif(NEW, reason="nothing is zeroed before a backward")
@pytest.mark.parametrize("mode", MODES)
def test_only_small_gradients_gaps_and_sums_are_zeroed(mode: str) -> None:
    def run(rank: int, group: ProcessGroup) -> None:
        module, model, optimizer = wrap(group, **MODES[mode])
        model(X).backward()
        optimizer.step()
        optimizer.zero_grad()
        buffers = model.engine.grad_buffers
        assert isinstance(buffers, ContiguousGradBuffers)
        with Zeroed() as zeroed:
            buffers.open()
        copied = module.first.weight.numel() + module.second.weight.numel()
        sums = sum(state.sums.numel() for state in buffers._buckets if state.sums is not None)
        assert zeroed.numel == sum(flat.numel() for flat in buffers.flats) - copied + sums
        model.close()

    run_ranks(2, run)


@pytest.mark.parametrize("mode", MODES)
def test_old_values_of_a_view_are_in_no_later_gradient(mode: str) -> None:
    """A layer that one rank leaves out adds nothing there, and one that all leave out has no gradient."""

    def run(rank: int, group: ProcessGroup) -> None:
        module, model, optimizer = wrap(group, **MODES[mode])
        model(X).backward()
        whole = model.full_grad(module.second.weight)
        assert whole is not None
        assert whole.any()
        optimizer.zero_grad()
        model(X, rank == 0).backward()
        half = model.full_grad(module.second.weight)
        assert half is not None
        assert torch.equal(half, whole / 2)
        optimizer.zero_grad()
        model(X, False).backward()
        assert model.full_grad(module.second.weight) is None
        model.close()

    run_ranks(2, run)


def test_microbatches_are_added_to_the_first_that_brought_one() -> None:
    def run(rank: int, group: ProcessGroup) -> None:
        module, model, optimizer = wrap(group)
        model(X).backward()
        once = model.full_grad(module.second.weight)
        assert once is not None
        for _ in range(2):
            optimizer.zero_grad()
            for uses_second in (False, True, False):
                with model.no_sync():
                    model(X, uses_second).backward()
            model(X).backward()
            twice = model.full_grad(module.second.weight)
            assert twice is not None
            assert torch.equal(twice, 2 * once)
        model.close()

    run_ranks(2, run)


def test_a_hook_of_the_users_changes_what_is_copied() -> None:
    """It runs before ours where it was registered before the model was wrapped."""

    def triple(param: Tensor) -> None:
        assert param.grad is not None
        param.grad.mul_(3.0)

    def run(rank: int, group: ProcessGroup) -> None:
        module = nn.Linear(20, 20)
        module.weight.register_post_accumulate_grad_hook(triple)
        model = DistributedDataParallel(module, process_group=group)
        optimizer = DistributedOptimizer(torch.optim.SGD(module.parameters(), lr=0.0), model)
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(1, 20)).sum().backward()
            grad = model.full_grad(module.weight)
            assert grad is not None
            assert torch.equal(grad, torch.full((20, 20), 3.0))
        model.close()

    run_ranks(2, run)
