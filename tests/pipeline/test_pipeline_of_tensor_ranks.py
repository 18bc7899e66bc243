"""Stages whose layers are cut over tensor ranks, among the things that a training loop does: what one rank finds, all
ranks of the model hear. That they train as one process does is in test_pipeline."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from megastrategy import DistributedDataParallel, DistributedOptimizer
from megastrategy.errors import LayoutMismatchError, NonFiniteGradError, ReplicaMismatchError
from megastrategy.pipeline import Pipeline
from tests.support.pipelines import ROUNDING, Case, Trainee, answers, loss_of, make_layers, train_alone
from tests.support.processes import run_processes
from tests.support.tensor_parallel import adamw

from .test_pipeline_rules import forward, inf_in_one_stage, message, unchanged, weights

CASE = Case((2, 4), tied=True, steps=3, sequence_parallel=True)
LAST_OF_FIRST_STAGE, LAST = 1, 3
"""Ranks of the mesh of 2 stages x 1 x 2 tensor ranks: each is its stage's second tensor rank."""


def nan_in_one_stage(mesh: DeviceMesh) -> tuple[str, bool, bool]:
    """The error, whether weights are what they were, and whether training goes on afterwards."""
    trainee = Trainee.make(mesh, Case((2, 4), options=(("check_for_nan_in_grad", True),)))
    trainee.train(range(1))
    before = weights(trainee)
    handle = None
    if dist.get_rank() == LAST:
        param = dict(trainee.net.named_parameters())["layers.3.up.weight"]
        handle = param.register_hook(lambda grad: grad * float("nan"))
    text = message(NonFiniteGradError, lambda: forward(trainee))
    dropped = all(param.grad is None for param in trainee.net.parameters())
    same = unchanged(trainee, before) and dropped
    if handle is not None:
        handle.remove()
    goes_on = trainee.train(range(1, 2)).losses[0] > 0
    trainee.model.close()
    return text, same, goes_on


def inf_on_one_rank(mesh: DeviceMesh) -> tuple[float, bool]:
    """A gradient of a part that no other rank has."""
    return inf_in_one_stage(mesh, CASE, LAST_OF_FIRST_STAGE)


def replicas_that_part(mesh: DeviceMesh) -> tuple[str, str]:
    """Every rank's error for two replicas that diverge: a norm's weight inside one tensor group, and a tied weight's
    part between the stages, on one tensor rank."""
    told = []
    for rank, name in ((LAST, "layers.3.norm.weight"), (LAST, "layers.5.weight")):
        trainee = Trainee.make(mesh, CASE)
        if dist.get_rank() == rank:
            with torch.no_grad():
                param = dict(trainee.net.named_parameters())[name]
                getattr(param, "_local_tensor", param).add_(1.0)
        told.append(message(ReplicaMismatchError, trainee.model.check_replicas))
        trainee.model.close()
    return told[0], told[1]


def stage_without_cuts(mesh: DeviceMesh) -> tuple[float, float]:
    """How far norms and weights are from one process where only the last stage's layers are cut."""
    case = Case((4, 2), steps=3)
    layers = make_layers(case)
    parallelize_module(layers[4], mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    net = Pipeline(layers, case.split, loss=loss_of, microbatches=4, mesh=mesh["pp", "tp"])
    model = DistributedDataParallel(net, process_group=mesh.get_group("dp"))
    trainee = Trainee(case, net, model, DistributedOptimizer(adamw(model.parameters()), model), 0)
    found, alone = trainee.train(range(3)), train_alone(case, 1)
    model.close()
    norms = max(abs(own - other) / other for own, other in zip(found.norms, alone.norms, strict=True))
    return norms, max(float((w - alone.weights[name]).abs().max()) for name, w in found.weights.items())


def misuse(mesh: DeviceMesh) -> dict[str, str]:
    """The errors' words."""
    said = {}
    plain = Pipeline(make_layers(CASE, mesh["tp"]), CASE.split, loss=loss_of, microbatches=4, mesh=mesh["pp"])
    wrap = lambda net: DistributedDataParallel(net, process_group=mesh.get_group("dp"))  # noqa: E731
    said["cut, and no tensor ranks"] = message(ValueError, lambda: wrap(plain))
    build = lambda given: Pipeline(make_layers(CASE), CASE.split, loss=loss_of, microbatches=4, mesh=given)  # noqa: E731
    said["three dimensions"] = message(ValueError, lambda: build(mesh))
    nameless = init_device_mesh("cpu", (2, 2))
    said["no names"] = message(ValueError, lambda: build(nameless))
    # The tied weight is cut on the last stage alone, so that its copies do not match.
    layers: list[nn.Module] = make_layers(CASE)
    parallelize_module(layers[5], mesh["tp"], ColwiseParallel())
    tied = Pipeline(make_layers(CASE), CASE.split, loss=loss_of, microbatches=4, mesh=mesh["pp", "tp"])
    if mesh.get_local_rank("pp") == 1:
        tied.layers[5] = layers[5]
    said["copies cut otherwise"] = message(LayoutMismatchError, lambda: wrap(tied))
    return said


ASKED = (nan_in_one_stage, inf_on_one_rank, replicas_that_part, stage_without_cuts, misuse)


@pytest.fixture(scope="module")
def answered() -> list[dict[str, Any]]:
    """By rank."""
    return run_processes(4, answers, ASKED, 2, 2, timeout_s=400.0)


def test_nan_on_one_rank_stops_all(answered: list[dict[str, Any]]) -> None:
    for text, same, goes_on in (answer["nan_in_one_stage"] for answer in answered):
        assert "stage 1: " in text
        assert "rank 0, tensor rank 1, parameter 'layers.3.up.weight'" in text
        assert same
        assert goes_on


def test_infinite_gradient_skips_the_step_of_all(answered: list[dict[str, Any]]) -> None:
    assert [answer["inf_on_one_rank"] for answer in answered] == [(2.0, True)] * 4


def test_different_replicas_are_told_on_all_ranks(answered: list[dict[str, Any]]) -> None:
    for norm, copy in (answer["replicas_that_part"] for answer in answered):
        assert "parameter 'layers.3.norm.weight' has one value on tensor rank 0 and another on tensor rank 1" in norm
        assert "parameter 'layers.0.weight' has one value on rank of the stages 0" in copy


def test_stage_without_cut_layers_takes_part(answered: list[dict[str, Any]]) -> None:
    for norms, weight in (answer["stage_without_cuts"] for answer in answered):
        assert norms <= 2e-6
        assert weight <= ROUNDING


SAID = {
    "cut, and no tensor ranks": 'pass the tensor ranks\' dimension, too (Pipeline(..., mesh=mesh["pp", "tp"]))',
    "three dimensions": "the mesh has 3 dimensions, named ['pp', 'dp', 'tp']",
    "no names": "the mesh has 2 dimensions, named []",
    "copies cut otherwise": "copy (whole shape, shape of the part here, dtype, requires_grad)",
}


@pytest.mark.parametrize("what", SAID)
def test_misuse_is_refused_by_name(answered: list[dict[str, Any]], what: str) -> None:
    assert all(SAID[what] in answer["misuse"][what] for answer in answered)
