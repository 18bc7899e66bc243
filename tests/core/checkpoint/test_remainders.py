"""Changes that owners have not sent yet (param_wire_dtype) are saved, and a run resumes with them to the bit."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import ProcessGroup

from megastrategy._checkpoints.directory_writer import save_directory
from megastrategy.core import OpenDirectory, make_collectives, to_host
from tests.core.sync.test_wire_dtypes import BOTH, MakeOptimizer, Ours, adamw, matrices_and_rest
from tests.support.directories import saving_among_threads
from tests.support.ranks import run_ranks
from tests.support.training import load_in_order


def saved(ours: Ours) -> dict[str, Any]:
    """The contents of a file, on every rank."""
    file = {"model": ours.module.state_dict(), "optimizer": ours.optimizer.state_dict(), "main": ours.remainders()}
    files = ours.collectives.all_gather_objects(file if ours.rank == 0 else None)
    return copy.deepcopy(files[0])


@pytest.mark.parametrize("order", [("model", "optimizer", "main"), ("main", "optimizer", "model")])
@pytest.mark.parametrize("make", [adamw, matrices_and_rest])
@pytest.mark.parametrize("overlap", ["step", "forward"])
def test_a_resumed_run_goes_on_to_the_bit(overlap: str, make: MakeOptimizer, order: tuple[str, ...]) -> None:
    """In whatever order a file is loaded, and into a run that has trained something else before."""

    def run(rank: int, group: ProcessGroup) -> tuple[Any, Any]:
        ours = Ours(group, make, overlap_param_gather=overlap, **BOTH)
        for step in range(5):
            ours.step(step)
        file = saved(ours)
        for step in range(5, 10):
            ours.step(step)
        uncut = ours.weights(), ours.remainders()
        for step in range(100, 103):
            ours.step(step)
        load_in_order(ours, file, order)
        for step in range(5, 10):
            ours.step(step)
        resumed = ours.weights(), ours.remainders()
        ours.model.close()
        return uncut, resumed

    for (weights, remainders), (again, remainders_again) in run_ranks(2, run):
        assert all(map(torch.equal, weights, again))
        assert all(map(torch.equal, remainders.values(), remainders_again.values()))


def test_a_file_without_remainders_leaves_none() -> None:
    def run(rank: int, group: ProcessGroup) -> None:
        ours = Ours(group, **BOTH)
        ours.step(0)
        remainders = ours.remainders()
        assert rank > 0 or any(value.any() for value in remainders.values())
        ours.optimizer.load_main_params({})
        assert not any(value.any() for value in ours.remainders().values())
        ours.model.close()

    run_ranks(2, run)


@pytest.mark.sample(2)
@pytest.mark.parametrize("make", [adamw, matrices_and_rest])
@pytest.mark.parametrize(("size", "other"), [(2, 3), (3, 2), (4, 1), (2, 2)])
def test_directories_have_remainders_for_any_number_of_ranks(
    tmp_path: Path, size: int, other: int, make: MakeOptimizer
) -> None:
    """On one rank, where nothing is rounded, they have no use, and a run begins with the weights that were held."""

    def write(rank: int, group: ProcessGroup) -> Any:
        ours = Ours(group, make, **BOTH)
        for step in range(4):
            ours.step(step)
        ours.model.finish_param_gather()
        state = {"model": dict(ours.module.state_dict()), "optimizer": ours.optimizer.sharded_state_dict()}
        save_directory(to_host(state), {}, tmp_path / "saved", make_collectives(group, torch.device("cpu")))
        result = ours.weights(), ours.remainders()
        ours.model.close()
        return result

    def read(rank: int, group: ProcessGroup) -> Any:
        ours = Ours(group, make, **BOTH)
        ours.step(100)
        ours.module.load_state_dict(OpenDirectory(tmp_path / "saved").read("model"))
        ours.optimizer.load_sharded(tmp_path / "saved")
        result = ours.weights(), ours.remainders()
        ours.step(4)
        ours.model.close()
        return result

    with saving_among_threads():
        [(weights, remainders), *_] = run_ranks(size, write)
        outcomes = run_ranks(other, read)
    for held, _ in outcomes:
        assert all(map(torch.equal, held, weights))
    left = outcomes[0][1]
    assert list(left) == (list(remainders) if other > 1 else [])
    assert all(map(torch.equal, left.values(), remainders.values())) or other == 1
