"""The page of results of a GPU, and README's figures, are those of the file of its lines."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from benchmarks.gpu_check import results

ROOT = Path(__file__).parents[2]


def test_the_page_of_results_has_the_tables_of_its_file() -> None:
    page = (ROOT / "docs" / "project" / "gpu_results.md").read_text()
    [path] = (ROOT / "docs" / "design" / "gpu").glob("*.json")
    lines = results.last_lines(path)
    assert results.verdicts(lines) in page
    assert results.figures(lines) in page


@pytest.mark.parametrize(
    ("row", "ours", "theirs"), [("alone", "autocast", "fsdp2"), ("as the first", "one-of-8.autocast", "one-of-8.fsdp2")]
)
def test_readme_has_figures_of_the_file(row: str, ours: str, theirs: str) -> None:
    [shown] = re.findall(rf"^\| {row}.*?\| ([\d., |]+) \|$", (ROOT / "README.md").read_text(), re.MULTILINE)
    [path] = (ROOT / "docs" / "design" / "gpu").glob("*.json")
    lines = results.last_lines(path)
    names = [f"{ours}.ddp", f"{ours}.ours", f"{theirs}.fsdp2"]
    found = [lines[f"S.gpt-1300m.{name}"] for name in names]
    for text, line in zip(shown.split(" | "), found, strict=True):
        ms, held = map(float, text.split(", "))
        assert ms == pytest.approx(line["value"], abs=0.55)
        assert held == pytest.approx(line["figures"]["held_gib"], abs=0.06)


def test_a_line_of_a_later_run_counts(tmp_path: Path) -> None:
    runs = [[("A.one", "FAIL"), ("A.gone", "FAIL"), ("B.one", "PASS")], [("A.one", "PASS")]]
    path = tmp_path / "file.json"
    content = [{"lines": [{"name": name, "verdict": verdict} for name, verdict in run]} for run in runs]
    path.write_text(json.dumps({"runs": content}))
    assert {name: line["verdict"] for name, line in results.last_lines(path).items()} == {
        "A.one": "PASS",
        "B.one": "PASS",
    }
