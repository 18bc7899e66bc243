"""A fit under ``megatron_ddp`` against the same fit under ``"ddp"``: weights, losses and everything logged."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

from megastrategy import DistributedDataParallel

from ..fits import (
    AwkwardModule,
    Fit,
    adamw,
    assert_same_fit,
    assert_same_tensors,
    fit,
    loader,
    make_strategy,
    make_trainer,
    weights_of,
)
from ..rank_processes import Ranks


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("sharded", [True, False])
def test_fit_equals_ddp_bit_for_bit(ranks: Ranks, sharded: bool, accumulate: int) -> None:
    """Two ranks leave no freedom in the order of summation, so nothing may differ, the short last window included."""
    ours = ranks.run(
        fit,
        "megatron_ddp",
        strategy_options={"use_distributed_optimizer": sharded},
        accumulate_grad_batches=accumulate,
    )
    theirs = ranks.run(fit, "ddp", accumulate_grad_batches=accumulate)
    for mine, other in zip(ours, theirs, strict=True):
        assert len(mine.losses) == 14
        assert_same_fit(mine, other)
    assert_same_tensors(ours[0].weights, ours[1].weights)
    assert ours[0].losses != ours[1].losses, "the ranks see different samples"


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "options",
    [
        {"overlap_grad_reduce": False},
        {"static_graph": True},
        {"bucket_size": None, "bucket_cap_mb": 0.001},
        {"use_distributed_optimizer": False, "overlap_grad_reduce": False, "use_contiguous_buffers": False},
        {"broadcast_buffers": False},
        {"grad_buffer": "pooled"},
    ],
    ids=lambda options: "-".join(options),
)
def test_every_mode_equals_ddp(ranks: Ranks, options: dict[str, Any]) -> None:
    """How gradients travel must not show in the result; broadcast_buffers=False means what it means under ddp."""
    shared = {name: value for name, value in options.items() if name == "broadcast_buffers"}
    if "static_graph" in options:
        job: Callable[..., list[Fit]] = partial(ranks.run, fit_without_branch)
    else:
        job = partial(ranks.run, fit)
    for mine, other in zip(
        job("megatron_ddp", strategy_options=options), job("ddp", strategy_options=shared), strict=True
    ):
        assert_same_fit(mine, other)


def fit_without_branch(name: str, **options: Any) -> Fit:
    return fit(name, module=WithoutBranch(), **options)


class WithoutBranch(AwkwardModule):
    """The same graph in every batch."""

    def forward(self, features: Tensor, tokens: Tensor, use_side: bool = True) -> Tensor:
        return super().forward(features, tokens, use_side=True)


# --- manual optimization ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sharded", [True, False])
def test_reentrant_checkpointing_in_manual_optimization_equals_ddp(ranks: Ranks, sharded: bool) -> None:
    """The inner backwards end before the outer one, whose loss the wrapped forward never returned."""
    ours = ranks.run(fit_checkpointed, "megatron_ddp", strategy_options={"use_distributed_optimizer": sharded})
    theirs = ranks.run(fit_checkpointed, "ddp", strategy_options={"find_unused_parameters": False})
    for mine, other in zip(ours, theirs, strict=True):
        assert_same_fit(mine, other)


def fit_checkpointed(name: str, **options: Any) -> Fit:
    return fit(name, module=Checkpointed(), **options)


class Checkpointed(pl.LightningModule):
    """Manual optimization of layers behind re-entrant checkpoints; the first gradient comes from inside one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.automatic_optimization = False
        self.inputs = nn.Linear(5, 9)
        self.layers = nn.ModuleList(nn.Linear(9, 9) for _ in range(3))
        self.head = nn.Linear(9, 11)
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> None:
        features, _, targets = batch
        optimizer = self.optimizers()
        optimizer.zero_grad()
        hidden = self.inputs(features)
        for layer in (*self.layers, self.head):
            hidden = checkpoint(lambda x, layer=layer: layer(torch.tanh(x)), hidden, use_reentrant=True)
        loss = F.cross_entropy(hidden, targets)
        self.manual_backward(loss)
        optimizer.step()
        self.losses.append(loss.item())

    def configure_optimizers(self) -> Optimizer:
        return adamw(self.parameters())


def test_pooled_gradients_of_a_window_that_is_validated_in(ranks: Ranks) -> None:
    """Each microbatch is reduced by itself, which rounds elsewhere; what was reduced before the validation stays."""
    options = {"accumulate_grad_batches": 3, "val_check_interval": 2}
    ours = ranks.run(fit, "megatron_ddp", strategy_options={"grad_buffer": "pooled"}, **options)
    theirs = ranks.run(fit, "ddp", **options)
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.losses == pytest.approx(other.losses, rel=1e-5)
    assert torch.equal(ours[0].weights["inputs.weight"], ours[1].weights["inputs.weight"])


# --- collectives -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sharded", [True, False])
@pytest.mark.parametrize(
    ("module", "options", "num_windows"),
    [
        (AwkwardModule, {}, 14),
        (AwkwardModule, {"overlap_grad_reduce": False}, 14),
        (AwkwardModule, {"accumulate_grad_batches": 3}, 6),
        (Checkpointed, {}, 14),
    ],
)
def test_every_bucket_is_reduced_once_a_step(
    ranks: Ranks, module: type[pl.LightningModule], options: dict[str, Any], num_windows: int, sharded: bool
) -> None:
    """Nothing is sent while gradients accumulate, nor when the backward inside a checkpoint ends."""
    for num_buckets, counts in ranks.run(count_reductions, module, sharded, **options):
        assert num_buckets > 2
        assert counts == {"reduce_scatter": num_windows if sharded else 0, "all_reduce": 0 if sharded else num_windows}


def count_reductions(
    module: type[pl.LightningModule], sharded: bool, overlap_grad_reduce: bool = True, **options: Any
) -> tuple[int, dict[str, Fraction]]:
    counter = CountReductions()
    strategy_options = {"use_distributed_optimizer": sharded, "overlap_grad_reduce": overlap_grad_reduce}
    fit("megatron_ddp", module=module(), strategy_options=strategy_options, callbacks=[counter], **options)
    return counter.num_buckets, counter.counts


class CountReductions(pl.Callback):
    """Listens at the one seam through which the engine sends, during a fit. Each bucket counts as its part of all there
    are, which may become others after the first backward."""

    def __init__(self) -> None:
        self.counts = {"reduce_scatter": Fraction(0), "all_reduce": Fraction(0)}
        self.num_buckets = 0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        wrapped = trainer.strategy.model
        assert isinstance(wrapped, DistributedDataParallel)
        self.num_buckets = len(wrapped.layout.buckets)
        for name in self.counts:
            setattr(
                wrapped.engine.collectives,
                name,
                self._counted(name, getattr(wrapped.engine.collectives, name), wrapped),
            )

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        for name in self.counts:
            delattr(trainer.strategy.model.engine.collectives, name)

    def _counted(self, name: str, send: Callable[..., Any], wrapped: DistributedDataParallel) -> Callable[..., Any]:
        def counted(*arguments: Any, **options: Any) -> Any:
            self.counts[name] += Fraction(1, len(wrapped.layout.buckets))
            return send(*arguments, **options)

        return counted


# --- validate, test, predict -----------------------------------------------------------------------------------------


def test_validate_test_and_predict_around_a_fit_equal_ddp(ranks: Ranks) -> None:
    """Every stage with one Trainer, validation before the fit included, and two fits of one module after each other."""
    ours, theirs = (ranks.run(every_stage, name) for name in ("megatron_ddp", "ddp"))
    for mine, other in zip(ours, theirs, strict=True):
        assert mine["metrics"] == other["metrics"]
        assert len(mine["predictions"]) == 7
        for found, expected in zip(mine["predictions"], other["predictions"], strict=True):
            assert torch.equal(found, expected)
        for found, expected in zip(mine["weights"], other["weights"], strict=True):
            assert_same_tensors(found, expected)
        first, second = (weights["out.weight"] for weights in mine["weights"])
        assert not torch.equal(first, second), "the second fit trained nothing"


def every_stage(name: str) -> dict[str, Any]:
    module = AwkwardModule()
    trainer = make_trainer(make_strategy(name), max_epochs=1)
    metrics: list[Any] = []
    metrics += trainer.validate(module, loader(), verbose=False)
    trainer.fit(module, loader(), loader())
    weights = [weights_of(module)]
    metrics += trainer.validate(module, loader(), verbose=False)
    metrics += trainer.test(module, loader(), verbose=False)
    again = make_trainer(make_strategy(name), max_epochs=1)
    again.fit(module, loader(), loader())
    weights.append(weights_of(module))
    predictions = again.predict(module, loader())
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, loader())  # the first Trainer again: its strategy is set up a second time
    return {"metrics": metrics, "weights": weights, "predictions": predictions}
