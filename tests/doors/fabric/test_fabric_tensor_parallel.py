"""``Fabric(strategy=MegatronDDPStrategy(tensor_parallel_size=2))``: a loop written for Lightning's
ModelParallelStrategy, without its ``fully_shard`` lines, trains, saves and resumes as in one process."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from megastrategy.core import OpenDirectory
from megastrategy.fabric import MegatronDDPStrategy
from megastrategy.tools.conversion import consolidate
from tests.doors.lightning.test_lightning_tensor_parallel import BATCH_SIZE, assert_close, loader, num_chunks, read
from tests.support.comparison import message
from tests.support.tensor_parallel import LanguageModel, adamw, plan, whole

from ..rank_processes import Ranks


def parallelize(module: nn.Module, mesh: Any) -> nn.Module:
    """As a user writes it for Lightning's strategy, ``fully_shard`` left out."""
    parallelize_module(module, mesh["tensor_parallel"], plan(sequence_parallel=True))
    return module


def make_module() -> LanguageModel:
    torch.manual_seed(3)
    return LanguageModel(64, tied=False, width=16)


def train(strategy: Any, folder: str, resume: str | None = None, *, by_hand: bool = False) -> dict[str, Any]:
    """One epoch with accumulation and clipping, then a file called after the number of ranks and of epochs."""
    fabric = Fabric(accelerator="cpu", devices=4 if isinstance(strategy, MegatronDDPStrategy) else 1, strategy=strategy)
    fabric.launch()
    module = make_module()
    if by_hand:
        parallelize(module, fabric.strategy.device_mesh)
        model, optimizer = fabric.setup(module, adamw(module.parameters()))
    else:
        model = fabric.setup(module)
        optimizer = fabric.setup_optimizers(adamw(model.parameters()))
    epochs = 1
    if resume is not None:
        state = {"model": model, "optimizer": optimizer, "epochs": 0}
        fabric.load(resume, state)
        epochs += state["epochs"]  # type: ignore[operator]
    data = fabric.setup_dataloaders(loader(BATCH_SIZE if fabric.world_size > 1 else 2 * BATCH_SIZE))
    losses, norms = [], []
    for number, [tokens] in enumerate(data):
        is_last = number % 2 == 1
        with fabric.no_backward_sync(model, enabled=not is_last):
            loss = module.loss(model(tokens), tokens)
            fabric.backward(loss / 2)
        losses.append(loss.item())
        if is_last:
            norms.append(float(whole(fabric.clip_gradients(model, optimizer, max_norm=0.1))))
            optimizer.step()
            optimizer.zero_grad()
    state = {"model": model, "optimizer": optimizer, "epochs": epochs}
    fabric.save(f"{folder}/{fabric.world_size} ranks, {epochs} epochs", state)
    fabric.barrier()
    return {"losses": losses, "norms": norms}


def train_on_mesh(folder: str, resume: str | None = None, by_hand: bool = False, **options: Any) -> dict[str, Any]:
    parallelize_fn = None if by_hand else parallelize
    strategy = MegatronDDPStrategy(tensor_parallel_size=2, parallelize_fn=parallelize_fn, **options)
    return train(strategy, folder, resume, by_hand=by_hand)


@pytest.mark.parametrize("by_hand", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_mesh_trains_saves_and_resumes_as_one_process_does(
    one_rank: Ranks, mesh: Ranks, tmp_path: Path, by_hand: bool
) -> None:
    folder = str(tmp_path)
    [alone] = one_rank.run(train, "ddp", folder)
    together = mesh.run(train_on_mesh, folder, by_hand=by_hand)
    for rank, own in enumerate(together):
        assert own["losses"] == together[rank - rank % 2]["losses"], "one batch for a tensor group"
        assert own["norms"] == together[0]["norms"], "the same bits everywhere"
    assert together[0]["norms"] == pytest.approx(alone["norms"], rel=1e-5)
    means = [sum(pair) / 2 for pair in zip(together[0]["losses"], together[2]["losses"], strict=True)]
    assert together[0]["losses"] != together[2]["losses"], "another batch for each data-parallel rank"
    assert means == pytest.approx(alone["losses"], rel=1e-5)
    # the file is what one process wrote
    expected, four = read(tmp_path / "1 ranks, 1 epochs"), read(tmp_path / "4 ranks, 1 epochs")
    assert four.keys() == expected.keys()
    for part, value in expected.items():
        assert_close(four[part], value, part)
    # each goes on from the other's
    one_rank.run(train, "ddp", folder, f"{folder}/4 ranks, 1 epochs")
    mesh.run(train_on_mesh, folder, f"{folder}/1 ranks, 1 epochs", by_hand=by_hand)
    expected, four = read(tmp_path / "1 ranks, 2 epochs"), read(tmp_path / "4 ranks, 2 epochs")
    assert_close(four["model"], expected["model"], "resumed")
    assert not torch.equal(four["model"]["norm.weight"], read(tmp_path / "4 ranks, 1 epochs")["model"]["norm.weight"])


# --- directories -----------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_directory_is_what_one_process_saves_and_each_resumes_from_it(
    one_rank: Ranks, mesh: Ranks, tmp_path: Path
) -> None:
    folder, parts = str(tmp_path), str(tmp_path / "parts")
    one_rank.run(train, "ddp", folder)
    mesh.run(train_on_mesh, parts, state_dict_type="sharded")
    directory = tmp_path / "parts" / "4 ranks, 1 epochs"
    assert num_chunks(directory, "model.embed.weight") == 2, "each tensor rank writes its part"
    expected = read(tmp_path / "1 ranks, 1 epochs")
    assert_close(OpenDirectory(directory).read("model"), dict(expected["model"]), "weights")
    consolidate(directory, tmp_path / "one file")
    assert_close(read(tmp_path / "one file")["optimizer"], expected["optimizer"], "optimizer")
    # one process goes on from the file, and so do the mesh and one process from the directory
    one_rank.run(train, "ddp", folder, f"{folder}/1 ranks, 1 epochs")
    mesh.run(train_on_mesh, parts, str(directory), state_dict_type="sharded")
    one_rank.run(train_in_one_process, parts, str(directory))
    expected = read(tmp_path / "1 ranks, 2 epochs")
    for name in ("4 ranks, 2 epochs", "1 ranks, 2 epochs"):
        assert_close(OpenDirectory(tmp_path / "parts" / name).read("model"), dict(expected["model"]), name)
    for own in mesh.run(load_in_bf16, str(directory)):
        assert own == "the fp32 weights"


def train_in_one_process(folder: str, resume: str) -> dict[str, Any]:
    fabric = Fabric(accelerator="cpu", devices=1, strategy=MegatronDDPStrategy(state_dict_type="sharded"))
    fabric.launch()
    module = make_module()
    model, optimizer = fabric.setup(module, adamw(module.parameters()))
    state = {"model": model, "optimizer": optimizer, "epochs": 0}
    fabric.load(resume, state)
    for number, [tokens] in enumerate(loader(2 * BATCH_SIZE)):
        with fabric.no_backward_sync(model, enabled=number % 2 == 0):
            fabric.backward(module.loss(model(tokens), tokens) / 2)
        if number % 2 == 1:
            fabric.clip_gradients(model, optimizer, max_norm=0.1)
            optimizer.step()
            optimizer.zero_grad()
    fabric.save(f"{folder}/1 ranks, 2 epochs", state)
    return {}


def load_in_bf16(directory: str) -> str:
    """fp32 weights of a directory become main params; each rank reads its part."""
    strategy = MegatronDDPStrategy(tensor_parallel_size=2, parallelize_fn=parallelize)
    fabric = Fabric(accelerator="cpu", devices=4, strategy=strategy, precision="bf16-true")
    fabric.launch()
    module = make_module()
    model = fabric.setup(module)
    optimizer = fabric.setup_optimizers(adamw(model.parameters()))
    fabric.load(directory, {"model": model, "optimizer": optimizer})
    main_params = optimizer.main_params()
    saved = OpenDirectory(Path(directory)).read("model")
    rounded = {name: whole(param) for name, param in module.named_parameters()}
    for name, value in saved.items():
        assert torch.equal(rounded[name], value.bfloat16()), name
        assert not fabric.is_global_zero or torch.equal(main_params[name], value), name
    assert not fabric.is_global_zero or main_params.keys() == saved.keys()
    return "the fp32 weights"


def fully_sharded(module: nn.Module, mesh: Any) -> nn.Module:
    """As a user has it for Lightning's strategy."""
    return fully_shard(parallelize(module, mesh), mesh=mesh["data_parallel"])


def go_on(is_ours: bool, source: str | None, target: str) -> dict[str, torch.Tensor]:
    """Trains two steps, or loads; saves, and returns the weights after two more."""
    sizes = {"tensor_parallel_size": 2}
    strategy: Any = MegatronDDPStrategy(parallelize_fn=parallelize, state_dict_type="sharded", **sizes)
    if not is_ours:
        strategy = ModelParallelStrategy(parallelize_fn=fully_sharded, data_parallel_size=2, **sizes)
    fabric = Fabric(accelerator="cpu", devices=4, strategy=strategy)
    fabric.launch()
    module = make_module()
    module.temperature = nn.Parameter(torch.tensor([0.5]))  # fully_shard refuses scalars
    model = fabric.setup(module)
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=3e-3, eps=1e-5, foreach=False))
    data = list(fabric.setup_dataloaders(loader(BATCH_SIZE)))

    def step(batches: list[Any]) -> None:
        for [tokens] in batches:
            fabric.backward(module.loss(model(tokens), tokens))
            optimizer.step()
            optimizer.zero_grad()

    state = {"model": model, "optimizer": optimizer, "steps": 0}
    if source is None:
        step(data[:2])
        state["steps"] = 2
    else:
        fabric.load(source, state)
    assert state["steps"] == 2
    fabric.save(target, state)
    step(data[2:4])
    return {name: whole(param) for name, param in module.named_parameters()}


@pytest.mark.long
def test_model_parallel_strategys_directory_goes_on_here_and_ours_there(mesh: Ranks, tmp_path: Path) -> None:
    first, ours, again = (str(tmp_path / name) for name in ("first", "ours", "again"))
    expected = mesh.run(go_on, False, None, first)[0]
    assert_close(mesh.run(go_on, True, first, ours)[0], expected, "theirs, by ours")
    assert_close(mesh.run(go_on, False, ours, again)[0], expected, "ours, by theirs")


# --- one mesh, many questions ----------------------------------------------------------------------------------------


class Pair(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, width), nn.Linear(width, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


def cut_pair(module: nn.Module, mesh: Any) -> nn.Module:
    return parallelize_module(module, mesh["tensor_parallel"], {"up": ColwiseParallel(), "down": RowwiseParallel()})


def refusals() -> dict[str, str]:
    def on(size: int, **options: Any) -> Fabric:
        strategy = MegatronDDPStrategy(tensor_parallel_size=size, **options)
        fabric = Fabric(accelerator="cpu", devices=4, strategy=strategy)
        fabric.launch()
        return fabric

    found = {
        "none": message(ValueError, lambda: on(0)),
        "three": message(ValueError, lambda: on(3)),
        "nothing to cut": message(ValueError, lambda: on(1, parallelize_fn=cut_pair)),
        "returns nothing": message(TypeError, lambda: on(2, parallelize_fn=lambda module, mesh: None).setup(Pair())),
    }
    module = Pair()
    optimizer = adamw(module.parameters())
    found["early"] = message(ValueError, lambda: on(2, parallelize_fn=cut_pair).setup(module, optimizer))
    return found


REFUSED = {
    "none": "tensor_parallel_size=0: expected at least one rank",
    "three": "tensor_parallel_size=3 does not divide the 4 ranks",
    "nothing to cut": "tensor_parallel_size is 1: there is nothing to parallelise over",
    "returns nothing": "parallelize_fn returned NoneType",
    "early": "build the optimizer on model.parameters()",
}


def test_what_cannot_be_is_refused(mesh: Ranks) -> None:
    for found in mesh.run(refusals):
        assert found.keys() == REFUSED.keys()
        for what, text in REFUSED.items():
            assert text in found[what]


def load_what_does_not_fit(folder: str) -> dict[str, str]:
    strategy = MegatronDDPStrategy(tensor_parallel_size=2, parallelize_fn=cut_pair, state_dict_type="sharded")
    fabric = Fabric(accelerator="cpu", devices=4, strategy=strategy)
    fabric.launch()
    model, wide = fabric.setup(Pair()), fabric.setup(Pair(32))
    fabric.save(f"{folder}/pair", {"model": model})
    fabric.save(f"{folder}/half", {"model": model}, filter={"model": lambda name, value: name != "down.weight"})
    before = {name: whole(param) for name, param in model.named_parameters()}
    found = {
        "missing": message(RuntimeError, lambda: fabric.load(f"{folder}/half", {"model": model})),
        "mis-sized": message(RuntimeError, lambda: fabric.load(f"{folder}/pair", {"model": wide})),
        "extra": message(RuntimeError, lambda: fabric.load(f"{folder}/pair", {"model": fabric.setup(Pair().up)})),
    }
    for name, param in model.named_parameters():
        assert torch.equal(whole(param), before[name])
    return found


def test_a_directory_that_does_not_fit_is_refused_by_name(mesh: Ranks, tmp_path: Path) -> None:
    for found in mesh.run(load_what_does_not_fit, str(tmp_path)):
        shapes = (
            "a param with shape torch.Size([16, 8]) from checkpoint, the shape in current model is torch.Size([32, 8])"
        )
        assert 'Missing key(s) in state_dict: "down.weight"' in found["missing"]
        assert f"size mismatch for up.weight: copying {shapes}" in found["mis-sized"]
        assert 'Unexpected key(s) in state_dict: "up.weight", "up.bias", "down.weight"' in found["extra"]


def made_on_meta() -> dict[str, Any]:
    """A module that gets memory when it is cut, bf16 weights of it, and a copy of what ``setup`` returned."""
    strategy = MegatronDDPStrategy(tensor_parallel_size=2, parallelize_fn=cut_pair)
    fabric = Fabric(accelerator="cpu", devices=4, strategy=strategy, precision="bf16-true")
    fabric.launch()
    with fabric.init_module(empty_init=True):
        module = Pair()
    was_on_meta = module.up.weight.is_meta
    model = fabric.setup(module)
    optimizer = fabric.setup_optimizers(adamw(model.parameters()))
    fabric.backward(model(torch.ones(4, 8)).float().square().mean())
    grad = fabric.strategy.full_grad(module.up.weight)
    copied = copy.deepcopy(model)
    before = {name: whole(param) for name, param in module.named_parameters()}
    optimizer.step()
    return {
        "was_on_meta": was_on_meta,
        "part": tuple(module.up.weight._local_tensor.shape),
        "grad": whole(grad),
        "weights": before,
        "stepped": whole(module.up.weight),
        "copied": {name: whole(param) for name, param in copied.module.named_parameters()},
        "mesh": fabric.strategy.device_mesh.mesh_dim_names,
    }


def test_a_module_made_on_meta_gets_memory_when_it_is_cut(mesh: Ranks) -> None:
    outcomes = mesh.run(made_on_meta)
    for own in outcomes:
        assert own["was_on_meta"]
        assert own["part"] == (8, 8)
        assert own["mesh"] == ("data_parallel", "tensor_parallel")
        assert own["weights"]["up.weight"].dtype == torch.bfloat16
        assert own["weights"]["up.weight"].float().std() > 0.1, "reset_parameters chose them"
        assert own["grad"].shape == (16, 8)
        assert own["grad"].abs().sum() > 0
        for name, weight in own["weights"].items():
            assert torch.equal(weight, outcomes[0]["weights"][name]), "one model on all ranks"
            assert torch.equal(weight, own["copied"][name])
        assert not torch.equal(own["stepped"], own["weights"]["up.weight"])
