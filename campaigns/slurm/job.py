"""Runs as each task of a job: python -m campaigns.slurm.job FOLDER STAGE STRATEGY. It writes where it is.

Two epochs are trained, each with a validation after it, and every fifth step is saved to FOLDER/last.ckpt, where a job
that starts again goes on. Its loader saves its place, so that it goes on in mid-epoch. One stage takes its time,
for a signal to arrive in it: "training", "validation", "saving", "test" or "prediction"; "none" does. A "long-" one
takes a minute and more, until the job is started again.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.environments import SLURMEnvironment
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

import megastrategy

BATCH_S = {"": 0.1, "long": 4.0}
SAVE_S = {"": 1.0, "long": 8.0}
NUM_BATCHES = 30
"""Of each stage, and of an epoch."""
NUM_EPOCHS = 2
SAVES_EVERY = 5


class Model(pl.LightningModule):
    """Two layers, whose batches, or saves, take a while in one stage."""

    def __init__(self, stage: str, folder: Path) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 8))
        self._length, _, self._stage = stage.rpartition("-")
        if self._length and int(os.environ.get("SLURM_RESTART_COUNT", 0)):
            self._stage = "none"  # its limit is the first run's
        self._folder = folder

    def tell(self, what: str) -> None:
        rank = os.environ["SLURM_PROCID"]
        with (self._folder / f"rank{rank}.log").open("a") as log:
            log.write(f"{time.time()} {what}\n")

    def digest(self) -> str:
        """A digest of all weights' bits."""
        weights = torch.cat([param.detach().reshape(-1) for param in self.parameters()])
        return hashlib.sha256(weights.numpy().tobytes()).hexdigest()

    def on_train_start(self) -> None:
        self.tell(f"started {self.trainer.global_step}")

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self._stage == "saving":
            self.tell(f"in saving {self.trainer.global_step}")
            time.sleep(SAVE_S[self._length])
        self.tell(f"saved {self.trainer.global_step}")

    def _batch(self, stage: str, batch: list[Tensor], batch_idx: int) -> Tensor:
        if stage == self._stage:
            time.sleep(BATCH_S[self._length])
            self.tell(f"in {stage} {batch_idx}")
        return (self.layers(batch[0]) - batch[0].square()).square().mean()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self._batch("training", batch, batch_idx)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self._batch("validation", batch, batch_idx)

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self._batch("test", batch, batch_idx)

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self._batch("prediction", batch, batch_idx)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def main(folder: Path, stage: str, strategy: str) -> None:
    """One task."""
    model = Model(stage, folder)
    atexit.register(model.tell, "left")
    num_samples = NUM_BATCHES * int(os.environ["SLURM_NTASKS"])
    dataset = TensorDataset(torch.randn(num_samples, 8, generator=torch.Generator().manual_seed(1)))
    data = StatefulDataLoader(dataset, sampler=megastrategy.data.ResumableSampler(dataset, seed=0))
    evaluated = DataLoader(dataset)
    last = folder / "last.ckpt"
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=int(os.environ["SLURM_NTASKS_PER_NODE"]),
        num_nodes=int(os.environ["SLURM_NNODES"]),
        plugins=[SLURMEnvironment(requeue_signal=signal.SIGUSR1)],
        default_root_dir=folder,
        max_epochs=NUM_EPOCHS,
        callbacks=[ModelCheckpoint(folder, last.stem, every_n_train_steps=SAVES_EVERY, enable_version_counter=False)],
        num_sanity_val_steps=0,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    if stage == "test":
        trainer.test(model, evaluated, verbose=False)
    elif stage == "prediction":
        trainer.predict(model, evaluated, return_predictions=False)
    else:
        trainer.fit(model, data, evaluated, ckpt_path=last if last.exists() else None)
    model.tell(f"finished {trainer.global_step} {model.digest()}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3])
