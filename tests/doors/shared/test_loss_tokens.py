"""Averages by tokens through every door: two ranks train as one process that has all of their tokens."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from tests.support.ragged_tokens import assert_close, batch, count, token_model, train_on_all

from ..accelerate_loops import Worlds, make_accelerator, weights_of
from ..fabric_loops import make_fabric
from ..fits import make_strategy, make_trainer
from ..matrix import MODES
from ..rank_processes import Ranks

STEPS, ACCUMULATE = 4, 3


def adamw(module: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=0.02, eps=1e-2)


def weights_of_one_process(size: int, accumulate: int, **options: Any) -> dict[str, Tensor]:
    return train_on_all(size, [accumulate] * STEPS, adamw, **options)


class Ragged(IterableDataset[tuple[Tensor, Tensor]]):
    """All microbatches of one rank."""

    def __init__(self, rank: int, accumulate: int) -> None:
        self.rank, self.accumulate = rank, accumulate

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return (batch(self.rank, step, number) for step in range(STEPS) for number in range(self.accumulate))


# --- Lightning -------------------------------------------------------------------------------------------------------


class Counting(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = token_model()

    def shared_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        ids, labels = batch
        self.trainer.strategy.count_tokens((labels != -100).sum())
        loss: Tensor = self.model(ids, labels, self.global_rank)
        return loss

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self.shared_step(batch)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("loss", self.shared_step(batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return adamw(self.model)


class CountingByHand(Counting):
    """Manual optimization, with the loss that is not the wrapped forward's output."""

    def __init__(self, accumulate: int) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.accumulate = accumulate

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:  # type: ignore[override]
        optimizer = self.optimizers()
        last = (batch_idx + 1) % self.accumulate == 0
        with contextlib.nullcontext() if last else self.trainer.strategy.block_backward_sync():
            self.manual_backward(self.shared_step(batch))
        if last:
            optimizer.step()
            optimizer.zero_grad()


def fit(mode: dict[str, Any], accumulate: int, *, by_hand: bool = False, **options: Any) -> dict[str, Tensor]:
    module = CountingByHand(accumulate) if by_hand else Counting()
    if not by_hand:
        options["accumulate_grad_batches"] = accumulate
    trainer = make_trainer(make_strategy("megatron_ddp", **mode), max_epochs=1, **options)
    data = DataLoader(Ragged(trainer.global_rank, accumulate), batch_size=None)
    trainer.fit(module, data, data)
    weights = weights_of(module.model)
    trainer.validate(module, data, verbose=False)
    return weights


@pytest.mark.parametrize(
    ("mode", "accumulate", "by_hand", "clip_norm"),
    [
        ("reduce-scatter", ACCUMULATE, False, 0.05),
        ("all-reduce", ACCUMULATE, False, None),
        ("reduce-scatter", ACCUMULATE, True, None),
    ],
)
def test_trainer_averages_over_tokens(
    ranks: Ranks, mode: str, accumulate: int, by_hand: bool, clip_norm: float | None
) -> None:
    for weights in ranks.run(fit, MODES[mode], accumulate, by_hand=by_hand, gradient_clip_val=clip_norm):
        assert_close(weights, weights_of_one_process(2, accumulate, clip_norm=clip_norm), 1e-6)


def test_trainer_averages_over_tokens_on_one_rank(one_rank: Ranks) -> None:
    [weights] = one_rank.run(fit, {}, ACCUMULATE)
    assert_close(weights, weights_of_one_process(1, ACCUMULATE), 1e-6)


# --- Fabric ----------------------------------------------------------------------------------------------------------


def fabric_loop(mode: dict[str, Any], accumulate: int, clip_norm: float | None = None) -> dict[str, Tensor]:
    fabric = make_fabric("megatron_ddp", mode)
    module = token_model()
    model, optimizer = fabric.setup(module, adamw(module))
    for step in range(STEPS):
        for number in range(accumulate):
            ids, labels = batch(fabric.global_rank, step, number)
            with fabric.no_backward_sync(model, enabled=number < accumulate - 1):
                loss = model(ids, labels, fabric.global_rank)
                fabric.strategy.count_tokens(count(labels))
                fabric.backward(loss)
        if clip_norm is not None:
            fabric.clip_gradients(model, optimizer, max_norm=clip_norm)
        optimizer.step()
        optimizer.zero_grad()
    return weights_of(module)


@pytest.mark.parametrize(("mode", "accumulate"), [("reduce-scatter", ACCUMULATE), ("all-reduce", 1)])
def test_fabric_averages_over_tokens(ranks: Ranks, mode: str, accumulate: int) -> None:
    for weights in ranks.run(fabric_loop, MODES[mode], accumulate, 0.05):
        assert_close(weights, weights_of_one_process(2, accumulate, clip_norm=0.05), 1e-6)


def fabric_loop_of_two() -> dict[str, Tensor]:
    """``loss.backward()`` itself, and another model, whose losses are not counted."""
    fabric = make_fabric("megatron_ddp", {})
    module = token_model()
    model, optimizer = fabric.setup(module, adamw(module))
    other = fabric.setup(nn.Linear(3, 1))
    for step in range(STEPS):
        ids, labels = batch(fabric.global_rank, step, 0)
        loss = model(ids, labels, fabric.global_rank)
        fabric.strategy.count_tokens(count(labels))
        if step % 2:
            loss.backward()
        else:
            fabric.backward(loss)
            fabric.backward(other(torch.ones(2, 3)).sum())
            torch.testing.assert_close(fabric.strategy.full_grad(other.module.weight), torch.full((1, 3), 2.0))
            other.zero_grad()
        optimizer.step()
        optimizer.zero_grad()
    return weights_of(module)


def test_fabric_counts_for_the_models_of_the_loss(ranks: Ranks) -> None:
    for weights in ranks.run(fabric_loop_of_two):
        assert_close(weights, weights_of_one_process(2, 1), 1e-6)


# --- Accelerate ------------------------------------------------------------------------------------------------------


def accelerate_loop(mode: dict[str, Any], accumulate: int) -> dict[str, Tensor]:
    accelerator = make_accelerator("megatron_ddp", mode, gradient_accumulation_steps=accumulate)
    rank = accelerator.process_index
    module = token_model()
    model, optimizer = accelerator.prepare(module, adamw(module))
    for step in range(STEPS):
        for number in range(accumulate):
            ids, labels = batch(rank, step, number)
            with accelerator.accumulate(model):
                loss = model(ids, labels, rank)
                accelerator.count_tokens(count(labels))
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.05)
                optimizer.step()
                optimizer.zero_grad()
    weights = weights_of(module)
    accelerator.free_memory()
    if accelerator.num_processes == 1:
        assert not any(param._post_accumulate_grad_hooks for param in module.parameters()), "the user's own again"
    return weights


@pytest.mark.parametrize(("mode", "accumulate"), [("reduce-scatter", ACCUMULATE), ("all-reduce", 1)])
def test_accelerate(worlds: Worlds, mode: str, accumulate: int) -> None:
    for weights in worlds.run(accelerate_loop, MODES[mode], accumulate):
        assert_close(weights, weights_of_one_process(2, accumulate, clip_norm=0.05), 1e-6)


def test_accelerate_in_one_process(worlds: Worlds) -> None:
    """Models are not wrapped, and microbatches are ragged all the same."""
    [weights] = worlds.run(accelerate_loop, {}, ACCUMULATE, size=1)
    assert_close(weights, weights_of_one_process(1, ACCUMULATE, clip_norm=0.05), 1e-6)


# --- Transformers ----------------------------------------------------------------------------------------------------
