"""The buffers of a pipeline's loss module, which the last stage computes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional

from megastrategy import DistributedDataParallel
from megastrategy.errors import StageError
from megastrategy.pipeline import Pipeline
from tests.support.pipelines import answers
from tests.support.processes import run_processes

from .test_pipeline_outputs import LENGTH, SAMPLES, WIDTH, Mean


class Counts(nn.Module):
    """A loss that keeps running statistics, and replaces one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("center", torch.zeros(3))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        self.count += 1
        self.center = 0.5 * self.center + 0.5 * output.detach().mean(0)
        return functional.mse_loss(output - self.center, target)


def losses_with_buffers(mesh: DeviceMesh) -> tuple[list[dict[str, Tensor]], str]:
    """By number of batches, and how a buffer that grows is refused."""
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH), Mean()]
    alone = copy.deepcopy(layers)
    net = Pipeline(layers, [1, 1], loss=Counts(), microbatches=2, mesh=mesh["pp"])
    one = Pipeline(alone, [2], loss=Counts(), microbatches=2)
    model = DistributedDataParallel(net, process_group=mesh.get_group("dp"))
    generator = torch.Generator().manual_seed(1)
    x, target = torch.randn(SAMPLES, LENGTH, WIDTH, generator=generator), torch.zeros(SAMPLES, 3)
    apart = []
    for _ in range(2):
        for pipeline in (model, one):
            pipeline.zero_grad()
            pipeline(x, target=target).backward()
            with torch.no_grad():
                pipeline(x, target=target)
        expected = dict(one.named_buffers())
        apart.append({name: (value - expected[name]).abs().max() for name, value in net.named_buffers()})
    loss: Any = net._loss
    loss.register_forward_hook(lambda module, *_: setattr(module, "center", torch.zeros(1)))
    with pytest.raises(StageError) as raised:
        model(x, target=target)
    model.close()
    return apart, str(raised.value)


def test_buffers_of_a_loss_are_the_last_stages_on_all_ranks() -> None:
    for answer in run_processes(4, answers, (losses_with_buffers,), 2, timeout_s=200.0):
        apart, refused = answer["losses_with_buffers"]
        for values in apart:
            assert list(values) == ["_loss.count", "_loss.center"]
            assert all(float(value) <= 1e-6 for value in values.values())
        assert "buffer 'center' of the pipeline's loss is [1] of float32" in refused
