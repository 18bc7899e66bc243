"""Divided experts on six and eight ranks, and on four with options, tokens and parameters that are not as usual, beside
one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megastrategy import DistributedDataParallel, DistributedOptimizer
from megastrategy.errors import LayoutMismatchError
from tests.support.experts import (
    Case,
    Outcome,
    Trainee,
    assert_equal,
    expert_mesh,
    make_module,
    train_alone,
    train_each,
)
from tests.support.processes import run_processes
from tests.support.tiers import cases_that_run

RANKS = 4
ALL_REDUCE = (("use_distributed_optimizer", False),)
INSTANCES = (("num_distributed_optimizer_instances", 2),)
POOLED = (("grad_buffer", "pooled"),)
SIZES = {
    8: {
        "2 x 4": Case(2),
        "4 x 2": Case(4),
        "8 x 1": Case(8, num_experts=8),
        "5 experts on 4 x 2": Case(4, num_experts=5),
        "2 x 4, 2 instances": Case(2, options=INSTANCES),
        "4 x 2, 2 instances, 5 experts": Case(4, num_experts=5, options=INSTANCES),
        "2 x 4, 4 instances": Case(2, options=(("num_distributed_optimizer_instances", 4),)),
        "2 x 4, 2 instances, pooled": Case(2, microbatches=2, options=INSTANCES + POOLED),
        "2 x 4, 2 instances, 3 reductions": Case(2, microbatches=3, syncs_each=True, options=INSTANCES),
        "2 x 4, all-reduce": Case(2, options=ALL_REDUCE),
    },
    6: {
        "2 x 3": Case(2),
        "3 x 2": Case(3),
        "5 experts on 3 x 2": Case(3, num_experts=5),
        "5 experts on 6 x 1": Case(6, num_experts=5),
        "2 x 3, 3 instances": Case(2, options=(("num_distributed_optimizer_instances", 3),)),
        "2 x 3, pooled": Case(2, microbatches=2, options=POOLED),
        "2 x 3, all-reduce": Case(2, options=ALL_REDUCE),
    },
    4: {
        "3 experts on 4 x 1": Case(4, num_experts=3),
        "3 experts on 4 x 1, pooled": Case(4, num_experts=3, options=POOLED),
        "4 x 1, pooled, 2 microbatches": Case(4, microbatches=2, options=POOLED),
        "4 x 1, 3 reductions": Case(4, microbatches=3, syncs_each=True),
        "4 x 1, all-reduce, 3 reductions": Case(4, microbatches=3, syncs_each=True, options=ALL_REDUCE),
        "all-reduce, 3 reductions, and another order after the first": Case(
            2, microbatches=3, syncs_each=True, options=(*ALL_REDUCE, ("bucket_size", 1))
        ),
        "3 reductions, and another order after the first": Case(
            2, microbatches=3, syncs_each=True, options=(("bucket_size", 1),)
        ),
        "state on the host": Case(2, optimizer="adamw", options=(("offload_optimizer_states", True),)),
        "no overlap": Case(2, options=(("overlap_grad_reduce", False),)),
        "all tokens on two experts for three steps": Case(2, crowded_steps=(1, 2, 3)),
        "and no gradient of the others": Case(4, crowded_steps=(1, 2, 3), uses_idle=False),
        "and all-reduce": Case(2, crowded_steps=(0, 1, 2), uses_idle=False, options=ALL_REDUCE),
        "and pooled": Case(4, crowded_steps=(0, 1, 2), uses_idle=False, options=POOLED),
        "and pooled, in buckets that fill the staging buffers": Case(
            2, num_experts=3, crowded_steps=(1, 2), uses_idle=False, options=(*POOLED, ("bucket_size", 1))
        ),
        "and a layer that is not used": Case(
            2, num_experts=3, shallow_steps=(2, 3), uses_idle=False, options=(*POOLED, ("bucket_size", 1))
        ),
        "recomputed, and a layer that is used twice": Case(2, recomputes="not reentrant"),
        "and reentrant, so that gradients are late": Case(2, recomputes="reentrant"),
        "and reentrant and all-reduce": Case(2, recomputes="reentrant", options=ALL_REDUCE),
        "and reentrant on 4 x 1, pooled": Case(4, recomputes="reentrant", options=POOLED),
        "a layer that no rank uses for three steps": Case(2, shallow_steps=(0, 1, 2), steps=8),
        "and AdamW": Case(4, shallow_steps=(0, 1, 2), steps=8, optimizer="adamw"),
    },
}
SHORT = [
    (6, "5 experts on 3 x 2"),
    (4, "3 reductions, and another order after the first"),
    (4, "and pooled, in buckets that fill the staging buffers"),
    (4, "and reentrant, so that gradients are late"),
]
PAIRS = [
    pytest.param(size, name, marks=[] if (size, name) in SHORT else pytest.mark.long)
    for size, cases in SIZES.items()
    for name in cases
]


@pytest.fixture(scope="module")
def by_size(request: pytest.FixtureRequest) -> dict[int, list[dict[str, Outcome]]]:
    pairs = cases_that_run(request, "size", "name")
    return {
        size: run_processes(size, train_each, {name: SIZES[size][name] for each, name in pairs if each == size})
        for size in {size for size, _ in pairs}
    }


@pytest.mark.parametrize(("size", "name"), PAIRS)
def test_any_number_of_ranks_trains_as_one_process(
    by_size: dict[int, list[dict[str, Outcome]]], size: int, name: str
) -> None:
    assert_equal([by_case[name] for by_case in by_size[size]], train_alone(SIZES[size][name], size), 1e-6)


# --- a mesh of one expert rank ---------------------------------------------------------------------------------------


def train_with_and_without_a_mesh(options: tuple[tuple[str, Any], ...]) -> list[dict[str, bytes]]:
    """This rank's weights, to the bit."""
    found = []
    for divides in (True, False):
        # Without clipping: a norm is summed by domains where there is a mesh, in another order.
        case, module = Case(1, clip_norm=None, options=options), make_module(Case(1))
        mesh = expert_mesh(1) if divides else None
        if mesh is not None:
            module.divide(mesh["ep"])
        model = DistributedDataParallel(module, case.config(), expert_mesh=mesh)
        trainee = Trainee(case, module, model, DistributedOptimizer(case.make_optimizer(module.parameters()), model))
        trainee.train(range(4))
        weights = {
            name: bytes(getattr(param, "_local_tensor", param).detach().flatten().view(torch.uint8).numpy())
            for name, param in module.named_parameters()
        }
        found.append(weights)
        model.close()
    return found


def with_each_option() -> list[list[dict[str, bytes]]]:
    return [train_with_and_without_a_mesh(options) for options in ((), ALL_REDUCE, POOLED, INSTANCES)]


def test_one_expert_rank_has_the_bits_of_a_model_without_a_mesh() -> None:
    for by_option in run_processes(2, with_each_option):
        for with_mesh, without in by_option:
            assert with_mesh == without


# --- buffers ---------------------------------------------------------------------------------------------------------


def wrap_local_buffers() -> str:
    """The message for buffers with an entry for each of this rank's experts: 3 on one rank, and 2 on the other."""
    module, mesh = make_module(Case(2, num_experts=5)), expert_mesh(2)
    module.divide(mesh["ep"])
    own = module.layers[1].up._local_tensor.shape[0]  # type: ignore[union-attr, operator]
    module.layers[1].register_buffer("scales", torch.ones(own))
    with pytest.raises(LayoutMismatchError) as raised:
        DistributedDataParallel(module, expert_mesh=mesh)
    return str(raised.value)


def test_a_buffer_with_an_entry_for_each_uneven_local_expert_is_refused_by_name() -> None:
    for message in run_processes(2, wrap_local_buffers):
        assert "buffer (name, shape, dtype): rank 0 has ['layers.1.scales', [3], 'torch.float32']" in message
        assert "rank 1 has ['layers.1.scales', [2], 'torch.float32']" in message


# --- modules that are moved ------------------------------------------------------------------------------------------


def wrap_local_experts() -> str:
    """Each rank has an expert of its own, under its number in the whole model."""
    module = nn.ModuleDict({str(dist.get_rank()): nn.Linear(4, 4)})
    with pytest.raises(LayoutMismatchError) as raised:
        DistributedDataParallel(module)
    return str(raised.value)


def test_local_experts_are_refused_by_name() -> None:
    for text in run_processes(RANKS, wrap_local_experts):
        assert "0.weight" in text
