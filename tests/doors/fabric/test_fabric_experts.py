"""``Fabric(strategy=MegatronDDPStrategy(expert_parallel_size=2))``, and ``context_parallel_size``: a loop trains, saves
and resumes as in one process that has all experts, and the whole of each sequence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader

from megastrategy.core import OpenDirectory
from megastrategy.fabric import MegatronDDPStrategy
from tests.core.sync import test_loss_tokens_of_model_ranks as sequences
from tests.doors.lightning.test_lightning_context_parallel import IGNORED, SAMPLES, dataset, sgd
from tests.doors.lightning.test_lightning_experts import RANKS, assert_close, loader
from tests.doors.lightning.test_lightning_tensor_parallel import num_chunks, read
from tests.support.comparison import message
from tests.support.experts import Model
from tests.support.tensor_parallel import whole

from ..rank_processes import Ranks


def make_fabric(options: dict[str, Any] | None, devices: int) -> Fabric:
    """``options``: of our strategy; None for "ddp"."""
    strategy = "ddp" if options is None else MegatronDDPStrategy(bucket_size=200, **options)
    fabric = Fabric(accelerator="cpu", devices=devices, strategy=strategy)
    fabric.launch()
    return fabric


def make_model(fabric: Fabric) -> Model:
    torch.manual_seed(5)
    module = Model(5)
    if (mesh := getattr(fabric.strategy, "expert_mesh", None)) is not None:
        module.divide(mesh["expert_parallel"])
    return module


def train(options: dict[str, Any] | None, devices: int, path: Path, resume: Path | None = None) -> list[float]:
    """One epoch with accumulation and clipping. Returns the norms."""
    fabric = make_fabric(options, devices)
    module = make_model(fabric)
    model, optimizer = fabric.setup(module, sgd(module))
    state = {"model": model, "optimizer": optimizer, "epochs": 1}
    if resume is not None:
        fabric.load(resume, state)
    data = fabric.setup_dataloaders(loader(devices, shuffle=False), use_distributed_sampler=devices > 1)
    norms, window = [], RANKS // devices
    for number, batch in enumerate(data):
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


EP2, EP4 = {"expert_parallel_size": 2}, {"expert_parallel_size": 4}
SHARDED = {"state_dict_type": "sharded"}


def test_divided_experts_train_save_and_resume_as_one_process_does(
    one_rank: Ranks, mesh: Ranks, tmp_path: Path
) -> None:
    [norms] = one_rank.run(train, None, 1, tmp_path / "alone")
    one_rank.run(train, None, 1, tmp_path / "alone 2", tmp_path / "alone")
    expected, later = read(tmp_path / "alone"), read(tmp_path / "alone 2")
    for own in mesh.run(train, EP2, RANKS, tmp_path / "ep2"):
        assert own == pytest.approx(norms, rel=1e-5)
    mesh.run(train, EP4 | SHARDED, RANKS, tmp_path / "ep4+")
    assert_close(read(tmp_path / "ep2"), expected)
    assert num_chunks(tmp_path / "ep4+", "model.layers.0.up") == 4, "each rank writes its part"
    assert_close(OpenDirectory(tmp_path / "ep4+").read("model"), dict(expected["model"]))
    # each goes on from another's
    mesh.run(train, EP4, RANKS, tmp_path / "a", tmp_path / "ep2")
    mesh.run(train, EP2, RANKS, tmp_path / "b", tmp_path / "ep4+")
    mesh.run(train, {}, RANKS, tmp_path / "c", tmp_path / "ep4+")
    mesh.run(train, None, RANKS, tmp_path / "d", tmp_path / "ep2")
    mesh.run(train, EP4, RANKS, tmp_path / "e", tmp_path / "alone")
    for resumed in "abcde":
        assert_close(read(tmp_path / resumed), later)


def refusals() -> dict[str, str]:
    fabric = make_fabric(EP2, RANKS)
    return {
        "whole": message(ValueError, lambda: fabric.setup(Model(5))),
        "three": message(ValueError, lambda: make_fabric({"expert_parallel_size": 3}, RANKS)),
        "tensor": message(ValueError, lambda: make_fabric(EP2 | {"tensor_parallel_size": 2}, RANKS)),
        "promise": message(ValueError, lambda: make_fabric(EP2 | {"static_graph": True}, RANKS)),
    }


def test_what_does_not_go_together_is_refused_by_name(mesh: Ranks) -> None:
    for found in mesh.run(refusals):
        assert 'strategy.expert_mesh["expert_parallel"], [Shard(0)]' in found["whole"]
        assert "expert_parallel_size=3 does not divide the 4 ranks" in found["three"]
        assert "expert_parallel_size=2 and tensor_parallel_size=2 are not supported together" in found["tensor"]
        assert "Leave both out with expert_parallel_size" in found["promise"]


# --- parts of sequences ----------------------------------------------------------------------------------------------


def train_on_parts(cp: int) -> dict[str, Tensor]:
    fabric = make_fabric({"context_parallel_size": cp}, RANKS)
    mesh = fabric.strategy.device_mesh["context_parallel"]  # type: ignore[attr-defined] # ours
    module = sequences.Attention()
    model, optimizer = fabric.setup(module, sgd(module))
    for batch in fabric.setup_dataloaders(DataLoader(dataset())):
        ids, labels = (both[0].chunk(cp)[mesh.get_local_rank()] for both in batch)
        logits = model(ids, lambda part: sequences._Gathered.apply(part, mesh.get_group()))
        loss, num_tokens = sequences.mean_loss(logits, labels)
        fabric.strategy.loss_tokens(num_tokens)  # type: ignore[attr-defined] # of its part
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=0.1)
        optimizer.step()
        optimizer.zero_grad()
    return {name: whole(param) for name, param in module.named_parameters()}


@pytest.mark.parametrize("cp", [2, pytest.param(4, marks=pytest.mark.long)])
def test_parts_of_a_sequence_train_as_one_process_does(mesh: Ranks, cp: int) -> None:
    module, data, dp = sequences.Attention(), dataset(), RANKS // cp
    optimizer = sgd(module)
    for first in range(0, SAMPLES, dp):
        optimizer.zero_grad()
        step = [data[number] for number in range(first, first + dp)]
        total = sum(int((labels != IGNORED).sum()) for _, labels in step)
        for ids, labels in step:
            each = functional.cross_entropy(module(ids), labels, ignore_index=IGNORED, reduction="sum")
            (each / total).backward()
        nn.utils.clip_grad_norm_(module.parameters(), 0.1)
        optimizer.step()
    expected = {name: param.detach() for name, param in module.named_parameters()}
    for weights in mesh.run(train_on_parts, cp):
        torch.testing.assert_close(weights, expected, rtol=0.0, atol=1e-6)
