"""``pytorch_lightning`` beside ``lightning.pytorch``: the same fits, in either, in both, and from one to the other.

The jobs import ``pytorch_lightning`` themselves: other jobs should not pay for a second Lightning.
"""

from __future__ import annotations

import dataclasses
import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megastrategy_autoload import DOORS
from tests.support.comparison import assert_equal

from ..fits import assert_same_tensors, loader
from ..rank_processes import Ranks

PACKAGES = ["lightning.pytorch", "pytorch_lightning"]


@dataclasses.dataclass(frozen=True)
class Run:
    """A fit: in which package, under which strategy (a name, or options of ``MegatronDDPStrategy``), from and to which
    checkpoint."""

    package: str
    strategy: str | dict[str, Any]
    epochs: int = 2
    resume: str | None = None
    save: str | None = None


@dataclasses.dataclass
class Result:
    """The results: the weights, all losses, the last logged values; and the classes that took part."""

    weights: dict[str, Tensor]
    losses: list[float]
    metrics: dict[str, float]
    strategy: str


def make_module(pl: Any) -> Any:
    """A module of the package ``pl`` with a tied weight, BatchNorm and odd sizes."""

    class Module(pl.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.inputs = nn.Linear(5, 13)
            self.norm = nn.BatchNorm1d(13)
            self.out = nn.Linear(13, 7)
            self.embed = nn.Embedding(11, 7)
            self.head = nn.Linear(7, 11, bias=False)
            self.head.weight = self.embed.weight
            self.losses: list[float] = []

        def loss(self, batch: Any) -> Tensor:
            features, tokens, targets = batch
            hidden = torch.relu(self.norm(self.inputs(features.to(self.out.weight.dtype))))
            return F.cross_entropy(self.head(self.out(hidden) + self.embed(tokens)).float(), targets)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = self.loss(batch)
            self.losses.append(loss.item())
            self.log("train_loss", loss, on_epoch=True, sync_dist=True)
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_loss", self.loss(batch), sync_dist=True)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
            return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)]

    return Module()


def fit_each(*runs: Run) -> list[Result]:
    """One after the other in this process."""
    return [fit_one(run) for run in runs]


def fit_one(run: Run) -> Result:
    pl = importlib.import_module(run.package)
    strategy: Any = run.strategy
    if isinstance(strategy, dict):
        strategy = importlib.import_module(DOORS[run.package]).MegatronDDPStrategy(**strategy)
    module = make_module(pl)
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=2,
        max_epochs=run.epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, loader(), loader(), ckpt_path=run.resume)
    if run.save is not None:
        trainer.save_checkpoint(run.save)
    return Result(
        weights={name: value.clone() for name, value in module.state_dict().items()},
        losses=module.losses,
        metrics={name: value.item() for name, value in trainer.callback_metrics.items()},
        strategy=class_path(trainer.strategy),
    )


def class_path(instance: object) -> str:
    return f"{type(instance).__module__}.{type(instance).__qualname__}"


@pytest.fixture(scope="module")
def under_ddp(ranks: Ranks) -> list[Result]:
    """pytorch_lightning's own "ddp", by rank."""
    results = [results[0] for results in ranks.run(fit_each, Run("pytorch_lightning", "ddp"))]
    assert [result.strategy for result in results] == ["pytorch_lightning.strategies.ddp.DDPStrategy"] * 2
    assert len(results[0].losses) == 14
    return results


def test_both_packages_in_one_process(ranks: Ranks, under_ddp: list[Result]) -> None:
    """One after the other and back, and neither changes what the other's "ddp" does."""
    order = [Run(package, strategy) for strategy in ("megatron_ddp", "ddp") for package in (*PACKAGES, PACKAGES[0])]
    for results, alone in zip(ranks.run(fit_each, *order), under_ddp, strict=True):
        for result in results:
            assert_equal(dataclasses.replace(result, strategy=""), dataclasses.replace(alone, strategy=""))
        assert [result.strategy for result in results[:3]] == [
            f"{DOORS[run.package]}.MegatronDDPStrategy" for run in order[:3]
        ]


@pytest.mark.parametrize(("first", "second"), [PACKAGES, PACKAGES[::-1]])
def test_checkpoint_resumes_in_the_other_package(
    ranks: Ranks, under_ddp: list[Result], tmp_path: Path, first: str, second: str
) -> None:
    """An epoch in one and one in the other are the two epochs of "ddp" in one."""
    path = str(tmp_path / "epoch.ckpt")
    runs = Run(first, {"bucket_size": 50}, epochs=1, save=path), Run(second, {"bucket_size": 70}, resume=path)
    for [before, after], whole in zip(ranks.run(fit_each, *runs), under_ddp, strict=True):
        assert before.losses + after.losses == whole.losses
        assert_same_tensors(after.weights, whole.weights)
        assert after.metrics == whole.metrics
