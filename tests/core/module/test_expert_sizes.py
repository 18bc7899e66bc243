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
    Trainee,
    assert_equal,
    expert_mesh,
    make_module,
    train_alone,
    train_each,
)
from tests.support.processes import run_processes

RANKS = 4
ALL_REDUCE = (("use_distributed_optimizer", False),)
INSTANCES = (("num_distributed_optimizer_instances", 2),)
POOLED = (("grad_buffer", "pooled"),)
SIZES = {
    8: {
        "5 experts on 4 x 2": Case(4, num_experts=5),
        "2 x 4, 2 instances, 3 reductions": Case(2, microbatches=3, syncs_each=True, options=INSTANCES),
    },
    6: {"5 experts on 3 x 2": Case(3, num_experts=5)},
    4: {
        "3 reductions, and another order after the first": Case(
            2, microbatches=3, syncs_each=True, options=(("bucket_size", 1),)
        ),
        "state on the host": Case(2, optimizer="adamw", options=(("offload_optimizer_states", True),)),
        "pooled, tokens on two experts, in buckets that fill the staging buffers": Case(
            2, num_experts=3, crowded_steps=(1, 2), uses_idle=False, options=(*POOLED, ("bucket_size", 1))
        ),
        "a layer that is used twice, reentrant, so that gradients are late": Case(2, recomputes="reentrant"),
        "a layer that no rank uses for three steps": Case(4, shallow_steps=(0, 1, 2), steps=8, optimizer="adamw"),
    },
}


@pytest.mark.parametrize("size", [pytest.param(8, marks=pytest.mark.nightly), 6, 4])
def test_any_number_of_ranks_trains_as_one_process(size: int) -> None:
    by_rank = run_processes(size, train_each, SIZES[size])
    for name, case in SIZES[size].items():
        assert_equal([by_case[name] for by_case in by_rank], train_alone(case, size), 1e-6)


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


def test_one_expert_rank_has_bits_without_a_mesh() -> None:
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


def test_buffer_of_uneven_local_experts_is_refused() -> None:
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
