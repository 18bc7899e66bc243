"""The group of ranks that have a pipeline's stages, beyond one wrapper's life."""

from __future__ import annotations

import gc
import weakref

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from megastrategy import DistributedDataParallel
from megastrategy.pipeline import Pipeline
from tests.support.pipelines import answers
from tests.support.processes import run_processes

from .test_pipeline_outputs import LENGTH, SAMPLES, WIDTH, Mean


def groups_before_and_after_a_dropped_wrapper(mesh: DeviceMesh) -> tuple[int, int]:
    net = Pipeline([nn.Linear(WIDTH, WIDTH), Mean()], [1, 1], loss=nn.MSELoss(), microbatches=2, mesh=mesh["pp"])

    def train() -> None:
        model = DistributedDataParallel(net, process_group=mesh.get_group("dp"))
        model(torch.ones(SAMPLES, LENGTH, WIDTH), target=torch.zeros(SAMPLES, 3)).backward()

    before = len(dist.distributed_c10d._world.pg_map)
    train()
    gc.collect()
    return before, len(dist.distributed_c10d._world.pg_map)


def test_a_pipeline_whose_wrapper_was_dropped_keeps_no_group() -> None:
    for answer in run_processes(4, answers, (groups_before_and_after_a_dropped_wrapper,), 2, timeout_s=200.0):
        before, after = answer["groups_before_and_after_a_dropped_wrapper"]
        assert before == after


def is_kept_after_close(mesh: DeviceMesh) -> bool:
    layers = [nn.Linear(WIDTH, WIDTH), Mean()]
    net = Pipeline(layers, [1, 1], loss=nn.MSELoss(), microbatches=2, mesh=mesh["pp"])
    model = DistributedDataParallel(net, process_group=mesh.get_group("dp"))
    model(torch.ones(SAMPLES, LENGTH, WIDTH), target=torch.zeros(SAMPLES, 3)).backward()
    kept = weakref.ref(net)
    gc.collect()
    gc.disable()
    try:
        model.close()
        del net, model, layers
        return kept() is not None
    finally:
        gc.enable()


def test_memory_of_a_closed_pipeline_is_free_before_garbage_is_collected() -> None:
    for answer in run_processes(4, answers, (is_kept_after_close,), 2, timeout_s=200.0):
        assert answer["is_kept_after_close"] is False
