"""Trains a residual network with Muon and AdamW; nothing here is megastrategy's but the strategy.

    python examples/lightning_muon.py                  # two processes, the digits that ship with scikit-learn
    python examples/lightning_muon.py --strategy ddp   # the same under torch DDP, where each process does all of it

torch.optim.Muon orthogonalises the matrices of the hidden layers, AdamW takes the rest: two optimizers, which Lightning
leaves to manual optimization. Under "megatron_ddp" each matrix is orthogonalised by one process, its owner, which alone
keeps its momentum; under "ddp" every process orthogonalises all of them.
"""

from __future__ import annotations

import argparse
import warnings

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

PIXELS, WIDTH, DEPTH, DIGITS = 8 * 8, 64, 4, 10
NUM_TEST = 360  # of the 1,797 images: a fifth, and even, so that two ranks see each once
BATCH_SIZE = 64  # over all ranks


class Classifier(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False  # it takes one optimizer
        self.first, self.last = nn.Linear(PIXELS, WIDTH), nn.Linear(WIDTH, DIGITS)
        self.hidden = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH))
        self.accuracy = MulticlassAccuracy(DIGITS, average="micro")

    def forward(self, images: Tensor) -> Tensor:
        x = self.first(images)
        for layer in self.hidden:
            x = x + F.gelu(layer(x))
        return self.last(x)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        images, targets = batch
        optimizers = self.optimizers()
        for optimizer in optimizers:
            optimizer.zero_grad()
        self.manual_backward(F.cross_entropy(self(images), targets))
        for optimizer in optimizers:
            optimizer.step()
        if self.trainer.is_last_batch:
            for scheduler in self.lr_schedulers():
                scheduler.step()

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        images, targets = batch
        logits = self(images)
        self.accuracy.update(logits, targets)
        self.log("accuracy", self.accuracy)  # of all ranks' images: the metric adds up its counts
        self.log("loss", F.cross_entropy(logits, targets), sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        accuracy, loss = (self.trainer.callback_metrics[name] for name in ("accuracy", "loss"))
        self.print(f"epoch {self.current_epoch + 1}: {accuracy:.1%} recognised, loss {loss:.6f}")

    def on_train_end(self) -> None:
        _, muon = self.optimizers()
        self.num_kept = sum(state["momentum_buffer"].numel() for state in muon.state.values())  # on this rank

    def configure_optimizers(self) -> tuple[list[torch.optim.Optimizer], list[torch.optim.lr_scheduler.LRScheduler]]:
        matrices = [layer.weight for layer in self.hidden]
        rest = [*self.first.parameters(), *self.last.parameters(), *(layer.bias for layer in self.hidden)]
        # With "match_rms_adamw", learning rates that are right for AdamW are right for Muon.
        muon = torch.optim.Muon(matrices, lr=3e-3, adjust_lr_fn="match_rms_adamw")
        optimizers = [torch.optim.AdamW(rest, lr=3e-3), muon]  # that of most parameters last: the other waits for less
        return optimizers, [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9) for optimizer in optimizers]


def make_datasets() -> tuple[TensorDataset, TensorDataset]:
    """(images, digits) to train and to test on; images are (64,) in [0, 1]."""
    images, targets = (torch.tensor(part, dtype=torch.float32) for part in load_digits(return_X_y=True))
    images, targets = images / 16, targets.long()
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))  # neighbours are by one writer
    train, test = order[NUM_TEST:], order[:NUM_TEST]
    return TensorDataset(images[train], targets[train]), TensorDataset(images[test], targets[test])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.formatter_class = argparse.ArgumentDefaultsHelpFormatter
    parser.add_argument("--strategy", default="megatron_ddp", help="any name that Lightning knows")
    parser.add_argument("--devices", type=int, default=2, help="processes")
    parser.add_argument("--epochs", type=int, default=8)
    args = parser.parse_args()
    # Said by Lightning 2.6 about its own use of torch 2.13, and about num_workers=0, which is deliberate here.
    warnings.filterwarnings("ignore", message=r"`isinstance\(treespec, LeafSpec\)` is deprecated")
    warnings.filterwarnings("ignore", message=r"The '\w+' does not have many workers")
    pl.seed_everything(1, verbose=False)
    trainer = pl.Trainer(
        accelerator="gpu" if torch.cuda.device_count() >= args.devices else "cpu",
        devices=args.devices,
        strategy=args.strategy,
        max_epochs=args.epochs,
        num_sanity_val_steps=0,
        enable_checkpointing=False,
        logger=False,
        enable_progress_bar=False,
    )
    train_set, test_set = make_datasets()
    size = BATCH_SIZE // args.devices  # drop_last: whole batches are the same images on one rank and on several
    model = Classifier()
    trainer.fit(model, DataLoader(train_set, size, shuffle=True, drop_last=True), DataLoader(test_set, size))
    kept, of = model.num_kept, DEPTH * WIDTH * WIDTH
    model.print(f"\n{args.strategy}, {args.devices} rank(s): rank 0 keeps {kept:,} of {of:,} numbers of momentum")


if __name__ == "__main__":
    main()
