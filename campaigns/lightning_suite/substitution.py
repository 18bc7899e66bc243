"""Puts a strategy where Lightning's tests ask for none, and writes down how each test ended."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from lightning.fabric.strategies.launchers.subprocess_script import _ChildProcessObserver
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.trainer.connectors import accelerator_connector

OBSERVER_SLEEP_S = 0.05
"""The launcher of "ddp" looks after its children every 5 s, even where it has none, and each test awaits it."""


@contextmanager
def in_place_of_auto(strategy: str) -> Iterator[None]:
    """Trainers that would train in this process on the CPU, with no strategy asked for, get ``strategy``.

    Tests that ask for a strategy, for several devices or for an accelerator keep what they ask for.
    """
    connector: Any = accelerator_connector._AcceleratorConnector
    choose = connector._choose_strategy

    def choose_ours(self: Any) -> Any:
        chosen = choose(self)
        alone = isinstance(chosen, SingleDeviceStrategy) and chosen.root_device.type == "cpu"
        return strategy if alone else chosen

    observer: Any = _ChildProcessObserver.__init__
    defaults = observer.__defaults__
    connector._choose_strategy, observer.__defaults__ = choose_ours, (OBSERVER_SLEEP_S,)
    try:
        yield
    finally:
        connector._choose_strategy, observer.__defaults__ = choose, defaults


class Outcomes:
    """A pytest plugin: a line of JSON for each test, written when it ends, since a test may end the process."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._file.write_text("")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.outcome == "rerun" or (report.when != "call" and report.outcome == "passed"):  # type: ignore[comparison-overlap]
            return
        crash = getattr(report.longrepr, "reprcrash", None)
        line = {"test": report.nodeid, "outcome": report.outcome, "message": crash.message if crash else ""}
        with self._file.open("a") as file:
            file.write(json.dumps(line) + "\n")


def read_outcomes(file: Path) -> dict[str, dict[str, str]]:
    """By test. A test that passed and then failed in its teardown failed."""
    found: dict[str, dict[str, str]] = {}
    for line in map(json.loads, file.read_text().splitlines()):
        if line["test"] not in found or found[line["test"]]["outcome"] != "failed":
            found[line["test"]] = line
    return found
