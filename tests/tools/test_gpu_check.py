"""The check of GPUs, on the host: its own driver with sections that fail in every way, sections on an engine that is
broken, what it reads out of traces, and the names of torch that only a GPU would reach."""

from __future__ import annotations

import ast
import importlib
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu_check.ranks import FAKE_SIZE
from benchmarks.gpu_check.sections import SECTIONS
from tests.support.patience import HANG_S

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "benchmarks" / "gpu_check"


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command], cwd=ROOT, capture_output=True, text=True, timeout=HANG_S, check=False
    )


# --- the driver ------------------------------------------------------------------------------------------------------


# --- a budget --------------------------------------------------------------------------------------------------------


# --- the check itself ------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.fresh
@pytest.mark.parametrize("letters", ["A,B,E,G,I,J,L", "H,M,Q", "C", "D,F,T", "K,P", "N,R,S", "O"])
def test_it_passes_on_the_host(letters: str, tmp_path: Path) -> None:
    """``.ci/run`` has all of it in one run."""
    done = run("-m", "benchmarks.gpu_check", "--device", "cpu", "--only", letters, "--json", str(tmp_path / "json"))
    assert done.returncode == 0, done.stdout + done.stderr
    lines = json.loads((tmp_path / "json").read_text())["lines"]
    assert {line["name"][0] for line in lines} == set(letters.split(","))
    # One rank is not sharded, so that these also have the first of several.
    sharded = {line["name"][0] for line in lines if f"one-of-{FAKE_SIZE}" in line["name"]}
    assert sharded == set("BGJKMS") & set(letters.split(","))
    assert all(line["detail"] for line in lines if line["verdict"] == "SKIPPED")


@pytest.mark.fresh
@pytest.mark.long
def test_sections_for_several_gpus_pass_on_the_host() -> None:
    done = run("-m", "benchmarks.gpu_check", "--device", "cpu", "--gpus", "3", "--only", "C,F,I,M,N,P,Q,R")
    assert done.returncode == 0, done.stdout + done.stderr


def test_all_sections_are_in_some_case() -> None:
    [mark] = [mark for mark in test_it_passes_on_the_host.pytestmark if mark.name == "parametrize"]
    assert sorted(letter for letters in mark.args[1] for letter in letters.split(",")) == sorted(SECTIONS)


# --- lines and traces ------------------------------------------------------------------------------------------------


# --- what only a GPU would reach -------------------------------------------------------------------------------------

ONLY_WITH_NCCL = {"torch.distributed.ProcessGroupNCCL", "torch.distributed._make_nccl_premul_sum"}


def _names_of_torch(path: Path) -> set[str]:
    """Dotted names below torch that the file uses, with its aliases resolved."""
    tree = ast.parse(path.read_text())
    aliases = {"torch": "torch"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            aliases |= {alias.asname: alias.name for alias in node.names if alias.asname}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            aliases |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    found = {name for name in aliases.values() if name.startswith("torch.")}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            first, _, rest = ast.unparse(node).partition(".")
            if aliases.get(first, "").split(".")[0] == "torch" and re.fullmatch(r"[\w.]+", rest):
                found.add(f"{aliases[first]}.{rest}")
    return found


def _resolves(name: str) -> bool:
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            value: Any = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for part in parts[length:]:
            if not hasattr(value, part):
                return False
            value = getattr(value, part)
        return True
    return False


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_every_name_of_torch_exists(path: Path) -> None:
    """Also in lines that no host runs: a name that is wrong would be found in the minutes that there is a GPU."""
    names = {name for name in _names_of_torch(path) if not any(name.startswith(one) for one in ONLY_WITH_NCCL)}
    assert not {name for name in names if not _resolves(name)}


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_it_needs_only_torch(path: Path) -> None:
    """Doors are imported by their section alone, inside functions."""
    known = {"torch", "megastrategy", *sys.stdlib_module_names}
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            assert {alias.name.split(".")[0] for alias in node.names} <= known
        elif isinstance(node, ast.ImportFrom) and not node.level:
            assert (node.module or "").split(".")[0] in known


# --- torch's sanitizer and two threads -------------------------------------------------------------------------------
