"""Experts that are divided over some of the data-parallel ranks, beside one process that has all of them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from megastrategy import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer, GradScaler
from megastrategy.errors import NonFiniteGradError, OptimizerNotShardableError, ReplicaMismatchError
from tests.support.experts import (
    Case,
    Outcome,
    Trainee,
    assert_equal,
    batch_of,
    expert_mesh,
    make_module,
    train_alone,
    train_each,
)
from tests.support.processes import run_processes
from tests.support.tensor_parallel import whole

RANKS = 4
ALL_REDUCE = (("use_distributed_optimizer", False),)
CASES = {
    "one rank has all": Case(1),
    "4 x 1, AdamW": Case(4, optimizer="adamw"),
    "5 experts on 4 ranks, the last has none": Case(4, num_experts=5),
    "3 reductions of one gradient": Case(2, microbatches=3, syncs_each=True),
    "all-reduce, uneven": Case(4, num_experts=5, options=ALL_REDUCE),
    "pooled, 2 microbatches": Case(2, microbatches=2, options=(("grad_buffer", "pooled"),)),
    "gathers under the forward": Case(2, options=(("overlap_param_gather", True),)),
    "instances": Case(2, options=(("num_distributed_optimizer_instances", 2),)),
}
ROUNDED = {
    "gradients sent in bf16": Case(2, options=(("grad_wire_dtype", "bf16"),)),
    "gradients sent in bf16, pooled": Case(2, options=(("grad_wire_dtype", "bf16"), ("grad_buffer", "pooled"))),
    "bf16 weights": Case(2, dtype=torch.bfloat16),
}


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Outcome]]:
    return run_processes(RANKS, train_each, CASES | ROUNDED)


@pytest.mark.parametrize("name", CASES)
def test_they_train_as_in_one_process(ranks: list[dict[str, Outcome]], name: str) -> None:
    assert_equal([by_case[name] for by_case in ranks], train_alone(CASES[name], RANKS), 1e-6)


@pytest.mark.parametrize("name", ROUNDED)
def test_rounded_ones_train_nearly_as_in_one_process(ranks: list[dict[str, Outcome]], name: str) -> None:
    case = ROUNDED[name]
    expected: Any = train_alone(Case(case.ep, steps=case.steps, optimizer=case.optimizer), RANKS)
    for by_case in ranks:
        for key, weight in by_case[name].weights.items():
            torch.testing.assert_close(weight.float(), expected.weights[key], rtol=0.0, atol=0.05)
        assert by_case[name].dense == ranks[0][name].dense


# --- gradients -------------------------------------------------------------------------------------------------------


def backward(trainee: Trainee) -> None:
    x, y = batch_of(dist.get_rank(), 0, 0)
    trainee.module.loss(x, y, trainee.model).backward()


def read_gradients(case: Case) -> tuple[dict[str, Any], dict[float, Any]]:
    """Whole gradients by name, and norms of all parameters, and the total, by order."""
    trainee = Trainee.make(case)
    backward(trainee)
    found = {
        name: whole(grad) if (grad := trainee.model.full_grad(param)) is not None else None
        for name, param in trainee.module.named_parameters()
    }
    norms = {
        order: (trainee.model.grad_norms(order).tolist(), float(trainee.optimizer.grad_norm(order)))
        for order in (1.0, 2.0, math.inf)
    }
    trainee.model.close()
    return found, norms


@pytest.mark.parametrize(
    "options", [pytest.param((), id="()"), pytest.param((ALL_REDUCE[0],), id="(('use_distributed_optimizer', False),)")]
)
def test_expert_grads_and_norms_equal_one_process(options: tuple[tuple[str, Any], ...]) -> None:
    case = Case(2, options=options)
    module = make_module(case)
    for rank in range(RANKS):
        (module.loss(*batch_of(rank, 0, 0), module) / RANKS).backward()
    grads = {name: param.grad for name, param in module.named_parameters()}
    for found, norms in run_processes(RANKS, read_gradients, case):
        torch.testing.assert_close(found, grads, rtol=0.0, atol=1e-6)
        for order, (each, total) in norms.items():
            expected = [float(torch.linalg.vector_norm(grad, order)) for grad in grads.values() if grad is not None]
            assert each == pytest.approx(expected, rel=1e-4)
            assert total == pytest.approx(float(torch.linalg.vector_norm(torch.tensor(expected), order)), rel=1e-4)


def meet_nan() -> tuple[str, dict[str, Any]]:
    """A NaN in one rank's expert, and a step after it."""
    trainee = Trainee.make(Case(2, options=(("check_for_nan_in_grad", True),)))
    if dist.get_rank() == 3:
        trainee.module.layers[1].up.register_hook(lambda grad: grad * math.nan)  # type: ignore[union-attr]
    with pytest.raises(NonFiniteGradError) as raised:
        backward(trainee)
    if dist.get_rank() == 3:
        trainee.module.layers[1].up._backward_hooks.clear()  # type: ignore[union-attr]
    trainee.train(range(2))
    weights = {name: whole(param) for name, param in trainee.module.named_parameters()}
    trainee.model.close()
    return str(raised.value), weights


def test_nan_in_an_expert_is_refused_on_all() -> None:
    expected = train_alone(Case(2, steps=2), RANKS)
    for message, weights in run_processes(RANKS, meet_nan):
        assert "layers.1.up" in message
        assert "rank 3" in message
        torch.testing.assert_close(weights, expected.weights, rtol=0.0, atol=2e-6)


# --- weights ---------------------------------------------------------------------------------------------------------


def part_weights() -> tuple[str, str]:
    """The message for replicas that parted: one of an expert, and one of a dense weight."""
    trainee = Trainee.make(Case(2))
    trainee.model.check_replicas()
    messages = []
    for rank, param in ((2, trainee.module.layers[0].up), (1, trainee.module.head.bias)):
        if dist.get_rank() == rank:
            with torch.no_grad():
                (param._local_tensor if hasattr(param, "_local_tensor") else param).add_(1.0)  # type: ignore[operator]
        with pytest.raises(ReplicaMismatchError) as raised:
            trainee.model.check_replicas()
        messages.append(str(raised.value))
        if dist.get_rank() == rank:
            with torch.no_grad():
                (param._local_tensor if hasattr(param, "_local_tensor") else param).sub_(1.0)  # type: ignore[operator]
    trainee.model.close()
    return messages[0], messages[1]


def test_expert_replicas_are_compared() -> None:
    for of_expert, of_dense in run_processes(RANKS, part_weights):
        assert "layers.0.up" in of_expert
        assert "head.bias" in of_dense


# --- checkpoints -----------------------------------------------------------------------------------------------------


def save_on_last_row() -> dict[Any, Any]:
    """Rank 0 is not in the mesh's first row."""
    case, module = Case(2, optimizer="adamw"), make_module(Case(2))
    mesh = DeviceMesh("cpu", [[2, 3], [0, 1]], mesh_dim_names=("edp", "ep"))
    module.divide(mesh["ep"])
    model = DistributedDataParallel(module, case.config(), expert_mesh=mesh)
    trainee = Trainee(case, module, model, DistributedOptimizer(case.make_optimizer(module.parameters()), model))
    trainee.train(range(2))
    state: dict[Any, Any] = trainee.optimizer.state_dict()["state"]
    model.close()
    return state


def test_rank_0_saves_from_any_row_of_the_mesh() -> None:
    states = run_processes(RANKS, save_on_last_row)
    expected = train_alone(Case(2, optimizer="adamw", steps=2), RANKS).state
    torch.testing.assert_close(states[0], expected, rtol=0.0, atol=4e-5)
    assert states[1:] == [{}] * 3


# --- refusals --------------------------------------------------------------------------------------------------------


def refuse_each() -> dict[str, str]:
    module = make_module(Case(2))
    other = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    said = {}

    def attempt(name: str, mesh: Any, **options: Any) -> None:
        with pytest.raises(ValueError, match="expert_mesh") as raised:
            DistributedDataParallel(module, DistributedDataParallelConfig(**options), expert_mesh=mesh)
        said[name] = str(raised.value)

    attempt("one dimension", other["b"])
    attempt("other ranks", DeviceMesh("cpu", [[0, 1]], mesh_dim_names=("edp", "ep")))
    attempt("promise", other, find_unused_parameters=False)
    attempt("instances", expert_mesh(4), num_distributed_optimizer_instances=2)
    attempt(
        "no buffers", other, use_distributed_optimizer=False, use_contiguous_buffers=False, overlap_grad_reduce=False
    )
    attempt("whole experts", other)
    module.divide(other["a"])
    attempt("another dimension", other)
    counters = distribute_tensor(torch.zeros(4), other["b"], [Shard(0)])
    divided = make_module(Case(2))
    divided.layers[0].register_buffer("counters", counters)
    with pytest.raises(ValueError, match="buffer") as raised:
        DistributedDataParallel(divided, expert_mesh=other)
    said["buffer"] = str(raised.value)
    trainee = Trainee.make(Case(2))
    with pytest.raises(OptimizerNotShardableError) as refused:
        DistributedOptimizer(torch.optim.Adafactor(trainee.module.parameters()), trainee.model)
    said["Adafactor"] = str(refused.value)
    trainee.model.close()
    return said


def test_what_does_not_go_together_is_refused_by_name() -> None:
    for said in run_processes(RANKS, refuse_each):
        assert "two dimensions with names are expected" in said["one dimension"]
        assert "expert_mesh has the ranks [0, 1], and the data-parallel ranks are [0, 1, 2, 3]" in said["other ranks"]
        assert "a multiple of the 4 ranks that experts are divided over" in said["instances"]
        assert "Leave both out with expert_mesh" in said["promise"]
        assert "use_contiguous_buffers=False is not supported with expert_mesh" in said["no buffers"]
        assert "a Model without divided experts" in said["whole experts"]
        assert "'layers.0.up' is a DTensor" in said["another dimension"]
        assert "buffer 'layers.0.counters' is a DTensor" in said["buffer"]
        assert "is a stack of experts that ranks divide: each rank has a part of it" in said["Adafactor"]


# Infinite gradients of an expert.


def scaled_steps() -> tuple[list[bool], float, dict[str, Tensor]]:
    """Whether each step left the weights as they were, the scale at the end, and the weights.

    Rank 0's expert has an infinite gradient in step 1, which is trained again afterwards."""
    trainee = Trainee.make(Case(2, clip_norm=None))
    scaler, skipped = GradScaler("cpu", init_scale=1024.0), []
    up: Any = trainee.module.layers[1].up
    for number, step in enumerate((0, 1, 1, 2)):
        trainee.optimizer.zero_grad()
        hook = up.register_hook(lambda grad: grad * torch.inf) if (number, dist.get_rank()) == (1, 0) else None
        before = {name: whole(param) for name, param in trainee.module.named_parameters()}
        x, y = batch_of(dist.get_rank(), step, 0)
        scaler.scale(trainee.module.loss(x, y, trainee.model)).backward()
        if hook is not None:
            hook.remove()
        scaler.step(trainee.optimizer)
        scaler.update()
        trainee.model.finish_param_gather()
        after = {name: whole(param) for name, param in trainee.module.named_parameters()}
        skipped.append(all(torch.equal(before[name], after[name]) for name in before))
    trainee.model.close()
    return skipped, scaler.get_scale(), after


def test_infinite_expert_grad_skips_step_on_all() -> None:
    expected = train_alone(Case(2, clip_norm=None, steps=3), RANKS)
    for skipped, scale, weights in run_processes(RANKS, scaled_steps):
        assert skipped == [False, True, False, False]
        assert scale == 512.0
        torch.testing.assert_close(weights, expected.weights, rtol=0.0, atol=1e-6)
