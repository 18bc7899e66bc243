"""The substitutions of the runner of Lightning's own tests, and a comparison that lists failing tests."""

from __future__ import annotations

import json
from pathlib import Path

import lightning.pytorch as pl
import pytest
from lightning.pytorch.strategies import SingleDeviceStrategy

import megastrategy

from .__main__ import compare
from .substitution import in_place_of_auto, read_outcomes

QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}


def test_a_trainer_that_asks_for_no_strategy_gets_ours_and_others_what_they_ask_for() -> None:
    with in_place_of_auto("megatron_ddp"):
        ours = pl.Trainer(accelerator="cpu", devices=1, **QUIET)
        asked = pl.Trainer(accelerator="cpu", devices=1, strategy="ddp", **QUIET)
        two = pl.Trainer(accelerator="cpu", devices=2, **QUIET)
    after = pl.Trainer(accelerator="cpu", devices=1, **QUIET)
    assert isinstance(ours.strategy, megastrategy.MegatronDDPStrategy)
    assert [type(trainer.strategy).__name__ for trainer in (asked, two)] == ["DDPStrategy"] * 2
    assert isinstance(after.strategy, SingleDeviceStrategy)


def test_a_comparison_names_what_fails_in_the_second_run_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outcomes = {
        "ddp": [
            ("both", "failed"),
            ("ours", "passed"),
            ("theirs", "failed"),
            ("teardown", "passed"),
            ("gone", "passed"),
        ],
        "ours": [("both", "failed"), ("ours", "failed"), ("theirs", "passed"), ("teardown", "passed")],
    }
    outcomes["ours"].append(("teardown", "failed"))  # after the test itself had passed
    for name, lines in outcomes.items():
        written = [json.dumps({"test": test, "outcome": outcome, "message": "why"}) for test, outcome in lines]
        (tmp_path / name).write_text("\n".join(written))
    assert read_outcomes(tmp_path / "ours")["both"]["outcome"] == "failed"
    assert compare(tmp_path / "ddp", tmp_path / "ours") == 3
    printed = capsys.readouterr().out
    assert "2 fail in the second run only, 1 in the first only; 1 did not run again" in printed
    for line in ("ours\n    why", "teardown\n    why", "first only: theirs"):
        assert line in printed
