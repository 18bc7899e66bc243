"""``megastrategy profile`` on scripts that know nothing of it, and the recordings that it makes."""

from __future__ import annotations

import functools
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import ProcessGroup

from megastrategy.core import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    DistributedOptimizer,
    Event,
    EventKind,
    make_collectives,
)
from megastrategy.tools.bottlenecks import rank_times, verdicts
from megastrategy.tools.profiling import Recording
from megastrategy.tools.timeline import Lane, RankEvents, bucket_times, spans_of
from tests.support.timeouts import HANG_S

from ..support.doubles import DelayingCollectives
from ..support.models import two_layers
from ..support.ranks import run_ranks

# --- the engine's events ---------------------------------------------------------------------------------------------


def test_handle_has_the_time_its_collective_ran() -> None:
    """The first is over when the second is, since they run in order; waiting for it comes later."""

    def run(rank: int, group: ProcessGroup) -> None:
        collectives = make_collectives(group, torch.device("cpu"))
        clock = [Event(EventKind.WAIT_START, 0).time_ns]
        first, second = (collectives.reduce_scatter(torch.ones(4096), 0.5) for _ in range(2))
        assert first.ran_ns is None, "not waited for"
        second.wait()
        clock.append(Event(EventKind.WAIT_START, 0).time_ns)
        first.wait()
        assert first.ran_ns is not None
        assert second.ran_ns is not None
        assert clock[0] <= first.ran_ns[0] < first.ran_ns[1] <= second.ran_ns[0] < second.ran_ns[1] <= clock[1]
        collectives.close()

    run_ranks(2, run)


def train(model: Any, optimizer: Any, num_steps: int) -> None:
    for number in range(num_steps):
        with model.no_sync():
            model(torch.full((2, 10), 0.1 * number)).square().mean().backward()
        model(torch.full((2, 10), 0.2 * number)).square().mean().backward()
        optimizer.step()


def test_recording_has_one_layout(tmp_path: Path) -> None:
    """The step in which buckets are filled anew is skipped, whatever was to be; the steps asked for come after it."""

    def run(rank: int, group: ProcessGroup) -> list[int]:
        class OfRank(DistributedDataParallel):
            """Ranks are threads here, so each has a class of its own in place of the process's."""

        recording = Recording(tmp_path, rank, skip=0, num_steps=3)
        recording.install(OfRank)
        module = torch.nn.Sequential(*(torch.nn.Linear(10, 10) for _ in range(6)))
        module.forward = lambda x: functools.reduce(lambda x, layer: layer(x), reversed(module), x)  # type: ignore
        model = OfRank(module, DistributedDataParallelConfig(bucket_size=150), process_group=group)
        before = model.layout
        train(model, DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model), 5)
        recording.finish()
        assert model.layout != before
        return [4 * bucket.numel for bucket in model.layout.buckets]

    sent_bytes = run_ranks(2, run)[0]
    for rank in range(2):
        [model] = read_records(tmp_path)[rank].models
        assert len(model.steps) == 3
        assert model.num_skipped_steps == 1
        assert list(model.reduced_bytes) == sent_bytes
        assert [times.count for times in bucket_times(model)] == [3] * 2 * len(sent_bytes)


@pytest.mark.parametrize(
    ("options", "optimizer"),
    [
        ({}, DistributedOptimizer),
        ({"overlap_param_gather": True}, DistributedOptimizer),
        ({"use_distributed_optimizer": False}, DistributedOptimizer),
        ({"use_distributed_optimizer": False}, None),
    ],
    ids=["reduce-scatter", "gather under forward", "all-reduce", "plain optimizer"],
)
def test_recording_has_the_steps_asked_for(options: dict[str, Any], optimizer: Any, tmp_path: Path) -> None:
    """With the last step's gathers, though the next forward waits for them; also where the script has a listener."""
    delay_s = 0.03
    heard: list[Event] = []

    def run(rank: int, group: ProcessGroup) -> int:
        class OfRank(DistributedDataParallel):
            """Ranks are threads here, so each has a class of its own in place of the process's."""

        recording = Recording(tmp_path, rank, skip=2, num_steps=3)
        recording.install(OfRank)
        collectives = DelayingCollectives(group, delay_s)
        listener = heard.append if rank == 0 else None
        config = DistributedDataParallelConfig(bucket_size=1, **options)
        model = OfRank(two_layers(), config, collectives=collectives, listener=listener)
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        train(model, optimizer(sgd, model) if optimizer else sgd, 7)
        recording.finish()
        return len(model.layout.buckets)

    num_buckets = run_ranks(2, run)[0]
    assert sum(event.kind is EventKind.BACKWARD_END for event in heard) == 14, "the script's own listener hears all"
    whats = ["reduce", "gather"] if options.get("use_distributed_optimizer", True) else ["reduce"]
    for rank in range(2):
        [model] = read_records(tmp_path)[rank].models
        steps = model.steps
        assert len(steps) == 3
        assert model.num_skipped_steps == 2
        assert not [event for event in model.events if event.kind is EventKind.GRAD_READY]
        assert all(step.exposed_gradients_ns > 0.9e9 * delay_s for step in steps), "the last bucket's, at least"
        names = [span.name for span in spans_of(model.events)]
        num_updates = 3 if optimizer else 0
        assert [names.count(name) for name in ("forward", "backward", "step")] == [7, 6, num_updates]
        assert [(times.what, times.count) for times in bucket_times(model)] == [
            (what, 3) for what in whats for _ in range(num_buckets)
        ]
        for each in spans_of(model.events):
            assert each.launched_ns <= each.start_ns <= each.end_ns, each
            assert each.has_run_times == (each.lane is Lane.COMMUNICATION)


# --- the command -----------------------------------------------------------------------------------------------------


PLAIN_LOOP = """
import sys

import torch
import torch.distributed as dist

from its_neighbour import WIDTH
from megastrategy import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer

if __name__ == "__main__":
    assert sys.argv[1:] == ["--steps", "7"], sys.argv
    dist.init_process_group("gloo")
    module = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU(), torch.nn.Linear(WIDTH, 1))
    model = DistributedDataParallel(module, DistributedDataParallelConfig(bucket_size=1))
    optimizer = DistributedOptimizer(torch.optim.AdamW(model.parameters()), model)
    for step in range(7):
        optimizer.zero_grad()
        model(torch.randn(4, WIDTH)).square().mean().backward()
        optimizer.step()
    dist.destroy_process_group()
    sys.exit(3)
"""
LIGHTNING = """
import lightning.pytorch as pl
import torch


class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(8, 8)

    def training_step(self, batch, batch_idx):
        return self.net(batch).square().mean()

    def validation_step(self, batch, batch_idx):
        self.net(batch)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())


if __name__ == "__main__":
    data = torch.utils.data.DataLoader(torch.randn(64, 8), batch_size=4)
    options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = pl.Trainer(strategy="megatron_ddp", accelerator="cpu", devices=2, max_steps=6, **options)
    trainer.fit(Net(), data, data)
"""


def profile(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    ours = ("LOCAL_RANK", "RANK", "WORLD_SIZE")
    environment = {name: value for name, value in os.environ.items() if name not in ours}
    command = [sys.executable, "-c", "from megastrategy.tools.commands import root; root()", "profile", *arguments]
    return subprocess.run(
        command, cwd=folder, env={**environment, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=HANG_S
    )


def read_records(folder: Path) -> list[RankEvents]:
    return [pickle.loads(path.read_bytes()) for path in sorted(folder.glob("events.rank*"))]


def test_loop_is_profiled_though_it_fails_later(tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "train.py").write_text(PLAIN_LOOP)
    (tmp_path / "scripts" / "its_neighbour.py").write_text("WIDTH = 64\n")
    done = profile(tmp_path, "--steps", "3", "--skip", "2", "scripts/train.py", "--steps", "7")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "ended with exit code 3" in done.stderr.splitlines()[-1]
    ranks = read_records(tmp_path / "profile")
    assert [rank.rank for rank in ranks] == [0, 1]
    for rank in ranks:
        [model] = rank.models
        steps = model.steps
        assert (len(steps), model.num_skipped_steps) == (3, 2)
        assert f"{rank_times(rank, model).exposed_share:.1%}" in done.stdout
        sizes = [4 * 64 * 64, 4 * 128, 4 * 128, 4 * 128]  # fp32, each tensor a bucket of whole 128s
        told = sorted((times.what, times.count, times.nbytes) for times in bucket_times(model))
        assert told == sorted((what, 3, size) for what in ("reduce", "gather") for size in sizes)
    first, second = (
        [(step.start_ns + rank.clock_offset_ns, step.end_ns + rank.clock_offset_ns) for step in rank.models[0].steps]
        for rank in ranks
    )
    for one, other in zip(first, second, strict=True):
        assert one[0] < other[1], "a step ends on no rank before all have begun it"
        assert other[0] < one[1]
    assert (tmp_path / "profile" / "timeline.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.nightly
def test_lightning_script_is_profiled(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(LIGHTNING)
    done = profile(tmp_path, "--steps", "3", "--skip", "1", "--out", "made/here", "train.py")
    assert done.returncode == 0, done.stdout + done.stderr
    ranks = read_records(tmp_path / "made" / "here")
    assert [len(rank.models) for rank in ranks] == [1, 1]
    for rank in ranks:
        assert len(rank.models[0].steps) == 3
        names = [span.name for span in spans_of(rank.models[0].events)]
        assert [names.count(name) for name in ("backward", "step", "reduce bucket 0", "gather bucket 0")] == [3] * 4
        assert rank.loads
    for what in ("input ms", "hidden share", "timeline.png"):
        assert what in done.stdout
    assert len(done.stdout.split("exposed\n")[1].splitlines()[0].split()) == 8, "a row of rank 0"
    [verdict] = verdicts(ranks)
    assert done.stdout.splitlines()[-1] == verdict.sentence
