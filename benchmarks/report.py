"""The results as JSON, as a Markdown table, as a picture and on the terminal."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from .results import CaseResult, EngineResult, Report, Spread

_CLAIMS = (
    "CPU and gloo only. Gloo's reduce-scatter is emulated (an all-reduce inside, twice the bytes), which is what the "
    "sharded peers use here and would not use on NCCL: nothing is claimed about NCCL. CUDA is unmeasured.",
    "bf16 arithmetic may be emulated on this processor: bf16 rows are for bytes, and for times only beside each other; "
    "so are Muon's, which iterates in bf16.",
    "`bound` communicates nothing and takes the whole optimizer step, and a sharded engine 1/d of it; so a "
    "sharded engine may be faster than it.",
)

_Cell = Callable[[CaseResult, EngineResult], str]
_COLUMNS: Mapping[str, _Cell] = MappingProxyType(
    {
        "engine": lambda _, engine: engine.name,
        "ratio to DDP": lambda _, engine: _spread(engine.ratio, 2),
        "step, ms": lambda _, engine: _spread(engine.step_ms, _digits(engine.step_ms)),
        "over bound, ms": lambda _, engine: _spread(engine.over_bound_ms, 1),
        "reported waits, ms": lambda _, engine: _number(engine.reported_wait_ms, 1),
        "CPU a rank, ms": lambda _, engine: _spread(engine.cpu_ms, _digits(engine.cpu_ms)),
        "step(), ms / CPU": lambda _, engine: _in_step(engine),
        "received, B/param": lambda case, engine: _number(engine.received_bytes / case.num_elements, 3),
        "tensors, B/param": lambda case, engine: _number(engine.tensor_bytes / case.num_elements, 2),
        "heap, MiB": lambda _, engine: _number(_mib(engine.heap_bytes), 1),
        "peak RSS, MiB": lambda _, engine: _number(_mib(engine.rss_bytes), 1),
        "losses": lambda _, engine: _verdict(engine),
    }
)
_TERMINAL_COLUMNS: Mapping[str, _Cell] = MappingProxyType(
    {
        **_COLUMNS,
        "step, ms": lambda _, engine: _number(engine.step_ms.median, _digits(engine.step_ms)),
        "over bound, ms": lambda _, engine: _number(_median(engine.over_bound_ms), 1),
        "CPU a rank, ms": lambda _, engine: _number(engine.cpu_ms.median, _digits(engine.cpu_ms)),
    }
)
"""Without quartiles but for the ratio, which is the headline."""


def write(report: Report, out: Path) -> None:
    """Writes results.json, results.md and results.png, each complete at any time."""
    out.mkdir(parents=True, exist_ok=True)
    _write_text(out / "results.json", json.dumps(report.to_json(), indent=1) + "\n")
    _write_text(out / "results.md", markdown(report))
    if report.cases:
        beside = out / ".results.png"
        _figure(report).savefig(beside, dpi=110, format="png")
        beside.replace(out / "results.png")


def _write_text(path: Path, text: str) -> None:
    beside = path.with_name(f".{path.name}")
    beside.write_text(text, encoding="utf-8")
    beside.replace(path)


def markdown(report: Report) -> str:
    """The tables, and what has to be known to read them."""
    environment = report.environment
    lines = [
        "# Benchmark",
        "",
        f"{environment['date']}, commit {environment['commit']}, torch {environment['torch']}, "
        f"{environment['num_cores']} cores of {environment['cpu']}, one thread a rank, network: "
        f"{environment['network']}, optimizer: {environment['optimizer']}.",
        "",
        f"    {environment['command']}",
        "",
        "Medians, quartiles in brackets; ratios are of the same round. How to read the columns: benchmarks/README.md.",
        "",
        *(f"- {claim}" for claim in _CLAIMS),
    ]
    for case in report.cases:
        names = list(_COLUMNS)
        lines += ["", f"## {_title(case)}", "", _subtitle(case), ""]
        lines += [_row(names), _row(["---"] + ["---:"] * (len(names) - 1))]
        lines += [_row([cell(case, engine) for cell in _COLUMNS.values()]) for engine in case.engines]
    for title, entries in (("Not measured", report.skipped), ("Failed", report.failed)):
        if entries:
            lines += ["", f"## {title}", ""]
            for entry in entries:
                lines.append(f"- {entry.describe()}: {entry.reason.splitlines()[0]}")
    return "\n".join(lines) + "\n"


def print_case(console: Console, case: CaseResult) -> None:
    """The case's table on the terminal."""
    table = Table(title=f"{_title(case)}\n[dim]{_subtitle(case)}[/dim]", title_justify="left")
    for number, name in enumerate(_TERMINAL_COLUMNS):
        table.add_column(name, justify="right" if number else "left", no_wrap=number < 2)
    for engine in case.engines:
        style = "red" if engine.losses_agree is False else None
        table.add_row(*(cell(case, engine) for cell in _TERMINAL_COLUMNS.values()), style=style)
    console.print(table)


def _figure(report: Report) -> Figure:
    """A bar for each engine's ratio to DDP with its quartiles, a panel for each case."""
    heights = [1.0 + 0.32 * len(case.engines) for case in report.cases]
    figure = Figure(figsize=(9, sum(heights) + 0.6), layout="constrained")
    panels = figure.subplots(len(report.cases), 1, squeeze=False, height_ratios=heights)[:, 0]
    for panel, case in zip(panels, report.cases, strict=True):
        ratios = [engine.ratio for engine in case.engines]
        below = [ratio.median - ratio.q1 for ratio in ratios]
        above = [ratio.q3 - ratio.median for ratio in ratios]
        colors = [
            "C0" if e.name.startswith("ours") else "0.45" if e.loss_difference is None else "C1" for e in case.engines
        ]
        names = [engine.name for engine in case.engines]
        panel.barh(names, [ratio.median for ratio in ratios], xerr=[below, above], color=colors, capsize=3)
        for row, ratio in enumerate(ratios):
            panel.annotate(f" {ratio.median:.2f}", (ratio.q3, row), va="center", fontsize=8)
        panel.axvline(1.0, color="black", linewidth=0.8)
        panel.invert_yaxis()
        panel.margins(x=0.08)
        panel.set_title(_title(case), fontsize=10, loc="left")
    panels[-1].set_xlabel("step time, as a ratio to torch DDP in the same round (median, quartiles); less is better")
    environment = report.environment
    figure.suptitle(
        f"{environment['network']}, gloo, torch {environment['torch']}, {environment['date'][:10]}; nothing is claimed "
        "about NCCL",
        fontsize=9,
    )
    return figure


def _title(case: CaseResult) -> str:
    return f"{case.case}, {case.num_ranks} ranks"


def _subtitle(case: CaseResult) -> str:
    together = "" if len(case.groups) == 1 else f", in {len(case.groups)} runs with DDP in each (memory)"
    return (
        f"{case.about}: {case.num_params:,} parameters with {case.num_elements:,} elements. {case.num_rounds} rounds "
        f"of {case.num_steps} steps{together}. A plain send gets {case.link_mbit:,.0f} Mbit/s."
    )


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _verdict(engine: EngineResult) -> str:
    if engine.loss_difference is None:
        return ""
    if engine.losses_agree is None:  # what it sends is rounded, so it has losses of its own
        return f"off by {engine.loss_difference[1]:.0e}"
    return f"{'equal' if engine.losses_agree else 'DIFFER'} ({engine.loss_difference[0]:.0e})"


def _in_step(engine: EngineResult) -> str:
    spreads = [engine.in_step_ms, engine.in_step_cpu_ms]
    if engine.orthogonalising_cpu_ms.median > 0:
        spreads.append(engine.orthogonalising_cpu_ms)
    return " / ".join(_number(of.median, _digits(of)) for of in spreads)


def _median(spread: Spread | None) -> float | None:
    return None if spread is None else spread.median


def _digits(spread: Spread) -> int:
    return 0 if spread.median >= 100 else 1


def _mib(num_bytes: int | None) -> float | None:
    return None if num_bytes is None else num_bytes / 2**20


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:,.{digits}f}"


def _spread(spread: Spread | None, digits: int) -> str:
    return "" if spread is None else f"{spread:,.{digits}f}"
