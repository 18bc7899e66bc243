"""The parts that all scripts share: data with a number for each sample, and a journal of each process."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from sizes import BATCH_SIZE, NUM_SAMPLES
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from megastrategy import Replicas

__all__ = ["BATCH_SIZE"]
FOLDER, EPOCHS, PAUSE_S = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])


def make_module() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, 4))


def make_data() -> TensorDataset:
    """Inputs, labels, and the number of each sample."""
    inputs = torch.randn(NUM_SAMPLES, 16, generator=torch.Generator().manual_seed(1))
    return TensorDataset(inputs, torch.arange(NUM_SAMPLES) % 4, torch.arange(NUM_SAMPLES))


class Journal:
    """A line for each batch: the seconds since the last one, its place, what became of it, and its samples."""

    def __init__(self, slot: int, rank: int) -> None:
        self._file = (FOLDER / f"journal-{slot}-{rank}-{os.getpid()}").open("w")
        self._last = time.monotonic()
        self._num_alone = 0

    def write(self, replicas: Replicas, step: int, epoch: int, numbers: Tensor) -> None:
        line = {
            "took": time.monotonic() - self._last,
            "members": replicas.members,
            "step": step,
            "epoch": epoch,
            "dropped": replicas.dropped,
            "healed": replicas.healed,
            "numbers": numbers.tolist(),
        }
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        time.sleep(PAUSE_S)
        self._wait_for_missing(replicas.members)
        self._last = time.monotonic()

    def _wait_for_missing(self, members: tuple[int, ...]) -> None:
        """Waits, after some batches without a replica, until it is started again: that may take longer than all of the
        training."""
        missing = set(range(int(os.environ["NUM_REPLICA_GROUPS"]))) - set(members)
        self._num_alone = self._num_alone + 1 if missing else 0
        deadline = time.monotonic() + 60.0
        while self._num_alone >= 4 and time.monotonic() < deadline:
            if all(map(_runs, missing)):
                time.sleep(0.5)
                return
            time.sleep(0.05)


def _runs(slot: int) -> bool:
    """Returns whether the process that has begun the last journal of a replica's first rank runs."""
    last = max(FOLDER.glob(f"journal-{slot}-0-*"), key=lambda path: path.stat().st_ctime_ns)
    return Path("/proc", last.name.rpartition("-")[2]).exists()


def write_end(slot: int, rank: int, module: nn.Module, **entries: Any) -> None:
    weights = b"".join(bytes_of(param.detach()) for param in module.parameters())
    end = {"weights": hashlib.sha256(weights).hexdigest(), **entries}
    (FOLDER / f"end-{slot}-{rank}").write_text(json.dumps(end))


def bytes_of(tensor: Tensor) -> bytes:
    data: bytes = tensor.contiguous().numpy().tobytes()
    return data
