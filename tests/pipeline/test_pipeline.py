"""Stages on several ranks train a chain of layers as one process does."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch

from tests.support.pipelines import FROZEN, Case, Outcome, mesh_of, train_alone, train_on
from tests.support.processes import run_processes

SPLITS = {
    ("1F1B", 2): (2, 4),
    ("1F1B", 3): (1, 3, 2),
    ("1F1B", 4): (1, 2, 1, 2),
    ("GPipe", 2): (4, 2),
    ("GPipe", 3): (2, 1, 3),
    ("GPipe", 4): (2, 1, 1, 2),
    ("Interleaved1F1B", 2): (1, 2, 1, 2),
    ("Interleaved1F1B", 3): (1, 1, 1, 1, 1, 1),
}
"""By schedule and number of ranks, stages of different sizes."""

DTYPES = (torch.float32, torch.bfloat16)


def every(pp: int) -> list[Case]:
    return [
        Case(split, schedule, frozen, tied, dtype)
        for ((schedule, size), split), frozen, tied, dtype in itertools.product(
            SPLITS.items(), FROZEN, (False, True), DTYPES
        )
        # of a tied weight, one use alone is not frozen
        if size == pp and not (tied and frozen in ("prefix", "tail"))
    ]


SOME = [
    Case((2, 4), tied=True, steps=3),
    Case((4, 2), "GPipe", "prefix", steps=3),
    Case((1, 2, 1, 2), "Interleaved1F1B", "middle", tied=True, steps=3),
    Case((2, 4), frozen="tail", dtype=torch.bfloat16, steps=3),
    Case((2, 4), tied=True, steps=3, options=(("grad_buffer", "pooled"),)),
    Case((2, 4), tied=True, steps=3, options=(("use_distributed_optimizer", False),)),
]
OPTIONS = [
    Case((2, 4), schedule, tied=True, options=options)
    for schedule, options in itertools.product(
        ("1F1B", "GPipe"),
        (
            (("grad_buffer", "pooled"),),
            (("use_distributed_optimizer", False),),
            (("overlap_param_gather", True),),
            (("overlap_grad_reduce", False),),
            (("find_unused_parameters", False),),
            (
                ("use_distributed_optimizer", False),
                ("use_contiguous_buffers", False),
                ("overlap_grad_reduce", False),
            ),
        ),
    )
]
LONG = [Case((2, 4), tied=True, steps=50)]


def trained(pp: int, cases: list[Case], tp: int | None = None) -> list[Outcome]:
    mesh = mesh_of(pp, tp)
    return [train_on(mesh, case) for case in cases]


@pytest.mark.parametrize(
    ("pp", "dp", "cases"),
    [
        pytest.param(2, 2, SOME, id="2x2"),
        pytest.param(2, 2, LONG, id="50 steps", marks=pytest.mark.long),
        pytest.param(2, 2, OPTIONS, id="options", marks=pytest.mark.long),
        *(
            pytest.param(pp, dp, every(pp), id=f"all-{pp}x{dp}", marks=pytest.mark.long)
            for pp, dp in itertools.product((2, 3, 4), (1, 2))
        ),
    ],
)
def test_stages_train_as_one_process_does(pp: int, dp: int, cases: list[Case]) -> None:
    check_against_one_process(dp, cases, run_processes(pp * dp, trained, pp, cases, timeout_s=900.0))


SOME_CUT = [
    Case((1, 2, 1, 2), "Interleaved1F1B", "middle", tied=True, steps=3, sequence_parallel=True),
    Case((2, 4), frozen="tail", dtype=torch.bfloat16, steps=3),
]


@pytest.mark.parametrize(
    ("dp", "cases"),
    [
        pytest.param(1, SOME_CUT, id="2x1x2"),
        *(
            pytest.param(
                2,
                [dataclasses.replace(case, sequence_parallel=along) for case in every(2)],
                id=f"all-2x2x2{'-sequence' * along}",
                marks=pytest.mark.long,
            )
            for along in (False, True)
        ),
    ],
)
def test_stages_whose_layers_are_cut_train_as_one_process_does(dp: int, cases: list[Case]) -> None:
    """On stages times data-parallel times tensor ranks."""
    by_rank = run_processes(4 * dp, trained, 2, cases, 2, timeout_s=1800.0)
    check_against_one_process(dp, cases, by_rank)
    for number, case in enumerate(cases):
        for rank in range(0, 4 * dp, 2):
            ours, theirs = (by_rank[r][number] for r in (rank, rank + 1))
            replicas = [name for name, part in ours.parts.items() if part.shape == ours.weights[name].shape]
            assert replicas or case.frozen != "nothing"
            for name in replicas:
                assert torch.equal(ours.parts[name], theirs.parts[name]), f"{case}, {name}: to the bit"


def check_against_one_process(dp: int, cases: list[Case], by_rank: list[list[Outcome]]) -> None:
    for case, outcomes in zip(cases, zip(*by_rank, strict=True), strict=True):
        alone = train_alone(case, dp)
        found = {name: weight for outcome in outcomes for name, weight in outcome.weights.items()}
        assert found.keys() == alone.weights.keys()
        tolerance = 1e-6 if case.dtype == torch.float32 else 2.0**-7  # two steps of bf16 near one
        for rank, outcome in enumerate(outcomes):
            for name, weight in outcome.weights.items():
                error = (weight.float() - alone.weights[name].float()).abs().max().item()
                assert error <= tolerance, f"{case}, rank {rank}, {name}: {error}"
            assert outcome.norms == outcomes[0].norms, "the same bits on every rank"
        rough = case.dtype != torch.float32
        torch.testing.assert_close(outcomes[0].norms, alone.norms, rtol=0.05 if rough else 2e-6, atol=0.0)
        torch.testing.assert_close(outcomes[0].losses, alone.losses, rtol=0.01 if rough else 1e-6, atol=0.0)
        assert_copies_are_equal(case, outcomes)


def assert_copies_are_equal(case: Case, outcomes: tuple[Outcome, ...]) -> None:
    """To the bit, also between data-parallel ranks."""
    names = {"layers.0.weight", "layers.5.weight"} if case.tied else set()
    copies = [weight for outcome in outcomes for name, weight in outcome.weights.items() if name in names]
    for copy in copies:
        assert torch.equal(copy, copies[0])
