"""Bad input and bad luck: each ends in an error that names the culprit and the way out."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup

from megastrategy import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from megastrategy.core.errors import (
    ClosedError,
    DirectUseError,
    LayoutMismatchError,
    OptimizerNotShardableError,
    ParameterChangedError,
)
from tests.support import processes
from tests.support.engines import engines
from tests.support.models import two_layers
from tests.support.optimizers import GloballyNormalised
from tests.support.ranks import run_ranks, try_ranks


def expect_on_all(size: int, error: type[Exception], message: str, run: object) -> None:
    """Every rank ends in this error; one after the other would hang."""
    for rank, outcome in enumerate(try_ranks(size, run, timeout_s=10)):  # type: ignore[arg-type]
        assert isinstance(outcome, error), f"rank {rank}: {outcome!r}"
        with pytest.raises(error, match=message):
            raise outcome


def test_other_shapes_name_the_first_difference() -> None:
    def run(rank: int, group: ProcessGroup) -> None:
        DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4 + rank)), process_group=group)

    expect_on_all(2, LayoutMismatchError, r"rank 0 has \['1.weight', \[4, 4\].*rank 1 has \['1.weight', \[5, 4\]", run)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("use_distributed_optimizer", r"number of ranks and of shards: rank 0 has \[2, 2\], rank 1 has \[2, 1\]"),
        ("find_unused_parameters", r"option.*rank 0 has \['find_unused_parameters', True\]"),
    ],
)
def test_options_that_differ_between_ranks(option: str, message: str) -> None:
    def run(rank: int, group: ProcessGroup) -> None:
        DistributedDataParallel(two_layers(), DistributedDataParallelConfig(**{option: rank == 0}), group)

    expect_on_all(2, LayoutMismatchError, message, run)


@pytest.mark.parametrize("make", [torch.optim.LBFGS, GloballyNormalised], ids=lambda kind: kind.__name__)
def test_unshardable_optimizers_name_the_way_out(make: type[torch.optim.Optimizer]) -> None:
    def run(rank: int, group: ProcessGroup) -> None:
        model = DistributedDataParallel(two_layers(), process_group=group)
        DistributedOptimizer(make(model.parameters()), model)

    expect_on_all(
        2, OptimizerNotShardableError, f"{make.__name__} cannot be sharded.*use_distributed_optimizer=False", run
    )


def test_optimizer_of_other_params_is_refused() -> None:
    def run(rank: int, group: ProcessGroup) -> None:
        model = DistributedDataParallel(two_layers(), process_group=group)
        theirs = two_layers()
        with pytest.raises(ValueError, match=r"no parameter of this SGD .*parameter 0 of group 0.*Pass model"):
            DistributedOptimizer(torch.optim.SGD(theirs.parameters(), lr=0.1), model)
        assert not model.engine.has_optimizer, "or it would not be noticed that nothing trains it"
        other = DistributedDataParallel(theirs, process_group=group)
        params = [*model.parameters(), *theirs.parameters()]
        with pytest.raises(
            ValueError,
            match=r"parameter 4 of group 0.* to another wrapped model.*_optimizer=False\) for",
        ):
            DistributedOptimizer(torch.optim.SGD(params, lr=0.1), model)
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
        with pytest.raises(ValueError, match=r"parameter 0 of group 1"):
            optimizer.add_param_group({"params": list(other.parameters())})
        assert len(optimizer.param_groups) == 1

    run_ranks(2, run)


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate parameters")
def test_parameter_listed_twice_is_refused() -> None:
    def run(rank: int, group: ProcessGroup) -> None:
        model = DistributedDataParallel(two_layers(), process_group=group)
        params = [*model.parameters()]
        with pytest.raises(ValueError, match=r"parameter 4 of group 0.*is in the groups twice"):
            DistributedOptimizer(torch.optim.SGD([*params, params[2]], lr=0.1), model)

    run_ranks(2, run)


def test_what_is_no_optimizer_or_no_wrapped_model() -> None:
    def run(rank: int, group: ProcessGroup) -> None:
        module = two_layers()
        sgd = torch.optim.SGD(module.parameters(), lr=0.1)
        with pytest.raises(ValueError, match="got Sequential: wrap the module first"):
            DistributedOptimizer(sgd, module)  # type: ignore[arg-type]
        model = DistributedDataParallel(module, process_group=group)
        optimizer = DistributedOptimizer(sgd, model)
        with pytest.raises(ValueError, match="not distributed yet"):
            DistributedOptimizer(optimizer, model)

    run_ranks(1, run)


def test_direct_use_of_optimizer_is_refused() -> None:
    def run(rank: int, group: ProcessGroup) -> None:
        model = DistributedDataParallel(two_layers(), process_group=group)
        adam = torch.optim.Adam(model.parameters())
        optimizer = DistributedOptimizer(adam, model)
        with pytest.raises(DirectUseError, match="DistributedOptimizer"):
            adam.state_dict()
        with pytest.raises(DirectUseError, match="DistributedOptimizer"):
            adam.load_state_dict(optimizer.state_dict())
        with pytest.raises(DirectUseError, match="DistributedOptimizer"):
            adam.step()

    run_ranks(2, run)


def test_modules_that_cannot_be_laid_out() -> None:
    def run(rank: int, group: ProcessGroup) -> None:
        with torch.device("meta"):
            meta = nn.Linear(2, 2)
        with pytest.raises(ValueError, match="'weight' is on the meta device"):
            DistributedDataParallel(meta, process_group=group)
        with pytest.raises(ValueError, match="'weight' is uninitialised"):
            DistributedDataParallel(nn.LazyLinear(2), process_group=group)

    run_ranks(1, run)


def test_unfreezing_other_params_is_refused() -> None:
    def run(rank: int, group: ProcessGroup) -> None:
        module = two_layers()
        module[0].requires_grad_(False)
        model = DistributedDataParallel(module, process_group=group)
        (module[0] if rank == 0 else module[0].weight).requires_grad_(True)
        model(torch.ones(1, 10))

    expect_on_all(2, LayoutMismatchError, r"rank 0 has \['0\.bias', .*rank 1 has none", run)


def test_replaced_param_is_named_and_moved_one_found() -> None:
    def run(rank: int, group: ProcessGroup) -> None:
        module = two_layers()
        model = DistributedDataParallel(module, process_group=group)
        weight = module[0].weight
        del module[0].weight  # what pruning and weight norm do: the same object under another name
        module[0].weight_orig = weight
        module[0].weight = weight * 1.0
        model(torch.ones(1, 10)).sum().backward()
        assert model.full_grad(weight) is not None
        module.load_state_dict(two_layers().state_dict(), assign=True, strict=False)
        with pytest.raises(ParameterChangedError, match=r"(?s)'0\.bias' was replaced.*assign=False"):
            model(torch.ones(1, 10))

    run_ranks(2, run)


def test_use_after_close_is_an_error() -> None:
    def run(rank: int, group: ProcessGroup) -> None:
        model = DistributedDataParallel(two_layers(), process_group=group)
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
        model(torch.ones(1, 10)).sum().backward()
        model.close()
        with pytest.raises(ClosedError, match="wrap the module again and make a new DistributedOptimizer"):
            model(torch.ones(1, 10))
        with pytest.raises(ClosedError, match="wrap the module again"):
            optimizer.grad_norm()

    run_ranks(2, run)


def test_shared_memory_of_params_is_named() -> None:
    def run(rank: int, group: ProcessGroup) -> None:
        def wrap(module: nn.Module, sharded: bool = True) -> None:
            DistributedDataParallel(module, DistributedDataParallelConfig(use_distributed_optimizer=sharded), group)

        module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        module[1].weight.data = module[0].weight.data
        with pytest.raises(ValueError, match=r"'0\.weight' and '1\.weight' share memory.*b\.weight = a\.weight"):
            wrap(module)
        viewed = nn.Linear(4, 4)
        viewed.register_buffer("first_row", viewed.weight.detach()[0])
        with pytest.raises(ValueError, match="first_row"):
            wrap(viewed)
        wrap(viewed, sharded=False)  # parameters stay where they are, so nothing parts

    run_ranks(2, run)


def test_memory_shared_across_another_tensor_is_found() -> None:
    """A frozen tensor that spans a buffer and then a parameter: neighbours in memory alone would not tell."""

    def run(rank: int, group: ProcessGroup) -> None:
        module = nn.Module()
        whole = torch.zeros(100)
        module.register_buffer("small", whole[:2])
        module.whole = nn.Parameter(whole, requires_grad=False)
        module.part = nn.Parameter(torch.zeros(1))
        module.part.data = whole[50:60]
        with pytest.raises(ValueError, match="'whole' and 'part' share memory"):
            DistributedDataParallel(module, process_group=group)

    run_ranks(2, run)


def killed_in_a_step() -> None:
    torch.manual_seed(0)
    model = DistributedDataParallel(two_layers())
    optimizer = DistributedOptimizer(torch.optim.AdamW(model.parameters()), model)
    for step in range(3):
        optimizer.zero_grad()
        if (step, dist.get_rank()) == (2, 1):
            model.module[0].weight.register_hook(lambda grad: os.kill(os.getpid(), signal.SIGKILL))
        model(torch.ones(2, 10)).sum().backward()
        optimizer.step()


def test_killed_process_ends_the_others() -> None:
    """Real processes and SIGKILL, in the middle of a step."""
    start = time.monotonic()
    with pytest.raises(AssertionError) as raised:
        processes.run_processes(2, killed_in_a_step, timeout_s=60.0)
    assert time.monotonic() - start < 45
    survivor, killed = str(raised.value).split("\nrank 1:")
    assert "the process ended without a result" in killed
    assert "CollectiveError: rank 0 of 2" in survivor


def test_without_torch_distributed_the_way_out_is_said() -> None:
    with pytest.raises(ValueError, match=r"init_process_group.*process_group"):
        DistributedDataParallel(two_layers())


# --- parameters in shared memory, which other processes may read ------------------------------------------------------


def test_params_in_shared_memory_are_refused() -> None:
    """When the model is wrapped; before the first backward, at whose end they move into a buffer; and after it."""

    def run(rank: int, group: ProcessGroup) -> None:
        module = two_layers()
        with pytest.raises(ValueError, match=r"'0\.weight' is in shared memory.*use_distributed_optimizer=False"):
            DistributedDataParallel(two_layers().share_memory(), process_group=group)
        model = DistributedDataParallel(module, process_group=group)
        optimizer = DistributedOptimizer(torch.optim.SGD(module.parameters(), lr=0.1), model)
        before = module[0].weight.data
        module[0].weight.data = before.clone().share_memory_()
        with pytest.raises(ValueError, match=r"'0\.weight' is in shared memory"):
            model(torch.ones(2, 10))
        module[0].weight.data = before
        model(torch.ones(2, 10)).sum().backward()
        module.share_memory()
        with pytest.raises(ParameterChangedError, match=r"'0\.weight' was moved into shared memory"):
            optimizer.step()

    run_ranks(2, run)


def test_all_reduce_leaves_parameters_shared() -> None:
    def run(rank: int, group: ProcessGroup) -> None:
        module = two_layers().share_memory()
        shared = [param.detach() for param in module.parameters()]
        config = DistributedDataParallelConfig(use_distributed_optimizer=False)
        model = DistributedDataParallel(module, config, group)
        optimizer = DistributedOptimizer(torch.optim.SGD(module.parameters(), lr=0.1), model)
        model(torch.ones(2, 10)).sum().backward()
        optimizer.step()
        for param, tensor in zip(module.parameters(), shared, strict=True):
            assert param.data_ptr() == tensor.data_ptr()
            assert param.is_shared()

    run_ranks(2, run)


# --- options that differ between ranks: named in the first backward after a step --------------------------------------


MODES = engines("reduce-scatter", "all-reduce", "pooled", "forward")


def backward(model: nn.Module, rank: int) -> None:
    model.zero_grad()
    model(torch.full((2, 8), 1.0 + rank)).square().mean().backward()


@pytest.mark.parametrize("options", MODES.values(), ids=MODES)
def test_rank_local_rate_raises(options: dict[str, Any]) -> None:
    def run(rank: int, group: ProcessGroup) -> None:
        model = DistributedDataParallel(nn.Linear(8, 4), DistributedDataParallelConfig(**options), group)
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.25), model)
        for rate in (0.25, 0.125, 0.0625 if rank == 1 else 0.125):
            optimizer.param_groups[0]["lr"] = rate
            backward(model, rank)
            optimizer.step()
        with pytest.raises(LayoutMismatchError, match=r"(?s)rank 0: \[0\.125, .*rank 1: \[0\.0625, .*ReduceLROn"):
            backward(model, rank)

    run_ranks(2, run)


OPTIONS_BY_RANK: dict[str, tuple[Any, Any]] = {
    "betas": ((0.9, 0.99), (0.9, 0.95)),
    "lr": (torch.tensor(0.25), torch.tensor(0.125)),
}


@pytest.mark.parametrize("option", OPTIONS_BY_RANK)
def test_rank_local_option_raises(option: str) -> None:
    def run(rank: int, group: ProcessGroup) -> None:
        model = DistributedDataParallel(nn.Linear(8, 4), process_group=group)
        optimizer = DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.25), model)
        optimizer.param_groups[0][option] = OPTIONS_BY_RANK[option][rank]
        backward(model, rank)
        optimizer.step()
        with pytest.raises(LayoutMismatchError, match="stepped with different options"):
            backward(model, rank)

    run_ranks(2, run)


def test_option_nan_on_all_ranks_is_equal() -> None:
    """Each NaN has a hash of its own."""

    def run(rank: int, group: ProcessGroup) -> None:
        model = DistributedDataParallel(nn.Linear(8, 4), process_group=group)
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.25), model)
        for rate in (0.25, float("nan"), 0.25):
            optimizer.param_groups[0]["lr"] = rate
            backward(model, rank)
            optimizer.step()

    run_ranks(2, run)
