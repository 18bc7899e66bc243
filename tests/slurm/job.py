"""What each task of the job runs: python -m tests.slurm.job FOLDER STAGE. Writes down in the folder where it is."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.environments import SLURMEnvironment
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import megastrategy  # noqa: F401 - registers the strategy's name

BATCH_S = 0.05
NUM_BATCHES = 400
"""Of the stage that waits for a signal: 20 s."""
NUM_STEPS_BEFORE = 20
"""Of training, before a validation."""


class Model(pl.LightningModule):
    """A layer, whose batches take a while in one stage."""

    def __init__(self, stage: str, folder: Path) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)
        self._stage, self._folder = stage, folder

    def tell(self, what: str) -> None:
        rank = os.environ["SLURM_PROCID"]
        with (self._folder / f"rank{rank}.log").open("a") as log:
            log.write(f"{time.time()} {what}\n")

    def on_train_start(self) -> None:
        self.tell(f"started {self.trainer.global_step}")

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.tell(f"saved {self.trainer.global_step}")

    def _batch(self, stage: str, batch: list[Tensor], batch_idx: int) -> Tensor:
        if stage == self._stage:
            time.sleep(BATCH_S)
            self.tell(f"in {stage} {batch_idx}")
        return self.layer(batch[0]).square().mean()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self._batch("training", batch, batch_idx)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self._batch("validation", batch, batch_idx)

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self._batch("test", batch, batch_idx)

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self._batch("prediction", batch, batch_idx)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def main(folder: Path, stage: str) -> None:
    """One task."""
    model = Model(stage, folder)
    atexit.register(model.tell, "left")
    num_tasks = int(os.environ["SLURM_NTASKS"])
    data = DataLoader(TensorDataset(torch.ones(NUM_BATCHES * num_tasks, 8)))
    trainer = pl.Trainer(
        strategy="megatron_ddp",
        accelerator="cpu",
        devices=int(os.environ["SLURM_NTASKS_PER_NODE"]),
        num_nodes=int(os.environ["SLURM_NNODES"]),
        plugins=[SLURMEnvironment(requeue_signal=signal.SIGUSR1)],
        default_root_dir=folder,
        max_epochs=1,
        limit_train_batches=NUM_STEPS_BEFORE if stage == "validation" else None,
        num_sanity_val_steps=0,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    if stage in ("training", "validation"):
        trainer.fit(model, data, data if stage == "validation" else None)
    elif stage == "test":
        trainer.test(model, data, verbose=False)
    else:
        trainer.predict(model, data, return_predictions=False)
    model.tell(f"finished {trainer.global_step}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
