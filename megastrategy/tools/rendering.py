"""Tables for the terminal."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from .contents import Contents, Entry, OptimizerContents, loads_with


def render(contents: Contents, depth: int | None) -> Iterator[RenderableType]:
    """Yields the report, piece by piece; names are cut after ``depth`` components, None for a line a tensor."""
    yield from _header(contents)
    states = _state_by_parameter(contents.optimizers)
    for key, entries in contents.models.items():
        yield ""
        yield _table(f"weights {key}".rstrip(), entries, depth, states)
    for optimizer in contents.optimizers:
        yield ""
        yield from (Text(line) for line in _describe_optimizer(optimizer))
        if optimizer.entries:
            yield _optimizer_table(optimizer, depth)
    if contents.others:
        yield ""
        yield _table("tensors elsewhere", [_with_section(entry) for entry in contents.others], depth, {})
    yield ""
    if contents.plain:
        yield Text("also there: " + ", ".join(f"{key}={value}" for key, value in contents.plain.items()))
    tensors = contents.entries
    yield Text(
        f"total: {len(tensors):,} tensors, {contents.tensor_bytes:,} bytes ({size(contents.tensor_bytes)}); "
        f"on the disk {contents.disk_bytes:,} bytes"
    )
    yield ""
    table = new_table("", "loads with", "how")
    for who, how in loads_with(contents):
        table.add_row(Text(who), Text(how))
    yield table


def show(*renderables: RenderableType) -> None:
    """Prints on stdout; piped output is not cut."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=1000)
    for renderable in renderables:
        console.print(renderable)


def size(nbytes: int) -> str:
    """Writes bytes in the largest unit that leaves a number of one or more."""
    value = float(nbytes)
    unit = "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{value:,.0f} {unit}" if unit == "B" else f"{value:,.2f} {unit}"


def _header(contents: Contents) -> Iterator[RenderableType]:
    parts = contents.parts
    kind = {"file": "one file", "directory": "a sharded directory"}[parts.kind]
    writer = {
        "Trainer": f"a Lightning Trainer ({parts.extra.get('pytorch-lightning_version')})",
        "other": "Fabric or plain torch",
    }[parts.writer]
    yield Text(f"{parts.path}: {kind}, by {writer}", style="bold")
    counters = [f"{key} {parts.extra[key]}" for key in ("epoch", "global_step") if key in parts.extra]
    names = ", ".join(key or "the optimizer" for key in parts.main_params)
    counters.append(f"fp32 main params: {names}" if names else "fp32 main params: none")
    yield Text("; ".join(counters))


def _describe_optimizer(optimizer: OptimizerContents) -> Iterator[str]:
    by = "name" if optimizer.has_names else "number"
    yield f"optimizer {optimizer.key}: {sum(optimizer.sizes)} parameter(s) in {len(optimizer.sizes)} group(s), by {by}"
    for number, (group, count) in enumerate(zip(optimizer.groups, optimizer.sizes, strict=True)):
        shown = [f"{key}={_plain(group[key])}" for key in ("lr", "weight_decay") if key in group]
        yield f"  group {number}: {count} parameter(s), {', '.join(shown)}"


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) and value.device.type != "meta" else value


def _state_by_parameter(optimizers: Iterable[OptimizerContents]) -> dict[str, str]:
    """Lists what optimizers hold of a parameter, where they know its name."""
    states: dict[str, dict[str, list[str]]] = {}
    for optimizer in optimizers:
        for entry in optimizer.entries:
            if not entry.owner.startswith("#"):
                states.setdefault(entry.owner, {}).setdefault(optimizer.key, []).append(entry.what)
    return {
        owner: "; ".join(f"{key}: {', '.join(what)}" for key, what in by_optimizer.items())
        for owner, by_optimizer in states.items()
    }


def _table(title: str, entries: list[Entry], depth: int | None, states: dict[str, str]) -> Table:
    if depth is None:
        table = new_table(title, "name", "shape", "dtype", "bytes", "optimizer state")
        for entry in entries:
            shared = f" (shared with {entry.shared_with})" if entry.shared_with else ""
            table.add_row(
                Text(entry.owner + shared),
                _shape(entry),
                _dtype(entry.dtype),
                f"{entry.nbytes:,}",
                Text(states.get(entry.owner, "")),
            )
        return table
    return _summary(title, "name", [(".".join(entry.owner.split(".")[:depth]), entry) for entry in entries])


def _optimizer_table(optimizer: OptimizerContents, depth: int | None) -> Table:
    if depth is None:
        table = new_table("", "parameter", "state", "shape", "dtype", "bytes")
        for entry in optimizer.entries:
            table.add_row(Text(entry.owner), Text(entry.what), _shape(entry), _dtype(entry.dtype), f"{entry.nbytes:,}")
        return table
    return _summary("", "state", [(entry.what, entry) for entry in optimizer.entries])


def _summary(title: str, first: str, rows: list[tuple[str, Entry]]) -> Table:
    table = new_table(title, first, "tensors", "elements", "dtype", "bytes")
    groups: dict[tuple[str, torch.dtype], list[Entry]] = {}
    for name, entry in rows:
        groups.setdefault((name, entry.dtype), []).append(entry)
    for (name, dtype), entries in groups.items():
        unshared = [entry for entry in entries if not entry.shared_with]
        numel = sum(entry.nbytes // entry.dtype.itemsize for entry in entries)
        table.add_row(
            Text(name), f"{len(entries):,}", f"{numel:,}", _dtype(dtype), f"{sum(entry.nbytes for entry in unshared):,}"
        )
    return table


_TEXT = ("", "name", "parameter", "ranks", "state", "shape", "dtype", "optimizer state", "loads with", "how")
"""The columns that are no numbers."""


def new_table(title: str, *columns: str) -> Table:
    """Returns a table without lines. Columns of numbers are aligned to the right."""
    table = Table(
        title=Text(title) if title else None, title_justify="left", box=None, pad_edge=False, padding=(0, 3, 0, 0)
    )
    for column in columns:
        table.add_column(column, justify="left" if column in _TEXT else "right", overflow="fold")
    return table


def _with_section(entry: Entry) -> Entry:
    return dataclasses.replace(entry, owner=f"{entry.section}.{entry.owner}" if entry.owner else entry.section)


def _shape(entry: Entry) -> str:
    return "x".join(str(extent) for extent in entry.shape) or "scalar"


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
