"""Tables of what GPUs have shown: ``python -m benchmarks.gpu_check.results docs/design/gpu/FILE.json``.

Such a file has the runs of one day on one card, in order. A case that was run again counts as the last run says.
"""

from __future__ import annotations

import collections
import json
import sys
from pathlib import Path
from typing import Any

from .lines import Verdict
from .sections import SECTIONS

_ENGINES = {
    "autocast": "one GPU, fp32 weights, bf16 autocast",
    "bf16": "one GPU, bf16 weights",
    "one-of-8.autocast": "first of 8, fp32 weights, bf16 autocast",
    "one-of-8.bf16": "first of 8, bf16 weights",
    "one-of-8.less-memory": "first of 8, bf16 weights, less memory",
    "fsdp2": "one GPU, FSDP2",
    "one-of-8.fsdp2": "first of 8, FSDP2",
}
_MODELS = {"gpt-124m": "124M", "gpt-1300m": "1.3B"}

Lines = dict[str, dict[str, Any]]


def last_lines(path: Path) -> Lines:
    """Returns the lines of a file by name, each from the last run that has its case."""
    found: Lines = {}
    for run in json.loads(path.read_text())["runs"]:
        again = {line["name"] for line in run["lines"]}
        sections = {name.partition(".")[0] for name in again}
        # A section that is run again may have other cases: those of before are not this tree's.
        found = {name: line for name, line in found.items() if name.partition(".")[0] not in sections or name in again}
        found |= {line["name"]: line for line in run["lines"]}
    return found


def verdicts(lines: Lines) -> str:
    """The number of lines of each section that passed and failed, as a table."""
    counts = collections.Counter((name.partition(".")[0], line["verdict"]) for name, line in lines.items())
    rows = ["| section | about | PASS | FAIL |", "|---|---|---|---|"]
    for letter, section in SECTIONS.items():
        passed, failed = (counts[letter, verdict.value] for verdict in (Verdict.PASS, Verdict.FAIL))
        if passed or failed:
            names = ", ".join(f"`{name}`" for name in lines if _failed(lines[name], letter))
            rows.append(f"| {letter} | {section.about} | {passed} | {names or failed} |")
    return "\n".join(rows)


def _failed(line: dict[str, Any], letter: str) -> bool:
    return bool(line["name"].startswith(f"{letter}.") and line["verdict"] == Verdict.FAIL.value)


def figures(lines: Lines) -> str:
    """The lines of section S, as a table."""
    columns = ["model", "ranks and weights", "engine", "ms a step", "ratio in paired rounds", "tokens/s"]
    columns += ["held GiB", "table GiB"]
    rows = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    for case, about in _ENGINES.items():
        for model, short in _MODELS.items():
            prefix = f"S.{model}.{case}."
            for name, line in lines.items():
                if name.startswith(prefix) and "." not in (engine := name.removeprefix(prefix)):
                    of = line["figures"]
                    ratio = next(value for key, value in of.items() if key.startswith("to_"))
                    row = [short, about, f"`{engine}`", f"{line['value']:.1f}", f"{ratio:.2f}"]
                    row += [f"{of['tokens_per_s']:,}", f"{of['held_gib']:.2f}"]
                    rows.append("| " + " | ".join([*row, f"{of['table_gib']:.2f}" if "table_gib" in of else ""]) + " |")
    return "\n".join(rows)


if __name__ == "__main__":
    of_last = last_lines(Path(sys.argv[1]))
    print(verdicts(of_last), figures(of_last), sep="\n\n")
