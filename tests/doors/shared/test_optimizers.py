"""The user's optimizer: no collective on one rank, arguments of ``step``, what outlives an Accelerator, groups."""

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

from megastrategy import no_decay_groups
from megastrategy.core import Collectives
from tests.doors.features.training import step_by_hand, weights_and_state
from tests.support.comparison import assert_equal

from .. import fabric_loops
from ..accelerate_loops import Worlds, adamw, inputs, make_accelerator, net_of
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


@pytest.mark.parametrize(
    ("job", "mode"), [(collectives_of_a_fit, "reduce-scatter"), (collectives_of_a_loop, "all-reduce")]
)
def test_training_on_one_rank_runs_no_collective(one_rank: Ranks, job: Any, mode: str) -> None:
    assert one_rank.run(job, "megatron_ddp", MODES[mode]) == [{}]


# --- its step --------------------------------------------------------------------------------------------------------


def freed(name: str, plugin: dict[str, Any]) -> list[Any]:
    """Trains twice with one optimizer, and goes on by hand."""
    net = net_of()
    inner = adamw(net.parameters())
    for _ in range(2):
        accelerator = make_accelerator(name, plugin)
        model, optimizer = accelerator.prepare(net, inner)
        for step in range(3):
            accelerator.backward(model(inputs(accelerator, step)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        model, optimizer = accelerator.free_memory(model, optimizer)
    step_by_hand(net, inner)
    return weights_and_state(net, inner)


@pytest.mark.parametrize(("size", "mode"), [(1, "reduce-scatter"), (2, "reduce-scatter"), (2, "all-reduce")])
def test_optimizer_outlives_free_memory(worlds: Worlds, size: int, mode: str) -> None:
    theirs = worlds.run(freed, "ddp", {}, size=size)
    for mine, reference in zip(worlds.run(freed, "megatron_ddp", MODES[mode], size=size), theirs, strict=True):
        assert_equal(mine, reference)


# --- no_decay_groups -------------------------------------------------------------------------------------------------


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(5, 4)
        self.norm = nn.LayerNorm(4)
        self.conv = nn.Conv1d(4, 4, 3)
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.guide = nn.Linear(4, 4)
        self.mixed = nn.Bilinear(2, 3, 4)
        self.mixed.bias = nn.Parameter(torch.zeros(4, 1))  # two dimensions, and a bias
        self.unbias = nn.Parameter(torch.zeros(2, 2))  # no bias
        self.head = nn.Linear(4, 5)
        self.head.weight = self.words.weight
        self.guide.requires_grad_(False)


def test_matrices_decay_and_vectors_do_not() -> None:
    """Nor scalars and biases; each parameter comes once, in the order of the module."""
    module = Model()
    names = {id(param): name for name, param in module.named_parameters()}
    decayed, others = no_decay_groups(module, 0.1)
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    matrices = ["words.weight", "conv.weight", "guide.weight", "mixed.weight", "unbias"]
    assert [names[id(p)] for p in decayed["params"]] == sorted(matrices, key=list(names.values()).index)
    rest = ["norm.weight", "norm.bias", "conv.bias", "scale", "guide.bias", "mixed.bias", "head.bias"]
    assert [names[id(p)] for p in others["params"]] == sorted(rest, key=list(names.values()).index)


@pytest.mark.parametrize(("module", "decay"), [(nn.Embedding(3, 2), [0.3]), (nn.LayerNorm(3), [0.0])])
def test_an_empty_group_is_left_out(module: nn.Module, decay: list[float]) -> None:
    assert [group["weight_decay"] for group in no_decay_groups(module, 0.3)] == decay
