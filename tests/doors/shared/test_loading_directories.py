"""A directory is loaded whole, whatever a module keeps in its state and in whatever order objects are passed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from megastrategy import DistributedOptimizer
from megastrategy._lightning.checkpoint_io import MAIN_PARAMS_KEY
from megastrategy.core import CheckpointError
from megastrategy.tools.checkpoint_parts import read_file
from megastrategy.tools.conversion import consolidate, convert
from tests.support.comparison import assert_equal

from ..accelerate_loops import Worlds, adamw, make_accelerator
from ..fabric_loops import make_fabric
from ..fits import AwkwardModule, loader, make_strategy, make_trainer
from ..rank_processes import Ranks

SHARDED = {"state_dict_type": "sharded"}
EXTRA = {"empty": {}, 1: "one", "list": [1, {}], "pair": (1, 2)}


class Net(nn.Sequential):
    """Keeps something that is no tensor in its state_dict."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        super().__init__(nn.Linear(5, 13), nn.Tanh(), nn.Linear(13, 3))
        self.extra: Any = None

    def get_extra_state(self) -> Any:
        return EXTRA

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


# --- main params -----------------------------------------------------------------------------------------------------


def main_params_after_loading(folder: Path, order: Sequence[str]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Rank 0's main params, as they were saved and after a load with the objects in ``order``."""
    fabric = make_fabric("megatron_ddp", SHARDED)
    found = []
    for seed in (0, 1):
        net = Net(seed).bfloat16()
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
        objects = dict(zip(("model", "optimizer"), fabric.setup(net, optimizer), strict=True))
        if seed == 0:
            for _ in range(5):
                fabric.backward(objects["model"](torch.randn(4, 5).bfloat16()).square().mean())
                objects["optimizer"].step()
                objects["optimizer"].zero_grad()
            fabric.save(folder / "checkpoint", objects)
        else:
            fabric.load(folder / "checkpoint", {key: objects[key] for key in order})
        distributed = fabric.strategy._distributed(optimizer)
        assert isinstance(distributed, DistributedOptimizer)
        found.append(dict(distributed.main_params()))
    return found[0], found[1]


@pytest.mark.parametrize("order", [("model", "optimizer"), ("optimizer", "model")], ids="-".join)
def test_main_params_are_loaded_in_whatever_order(ranks: Ranks, tmp_path: Path, order: Sequence[str]) -> None:
    """The weights are their rounding, and would replace them if they came later."""
    (saved, loaded), _ = ranks.run(main_params_after_loading, tmp_path, order)
    assert len(saved) == 4
    assert any(not torch.equal(value, value.bfloat16().float()) for value in saved.values())
    assert_equal(loaded, saved)


class TwoOptimizers(AwkwardModule):
    """The first is over a parameter that is not the module's, and stays whole; bf16 weights have main params."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.stranger = [nn.Parameter(torch.ones(3))]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.stranger, lr=0.1), torch.optim.AdamW(self.parameters(), lr=1e-3)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(super().training_step(batch, batch_idx))
        for optimizer in self.optimizers():
            optimizer.step()
            optimizer.zero_grad()


def fit_two_optimizers(path: Path, resume_from: Path | None = None) -> dict[str, Tensor]:
    """Main params at the end, or right after they were loaded."""
    found: dict[str, Tensor] = {}

    class Looks(pl.Callback):
        def on_train_start(self, trainer: pl.Trainer, *_: Any) -> None:
            found.update(trainer.strategy.optimizers[1].main_params())  # type: ignore[attr-defined]

        def on_train_end(self, trainer: pl.Trainer, *_: Any) -> None:
            if resume_from is None:
                found.update(trainer.strategy.optimizers[1].main_params())  # type: ignore[attr-defined]

    epochs = 1 if resume_from is None else 2
    trainer = make_trainer(make_strategy("megatron_ddp"), precision="bf16-true", max_epochs=epochs, callbacks=[Looks()])
    trainer.fit(TwoOptimizers(), loader(), ckpt_path=None if resume_from is None else str(resume_from))
    if resume_from is None:
        trainer.save_checkpoint(path)
    return found


def test_main_params_stand_at_the_number_of_their_optimizer(ranks: Ranks, tmp_path: Path) -> None:
    """The tools number them over all optimizers, and so does the file."""
    path = tmp_path / "last.ckpt"
    saved, _ = ranks.run(fit_two_optimizers, path)
    whole = torch.load(path, weights_only=True)
    assert [len(params) for params in whole[MAIN_PARAMS_KEY]] == [0, len(saved)]
    assert set(read_file(path).main_params) == {"optimizer_1"}
    loaded, _ = ranks.run(fit_two_optimizers, path, path)
    assert_equal(loaded, saved)


# --- what is no tensor -----------------------------------------------------------------------------------------------


def extra_through_fabric(folder: Path) -> list[Any]:
    """From a directory, and from the file and the directory that the tools make of it."""
    fabric = make_fabric("megatron_ddp", SHARDED)
    net = Net(0)
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    fabric.save(folder / "directory", {"model": model, "optimizer": optimizer, "step": 1})
    if fabric.global_rank == 0:
        consolidate(folder / "directory", folder / "file")
        parts = read_file(folder / "file")
        names = {"optimizer": [[name for name, _ in net.named_parameters()]]}
        convert(parts, names, folder / "converted")
    fabric.barrier()
    found = []
    for name in ("directory", "file", "converted"):
        net.extra = None
        remainder = fabric.load(folder / name, {"model": model})
        assert set(remainder) == {"optimizer", "step"}, name
        found.append(net.extra)
    return found


def test_extra_state_comes_back_as_it_was_through_fabric_and_the_tools(ranks: Ranks, tmp_path: Path) -> None:
    for found in ranks.run(extra_through_fabric, tmp_path):
        assert found == [EXTRA] * 3


def extra_through_accelerate(folder: Path) -> Any:
    accelerator = make_accelerator("megatron_ddp", SHARDED)
    net = Net(0)
    accelerator.prepare(net, adamw(net.parameters()))
    accelerator.save_state(str(folder))
    accelerator.load_state(str(folder))
    return net.extra


def test_extra_state_comes_back_as_it_was_through_accelerate(worlds: Worlds, tmp_path: Path) -> None:
    assert worlds.run(extra_through_accelerate, tmp_path / "saved") == [EXTRA] * 2


# --- all or nothing --------------------------------------------------------------------------------------------------


def load_with_an_optimizer_that_does_not_fit(folder: Path) -> str:
    """The second optimizer has another number of groups than the saved one."""
    accelerator = make_accelerator("megatron_ddp", SHARDED)

    def prepare(seed: int, *, split: bool) -> nn.Module:
        net = Net(seed)
        halves = [{"params": net[2].weight}, {"params": net[2].bias}] if split else net[2].parameters()
        accelerator.prepare(net, adamw(net[0].parameters()), adamw(halves))
        return net

    prepare(0, split=False)
    accelerator.save_state(str(folder))
    accelerator.free_memory()
    net = prepare(1, split=True)
    before = {name: param.detach().clone() for name, param in net.named_parameters()}
    with pytest.raises(CheckpointError) as raised:
        accelerator.load_state(str(folder))
    assert_equal({name: param.detach() for name, param in net.named_parameters()}, before)
    return str(raised.value)


def test_an_optimizer_that_does_not_fit_leaves_all_as_it_was(worlds: Worlds, tmp_path: Path) -> None:
    for message in worlds.run(load_with_an_optimizer_that_does_not_fit, tmp_path / "saved"):
        assert "group" in message
