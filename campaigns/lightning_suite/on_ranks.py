"""A job of ranks: one of Lightning's tests that need several processes, in pytest on each of them at once."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Generator
from pathlib import Path

import pytest
import torch

from .substitution import Outcomes, read_outcomes


class _Cases:
    """A pytest plugin: the names of the tests that it would run."""

    def __init__(self) -> None:
        self.found: list[str] = []

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.found = [item.name for item in session.items]


class _Collected:
    """A pytest plugin: collects a test's models, and with them the engines' threads, before Lightning looks for any.

    Fabric has no end at which an engine could end its own.
    """

    @pytest.hookimpl(wrapper=True)
    def pytest_pyfunc_call(self) -> Generator[None, object, object]:
        try:
            return (yield)
        finally:
            gc.collect()


def cases_of(file: str) -> list[str]:
    """The tests in Lightning's ``file``, each with its parameters."""
    cases = _Cases()
    _pytest(Path(file), "--collect-only", str(file), plugin=cases)
    return cases.found


def outcome_of(file: str, case: str, to: str) -> str:
    """How a test in Lightning's ``file`` ended on this rank, and why if it did not pass."""
    # Lightning's tests make batches without a seed, so that each rank has another
    torch.manual_seed(0)
    lines = Path(to) / f"{case} on {os.environ['LOCAL_RANK']}.jsonl"
    _pytest(Path(file), f"{file}::{case}", plugin=Outcomes(lines))
    [line] = read_outcomes(lines).values()
    return f"{line['outcome']}: {line['message']}".rstrip(": ")


def _pytest(file: Path, *arguments: str, plugin: object) -> None:
    folder = file.parents[1]  # tests_pytorch or tests_fabric, a package
    os.environ["PL_RUN_STANDALONE_TESTS"] = "1"
    # which the compiler sets, and Fabric's tests take for a leak
    os.environ["_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR"] = ""
    sys.path.insert(0, str(folder.parent))
    os.chdir(folder)
    # torch has deprecated what Lightning calls since, which is an error in Lightning's settings
    settings = ("-p", "no:cacheprovider", "-o", "filterwarnings=")
    pytest.main(["-q", *settings, *arguments], plugins=[plugin, _Collected()])
