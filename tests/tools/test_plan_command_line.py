"""Options of ``megastrategy plan`` after the script are refused; after two dashes they are the script's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from megastrategy.tools.commands import root

SCRIPT = """\
import json, pathlib, sys
pathlib.Path("arguments.json").write_text(json.dumps(sys.argv[1:]))
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a script that has no options and one that has --json."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT.replace("json", "pickle"))
    (tmp_path / "reports.py").write_text(SCRIPT)
    return tmp_path


def plan(*arguments: str) -> Result:
    return CliRunner().invoke(root, ["plan", *arguments])


def test_an_option_after_the_script_is_refused_with_the_line_to_type() -> None:
    result = plan("train.py", "--json")
    assert result.exit_code == 2
    assert "plan --json ... train.py for the plan, or " in result.stderr
    assert "plan train.py -- --json for the script" in result.stderr
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.long
@pytest.mark.fresh
def test_everything_after_two_dashes_is_the_scripts(folder: Path) -> None:
    result = plan("--ranks", "1", "reports.py", "--", "--json")
    assert result.exit_code == 1, "the script takes no step"
    assert json.loads((folder / "arguments.json").read_text()) == ["--json"]
