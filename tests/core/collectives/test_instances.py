"""num_distributed_optimizer_instances: sharded inside each instance, and in everything else as with one.

A sum over four ranks has another order here than in torch DDP's ring, so weights are compared within 1e-6, and to the
bit where gradients are whole numbers, whose sums are exact in any order.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megastrategy import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from megastrategy.core.collectives import BackendCollectives, GlooCollectives
from tests.support.models import WholeGrads, two_layers, whole_numbers
from tests.support.ranks import run_ranks, with_instances
from tests.support.training import Run, assert_close, train_with_ddp, train_with_ours


def config(instances: int, **options: Any) -> DistributedDataParallelConfig:
    return DistributedDataParallelConfig(
        **{"bucket_size": 200, "num_distributed_optimizer_instances": instances, **options}
    )


def wrap(
    group: ProcessGroup, module: nn.Module, instances: int, kind: Any = GlooCollectives, **options: Any
) -> DistributedDataParallel:
    parts = 1 < instances < group.size()
    collectives = with_instances(group, instances, kind) if parts else kind(group)
    return DistributedDataParallel(module, config(instances, **options), collectives=collectives)


def weights_of(module: nn.Module) -> Tensor:
    return torch.cat([param.detach().reshape(-1).float() for param in module.parameters()])


def assert_equal_on_all(by_rank: list[list[Tensor]]) -> None:
    """Every tensor that a rank has returned is the others' to the bit."""
    for rank, tensors in enumerate(by_rank):
        assert len(tensors) == len(by_rank[0])
        for number, (mine, first) in enumerate(zip(tensors, by_rank[0], strict=True)):
            assert torch.equal(mine, first), f"number {number} of rank {rank} differs from rank 0's"


# --- collectives -----------------------------------------------------------------------------------------------------


def whole(rank: int, numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Whole numbers, whose sums are exact."""
    return torch.randint(-8, 9, (numel,), generator=torch.Generator().manual_seed(rank)).to(dtype)


@pytest.mark.parametrize(
    ("size", "instances", "kind"), [(4, 2, GlooCollectives), (6, 2, BackendCollectives), (6, 3, GlooCollectives)]
)
def test_instances_sum_over_all_and_gather_inside(size: int, instances: int, kind: Any) -> None:
    shards = size // instances
    numel, scale = 12 * shards, 0.25

    def run(rank: int, group: ProcessGroup) -> None:
        every = with_instances(group, instances, kind)
        collectives = every.instances[shards]
        assert (collectives.rank, collectives.size) == (rank % shards, shards)
        assert collectives.is_rank_zero == (rank == 0)
        total = torch.stack([whole(r, numel) for r in range(size)]).sum(0)
        own = slice(rank % shards * 12, (rank % shards + 1) * 12)
        for _ in range(2):  # scratch and readiness words are used again
            scattered = whole(rank, numel)
            handle = collectives.reduce_scatter(scattered, scale)
            handle.wait()
            handle.wait()  # which does nothing more
            assert torch.equal(scattered[own], total[own] * scale)
            sums = torch.full((12,), 100.0)
            sent = whole(rank, numel, torch.bfloat16)
            collectives.reduce_scatter_into(sums, sent, scale).wait()
            assert torch.equal(sums, 100.0 + total[own] * scale), "what was there counts once"
            gathered = torch.full((numel,), -1.0)
            gathered[own] = float(rank)
            collectives.all_gather(gathered).wait()
            first = rank - rank % shards
            assert gathered.view(shards, 12)[:, 0].tolist() == list(range(first, first + shards))
        reduced = torch.ones(3)
        collectives.all_reduce(reduced, 1.0).wait()
        assert reduced.tolist() == [size] * 3
        largest = torch.tensor([float(rank)])
        collectives.all_reduce_max(largest).wait()
        assert largest.item() == size - 1
        sent = torch.tensor([float(rank)])
        collectives.broadcast(sent).wait()
        assert sent.item() == 0
        every.close()

    run_ranks(size, run)


# --- training --------------------------------------------------------------------------------------------------------


def test_training_is_torch_ddps_on_four_ranks() -> None:
    """Tied, frozen, unused and partly used parameters, three groups, and a short last window."""
    run = Run("SGD", (("lr", 0.05), ("momentum", 0.9)), groups=3)
    assert_close(train_with_ours(run, 4, config(2)), train_with_ddp(run, 4), 1e-6)
    # Adam divides by the root of squared gradients: where those are rounding errors, so is the step; eps damps it.
    run = Run(options=(("lr", 0.01), ("eps", 1e-4)))
    assert_close(train_with_ours(run, 4, config(2)), train_with_ddp(run, 4), 1e-6)


def train_whole(
    rank: int, model: Any, optimizer: Any, module: WholeGrads, accumulate: int, steps: range = range(6)
) -> list[Tensor]:
    """The weights after each step. One microbatch in two is synchronised: several backwards before a step are."""
    seen = []
    for step in steps:
        optimizer.zero_grad()
        for microbatch in range(accumulate):
            with model.no_sync() if microbatch % 2 else contextlib.nullcontext():
                model(whole_numbers(rank, step, microbatch, module.always.weight.dtype), step, rank).backward()
        optimizer.step()
        seen.append(weights_of(module))
    return seen


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01)


@pytest.mark.parametrize(
    ("accumulate", "options"),
    [(1, {}), (3, {"grad_reduce_in_fp32": False, "reduce_scatter_with_fp32_accumulation": True})],
    ids=str,
)
def test_bf16_instances_have_bits_of_one_instance(accumulate: int, options: dict[str, Any]) -> None:
    def train(rank: int, group: ProcessGroup, instances: int) -> list[Tensor]:
        module = WholeGrads(torch.bfloat16)
        model = wrap(group, module, instances, **options)
        optimizer = DistributedOptimizer(adamw(model.parameters()), model)
        seen = train_whole(rank, model, optimizer, module, accumulate)
        main_params = optimizer.main_params()
        assert bool(main_params) == (rank == 0), "full ones are gathered only for rank 0 of the first instance"
        model.close()
        return [*seen, *main_params.values()] if rank == 0 else seen

    two, one = (run_ranks(4, functools.partial(train, instances=instances)) for instances in (2, 1))
    assert_equal_on_all([two[0], one[0]])
    assert_equal_on_all([seen[:6] for seen in two])


@pytest.mark.parametrize(
    ("size", "instances", "options"),
    [(4, 2, {}), (6, 2, {"grad_reduce_in_fp32": False, "reduce_scatter_with_fp32_accumulation": True})],
    ids=str,
)
def test_grads_of_backwards_of_instances_add_up(size: int, instances: int, options: dict[str, Any]) -> None:
    dtype = torch.bfloat16 if options else torch.float32

    def run(rank: int, group: ProcessGroup) -> None:
        module = WholeGrads(dtype)
        model = wrap(group, module, instances, **options)
        expected = torch.zeros(5, 33)
        for step in (0, 2, 4):  # not cleared in between
            model(whole_numbers(rank, step, 0, dtype), step, rank).backward()
            grads = [whole_numbers(r, step, 0, torch.float32).sum(0).expand(5, 33) for r in range(size)]
            expected += torch.stack(grads).sum(0) / size
            seen = model.full_grad(module.always.weight)
            assert seen is not None
            torch.testing.assert_close(seen, expected, rtol=1e-5, atol=1e-5)
            norm = model.grad_norms()[[spec.name for spec in model.layout.params].index("always.weight")]
            torch.testing.assert_close(norm, expected.double().norm(), rtol=1e-5, atol=0)
        model.close()

    run_ranks(size, run)


# --- checkpoints -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reader", [{"instances": 2}, {"instances": 1, "use_distributed_optimizer": False}], ids=str)
def test_state_resumes_with_other_instances(reader: dict[str, Any]) -> None:
    """Exactly: both go on with the same bits, from the same whole state."""

    def make(group: ProcessGroup, **way: Any) -> tuple[DistributedDataParallel, DistributedOptimizer, WholeGrads]:
        module = WholeGrads(torch.float32)
        model = wrap(group, module, **way)
        return model, DistributedOptimizer(adamw(model.parameters()), model), module

    def save(rank: int, group: ProcessGroup) -> tuple[list[Tensor], dict[str, Any]]:
        model, optimizer, module = make(group, instances=2)
        train_whole(rank, model, optimizer, module, 1, range(3))
        saved = {
            "module": module.state_dict(),
            "optimizer": optimizer.state_dict(),
            "main_params": optimizer.main_params(),
        }
        assert bool(saved["optimizer"]["state"]) == (rank == 0), "one rank gets it, of one instance"
        saved = copy.deepcopy(saved)
        seen = train_whole(rank, model, optimizer, module, 1, range(3, 6))
        model.close()
        return seen, saved

    def load(rank: int, group: ProcessGroup) -> list[Tensor]:
        model, optimizer, module = make(group, **reader)
        state = copy.deepcopy(saved[0][1])  # torch's load_state_dict goes on with the tensors it is given
        module.load_state_dict(state["module"])
        optimizer.load_main_params(state["main_params"])
        optimizer.load_state_dict(state["optimizer"])
        seen = train_whole(rank, model, optimizer, module, 1, range(3, 6))
        model.close()
        return seen

    saved = run_ranks(4, save)
    assert_equal_on_all([saved[0][0], *run_ranks(4, load)])


# --- errors ----------------------------------------------------------------------------------------------------------


def test_a_group_made_by_hand_cannot_be_divided() -> None:
    def run(rank: int, group: ProcessGroup) -> None:
        with pytest.raises(ValueError, match=r"num_distributed_optimizer_instances=2 needs groups.*made by hand"):
            DistributedDataParallel(two_layers(), config(2), group)

    run_ranks(4, run)
