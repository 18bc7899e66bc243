"""Trains torchvision's ResNet-18 on two processes; nothing here is megastrategy's but the strategy.

    python examples/lightning_resnet.py                  # the digits that ship with scikit-learn, as 32 by 32 pixels
    python examples/lightning_resnet.py --timm resnet18  # a model of timm's; any of its names
    python examples/lightning_resnet.py --strategy ddp   # the same under torch DDP

Needs torchvision (and timm) for the installed torch.
"""

from __future__ import annotations

import argparse

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

NUM_TEST = 360  # of the 1,797 images: a fifth, and even, so that two ranks see each once


class Classifier(pl.LightningModule):
    def __init__(self, net: nn.Module, num_steps: int) -> None:
        super().__init__()
        self.net, self.num_steps = net, num_steps

    def training_step(self, batch: list[Tensor]) -> Tensor:
        images, digits = batch
        return F.cross_entropy(self.net(images), digits)

    def validation_step(self, batch: list[Tensor]) -> None:
        images, digits = batch
        right = (self.net(images).argmax(dim=1) == digits).float().mean()
        self.log("accuracy", right, sync_dist=True)

    def configure_optimizers(self) -> dict[str, object]:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=5e-4)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=self.num_steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def make_loaders() -> tuple[DataLoader[tuple[Tensor, ...]], DataLoader[tuple[Tensor, ...]]]:
    """Images are (3, 32, 32) in [-1, 1]."""
    data = load_digits()
    images = F.interpolate(torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 8 - 1, size=32)
    images, digits = images.expand(-1, 3, -1, -1), torch.tensor(data.target)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))  # neighbours are by one writer
    train, test = order[NUM_TEST:], order[:NUM_TEST]
    train_set, test_set = TensorDataset(images[train], digits[train]), TensorDataset(images[test], digits[test])
    return DataLoader(train_set, 64, shuffle=True), DataLoader(test_set, 60)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--strategy", default="megatron_ddp")
    parser.add_argument("--timm", metavar="NAME", help="a model of timm's instead of torchvision's ResNet-18")
    parser.add_argument("--epochs", type=int, default=5)
    args = parser.parse_args()
    pl.seed_everything(1, verbose=False)
    if args.timm:
        import timm

        net = timm.create_model(args.timm, num_classes=10)
    else:
        from torchvision.models import resnet18

        net = resnet18(num_classes=10)
    train_loader, test_loader = make_loaders()
    trainer = pl.Trainer(
        strategy=args.strategy,
        accelerator="gpu" if torch.cuda.device_count() >= 2 else "cpu",
        devices=2,
        max_epochs=args.epochs,
        sync_batchnorm=torch.cuda.device_count() >= 2,  # torch has it for GPUs only
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    num_steps = args.epochs * -(-len(train_loader) // trainer.world_size)
    trainer.fit(Classifier(net, num_steps), train_loader, test_loader)
    trainer.print(f"{args.strategy}: {trainer.callback_metrics['accuracy']:.1%} of {NUM_TEST} images recognised")


if __name__ == "__main__":
    main()
