"""Fine-tunes a network that can read 0 to 4 to read all ten digits; nothing here is megastrategy's but the strategy.

    python examples/lightning_finetuning.py                  # two processes, the digits that ship with scikit-learn
    python examples/lightning_finetuning.py --strategy ddp   # the same under torch DDP, whose ranks part

Lightning's BackboneFinetuning trains a new head alone, and later adds the backbone to the optimizer. The gradients of
what is unfrozen in mid-training are averaged over the ranks like all others; under "ddp" they stay each rank's own.
Writes OUT/STRATEGY/best.ckpt; losses are in nats an image.
"""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import BackboneFinetuning, ModelCheckpoint
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

NUM_TEST = 360  # of the 1,797 images: a fifth, and even, so that two ranks see each once
BATCH_SIZE = 64  # over all ranks


class Classifier(pl.LightningModule):
    """A linear head on a backbone, which BackboneFinetuning knows by its name."""

    def __init__(self, backbone: nn.Module, num_classes: int) -> None:
        super().__init__()
        self.backbone, self.head = backbone, nn.Linear(16 * 4 * 4, num_classes)
        self.accuracy = MulticlassAccuracy(num_classes, average="micro")

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        images, targets = batch
        return F.cross_entropy(self.head(self.backbone(images)), targets)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        images, targets = batch
        logits = self.head(self.backbone(images))
        self.accuracy.update(logits, targets)
        self.log("accuracy", self.accuracy)  # of all ranks' images: the metric adds up its counts
        self.log("loss", F.cross_entropy(logits, targets), sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        accuracy, loss = (self.trainer.callback_metrics[name] for name in ("accuracy", "loss"))
        num_trained = sum(len(group["params"]) for group in self.trainer.optimizers[0].param_groups)
        name = f"{self.head.out_features} digits, epoch {self.current_epoch + 1}"
        self.print(f"{name}: {accuracy:.1%} recognised, loss {loss:.6f}, {num_trained} parameters trained")

    @torch.no_grad()
    def on_train_end(self) -> None:
        weights, strategy = nn.utils.parameters_to_vector(self.parameters()), self.trainer.strategy
        most, negated_least = (strategy.reduce(tensor, reduce_op="max") for tensor in (weights.clone(), -weights))
        self.distance = (most + negated_least).max().item()  # between the ranks

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([param for param in self.parameters() if param.requires_grad], lr=3e-3)


def make_datasets(num_classes: int) -> tuple[TensorDataset, TensorDataset]:
    """(images, digits) below ``num_classes`` to train and to test on; images are (1, 8, 8) in [0, 1]."""
    images, targets = (torch.tensor(part, dtype=torch.float32) for part in load_digits(return_X_y=True))
    images, targets = images.unflatten(1, (1, 8, 8)) / 16, targets.long()
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))  # neighbours are by one writer
    chosen = [part[targets[part] < num_classes] for part in (order[NUM_TEST:], order[:NUM_TEST])]
    return TensorDataset(images[chosen[0]], targets[chosen[0]]), TensorDataset(images[chosen[1]], targets[chosen[1]])


def fit(args: argparse.Namespace, model: Classifier, num_classes: int, epochs: int, *callbacks: pl.Callback) -> None:
    trainer = pl.Trainer(
        accelerator="gpu" if torch.cuda.device_count() >= args.devices else "cpu",
        devices=args.devices,
        strategy=args.strategy,
        max_epochs=epochs,
        callbacks=list(callbacks),
        enable_checkpointing=bool(callbacks),
        num_sanity_val_steps=0,
        logger=False,
        enable_progress_bar=False,
    )
    train_set, test_set = make_datasets(num_classes)
    size = BATCH_SIZE // args.devices  # drop_last: whole batches are the same images on one rank and on several
    trainer.fit(model, DataLoader(train_set, size, shuffle=True, drop_last=True), DataLoader(test_set, size))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.formatter_class = argparse.ArgumentDefaultsHelpFormatter
    parser.add_argument("--strategy", default="megatron_ddp", help="any name that Lightning knows")
    parser.add_argument("--devices", type=int, default=2, help="processes")
    parser.add_argument("--epochs", type=int, default=8, help="of fine-tuning; the backbone joins after half of them")
    parser.add_argument("--out", type=Path, default=Path("runs/finetuning"), metavar="DIR", help="where to write")
    args = parser.parse_args()
    # Said by Lightning 2.6 about its own use of torch 2.13, and about num_workers=0, which is deliberate here.
    warnings.filterwarnings("ignore", message=r"`isinstance\(treespec, LeafSpec\)` is deprecated")
    warnings.filterwarnings("ignore", message=r"The '\w+' does not have many workers")
    pl.seed_everything(1, verbose=False)
    convolutions = nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 16, 3, padding=1), nn.ReLU()
    backbone = nn.Sequential(*convolutions, nn.MaxPool2d(2), nn.Flatten())
    fit(args, Classifier(backbone, 5), 5, 3)

    path = args.out / args.strategy / "best.ckpt"
    path.unlink(missing_ok=True)  # an earlier run's
    best = ModelCheckpoint(path.parent, path.stem, monitor="accuracy", mode="max")
    model = Classifier(backbone, 10)
    fit(args, model, 10, args.epochs, BackboneFinetuning(args.epochs // 2, backbone_initial_ratio_lr=0.3), best)
    model.print(f"\n{args.strategy}, {args.devices} rank(s): {best.best_model_score:.1%} of {NUM_TEST} images, {path}")
    model.print(f"weights of the ranks: {f'up to {model.distance:.1e} apart' if model.distance else 'equal'}")


if __name__ == "__main__":
    main()
