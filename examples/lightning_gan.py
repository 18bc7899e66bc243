"""Trains a GAN to draw digits, with two optimizers stepped by hand; nothing here is megastrategy's but the strategy.

    python examples/lightning_gan.py                                             # two processes, scikit-learn's digits
    python examples/lightning_gan.py --strategy ddp_find_unused_parameters_true  # the same under torch DDP

It is the recipe of Lightning's documentation. Each backward reaches one of the two networks; plain "ddp" waits for the
gradients of the other one, and raises in the second backward. Losses are in nats an image.
"""

from __future__ import annotations

import argparse
import warnings
from itertools import chain

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

NOISE, WIDTH, PIXELS = 16, 128, 8 * 8
BATCH_SIZE = 64  # over all ranks


class GAN(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        layers = [(nn.Linear(width, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU()) for width in (NOISE, WIDTH)]
        self.generator = nn.Sequential(*chain(*layers), nn.Linear(WIDTH, PIXELS), nn.Sigmoid())
        layers = [(nn.Linear(width, WIDTH), nn.LeakyReLU(0.2), nn.Dropout(0.3)) for width in (PIXELS, WIDTH)]
        self.discriminator = nn.Sequential(*chain(*layers), nn.Linear(WIDTH, 1))

    def on_fit_start(self) -> None:
        torch.manual_seed(self.global_rank)  # the ranks have had one seed so far: they would draw the same noise

    def draw(self, num_images: int) -> Tensor:
        return self.generator(torch.randn(num_images, NOISE, device=self.device))

    def loss(self, images: Tensor, real: float) -> Tensor:
        """The discriminator's, if it should take the images for real (1) or drawn (0)."""
        logits = self.discriminator(images)
        return F.binary_cross_entropy_with_logits(logits, torch.full_like(logits, real))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        generator_optimizer, discriminator_optimizer = self.optimizers()
        (images,) = batch
        self.toggle_optimizer(generator_optimizer)  # freezes the discriminator
        generator_loss = self.loss(self.draw(len(images)), real=1.0)
        generator_optimizer.zero_grad()
        self.manual_backward(generator_loss)
        generator_optimizer.step()
        self.untoggle_optimizer(generator_optimizer)

        self.toggle_optimizer(discriminator_optimizer)
        discriminator_loss = self.loss(images, real=1.0) + self.loss(self.draw(len(images)), real=0.0)
        discriminator_optimizer.zero_grad()
        self.manual_backward(discriminator_loss)
        discriminator_optimizer.step()
        self.untoggle_optimizer(discriminator_optimizer)

        self.log("discriminator", discriminator_loss, on_step=False, on_epoch=True, sync_dist=True)
        self.log("generator", generator_loss, on_step=False, on_epoch=True, sync_dist=True)

    def on_train_epoch_end(self) -> None:
        losses = ", ".join(f"{name} {loss:.6f}" for name, loss in self.trainer.callback_metrics.items())
        self.print(f"epoch {self.current_epoch + 1}: {losses}")

    def configure_optimizers(self) -> tuple[torch.optim.Optimizer, ...]:
        networks = self.generator, self.discriminator
        return tuple(torch.optim.Adam(network.parameters(), lr=2e-3, betas=(0.5, 0.999)) for network in networks)


def distance(images: Tensor, others: Tensor) -> float:
    """Fréchet's, squared, between two Gaussians that have the means and covariances of the pixels."""
    cov, other_cov = images.double().T.cov(), others.double().T.cov()
    root_trace = torch.linalg.eigvals(cov @ other_cov).real.clamp(min=0).sqrt().sum()
    means = (images.mean(0) - others.mean(0)).square().sum()
    return (means + cov.trace() + other_cov.trace() - 2 * root_trace).item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.formatter_class = argparse.ArgumentDefaultsHelpFormatter
    parser.add_argument("--strategy", default="megatron_ddp", help="any name that Lightning knows")
    parser.add_argument("--devices", type=int, default=2, help="processes")
    parser.add_argument("--epochs", type=int, default=20)
    args = parser.parse_args()
    # Said by Lightning 2.6 about its own use of torch 2.13, and about num_workers=0, which is deliberate here.
    warnings.filterwarnings("ignore", message=r"`isinstance\(treespec, LeafSpec\)` is deprecated")
    warnings.filterwarnings("ignore", message=r"The '\w+' does not have many workers")
    pl.seed_everything(1, verbose=False)
    images = torch.tensor(load_digits().data, dtype=torch.float32) / 16  # (1797, 64) in [0, 1]
    model = GAN()
    before = model.eval().draw(len(images)).detach()
    trainer = pl.Trainer(
        accelerator="gpu" if torch.cuda.device_count() >= args.devices else "cpu",
        devices=args.devices,
        strategy=args.strategy,
        max_epochs=args.epochs,
        enable_checkpointing=False,
        logger=False,
        enable_progress_bar=False,
    )
    data = DataLoader(TensorDataset(images), BATCH_SIZE // args.devices, shuffle=True, drop_last=True)
    trainer.fit(model.train(), data)
    after = model.eval().draw(len(images)).detach()
    for row in after[:8].unflatten(1, (8, 8)).transpose(0, 1):
        model.print("  ".join("".join(" .:-=+*#%@"[int(pixel * 9.99)] for pixel in line) for line in row))
    model.print(f"\n{args.strategy}, {args.devices} rank(s), distance of drawn to real images:")
    model.print(f"{distance(before, images):.4f} before, {distance(after, images):.4f} after training")


if __name__ == "__main__":
    main()
