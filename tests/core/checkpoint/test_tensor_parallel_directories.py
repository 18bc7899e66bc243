"""Directories of tensor-parallel models: whole parameters for readers on any mesh, under FSDP2 or in one process."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.nn import functional

from megastrategy import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from megastrategy._checkpoints.directory_writer import save_directory
from megastrategy.core import CheckpointError, OpenDirectory, host_collectives, to_host
from megastrategy.tools.checkpoint_parts import read_file
from megastrategy.tools.contents import inspect_checkpoint
from megastrategy.tools.conversion import consolidate, convert, names_from
from tests.support.engines import ENGINES
from tests.support.processes import run_processes
from tests.support.sharded_training import assert_same
from tests.support.tensor_parallel import Mode, meshes, whole

from .test_checkpoint_memory import AllocationWatch

ROWS, WIDTH, INNER, FIXED = 10, 12, 43, 5
"""Over four ranks 3, 3, 3 and 1 of 10, 11, 11, 11 and 10 of 43, 2, 2, 1 and 0 of 5. torch looks nothing up in a table
of no rows. Parts of ``up`` take more room on some tensor ranks, so that what comes after them lies elsewhere there."""
NUM_BATCHES = 2
"""In a step, however many data-parallel ranks share them."""


class Uneven(nn.Module):
    """Tied, frozen, replicated and plain parameters, matrices that are cut by rows and by columns, a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(ROWS, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.mix = nn.Linear(WIDTH, 40, bias=False)
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)
        self.fixed = nn.Linear(WIDTH, FIXED)
        self.back = nn.Linear(FIXED, WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, ROWS, bias=False)
        self.head.weight = self.embed.weight
        self.temperature = nn.Parameter(torch.tensor(0.5))

    def forward(self, tokens: Tensor) -> Tensor:
        mixed = self.mix(self.norm(self.embed(tokens)))
        x = mixed[..., :WIDTH] + mixed[..., -WIDTH:]
        x = x + self.down(functional.gelu(self.up(x)))
        x = x + self.back(functional.gelu(self.fixed(x)))
        logits: Tensor = self.head(x).float() * self.temperature.float()
        return functional.cross_entropy(logits.flatten(0, 1), tokens.roll(-1, 1).flatten())


def plan() -> dict[str, ParallelStyle]:
    """Every part stays a DTensor between two layers, or torch would take uneven ones for even ones."""
    columns = {"output_layouts": Shard(-1), "use_local_output": False}
    return {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate()),
        "up": ColwiseParallel(**columns),
        "down": RowwiseParallel(),
        "fixed": ColwiseParallel(**columns),
        "back": RowwiseParallel(),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }


def cut(module: Uneven, mesh: DeviceMesh) -> Uneven:
    """Parallelised over the mesh's tensor ranks, and tied again."""
    parallelize_module(module, mesh["tp"], plan())
    module.head.weight = module.embed.weight
    return module


def make_module(seed: int = 7, dtype: torch.dtype = torch.float32) -> Uneven:
    torch.manual_seed(seed)
    return Uneven().to(dtype)


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    """Two groups and an empty one; parameters not in order, those that will be frozen among them."""
    params = list(module.parameters())
    groups = [{"params": params[::-2], "lr": 2e-3}, {"params": []}, {"params": params[-2::-2]}]
    return torch.optim.AdamW(groups, lr=5e-3, eps=1e-5, amsgrad=True)


def adagrad(module: nn.Module) -> torch.optim.Optimizer:
    """Has state before the first step, and of parameters that are never stepped."""
    return torch.optim.Adagrad(module.parameters(), lr=5e-3, initial_accumulator_value=0.1, eps=1e-5)


@dataclasses.dataclass(frozen=True)
class Kind:
    """How it is trained."""

    mode: Mode = "reduce-scatter"
    dtype: torch.dtype = torch.float32
    optimizer: Any = adamw

    def __str__(self) -> str:
        return f"{self.mode} {str(self.dtype).removeprefix('torch.')} {self.optimizer.__name__}"


@dataclasses.dataclass(frozen=True)
class World:
    """Data-parallel times tensor ranks, of a module that is cut or not."""

    dp: int
    tp: int
    is_cut: bool = True

    def __str__(self) -> str:
        return f"{self.dp}x{self.tp}" if self.is_cut else f"{self.dp} plain"

    @property
    def size(self) -> int:
        return self.dp * self.tp


class Run:
    """A model and its optimizer in a world of processes."""

    def __init__(self, world: World, kind: Kind, mesh: DeviceMesh, seed: int = 7, module: Uneven | None = None) -> None:
        self.mesh = mesh
        self.module = make_module(seed, kind.dtype) if module is None else module
        if world.is_cut:
            cut(self.module, mesh)
        self.module.fixed.weight.requires_grad_(False)  # from the start
        config = DistributedDataParallelConfig(bucket_size=400, **ENGINES[kind.mode])
        self.model = DistributedDataParallel(self.module, config, process_group=mesh.get_group("dp"))
        self.optimizer = DistributedOptimizer(kind.optimizer(self.module), self.model)

    def train(self, steps: range) -> None:
        each = NUM_BATCHES // self.mesh.size(0)
        first = each * self.mesh.get_local_rank("dp")
        for step in steps:
            self.module.up.bias.requires_grad_(step == 0)  # from then on it keeps its state
            self.optimizer.zero_grad()
            for batch in range(first, first + each):
                generator = torch.Generator().manual_seed(100 * step + batch)
                tokens = torch.randint(ROWS, (2, 5), generator=generator)
                self.model.require_backward_grad_sync = batch == first + each - 1
                (self.model(tokens) / each).backward()
            self.optimizer.step()
        self.model.finish_param_gather()

    def state(self) -> dict[str, Any]:
        return {"model": self.module.state_dict(), "optimizer": self.optimizer.sharded_state_dict()}

    def load(self, path: Path) -> None:
        self.module.load_state_dict(OpenDirectory(path).read_weights("model", self.module))
        self.optimizer.load_sharded(path)

    def weights(self) -> dict[str, Tensor]:
        """Whole ones, on every rank. Collective."""
        return {name: whole(param) for name, param in self.module.named_parameters(remove_duplicate=False)}

    def whole(self) -> dict[str, Any]:
        """Everything there is, on rank 0. Collective."""
        state = {"optimizer": self.optimizer.state_dict(), "main_params": self.optimizer.main_params()}
        return to_host({"weights": self.weights(), **state})

    def close(self) -> None:
        self.model.close()


BEFORE, AFTER = range(3), range(3, 5)

KINDS = [
    Kind(),
    Kind("all-reduce"),
    Kind("pooled", torch.bfloat16),
    Kind("all-reduce", torch.bfloat16),
    Kind("forward"),
    Kind(optimizer=adagrad),
]
FEW_KINDS = [KINDS[0], KINDS[2]]
WORLDS = [World(dp, tp) for dp, tp in itertools.product((1, 2), (1, 2, 4))]
WORLDS += [World(1, 1, is_cut=False), World(2, 1, is_cut=False)]


# --- every mesh writes, every mesh reads -----------------------------------------------------------------------------


def write(world: World, folder: Path, kinds: list[Kind]) -> None:
    """Trains, and writes the directory, all that is in it as rank 0 gets it, and what training on would give."""
    mesh = meshes(world.tp)
    for kind in kinds:
        run, path = Run(world, kind, mesh), folder / str(world) / str(kind)
        run.train(BEFORE)
        if kind.dtype != torch.float32:  # of a frozen parameter, for when it is trained
            fixed = whole(run.module.fixed.weight).float() * (1 + 2.0**-12)
            run.optimizer.load_main_params({"fixed.weight": fixed})
        save_directory(run.state(), {}, path / "directory", host_collectives())
        saved = run.whole()
        if dist.get_rank() == 0:
            torch.save(saved, path / "whole.pt")
        run.train(AFTER)
        trained = run.weights()
        if dist.get_rank() == 0:
            torch.save(trained, path / "trained.pt")
        run.close()


def read_all(world: World, folder: Path, writers: list[World], kinds: list[Kind]) -> None:
    """Loads what each has written into another model, to the bit, and trains on."""
    mesh = meshes(world.tp)
    for writer, kind in itertools.product(writers, kinds):
        path, where = folder / str(writer) / str(kind), f"{kind}: {writer} -> {world}"
        run = Run(world, kind, mesh, seed=8)
        run.load(path / "directory")
        saved, trained = (torch.load(path / f"{name}.pt", weights_only=True) for name in ("whole", "trained"))
        loaded = run.whole()
        assert_same(loaded["weights"], saved["weights"], where)
        if dist.get_rank() == 0:
            assert_same(loaded["main_params"], saved["main_params"], where)
            assert_same(loaded["optimizer"], saved["optimizer"], where)
        run.train(AFTER)
        # a step of bf16 beside 1, where forwards round otherwise
        tolerance = 1e-6 if kind.dtype == torch.float32 else 2.0**-7
        for name, value in run.weights().items():
            torch.testing.assert_close(value, trained[name], rtol=0.0, atol=tolerance, msg=f"{where}: {name}")
        run.close()


def check_contents(path: Path, kind: Kind) -> None:
    """The directory against what rank 0 gathered, which other tests hold against one process."""
    saved = torch.load(path / "whole.pt", weights_only=True)
    assert_same(OpenDirectory(path / "directory").read("model"), saved["weights"])
    optimizer = OpenDirectory(path / "directory").read("optimizer")
    assert_same(optimizer.get("main_params", {}), saved["main_params"], strides=False)
    names = {
        number: name
        for group, by_name in zip(saved["optimizer"]["param_groups"], optimizer["param_groups"], strict=True)
        for number, name in zip(group["params"], by_name["params"], strict=True)
    }
    state = {names[number]: values for number, values in saved["optimizer"]["state"].items()}
    assert_same(optimizer["state"], state, strides=False)
    assert "up.bias" in state, "frozen after a step"
    assert ("fixed.weight" in state) == (kind.optimizer is adagrad), "frozen from the start"
    assert len(saved["main_params"]) == (0 if kind.dtype == torch.float32 else len(saved["weights"]) - 1), "tied once"


@functools.cache
def written(folder: Path, world: World, kinds: tuple[Kind, ...]) -> Path:
    run_processes(world.size, write, world, folder, list(kinds), timeout_s=300.0)
    for kind in kinds:
        check_contents(folder / str(world) / str(kind), kind)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("written")


@pytest.mark.parametrize("reader", [World(1, 2), World(2, 1, is_cut=False)], ids=str)
def test_tensor_parallel_directory_loads_elsewhere(folder: Path, reader: World) -> None:
    writer = World(2, 2)
    path = written(folder, writer, tuple(FEW_KINDS))
    run_processes(reader.size, read_all, reader, path, [writer], FEW_KINDS)


# --- what is in it ---------------------------------------------------------------------------------------------------


def test_the_directory_holds_each_element_once(folder: Path) -> None:
    """Also of parameters that all tensor ranks have whole, though each rank has shards of them."""
    path = written(folder, World(2, 2), tuple(FEW_KINDS)) / "2x2" / str(FEW_KINDS[0]) / "directory"
    metadata = dcp.FileSystemReader(path).read_metadata()
    nbytes = sum(info.length for info in metadata.storage_data.values())
    assert nbytes == sum(file.stat().st_size for file in path.glob("*.distcp")), "and nothing that is not listed"
    tensors = {name: entry for name, entry in metadata.state_dict_metadata.items() if hasattr(entry, "chunks")}
    assert len(tensors) == 13 + 11 * 4, "weights, and a count and three numbers of each that is stepped"
    for name, entry in tensors.items():
        assert sum(math.prod(chunk.sizes) for chunk in entry.chunks) == math.prod(entry.size), name
    by_file: dict[str, int] = {}
    for info in metadata.storage_data.values():
        by_file[info.relative_path] = by_file.get(info.relative_path, 0) + info.length
    assert len(by_file) == 4
    assert max(by_file.values()) < nbytes / 2, "every rank writes its part"


@pytest.mark.parametrize("kind", [*FEW_KINDS, pytest.param(KINDS[5], marks=pytest.mark.nightly)], ids=str)
def test_tool_consolidates_and_converts_back(folder: Path, tmp_path: Path, kind: Kind) -> None:
    path = written(folder, World(2, 2), tuple(FEW_KINDS) if kind in FEW_KINDS else (kind,)) / "2x2" / str(kind)
    saved = torch.load(path / "whole.pt", weights_only=True)
    [weights] = inspect_checkpoint(path / "directory").models.values()
    assert {entry.owner: entry.shape for entry in weights} == {n: tuple(v.shape) for n, v in saved["weights"].items()}
    consolidate(path / "directory", tmp_path / "file")
    file = torch.load(tmp_path / "file", weights_only=True)
    assert_same(dict(file["model"]), saved["weights"])
    assert_same(file["optimizer"], saved["optimizer"])
    assert_same(file.get("megatron_ddp_main_params", {}).get("optimizer", {}), saved["main_params"])
    convert(read_file(tmp_path / "file"), names_from(path / "directory"), tmp_path / "again")
    for key in ("model", "optimizer"):
        assert_same(OpenDirectory(tmp_path / "again").read(key), OpenDirectory(path / "directory").read(key))


# --- by torch's own calls --------------------------------------------------------------------------------------------


# --- FSDP2 with torch's tensor parallelism ---------------------------------------------------------------------------


def without_foreach(module: nn.Module) -> torch.optim.Optimizer:
    """torch's cannot step DTensors of two meshes in one call, and loads no empty groups by name."""
    params = list(module.parameters())
    groups = [{"params": params[::-2], "lr": 2e-3}, {"params": params[-2::-2]}]
    return torch.optim.AdamW(groups, lr=5e-3, eps=1e-5, foreach=False)


def shardable() -> Uneven:
    """``fully_shard`` refuses scalars."""
    module = make_module(9)
    module.temperature = nn.Parameter(torch.tensor([0.4]))
    module.fixed.weight.requires_grad_(False)
    return module


def train_fully_sharded(module: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        tokens = torch.randint(10, (2, 5), generator=torch.Generator().manual_seed(100 * step + rank))
        module(tokens).backward()
        optimizer.step()


def exchange(folder: Path) -> None:
    """Three steps under one, saved as it saves, read by the other: the same weights and state, and so on from there."""
    mesh, world = meshes(2), World(2, 2)
    ours = Run(world, Kind(optimizer=without_foreach), mesh, module=shardable())
    ours.train(BEFORE)
    save_directory(ours.state(), {}, folder / "ours", host_collectives())
    before, weights = ours.whole(), ours.weights()
    ours.train(AFTER)
    after = ours.weights()

    theirs = fully_shard(cut(shardable(), mesh), mesh=mesh["dp"])
    assert "_StridedShard" in repr(theirs.up.weight.placements)
    other = without_foreach(theirs)
    model_state, optimizer_state = get_state_dict(theirs, other)
    dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder / "ours")
    set_state_dict(theirs, other, model_state_dict=model_state, optim_state_dict=optimizer_state)
    saved = OpenDirectory(folder / "ours").read("optimizer")["state"]
    for name, param in theirs.named_parameters():
        assert torch.equal(whole(param), weights[name]), name
        for what, value in saved.get(name, {}).items():
            assert torch.equal(whole(other.state[param][what]), value), (name, what)
    assert [group["lr"] for group in other.param_groups] == [2e-3, 5e-3]

    model_state, optimizer_state = get_state_dict(theirs, other)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder / "theirs")
    ours.load(folder / "theirs")
    assert_same(ours.whole(), before)
    ours.train(AFTER)
    theirs.up.bias.requires_grad_(False)
    train_fully_sharded(theirs, other, mesh.get_local_rank("dp"), AFTER)
    for name, param in theirs.named_parameters():
        own = ours.weights()[name]
        assert torch.equal(own, after[name]), name
        torch.testing.assert_close(whole(param), own, rtol=0.0, atol=1e-6, msg=name)


@pytest.mark.nightly
def test_fsdp2_with_tensor_ranks_exchanges_directories(tmp_path: Path) -> None:
    run_processes(4, exchange, tmp_path)


# --- memory ----------------------------------------------------------------------------------------------------------

LAYERS, ROW = 8, 256


def load_watched(path: Path) -> dict[str, int]:
    """The most bytes that reading weights and optimizer made at once, and what stays of each."""
    mesh = meshes(2)
    module = nn.Sequential(*[nn.Linear(ROW, ROW, bias=False) for _ in range(LAYERS)])
    styles = {str(number): [ColwiseParallel(), RowwiseParallel()][number % 2] for number in range(LAYERS)}
    parallelize_module(module, mesh["tp"], styles)
    model = DistributedDataParallel(module, process_group=mesh.get_group("dp"))
    optimizer = DistributedOptimizer(torch.optim.AdamW(model.parameters()), model)
    model(torch.ones(2, ROW)).sum().backward()
    optimizer.step()
    state = {"model": module.state_dict(), "optimizer": optimizer.sharded_state_dict()}
    found = {}
    with AllocationWatch() as watch:
        save_directory(state, {}, path, host_collectives())
        found["saving"] = watch.peak
    with AllocationWatch() as watch:
        weights = OpenDirectory(path).read_weights("model", module)
        found["weights"] = watch.peak
    del weights
    with AllocationWatch() as watch:
        optimizer.load_sharded(path)
        found["optimizer"], found["kept"] = watch.peak, watch.alive
    return found


def test_a_rank_reads_its_part_and_no_more(tmp_path: Path) -> None:
    """The bytes of every storage that comes into being meanwhile: half of the model on each of two tensor ranks."""
    part = 4 * ROW * ROW // 2
    slack = 0.25 * part  # for the plans of the reader and the writer
    for found in run_processes(2, load_watched, tmp_path / "directory"):
        assert found["saving"] <= slack, "parts are written from where they are"
        assert found["weights"] <= LAYERS * part + slack
        assert found["optimizer"] <= 2 * LAYERS * part + slack
        assert found["kept"] >= 2 * LAYERS * part


# --- what does not fit -----------------------------------------------------------------------------------------------


def load_strange(path: Path) -> None:
    run = Run(World(1, 2), Kind(), meshes(2))
    run.train(range(1))
    before = run.whole()
    rows = torch.ones(43, 3)
    good = run.optimizer.sharded_state_dict()
    groups = [dict(group) for group in good["param_groups"]]
    *groups[0]["params"], absent = groups[0]["params"]
    strange = {
        "other_model": {**good, "state": {"weight": {"exp_avg": rows}}},
        "other_shape": {**good, "state": {"up.weight": {"exp_avg": rows}}},
        "other_main_param": {**good, "state": {}, "main_params": {"up.weight": rows}},
        "other_groups": {"param_groups": groups},
        "one_rank": good,
    }
    messages = {
        "other_model": r"state 'exp_avg' of a parameter 'weight', which the model does not have",
        "other_shape": r"state 'exp_avg' of parameter 'up.weight' in shape \(43, 3\), the parameter has \(43, 12\)",
        "other_main_param": r"main param of parameter 'up.weight' in shape \(43, 3\), the parameter has \(43, 12\)",
        "other_groups": rf"parameter '{absent}' is in group 0 of the optimizer, but not of .*other_groups",
        "one_rank": r"has .* of the .* elements of optimizer.state.\S+.exp_avg, and another rank had the rest",
    }
    if dist.get_rank() == 0:
        for name, state in strange.items():
            dcp.save({"optimizer": state}, checkpoint_id=path / name, no_dist=True)
        other = {**run.module.state_dict(), "up.weight": rows}
        del other["norm.bias"]
        other = {name: whole_on_this_rank(value) for name, value in other.items()}
        dcp.save({"model": other}, checkpoint_id=path / "weights", no_dist=True)
    dist.barrier()
    for name, message in messages.items():
        with pytest.raises(CheckpointError, match=message):
            run.optimizer.load_sharded(path / name)
    with pytest.raises(CheckpointError, match=r"is not complete: it has .* and another rank had the rest"):
        inspect_checkpoint(path / "one_rank")
    weights = OpenDirectory(path / "weights").read_weights("model", run.module)
    assert weights["up.weight"].shape == (43, 3)
    with pytest.raises(RuntimeError, match=r"norm\.bias"):
        run.module.load_state_dict({name: value for name, value in weights.items() if name != "up.weight"})
    assert_same(run.whole()["optimizer"], before["optimizer"])


def whole_on_this_rank(value: Any) -> Any:
    """Tensors of the right shape, without communication."""
    return torch.zeros(value.shape)


def test_unfit_directory_is_refused(tmp_path: Path) -> None:
    run_processes(2, load_strange, tmp_path)
