"""The matrix of what works with ``"ddp"``: each feature once, run under ``"ddp"`` and under ours, and compared.

``docs/project/compatibility.md`` is written from it by ``python -m tests.doors.matrix``; a test holds the file to it.
"""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

DOCUMENT = Path(__file__).parents[2] / "docs" / "project" / "compatibility.md"
MODES = {
    "reduce-scatter": {"use_distributed_optimizer": True},
    "all-reduce": {"use_distributed_optimizer": False},
}
REDUCE_SCATTER, ALL_REDUCE = MODES["reduce-scatter"], MODES["all-reduce"]


@dataclasses.dataclass(frozen=True)
class Feature:
    """Something a user does with ``"ddp"``.

    Args:
        area: its heading.
        name: what a user would call it.
        job: ``job(strategy_name, strategy_options, **options)`` runs on both ranks, and on one alone, and returns what
            to compare: weights, losses, metrics, what callbacks saw. Picklable; ``assert_equal`` of
            tests/support/comparison.py says what can be compared.
        options: more arguments for the job.
        rtol: the relative tolerance with reduce-scatter, where the order of a sum differs; 0 is equality of the bits.
        refused: with reduce-scatter it is refused instead, and this is in the error's message.
        note: for the table.
        often: ``make test`` runs it, not ``make nightly`` alone.
    """

    area: str
    name: str
    job: Callable[..., Any]
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    rtol: float = 0.0
    refused: str = ""
    note: str = ""
    often: bool = False

    def __str__(self) -> str:
        return f"{self.area}: {self.name}"


@dataclasses.dataclass(frozen=True)
class Beyond:
    """Something that works here and not with ``"ddp"``: what, and the test (``file.py::name``) that shows it."""

    name: str
    test: str


def collect() -> tuple[list[Feature], list[Beyond]]:
    """Everything that the modules of ``tests.doors.features`` list as FEATURES and BEYOND."""
    features: list[Feature] = []
    beyond: list[Beyond] = []
    package = importlib.import_module("tests.doors.features")
    for info in sorted(pkgutil.iter_modules(package.__path__), key=lambda info: info.name):
        module = importlib.import_module(f"tests.doors.features.{info.name}")
        features += getattr(module, "FEATURES", [])
        beyond += getattr(module, "BEYOND", [])
    return features, beyond


def table() -> str:
    """The document, from the features."""
    features, beyond = collect()
    lines = [
        '# What works with `"ddp"` works with `"megatron_ddp"`',
        "",
        'A test trains each line on two ranks under `"ddp"` and under `"megatron_ddp"`, with the sharded optimizer',
        "(reduce-scatter) and without (all-reduce). It compares weights, losses, metrics and values in callbacks:",
        "`python -m pytest -m 'nightly or not nightly' tests/doors/shared/test_matrix.py`. *To the bit* means that",
        "no bit differs. A number is the allowed relative difference, because a sum has a different order.",
        "`python -m tests.doors.matrix` writes this page, and a test fails if it is out of date.",
        "",
        "On one rank (`devices=1`) nothing is sharded. There each line, including those refused on two ranks, is",
        'compared with `"ddp"` on one rank, with both settings, and no bit differs. Lightning runs',
        "[its own tests](lightnings_own_tests.md) on one rank, too.",
    ]
    for area in dict.fromkeys(feature.area for feature in features):
        lines += ["", f"## {area}", "", "| feature | reduce-scatter | all-reduce | note |", "|---|---|---|---|"]
        for feature in (feature for feature in features if feature.area == area):
            sharded = f'refused: "{feature.refused}"' if feature.refused else _equality(feature.rtol)
            lines.append(f"| {feature.name} | {sharded} | to the bit | {feature.note} |")
    lines += ["", '## What `"ddp"` cannot do', "", "| feature | test |", "|---|---|"]
    lines += [f"| {item.name} | `tests/doors/{item.test}` |" for item in beyond]
    return "\n".join(lines) + "\n"


def _equality(rtol: float) -> str:
    return "to the bit" if rtol == 0 else f"{rtol:g}"


if __name__ == "__main__":
    DOCUMENT.write_text(table())
