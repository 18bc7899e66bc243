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
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn

from megastrategy import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from megastrategy.core.errors import ClosedError, DirectUseError
from tests.support.gradients import batch
from tests.support.models import two_layers
from tests.support.ranks import run_ranks
from tests.support.training import assert_same_state

Copy = Callable[[Any], Any]
ways_of_copying = pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["deepcopy", "pickle"]
)
both_modes = pytest.mark.parametrize("sharded", [True, False], ids=["reduce-scatter", "all-reduce"])


class Ours(DistributedDataParallel):
    """Wrapped, with an optimizer; a user's subclass with an attribute of its own."""

    def __init__(self, module: nn.Module, group: ProcessGroup, sharded: bool = True) -> None:
        config = DistributedDataParallelConfig(bucket_size=100, use_distributed_optimizer=sharded)
        super().__init__(module, config, group)
        self.epoch = 3


def make_optimizer(model: DistributedDataParallel) -> DistributedOptimizer:
    return DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.01), model)


def train(model: Any, rank: int, after_step: Callable[[], None] = lambda: None) -> None:
    optimizer = make_optimizer(model)
    for step in range(3):
        optimizer.zero_grad()
        model(batch(rank, step)).square().sum().backward()
        optimizer.step()
        after_step()


def weights_of(module: nn.Module) -> list[Tensor]:
    return [param.detach().clone() for param in module.parameters()]


def assert_owns_its_memory(param: nn.Parameter) -> None:
    assert param.untyped_storage().nbytes() == param.numel() * param.element_size()
    assert param.grad is None
    assert param.grad_dtype == param.dtype
    assert not param._post_accumulate_grad_hooks


@both_modes
@ways_of_copying
def test_a_copy_of_the_wrapper_is_a_plain_copy_of_the_module(copied: Copy, sharded: bool) -> None:
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


@ways_of_copying
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
            with pytest.raises(ClosedError, match=r"copy.*wrap the module again"):
                use()
        model.close()
        results = []
        for module in (twin.module, model.module):
            again = Ours(module, group)
            train(again, rank)
            results.append(weights_of(again))
        assert all(map(torch.equal, *results))

    run_ranks(2, run)


@both_modes
def test_an_average_of_the_wrapper_is_that_of_the_module(sharded: bool) -> None:
    """``AveragedModel`` copies what it is given, and is updated while training goes on."""

    def run(rank: int, group: ProcessGroup) -> list[list[Tensor]]:
        results = []
        for of_wrapper in (True, False):
            module = nn.Sequential(*two_layers(), nn.BatchNorm1d(7))
            model = Ours(module, group, sharded)
            average = AveragedModel(model if of_wrapper else module, multi_avg_fn=get_ema_multi_avg_fn(0.7))
            train(model, rank, lambda: average.update_parameters(model if of_wrapper else module))  # noqa: B023
            assert not torch.equal(weights_of(average)[0], weights_of(model)[0])
            update_bn([batch(rank, 3), batch(rank, 4)], average)
            results.append(list(average.state_dict().values()))
            model.close()
        return results

    for of_wrapper, of_module in run_ranks(2, run):
        assert all(map(torch.equal, of_wrapper, of_module))


# --- optimizers ------------------------------------------------------------------------------------------------------


def start(rank: int, group: ProcessGroup, **options: Any) -> tuple[Any, Any, Any]:
    """A model, an optimizer and a scheduler that have trained two steps."""
    dtype = options.pop("dtype", torch.float32)
    config = DistributedDataParallelConfig(bucket_size=100, **options)
    model = DistributedDataParallel(two_layers().to(dtype), config, group)
    adam = torch.optim.Adam(model.parameters(), lr=0.01)
    optimizer = DistributedOptimizer(adam, model)
    scheduler = torch.optim.lr_scheduler.StepLR(adam, 1, gamma=0.5)
    for step in range(2):
        one_step(model, optimizer, scheduler, rank, step)
    return model, optimizer, scheduler


def one_step(model: Any, optimizer: Any, scheduler: Any, rank: int, step: int) -> None:
    optimizer.zero_grad()
    dtype = next(model.parameters()).dtype
    model(batch(rank, step).to(dtype)).float().square().mean().backward()
    optimizer.step()
    scheduler.step()


@pytest.mark.parametrize(("size", "sharded"), [(1, True), (1, False), (2, False)])
@ways_of_copying
def test_a_copy_of_a_whole_optimizer_steps_as_the_original_would(copied: Copy, size: int, sharded: bool) -> None:
    """Copied together with its module and scheduler, it goes on alone with the same batches."""

    def run(rank: int, group: ProcessGroup) -> None:
        model, optimizer, scheduler = start(rank, group, use_distributed_optimizer=sharded)
        before = copy.deepcopy(optimizer.state_dict())
        module, twin, its_scheduler = copied((model.module, optimizer, scheduler))
        assert type(twin) is torch.optim.Adam
        assert its_scheduler.optimizer is twin
        assert_same_state(twin.state_dict(), before)
        assert all(a is b for a, b in zip(module.parameters(), twin.param_groups[0]["params"], strict=True))
        for step in range(2, 5):  # every rank takes rank 0's batches, so that a mean over ranks changes nothing
            one_step(module, twin, its_scheduler, 0, step)
        assert_same_state(optimizer.state_dict(), before)
        for step in range(2, 5):
            one_step(model, optimizer, scheduler, 0, step)
        assert all(map(torch.equal, weights_of(module), weights_of(model.module)))
        assert_same_state(twin.state_dict(), optimizer.state_dict())
        assert its_scheduler.get_last_lr() == scheduler.get_last_lr()

    run_ranks(size, run)


HAVE_SHARDS = [
    (2, {}),
    (2, {"dtype": torch.bfloat16, "use_distributed_optimizer": False}),
    (1, {"dtype": torch.bfloat16}),
]


@pytest.mark.parametrize(("size", "options"), HAVE_SHARDS, ids=["sharded", "main params", "one rank"])
@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_copy_of_shards_or_main_params_is_refused(
    copied: Callable[[Any], Any], size: int, options: dict[str, Any]
) -> None:
    def run(rank: int, group: ProcessGroup) -> None:
        model, optimizer, scheduler = start(rank, group, **options)
        for original in (optimizer, optimizer.optimizer):
            with pytest.raises(DirectUseError, match=r"cannot be copied.*copy its state_dict\(\)"):
                copied(original)
        one_step(model, optimizer, scheduler, rank, 2)
        assert len(optimizer.state_dict()["param_groups"][0]["params"]) == 4

    run_ranks(size, run)


# --- closing ---------------------------------------------------------------------------------------------------------
