"""A script for ``torchrun --max-restarts=2``: the first time rank 1 dies within a step, the second time rank 0 within a
save, and the third time no rank does."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any, NoReturn

import torch

from . import runs

NUM_STEPS = 12


class Module(runs.Module):
    """Dies as told by the number of restarts, in the fourth step after it began."""

    def on_train_start(self) -> None:
        self.dies_at = self.global_step + 3
        self.restarts = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        with open(self.folder / f"starts_{self.global_rank}", "a") as file:
            file.write(f"{self.restarts} {self.global_step}\n")

    def training_step(self, unused: Any, batch_idx: int) -> torch.Tensor:
        if self.global_step == self.dies_at:
            if self.restarts == 0 and self.global_rank == 1:
                die()
            if self.restarts == 1 and self.global_rank == 0:
                os.fsync = die  # type: ignore[assignment]
        return super().training_step(unused, batch_idx)


def die(*_: object) -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("never reached")


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    weights = runs.with_trainer(folder, NUM_STEPS, Module)
    if os.environ["RANK"] == "0":
        torch.save(weights, folder / "weights.pt")
