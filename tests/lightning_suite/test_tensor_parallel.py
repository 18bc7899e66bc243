"""Lightning's own tensor-parallel examples and tests, without their ``fully_shard`` lines, on CPUs. In the long tier.

They are fetched from Lightning's repository, changed by :mod:`.edits` and nothing else, and gone afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ..doors.rank_processes import Ranks
from ..support.extra_packages import sources_of
from . import examples
from .edits import for_cpus, for_ours

pytestmark = pytest.mark.long

REPOSITORY = "https://github.com/Lightning-AI/pytorch-lightning"
VERSION = "2.6.5"
"""There is no tag for 2.6.6, which differs in one file."""
EXAMPLES = {"pytorch": "examples/pytorch/tensor_parallel", "fabric": "examples/fabric/tensor_parallel"}
TESTS = {"pytorch": "tests/tests_pytorch", "fabric": "tests/tests_fabric"}
DOORS = {"pytorch": "megastrategy.lightning", "fabric": "megastrategy.fabric"}


@pytest.fixture(scope="module")
def lightning(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Their sources, as they are."""
    folders = [f"{tests}/{part}" for tests in TESTS.values() for part in ("helpers", "strategies")]
    return sources_of(tmp_path_factory.mktemp("lightning"), REPOSITORY, VERSION, *EXAMPLES.values(), *folders)


@pytest.fixture
def one() -> Iterator[Ranks]:
    ranks = Ranks(1)
    yield ranks
    ranks.close()


@pytest.fixture
def mesh() -> Iterator[Ranks]:
    ranks = Ranks(4)
    yield ranks
    ranks.close()


def edited_example(lightning: Path, which: str, folder: Path) -> str:
    for file in (lightning / EXAMPLES[which]).glob("*.py"):
        source = for_ours(for_cpus(file.read_text("utf-8")), DOORS[which])
        assert "fully_shard(" not in source
        (folder / file.name).write_text(source, "utf-8")
    return str(folder)


def union(together: list[dict[str, Any]]) -> list[Tensor]:
    """The batches of both data-parallel ranks, which have no sample in common."""
    batches = [torch.cat(pair) for pair in zip(together[0]["batches"], together[2]["batches"], strict=True)]
    every = torch.cat(batches)
    assert len(every.unique(dim=0)) == len(every) == 128, "all that there are, once"
    return batches


def assert_trained(together: list[dict[str, Any]], alone: dict[str, Any]) -> None:
    for rank, own in enumerate(together):
        assert own["on_meta_before"], "as init_module(empty_init=True) asks for"
        assert own["losses"] == together[rank - rank % 2]["losses"], "one batch for a tensor group"
        for name, weight in own["weights"].items():
            assert torch.equal(weight, together[0]["weights"][name]), f"{name} on rank {rank}"
    assert together[0]["losses"] != together[2]["losses"], "another batch for each data-parallel rank"
    means = [sum(pair) / 2 for pair in zip(together[0]["losses"], together[2]["losses"], strict=True)]
    assert means == pytest.approx(alone["losses"], rel=1e-5)
    for name, weight in alone["weights"].items():
        moved = (weight - together[0]["start"][name]).norm()
        error = (together[0]["weights"][name] - weight).norm() / moved
        assert error < 1e-3, f"{name}: {error} of how far it was trained"


def test_the_example_of_a_trainer_trains_as_one_process(
    lightning: Path, one: Ranks, mesh: Ranks, tmp_path: Path
) -> None:
    folder = edited_example(lightning, "pytorch", tmp_path)
    together = mesh.run(examples.fit, folder)
    [alone] = one.run(examples.alone, folder, together[0]["start"], union(together))
    assert_trained(together, alone)


def test_the_example_of_fabric_trains_and_saves_as_one_process(
    lightning: Path, one: Ranks, mesh: Ranks, tmp_path: Path
) -> None:
    folder, to = edited_example(lightning, "fabric", tmp_path), tmp_path / "saved"
    to.mkdir()
    together = mesh.run(examples.loop, folder, str(to))
    [alone] = one.run(examples.alone, folder, together[0]["start"], union(together))
    assert_trained(together, alone)
    # the file is one, and of whole weights
    assert (to / "checkpoint.pt").is_file()
    saved = examples.read(to / "checkpoint.pt")
    assert saved["iteration"] == len(together[0]["losses"]) - 1
    for name, weight in together[0]["weights"].items():
        assert torch.equal(saved["model"][name], weight)
