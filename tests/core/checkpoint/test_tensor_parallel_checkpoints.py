"""The full state of a tensor-parallel model is what one process would have saved, and loads on any mesh."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.processes import run_processes
from tests.support.tensor_parallel import Case, Trainee, meshes, train_alone

BEFORE, AFTER = range(2), range(2, 4)


def case_of(mode: Any, dtype: torch.dtype = torch.float32) -> Case:
    # vocab: parts of different sizes; the rest of the steps is the same on every mesh, since one dp size trains all
    return Case(mode, accumulate=1, tied=True, vocab=509, dtype=dtype)


def data_rank(mesh: Any, num_batches: int) -> range:
    """The batches of one data-parallel rank, of so many in a step."""
    each = num_batches // mesh.size(0)
    return range(each * mesh.get_local_rank("dp"), each * (mesh.get_local_rank("dp") + 1))


def train(trainee: Trainee, steps: range, num_batches: int = 2) -> None:
    """On the same ``num_batches`` batches a step, however many data-parallel ranks there are."""
    from tests.support.tensor_parallel import tokens_of

    mine = data_rank(trainee.mesh, num_batches)
    for step in steps:
        trainee.optimizer.zero_grad()
        for place, batch in enumerate(mine):
            tokens = tokens_of(trainee.case, batch, step, 0)
            trainee.model.require_backward_grad_sync = place == len(mine) - 1
            (trainee.module.loss(trainee.model(tokens), tokens) / len(mine)).backward()
        trainee.optimizer.clip_grad_norm_(0.1)
        trainee.optimizer.step()
    trainee.model.finish_param_gather()


def write(tp: int, folder: str, modes: list[tuple[Any, torch.dtype]]) -> None:
    """Trains a little, and writes what rank 0 gets, and what training on would give."""
    mesh = meshes(tp)
    for mode, dtype in modes:
        trainee = Trainee.make(mesh, case_of(mode, dtype))
        train(trainee, BEFORE)
        saved = {
            "weights": trainee.weights(),
            "optimizer": trainee.optimizer.state_dict(),
            "main_params": trainee.optimizer.main_params(),
        }
        if torch.distributed.get_rank() == 0:  # at once: where nothing is sharded it is the state itself, as torch's is
            torch.save(saved, f"{folder}/{mode} {dtype}")
        train(trainee, AFTER)
        trained = trainee.weights()
        if torch.distributed.get_rank() == 0:
            torch.save(trained, f"{folder}/{mode} {dtype}, trained")
        trainee.model.close()


def resume(tp: int, folder: str, modes: list[tuple[Any, torch.dtype]]) -> list[float]:
    """Loads what was written, trains on, and returns how far the weights are from those of the run that went on."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    mesh, errors = meshes(tp), list[float]()
    options = StateDictOptions(full_state_dict=True, strict=False)
    for mode, dtype in modes:
        saved = torch.load(f"{folder}/{mode} {dtype}", weights_only=True)
        trained = torch.load(f"{folder}/{mode} {dtype}, trained", weights_only=True)
        trainee = Trainee.make(mesh, case_of(mode, dtype))
        set_model_state_dict(trainee.module, saved["weights"], options=options)
        trainee.optimizer.load_state_dict(saved["optimizer"])
        trainee.optimizer.load_main_params(saved["main_params"])
        train(trainee, AFTER)
        weights = trainee.weights()
        errors.append(max(float((weights[n] - w).float().abs().max()) for n, w in trained.items()))
        trainee.model.close()
    return errors


MODES = [("reduce-scatter", torch.float32), ("all-reduce", torch.float32), ("pooled", torch.bfloat16)]
SOME = [((2, 2), (1, 2))]


@pytest.mark.parametrize(
    ("written", "resumed"),
    [
        ((2, 2), (1, 2)),
        pytest.param((1, 4), (2, 2), marks=pytest.mark.nightly),
        pytest.param((2, 1), (2, 4), marks=pytest.mark.nightly),
        pytest.param((2, 2), (1, 1), marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_a_full_state_loads_on_any_mesh(written: tuple[int, int], resumed: tuple[int, int], tmp_path: Path) -> None:
    modes = MODES if (written, resumed) not in SOME else MODES[:1]
    run_processes(written[0] * written[1], write, written[1], str(tmp_path), modes, timeout_s=300.0)
    for errors in run_processes(resumed[0] * resumed[1], resume, resumed[1], str(tmp_path), modes, timeout_s=300.0):
        for (_, dtype), error in zip(modes, errors, strict=True):
            # a step of bf16 beside 1, where forwards round otherwise
            assert error <= (1e-6 if dtype == torch.float32 else 2.0**-7), f"{dtype}: {error}"
    if written == (2, 2):
        saved = torch.load(tmp_path / "reduce-scatter torch.float32", weights_only=True)
        check_is_of_one_process(saved)


def check_is_of_one_process(saved: dict[str, Any]) -> None:
    """The file against torch's AdamW, which one process has stepped with the same batches."""
    case = dataclasses.replace(case_of("reduce-scatter"), steps=len(BEFORE))
    alone = train_alone(case, 2)
    assert saved["optimizer"]["state"].keys() == alone.state["state"].keys()
    for number, kept in alone.state["state"].items():
        for name, value in kept.items():
            own = saved["optimizer"]["state"][number][name]
            assert (own.shape, own.dtype, own.stride()) == (value.shape, value.dtype, value.stride())
            torch.testing.assert_close(own, value, rtol=0.0, atol=1e-6)
    for saved_group, group in zip(saved["optimizer"]["param_groups"], alone.state["param_groups"], strict=True):
        assert saved_group.keys() == group.keys()
        assert saved_group["params"] == group["params"]
