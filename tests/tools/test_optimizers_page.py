"""docs/optimizers.md says what its script finds, and the script notices what is neither equal nor refused."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import pytest
import torch

from benchmarks.optimizer_libraries import LIBRARIES, Library
from benchmarks.optimizers import Found, try_optimizer

PAGE = Path(__file__).parents[2] / "docs" / "optimizers.md"
TORCH = LIBRARIES[0]


def found_on_the_page() -> dict[tuple[str, str], Found]:
    """By package and optimizer."""
    text = PAGE.read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(.+?)` \| (\S+) \S+ \| (\w+) \| (.+) \|$", text, re.MULTILINE)
    return {(package, name): Found(how, result) for name, package, how, result in rows}


INSTALLED = [(library, name) for library in LIBRARIES[1:] if library.version is not None for name in library.names]


@pytest.mark.long
@pytest.mark.parametrize(("library", "name"), INSTALLED, ids=[f"{lib.package}-{name}" for lib, name in INSTALLED])
def test_optimizers_of_installed_libraries_are_divided_as_the_page_says(library: Library, name: str) -> None:
    """Each flat and whole answer is proven by training on two ranks, saving and resuming, against torch DDP."""
    expected = found_on_the_page()[library.package, name]
    # as the script that writes the page: some warn on a CPU, and some compile for each shape
    with warnings.catch_warnings(action="ignore"), torch.compiler.set_stance("force_eager"):
        found = try_optimizer(library, name)
    assert found.how == expected.how, found
    assert found.how == "refused" or found.result in ("equal to the bit", "within 1e-6"), found


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", TORCH.names)
def test_what_the_page_says_of_torchs_optimizers_is_what_the_script_finds(name: str) -> None:
    how, result = found_on_the_page()["torch", name]
    assert try_optimizer(TORCH, name).cells == f"{how} | {result}"
