"""Experts that are divided over some of the data-parallel ranks, beside one process that has all of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.experts import Case, Outcome, train_alone, train_on_ranks
from tests.support.processes import run_processes

RANKS = 4
ALL_REDUCE = (("use_distributed_optimizer", False),)
FLATTENED = (*ALL_REDUCE, ("use_contiguous_buffers", False), ("overlap_grad_reduce", False))
CASES = {
    "one rank has all": Case(1, steps=20),
    "2 x 2": Case(2, steps=20),
    "4 x 1": Case(4, steps=20),
    "AdamW": Case(2, optimizer="adamw"),
    "5 experts on 2 ranks": Case(2, num_experts=5),
    "5 experts on 4 ranks, the last has none": Case(4, num_experts=5),
    "experts without tokens have no gradient": Case(4, num_experts=8, uses_idle=False),
    "3 microbatches": Case(2, microbatches=3),
    "3 reductions of one gradient": Case(2, microbatches=3, syncs_each=True),
    "all-reduce": Case(2, options=ALL_REDUCE),
    "all-reduce, 3 reductions": Case(2, microbatches=3, syncs_each=True, options=ALL_REDUCE),
    "all-reduce, uneven": Case(4, num_experts=5, options=ALL_REDUCE),
    "no buffers": Case(2, options=FLATTENED),
    "no buffers, 3 reductions": Case(2, microbatches=3, syncs_each=True, options=FLATTENED),
    "pooled": Case(2, microbatches=2, options=(("grad_buffer", "pooled"),)),
    "gathers under the forward": Case(2, options=(("overlap_param_gather", "forward"),)),
    "gathers in the step": Case(4, options=(("overlap_param_gather", False),)),
    "average in the collective": Case(2, options=(("average_in_collective", True),)),
    "instances": Case(2, options=(("num_distributed_optimizer_instances", 2),)),
    "one bucket": Case(2, options=(("bucket_size", 100_000),)),
}
ROUNDED = {
    "gradients sent in bf16": Case(2, options=(("grad_wire_dtype", "bf16"),)),
    "gradients and weights sent in int8": Case(2, options=(("grad_wire_dtype", "int8"), ("param_wire_dtype", "int8"))),
    "bf16 weights": Case(2, dtype=torch.bfloat16),
    "bf16 weights, remainders": Case(2, dtype=torch.bfloat16, options=(("store_param_remainders", True),)),
}


def train_all() -> dict[str, Outcome]:
    return {name: train_on_ranks(case) for name, case in (CASES | ROUNDED).items()}


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Outcome]]:
    return run_processes(RANKS, train_all)


def assert_equal(found: list[Outcome], expected: Outcome, tolerance: float) -> None:
    for rank, outcome in enumerate(found):
        assert outcome.norms == pytest.approx(expected.norms, rel=100 * tolerance)
        torch.testing.assert_close(outcome.weights, expected.weights, rtol=0.0, atol=tolerance)
        assert outcome.dense == found[0].dense, "to the bit"
        if rank == 0:
            torch.testing.assert_close(outcome.state, expected.state, rtol=0.0, atol=20 * tolerance)


@pytest.mark.parametrize("name", CASES)
def test_they_train_as_in_one_process(ranks: list[dict[str, Outcome]], name: str) -> None:
    assert_equal([by_case[name] for by_case in ranks], train_alone(CASES[name], RANKS), 2e-6)


@pytest.mark.parametrize("name", ROUNDED)
def test_rounded_ones_train_nearly_as_in_one_process(ranks: list[dict[str, Outcome]], name: str) -> None:
    case = ROUNDED[name]
    expected: Any = train_alone(Case(case.ep, steps=case.steps), RANKS)
    for by_case in ranks:
        for key, weight in by_case[name].weights.items():
            torch.testing.assert_close(weight.float(), expected.weights[key], rtol=0.0, atol=0.05)
        assert by_case[name].dense == ranks[0][name].dense
