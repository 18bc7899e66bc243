"""Classifies handwritten digits in a loop of one's own with Lightning Fabric; only the strategy is megastrategy's.

    python examples/fabric_digits.py                  # two processes, the 1,797 digits that ship with scikit-learn
    python examples/fabric_digits.py --strategy ddp   # the same under torch DDP

Writes OUT/STRATEGY/{metrics.csv,best.ckpt}; losses are in nats an image.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from lightning.fabric import Fabric
from lightning.fabric.loggers import CSVLogger
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

NUM_TEST = 360  # of the 1,797 images: a fifth, and even, so that two ranks see each once


def make_datasets() -> tuple[TensorDataset, TensorDataset]:
    """(images, digits) to train and to test on; images are (1, 8, 8) in [0, 1]."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    targets = torch.tensor(digits.target)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))  # neighbours are by one writer
    train, test = order[NUM_TEST:], order[:NUM_TEST]
    return TensorDataset(images[train], targets[train]), TensorDataset(images[test], targets[test])


def make_net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 10),
    )


@torch.no_grad()
def accuracy(fabric: Fabric, model: nn.Module, data: Any) -> float:
    """The part of all ranks' images that are recognised."""
    model.eval()
    right = sum((model(images).argmax(dim=1) == targets).sum() for images, targets in data)
    model.train()
    total: Tensor = fabric.all_reduce(torch.as_tensor(right), reduce_op="sum")
    return total.item() / NUM_TEST


def train(fabric: Fabric, args: argparse.Namespace) -> None:
    """Trains, keeps the best weights, and says how good they are."""
    fabric.seed_everything(args.seed, verbose=False)
    train_set, test_set = make_datasets()
    loaders = DataLoader(train_set, args.batch_size, shuffle=True), DataLoader(test_set, args.batch_size)
    train_data, test_data = fabric.setup_dataloaders(*loaders)
    net = make_net()
    model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=3e-3))
    best, checkpoint = 0.0, args.out / args.strategy / "best.ckpt"
    step = 0
    for epoch in range(args.epochs):
        for number, (images, targets) in enumerate(train_data, start=1):
            last = number % args.accumulate == 0 or number == len(train_data)
            with fabric.no_backward_sync(model, enabled=not last):
                loss = F.cross_entropy(model(images), targets)
                fabric.backward(loss / args.accumulate)
            if last:
                if args.clip > 0:
                    fabric.clip_gradients(model, optimizer, max_norm=args.clip)
                optimizer.step()
                optimizer.zero_grad()
                step += 1
                fabric.log("train_loss", loss, step)
        score = accuracy(fabric, model, test_data)
        fabric.print(f"epoch {epoch + 1}: {score:.1%} of {NUM_TEST} images recognised")
        if score > best:
            best = score
            fabric.save(checkpoint, {"model": model, "optimizer": optimizer, "epoch": epoch + 1})
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "epoch": 0}
    fabric.load(checkpoint, state)
    best = accuracy(fabric, model, test_data)
    fabric.print(
        f"\n{args.strategy}, {fabric.world_size} rank(s): {best:.1%} after epoch {state['epoch']}, {checkpoint}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.formatter_class = argparse.ArgumentDefaultsHelpFormatter
    parser.add_argument("--strategy", default="megatron_ddp", choices=["megatron_ddp", "ddp"])
    parser.add_argument("--devices", type=int, default=2, help="processes")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=32, help="images a rank a backward")
    parser.add_argument("--accumulate", type=int, default=2, help="backwards a step")
    parser.add_argument("--clip", type=float, default=1.0, help="the norm that gradients are clipped to; 0: not")
    parser.add_argument("--seed", type=int, default=1, help="of weights and of the order of the images")
    parser.add_argument("--out", type=Path, default=Path("runs/digits"), metavar="DIR", help="where to write")
    args = parser.parse_args()
    fabric = Fabric(
        accelerator="gpu" if torch.cuda.device_count() >= args.devices else "cpu",
        devices=args.devices,
        strategy=args.strategy,
        loggers=CSVLogger(args.out, name=args.strategy, version="", flush_logs_every_n_steps=1),
    )
    fabric.launch()
    train(fabric, args)


if __name__ == "__main__":
    main()
