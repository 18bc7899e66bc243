"""The example on ep 2 x edp 2 ranks beside torch in one process, and its file on another number of ranks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from .launched import losses, run_example

SCRIPT = "moe_gpt.py"


@pytest.mark.fresh
@pytest.mark.long
def test_divided_experts_have_the_losses_of_one_process_and_one_process_goes_on_from_their_file(tmp_path: Path) -> None:
    printed = run_example(SCRIPT, "--steps", "12", "--compare", "--out", "all", cwd=tmp_path, processes=4)
    assert "dp 4 = ep 2 x edp 2, 4 experts on a rank:" in printed
    rows = [(float(on_ranks), float(alone)) for on_ranks, alone in re.findall(r"\d+  (\S+)  (\S+)\n", printed)]
    found = losses(tmp_path / "all")
    assert len(rows) == len(found) == 12
    assert [alone for _, alone in rows] == pytest.approx(found, abs=5e-6)
    assert found[-1] < found[0] - 1.0, "it learns"
    # Saved on 4 x 1 ranks, and resumed in one process, as if one run had made all steps.
    run_example(SCRIPT, "--ep", "4", "--steps", "8", "--out", "four", cwd=tmp_path, processes=4)
    resume = ("--resume", "four/last.pt", "--steps", "4", "--out", "resumed")
    run_example(SCRIPT, "--ep", "1", *resume, cwd=tmp_path, processes=1)
    assert losses(tmp_path / "resumed") == pytest.approx(found[8:], abs=5e-6)
