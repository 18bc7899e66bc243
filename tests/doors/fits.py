"""Fits for the tests of the doors: a module with everything awkward, its data; and fits with plain results."""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from megastrategy import MegatronDDPStrategy

from .rank_processes import SIZE, number_of_ranks

NUM_TOKENS = 11
BATCH_SIZE = 4
NUM_SAMPLES = 54  # 27 a rank: 7 batches, the last one short; windows of 3, 3 and 1 when three are accumulated
BATCHES_PER_EPOCH = 7
NUM_VALIDATED = 22  # 11 a rank: 3 batches, the last one short

BUCKET_SIZE = 100
"""Small enough that the module below has several buckets."""


class AwkwardNet(nn.Module):
    """A tied weight, a frozen layer, BatchNorm, a scalar parameter, odd sizes, and a branch that is not always used."""

    def __init__(self, seed: int | None = None) -> None:
        super().__init__()
        # by default rank 0's values must reach rank 1
        torch.manual_seed(int(os.environ.get("LOCAL_RANK", "0")) if seed is None else seed)
        self.inputs = nn.Linear(5, 13)
        self.norm = nn.BatchNorm1d(13)
        self.frozen = nn.Linear(13, 13).requires_grad_(False)
        self.side = nn.Linear(13, 13, bias=False)
        self.out = nn.Linear(13, 7)
        self.embed = nn.Embedding(NUM_TOKENS, 7)
        self.head = nn.Linear(7, NUM_TOKENS, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, features: Tensor, tokens: Tensor, use_side: bool = True) -> Tensor:
        hidden = torch.relu(self.frozen(self.norm(self.inputs(features))))
        if use_side:
            hidden = hidden + self.side(hidden)
        return self.head(self.scale * (self.out(hidden) + self.embed(tokens)))

    def loss(self, features: Tensor, tokens: Tensor, targets: Tensor, use_side: bool = True) -> Tensor:
        """A method other than forward, for ``mark_forward_method``."""
        return F.cross_entropy(self(features, tokens, use_side), targets)

    def num_parameters(self) -> int:
        """A method that calls no module."""
        return sum(param.numel() for param in self.parameters())


class AwkwardModule(AwkwardNet, pl.LightningModule):
    """The same, with a branch used on odd batches only.

    Args:
        optimizer: makes the optimizer from the parameters; AdamW by default.
        scheduler: makes a scheduler from the optimizer, or None.
        interval: how often the scheduler steps.
    """

    def __init__(
        self,
        optimizer: Callable[[Any], torch.optim.Optimizer] | None = None,
        scheduler: Callable[[torch.optim.Optimizer], Any] | None = None,
        interval: str = "step",
    ) -> None:
        super().__init__()
        self.make_optimizer = optimizer or adamw
        self.make_scheduler = scheduler
        self.interval = interval
        self.losses: list[float] = []

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        features, tokens, targets = batch
        loss = F.cross_entropy(self(features, tokens, use_side=batch_idx % 2 == 1), targets)
        self.losses.append(loss.item())
        self.log("train_loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: Sequence[Tensor], batch_idx: int) -> None:
        features, tokens, targets = batch
        self.log("val_loss", F.cross_entropy(self(features, tokens), targets), sync_dist=True)

    def test_step(self, batch: Sequence[Tensor], batch_idx: int) -> None:
        features, tokens, targets = batch
        self.log("test_loss", F.cross_entropy(self(features, tokens), targets), sync_dist=True)

    def predict_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        features, tokens, _ = batch
        return self(features, tokens)

    def configure_optimizers(self) -> Any:
        optimizer = self.make_optimizer(self.parameters())
        if self.make_scheduler is None:
            return optimizer
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": self.make_scheduler(optimizer), "interval": self.interval},
        }


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1)


def loader(num_ranks: int = SIZE, num_samples: int = NUM_SAMPLES) -> DataLoader[Any]:
    """The same samples, or the first of them, on every rank and in every call; Lightning gives each rank its half.

    One rank alone gets what would be rank 0's half, and so as many batches.
    """
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(NUM_SAMPLES, 5, generator=generator)
    tokens = torch.randint(NUM_TOKENS, (NUM_SAMPLES,), generator=generator)
    targets = torch.randint(NUM_TOKENS, (NUM_SAMPLES,), generator=generator)
    own = slice(0, num_samples, SIZE // num_ranks)
    return DataLoader(TensorDataset(features[own], tokens[own], targets[own]), batch_size=BATCH_SIZE)


def validation_loader(num_ranks: int = SIZE) -> DataLoader[Any]:
    """The first samples of :func:`loader`: several batches, and no more than it takes."""
    return loader(num_ranks, NUM_VALIDATED)


class MemoryLogger(Logger):
    """Keeps what was logged, as (step, values)."""

    def __init__(self) -> None:
        super().__init__()
        self.history: list[tuple[int | None, dict[str, float]]] = []

    @property
    def name(self) -> str:
        return "memory"

    @property
    def version(self) -> int:
        return 0

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """There are none."""

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.history.append((step, dict(metrics)))


def make_strategy(name: str, **options: Any) -> DDPStrategy:
    """``"ddp"`` with unused parameters allowed, or ``"megatron_ddp"`` with several buckets."""
    if name == "ddp":
        return DDPStrategy(**{"find_unused_parameters": True, **options})
    return MegatronDDPStrategy(**{"bucket_size": BUCKET_SIZE, **options})


def make_trainer(strategy: Any, **options: Any) -> pl.Trainer:
    """A quiet Trainer on the CPU, on all ranks that there are."""
    defaults = {
        "accelerator": "cpu",
        "devices": number_of_ranks(),
        "max_epochs": 2,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "log_every_n_steps": 1,
    }
    return pl.Trainer(strategy=strategy, **{**defaults, **options})


@dataclasses.dataclass
class Fit:
    """The results of a fit on one rank.

    Attributes:
        weights: the module's state_dict, cloned.
        losses: this rank's loss of every batch.
        logged: everything given to the logger (rank 0 only: Lightning logs there).
        metrics: ``trainer.callback_metrics``.
        warnings: the texts of all warnings.
    """

    weights: dict[str, Tensor]
    losses: list[float]
    logged: list[tuple[int | None, dict[str, float]]]
    metrics: dict[str, float]
    warnings: list[str] = dataclasses.field(compare=False)


def fit(
    name: str,
    *,
    strategy_options: dict[str, Any] | None = None,
    module: pl.LightningModule | None = None,
    ckpt_path: str | None = None,
    **trainer_options: Any,
) -> Fit:
    """Fits ``module`` (an AwkwardModule by default) with validation under the strategy called ``name``."""
    module = AwkwardModule() if module is None else module  # a compiled module has no truth value
    logger = MemoryLogger()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = make_trainer(make_strategy(name, **strategy_options or {}), **{"logger": logger, **trainer_options})
        trainer.fit(module, loader(number_of_ranks()), validation_loader(number_of_ranks()), ckpt_path=ckpt_path)
    return Fit(
        weights=weights_of(module),
        losses=list(getattr(module, "losses", [])),
        logged=logger.history,
        metrics={key: value.item() for key, value in trainer.callback_metrics.items()},
        warnings=[str(warning.message) for warning in caught],
    )


def weights_of(module: nn.Module) -> dict[str, Tensor]:
    """A copy of the state_dict."""
    return {name: value.clone() for name, value in module.state_dict().items()}


def assert_same_tensors(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """The same names, dtypes, shapes and bits."""
    assert list(actual) == list(expected)
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, rtol=0, atol=0, msg=lambda text, name=name: f"{name}: {text}")


def assert_same_fit(actual: Fit, expected: Fit) -> None:
    """Weights, losses and everything logged are equal, bit for bit."""
    assert actual.losses == expected.losses
    assert actual.metrics == expected.metrics
    assert actual.logged == expected.logged
    assert_same_tensors(actual.weights, expected.weights)


def batches(epoch: int) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
    """Rank 0's and rank 1's batches of :func:`~tests.doors.fits.loader`, as Lightning shuffles and divides them."""
    whole = loader()
    halves: list[DataLoader[Any]] = []
    for rank in range(2):
        sampler = DistributedSampler(whole.dataset, 2, rank, shuffle=True, seed=0)  # type: ignore[arg-type]
        sampler.set_epoch(epoch)
        halves.append(DataLoader(whole.dataset, batch_size=whole.batch_size, sampler=sampler))
    yield from zip(*halves, strict=True)


STATE = {"weight": torch.arange(300_000, dtype=torch.float32), "step": 1}
"""1.2 MB: many writes of a buffered file."""


def saver(folder: Path, **options: Any) -> ModelCheckpoint:
    defaults: dict[str, Any] = {"filename": "{step}", "every_n_train_steps": BATCHES_PER_EPOCH, "save_top_k": -1}
    return ModelCheckpoint(folder, **{**defaults, "save_on_train_epoch_end": False, **options})


def fit_saving(folder: Path, plugins: tuple[Any, ...] = ()) -> None:
    fit("megatron_ddp", callbacks=[saver(folder)], enable_checkpointing=True, plugins=list(plugins))
