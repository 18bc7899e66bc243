"""torch.distributed.checkpoint.state_dict with a sharded optimizer, beside torch DDP, and directories that cross."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from megastrategy import DistributedDataParallel, DistributedOptimizer
from megastrategy.core.errors import DirectUseError
from tests.support.processes import run_processes

Trainee = tuple[Any, Any]

OPTIONS: dict[str, dict[str, bool]] = {
    "none": {},
    "cpu_offload": {"cpu_offload": True},
    "full_state_dict": {"full_state_dict": True},
    "full, broadcast": {"full_state_dict": True, "broadcast_from_rank0": True},
    "full, broadcast, offload": {"full_state_dict": True, "broadcast_from_rank0": True, "cpu_offload": True},
}

MODULES: dict[str, Callable[[], nn.Module]] = {
    "two layers": lambda: nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 1, bias=False)),
    "one element": lambda: nn.Sequential(nn.Linear(1, 1, bias=False)),  # rank 1 steps nothing
}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=1e-2),
    "SGD": lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9),
}


def made(ours: bool, module: str = "two layers", optimizer: str = "AdamW", seed: int = 0) -> Trainee:
    torch.manual_seed(seed)
    net = MODULES[module]()
    if not ours:
        stock = TorchDDP(net)
        return stock, OPTIMIZERS[optimizer](stock.parameters())
    model = DistributedDataParallel(net)
    return model, DistributedOptimizer(OPTIMIZERS[optimizer](model.parameters()), model)


def step(model: Any, optimizer: Any) -> None:
    optimizer.zero_grad()
    inputs = torch.full((2, model.module[0].in_features), 1.0 + dist.get_rank())
    model(inputs).square().mean().backward()
    optimizer.step()


def weights_of(model: Any) -> list[Tensor]:
    return [param.detach().clone() for param in model.module.parameters()]


def continued(ours: bool, module: str, optimizer: str, options: dict[str, bool], has_stepped: bool) -> list[Tensor]:
    """Weights after a step of a model that got another's state, in its first step or later. With
    ``broadcast_from_rank0`` other ranks pass nothing, as torchtune's recipes do."""
    first = made(ours, module, optimizer)
    step(*first)
    step(*first)
    chosen = StateDictOptions(**options)
    state = get_optimizer_state_dict(*first, options=chosen)
    if options.get("broadcast_from_rank0") and dist.get_rank() > 0:
        state = {}
    second = made(ours, module, optimizer, seed=1)
    if has_stepped:
        step(*second)
    set_optimizer_state_dict(*second, state, options=chosen)
    second[0].module.load_state_dict(first[0].module.state_dict())
    step(*second)
    return weights_of(second[0])


def continue_all(ours: bool, module: str, optimizer: str) -> dict[str, list[Tensor]]:
    return {
        f"{name}, {has_stepped=}": continued(ours, module, optimizer, options, has_stepped)
        for name, options in OPTIONS.items()
        for has_stepped in (False, True)
    }


@pytest.mark.parametrize(
    ("module", "optimizer"), [("two layers", "AdamW"), ("two layers", "SGD"), ("one element", "AdamW")]
)
def test_options_of_helpers_continue_as_torch_ddp(module: str, optimizer: str) -> None:
    expected = run_processes(2, continue_all, False, module, optimizer)
    for mine, theirs in zip(run_processes(2, continue_all, True, module, optimizer), expected, strict=True):
        for options, weights in theirs.items():
            assert all(map(torch.equal, mine[options], weights)), options


def refused() -> str:
    model, optimizer = made(True)
    step(model, optimizer)
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    state = get_optimizer_state_dict(model, optimizer, options=options)
    with pytest.raises(DirectUseError) as raised:
        set_optimizer_state_dict(model, optimizer, state, options=options)
    return str(raised.value)


def test_flattened_optimizer_state_is_refused_by_name() -> None:
    for message in run_processes(2, refused):
        assert "flatten_optimizer_state_dict=True" in message
        assert "Leave out flatten_optimizer_state_dict=True" in message


def names() -> list[list[str]]:
    return [sorted(get_model_state_dict(made(ours)[0])) for ours in (True, False)]


def test_names_of_helpers_are_torch_ddps() -> None:
    """Through the wrapper, whose prefix torch strips from its own class only."""
    for mine, theirs in run_processes(2, names):
        assert mine == theirs == ["0.bias", "0.weight", "1.weight"]


def save_directory(ours: bool, path: str) -> list[Tensor]:
    """Saves, and returns the weights after one step more."""
    trainee = made(ours)
    step(*trainee)
    model_state, optimizer_state = get_state_dict(*trainee)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=path)
    step(*trainee)
    return weights_of(trainee[0])


def load_directory(ours: bool, path: str) -> list[Tensor]:
    """torch DDP loads by the helpers, and the engine's optimizer its shards."""
    model, optimizer = made(ours, seed=1)
    if ours:
        model_state = get_model_state_dict(model)
        dcp.load({"model": model_state}, checkpoint_id=path)
        model.module.load_state_dict(model_state)
        optimizer.load_sharded(path)
    else:
        step(model, optimizer)
        model_state, optimizer_state = get_state_dict(model, optimizer)
        dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=path)
        set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
    step(model, optimizer)
    return weights_of(model)


@pytest.mark.parametrize(("saves", "loads"), [(True, False), (False, True), (True, True)])
def test_directories_through_wrappers_cross(saves: bool, loads: bool, tmp_path: Path) -> None:
    expected = run_processes(2, save_directory, saves, str(tmp_path / "saved"))
    for mine, theirs in zip(run_processes(2, load_directory, loads, str(tmp_path / "saved")), expected, strict=True):
        assert all(map(torch.equal, mine, theirs))


def continued_after_a_look(ours: bool) -> list[Tensor]:
    """A state is loaded, looked at by torch's helper, and stepped."""
    first = made(ours)
    step(*first)
    step(*first)
    state = first[1].state_dict()
    second = made(ours, seed=1)
    second[0].module.load_state_dict(first[0].module.state_dict())
    second[1].load_state_dict(state)
    get_optimizer_state_dict(*second)
    step(*second)
    return weights_of(second[0])


def test_helpers_leave_loaded_state() -> None:
    """They make a state by a step of an optimizer that seems to have none."""
    for mine, theirs in zip(*(run_processes(2, continued_after_a_look, ours) for ours in (True, False)), strict=True):
        assert all(map(torch.equal, mine, theirs))
