"""Trains on as many nodes as there are: a node that dies is left out, and one that comes back is taken in.

    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1    # or ranks find in torchrun's store what those before them left there
    torchrun --nnodes 1:2 --nproc-per-node 1 --max-restarts 10 --monitor-interval 0.5 \\
        --rdzv-backend c10d --rdzv-endpoint FIRST_NODE:29400 \\
        --rdzv-conf last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=10 examples/elastic.py

is started on each of two nodes, and again on one that was down. FIRST_NODE holds the agents' store, so it has to stay.
A node that is silent for 10 s (1 s, 10 times) is taken for dead; if it is only slow, both train on the same files. To
try it on one machine start it twice there, and end one of the two with its worker: `kill -9 AGENT WORKER`.

Whenever the nodes change, torchrun starts all ranks anew. They go on from OUT/last.ckpt, which is written after every
epoch, and which all nodes have to see. What stays is the number of images a step, so that the losses are those of a run
that nothing happened to. OUT/losses.csv has them, in nats an image, with the number of ranks and the time.
"""

from __future__ import annotations

import argparse
import os
import time
import warnings
from pathlib import Path

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

BATCH_SIZE = 96  # over all ranks
NUM_TRAIN = 15 * BATCH_SIZE  # of the 1,797 images that ship with scikit-learn; the others are for the test


class Classifier(pl.LightningModule):
    """Writes the test loss after every epoch, on rank 0."""

    def __init__(self, test_images: Tensor, test_targets: Tensor, losses: Path, pause_s: float) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
        self.test, self.losses, self.pause_s = (test_images, test_targets), losses, pause_s

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        time.sleep(self.pause_s)
        images, targets = batch
        return F.cross_entropy(self.net(images), targets)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

    def on_train_start(self) -> None:
        self.print(f"{self.trainer.world_size} rank(s) from epoch {self.current_epoch}", flush=True)

    @torch.no_grad()
    def on_train_epoch_end(self) -> None:
        images, targets = (part.to(self.device) for part in self.test)  # all of them on every rank: they are few
        loss = F.cross_entropy(self.net(images), targets).item()
        if self.trainer.is_global_zero:
            with self.losses.open("a") as file:
                file.write(f"{self.current_epoch},{loss:.6f},{self.trainer.world_size},{time.time():.2f}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains on as many nodes as there are.")
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--pause", type=float, default=0.02, metavar="S", help="before a batch, to have time to kill")
    parser.add_argument("--out", type=Path, default=Path("runs/elastic"), metavar="DIR", help="that all nodes see")
    args = parser.parse_args()
    # Said by Lightning 2.6 about its own use of torch 2.13, and about num_workers=0, which is deliberate here.
    warnings.filterwarnings("ignore", message=r"`isinstance\(treespec, LeafSpec\)` is deprecated")
    warnings.filterwarnings("ignore", message=r"The '\w+' does not have many workers")

    images, targets = (torch.tensor(part, dtype=torch.float32) for part in load_digits(return_X_y=True))
    images, targets = images.unflatten(1, (1, 8, 8)) / 16, targets.long()
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))  # neighbours are by one writer
    train, test = order[:NUM_TRAIN], order[NUM_TRAIN:]

    args.out.mkdir(parents=True, exist_ok=True)
    pl.seed_everything(1, verbose=False)
    path = args.out / "last.ckpt"
    trainer = pl.Trainer(
        accelerator="auto",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),  # as torchrun has it now, which may be another number next time
        num_nodes=int(os.environ["GROUP_WORLD_SIZE"]),
        strategy="megatron_ddp",
        max_epochs=args.epochs,
        callbacks=[ModelCheckpoint(path.parent, path.stem, enable_version_counter=False)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader = DataLoader(TensorDataset(images[train], targets[train]), BATCH_SIZE // trainer.world_size, shuffle=True)
    module = Classifier(images[test], targets[test], args.out / "losses.csv", args.pause)
    trainer.fit(module, loader, ckpt_path=path if path.exists() else None)


if __name__ == "__main__":
    main()
