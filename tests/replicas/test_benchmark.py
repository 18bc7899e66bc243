"""The benchmark of replicas: its arithmetic, and a short run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.patience import HANG_S

pytest.importorskip("torchft", reason="replicas need torchft: pip install 'megastrategy[replicas]'")
from benchmarks.replicas import Outages

ROOT = Path(__file__).parents[2]


def test_steps_of_a_survivor_are_divided_by_who_took_part_in_them() -> None:
    """Twelve steps of both, 0.1 s each; a kill in the middle of the next; two steps alone; and two of both."""
    both, alone = (0, 1), (0,)
    steps = [(0.1 * number, both) for number in range(13)]
    steps += [(2.25, alone), (2.3, alone), (2.35, alone), (2.65, both), (2.75, both)]
    found = Outages.of([1.25], steps)
    assert found.after == pytest.approx([1000.0])
    assert found.returns == pytest.approx([300.0])
    assert found.alone == pytest.approx([50.0, 50.0])
    assert found.together == pytest.approx([100.0, 100.0, 100.0])


@pytest.mark.fresh
@pytest.mark.long
def test_it_measures_steps_and_kills(tmp_path: Path) -> None:
    options = ["--case", "2 ms", "--rounds", "2", "--steps", "2", "--kills", "2", "--out", str(tmp_path)]
    command = [sys.executable, "-m", "benchmarks.replicas", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=HANG_S, check=False)
    assert done.returncode == 0, done.stderr
    written = json.loads((tmp_path / "replicas.json").read_text())
    assert len(written["2 ms"]["ratio"]["samples"]) == 2
    assert written["2 ms"]["calls"].keys() >= {"meeting", "exchange", "vote", "copy of the sums"}
    assert len(written["kills"]["after"]) == 2
    assert written["kills"]["returns"]
