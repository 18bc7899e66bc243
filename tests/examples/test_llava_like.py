"""The example in four stages, and in two times two data-parallel ranks, beside the same script in one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from .launched import losses, run_example

SCRIPT = "llava_like.py"


@pytest.mark.fresh
@pytest.mark.long
def test_stages_have_the_losses_and_weights_of_one_process(tmp_path: Path) -> None:
    run_example(SCRIPT, "--stages", "1", "--steps", "30", "--out", "alone", cwd=tmp_path, processes=1)
    alone = losses(tmp_path / "alone")
    assert alone[-1] < alone[0] - 0.4, "it learns"
    expected = torch.load(tmp_path / "alone" / "last.pt", weights_only=True)
    for stages in (4, 2):
        out = f"{stages} stages"
        printed = run_example(SCRIPT, "--stages", f"{stages}", "--steps", "30", "--out", out, cwd=tmp_path, processes=4)
        assert f"{stages} stages x {4 // stages}: " in printed
        assert losses(tmp_path / out) == pytest.approx(alone, abs=1e-4)
        weights = torch.load(tmp_path / out / "last.pt", weights_only=True)
        assert list(weights) == list(expected)
        for name, weight in weights.items():
            torch.testing.assert_close(weight, expected[name], rtol=0.0, atol=2e-3)
