"""A Trainer's checkpoint from any strategy and number of ranks resumes under any other: two optimizers, schedulers,
loss scale and counters come along, tensor by tensor."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.optim.lr_scheduler import ExponentialLR, ReduceLROnPlateau

from megastrategy.lightning import MAIN_PARAMS_KEY
from tests.doors.features.precision import half_precision
from tests.doors.lightning.test_lightning_checkpoints import assert_same_value, load

from ..fabric_loops import AwkwardNet, adamw, make_data, make_fabric
from ..fits import AwkwardModule, assert_same_tensors, loader, make_strategy, make_trainer, weights_of
from ..rank_processes import Ranks

SAVED_AFTER = 4  # batches, of 5 and more an epoch; two steps each


@dataclasses.dataclass(frozen=True)
class World:
    """Who writes or reads: a strategy with its options, on so many processes."""

    name: str
    size: int
    options: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        return "-".join([self.name, str(self.size), *(f"{key}={value}" for key, value in self.options)])

    def make_trainer(self, **options: Any) -> pl.Trainer:
        """ "auto" is what a Trainer does on one device without being told anything."""
        strategy = "auto" if self.name == "auto" else make_strategy(self.name, **dict(self.options))
        return make_trainer(strategy, devices=self.size, max_epochs=2, num_sanity_val_steps=0, **options)


WORLDS = [
    World("auto", 1),
    World("ddp", 2),
    World("megatron_ddp", 2),
    World("megatron_ddp", 2, (("use_distributed_optimizer", False),)),
    World("megatron_ddp", 3, (("bucket_size", 10_000),)),
]


class TwoOptimizers(AwkwardModule):
    """AMSGrad in groups with equal hyper-parameters, SGD with momentum, and a scheduler of each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        params = dict(self.named_parameters())
        heads = [params.pop(name) for name in ("scale", "out.weight", "out.bias")]
        others = list(params.values())
        groups = [{"params": others[::2]}, {"params": []}, {"params": others[1::2]}]
        adam = torch.optim.AdamW(groups, lr=1e-2, amsgrad=True)
        sgd = torch.optim.SGD(heads, lr=0.05, momentum=0.9)
        plateau = ReduceLROnPlateau(sgd, factor=0.5, patience=1)
        return [adam, sgd], [ExponentialLR(adam, 0.5), {"scheduler": plateau, "monitor": "train_loss"}]

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> None:
        features, tokens, targets = batch
        optimizers = self.optimizers()
        for optimizer in optimizers:
            loss = F.cross_entropy(self(features, tokens, use_side=batch_idx % 2 == 1), targets)
            self.manual_backward(loss)
            optimizer.step()
            for each in optimizers:
                each.zero_grad()
            self.losses.append(loss.item())
        lambda_lr, plateau = self.lr_schedulers()
        lambda_lr.step()
        plateau.step(1.0)  # no improvement


class SaveAndStop(pl.Callback):
    """Saves when so many batches are done, or before the first one, and ends the fit."""

    def __init__(self, path: str, after: int | None) -> None:
        self.path, self.after = path, after

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.after is None:
            trainer.save_checkpoint(self.path)
            trainer.should_stop = True

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> int | None:
        return -1 if self.after is None else None  # skip what is left of the epoch

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.fit_loop.epoch_loop.total_batch_idx + 1 == self.after:
            trainer.save_checkpoint(self.path)
            trainer.should_stop = True


def write(world: World, path: str) -> None:
    trainer = world.make_trainer(
        callbacks=[SaveAndStop(path, SAVED_AFTER)], plugins=[half_precision(init_scale=16.0, growth_interval=3)]
    )
    trainer.fit(TwoOptimizers(), loader())


def read_and_write(world: World, paths: Sequence[tuple[str, str]]) -> list[dict[str, Tensor]]:
    """Resumes from each first path and saves at once to the second; the weights that this rank started with."""
    weights = []
    for source, target in paths:
        trainer = world.make_trainer(
            callbacks=[SaveAndStop(target, None)], plugins=[half_precision(init_scale=16.0, growth_interval=3)]
        )
        module = TwoOptimizers()
        trainer.fit(module, loader(), ckpt_path=source)
        assert not module.losses, "nothing was trained in between"
        weights.append(weights_of(module))
    return weights


@pytest.fixture(scope="module")
def worlds(ranks: Ranks) -> Iterator[dict[int, Ranks]]:
    """Rank processes by their number."""
    pools = {1: Ranks(1), 2: ranks, 3: Ranks(3)}
    yield pools
    pools[1].close()
    pools[3].close()


@pytest.fixture(scope="module")
def files(worlds: dict[int, Ranks], tmp_path_factory: pytest.TempPathFactory) -> dict[World, Path]:
    """The files of each world after the same number of batches."""
    folder = tmp_path_factory.mktemp("written")
    paths = {world: folder / f"{world}.ckpt" for world in WORLDS}
    for world, path in paths.items():
        worlds[world.size].run(write, world, str(path))
    return paths


def kept(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Without the callbacks' own, and the loops' counters of what was begun."""
    return {key: value for key, value in checkpoint.items() if key not in ("callbacks", "loops")}


@pytest.mark.parametrize("reader", WORLDS, ids=str)
def test_what_is_resumed_is_what_was_saved(
    worlds: dict[int, Ranks], files: dict[World, Path], tmp_path: Path, reader: World
) -> None:
    """From every writer: weights on every rank, and all that is saved again before the first batch."""
    copies = {writer: tmp_path / f"{writer}.ckpt" for writer in WORLDS}
    by_rank = worlds[reader.size].run(
        read_and_write, reader, [(str(files[writer]), str(copies[writer])) for writer in WORLDS]
    )
    for place, writer in enumerate(WORLDS):
        saved, again = load(files[writer]), load(copies[writer])
        assert_same_value(kept(again), kept(saved), str(writer))
        for weights in by_rank:
            assert_same_tensors(weights[place], dict(saved["state_dict"]))


def train_on(world: World, path: str) -> tuple[list[float], dict[str, Tensor]]:
    """An epoch more; this rank's losses and weights."""
    module = AwkwardModule()
    trainer = world.make_trainer(plugins=[])
    trainer.fit(module, loader(), ckpt_path=path)
    return module.losses, weights_of(module)


def write_first_epoch(world: World, path: str) -> None:
    trainer = world.make_trainer(callbacks=[SaveAfterFirstEpoch(path)])
    trainer.fit(AwkwardModule(), loader())


class SaveAfterFirstEpoch(pl.Callback):
    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.current_epoch == 0:
            trainer.save_checkpoint(self.path)


@pytest.mark.parametrize(("name", "size"), [("ddp", 1), ("megatron_ddp", 3)])
def test_training_goes_on_with_other_numbers_of_ranks(
    worlds: dict[int, Ranks], tmp_path: Path, name: str, size: int
) -> None:
    """Two ranks wrote; on one the next epoch is ddp's to the bit, on three sums have another order."""
    path = tmp_path / "first.ckpt"
    worlds[2].run(write_first_epoch, World(name, 2), str(path))
    ours = worlds[size].run(train_on, World("megatron_ddp", size), str(path))
    theirs = worlds[size].run(train_on, World("ddp", size), str(path))
    for (losses, weights), (their_losses, their_weights) in zip(ours, theirs, strict=True):
        assert len(losses) == len(their_losses) > 0
        if size == 1:
            assert losses == their_losses
            assert_same_tensors(weights, their_weights)
        else:
            assert losses == pytest.approx(their_losses, abs=1e-4)
            assert losses[0] == their_losses[0], "before the first step everything is equal"


# --- 16-bit weights --------------------------------------------------------------------------------------------------


def resume_in_bf16(world: World, source: str, target: str) -> tuple[dict[str, Tensor], list[str]]:
    """Resumes with bf16 weights and saves at once; the weights, and the texts of all warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = world.make_trainer(callbacks=[SaveAndStop(target, None)], precision="bf16-true")
        module = TwoOptimizers()
        trainer.fit(module, loader(), ckpt_path=source)
    return weights_of(module), [str(warning.message) for warning in caught]


def write_in_bf16(world: World, path: str) -> None:
    trainer = world.make_trainer(callbacks=[SaveAndStop(path, SAVED_AFTER)], precision="bf16-true")
    trainer.fit(TwoOptimizers(), loader())


@pytest.mark.parametrize(("writer", "size"), [("ddp", 2), ("megatron_ddp", 3)])
def test_fp32_weights_become_main_params_in_bf16(
    worlds: dict[int, Ranks], files: dict[World, Path], tmp_path: Path, writer: str, size: int
) -> None:
    """Lightning casts the module; the fp32 values are in the file still."""
    file = files[World(writer, 2)]
    worlds[size].run(resume_in_bf16, World("megatron_ddp", size), str(file), str(tmp_path / "again.ckpt"))
    saved, again = load(file), load(tmp_path / "again.ckpt")
    main_params = {name: value for part in again[MAIN_PARAMS_KEY] for name, value in part.items()}
    trained = [name for name, param in TwoOptimizers().named_parameters() if param.requires_grad]
    assert sorted(main_params) == sorted(trained)
    for name, value in main_params.items():
        assert_same_value(value, saved["state_dict"][name], name)
    assert_same_value(again["optimizer_states"], saved["optimizer_states"], "optimizer_states")


def test_ddp_goes_on_from_16_bit_weights_and_says_so(ranks: Ranks, tmp_path: Path) -> None:
    """Without main params, and with the state in the weights' dtype: that is what "ddp" has in bf16-true."""
    first, again = tmp_path / "first.ckpt", tmp_path / "again.ckpt"
    ranks.run(write_in_bf16, World("megatron_ddp", 2), str(first))
    (_, texts), _ = ranks.run(resume_in_bf16, World("ddp", 2), str(first), str(again))
    assert sum("main params" in text for text in texts) == 1
    saved, resumed = load(first), load(again)
    assert MAIN_PARAMS_KEY not in resumed
    assert_same_tensors(dict(resumed["state_dict"]), dict(saved["state_dict"]))
    for state, before in zip(resumed["optimizer_states"], saved["optimizer_states"], strict=True):
        for number, values in before["state"].items():
            for key, value in values.items():
                rounded = value if key == "step" else value.bfloat16()
                assert_same_value(state["state"][number][key], rounded, f"{key} of parameter {number}")


# --- Fabric ----------------------------------------------------------------------------------------------------------


def write_with_fabric(path: str) -> None:
    fabric = make_fabric("ddp", {})
    net = AwkwardNet()
    model, optimizer = fabric.setup(net, adamw(net.parameters()))
    for number, (features, tokens, targets) in enumerate(make_data(fabric)):
        fabric.backward(F.cross_entropy(model(features, tokens, number % 2 == 1), targets))
        optimizer.step()
        optimizer.zero_grad()
    fabric.save(path, {"model": model, "optimizer": optimizer})


def resume_with_fabric_in_bf16(source: str, target: str) -> None:
    fabric = make_fabric("megatron_ddp", precision="bf16-true")
    net = AwkwardNet()
    model, optimizer = fabric.setup(net, adamw(net.parameters()))
    state = {"model": model, "optimizer": optimizer}
    fabric.load(source, state)
    fabric.save(target, state)


def test_fp32_weights_become_main_params_in_fabric(ranks: Ranks, tmp_path: Path) -> None:
    """The module is bf16 already when the file's fp32 weights come."""
    first, again = tmp_path / "first.ckpt", tmp_path / "again.ckpt"
    ranks.run(write_with_fabric, str(first))
    ranks.run(resume_with_fabric_in_bf16, str(first), str(again))
    saved, resumed = load(first), load(again)
    main_params = resumed[MAIN_PARAMS_KEY]["optimizer"]
    trained = [name for name, param in AwkwardNet().named_parameters() if param.requires_grad]
    assert sorted(main_params) == sorted(trained)
    for name, value in main_params.items():
        assert_same_value(value, saved["model"][name], name)
