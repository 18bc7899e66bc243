"""The picture of a timeline."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

import pytest

from megastrategy.tools.profile_report import draw
from megastrategy.tools.timeline import ModelEvents, RankEvents

from .test_command import Hides
from .timeline_events import one_step


def test_without_matplotlib_the_picture_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Hides("matplotlib"), *sys.meta_path])
    (tmp_path / "timeline.png").write_text("of an older run")
    assert "pip install 'megastrategy[plot]'" in draw([RankEvents(0, [ModelEvents(one_step())])], tmp_path)
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert [name.split(">")[0] for name in project["optional-dependencies"]["plot"]] == ["matplotlib"]
    assert not list(tmp_path.iterdir())
