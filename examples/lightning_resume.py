"""Trains a little, and goes on from there the next time: under another strategy, and on another number of processes.

    python examples/lightning_resume.py --strategy ddp --devices 2 --epochs 2
    python examples/lightning_resume.py --devices 1 --epochs 3    # "megatron_ddp" from here on
    python examples/lightning_resume.py --devices 3 --epochs 4

Weights, optimizer state, scheduler and counters come from OUT/last.ckpt, where the run before left them, so that the
losses are those of one run of four epochs. Nothing here knows of a change; what stays is the number of images a step.
Losses are in nats an image. To start anew remove OUT/last.ckpt.
"""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

BATCH_SIZE = 96  # over all ranks: a step sees the same images on 1, 2 and 3 of them
NUM_TRAIN = 15 * BATCH_SIZE  # of the 1,797 images that ship with scikit-learn; the others are for the test


class Classifier(pl.LightningModule):
    def __init__(self, test_images: Tensor, test_targets: Tensor) -> None:
        super().__init__()
        convolutions = nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU()
        self.net = nn.Sequential(*convolutions, nn.MaxPool2d(2), nn.Flatten(), nn.Linear(32 * 4 * 4, 10))
        self.test = test_images, test_targets

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        images, targets = batch
        return F.cross_entropy(self.net(images), targets)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.7)]

    def on_train_start(self) -> None:
        name = type(self.trainer.strategy).__name__
        self.print(f"{name} on {self.trainer.world_size} rank(s)")
        self.show_loss()

    def on_train_epoch_end(self) -> None:
        self.show_loss()

    @torch.no_grad()
    def show_loss(self) -> None:
        images, targets = (part.to(self.device) for part in self.test)  # all of them on every rank: they are few
        loss = F.cross_entropy(self.net(images), targets).item()
        lr = self.trainer.optimizers[0].param_groups[0]["lr"]
        self.print(f"  step {self.global_step:2}  lr {lr:.6f}  test loss {loss:.6f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.formatter_class = argparse.ArgumentDefaultsHelpFormatter
    parser.add_argument("--strategy", default="megatron_ddp", help="any name that Lightning knows")
    parser.add_argument("--devices", type=int, default=2, choices=[1, 2, 3], help="processes on each node")
    parser.add_argument("--nodes", type=int, default=1, choices=[1, 2], help="that a scheduler starts this on")
    parser.add_argument("--epochs", type=int, default=2, help="of all runs together")
    parser.add_argument("--out", type=Path, default=Path("runs/resume"), metavar="DIR", help="where last.ckpt is")
    args = parser.parse_args()
    # Said by Lightning 2.6 about its own use of torch 2.13, and about num_workers=0, which is deliberate here.
    warnings.filterwarnings("ignore", message=r"`isinstance\(treespec, LeafSpec\)` is deprecated")
    warnings.filterwarnings("ignore", message=r"The '\w+' does not have many workers")

    images, targets = (torch.tensor(part, dtype=torch.float32) for part in load_digits(return_X_y=True))
    images, targets = images.unflatten(1, (1, 8, 8)) / 16, targets.long()
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))  # neighbours are by one writer
    train, test = order[:NUM_TRAIN], order[NUM_TRAIN:]

    pl.seed_everything(1, verbose=False)
    path = args.out / "last.ckpt"
    trainer = pl.Trainer(
        accelerator="gpu" if torch.cuda.device_count() >= args.devices else "cpu",
        devices=args.devices,
        num_nodes=args.nodes,
        default_root_dir=args.out,  # where Lightning saves when Slurm is about to end the job, and looks for that
        strategy=args.strategy,
        max_epochs=args.epochs,
        callbacks=[ModelCheckpoint(path.parent, path.stem, enable_version_counter=False)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader = DataLoader(TensorDataset(images[train], targets[train]), BATCH_SIZE // trainer.world_size, shuffle=True)
    trainer.fit(Classifier(images[test], targets[test]), loader, ckpt_path=path if path.exists() else None)


if __name__ == "__main__":
    main()
