"""Gradients of replicated parameters that are sums over the tensor ranks come by one reduction a bucket, whatever is
done to ``.grad`` before."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

from megastrategy.errors import LossTokensError
from tests.support.processes import run_processes
from tests.support.tensor_parallel import Case, Mode, Trainee, make_module, meshes, tokens_of, whole

MODES: tuple[Mode, ...] = ("reduce-scatter", "all-reduce", "pooled")
NORM, MIX = "blocks.1.norm.weight", "blocks.0.mix.weight"  # one is added to zeros, the other large enough to be copied
DP = 2

Params = dict[str, torch.nn.Parameter]
Backward = Callable[[int, bool], None]
"""Of the microbatch of that number, synchronised or not."""


def thrice(params: Params, backward: Backward) -> None:
    backward(0, False)
    backward(1, False)
    backward(2, True)


def dropped_between(params: Params, backward: Backward) -> None:
    backward(0, False)
    params[NORM].grad = params[MIX].grad = None
    backward(1, True)


def written_between(params: Params, backward: Backward) -> None:
    """The same on all ranks, as users do."""
    backward(0, False)
    for name in (NORM, MIX):
        params[name].grad = torch.full_like(params[name], 0.25)
    backward(1, True)


def synced_twice(params: Params, backward: Backward) -> None:
    """The second is added to what was reduced."""
    backward(0, True)
    backward(1, True)


def used_once(params: Params, backward: Backward) -> None:
    """In the second backward the norm is frozen."""
    backward(0, False)
    params[NORM].requires_grad_(False)
    backward(1, True)
    params[NORM].requires_grad_(True)


SOME: dict[Any, tuple[Mode, ...]] = {
    thrice: MODES,  # its reductions are counted
    dropped_between: ("pooled",),
    written_between: ("all-reduce",),
    synced_twice: ("reduce-scatter",),
    used_once: ("reduce-scatter",),
}


def expected(how: Any) -> dict[str, Tensor | None]:
    """The gradients of a plain module, of the mean loss over the data-parallel ranks' batches."""
    case = Case(accumulate=1)
    module = make_module(case, None)
    params = dict(module.named_parameters())

    def backward(number: int, sync: bool) -> None:
        for dp_rank in range(DP):
            tokens = tokens_of(case, dp_rank, 0, number)
            (module.loss(module(tokens), tokens) / DP).backward()

    how(params, backward)
    return {name: params[name].grad for name in (NORM, MIX, "blocks.0.up.weight")}


def got(mesh: Any, how: Any, mode: Mode) -> tuple[dict[str, Tensor | None], dict[str, bytes], int, int]:
    """The gradients; those of replicas, as this rank has them; reductions of torch's, if they are looked at, and of
    ours, in the last backward."""
    trainee = Trainee.make(mesh, Case(mode))
    params = dict(trainee.module.named_parameters())
    ranks = trainee.model.engine.model_parallel.tensor_ranks
    assert ranks is not None
    counts, theirs = [0, 0], CommDebugMode()
    counted = theirs if how is thrice else contextlib.nullcontext()  # it sees every operation, for a fifth of the time

    def backward(number: int, sync: bool) -> None:
        tokens = tokens_of(trainee.case, mesh.get_local_rank("dp"), 0, number)
        with contextlib.nullcontext() if sync else trainee.model.no_sync():
            loss = trainee.module.loss(trainee.model(tokens), tokens)
            with counted, mock.patch.object(ranks, "all_reduce", wraps=ranks.all_reduce) as ours:
                loss.backward()
        counts[:] = theirs.get_comm_counts().get(torch.ops.c10d_functional.all_reduce, 0), ours.call_count

    how(params, backward)
    grads = {name: trainee.model.full_grad(params[name]) for name in (NORM, MIX, "blocks.0.up.weight")}
    local = {
        name: bytes((g._local_tensor if isinstance(g, DTensor) else g).flatten().view(torch.uint8).numpy())
        for name, g in grads.items()
        if name != "blocks.0.up.weight" and g is not None
    }
    gathered = {name: None if grad is None else whole(grad) for name, grad in grads.items()}
    num_buckets = len(trainee.model.layout.buckets)
    trainee.model.close()
    assert counts[1] <= num_buckets
    return gathered, local, counts[0], counts[1]


def changed_without_a_sync(mesh: Any, mode: Mode) -> list[float]:
    """Norms of gradients that no backward has reduced: halved by unscaling, then clipped, then after that."""
    trainee = Trainee.make(mesh, Case(mode, accumulate=2))
    trainee.backward(0, 0)
    norms = [trainee.optimizer.grad_norm() * 0.5]
    assert trainee.optimizer.unscale_grads_(torch.tensor([0.5])).item() == 0.0
    norms += [trainee.optimizer.clip_grad_norm_(1e-3), trainee.optimizer.grad_norm()]
    trainee.model.close()
    return [norm.item() for norm in norms]


def counted_apart(mesh: Any) -> str:
    """Each tensor rank counts tokens of its own."""
    trainee = Trainee.make(mesh, Case())
    tokens = tokens_of(trainee.case, mesh.get_local_rank("dp"), 0, 0)

    def backward(num_tokens: int) -> None:
        loss = trainee.module.loss(trainee.model(tokens), tokens)
        trainee.model.count_tokens(num_tokens)
        loss.backward()

    with pytest.raises(LossTokensError) as raised:
        backward(8 + mesh.get_local_rank("tp"))
    backward(8 + mesh.get_local_rank("dp"))  # dropped, and gone on with
    trainee.optimizer.step()
    trainee.model.check_replicas()
    trainee.model.close()
    return str(raised.value)


UNREDUCED: tuple[Mode, ...] = ("all-reduce", "flattened")


def answers(hows: dict[Any, tuple[Mode, ...]]) -> dict[str, Any]:
    mesh = meshes(2)
    answers = {f"{how.__name__}, {mode}": got(mesh, how, mode) for how, modes in hows.items() for mode in modes}
    answers["counted apart"] = counted_apart(mesh)
    return answers | {f"changed, {mode}": changed_without_a_sync(mesh, mode) for mode in UNREDUCED}


@pytest.fixture(scope="module")
def answered() -> list[dict[str, Any]]:
    return run_processes(2 * DP, answers, SOME, timeout_s=300.0)


@pytest.mark.parametrize("how", SOME, ids=lambda how: how.__name__)
def test_gradients_are_those_of_one_process(answered: list[dict[str, Any]], how: Any) -> None:
    check(answered, how, SOME[how])


def check(answered: list[dict[str, Any]], how: Any, modes: tuple[Mode, ...]) -> None:
    alone = expected(how)
    for mode in modes:
        for rank, answer in enumerate(answered):
            grads, local, _, _ = answer[f"{how.__name__}, {mode}"]
            assert local == answered[0][f"{how.__name__}, {mode}"][1], (
                f"{mode}, rank {rank}: replicas get the same bits"
            )
            for name, grad in alone.items():
                assert (grad is None) == (grads[name] is None), f"{mode}, {name}"
                if grad is not None:
                    torch.testing.assert_close(grads[name], grad, rtol=1e-5, atol=1e-7, msg=f"{mode}, {name}")


def test_tensor_ranks_reduce_once_a_bucket(answered: list[dict[str, Any]]) -> None:
    """torch itself would reduce each norm's two parameters, and each matrix that is whole, by itself: eight times."""
    for answer in answered:
        for mode in MODES:
            _, _, theirs, ours = answer[f"thrice, {mode}"]
            assert theirs <= 1, f"{mode}: a bucket with one such gradient leaves it to torch"
            assert ours > 0


def test_unreduced_grads_are_scaled_locally(answered: list[dict[str, Any]]) -> None:
    """As under torch DDP, where each rank clips and steps what it has; a data-parallel rank alone never has to sync."""
    for answer in answered:
        for mode in UNREDUCED:
            halved, norm, clipped = answer[f"changed, {mode}"]
            assert norm == pytest.approx(halved, rel=1e-6), mode
            assert clipped == pytest.approx(1e-3, rel=1e-3), mode


def test_other_token_counts_on_tensor_ranks_raise(answered: list[dict[str, Any]]) -> None:
    """Tensor ranks have one batch, so that different counts would divide its parts differently. Training goes on after
    the error."""
    for answer in answered:
        assert "tensor group counted different tokens" in answer["counted apart"]
