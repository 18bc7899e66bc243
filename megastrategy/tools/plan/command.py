"""What the ``megastrategy plan`` command does."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import os
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from torch import Tensor, nn

from ..rendering import show
from .cards import parse_cards
from .layers import first_line
from .memory import parse_bytes, parse_ranks
from .partitions import plan
from .report import memory_json, memory_tables, partition_table
from .scripts import PlanError, measure_script


def plan_ranks(
    script: str,
    arguments: tuple[str, ...],
    *,
    is_module: bool,
    ranks: str,
    memory: str,
    computes: bool,
    as_json: bool,
    **_: Any,
) -> None:
    try:
        sizes = parse_ranks(ranks)
        device_bytes = parse_bytes(memory)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    if not is_module and not Path(script).is_file():
        what = "is no file" if Path(script).exists() else "does not exist"
        raise click.UsageError(f"the script {script} {what}")
    arguments = arguments[1:] if arguments[:1] == ("--",) else arguments
    steps = measure_script(script, arguments, sizes, is_module=is_module, computes=computes)
    if as_json:
        click.echo(json.dumps(memory_json(steps, device_bytes), indent=2))
    else:
        show(*memory_tables(steps, device_bytes))


def plan_partitions(
    spec: str,
    cards: str,
    *,
    batch: str | None,
    microbatches: int,
    objective: Any,
    schedule: Any,
    slack: float,
    frozen: str | None,
    split: str | None,
    together: tuple[str, ...],
    as_json: bool,
    **_: Any,
) -> None:
    try:
        devices = parse_cards(cards)
        groups = [_group(text) for text in together]
        spec_of_split = None if split is None else _split(split)
        not_trained = None if frozen is None else _layers(frozen)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    if batch is None:
        raise click.UsageError("--cards needs --batch, a microbatch as module:name")
    layers = _load(spec)
    sample = _load(batch)
    if not isinstance(layers, list | tuple | nn.Sequential | nn.ModuleList):
        raise click.UsageError(f"{spec} is a {type(layers).__name__}: expected a list of layers, or an nn.Sequential")
    if not isinstance(sample, Tensor):
        raise click.UsageError(f"{batch} is a {type(sample).__name__}: expected a tensor")
    try:
        best = plan(
            list(layers),
            sample,
            devices=devices,
            microbatches=microbatches,
            keep_together=groups,
            objective=objective,
            schedule=schedule,
            slack=slack,
            frozen=not_trained,
            split_spec=spec_of_split,
        )
    except ValueError as error:
        raise PlanError(str(error)) from error
    if as_json:
        click.echo(json.dumps(dataclasses.asdict(best), indent=2))
    else:
        show(partition_table(best, devices), best.why)


def _split(text: str) -> list[int]:
    parts = text.split("-")
    if not all(part.isdecimal() for part in parts):
        raise ValueError(f"{text!r}: expected the layers of each stage, such as 9-22-6-1")
    return [int(part) for part in parts]


def _layers(text: str) -> list[int]:
    """Reads ``0-23,30``; "none" is none."""
    layers: list[int] = []
    for part in text.split(",") if text != "none" else ():
        first, last = _group(part if "-" in part else f"{part}-{part}", text)
        layers += range(first, last + 1)
    return layers


def _group(text: str, whole: str | None = None) -> tuple[int, int]:
    first, _, last = text.partition("-")
    if not (first.isdecimal() and last.isdecimal() and int(first) <= int(last)):
        raise ValueError(
            f"{(text if whole is None else whole)!r}: expected the first and the last layer, such as 24-25"
        )
    return int(first), int(last)


def _load(spec: str) -> Any:
    """Loads ``module:name``; calls it if it is a function."""
    module_name, _, name = spec.partition(":")
    if not (all(part.isidentifier() for part in module_name.split(".")) and name.isidentifier()):
        raise click.UsageError(f"{spec!r}: expected module:name, such as my_project:layers")
    if module_name.endswith(".py"):
        raise click.UsageError(f"{spec!r} names a file: write {module_name.removesuffix('.py')}:{name}")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # where python -m looks first
    with _told(f"importing {module_name}"):
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            # A module that it imports itself is another mistake.
            if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
                raise
            raise click.UsageError(f"there is no module {module_name} (in {os.getcwd()})") from error
    if not hasattr(module, name):
        raise click.UsageError(f"the module {module_name} has no {name}")
    value = getattr(module, name)
    if not callable(value) or isinstance(value, nn.Module):
        return value
    with _told(f"{spec}()"):
        return value()


@contextlib.contextmanager
def _told(what: str) -> Iterator[None]:
    """Says in a line what fails in the user's own code, and where."""
    try:
        yield
    except click.UsageError:
        raise
    # A module that exits would end the command without a word.
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        where = next((f" ({f.filename}, line {f.lineno})" for f in reversed(frames) if f.filename != __file__), "")
        if isinstance(error, SyntaxError):
            where = f" ({error.filename}, line {error.lineno})"
        raise PlanError(f"{what} fails with {first_line(error)}{where}") from error
