"""The broadcast of a module's buffers, which a forward begins with, while new weights are still on their way."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import nn

from megastrategy import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from tests.support.processes import run_processes

LIMIT_S = 20.0


def with_buffers() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))


def num_groups() -> int:
    return len(torch.distributed.distributed_c10d._world.pg_map)


def train_a_step(model: DistributedDataParallel, optimizer: DistributedOptimizer, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    model(torch.randn(5, 6, generator=generator)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def wrapped(**options: Any) -> tuple[DistributedDataParallel, DistributedOptimizer]:
    config = DistributedDataParallelConfig(overlap_param_gather=True, **options)
    model = DistributedDataParallel(with_buffers(), config)
    return model, DistributedOptimizer(torch.optim.Adam(model.parameters()), model)


def hold_gathers_until_the_module_runs() -> None:
    model, optimizer = wrapped()
    # The outermost module has no parameters of its own: it runs before any is waited for.
    module_runs = threading.Event()
    model.module.register_forward_pre_hook(lambda *_: module_runs.set())
    rings: Any = model.engine.collectives._rings  # type: ignore[attr-defined]
    gather = rings.all_gather

    def held(tensor: torch.Tensor) -> None:
        if not module_runs.wait(LIMIT_S):
            raise RuntimeError("the module's buffers waited for the weights")
        gather(tensor)

    train_a_step(model, optimizer, torch.distributed.get_rank())
    model.finish_param_gather()
    model(torch.ones(5, 6)).sum().backward()
    rings.all_gather = held
    module_runs.clear()
    optimizer.step()
    model(torch.ones(5, 6))
    model.close()


def test_module_buffers_do_not_wait_for_weights() -> None:
    run_processes(2, hold_gathers_until_the_module_runs)


def count_groups() -> list[int]:
    before, made = num_groups(), []
    for options in ({}, {"broadcast_buffers": False}, {"use_distributed_optimizer": False}):
        model, optimizer = wrapped(**options)
        made.append(num_groups() - before)
        model.close()
        optimizer.optimizer.state_dict()  # gathers the state, and ends the groups
    assert num_groups() == before
    return made


def test_whoever_needs_no_second_group_has_none() -> None:
    assert run_processes(2, count_groups) == [[2, 1, 1]] * 2
