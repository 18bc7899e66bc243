"""The connections that the engine's own gloo groups have, and when they end."""

from __future__ import annotations

import gc
import os
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup

from megastrategy import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from megastrategy.core import private_group
from megastrategy.core.collectives import make_collectives
from megastrategy.core.collectives.process_groups import destroy_group, part_of_group
from tests.support.processes import run_processes
from tests.support.ranks import run_ranks

CPU = torch.device("cpu")


def _describe_part() -> None:
    group = private_group(None, CPU)
    ranks = dist.get_process_group_ranks(group)
    part = part_of_group(group, ranks, "a part of a part", CPU)
    assert dist.get_backend_config(part) == dist.get_backend_config(group) == dist.get_backend_config(dist.group.WORLD)
    assert dist.get_backend(part) == "gloo"
    assert part._device_types == group._device_types
    for made in (part, group):
        assert made._get_backend(CPU).options._timeout == dist.group.WORLD._get_backend(CPU).options._timeout  # type: ignore[union-attr]
        destroy_group(made)
        assert made not in dist.distributed_c10d._world.pg_map


def test_private_group_equals_torchs() -> None:
    run_processes(2, _describe_part)


# --- models that are not closed --------------------------------------------------------------------------------------


def _open() -> tuple[int, int, int]:
    """Returns the numbers of threads, descriptors and of torch's process groups."""
    groups = len(dist.distributed_c10d._world.pg_map)
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd")), groups


def _train_and_drop(options: dict[str, Any], times: int) -> None:
    for _ in range(times):
        module = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
        model = DistributedDataParallel(module, DistributedDataParallelConfig(**options))
        optimizer = DistributedOptimizer(torch.optim.AdamW(module.parameters(), lr=0.01), model)
        optimizer.itself = optimizer  # type: ignore[attr-defined] # a circle of references, as users have them
        for _ in range(2):
            model(torch.ones(3, 6)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()


def _wrap_many(options: dict[str, Any]) -> tuple[tuple[int, int, int], ...]:
    _train_and_drop(options, 2)
    gc.collect()
    before = _open()
    _train_and_drop(options, 10)
    during = _open()
    _train_and_drop(options, 20)
    after = _open()
    gc.collect()
    return before, during, after, _open()


@pytest.mark.parametrize(
    ("size", "options"),
    [(1, {}), (2, {"use_distributed_optimizer": False}), (1, {"overlap_param_gather": True})],
    ids=str,
)
def test_dropped_models_keep_no_threads_or_groups(size: int, options: dict[str, Any]) -> None:
    """A loop over folds or trials wraps hundreds, and closes none; Python collects garbage, and the wrap does."""
    for before, during, after, collected in run_processes(size, _wrap_many, options):
        assert all(now <= once for now, once in zip(collected, before, strict=True))  # a thread may end a bit later
        most_groups = 12  # the wrap collects at 8, and one model has up to 4
        assert during[2] - before[2] <= most_groups
        assert after[2] - before[2] <= most_groups
        assert after[1] - before[1] <= 9 * most_groups
        assert after[0] - before[0] <= 4 * most_groups


def _wrap_with_optimizers_that_stay() -> tuple[int, ...]:
    """Optimizers that outlive their models keep the groups that their state needs, until it was given back."""
    kept = []
    module = nn.Linear(6, 5)
    for _ in range(3):
        model = DistributedDataParallel(module)
        kept.append(torch.optim.AdamW(module.parameters(), lr=0.01))
        optimizer = DistributedOptimizer(kept[-1], model)
        model(torch.ones(3, 6)).square().mean().backward()
        optimizer.step()
    del model, optimizer
    groups = [_open()[2]]
    for inner in kept:
        assert inner.state_dict()["state"][0]["exp_avg"].shape == (5, 6)
        groups.append(_open()[2])
    return tuple(group - groups[-1] for group in groups)


def test_groups_stay_while_an_optimizer_needs_them() -> None:
    assert run_processes(2, _wrap_with_optimizers_that_stay) == [(3, 2, 1, 0)] * 2


@pytest.mark.real_collectives("is about gloo's thread")
def test_collected_model_leaves_given_collectives() -> None:
    """One group serves all fits of a process, and an earlier fit's model may be collected within a later one."""

    def run(rank: int, group: ProcessGroup) -> None:
        shared = make_collectives(group, CPU)
        dropped = DistributedDataParallel(nn.Linear(3, 3), collectives=shared)
        dropped.itself = [dropped.engine]  # a circle, which only the collector of garbage ends
        dropped.engine.listener = dropped
        model = DistributedDataParallel(nn.Linear(3, 3), collectives=shared)
        model(torch.ones(2, 3)).sum().backward()
        worker = shared._worker
        assert worker is not None
        engine = weakref.ref(dropped.engine)
        del dropped
        while engine() is not None:  # another thread may be collecting
            gc.collect()
        assert shared._worker is worker
        model(torch.ones(2, 3)).sum().backward()
        model.close()

    run_ranks(2, run)
