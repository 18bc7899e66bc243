"""Links of every page lead somewhere; pages and figures that a command writes are those that it writes now."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import megastrategy
from benchmarks import speed_chart
from benchmarks.memory_table import BF16, FP32, table

from . import PAGES, ROOT, command_line, options


def links(page: Path) -> list[str]:
    """Without those that leave the repository, and without blocks of code."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    found = sorted(set(re.findall(r"(?<!`)\]\(([^)\s]+)\)", text)))
    return [link for link in found if not re.match(r"https?:", link)]


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_and_headings(page: Path) -> None:
    for link in links(page):
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_version_is_in_all_places() -> None:
    version = megastrategy.__version__
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"## {version}" in (ROOT / "CHANGELOG.md").read_text()


def test_command_line_page_is_the_commands_help() -> None:
    assert command_line.PAGE.read_text(encoding="utf-8") == command_line.page(), "python -m tests.docs.command_line"


def test_options_page_is_the_docstrings() -> None:
    assert options.PAGE.read_text(encoding="utf-8") == options.page(), "python -m tests.docs.options"


def literals(tree: ast.AST) -> Iterator[str]:
    """Every string of a program, with a line break for each value that it fills in."""
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(part.value if isinstance(part, ast.Constant) else "\n" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


FILLED_IN = (
    *("'[^']*'", r"\d+", r"\(4, 4\)", r"layer\.weight", r"torch\.[\w.]+", "epoch=1.ckpt", "__0_0.distcp", "LBFGS"),
    *("a tensor group", "the reduce-scatter", "tensor rank", r"state_dict\(\)(?= is)", "no gradient(?= in)"),
    *("DistributedDataParallel", "find_unused_parameters=False"),
)
"""What the page has in the place of values."""


def test_errors_page_quotes_the_programs_words() -> None:
    """Runs of two words and more between values are in the package's strings, or in what the page leaves out (...)."""
    files = (ROOT / "megastrategy").rglob("*.py")
    strings = "\n".join(text for file in files for text in literals(ast.parse(file.read_text(encoding="utf-8"))))
    quoted = re.findall(r"```text\n(.*?)```", (ROOT / "docs" / "reference" / "errors.md").read_text(), re.DOTALL)
    between = "|".join((r"\.\.\.", r"\n", r"[.:] ", *FILLED_IN))
    runs = [run.strip(" .,") for text in quoted for run in re.split(between, text) if len(run.split()) > 1]
    assert len(runs) > len(quoted)
    assert [run for run in runs if run not in strings] == []


def test_memory_page_has_the_printed_table() -> None:
    assert table() in (ROOT / "docs" / "memory.md").read_text()


def test_first_pages_have_the_measured_figures() -> None:
    """README and the first page of the site repeat the table of speed, and README that of the GPU."""
    (_, ddp, *_), ours, forward, hook, _ = speed_chart.rows(speed_chart.PAGE.read_text(encoding="utf-8"))
    readme, first = ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "docs/index.rst"))
    assert ddp == 1
    said = re.findall(r"takes ([\d.]+) of torch DDP's, ([\d.]+) with\s`overlap_param_gather.*hook ([\d.]+) \(", readme)
    assert said == [tuple(f"{row[1]:.2f}" for row in (ours, forward, hook))]
    assert f"**{forward[1]:.2f}**" in first
    [method] = [method for method in FP32 if method.label == "megatron_ddp"]
    assert f"**{method.bytes_on(8):g}, not {FP32[0].bytes_on(8):g}**" in first
    measured = (ROOT / "docs" / "project" / "gpu_results.md").read_text(encoding="utf-8")
    milliseconds = {float(row) for row in re.findall(r"^(?:\|[^|]*){3}\| ([\d.]+) \|", measured, re.MULTILINE)}
    rows = re.findall(r"^\| [\d.]+M?B?, bf16[^|]*\| ([\d., ]+) \| ([\d., ]+) \|", readme, re.MULTILINE)
    figures = [float(figure) for row in rows for cell in row for figure in cell.split(", ")]
    assert len(figures) == 12
    for figure in figures:  # README has three digits
        assert any(abs(figure - ms) < (0.51 if figure >= 100 else 0.01) for ms in milliseconds), figure


def test_readme_has_the_bytes_of_eight_ranks() -> None:
    text = (ROOT / "README.md").read_text()
    rows = re.findall(r"^\| (?:bytes per parameter on one of 8|with bf16 weights)[^|]*(.*)$", text, re.MULTILINE)
    for row, methods in zip(rows, (FP32, BF16), strict=True):
        assert sorted(re.findall(r"[\d.]+", row)) == sorted(f"{method.bytes_on(8):.4g}" for method in methods)
