"""docs/optimizers.md says what its script finds, and the script notices what is neither equal nor refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.optimizer_libraries import LIBRARIES
from benchmarks.optimizers import Found, try_optimizer

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
