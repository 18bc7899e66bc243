"""A model that ``parallelize_module`` has cut trains on dp x tp ranks as one process trains it on all batches."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from megastrategy import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer, GradScaler
from megastrategy.core.layout.layout import PARAM_ALIGNMENT_NUMEL
from megastrategy.errors import NonFiniteGradError
from tests.support.comparison import message
from tests.support.data_path import buffers_of
from tests.support.optimizers import Lamb
from tests.support.processes import run_processes
from tests.support.tensor_parallel import (
    Case,
    LanguageModel,
    Outcome,
    Trainee,
    make_module,
    meshes,
    plan,
    tokens_of,
    train_alone,
    train_on,
    whole,
)

SOME = [
    Case("reduce-scatter", True, 3, True, steps=3),
    Case("all-reduce", True, 1, False, steps=3),
    Case("pooled", True, 3, False, vocab=509, steps=3),
]
LONG = [
    Case("reduce-scatter", False, 1, False, steps=50),
    Case("forward", True, 3, True),
    Case("flattened", False, 3, False),
    Case("all-reduce", False, 3, True),
]


def trained(tp: int, cases: list[Case]) -> list[Outcome]:
    mesh = meshes(tp)
    return [train_on(mesh, case) for case in cases]


def on_mesh(dp: int, tp: int, cases: list[Case]) -> Iterator[tuple[Case, list[Outcome]]]:
    """Each case, and its outcomes by rank."""
    by_rank = run_processes(dp * tp, trained, tp, cases, timeout_s=600.0)
    return zip(cases, [list(outcomes) for outcomes in zip(*by_rank, strict=True)], strict=True)


WORLDS = [
    pytest.param(2, 2, SOME, id="2x2"),
    pytest.param(2, 2, LONG, id="long 2x2", marks=pytest.mark.nightly),
    pytest.param(1, 4, LONG, id="long 1x4", marks=pytest.mark.nightly),
    pytest.param(2, 4, LONG, id="long 2x4", marks=pytest.mark.nightly),
]


@pytest.mark.parametrize(("dp", "tp", "cases"), WORLDS)
def test_mesh_trains_as_one_process(dp: int, tp: int, cases: list[Case]) -> None:
    for case, outcomes in on_mesh(dp, tp, cases):
        alone = train_alone(case, dp)
        for rank, outcome in enumerate(outcomes):
            for name, weight in alone.weights.items():
                error = (outcome.weights[name] - weight).abs().max().item()
                assert error <= 1e-6, f"{case}, rank {rank}, {name}: {error}"
            # the same bits everywhere: ranks that clip by norms of different bits part for good
            assert [norm.tolist() for norm in outcome.norms] == [norm.tolist() for norm in outcomes[0].norms]
            torch.testing.assert_close(outcome.norms, alone.norms, rtol=2e-6, atol=0.0)
            # to the bit: the parameters that every tensor rank steps by itself
            assert outcome.replicas.keys() >= {"temperature"}
            assert outcome.replicas == outcomes[0].replicas, f"{case}, rank {rank}"
        losses = [outcomes[tp * dp_rank].losses for dp_rank in range(dp)]
        torch.testing.assert_close(sum(map(sum, losses)), sum(alone.losses), rtol=1e-6, atol=0.0)


BF16 = [
    Case("reduce-scatter", True, 3, True, torch.bfloat16, steps=10),
    Case("all-reduce", False, 1, False, torch.bfloat16, steps=10),
    Case("pooled", True, 3, False, torch.bfloat16, steps=10),
]


@pytest.mark.nightly
@pytest.mark.parametrize(("dp", "tp"), [(2, 2), (1, 4)])
def test_16_bit_parts_have_main_params(dp: int, tp: int) -> None:
    """Forwards round otherwise where a sum is cut, so weights agree to a step of bf16, replicas to the bit."""
    for case, outcomes in on_mesh(dp, tp, BF16):
        alone, start = train_alone(case, dp), make_module(case, None).state_dict()
        for rank, outcome in enumerate(outcomes):
            assert outcome.replicas == outcomes[0].replicas, f"{case}, rank {rank}"
            assert [norm.tolist() for norm in outcome.norms] == [norm.tolist() for norm in outcomes[0].norms]
            for name, weight in alone.weights.items():
                moved = (weight.float() - start[name].float()).norm()
                error = (outcome.weights[name].float() - weight.float()).norm() / moved
                # the weights of norms, near 1, move a few steps of bf16 in all
                assert error < 0.25, f"{case}, {name}: {error} of how far it was trained"


def with_and_without(cases: list[Case]) -> list[tuple[Outcome, Outcome]]:
    mesh = meshes(1)
    return [(train_on(mesh, case), train_on(mesh, case, parallel=False)) for case in cases]


def test_one_tensor_rank_has_bits_of_none() -> None:
    cases = [Case("reduce-scatter", True, 3, True, steps=3), Case("pooled", True, 1, False, steps=3)]
    for outcomes in run_processes(2, with_and_without, cases):
        for one, plain in outcomes:
            assert one.losses == plain.losses
            assert [norm.tolist() for norm in one.norms] == [norm.tolist() for norm in plain.norms]
            assert all(torch.equal(one.weights[name], weight) for name, weight in plain.weights.items())


# --- one mesh, many questions ----------------------------------------------------------------------------------------


def fresh(mesh: Any, **options: Any) -> Trainee:
    return Trainee.make(mesh, Case(options=tuple(options.items())))


def bytes_of(mesh: Any) -> dict[str, int]:
    trainee = fresh(mesh)
    trainee.train(range(1))
    layout = trainee.model.layout
    weights, gradients = buffers_of(trainee.model)
    local = [getattr(p, "_local_tensor", p) for p in trainee.module.parameters()]
    state = trainee.optimizer.optimizer.state.values()
    found = {
        "local": sum(-(-p.numel() // PARAM_ALIGNMENT_NUMEL) * PARAM_ALIGNMENT_NUMEL for p in local),
        "whole": sum(p.numel() for p in trainee.module.parameters()),
        "weights": sum(flat.numel() for flat in weights),
        "gradients": sum(flat.numel() for flat in gradients),
        "padding": 128 * 2 * len(layout.buckets),
        "state": sum(v.numel() for kept in state for v in kept.values() if v.dim() > 0),
    }
    in_buffers = [flat.untyped_storage().data_ptr() for flat in weights]
    ends = [start + flat.nbytes for start, flat in zip(in_buffers, weights, strict=True)]
    found["outside"] = sum(
        not any(start <= p.data_ptr() < end for start, end in zip(in_buffers, ends, strict=True)) for p in local
    )
    trainee.model.close()
    return found


def nan_on_one_rank(mesh: Any) -> tuple[str, dict[str, bytes], dict[str, bytes]]:
    trainee = fresh(mesh, check_for_nan_in_grad=True)
    before = trainee.replicas()
    if torch.distributed.get_rank() == 1:
        hook = lambda grad: grad * float("nan")  # noqa: E731
        trainee.module.blocks[1].down.weight.register_hook(hook)
    text = message(NonFiniteGradError, lambda: trainee.backward(0, 0))
    after = trainee.replicas()
    trainee.model.close()
    return text, before, after


def inf_on_one_rank(mesh: Any) -> tuple[float, bool]:
    """The scale after a step that has to be skipped everywhere, and whether weights are what they were."""
    trainee = fresh(mesh)
    scaler = GradScaler("cpu", init_scale=4.0, growth_interval=1000)
    before = {
        name: param.to_local().clone() if hasattr(param, "to_local") else param.clone()
        for name, param in trainee.module.state_dict().items()
    }
    tokens = tokens_of(trainee.case, mesh.get_local_rank("dp"), 0, 0)
    if torch.distributed.get_rank() == 2:
        trainee.module.blocks[0].up.weight.register_hook(lambda grad: grad * float("inf"))
    scaler.scale(trainee.module.loss(trainee.model(tokens), tokens)).backward()
    scaler.step(trainee.optimizer)
    scaler.update()
    same = all(
        torch.equal(before[name], param.to_local() if hasattr(param, "to_local") else param)
        for name, param in trainee.module.state_dict().items()
    )
    trainee.model.close()
    return scaler.get_scale(), same


def norms_of_params(mesh: Any) -> tuple[list[float], list[float]]:
    """The norm of each parameter's gradient, by the engine and from the result of :meth:`full_grad`."""
    trainee = fresh(mesh)
    trainee.backward(0, 0)
    norms = trainee.model.grad_norms().tolist()
    grads = [trainee.model.full_grad(param) for param in trainee.model.engine.params]
    full = [float(whole(grad).double().norm()) for grad in grads if grad is not None]
    trainee.model.close()
    return norms, full


def refusals(mesh: Any) -> dict[str, str]:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.parallel import parallelize_module

    group, case = mesh.get_group("dp"), Case()

    def wrap(module: nn.Module, **options: Any) -> DistributedDataParallel:
        return DistributedDataParallel(module, DistributedDataParallelConfig(**options), process_group=group)

    found = {"no group": message(ValueError, lambda: DistributedDataParallel(make_module(case, mesh["tp"])))}
    sharded = make_module(case, mesh["tp"])
    fully_shard(sharded.blocks[0], mesh=mesh["dp"])
    found["fully_shard"] = message(ValueError, lambda: wrap(sharded))
    sums = make_module(case, mesh["tp"])
    part = sums.norm.weight.to_local().detach()
    sums.norm.weight = nn.Parameter(DTensor.from_local(part, mesh["tp"], [Partial()]))
    found["Partial"] = message(ValueError, lambda: wrap(sums))
    two = make_module(case, None)
    two.head.weight = nn.Parameter(distribute_tensor(two.head.weight.detach(), mesh, [Replicate(), Shard(0)]))
    found["two dimensions"] = message(ValueError, lambda: wrap(two))
    later = make_module(case, None)
    model = wrap(later)
    parallelize_module(later, mesh["tp"], plan(sequence_parallel=True))
    found["later"] = message(ValueError, lambda: model(tokens_of(case, 0, 0, 0)))
    model.close()
    for name, options in {"whole": {}, "whole, all-reduce": {"use_distributed_optimizer": False}}.items():
        model = wrap(make_module(case, mesh["tp"]), **options)
        found[name] = message(ValueError, lambda: DistributedOptimizer(Lamb(model.parameters(), lr=0.1), model))  # noqa: B023
        model.close()
    return found


def tie_warnings(mesh: Any) -> list[str]:
    module = LanguageModel(512, tied=True)
    torch.distributed.tensor.parallel.parallelize_module(module, mesh["tp"], plan(sequence_parallel=True))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        DistributedDataParallel(module, process_group=mesh.get_group("dp")).close()
    return [str(warning.message) for warning in caught if "one parameter" in str(warning.message)]


def answers() -> dict[str, Any]:
    mesh = meshes(2)
    asked = (bytes_of, nan_on_one_rank, inf_on_one_rank, norms_of_params, refusals, tie_warnings)
    return {ask.__name__: ask(mesh) for ask in asked}


@pytest.fixture(scope="module")
def answered() -> list[dict[str, Any]]:
    """By rank; one group of processes, as starting one takes seconds."""
    return run_processes(4, answers, timeout_s=300.0)


def test_a_rank_has_bytes_of_its_parts_alone(answered: list[dict[str, Any]]) -> None:
    for found in (answer["bytes_of"] for answer in answered):
        assert found["outside"] == 0, "every part lies in the buffer"
        assert found["local"] < 0.75 * found["whole"]
        for kind in ("weights", "gradients"):
            assert found["local"] <= found[kind] <= found["local"] + found["padding"]
    # Adam's two moments, of what each data-parallel rank owns of a tensor rank's parts
    for tensor_rank in (0, 1):
        columns = [answered[rank]["bytes_of"] for rank in (tensor_rank, tensor_rank + 2)]
        numel = sum(found["state"] for found in columns)
        assert numel <= 2 * columns[0]["local"]
        assert max(found["state"] for found in columns) <= columns[0]["local"] + columns[0]["padding"]


def test_nan_on_one_mesh_rank_stops_all(answered: list[dict[str, Any]]) -> None:
    for answer in answered:
        text, before, after = answer["nan_on_one_rank"]
        assert "rank 0, tensor rank 1, parameter 'blocks.1.down.weight'" in text
        assert before == after


def test_infinite_grad_on_mesh_skips_step_of_all(answered: list[dict[str, Any]]) -> None:
    assert [answer["inf_on_one_rank"] for answer in answered] == [(2.0, True)] * 4


def test_norms_of_cut_params_are_of_whole_grads(answered: list[dict[str, Any]]) -> None:
    for answer in answered:
        norms, full = answer["norms_of_params"]
        assert norms == answered[0]["norms_of_params"][0], "the same bits"
        assert norms == pytest.approx(full, rel=1e-6)


REFUSED = {
    "no group": 'process_group=mesh.get_group("dp")',
    "fully_shard": "the submodule 'blocks.0' is wrapped by fully_shard",
    "Partial": "parameter 'norm.weight' is a DTensor (Partial",
    "two dimensions": "a mesh of one dimension is expected",
    "later": "call parallelize_module before the module is wrapped",
    "whole": "parameter 'embed.weight' is tensor-parallel",
    "whole, all-reduce": "parameter 'embed.weight' is tensor-parallel",
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_not_understood_is_refused_by_name(answered: list[dict[str, Any]], what: str) -> None:
    for answer in answered:
        assert REFUSED[what] in answer["refusals"][what]


def test_tie_broken_by_parallelize_is_named(answered: list[dict[str, Any]]) -> None:
    told = [answer["tie_warnings"] for answer in answered]
    assert [len(texts) for texts in told] == [1, 0, 0, 0]
    assert "'embed.weight' and 'head.weight' have equal values" in told[0][0]
