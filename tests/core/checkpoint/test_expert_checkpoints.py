"""Checkpoints of divided experts between any numbers of ranks and any division, and with FSDP2."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from megastrategy._checkpoints.directory_writer import save_directory
from megastrategy.core import OpenDirectory, host_collectives
from tests.support.experts import Case, Experts, Trainee, batch_of, make_module, train_alone
from tests.support.processes import run_processes
from tests.support.tensor_parallel import whole

INSTANCES = (("num_distributed_optimizer_instances", 2),)
ALL_REDUCE = (("use_distributed_optimizer", False),)
WORLDS: dict[str, tuple[int, int, Any]] = {
    "1 of 1": (1, 1, ()),
    "4 of 4": (4, 4, ()),
    "2 of 4 with instances": (4, 2, INSTANCES),
    "2 of 4 without shards": (4, 2, ALL_REDUCE),
    "1 of 2": (2, 1, ()),
    "2 of 2": (2, 2, ()),
    "1 of 4": (4, 1, ()),
    "2 of 4": (4, 2, ()),
    "4 of 8": (8, 4, ()),
}
"""The numbers of ranks and of expert ranks, and options."""


def cases_of(num_experts: int, worlds: Sequence[str]) -> dict[str, Case]:
    """The cases on this number of ranks, by name. Those of four experts have bf16 weights, and fp32 main params."""
    dtype = torch.bfloat16 if num_experts == 4 else torch.float32
    return {
        name: Case(ep, num_experts=num_experts, optimizer="adamw", dtype=dtype, options=options)
        for name in worlds
        for size, ep, options in [WORLDS[name]]
        if size == dist.get_world_size()
    }


def write_file(trainee: Trainee, path: Path) -> None:
    weights = {name: whole(param) for name, param in trainee.module.named_parameters()}
    saved = {
        "weights": weights,
        "optimizer": trainee.optimizer.state_dict(),
        "main_params": trainee.optimizer.main_params(),
    }
    if dist.get_rank() == 0:
        torch.save(saved, path.with_suffix(".pt"))


def write_directory(trainee: Trainee, path: Path) -> None:
    parts = {"model": trainee.module.state_dict(), "optimizer": trainee.optimizer.sharded_state_dict()}
    save_directory(parts, {}, path, host_collectives())


def read(trainee: Trainee, path: Path, form: str) -> None:
    with torch.no_grad():
        for param in trainee.module.parameters():
            param.fill_(7.0)
    if form == "file":
        saved = torch.load(path.with_suffix(".pt"), weights_only=True)
        for name, param in trainee.module.named_parameters():
            value = saved["weights"][name]
            if hasattr(param, "placements"):
                value = distribute_tensor(value, param.device_mesh, [Shard(0)])
            param.detach().copy_(value)
        trainee.optimizer.load_state_dict(saved["optimizer"])
        trainee.optimizer.load_main_params(saved["main_params"])
    else:
        trainee.module.load_state_dict(OpenDirectory(path).read_weights("model", trainee.module))
        trainee.optimizer.load_sharded(path)


def write_each(folder: Path, num_experts: int, worlds: Sequence[str]) -> None:
    for name, case in cases_of(num_experts, worlds).items():
        trainee = Trainee.make(case)
        trainee.train(range(2))
        write_file(trainee, folder / name)
        write_directory(trainee, folder / name)
        trainee.model.close()


def read_each(folder: Path, num_experts: int, worlds: Sequence[str]) -> None:
    """Reads what every world wrote, and writes files of it again."""
    for name, case in cases_of(num_experts, worlds).items():
        trainee = Trainee.make(case)
        trainee.train(range(1))
        for writer, form in itertools.product(worlds, ("file", "directory")):
            read(trainee, folder / writer, form)
            write_file(trainee, folder / f"{writer}, by {form} in {name}")
        trainee.model.close()


@pytest.mark.parametrize(
    ("num_experts", "worlds"),
    [
        (5, ["1 of 1", "2 of 2", "2 of 4 with instances"]),
        pytest.param(5, [*WORLDS], marks=pytest.mark.nightly),
        pytest.param(4, [*WORLDS], marks=pytest.mark.nightly),
    ],
    ids=("some", "5", "4"),
)
def test_expert_checkpoints_load_on_other_ranks(tmp_path: Path, num_experts: int, worlds: list[str]) -> None:
    """Files and directories, read and written again: weights and state are the ones that were written first."""
    sizes = sorted({WORLDS[name][0] for name in worlds})
    for job in (write_each, read_each):
        for size in sizes:
            run_processes(size, job, tmp_path, num_experts, worlds)
    for writer in worlds:
        first = torch.load(tmp_path / f"{writer}.pt", weights_only=True)
        if num_experts == 5:
            case = Case(1, num_experts=num_experts, optimizer="adamw", steps=2)
            expected = train_alone(case, WORLDS[writer][0])
            torch.testing.assert_close(first["weights"], expected.weights, rtol=0.0, atol=1e-6)
        assert len({bytes(expert.float().numpy()) for expert in first["weights"]["layers.0.up"]}) == num_experts
        assert len(first["main_params"]) == (0 if num_experts == 5 else len(first["weights"]))
        again = [*tmp_path.glob(f"{writer}, by *.pt")]
        assert len(again) == 2 * len(worlds)
        for path in again:
            second = torch.load(path, weights_only=True)
            torch.testing.assert_close(second["weights"], first["weights"], rtol=0.0, atol=0.0)
            torch.testing.assert_close(second["optimizer"]["state"], first["optimizer"]["state"], rtol=0.0, atol=0.0)
            torch.testing.assert_close(second["main_params"], first["main_params"], rtol=0.0, atol=0.0)


# --- FSDP2 -----------------------------------------------------------------------------------------------------------


def make_theirs(case: Case) -> Any:
    """FSDP2 over ep x edp: experts are divided over ``ep`` first, and the part of each rank over ``edp``."""
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size // case.ep, case.ep), mesh_dim_names=("edp", "ep"))
    every = init_device_mesh("cpu", (size,), mesh_dim_names=("dp",))
    module = make_module(case)
    for layer in module.layers:
        assert isinstance(layer, Experts)
        layer.divide(mesh["ep"])
        fully_shard(layer.router, mesh=every)
        # The mean over all ranks: FSDP2 by itself divides by the number of ranks of its mesh.
        fully_shard(layer, mesh=mesh["edp"])
        layer.set_gradient_divide_factor(size)  # type: ignore[operator] # FSDPModule
        layer.set_force_sum_reduction_for_comms(True)  # type: ignore[operator] # gloo scales no gradients
    return fully_shard(module, mesh=every)


def train_theirs(module: Any, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        module.loss(*batch_of(dist.get_rank(), step, 0), module).backward()
        optimizer.step()


def full(module: Any) -> dict[str, Tensor]:
    return {name: param.full_tensor() for name, param in module.named_parameters()}


def exchange(folder: Path) -> None:
    """Two steps under one, saved as it saves, and two more under the other; both ways."""
    case = Case(2, optimizer="adamw", clip_norm=None)
    theirs = make_theirs(case)
    optimizer = case.make_optimizer(theirs.parameters())
    train_theirs(theirs, optimizer, range(2))
    weights, state = get_state_dict(theirs, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder / "theirs")
    written = full(theirs)
    ours = Trainee.make(case)
    read(ours, folder / "theirs", "directory")
    for name, param in ours.module.named_parameters():
        assert torch.equal(whole(param), written[name]), name
    ours.train(range(2, 4))
    write_directory(ours, folder / "ours")
    moments = ours.optimizer.state_dict()["state"]
    expected = {name: whole(param) for name, param in ours.module.named_parameters()}
    ours.model.close()

    theirs = make_theirs(case)
    optimizer = case.make_optimizer(theirs.parameters())
    weights, state = get_state_dict(theirs, optimizer)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=folder / "ours")
    set_state_dict(theirs, optimizer, model_state_dict=weights, optim_state_dict=state)
    for number, (name, param) in enumerate(theirs.named_parameters()):
        assert torch.equal(param.full_tensor(), expected[name]), name
        moment = optimizer.state[param]["exp_avg"].full_tensor()
        if dist.get_rank() == 0:
            assert torch.equal(moment, moments[number]["exp_avg"]), name
    train_theirs(theirs, optimizer, range(4, 6))
    alone = train_alone(Case(2, optimizer="adamw", clip_norm=None), dist.get_world_size())
    torch.testing.assert_close(full(theirs), alone.weights, rtol=0.0, atol=1e-6)


@pytest.mark.nightly
def test_fsdp2_with_experts_exchanges_directories(tmp_path: Path) -> None:
    run_processes(4, exchange, tmp_path)
    metadata = dcp.FileSystemReader(tmp_path / "ours").read_metadata()
    sizes = {
        name: sum(math.prod(chunk.sizes) for chunk in entry.chunks)
        for name, entry in metadata.state_dict_metadata.items()
        if hasattr(entry, "chunks")
    }
    assert sizes["model.layers.1.up"] == 4 * 8 * 12, "each element once"
