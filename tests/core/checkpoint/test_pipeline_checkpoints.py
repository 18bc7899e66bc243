"""Stages save the state that one process would save, and any division into stages resumes from it."""

from __future__ import annotations

import itertools
import os
import signal
from pathlib import Path
from typing import Literal, NamedTuple

import pytest
import torch
from torch import nn

from megastrategy.core import OpenDirectory
from tests.support.pipelines import Case, Outcome, Trainee, make_layers, mesh_of, train_alone
from tests.support.processes import run_processes
from tests.support.sharded_training import assert_same
from tests.support.tensor_parallel import adamw

HALF, STEPS = 2, 4

Kind = Literal["file", "directory"]


class Mesh(NamedTuple):
    """Stages' ranks, data-parallel ranks, the division and its schedule; tensor ranks."""

    pp: int
    dp: int
    split: tuple[int, ...]
    schedule: str
    tp: int | None = None

    @property
    def size(self) -> int:
        return self.pp * self.dp * (self.tp or 1)


OF_STAGES = [
    Mesh(2, 2, (2, 4), "1F1B"),
    Mesh(2, 1, (5, 1), "GPipe"),
    Mesh(2, 1, (3, 3), "1F1B", tp=2),
    Mesh(4, 1, (1, 2, 1, 2), "1F1B"),
    Mesh(2, 1, (1, 2, 1, 2), "Interleaved1F1B"),
    Mesh(3, 1, (2, 2, 2), "1F1B"),
]
WHOLE = [Mesh(1, dp, (6,), "1F1B", tp) for dp, tp in ((1, None), (2, None), (1, 2), (2, 2), (4, None))]
"""With all layers on every rank, or parts of all."""
MESHES = OF_STAGES + WHOLE


def case_of(mesh: Mesh, dtype: torch.dtype) -> Case:
    return Case(mesh.split, mesh.schedule, "middle", tied=True, dtype=dtype, steps=STEPS)


def save(mesh: Mesh, case: Case, path: Path) -> None:
    """Saves a file and a directory of the same."""
    trainee = Trainee.make(mesh_of(mesh.pp, mesh.tp), case)
    trainee.train(range(HALF))
    saved = trainee.save()
    if torch.distributed.get_rank() == 0:
        path.mkdir()
        torch.save(saved, path / "file")
    torch.distributed.barrier()
    trainee.save_directory(path / "directory")
    trainee.model.close()


def resume(mesh: Mesh, case: Case, paths: list[Path], kind: Kind) -> list[Outcome]:
    on_ranks, outcomes = mesh_of(mesh.pp, mesh.tp), []
    for path in paths:
        trainee = Trainee.make(on_ranks, case)
        if kind == "file":
            trainee.load(torch.load(path / "file", weights_only=True))
        else:
            trainee.load_directory(path / "directory")
        outcomes.append(trainee.train(range(HALF, STEPS)))
        trainee.model.close()
    return outcomes


@pytest.mark.parametrize(
    ("meshes", "dtype", "kind"),
    [
        pytest.param([OF_STAGES[0], WHOLE[0]], torch.float32, "file", id="short-file"),
        pytest.param(OF_STAGES[1:3], torch.bfloat16, "directory", id="short-directory"),
        *(
            pytest.param(MESHES, dtype, kind, id=f"all-{dtype}-{kind}", marks=pytest.mark.nightly)
            for dtype, kind in itertools.product((torch.float32, torch.bfloat16), ("file", "directory"))
        ),
    ],
)
def test_every_division_goes_on_from_every_other(
    tmp_path: Path, meshes: list[Mesh], dtype: torch.dtype, kind: Kind
) -> None:
    paths = [tmp_path / str(number) for number in range(len(meshes))]
    for mesh, path in zip(meshes, paths, strict=True):
        run_processes(mesh.size, save, mesh, case_of(mesh, dtype), path)
        assert_directory_is_what_the_file_is(path)
    for mesh in meshes:
        case = case_of(mesh, dtype)
        by_rank = run_processes(mesh.size, resume, mesh, case, paths, kind, timeout_s=300.0)
        for saver, outcomes in zip(meshes, zip(*by_rank, strict=True), strict=True):
            expected = uninterrupted(case, saver.dp, mesh.dp)
            for outcome in outcomes:
                for name, weight in outcome.weights.items():
                    error = (weight.float() - expected[name].float()).abs().max().item()
                    assert error <= (1e-6 if dtype == torch.float32 else 2.0**-7), f"{saver} -> {mesh}, {name}: {error}"


def assert_directory_is_what_the_file_is(path: Path) -> None:
    weights, state, main_params = torch.load(path / "file", weights_only=True)
    optimizer = OpenDirectory(path / "directory").read("optimizer")
    assert_same(OpenDirectory(path / "directory").read("model"), dict(weights))
    assert_same(optimizer.get("main_params", {}), main_params)
    names = dict[int, str]()
    for group, by_name in zip(state["param_groups"], optimizer["param_groups"], strict=True):
        names |= zip(group["params"], by_name["params"], strict=True)
        assert {**group, "params": 0} == {**by_name, "params": 0}
    assert_same(optimizer["state"], {names[number]: values for number, values in state["state"].items()})


def train(case: Case, folder: Path, steps: range, *, resume: bool, kill_at: int | None = None) -> Outcome:
    """Trains on 2 x 2 ranks, and saves a directory after every step; in a step a rank of the last stage is killed."""
    trainee, outcome = Trainee.make(mesh_of(2), case), None
    if resume:
        trainee.load_directory(folder / f"step {steps.start}")
    for step in steps:
        if step == kill_at and torch.distributed.get_rank() == 3:
            trainee.net.layers[3].up.weight.register_hook(lambda grad: os.kill(os.getpid(), signal.SIGKILL))
        outcome = trainee.train(range(step, step + 1))
        trainee.save_directory(folder / f"step {step + 1}")
    trainee.model.close()
    assert outcome is not None
    return outcome


def uninterrupted(case: Case, dp_before: int, dp_after: int) -> dict[str, torch.Tensor]:
    """In one process, half of the steps on the batches of so many ranks, and half on those of others."""
    return train_alone(case, dp_before, dp_after, HALF).weights


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_file_is_that_of_one_process(tmp_path: Path, dtype: torch.dtype) -> None:
    """Names, numbers, shapes and dtypes; and torch's own classes load it."""
    mesh = OF_STAGES[0]
    case = case_of(mesh, dtype)
    run_processes(4, save, mesh, case, path := tmp_path / "saved")
    weights, state, main_params = torch.load(path / "file", weights_only=True)

    layers = nn.ModuleDict({"layers": nn.ModuleList(make_layers(case))})
    optimizer = adamw(layers.parameters())
    for param in layers.parameters():
        param.grad = torch.zeros_like(param) if param.requires_grad else None
    optimizer.step()
    torch_state = optimizer.state_dict()
    assert list(weights) == list(layers.state_dict()) == list(OpenDirectory(tmp_path / "saved/directory").read("model"))
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
