"""The benchmarks of a Trainer's overhead, of meshes and of what is paid once, and the arithmetic of the first."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.results import Spread
from benchmarks.trainer_overhead import Block, overhead
from tests.support.patience import HANG_S

ROOT = Path(__file__).parents[2]


@pytest.mark.fresh
@pytest.mark.long
def test_it_compares_both_strategies_with_loops_of_their_own(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.trainer_overhead", "--rounds", "2", "--steps", "3", "--out", tmp_path]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=HANG_S, check=False)
    assert done.returncode == 0, done.stderr
    written = json.loads((tmp_path / "trainer_overhead.json").read_text())
    for strategy in ("ddp", "megatron_ddp"):
        assert strategy in done.stdout
        for field in ("step_ms", "cpu_ms"):
            assert len(written[strategy][field]["samples"]) == 2


@pytest.mark.fresh
@pytest.mark.long
@pytest.mark.parametrize("name", ["tensor_parallel", "experts"])
def test_engines_of_a_mesh_train_to_the_same_losses_in_turns(name: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", f"benchmarks.{name}", "--rounds", "2", "--steps", "1", "--out", tmp_path]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=HANG_S, check=False)
    assert done.returncode == 0, done.stderr
    written = json.loads((tmp_path / f"{name}.json").read_text())
    assert written["losses"].keys() >= {"ours", "fsdp2"}
    for engine in written["losses"]:
        assert engine in done.stdout
        assert len(written[engine]["step_ms"]["samples"]) == 2


@pytest.mark.fresh
@pytest.mark.long
def test_what_is_paid_once_is_measured_for_both_strategies_and_three_ways_to_a_state(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.once", "--params", "3", "--rounds", "2", "--out", tmp_path]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=HANG_S, check=False)
    assert done.returncode == 0, done.stderr
    figures = json.loads((tmp_path / "once.json").read_text())["costs"]
    for words in ('"ddp"', '"megatron_ddp"', "copy.deepcopy", "consolidated", "ours"):
        (name,) = (name for name in figures if words in name)
        assert len(figures[name]["wall_ms"]["samples"]) == 2


def test_a_round_is_as_long_as_on_its_slowest_rank_and_costs_what_its_ranks_cost_on_average() -> None:
    """Two rounds on two ranks. Wall: 9 - 5 and 7 - 6; processor: (2 + 6) / 2 - (1 + 3) / 2 and 3 - 1."""
    first = {"ddp": [Block(9, 2), Block(6, 3)], "ddp loop": [Block(4, 1), Block(6, 1)]}
    second = {"ddp": [Block(8, 6), Block(7, 3)], "ddp loop": [Block(5, 3), Block(1, 1)]}
    assert overhead([first, second], "ddp", "step_ms") == Spread.of([4, 1])
    assert overhead([first, second], "ddp", "cpu_ms") == Spread.of([2, 2])
