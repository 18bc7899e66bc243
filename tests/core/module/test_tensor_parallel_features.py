"""Tensor-parallel models whose activations are recomputed, or that are compiled; instances; and what ranks send."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import signal
import time
from typing import Any

import pytest
import torch
import torch._inductor.config
import torch._inductor.metrics
from torch.utils.checkpoint import checkpoint

from benchmarks.counters import payload_received_bytes
from megastrategy import DistributedDataParallel, DistributedOptimizer
from tests.support.processes import run_processes
from tests.support.tensor_parallel import Case, Trainee, adamw, make_module, meshes, tokens_of, train_alone, train_on

STEPS = range(4)
HAS_COMPILER = any(map(shutil.which, (os.environ.get("CXX", ""), "g++", "clang++")))


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


def compile_by_inductor(trainee: Trainee) -> None:
    """Compiles the wrapped model, as users write it."""
    torch._dynamo.reset()
    torch._inductor.config.compile_threads = 1  # else each rank starts processes for it
    torch._inductor.metrics.reset()
    trainee.model.compile()


def inductor(mesh: Any, cache: str) -> tuple[float, int]:
    """How far weights are from those of training without, and how many kernels were made."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
    return differences(mesh, compile_by_inductor), torch._inductor.metrics.generated_kernel_count


def dp_bytes(mesh: Any) -> tuple[float, int]:
    """Bytes that this rank receives a step for its data-parallel ranks alone, and its number of parameters.

    Without sequence parallelism, whose sums over the tensor ranks come with a synchronised backward, too.
    """
    trainee = Trainee.make(
        mesh, Case("reduce-scatter", False, clip_norm=None, options=(("find_unused_parameters", False),))
    )
    trainee.train(STEPS)
    received = {}
    for synced in (False, True):
        torch.distributed.barrier()
        before = payload_received_bytes()
        for step in STEPS:
            with contextlib.nullcontext() if synced else trainee.model.no_sync():
                tokens = tokens_of(trainee.case, mesh.get_local_rank("dp"), step, 0)
                trainee.module.loss(trainee.model(tokens), tokens).backward()
            if synced:
                trainee.optimizer.step()
            trainee.optimizer.zero_grad()
        trainee.model.finish_param_gather()
        torch.distributed.barrier()
        received[synced] = payload_received_bytes() - before
    numel = sum(getattr(p, "_local_tensor", p).numel() for p in trainee.module.parameters())
    trainee.model.close()
    return (received[True] - received[False]) / len(STEPS), numel


def answers(cache: str) -> dict[str, Any]:
    mesh = meshes(2)
    return {
        "inductor": inductor(mesh, cache) if HAS_COMPILER else None,
        "non-reentrant": differences(mesh, recompute(False)),
        "reentrant": differences(mesh, recompute(True)),
        "compiled": differences(mesh, compile_module),
        "bytes": dp_bytes(mesh),
    }


@pytest.fixture(scope="module")
def answered(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_processes(4, answers, str(tmp_path_factory.mktemp("inductor")), timeout_s=600.0)


@pytest.mark.long
@pytest.mark.parametrize("how", ["non-reentrant", "reentrant", "compiled"])
def test_recomputed_and_compiled_models_train_to_the_same_weights(answered: list[dict[str, Any]], how: str) -> None:
    assert max(answer[how] for answer in answered) <= 1e-6


@pytest.mark.long
@pytest.mark.skipif(not HAS_COMPILER, reason="torch's inductor needs a C++ compiler: g++, clang++ or what CXX names")
def test_a_model_that_inductor_has_compiled_trains_to_the_same_weights(answered: list[dict[str, Any]]) -> None:
    for difference, num_kernels in (answer["inductor"] for answer in answered):
        assert num_kernels >= 4, "of a forward and a backward, cut where ranks meet"
        assert difference <= 1e-6


@pytest.mark.long
@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="reads socket counters of the Linux kernel")
@pytest.mark.real_collectives("counts what the rings send")
def test_what_data_parallel_ranks_send_is_the_floor_of_the_local_size(answered: list[dict[str, Any]]) -> None:
    """8(d-1)/d bytes for each parameter, or part of one, on this rank: gradients reduced and weights gathered."""
    for received, numel in (answer["bytes"] for answer in answered):
        assert 1.0 <= received / (8 * numel / 2) < 1.02


def with_instances(tp: int) -> list[Any]:
    case = Case("instances", accumulate=2, tied=True, steps=8)
    return [train_on(meshes(tp), case)]


@pytest.mark.long
@pytest.mark.parametrize("dp", [2, 4])
def test_instances_of_the_optimizer_train_as_one_process_does(dp: int) -> None:
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


@pytest.mark.long
def test_an_owner_steps_whole_matrices_beside_parameters_that_are_cut() -> None:
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


def raising() -> None:
    trainee = Trainee.make(meshes(2), Case())
    trainee.train(range(2))
    if torch.distributed.get_rank() == 3:
        trainee.module.blocks[1].register_forward_pre_hook(lambda *_: 1 / 0)
    trainee.train(range(2, 4))


@pytest.mark.long
def test_a_rank_that_raises_in_forward_ends_all_ranks_of_the_mesh() -> None:
    start = time.monotonic()
    with pytest.raises(AssertionError) as caught:
        run_processes(4, raising, timeout_s=300.0)
    assert time.monotonic() - start < 120.0, "below the groups' timeout"
    assert "ZeroDivisionError" in str(caught.value)
    for rank in range(3):
        assert f"rank {rank}:\nTraceback" in str(caught.value), "with a reason of its own"


def killed() -> None:
    trainee = Trainee.make(meshes(2), Case())
    trainee.train(range(2))
    if torch.distributed.get_rank() == 3:
        trainee.module.blocks[0].up.weight.register_hook(lambda grad: os.kill(os.getpid(), signal.SIGKILL))
    trainee.train(range(2, 4))


@pytest.mark.long
def test_a_killed_rank_ends_all_ranks_of_the_mesh() -> None:
    start = time.monotonic()
    with pytest.raises(AssertionError) as caught:
        run_processes(4, killed, timeout_s=300.0)
    assert time.monotonic() - start < 120.0, "below the groups' timeout"
    for rank in range(3):
        assert f"rank {rank}:\nTraceback" in str(caught.value), "with a reason of its own"
