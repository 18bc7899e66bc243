"""``RayMegatronDDPStrategy`` in workers of a real Ray, which the tests start on this machine. In the long tier."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.comparison import assert_equal
from tests.support.extra_packages import python_with
from tests.support.scripts import ROOT, outside_of_ranks
from tests.support.timeouts import HANG_S

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.timeout(1800),  # a minute or two on an idle machine; each worker imports torch, Ray and a framework
]

NO_LIGHTNING = "raise ModuleNotFoundError('hidden for this test', name='lightning')\n"


@pytest.fixture(scope="module")
def ray_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return python_with(tmp_path_factory.mktemp("ray"), "ray[train]>=2.60", "pytorch_lightning", imports="ray")


def run_case(python: Path, name: str, folder: Path, *paths: Path) -> None:
    """A case of ``ray_jobs`` in an interpreter of its own. ``paths``: searched before others by all processes."""
    ours = outside_of_ranks() | {"PYTHONPATH": os.pathsep.join(map(str, [*paths, ROOT])), "TMPDIR": str(folder)}
    command = [str(python), "-m", "campaigns.many_machines.ray_jobs", name, str(folder)]
    done = subprocess.run(command, cwd=ROOT, env=ours, capture_output=True, text=True, timeout=2.5 * HANG_S)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("hidden", ["pytorch_lightning", "lightning"])
def test_trainers_in_one_worker_are_those_of_rays_ddp_to_the_bit(ray_python: Path, tmp_path: Path, hidden: str) -> None:
    """With either package: Ray takes ``lightning`` where both are there."""
    shadow = tmp_path / "shadow" / hidden
    if hidden == "lightning":
        shadow.mkdir(parents=True)
        (shadow / "__init__.py").write_text(NO_LIGHTNING)
    run_case(ray_python, "alike", tmp_path, tmp_path / "shadow")
    for rank in range(2):
        found: dict[str, Any] = torch.load(tmp_path / f"rank{rank}.pt")
        package = "lightning" if hidden == "pytorch_lightning" else "pytorch_lightning"
        assert found["package"] == package
        runs = found["runs"]
        assert list(runs) == ["ddp", "reduce-scatter", "all-reduce", "again"]
        for run in runs.values():
            assert_equal(run["losses"], runs["ddp"]["losses"])
            assert_equal(run["weights"], runs["ddp"]["weights"])
            assert (run["device"], run["sampler"]) == ("cpu", (2, rank))
        losses, steps = runs["ddp"]["losses"], 4  # an epoch's
        assert sum(losses[:steps]) > sum(losses[-steps:]), "it learns"
        assert found["timeouts"] == [123.0, 123.0], "TorchConfig's, for the engine's group and for meetings"
        # none could be set: signal.signal() raises in such a thread
        assert not found["in_main_thread"]
        assert found["handlers_stay"]
        *wrong_strategies, timeout, start_method = found["refusals"]
        assert len(wrong_strategies) == 3
        for said in wrong_strategies:
            assert said.startswith("MisconfigurationException: MegatronDDPStrategy does not find its ranks")
            assert "megastrategy.ray.RayMegatronDDPStrategy(...)" in said
        assert timeout.startswith("ValueError: timeout=")
        assert "TorchConfig(timeout_s=...)" in timeout
        assert start_method.startswith("ValueError: start_method='spawn': ")


def test_a_failed_worker_restarts_from_what_was_reported(ray_python: Path, tmp_path: Path) -> None:
    """One that raises, with files, and one that is killed, with directories; and a run that goes on on one worker."""
    run_case(ray_python, "failures", tmp_path)
    saved: dict[str, list[str]]
    saved, first_loss = json.loads((tmp_path / "found.json").read_text())
    assert saved["none"] == saved["raise"] == ["checkpoint.ckpt"]
    # each worker reported its own part from a folder of its own, and Ray has put them together
    parts = {"checkpoint.ckpt", *(f"checkpoint.ckpt/{name}" for name in (".metadata", "meta.pt"))}
    parts |= {f"checkpoint.ckpt/__{rank}_0.distcp" for rank in range(2)}
    assert set(saved["kill"]) == parts

    def of(run: str, name: str, rank: int = 0) -> dict[str, Any]:
        found: dict[str, Any] = torch.load(tmp_path / run / f"{name}-rank{rank}.pt")
        return found

    for rank in range(2):
        whole = of("none", "began", rank)
        assert whole["step"] == len(whole["losses"]) == 16
        for run in ("raise", "kill"):
            assert not (tmp_path / run / f"began-rank{rank}.pt").exists(), "it failed"
            resumed = of(run, "resumed", rank)
            assert (resumed["size"], resumed["step"]) == (2, 16)
            # Ray's controller hears of a report later than the worker goes on: a failure may come before it does
            begins_at = len(whole["losses"]) - len(resumed["losses"])
            assert begins_at in (4, 8), "one epoch was reported, or two"
            assert_equal(resumed["losses"], whole["losses"][begins_at:])
            assert_equal(resumed["weights"], whole["weights"])
    alone = of("fewer", "resumed")
    assert (alone["size"], alone["step"]) == (1, 16 + 8), "an epoch of one rank has twice the steps"
    assert alone["losses"][0] == first_loss, "from the weights that two workers left"


def test_transformers_in_a_block_of_ours_are_those_of_torch_ddp_to_the_bit(ray_python: Path, tmp_path: Path) -> None:
    """By Ray's own integration with ``transformers.Trainer``; also from a checkpoint of ours in another block, and with
    torch DDP after it."""
    run_case(ray_python, "transformers", tmp_path)
    for rank in range(2):
        found: dict[str, Any] = torch.load(tmp_path / f"rank{rank}.pt")
        made = {name: run["made"].partition(".")[0] for name, run in found.items()}
        ours = {"ours": "megastrategy", "resumed": "megastrategy"}
        assert made == {"stock": "accelerate", "stock resumed": "accelerate"} | ours
        assert {run["step"] for run in found.values()} == {8}
        assert_equal(found["ours"]["weights"], found["stock"]["weights"])
        assert_equal(found["resumed"]["weights"], found["stock resumed"]["weights"])
