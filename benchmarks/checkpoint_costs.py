"""python -m benchmarks.checkpoint_costs --commit COMMIT: 1 GB of Adam's state, saved and loaded by both, in turns.

Two ranks with the package of an older commit, in a git worktree in a temporary folder, and with the working tree's save
and load one file and one directory. It prints the median seconds of the slower rank, and the largest growth of a rank's
resident memory in MiB; pages of a mapped file count.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RANKS = 2
LAYERS = 32
WIDTH = 2048
"""134 million elements, with 8 bytes of state each."""


def kibibytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


def rank(folder: Path) -> dict[str, tuple[float, float]]:
    """Trains a step, saves and loads. Returns seconds and MiB by name; the slower and larger of all ranks."""
    import torch
    import torch.distributed as dist
    from torch import nn

    from megastrategy import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
    from megastrategy._checkpoints.directory_writer import save_directory
    from megastrategy._checkpoints.files import load_file, save_file
    from megastrategy.core import host_collectives

    dist.init_process_group("gloo")
    model = DistributedDataParallel(
        nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))), DistributedDataParallelConfig()
    )
    optimizer: Any = DistributedOptimizer(torch.optim.Adam(model.parameters()), model)
    model(torch.ones(1, WIDTH)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    results: dict[str, tuple[float, float]] = {}

    def measure(name: str, action: Callable[[], object]) -> None:
        dist.barrier()
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        before = kibibytes("VmRSS")
        start = time.perf_counter()
        action()
        seconds = time.perf_counter() - start
        mine = torch.tensor([seconds, (kibibytes("VmHWM") - before) / 1024])
        dist.all_reduce(mine, dist.ReduceOp.MAX)
        results[name] = (mine[0].item(), mine[1].item())

    def save_one_file() -> None:
        state = optimizer.state_dict()
        if dist.get_rank() == 0:
            save_file(state, folder / "file")

    measure("save a file", save_one_file)
    measure("load a file", lambda: optimizer.load_state_dict(load_file(folder / "file")))
    collectives = host_collectives()
    state = {"optimizer": optimizer.sharded_state_dict()}
    measure("save a directory", functools.partial(save_directory, state, {}, folder / "directory", collectives))
    measure("load a directory", lambda: optimizer.load_sharded(folder / "directory", "optimizer"))
    dist.barrier()
    dist.destroy_process_group()
    return results


def run(tree: Path, port: int) -> dict[str, tuple[float, float]]:
    with tempfile.TemporaryDirectory() as folder:
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(RANKS)}
        env = {**os.environ, **where, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, __file__, "--rank", folder]
        ranks = [
            subprocess.Popen(command, env={**env, "RANK": str(number)}, stdout=subprocess.PIPE, text=True, cwd=tree)
            for number in range(RANKS)
        ]
        printed = [process.communicate(timeout=900)[0] for process in ranks]
    results: dict[str, tuple[float, float]] = json.loads(printed[0].splitlines()[-1])
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commit", help="the older one")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank:
        sys.stdout.write(f"{json.dumps(rank(arguments.rank))}\n")
        return
    with tempfile.TemporaryDirectory() as temporary:
        old = Path(temporary, "tree")
        subprocess.run(["git", "worktree", "add", "--quiet", "--detach", old, arguments.commit], cwd=ROOT, check=True)
        try:
            rounds = [
                (run(old, 29700 + 2 * number), run(ROOT, 29701 + 2 * number)) for number in range(arguments.rounds)
            ]
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", old], cwd=ROOT, check=True)
    for name in rounds[0][0]:
        cells = []
        for side, title in enumerate((arguments.commit, "now")):
            times = [pair[side][name][0] for pair in rounds]
            memory = statistics.median(pair[side][name][1] for pair in rounds)
            spread = f"{min(times):.2f} to {max(times):.2f}"
            cells.append(f"{title} {statistics.median(times):.2f} s ({spread}), {memory:,.0f} MiB")
        sys.stdout.write(f"{name}: {'; '.join(cells)}\n")


if __name__ == "__main__":
    main()
