"""One rank: debugging, and jobs with one GPU. There is no peer to exchange anything with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from megastrategy.core import Collectives

from .. import fabric_loops
from ..fits import loader, make_strategy, make_trainer
from ..matrix import MODES
from ..rank_processes import Ranks, number_of_ranks


class Counting(TorchDispatchMode):
    """Counts by name what the engine starts, in whichever thread, and what others ask of torch's process groups."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.engine = mock.patch.object(Collectives, "_count", self._count(Collectives._count))

    def _count(self, go_on: Callable[[Collectives, str], None]) -> Callable[[Collectives, str], None]:
        def count(collectives: Collectives, what: str) -> None:
            self.counts[what] += 1
            go_on(collectives, what)

        return count

    def __enter__(self) -> Counting:
        self.engine.start()
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self.engine.stop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


class Normed(pl.LightningModule):
    """BatchNorm's statistics are broadcast under "ddp". Nothing is logged, since Lightning would sum it over ranks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(5, 13), nn.BatchNorm1d(13), nn.ReLU(), nn.Linear(13, 11))
        self.collectives = Counting()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        features, _, targets = batch
        return F.cross_entropy(self.net(features), targets)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.training_step(batch, batch_idx)

    def on_train_start(self) -> None:
        self.collectives.__enter__()

    def on_train_end(self) -> None:
        self.collectives.__exit__(None, None, None)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def collectives_of_a_fit(name: str, options: dict[str, Any]) -> dict[str, int]:
    """The collectives of two epochs with clipping, validation and a sum over two batches."""
    module = Normed()
    trainer = make_trainer(make_strategy(name, **options), gradient_clip_val=0.5, accumulate_grad_batches=2)
    trainer.fit(module, loader(number_of_ranks()), loader(number_of_ranks()))
    return dict(module.collectives.counts)


def collectives_of_a_loop(name: str, options: dict[str, Any]) -> dict[str, int]:
    fabric = Fabric(accelerator="cpu", devices=number_of_ranks(), strategy=fabric_loops.make_strategy(name, **options))
    fabric.launch()
    net = Normed().net
    model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
    with Counting() as seen:
        for features, _, targets in loader(number_of_ranks()):
            fabric.backward(F.cross_entropy(model(features), targets))
            fabric.clip_gradients(model, optimizer, max_norm=0.5)
            optimizer.step()
            optimizer.zero_grad()
    return dict(seen.counts)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("job", [collectives_of_a_fit, collectives_of_a_loop], ids=["Trainer", "Fabric"])
def test_training_on_one_rank_runs_no_collective(one_rank: Ranks, job: Any, mode: str) -> None:
    assert one_rank.run(job, "megatron_ddp", MODES[mode]) == [{}]


# --- found by Lightning's own tests (docs/lightnings_own_tests.md) ---------------------------------------------------


def test_methods_that_a_user_replaced_are_called_and_are_theirs_after_a_fit(ranks: Ranks, one_rank: Ranks) -> None:
    """Tests that replace a loop's method to count its calls do so, and put the old one back themselves."""
    for pool in (one_rank, ranks):
        for called, kept in pool.run(calls_of_replaced_methods):
            assert called == ["advance"] * 2 + ["_evaluation_step"] * 3
            assert kept


def calls_of_replaced_methods() -> tuple[list[str], bool]:
    trainer = make_trainer(
        make_strategy("megatron_ddp"),
        max_epochs=1,
        limit_train_batches=2,
        limit_val_batches=3,
        num_sanity_val_steps=0,
    )
    called: list[str] = []

    def noting(method: Any) -> Any:
        def run(*arguments: Any, **options: Any) -> Any:
            called.append(method.__name__)
            return method(*arguments, **options)

        return run

    epoch_loop: Any = trainer.fit_loop.epoch_loop
    replaced = {"advance": noting(epoch_loop.advance), "_evaluation_step": noting(epoch_loop.val_loop._evaluation_step)}
    epoch_loop.advance, epoch_loop.val_loop._evaluation_step = replaced.values()
    trainer.fit(Normed(), loader(), loader())
    return called, [epoch_loop.advance, epoch_loop.val_loop._evaluation_step] == list(replaced.values())
