"""``megastrategy tune``: what it compares, what it recommends, and how it ends a script that would go on."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from megastrategy.core import Event, EventKind
from megastrategy.tools.timeline import ModelEvents, RankEvents
from megastrategy.tools.tuning import (
    SizeTimes,
    TuningError,
    advice,
    best_of,
    compare_sizes,
    slowest_median_ms,
)
from tests.support.patience import HANG_S

MS = 1_000_000
NUMEL = 2**20


def ranks_with(*step_ms: float, num_buckets: int = 4) -> list[RankEvents]:
    """Three steps on each rank; the middle one has the rank's length."""
    ranks = []
    for rank, length_ms in enumerate(step_ms):
        events, now_ns = [], 0
        for factor in (1.0, 0.5, 9.0):
            events.append(Event(EventKind.FORWARD_START, 1, now_ns))
            now_ns += round(factor * length_ms * MS)
            events.append(Event(EventKind.STEP_END, 0, now_ns))
        ranks.append(RankEvents(rank, [ModelEvents(events, [4 * NUMEL // num_buckets] * num_buckets)]))
    return ranks


def test_a_run_takes_as_long_as_its_slowest_rank_in_its_median_step() -> None:
    assert slowest_median_ms(ranks_with(3.0, 5.0)) == pytest.approx(5.0)
    for nothing in ([], [RankEvents(0, [])], [RankEvents(0, [ModelEvents([])])]):
        with pytest.raises(TuningError, match="no step was recorded"):
            slowest_median_ms(nothing)


def test_sizes_take_turns_and_are_compared_within_their_round() -> None:
    """The machine gets slower from round to round, twice in all: ratios do not show it."""
    ran: list[int | None] = []

    def run(size: int | None) -> list[RankEvents]:
        slow = 1.0 + len(ran) // 3
        ran.append(size)
        return ranks_with({None: 10.0, 100: 8.0, 50: 12.0}[size] * slow, num_buckets=2)

    told: list[str] = []
    default, hundred, fifty = compare_sizes(run, [100, 50], 2, told.append)
    assert ran == [None, 100, 50, 50, 100, None]
    assert told[1] == "round 1 of 2: bucket_size=100"
    assert told[-1] == "round 2 of 2: the default"
    assert (default.bucket_size, default.step_ms) == (None, [10.0, 20.0])
    assert hundred.ratios == pytest.approx([0.8, 0.8])
    assert fifty.ratios == pytest.approx([1.2, 1.2])
    assert fifty.num_buckets == 2


def times(size: int | None, *ratios: float) -> SizeTimes:
    return SizeTimes(size, 1, [10.0 * ratio for ratio in ratios], ratios)


def test_only_what_is_clearly_faster_is_worth_a_line() -> None:
    default = times(None, 1.0, 1.0, 1.0)
    assert best_of([default, times(1, 0.96, 0.97, 0.96)]) is None, "less than 5 %"
    assert best_of([default, times(1, 0.7, 0.8, 1.01)]) is None, "not in every round"
    fast, faster = times(2, 0.90, 0.91, 0.92), times(3, 0.80, 0.85, 0.99)
    assert best_of([default, fast, faster]) is faster
    assert "leave bucket_size out" in advice(None, by_launcher=False)
    assert advice(times(4096, 0.9), by_launcher=False).endswith("bucket_size=4_096")
    assert advice(times(4096, 0.9), by_launcher=True).endswith("megatron_ddp_config:  bucket_size: 4096")


# --- the command -----------------------------------------------------------------------------------------------------

ENDLESS_LOOP = """
import atexit
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from megastrategy import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer

if __name__ == "__main__":
    assert sys.argv[1:] == ["--rounds", "x"], sys.argv
    dist.init_process_group("gloo")
    module = torch.nn.Sequential(*(torch.nn.Linear(32, 32, bias=False) for _ in range(8)))
    options = DistributedDataParallelConfig(bucket_size=1, overlap_param_gather=True)
    model = DistributedDataParallel(module, options)
    if dist.get_rank() == 0:
        with open("runs.txt", "a") as file:
            print(model.config.bucket_size, len(model.layout.buckets), model.config.overlap_param_gather, file=file)
    optimizer = DistributedOptimizer(torch.optim.AdamW(model.parameters()), model)
    atexit.register(Path("ended.txt").touch)
    try:
        while True:
            optimizer.zero_grad()
            model(torch.randn(4, 32)).square().mean().backward()
            optimizer.step()
    finally:
        Path("ended.txt").touch()
"""


def tune(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    ours = ("LOCAL_RANK", "RANK", "WORLD_SIZE")
    environment = {name: value for name, value in os.environ.items() if name not in ours}
    command = [sys.executable, "-c", "from megastrategy.tools.cli import main; main()", "tune", *arguments]
    return subprocess.run(
        command, cwd=folder, env={**environment, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=HANG_S
    )


@pytest.mark.long
@pytest.mark.fresh
def test_a_script_that_never_ends_is_run_with_each_size_and_ended_without_a_word_to_it(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(ENDLESS_LOOP)
    options = ("--size", "2000", "--rounds", "1", "--steps", "3", "--skip", "1")
    done = tune(tmp_path, *options, "train.py", "--rounds", "x")
    assert done.returncode == 0, done.stdout + done.stderr
    runs = Counter((tmp_path / "runs.txt").read_text().splitlines())
    assert runs == {"None 1 forward": 1, "2000 4 forward": 1}, "8 matrices of 1,024; all but the size is the script's"
    assert not (tmp_path / "ended.txt").exists()
    header, default, sized, said = done.stdout.splitlines()
    assert header.split()[:2] == ["bucket_size", "buckets"]
    assert default.split()[:2] == ["default", "1"]
    assert sized.split()[:2] == ["2_000", "4"]
    assert "bucket_size" in said
    assert {path.name for path in tmp_path.iterdir()} == {"train.py", "runs.txt"}
