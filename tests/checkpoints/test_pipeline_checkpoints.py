"""What stages save is what one process would have saved, and any division into stages goes on from it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from tests.support.pipelines import Case, Outcome, Trainee, make_layers, mesh_of, train_alone
from tests.support.processes import run_processes
from tests.support.tensor_parallel import adamw

HALF, STEPS = 3, 6

Mesh = tuple[int, int, tuple[int, ...], str]
"""Stages' ranks, data-parallel ranks, the division and its schedule."""
MESHES: list[Mesh] = [
    (2, 2, (2, 4), "1F1B"),
    (2, 1, (5, 1), "GPipe"),
    (4, 1, (1, 2, 1, 2), "1F1B"),
    (2, 1, (1, 2, 1, 2), "Interleaved1F1B"),
    (3, 1, (2, 2, 2), "1F1B"),
]


def case_of(mesh: Mesh, dtype: torch.dtype, frozen: str = "middle") -> Case:
    return Case(mesh[2], mesh[3], frozen, tied=True, dtype=dtype, steps=STEPS)


def save(pp: int, case: Case, path: str) -> None:
    trainee = Trainee.make(mesh_of(pp), case)
    trainee.train(range(HALF))
    saved = trainee.save()
    if torch.distributed.get_rank() == 0:
        torch.save(saved, path)
    trainee.model.close()


def resume(pp: int, case: Case, paths: list[str]) -> list[Outcome]:
    mesh, outcomes = mesh_of(pp), []
    for path in paths:
        trainee = Trainee.make(mesh, case)
        trainee.load(torch.load(path, weights_only=True))
        outcomes.append(trainee.train(range(HALF, STEPS)))
        trainee.model.close()
    return outcomes


@pytest.mark.parametrize(
    ("meshes", "dtype"),
    [
        pytest.param(MESHES[:2], torch.float32, id="short"),
        *(
            pytest.param(MESHES, dtype, id=f"all-{dtype}", marks=pytest.mark.long)
            for dtype in (torch.float32, torch.bfloat16)
        ),
    ],
)
def test_every_division_goes_on_from_every_other(tmp_path: Path, meshes: list[Mesh], dtype: torch.dtype) -> None:
    paths = []
    for number, mesh in enumerate(meshes):
        run_processes(mesh[0] * mesh[1], save, mesh[0], case_of(mesh, dtype), path := str(tmp_path / f"{number}.pt"))
        paths.append(path)
    for mesh in meshes:
        case, (pp, dp) = case_of(mesh, dtype), mesh[:2]
        by_rank = run_processes(pp * dp, resume, pp, case, paths, timeout_s=300.0)
        for saver, outcomes in zip(meshes, zip(*by_rank, strict=True), strict=True):
            expected = uninterrupted(case, saver[1], dp)
            for outcome in outcomes:
                for name, weight in outcome.weights.items():
                    error = (weight.float() - expected[name].float()).abs().max().item()
                    assert error <= (1e-6 if dtype == torch.float32 else 2.0**-7), f"{saver} -> {mesh}, {name}: {error}"


def uninterrupted(case: Case, dp_before: int, dp_after: int) -> dict[str, torch.Tensor]:
    """In one process, half of the steps on the batches of so many ranks, and half on those of others."""
    return train_alone(case, dp_before, dp_after, HALF).weights


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_file_is_that_of_one_process(tmp_path: Path, dtype: torch.dtype) -> None:
    """Names, numbers, shapes and dtypes; and torch's own classes load it."""
    mesh = MESHES[0]
    case, path = case_of(mesh, dtype), str(tmp_path / "file.pt")
    run_processes(4, save, 2, case, path)
    weights, state, main_params = torch.load(path, weights_only=True)

    layers = nn.ModuleDict({"layers": nn.ModuleList(make_layers(case))})
    optimizer = adamw(layers.parameters())
    for param in layers.parameters():
        param.grad = torch.zeros_like(param) if param.requires_grad else None
    optimizer.step()
    torch_state = optimizer.state_dict()
    assert list(weights) == list(layers.state_dict())
    layers.load_state_dict(weights)
    assert state["param_groups"] == torch_state["param_groups"]
    assert state["state"].keys() == torch_state["state"].keys()
    for number, kept in torch_state["state"].items():
        assert {name: value.shape for name, value in kept.items()} == {
            name: value.shape for name, value in state["state"][number].items()
        }
    optimizer.load_state_dict(state)
    trained = {name for name, param in layers.named_parameters() if param.requires_grad}
    assert main_params.keys() == (trained if dtype == torch.bfloat16 else set())

    alone = train_alone(case, 2, 2, HALF, steps=HALF)
    for number, kept in alone.state["state"].items():
        for name in ("exp_avg", "exp_avg_sq"):
            rough = {"rtol": 0.3, "atol": 1e-4} if dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-8}
            torch.testing.assert_close(state["state"][number][name].float(), kept[name], **rough)


def other_groups() -> str:
    """Stages whose optimizers have other options."""
    from megastrategy import DistributedOptimizer

    trainee = Trainee.make(mesh_of(2), Case((2, 4)))
    lr = 1e-3 * (1 + torch.distributed.get_rank())
    optimizer = DistributedOptimizer(torch.optim.AdamW(trainee.model.parameters(), lr=lr), trainee.model)
    with pytest.raises(RuntimeError) as caught:
        optimizer.state_dict()
    trainee.model.close()
    return str(caught.value)


def test_stages_of_other_options_are_told_of_them() -> None:
    for text in run_processes(2, other_groups):
        assert "group 0 of the optimizer has lr=0.001 on one rank of the stages and 0.002 on another" in text
