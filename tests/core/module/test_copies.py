"""Copies of a wrapped model are plain and independent, and closing leaves a plain module, whatever became of it."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megastrategy import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from megastrategy.core.errors import ClosedError, DirectUseError
from tests.support.gradients import batch
from tests.support.models import two_layers
from tests.support.ranks import run_ranks

Copy = Callable[[Any], Any]


def by_pickle(model: Any) -> Any:
    return pickle.loads(pickle.dumps(model))


class Ours(DistributedDataParallel):
    """Wrapped, with an optimizer; a user's subclass with an attribute of its own."""

    def __init__(self, module: nn.Module, group: ProcessGroup, sharded: bool = True) -> None:
        config = DistributedDataParallelConfig(bucket_size=100, use_distributed_optimizer=sharded)
        super().__init__(module, config, group)
        self.epoch = 3


def make_optimizer(model: DistributedDataParallel) -> DistributedOptimizer:
    return DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.01), model)


def train(model: Any, rank: int) -> None:
    optimizer = make_optimizer(model)
    for step in range(3):
        optimizer.zero_grad()
        model(batch(rank, step)).square().sum().backward()
        optimizer.step()


def weights_of(module: nn.Module) -> list[Tensor]:
    return [param.detach().clone() for param in module.parameters()]


def assert_owns_its_memory(param: nn.Parameter) -> None:
    assert param.untyped_storage().nbytes() == param.numel() * param.element_size()
    assert param.grad is None
    assert param.grad_dtype == param.dtype
    assert not param._post_accumulate_grad_hooks


@pytest.mark.parametrize(("copied", "sharded"), [(copy.deepcopy, True), (by_pickle, False)])
def test_copy_of_wrapper_is_a_plain_copy(copied: Copy, sharded: bool) -> None:
    """Made while a window of accumulation is open; what happens to either later is nothing to the other."""

    def run(rank: int, group: ProcessGroup) -> None:
        model = Ours(two_layers().bfloat16(), group, sharded)
        optimizer = make_optimizer(model)
        x = torch.ones(2, 10, dtype=torch.bfloat16)
        model(x).square().sum().backward()
        optimizer.step()
        with model.no_sync():
            model(x).square().sum().backward()
        twin = copied(model)
        before, outputs = weights_of(model), model.module(x)
        assert type(twin) is Ours
        assert (twin.epoch, twin.config) == (3, model.config)
        assert twin.state_dict().keys() == model.state_dict().keys()
        assert all(map(torch.equal, weights_of(twin), before))
        for param in twin.parameters():
            assert_owns_its_memory(param)
        model(x).square().sum().backward()  # into the gradients of the first half
        optimizer.step()
        assert not torch.equal(weights_of(model)[0], before[0])
        assert all(map(torch.equal, weights_of(twin), before))
        assert torch.equal(twin.eval()(x), outputs)
        with torch.no_grad():
            assert torch.equal(twin.train()(x), outputs)
            twin.module[0].weight.zero_()
        after = weights_of(model)
        twin.zero_grad()
        twin.close()
        assert all(map(torch.equal, weights_of(model), after))

    run_ranks(2, run)


@pytest.mark.parametrize("copied", [copy.deepcopy, by_pickle])
def test_a_copy_refuses_to_train_until_it_is_wrapped(copied: Copy) -> None:
    """No engine would reduce its gradients. Wrapped, it trains as the module itself would."""

    def run(rank: int, group: ProcessGroup) -> None:
        model = Ours(two_layers(), group)
        train(model, rank)
        twin = copied(model)
        uses: list[Callable[[], Any]] = [
            lambda: twin(torch.ones(2, 10)),
            lambda: twin.full_grad(twin.module[0].weight),
            lambda: twin.grad_norms(),
            lambda: twin.watch_backward(torch.ones(1)),
            lambda: twin.include_trainable(),
            lambda: twin.microbatch,
        ]
        for use in uses:
            with pytest.raises(ClosedError, match=r"(?s)copy.*wrap the module again"):
                use()
        model.close()
        results = []
        for module in (twin.module, model.module):
            again = Ours(module, group)
            train(again, rank)
            results.append(weights_of(again))
        assert all(map(torch.equal, *results))

    run_ranks(2, run)


# --- optimizers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("copied", "size", "sharded", "dtype"),
    [
        (copy.copy, 2, True, torch.float32),
        (copy.deepcopy, 2, False, torch.bfloat16),
        (pickle.dumps, 1, True, torch.bfloat16),
    ],
    ids=["sharded", "main params", "one rank"],
)
def test_copy_of_shards_or_main_params_is_refused(
    copied: Callable[[Any], Any], size: int, sharded: bool, dtype: torch.dtype
) -> None:
    def run(rank: int, group: ProcessGroup) -> None:
        model = Ours(two_layers().to(dtype), group, sharded)
        optimizer = make_optimizer(model)
        for _ in range(2):
            model(torch.ones(2, 10, dtype=dtype)).float().square().mean().backward()
            optimizer.step()
            for original in (optimizer, optimizer.optimizer):
                with pytest.raises(DirectUseError, match=r"cannot be copied.*copy its state_dict\(\)"):
                    copied(original)

    run_ranks(size, run)
