"""Fabric with a divided model: ``MegatronDDPStrategy(tensor_parallel_size=2)``, ``expert_parallel_size``,
``context_parallel_size`` and ``pipeline_parallel_size``. A loop trains, saves and resumes as in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins.precision import MixedPrecision
from lightning.fabric.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, TensorDataset

from megastrategy import Pipeline
from megastrategy.core import OpenDirectory
from megastrategy.fabric import MegatronDDPStrategy
from tests.support import experts, sequences
from tests.support.comparison import message
from tests.support.pipelines import SAMPLES, SEQUENCE, VOCAB, Case, loss_of, make_layers
from tests.support.tensor_parallel import LanguageModel, adamw, plan, whole

from ..model_parallel_fits import (
    RANKS,
    assert_close,
    expert_loader,
    num_chunks,
    part_of_loss,
    read,
    sequence_data,
    sgd,
    token_loader,
    train_on_whole_sequences,
)
from ..rank_processes import Ranks


def make_fabric(strategy: Any, **options: Any) -> Fabric:
    """On four ranks under a strategy of ours, on one under "ddp"."""
    fabric = Fabric(accelerator="cpu", devices=1 if strategy == "ddp" else RANKS, strategy=strategy, **options)
    fabric.launch()
    return fabric


def make_strategy(**options: Any) -> MegatronDDPStrategy:
    return MegatronDDPStrategy(bucket_size=200, **options)


# --- experts ----------------------------------------------------------------------------------------------------------


EP2, EP4 = {"expert_parallel_size": 2}, {"expert_parallel_size": 4}


def train_experts(options: dict[str, Any] | None, path: Path, resume: Path | None = None) -> list[float]:
    """One epoch with accumulation and clipping, under "ddp" without options. Returns the norms."""
    fabric = make_fabric("ddp" if options is None else make_strategy(**options))
    torch.manual_seed(5)
    module = experts.Model(5)
    if (mesh := getattr(fabric.strategy, "expert_mesh", None)) is not None:
        module.divide(mesh["expert_parallel"])
    model, optimizer = fabric.setup(module, sgd(module))
    state = {"model": model, "optimizer": optimizer, "epochs": 1}
    if resume is not None:
        fabric.load(resume, state)
    norms, window = [], RANKS // fabric.world_size
    for number, batch in enumerate(list(expert_loader())[fabric.global_rank :: fabric.world_size]):
        is_last = number % window == window - 1
        with fabric.no_backward_sync(model, enabled=not is_last):
            fabric.backward(module.loss(*batch, model) / window)
        if is_last:
            norms.append(float(fabric.clip_gradients(model, optimizer, max_norm=0.5)))
            optimizer.step()
            optimizer.zero_grad()
    fabric.save(path, state)
    fabric.barrier()
    return norms


def test_experts_train_save_and_resume(one_rank: Ranks, mesh: Ranks, tmp_path: Path) -> None:
    """As one process with all experts does; each goes on from what another division has saved."""
    [norms] = one_rank.run(train_experts, None, tmp_path / "alone")
    one_rank.run(train_experts, None, tmp_path / "alone 2", tmp_path / "alone")
    expected, later = read(tmp_path / "alone"), read(tmp_path / "alone 2")
    for own in mesh.run(train_experts, EP2, tmp_path / "ep2"):
        assert own == pytest.approx(norms, rel=1e-5)
    mesh.run(train_experts, EP4 | {"state_dict_type": "sharded"}, tmp_path / "ep4+")
    assert_close(read(tmp_path / "ep2"), expected)
    assert num_chunks(tmp_path / "ep4+", "model.layers.0.up") == 4, "each rank writes its part"
    assert_close(OpenDirectory(tmp_path / "ep4+").read("model"), dict(expected["model"]))
    for options, saved in [(EP4, "ep2"), ({}, "ep4+"), (EP2, "alone")]:
        mesh.run(train_experts, options, tmp_path / "resumed", tmp_path / saved)
        assert_close(read(tmp_path / "resumed"), later)
    one_rank.run(train_experts, None, tmp_path / "resumed", tmp_path / "ep2")
    assert_close(read(tmp_path / "resumed"), later)


# --- parts of sequences -----------------------------------------------------------------------------------------------


def train_on_parts(cp: int) -> dict[str, Tensor]:
    fabric = make_fabric(make_strategy(context_parallel_size=cp))
    mesh = fabric.strategy.device_mesh["context_parallel"]  # type: ignore[attr-defined] # ours
    module = sequences.Attention()
    model, optimizer = fabric.setup(module, sgd(module))
    for batch in fabric.setup_dataloaders(DataLoader(sequence_data())):
        loss, num_tokens = part_of_loss(model, batch, mesh)
        fabric.strategy.count_tokens(num_tokens)  # type: ignore[attr-defined] # of its part
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=0.1)
        optimizer.step()
        optimizer.zero_grad()
    return {name: whole(param) for name, param in module.named_parameters()}


@pytest.mark.parametrize("cp", [2, 4])
def test_parts_of_sequences_train(mesh: Ranks, cp: int) -> None:
    expected = train_on_whole_sequences(RANKS // cp)
    for weights in mesh.run(train_on_parts, cp):
        assert_close(weights, expected)


# --- stages -----------------------------------------------------------------------------------------------------------


CASE = Case((2, 4), frozen="middle", tied=True)


def make_pipeline(fabric: Fabric) -> Pipeline:
    mesh = fabric.strategy.device_mesh["pipeline_parallel"] if fabric.world_size > 1 else None  # type: ignore[index]
    return Pipeline(make_layers(CASE), CASE.split, loss=loss_of, microbatches=2, mesh=mesh)


def train_stages(is_alone: bool, path: str, resume: str | None = None) -> dict[str, Any]:
    """One epoch with clipping."""
    fabric = make_fabric("ddp" if is_alone else make_strategy(pipeline_parallel_size=2))
    net = make_pipeline(fabric)
    model, optimizer = fabric.setup(net, adamw(net.parameters()))
    state = {"model": model, "optimizer": optimizer}
    if resume is not None:
        fabric.load(resume, state)
    tokens = torch.randint(VOCAB, (16, SEQUENCE), generator=torch.Generator().manual_seed(5))
    data = DataLoader(TensorDataset(tokens, tokens.roll(-1, 1)), batch_size=SAMPLES if is_alone else SAMPLES // 2)
    losses, norms = [], []
    for inputs, targets in fabric.setup_dataloaders(data):
        loss = model(inputs, target=targets)
        optimizer.zero_grad()
        fabric.backward(loss)
        losses.append(loss.item())
        norms.append(float(fabric.clip_gradients(model, optimizer, max_norm=0.1)))
        optimizer.step()
    fabric.save(path, state)
    fabric.barrier()
    return {"losses": losses, "norms": norms}


def test_stages_train_save_and_resume(one_rank: Ranks, mesh: Ranks, tmp_path: Path) -> None:
    alone_file, file = str(tmp_path / "alone"), str(tmp_path / "stages")
    [alone] = one_rank.run(train_stages, True, alone_file)
    together = mesh.run(train_stages, False, file)
    for rank, own in enumerate(together):
        assert own["losses"] == together[rank % 2]["losses"]
        assert own["norms"] == together[0]["norms"], "the same bits on every rank"
    means = [sum(pair) / 2 for pair in zip(together[0]["losses"], together[1]["losses"], strict=True)]
    assert means == pytest.approx(alone["losses"], rel=1e-5)
    assert together[0]["norms"] == pytest.approx(alone["norms"], rel=1e-5)
    assert_close(read(file), read(alone_file))
    # each goes on from the other's
    one_rank.run(train_stages, True, f"{alone_file} 2", file)
    mesh.run(train_stages, False, f"{file} 2", alone_file)
    assert_close(read(f"{file} 2")["model"], read(f"{alone_file} 2")["model"], "resumed")


# --- tensor ranks -----------------------------------------------------------------------------------------------------


def parallelize(module: nn.Module, mesh: Any) -> nn.Module:
    """As a user writes it for Lightning's strategy, ``fully_shard`` left out."""
    parallelize_module(module, mesh["tensor_parallel"], plan(sequence_parallel=True))
    return module


def make_module() -> LanguageModel:
    torch.manual_seed(3)
    return LanguageModel(64, tied=False, width=16)


def train_layers(is_alone: bool, path: str, resume: str | None = None) -> dict[str, Any]:
    """One epoch with accumulation and clipping."""
    fabric = make_fabric("ddp" if is_alone else make_strategy(tensor_parallel_size=2, parallelize_fn=parallelize))
    module = make_module()
    model = fabric.setup(module)
    optimizer = fabric.setup_optimizers(adamw(model.parameters()))
    state = {"model": model, "optimizer": optimizer, "epochs": 1}
    if resume is not None:
        fabric.load(resume, state)
    losses, norms = [], []
    for number, [tokens] in enumerate(fabric.setup_dataloaders(token_loader(4 if is_alone else 2))):
        is_last = number % 2 == 1
        with fabric.no_backward_sync(model, enabled=not is_last):
            loss = module.loss(model(tokens), tokens)
            fabric.backward(loss / 2)
        losses.append(loss.item())
        if is_last:
            norms.append(float(whole(fabric.clip_gradients(model, optimizer, max_norm=0.1))))
            optimizer.step()
            optimizer.zero_grad()
    fabric.save(path, state)
    fabric.barrier()
    return {"losses": losses, "norms": norms}


def test_layers_train_save_and_resume(one_rank: Ranks, mesh: Ranks, tmp_path: Path) -> None:
    alone_file, file = str(tmp_path / "alone"), str(tmp_path / "mesh")
    [alone] = one_rank.run(train_layers, True, alone_file)
    together = mesh.run(train_layers, False, file)
    for rank, own in enumerate(together):
        assert own["losses"] == together[rank - rank % 2]["losses"], "one batch for a tensor group"
        assert own["norms"] == together[0]["norms"], "the same bits everywhere"
    assert together[0]["norms"] == pytest.approx(alone["norms"], rel=1e-5)
    means = [sum(pair) / 2 for pair in zip(together[0]["losses"], together[2]["losses"], strict=True)]
    assert together[0]["losses"] != together[2]["losses"], "another batch for each data-parallel rank"
    assert means == pytest.approx(alone["losses"], rel=1e-5)
    assert_close(read(file), read(alone_file))
    # each goes on from the other's
    one_rank.run(train_layers, True, f"{alone_file} 2", file)
    mesh.run(train_layers, False, f"{file} 2", alone_file)
    assert_close(read(f"{file} 2")["model"], read(f"{alone_file} 2")["model"], "resumed")
    assert not torch.equal(read(f"{file} 2")["model"]["norm.weight"], read(file)["model"]["norm.weight"])


def fully_sharded(module: nn.Module, mesh: Any) -> nn.Module:
    """As a user has it for Lightning's strategy."""
    return fully_shard(parallelize(module, mesh), mesh=mesh["data_parallel"])


def go_on(is_ours: bool, source: str | None, target: str) -> dict[str, torch.Tensor]:
    """Trains two steps, or loads; saves, and returns the weights after two more."""
    sizes = {"tensor_parallel_size": 2}
    strategy: Any = MegatronDDPStrategy(parallelize_fn=parallelize, state_dict_type="sharded", **sizes)
    if not is_ours:
        strategy = ModelParallelStrategy(parallelize_fn=fully_sharded, data_parallel_size=2, **sizes)
    fabric = make_fabric(strategy)
    module = make_module()
    module.temperature = nn.Parameter(torch.tensor([0.5]))  # fully_shard refuses scalars
    model = fabric.setup(module)
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=3e-3, eps=1e-5, foreach=False))
    data = list(fabric.setup_dataloaders(token_loader(2)))

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


@pytest.mark.nightly
def test_directory_moves_to_model_parallel_and_back(mesh: Ranks, tmp_path: Path) -> None:
    first, ours, again = (str(tmp_path / name) for name in ("first", "ours", "again"))
    expected = mesh.run(go_on, False, None, first)[0]
    assert_close(mesh.run(go_on, True, first, ours)[0], expected, "theirs, by ours")
    assert_close(mesh.run(go_on, False, ours, again)[0], expected, "ours, by theirs")


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


def cut_pair(module: nn.Module, mesh: Any) -> nn.Module:
    return parallelize_module(module, mesh["tensor_parallel"], {"up": ColwiseParallel(), "down": RowwiseParallel()})


def refusals() -> dict[str, str]:
    def on(**options: Any) -> Fabric:
        return make_fabric(make_strategy(**options))

    def pipeline_in_fp16() -> None:
        # Fabric makes precision="16-mixed" another on the CPU.
        fabric = make_fabric(make_strategy(pipeline_parallel_size=2), plugins=[MixedPrecision("16-mixed", "cpu")])
        net = make_pipeline(fabric)
        fabric.setup(net, adamw(net.parameters()))

    module, cut = Pair(), {"tensor_parallel_size": 2, "parallelize_fn": cut_pair}
    returns_nothing = {**cut, "parallelize_fn": lambda module, mesh: None}
    return {
        "three tensor ranks": message(ValueError, lambda: on(tensor_parallel_size=3)),
        "nothing to cut": message(ValueError, lambda: on(parallelize_fn=cut_pair)),
        "returns nothing": message(TypeError, lambda: on(**returns_nothing).setup(Pair())),
        "early optimizer": message(ValueError, lambda: on(**cut).setup(module, adamw(module.parameters()))),
        "whole experts": message(ValueError, lambda: on(**EP2).setup(experts.Model(5))),
        "stages in fp16": message(ValueError, pipeline_in_fp16),
    }


REFUSED = {
    "three tensor ranks": "tensor_parallel_size=3 does not divide the 4 ranks",
    "nothing to cut": "tensor_parallel_size is 1: there is nothing to parallelise over",
    "returns nothing": "parallelize_fn returned NoneType",
    "early optimizer": "build the optimizer on model.parameters()",
    "whole experts": 'strategy.expert_mesh["expert_parallel"], [Shard(0)]',
    "stages in fp16": "Choose 'bf16-mixed'",
}


def test_contradictions_are_refused_by_name(mesh: Ranks) -> None:
    for found in mesh.run(refusals):
        assert found.keys() == REFUSED.keys()
        for what, text in REFUSED.items():
            assert text in found[what]


def made_on_meta() -> tuple[bool, tuple[int, ...], Tensor]:
    """Whether a module was on meta, the shape of this rank's part when it is set up, and the whole weight."""
    fabric = make_fabric(make_strategy(tensor_parallel_size=2, parallelize_fn=cut_pair))
    with fabric.init_module(empty_init=True):
        module = Pair()
    was_on_meta = module.up.weight.is_meta
    fabric.setup(module)
    return was_on_meta, tuple(module.up.weight._local_tensor.shape), whole(module.up.weight)


def test_module_on_meta_gets_memory_when_cut(mesh: Ranks) -> None:
    outcomes = mesh.run(made_on_meta)
    for was_on_meta, shape, weight in outcomes:
        assert was_on_meta
        assert shape == (8, 8)
        assert torch.equal(weight, outcomes[0][2]), "one model on all ranks"
        assert weight.std() > 0.1, "reset_parameters chose the values"
