"""Lightning's own tensor-parallel examples and tests, without their ``fully_shard`` lines, on CPUs. In the long tier.

They are fetched from Lightning's repository, changed by :mod:`.edits` and nothing else, and gone afterwards.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.doors.rank_processes import Ranks
from tests.support.extra_packages import sources_of

from . import examples
from .edits import for_cpus, for_ours, for_tensor_ranks, ranks_of_tests
from .on_ranks import cases_of, outcome_of

pytestmark = pytest.mark.nightly

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


# --- their tests -----------------------------------------------------------------------------------------------------

DIRECTORY = "looks into the directory that Lightning's strategy saves by default"
ONE_TENSOR_RANK = "asks for a mesh with one tensor rank: device_mesh is None then"
STAND_IN = "looks at .grad, for which something stands in after a reduce-scatter"
WRAPPED = "has names by one wrapper, and here are two"
OTHERWISE = {
    "pytorch": {
        "test_setup_device_mesh": ("AssertionError: assert False", ONE_TENSOR_RANK),
        "test_strategy_state_dict[True]": ("assert 0 > 0", DIRECTORY),
        "test_save_load_sharded_state_dict": ("NotADirectoryError", DIRECTORY),
    },
    "fabric": {
        "test_setup_device_mesh": ("parallelize_fn is given and tensor_parallel_size is 1", ONE_TENSOR_RANK),
        "test_fsdp2_tensor_parallel[True]": ("isinstance(ReducedGrad", STAND_IN),
        "test_fsdp2_tensor_parallel[False]": ("isinstance(ReducedGrad", STAND_IN),
        "test_train_save_load[32-true]": ("NotADirectoryError", DIRECTORY),
        "test_train_save_load[bf16-mixed]": ("NotADirectoryError", DIRECTORY),
        "test_save_sharded_and_consolidate_and_load": ("NotADirectoryError", DIRECTORY),
        "test_save_filter": ("DID NOT RAISE NotImplementedError", DIRECTORY),
        "test_save_full_state_dict": ("KeyError: '_forward_module.w1.weight'", WRAPPED),
        "test_load_full_state_dict_into_sharded_model": ("assert False", "compares NaNs, on CPUs with theirs too"),
    },
}
"""Which tests do not pass: what they say, and why."""
WITHOUT_TENSOR_RANKS = ("test_model_parallel_single_file_checkpoint_with_compile",)
"""On one device: nothing is parallel."""
STRATEGIES = {"pytorch": "TrainerStrategy", "fabric": "FabricStrategy"}


def edited_tests(lightning: Path, which: str, folder: Path, strategy: str) -> Path:
    """A copy of their tests with one edited file."""
    tests = lightning / TESTS[which]
    shutil.copytree(tests, folder / tests.name)
    shutil.copy(lightning / "pyproject.toml", folder)
    file = folder / tests.name / "strategies" / "test_model_parallel_integration.py"
    source = for_tensor_ranks(for_cpus(file.read_text("utf-8")))
    module = f"{__package__}.stand_ins"
    file.write_text(for_ours(source, module, strategy, takes_both_sizes=True), "utf-8")
    return file


def outcomes_by_rank(file: Path, case: str, size: int) -> list[str]:
    ranks = Ranks(size)
    try:
        return ranks.run(outcome_of, str(file), case, str(file.parents[2]))
    finally:
        ranks.close()


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("which", ["pytorch", "fabric"])
def test_their_tests_pass_but_for_these(lightning: Path, one: Ranks, tmp_path: Path, which: str) -> None:
    file = edited_tests(lightning, which, tmp_path, STRATEGIES[which])
    sizes = ranks_of_tests((lightning / TESTS[which] / "strategies" / file.name).read_text("utf-8"))
    [cases] = one.run(cases_of, str(file))
    assert len(cases) >= 18
    assert OTHERWISE[which].keys() <= set(cases)
    differ = {}
    for case in cases:
        test, _, _ = case.partition("[")
        if test in WITHOUT_TENSOR_RANKS:
            continue
        outcomes = outcomes_by_rank(file, case, sizes[test])
        if case in OTHERWISE[which]:
            text, why = OTHERWISE[which][case]
            # a test may ask one thing of the first rank and another of the rest
            as_expected = any(outcome.startswith("failed") and text in outcome for outcome in outcomes)
        else:
            as_expected, why = all(outcome == "passed" for outcome in outcomes), "it should pass"
        if not as_expected:
            differ[case] = why, outcomes
    assert not differ


def test_gradients_that_all_ranks_have_are_dtensors(lightning: Path, tmp_path: Path) -> None:
    file = edited_tests(lightning, "fabric", tmp_path, "FabricAllReduceStrategy")
    for case in ("test_fsdp2_tensor_parallel[True]", "test_fsdp2_tensor_parallel[False]"):
        assert outcomes_by_rank(file, case, 4) == ["passed"] * 4
