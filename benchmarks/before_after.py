"""Times this engine in turns with itself as another commit has it, in the same two processes.

python -m benchmarks.before_after 881d9a4 --case gpt-14m
"""

from __future__ import annotations

import importlib
import io
import statistics
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor

from .cases import CASES, next_token_loss
from .in_turns import time_in_turns
from .processes import Rank, loopback_places, run_shown

_NAME = "megastrategy_before"


def copy_of(commit: str, folder: Path) -> None:
    """Writes the package as ``commit`` has it to ``folder``, under a name beside which today's can be imported.

    Its core imports itself by relative names only, so it needs no change.
    """
    root = Path(__file__).parent.parent
    archive = subprocess.run(
        ["git", "-C", str(root), "archive", commit, "megastrategy/core"], capture_output=True, check=True, timeout=60
    ).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        tar.extractall(folder, filter="data")
    (folder / "megastrategy").rename(folder / _NAME)


def measure(rank: Rank, folder: str, case_name: str, num_rounds: int, num_steps: int) -> dict[str, Any]:
    """Milliseconds per step of the slowest rank, by engine and round, and each engine's last loss."""
    sys.path.insert(0, folder)
    case = CASES[case_name]
    engines = {name: _engine(importlib.import_module(f"{name}.core"), case) for name in (_NAME, "megastrategy")}
    batches = case.batches(rank.number).flatten(0, 1)
    batches = batches[torch.arange(num_steps + 1) % len(batches)]  # the first of a turn is not timed
    return time_in_turns(rank, engines, batches, num_rounds)


def _engine(core: Any, case: Any) -> Callable[[Tensor], Tensor]:
    module = case.build_model()
    model = core.DistributedDataParallel(module, core.DistributedDataParallelConfig())
    optimizer = core.DistributedOptimizer(torch.optim.AdamW(module.parameters(), lr=1e-3), model)

    def step(batch: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = next_token_loss(model, batch)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


@click.command(help="Times this engine in turns with itself at COMMIT, on two ranks over loopback.")
@click.argument("commit")
@click.option("--case", type=click.Choice(list(CASES)), default="gpt-14m", show_default=True)
@click.option("--rounds", type=click.IntRange(4), default=21, show_default=True)
@click.option("--steps", type=click.IntRange(1), default=4, show_default=True, help="In a turn.")
def main(*, commit: str, case: str, rounds: int, steps: int) -> None:
    """The command."""
    with tempfile.TemporaryDirectory() as folder:
        copy_of(commit, Path(folder))
        measured = run_shown(loopback_places(2), measure, folder, case, rounds, steps)[0]
    before, after = measured["times"][_NAME], measured["times"]["megastrategy"]
    lower, middle, upper = statistics.quantiles([new / old for new, old in zip(after, before, strict=True)], n=4)
    print(
        f"{case}: {statistics.median(before):.1f} ms per step at {commit}, {statistics.median(after):.1f} now; "
        f"ratio of each round {middle:.3f} ({lower:.3f} to {upper:.3f})"
    )
    if measured["losses"][_NAME] != measured["losses"]["megastrategy"]:
        raise SystemExit(f"the losses differ: {measured['losses']}")
    print("the last losses are equal to the bit")


if __name__ == "__main__":
    main()
