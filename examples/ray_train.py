"""Trains in two workers of Ray Train, reports a checkpoint after every epoch, and goes on from it where a worker fails.

    python examples/ray_train.py
    python examples/ray_train.py --fail-in-epoch 3    # worker 1 raises there once

What differs from a script with ``RayDDPStrategy`` is the strategy. Ray restarts the workers after a failure; on several
machines OUT has to be a folder or a bucket that all of them reach. Losses are in nats an image.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import ray.train
import torch
import torch.nn.functional as F
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.lightning import RayLightningEnvironment, RayTrainReportCallback, prepare_trainer
from ray.train.torch import TorchTrainer
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from megastrategy.ray import RayMegatronDDPStrategy


class Classifier(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        images, targets = batch
        loss = F.cross_entropy(self.net(images), targets)
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class FailsOnce(pl.Callback):
    def __init__(self, epoch: int, mark: Path) -> None:
        self.epoch, self.mark = epoch, mark

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.current_epoch == self.epoch and trainer.global_rank == 1 and not self.mark.exists():
            self.mark.touch()
            raise RuntimeError("this worker fails on request")


def train(config: dict[str, Any]) -> None:
    """Runs in each worker."""
    images, targets = (torch.tensor(part, dtype=torch.float32) for part in load_digits(return_X_y=True))
    pl.seed_everything(1, verbose=False)
    trainer = prepare_trainer(
        pl.Trainer(
            strategy=RayMegatronDDPStrategy(state_dict_type="sharded"),  # each worker reports its part
            plugins=[RayLightningEnvironment()],
            devices="auto",
            accelerator="auto",
            max_epochs=config["epochs"],
            callbacks=[RayTrainReportCallback(), FailsOnce(config["fail_in_epoch"], Path(config["mark"]))],
            enable_checkpointing=False,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
    )
    data = DataLoader(TensorDataset(images / 16, targets.long()), batch_size=48, shuffle=True)
    reported = ray.train.get_checkpoint()
    if reported is None:
        trainer.fit(Classifier(), data)
    else:
        with reported.as_directory() as folder:
            trainer.fit(Classifier(), data, ckpt_path=f"{folder}/{RayTrainReportCallback.CHECKPOINT_NAME}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--fail-in-epoch", type=int, default=-1, metavar="N", help="from 0; -1 for never")
    parser.add_argument("--out", type=Path, default=Path("runs/ray"), metavar="DIR")
    args = parser.parse_args()
    out = args.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    result = TorchTrainer(
        train,
        train_loop_config={"epochs": args.epochs, "fail_in_epoch": args.fail_in_epoch, "mark": f"{out}/failed"},
        scaling_config=ScalingConfig(num_workers=args.workers, use_gpu=torch.cuda.device_count() >= args.workers),
        run_config=RunConfig(storage_path=str(out), failure_config=FailureConfig(max_failures=1)),
    ).fit()
    print(f"step {result.metrics['step']}, loss {result.metrics['loss']:.4f}, {result.checkpoint.path}")


if __name__ == "__main__":
    main()
