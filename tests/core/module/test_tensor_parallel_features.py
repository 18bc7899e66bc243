"""Tensor-parallel models whose activations are recomputed, or that are compiled; instances; and what ranks send."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch._inductor.config
import torch._inductor.metrics
from torch.utils.checkpoint import checkpoint

from megastrategy import DistributedDataParallel, DistributedOptimizer
from tests.support.processes import run_processes
from tests.support.tensor_parallel import Case, Trainee, adamw, make_module, meshes, tokens_of, train_alone, train_on

STEPS = range(4)


def differences(mesh: Any, change: Any) -> float:
    """The farthest that any weight is from that of training without the change."""
    weights = []
    for changed in (False, True):
        trainee = Trainee.make(mesh, Case(accumulate=2))
        if changed:
            change(trainee)
        trainee.train(STEPS)
        weights.append(list(trainee.weights().values()))
        trainee.model.close()
    return max(float((one - other).abs().max()) for one, other in zip(*weights, strict=True))


def recompute(use_reentrant: bool) -> Any:
    """Forgets the activations of each block, and computes them again in backward."""

    def change(trainee: Trainee) -> None:
        for block in trainee.module.blocks:
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=use_reentrant)

    return change


def compile_module(trainee: Trainee) -> None:
    torch._dynamo.reset()
    trainee.module.compile(backend="aot_eager")


def answers() -> dict[str, float]:
    mesh = meshes(2)
    return {
        "non-reentrant": differences(mesh, recompute(False)),
        "reentrant": differences(mesh, recompute(True)),
        "compiled": differences(mesh, compile_module),
    }


@pytest.fixture(scope="module")
def answered() -> list[dict[str, float]]:
    return run_processes(4, answers, timeout_s=600.0)


@pytest.mark.nightly
@pytest.mark.parametrize("how", ["non-reentrant", "reentrant", "compiled"])
def test_recomputed_and_compiled_models_train_alike(answered: list[dict[str, float]], how: str) -> None:
    assert max(answer[how] for answer in answered) <= 1e-6


def with_instances(tp: int) -> list[Any]:
    case = Case("instances", accumulate=2, tied=True, steps=8)
    return [train_on(meshes(tp), case)]


@pytest.mark.nightly
@pytest.mark.parametrize("dp", [2, 4])
def test_tensor_parallel_instances_train_alike(dp: int) -> None:
    """Each of one data-parallel rank, and of two."""
    outcomes = [outcome for [outcome] in run_processes(2 * dp, with_instances, 2, timeout_s=600.0)]
    alone = train_alone(Case("instances", accumulate=2, tied=True, steps=8), dp)
    for outcome in outcomes:
        for name, weight in alone.weights.items():
            torch.testing.assert_close(outcome.weights[name], weight, rtol=0.0, atol=1e-6)
        assert [norm.tolist() for norm in outcome.norms] == [norm.tolist() for norm in outcomes[0].norms]
        assert outcome.replicas == outcomes[0].replicas


def is_whole(name: str) -> bool:
    """Matrices that every tensor rank has whole."""
    return name.endswith("mix.weight")


def optimizers_of(module: Any) -> list[torch.optim.Optimizer]:
    """Muon for matrices that all have whole, which an owner steps, and AdamW for the rest, cut and not."""
    named = list(module.named_parameters())
    muon = torch.optim.Muon([param for name, param in named if is_whole(name)], lr=1e-2)
    return [muon, adamw([param for name, param in named if not is_whole(name)])]


def with_two_optimizers() -> tuple[dict[str, Any], dict[str, bytes], list[dict[str, Any]]]:
    mesh, case = meshes(2), Case(steps=4)
    module = make_module(case, mesh["tp"])
    model = DistributedDataParallel(module, case.config(), process_group=mesh.get_group("dp"))
    optimizers = [DistributedOptimizer(optimizer, model) for optimizer in optimizers_of(module)]
    trainee = Trainee(mesh, case, module, model, optimizers[0])
    for step in range(case.steps):
        trainee.backward(step, 0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    found = trainee.weights(), trainee.replicas(), [optimizer.state_dict() for optimizer in optimizers]
    model.close()
    return found


@pytest.mark.nightly
def test_owner_steps_matrices_beside_cut_params() -> None:
    by_rank = run_processes(4, with_two_optimizers)
    case = Case(steps=4)
    module = make_module(case, None)
    optimizers = optimizers_of(module)
    for step in range(case.steps):
        for dp_rank in range(2):
            tokens = tokens_of(case, dp_rank, step, 0)
            (module.loss(module(tokens), tokens) / 2).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for weights, replicas, _ in by_rank:
        assert replicas == by_rank[0][1], "to the bit"
        for name, param in module.named_parameters():
            # Muon iterates in bf16; weights have moved by 0.01
            torch.testing.assert_close(weights[name], param.detach(), rtol=0.0, atol=2e-3)
    for saved, optimizer in zip(by_rank[0][2], optimizers, strict=True):
        alone = optimizer.state_dict()
        assert saved["state"].keys() == alone["state"].keys()
        for number, kept in alone["state"].items():
            assert {k: v.shape for k, v in kept.items()} == {k: v.shape for k, v in saved["state"][number].items()}
