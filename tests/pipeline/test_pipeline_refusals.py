"""A batch that one stage of a pipeline refuses is refused by every stage, whose next batch trains; with tied weights,
whose copies the stages add up, too."""

from __future__ import annotations

import dataclasses

import pytest
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from megastrategy.core.errors import LossTokensError, MegastrategyError, MicrobatchMismatchError, NonFiniteGradError
from tests.support.comparison import message
from tests.support.pipelines import Case, Trainee, batch_of, loss_of, mesh_of
from tests.support.processes import run_processes

POOLED = ("grad_buffer", "pooled")
CASES = {
    "tied": Case((2, 4), tied=True),
    "pooled": Case((2, 4), tied=True, options=(POOLED,)),
    "interleaved": Case((1, 2, 2, 1), "Interleaved1F1B", tied=True),
    "three": Case((2, 2, 2), tied=True),
}
REFUSALS: dict[str, type[MegastrategyError]] = {
    "tokens": LossTokensError,
    "nan": NonFiniteGradError,
    "microbatch": MicrobatchMismatchError,
}
STAGES = {"first stage": 0, "middle stage": 1, "last stage": -1}


def trained_without_refusals(mesh: DeviceMesh, case: Case) -> dict[str, Tensor]:
    trainee = Trainee.make(mesh, case)
    parts = trainee.train(range(2)).parts
    trainee.model.close()
    return parts


def refuse(mesh: DeviceMesh, case: Case, kind: str, stage: str, expected: dict[str, Tensor]) -> tuple[str, bool, bool]:
    """The error of the refused batch, whether gradients were dropped, and whether weights afterwards are ``expected``,
    those of a training that had no such batch."""
    counted = 0

    def loss_in_part(logits: Tensor, targets: Tensor) -> Tensor:
        nonlocal counted
        counted += kind == "tokens" and is_refused
        if counted % 2:
            trainee.model.count_tokens(5)
        return loss_of(logits, targets)

    is_refused = False
    trainee = Trainee.make(mesh, case, loss=loss_in_part)
    trainee.train(range(1))
    refusing = mesh.get_local_rank("pp") == STAGES[stage] % mesh.size(0)
    handle = None
    is_refused = True
    if refusing and kind == "nan":
        block = next(layer for layer in trainee.net.layers if hasattr(layer, "up") and layer.up.weight.requires_grad)
        handle = block.up.weight.register_hook(lambda grad: grad * float("nan"))
    if refusing and kind == "microbatch" and mesh.get_local_rank("dp") == 1:
        trainee.model.microbatch = 1
    tokens, targets = batch_of(trainee.dp_rank, 7)
    text = message(REFUSALS[kind], lambda: trainee.model(tokens, target=targets))
    dropped = all(param.grad is None for param in trainee.net.parameters())
    is_refused = False
    if handle is not None:
        handle.remove()
    trainee.model.microbatch = 0
    found = trainee.train(range(1, 2)).parts
    trainee.model.close()
    return text, dropped, all(found[name].equal(weight) for name, weight in expected.items())


def answer(asked: list[tuple[str, str, str]], stages: int) -> list[tuple[str, bool, bool]]:
    mesh = mesh_of(stages)
    cases = {
        name: dataclasses.replace(CASES[name], options=(*CASES[name].options, ("check_for_nan_in_grad", True)))
        for name in dict.fromkeys(name for name, _, _ in asked)
    }
    expected = {name: trained_without_refusals(mesh, case) for name, case in cases.items()}
    return [refuse(mesh, cases[name], kind, stage, expected[name]) for name, kind, stage in asked]


ASKED = [
    ("tied", "nan", "last stage"),
    ("interleaved", "nan", "last stage"),
    ("pooled", "nan", "first stage"),
    ("pooled", "tokens", "last stage"),
    ("tied", "microbatch", "first stage"),
]


@pytest.fixture(scope="module")
def answers() -> list[dict[tuple[str, str, str], tuple[str, bool, bool]]]:
    """By rank of two stages of two data-parallel ranks."""
    return [dict(zip(ASKED, found, strict=True)) for found in run_processes(4, answer, ASKED, 2, timeout_s=100.0)]


@pytest.mark.parametrize("asked", ASKED, ids="-".join)
def test_every_stage_refuses_a_batch(
    answers: list[dict[tuple[str, str, str], tuple[str, bool, bool]]], asked: tuple[str, str, str]
) -> None:
    texts = {found[asked][0] for found in answers}
    assert len(texts) == 1
    assert texts.pop().startswith("stage 0: " if asked[2] == "first stage" else "stage ")
    assert all(dropped for _, dropped, _ in (found[asked] for found in answers))
    assert all(trains_on for _, _, trains_on in (found[asked] for found in answers))


def test_stages_of_one_rank_refuse_a_batch() -> None:
    """The middle one of three has no copy of the weight that the other two share."""
    asked = [("three", "nan", "last stage"), ("three", "nan", "middle stage"), ("three", "tokens", "last stage")]
    for found in run_processes(3, answer, asked, 3, timeout_s=100.0):
        assert [(dropped, trains_on) for _, dropped, trains_on in found] == [(True, True)] * 3
