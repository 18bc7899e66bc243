"""Writes and prints what ``megastrategy profile`` leaves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import RenderableType
from rich.table import Table

from .bottlenecks import models_of, rank_times
from .pictures import plot
from .rendering import new_table, size
from .timeline import ModelEvents, RankEvents, bucket_times


def has_steps(ranks: Sequence[RankEvents]) -> bool:
    """Returns whether there is anything to show."""
    return any(model.steps for rank in ranks for model in rank.models)


def why_nothing(ranks: Sequence[RankEvents], skip: int) -> str:
    """Says why nothing was recorded of a script that ended well."""
    models = [model for rank in ranks for model in rank.models]
    if not models:
        return "the script wrapped no model: it does not train with megastrategy (a strategy other than megatron_ddp?)"
    num_steps = max(model.num_skipped_steps for model in models)
    if skip > 0:
        return f"no step was recorded: the script made {num_steps}, and the first {skip} are skipped: lower --skip"
    return "no step was recorded: the script made none"


def draw(ranks: Sequence[RankEvents], folder: Path) -> str:
    """Draws the picture, and returns what to say about it."""
    picture = folder / "timeline.png"
    try:
        plot(ranks, picture)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != "matplotlib":
            raise
        picture.unlink(missing_ok=True)  # an older run's
        return f"{picture} is not drawn: it needs matplotlib: pip install 'megastrategy[plot]'"
    return f"{picture}: the last steps"


def tables(ranks: Sequence[RankEvents]) -> Iterator[RenderableType]:
    """Yields steps by rank, and rank 0's buckets, of every model that has made a whole step."""
    several = any(len(rank.models) > 1 for rank in ranks)
    for number, models in enumerate(models_of(ranks)):
        yield _steps_table(models, f"model {number}" if several else "")
        yield ""
        first, model = models[0]
        yield _buckets_table(first.rank, model)


def _steps_table(models: Sequence[tuple[RankEvents, ModelEvents]], title: str) -> Table:
    """The times that the verdict is found by, with the same definition of a step."""
    columns = ("rank", "steps", "step ms", "input ms", "exposed ms", "gradients", "parameters", "exposed")
    table = new_table(title, *columns)
    for rank, model in models:
        times = rank_times(rank, model)
        parts = (times.period_ms, times.input_ms, times.exposed_ms, times.gradients_ms, times.parameters_ms)
        cells = (f"{milliseconds:.2f}" for milliseconds in parts)
        table.add_row(str(rank.rank), str(len(model.steps)), *cells, f"{times.exposed_share:.1%}")
    return table


def _buckets_table(rank: int, model: ModelEvents) -> Table:
    columns = ("bucket", "", "bytes", "ms on the wire", "launch to done ms", "hidden share")
    table = new_table(f"buckets, on rank {rank}", *columns)
    for times in bucket_times(model):
        table.add_row(
            str(times.bucket),
            times.what,
            size(times.nbytes),
            "" if times.ran_ms is None else f"{times.ran_ms:.2f}",
            f"{times.launch_to_done_ms:.2f}",
            f"{times.hidden_share:.0%}",
        )
    return table
