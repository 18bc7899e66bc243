"""The example on 2 x 2 ranks beside the same script in one process."""

from __future__ import annotations

from pathlib import Path

import pytest

from .launched import losses, run_example

SCRIPT = "tensor_parallel_gpt.py"


@pytest.mark.fresh
@pytest.mark.long
def test_a_mesh_has_the_losses_of_one_process_and_goes_on_from_its_file(tmp_path: Path) -> None:
    run_example(SCRIPT, "--tp", "1", "--steps", "12", "--out", "alone", cwd=tmp_path, processes=1)
    printed = run_example(SCRIPT, "--steps", "8", "--out", "mesh", cwd=tmp_path, processes=4)
    alone, mesh = losses(tmp_path / "alone"), losses(tmp_path / "mesh")
    assert "dp 2 x tp 2:" in printed
    assert mesh == pytest.approx(alone[:8], abs=1e-5)
    assert alone[-1] < alone[0] - 1.0, "it learns"
    # and one process goes on from what the mesh saved, as if it had trained all along
    resume = ("--resume", "mesh/last.pt", "--steps", "4", "--out", "resumed")
    run_example(SCRIPT, "--tp", "1", *resume, cwd=tmp_path, processes=1)
    assert losses(tmp_path / "resumed") == pytest.approx(alone[8:], abs=1e-5)
