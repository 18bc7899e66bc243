"""docs/optimizers.md says what its script finds, and the script notices what is neither equal nor refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.optimizer_libraries import LIBRARIES
from benchmarks.optimizers import Found, Outcome, compare, try_optimizer

PAGE = Path(__file__).parents[2] / "docs" / "optimizers.md"
TORCH = LIBRARIES[0]


def found_on_the_page() -> dict[tuple[str, str], Found]:
    """By package and optimizer."""
    text = PAGE.read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(.+?)` \| (\S+) \S+ \| (\w+) \| (.+) \|$", text, re.MULTILINE)
    return {(package, name): Found(how, result) for name, package, how, result in rows}


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", TORCH.names)
def test_what_the_page_says_of_torchs_optimizers_is_what_the_script_finds(name: str) -> None:
    how, result = found_on_the_page()["torch", name]
    assert try_optimizer(TORCH, name).cells == f"{how} | {result}"


def test_the_page_has_every_optimizer_of_the_script_each_equal_or_refused() -> None:
    found = found_on_the_page()
    assert set(found) == {(library.package, name) for library in LIBRARIES for name in library.names}
    assert len(found) >= 60
    for key, (how, result) in found.items():
        is_sharded = how in ("flat", "whole", "mixed") and result in ("equal to the bit", "within 1e-6")
        assert is_sharded or (how == "refused" and not result.startswith(("DIFFERENT", "FAILED"))), key


def outcome(weight: float, state: Any = 0) -> Outcome:
    weights = {"weight": torch.tensor([1.0, weight], dtype=torch.float64)}
    return Outcome(weights, {"state": {0: {"step": state}}}, weights)


@pytest.mark.parametrize(
    ("mine", "said"),
    [
        ([outcome(2.0), outcome(2.0)], "equal to the bit"),
        ([outcome(2.0), outcome(2.000001)], "within 1e-6"),
        ([outcome(2.0), outcome(2.00001)], "DIFFERENT: weights by 5.0e-06, saved state by 0.0e+00"),
        ([outcome(2.0, state=1), outcome(2.0)], "DIFFERENT: weights by 0.0e+00, saved state by inf"),
        ([outcome(float("nan")), outcome(2.0)], "DIFFERENT: weights by inf"),
    ],
)
def test_a_difference_on_any_rank_is_said(mine: list[Outcome], said: str) -> None:
    assert compare(mine, [outcome(2.0), outcome(2.0)]).startswith(said)
