"""Copies and pickles of objects, as under "ddp", in a fit and after it: Trainers, callbacks, optimizers, schedulers."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import nn

from megastrategy import CommunicationMonitor
from megastrategy.core.errors import DirectUseError

from ..accelerate_loops import Worlds, make_accelerator
from ..fits import MemoryLogger, make_strategy, make_trainer
from ..matrix import MODES
from ..rank_processes import Ranks

both_modes = pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
both_dtypes = pytest.mark.parametrize("precision", ["32-true", "bf16-true"])


def saved(value: Any) -> Any:
    """Written by ``torch.save``, and read."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


class CopiesCallbacks(pl.Callback):
    """As Lightning's ``test_callbacks_state_fit_ckpt_path``, and once the fit goes on, too."""

    def __init__(self) -> None:
        self.num_copies = 0

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.num_copies += len(copy.deepcopy(trainer.callbacks)) > 0

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        self.num_copies += len(copy.deepcopy([*trainer.callbacks, HoldsTrainer(trainer)])) > 0


class SavesTheTrainer(pl.Callback):
    """In the midst of training, of a whole Trainer with its precision plugin."""

    def __init__(self) -> None:
        self.precisions: list[str] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        for twin in (saved(trainer), copy.deepcopy(trainer)):
            self.precisions.append(type(twin.precision_plugin).__name__)


def save_the_trainer_in_a_fit(name: str) -> list[str]:
    saves = SavesTheTrainer()
    trainer = make_trainer(
        make_strategy(name), devices=1, callbacks=[saves], logger=MemoryLogger(), max_epochs=1, limit_train_batches=2
    )
    trainer.fit(BoringModel())
    return saves.precisions


@pytest.mark.parametrize("name", ["ddp", "megatron_ddp"])
def test_a_trainer_is_saved_in_the_midst_of_training_on_one_rank(one_rank: Ranks, name: str) -> None:
    """On several ranks "ddp" has objects that cannot be pickled."""
    assert one_rank.run(save_the_trainer_in_a_fit, name) == [["Precision"] * 4]


class HoldsTrainer(pl.Callback):
    """As a progress bar does."""

    def __init__(self, trainer: pl.Trainer) -> None:
        self.trainer = trainer


def copy_after_a_fit(name: str, devices: int, precision: str, **options: Any) -> list[str]:
    """The results of the copies of the optimizer, one for each way."""
    model = BoringModel()
    callbacks = [CopiesCallbacks(), *([CommunicationMonitor()] if name != "ddp" else [])]
    trainer = make_trainer(
        make_strategy(name, **options),
        devices=devices,
        precision=precision,
        callbacks=callbacks,
        logger=MemoryLogger(),
        max_epochs=1,
        limit_train_batches=2,
        limit_val_batches=1,
    )
    trainer.fit(model)
    assert callbacks[0].num_copies == 3
    copy.deepcopy(trainer.callbacks)
    saved(trainer.model)
    saved(trainer.strategy)
    again = saved(trainer)
    assert again.global_step == trainer.global_step == 2
    outcomes = []
    schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
    for twin in (
        saved(trainer.optimizers)[0],
        copy.deepcopy(trainer.optimizers)[0],
        again.optimizers[0],
        copy.deepcopy(schedulers)[0].optimizer,
        copy.deepcopy(trainer).optimizers[0],
    ):
        assert isinstance(twin, torch.optim.SGD)
        outcomes.append(how_it_steps(twin))
    optimizers, schedulers = copy.deepcopy((trainer.optimizers, schedulers))
    assert schedulers[0].optimizer is optimizers[0], "a copy of a scheduler is bound to the copy"
    return outcomes


def how_it_steps(optimizer: torch.optim.Optimizer) -> str:
    params = [param for group in optimizer.param_groups for param in group["params"]]
    before = [param.detach().clone() for param in params]
    for param in params:
        param.grad = torch.ones_like(param)
    try:
        optimizer.state_dict()
        optimizer.step()
    except DirectUseError as error:
        return "refused" if "the original's state_dict()" in str(error) else str(error)
    assert not any(map(torch.equal, before, params))
    return "stepped"


@both_dtypes
@both_modes
def test_copies_of_a_fit_on_one_rank(one_rank: Ranks, mode: dict[str, Any], precision: str) -> None:
    expected = ["stepped" if precision == "32-true" else "refused"] * 5
    assert one_rank.run(copy_after_a_fit, "megatron_ddp", 1, precision, **mode) == [expected]


@both_modes
def test_copies_of_a_fit_on_two_ranks(ranks: Ranks, mode: dict[str, Any]) -> None:
    assert ranks.run(copy_after_a_fit, "ddp", 2, "32-true") == [["stepped"] * 5] * 2
    expected = ["refused" if mode["use_distributed_optimizer"] else "stepped"] * 5
    assert ranks.run(copy_after_a_fit, "megatron_ddp", 2, "32-true", **mode) == [expected] * 2


def one_step(optimizer: Any, backward: Callable[[], Any]) -> None:
    optimizer.zero_grad()
    backward()
    optimizer.step()


def copy_with_fabric(**options: Any) -> list[str]:
    from lightning.fabric import Fabric

    import megastrategy.fabric

    fabric = Fabric(accelerator="cpu", devices=2, strategy=megastrategy.fabric.MegatronDDPStrategy(**options))
    fabric.launch()
    module = nn.Linear(3, 3)
    model, optimizer = fabric.setup(module, torch.optim.Adam(module.parameters(), lr=0.1))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    one_step(optimizer, lambda: fabric.backward(model(torch.ones(2, 3)).sum()))
    scheduler.step()
    twins = [copy.deepcopy(optimizer), copy.copy(optimizer), copy.deepcopy(scheduler).optimizer, saved(optimizer)]
    return [how_it_steps(twin) for twin in twins]


@both_modes
def test_copies_under_fabric(ranks: Ranks, mode: dict[str, Any]) -> None:
    expected = ["refused" if mode["use_distributed_optimizer"] else "stepped"] * 4
    assert ranks.run(copy_with_fabric, **mode) == [expected] * 2


def copy_with_accelerate(name: str, mode: dict[str, Any] | None) -> list[str]:
    accelerator = make_accelerator(name, mode)
    module = nn.Linear(3, 3)
    adam = torch.optim.Adam(module.parameters(), lr=0.1)
    model, optimizer, scheduler = accelerator.prepare(module, adam, torch.optim.lr_scheduler.StepLR(adam, 1))
    one_step(optimizer, lambda: accelerator.backward(model(torch.ones(2, 3)).sum()))
    scheduler.step()
    twins = [copy.deepcopy(optimizer), saved(optimizer), copy.deepcopy(scheduler).optimizers[0]]
    return [how_it_steps(twin) for twin in twins]


@both_modes
def test_copies_under_accelerate(worlds: Worlds, mode: dict[str, Any]) -> None:
    assert worlds.run(copy_with_accelerate, "ddp", None) == [["stepped"] * 3] * 2
    expected = ["refused" if mode["use_distributed_optimizer"] else "stepped"] * 3
    assert worlds.run(copy_with_accelerate, "megatron_ddp", mode) == [expected] * 2
