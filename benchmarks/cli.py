"""The command: plans which engines run which case on how many ranks, has them measured, and writes the report."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import os
import platform
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console

from .cases import CASES, Case
from .commit import current_commit
from .engines import BASELINE, ENGINES, OPTIMIZERS, EngineSpec, ours
from .measure import Alone, measure_alone, time_in_turns
from .names import require_known
from .network import INTERFACE, NetworkError, check_possible, check_rate, shaped_network
from .processes import Place, RankFailedError, loopback_places, namespace_places, run_ranks
from .report import print_case, write
from .results import Report, Skipped, summarise

_QUICK_CASES = ("gpt-14m", "gpt-14m-accumulate-4", "gpt-14m-bf16", "small-2000")
_FULL_CASES = (*_QUICK_CASES, "gpt-14m-registered-in-reverse", "gpt-14m-muon", "gpt-124m", "gpt-124m-muon")
_FULL_ONLY_ENGINES = (
    "bound-sharded",
    "ddp-view",
    "ddp-static",
    "ddp-batched-copy",
    "ddp-powersgd",
    "replicate",
    "deepspeed-2",
    "ours-gather-off",
    "ours-pooled",
    "ours-as-registered",
    "ours-bf16-wire-fp32-sum",
)
_MEMORY_SHARE = 0.85
"""Share of the available memory that engines may fill."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """A run of the program."""

    cases: tuple[Case, ...]
    engines: tuple[EngineSpec, ...]
    ranks: tuple[int, ...]
    rounds: int
    steps: int
    optimizer: str
    network: str | None

    def steps_of(self, case: Case) -> int:
        """A block's; fewer where a step has several microbatches, which it averages over already."""
        return max(1, self.steps // case.accumulate)


def _names(kind: str, known: Sequence[str]) -> Callable[[click.Context, click.Parameter, str | None], Any]:
    def parse(context: click.Context, parameter: click.Parameter, value: str | None) -> tuple[str, ...] | None:
        if value is None:
            return None
        names = tuple(dict.fromkeys(name.strip() for name in value.split(",") if name.strip()))
        if not names:
            raise click.BadParameter(f"expected names out of {', '.join(known)}")
        try:
            require_known(kind, names, known)
        except ValueError as error:
            raise click.BadParameter(str(error)) from None
        return names

    return parse


def _rank_counts(context: click.Context, parameter: click.Parameter, value: str | None) -> tuple[int, ...] | None:
    if value is None:
        return None
    try:
        counts = tuple(dict.fromkeys(int(count) for count in value.split(",")))
    except ValueError:
        raise click.BadParameter(f"{value!r}: expected numbers, like 2,4") from None
    if min(counts) < 2 or max(counts) > 64:
        raise click.BadParameter(f"{value!r}: expected 2 to 64 ranks; one rank has no peer")
    return counts


def _rate(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    if value is None:
        return None
    try:
        check_rate(value)
        check_possible()
    except ValueError as error:
        raise click.BadParameter(str(error)) from None
    except NetworkError as error:
        raise click.UsageError(str(error)) from None
    return value


def _variants(context: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> tuple[EngineSpec, ...]:
    """``bucket_size=1000000,overlap_grad_reduce=false``, values as in JSON, or else text."""
    specs = []
    for value in values:
        options: dict[str, Any] = {}
        for pair in value.split(","):
            field, equals, text = pair.partition("=")
            if not equals:
                raise click.BadParameter(f"{pair!r}: expected FIELD=VALUE")
            with contextlib.suppress(json.JSONDecodeError):
                text = json.loads(text)
            options[field.strip()] = text
        spec = ours(f"ours[{value}]", value, **options)
        for case in CASES.values():
            if reason := spec.why_skipped(case):
                raise click.BadParameter(f"{value!r}: {reason}")
        specs.append(spec)
    return tuple(specs)


@click.command(
    help="Measures this engine and its peers on the same work, alternating in one run; see benchmarks/README.md."
)
@click.option("--full", is_flag=True, help="More cases, engines and ranks; takes an hour rather than minutes.")
@click.option("--cases", metavar="NAMES", callback=_names("case", list(CASES)), help=f"Out of {', '.join(CASES)}.")
@click.option(
    "--engines", metavar="NAMES", callback=_names("engine", list(ENGINES)), help=f"Out of {', '.join(ENGINES)}."
)
@click.option(
    "--variant",
    "variants",
    metavar="FIELD=VALUE,...",
    multiple=True,
    callback=_variants,
    help="This engine with other options, beside the engines; may be repeated.",
)
@click.option("--ranks", metavar="N,N", callback=_rank_counts, help="2, or 2,4 with --full.")
@click.option(
    "--network", metavar="RATE", callback=_rate, help="A link of this rate (1gbit) for each rank; needs root."
)
@click.option("--rounds", type=click.IntRange(1), help="How often each engine has its turn.  [default: 5, or 11]")
@click.option("--steps", type=click.IntRange(1), default=4, show_default=True, help="In a turn; microbatches, in fact.")
@click.option("--optimizer", type=click.Choice(list(OPTIMIZERS)), default="adamw", show_default=True)
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), default=Path("runs/bench"), show_default=True)
def benchmark(
    *,
    full: bool,
    cases: tuple[str, ...] | None,
    engines: tuple[str, ...] | None,
    variants: tuple[EngineSpec, ...],
    ranks: tuple[int, ...] | None,
    network: str | None,
    rounds: int | None,
    steps: int,
    optimizer: str,
    out: Path,
) -> None:
    """The command."""
    if not sys.platform.startswith("linux"):
        raise click.ClickException("bytes and sockets are counted as Linux counts them; it does not run elsewhere")
    default_engines = [name for name in ENGINES if full or name not in _FULL_ONLY_ENGINES]
    chosen = list(dict.fromkeys((BASELINE, *engines))) if engines else default_engines  # ratios are to the baseline
    plan = Plan(
        cases=tuple(CASES[name] for name in cases or (_FULL_CASES if full else _QUICK_CASES)),
        engines=tuple(spec for name, spec in ENGINES.items() if name in chosen) + variants,
        ranks=ranks or ((2, 4) if full else (2,)),
        rounds=rounds or (11 if full else 5),
        steps=steps,
        optimizer=optimizer,
        network=network,
    )
    console = Console(stderr=True)
    if not console.is_terminal:
        console = Console(stderr=True, width=160)
    report = Report(_environment(plan))
    try:
        for num_ranks in plan.ranks:
            with _places(num_ranks, network) as places:
                for case in plan.cases:
                    _run_case(plan, case, places, report, console)
                    write(report, out)
    except NetworkError as error:
        raise click.ClickException(str(error)) from None
    console.print(f"{', '.join(str(out / f'results.{kind}') for kind in ('json', 'md', 'png'))}")
    problems = [f"{entry.describe()}: {entry.reason}" for entry in report.failed] + report.disagreements()
    if problems:
        raise click.ClickException("\n".join(problems))


@contextlib.contextmanager
def _places(num_ranks: int, network: str | None) -> Iterator[list[Place]]:
    if network is None:
        yield loopback_places(num_ranks)
        return
    with shaped_network(num_ranks, network) as (namespaces, address):
        yield namespace_places(namespaces, INTERFACE, address)


def _run_case(plan: Plan, case: Case, places: list[Place], report: Report, console: Console) -> None:
    """Measures one case, into the report. An engine that fails alone is left out of what follows."""
    where = f"{case.name}, {len(places)} ranks"
    steps = plan.steps_of(case)

    def leave_out(entries: list[Skipped], engine: str | None, reason: str) -> None:
        entries.append(Skipped(case.name, len(places), engine, reason))
        what = f"{where}: {engine}" if engine else where
        verb = "is skipped" if entries is report.skipped else "failed"
        console.print(f"[dim]{what} {verb}: {reason.splitlines()[0]}[/dim]", highlight=False)

    alone: dict[str, list[Alone]] = {}
    try:
        with console.status(where) as status:
            for spec in plan.engines:
                if reason := spec.why_skipped(case):
                    if spec.is_for(case):
                        leave_out(report.skipped, spec.name, reason)
                    continue
                status.update(f"{where}: bytes of {spec.name}")
                try:
                    alone[spec.name] = run_ranks(places, measure_alone, case, spec, plan.optimizer, steps)
                except RankFailedError as error:
                    leave_out(report.failed, spec.name, str(error))
            if BASELINE not in alone:
                return
            specs = [spec for spec in plan.engines if spec.name in alone]
            groups = _groups_that_fit(specs, alone, len(places))
            if groups is None:
                leave_out(report.skipped, None, "two engines at once do not fit into the memory that is available")
                return
            timings = [
                run_ranks(
                    places,
                    time_in_turns,
                    case,
                    group,
                    plan.optimizer,
                    plan.rounds,
                    steps,
                    on_word=lambda word: status.update(f"{where}: {word}"),
                )
                for group in groups
            ]
    except RankFailedError as error:
        leave_out(report.failed, None, str(error))
        return
    result = summarise(case, plan.engines, steps, timings, alone)
    report.cases.append(result)
    print_case(console, result)


def _groups_that_fit(
    specs: list[EngineSpec], alone: Mapping[str, Sequence[Alone]], num_ranks: int
) -> list[list[EngineSpec]] | None:
    """Engines that are alive at the same time: all, or as many as memory holds, the baseline and its bound in each
    group; None if not even one beside them."""
    budget = _MEMORY_SHARE * _available_bytes() / num_ranks

    def fits(group: list[EngineSpec]) -> bool:
        # All keep what they allocated; whose turn it is takes what a step needs besides.
        kept = [max(one.heap_bytes or one.rss_bytes for one in alone[spec.name]) for spec in group]
        highest = [max(one.rss_bytes for one in alone[spec.name]) for spec in group]
        extra = (high - keeps for high, keeps in zip(highest, kept, strict=True))
        return sum(kept) + max(0, *extra) <= budget

    always = [spec for spec in specs if spec.name in (BASELINE, "bound")]
    groups: list[list[EngineSpec]] = []
    for spec in [spec for spec in specs if spec not in always]:
        if groups and fits([*groups[-1], spec]):
            groups[-1].append(spec)
        elif fits([*always, spec]):
            groups.append([*always, spec])
        else:
            return None
    return groups or [always]


def _available_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/meminfo has no MemAvailable")


def _environment(plan: Plan) -> dict[str, Any]:
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["python", "-m", "benchmarks", *sys.argv[1:]]),
        "commit": current_commit(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cpu": _cpu(),
        "num_cores": len(os.sched_getaffinity(0)),
        "network": f"{plan.network} for each rank" if plan.network else "loopback",
        "backend": "gloo",
        "optimizer": plan.optimizer,
        "rounds": plan.rounds,
        "received_bytes": "payload of the rank's TCP sockets, from the kernel (tcp_info)",
        "interface_bytes": "the namespace's interface, from /proc/net/dev, with headers" if plan.network else None,
        "limits": "gloo's reduce-scatter is emulated; nothing is claimed about NCCL; CUDA is unmeasured",
    }


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
