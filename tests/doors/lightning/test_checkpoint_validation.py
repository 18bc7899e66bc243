"""A checkpoint that does not fit loads nothing and says what differs; one that fits leaves nothing in its file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from torch import Tensor, nn

from megastrategy._checkpoints.files import unmapped_copy
from megastrategy._checkpoints.validation import check_module_state
from megastrategy.core import CheckpointError
from megastrategy.fabric import MegatronDDPStrategy as FabricStrategy

from ..fits import (
    AwkwardModule,
    assert_same_tensors,
    fit_saving,
    loader,
    make_strategy,
    make_trainer,
)
from ..rank_processes import Ranks


def two_groups(params: Any) -> torch.optim.Optimizer:
    first, *rest = params
    return torch.optim.AdamW([{"params": [first]}, {"params": rest}], lr=1e-2)


class OtherModule(AwkwardModule):
    """Not the model that the checkpoint is of."""

    def __init__(self, how: str) -> None:
        super().__init__(two_groups if how == "groups" else None)
        if how == "missing":
            self.more = nn.Linear(2, 2)
        elif how == "extra":
            del self.side
        elif how == "shape":
            self.inputs = nn.Linear(6, 13)


WRONG = {
    "missing": ["'more.weight' is missing there", "'more.bias' is missing there"],
    "extra": ["'side.weight' is there, and not in the model"],
    "shape": ["'inputs.weight' has shape (13, 5) there, (13, 6) in the model"],
    "groups": ["it has 1 parameter group(s), the optimizer 2"],
}


def resume_other(how: str, path: Path) -> str:
    module = OtherModule(how)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    trainer = make_trainer(make_strategy("megatron_ddp"))
    with pytest.raises(CheckpointError) as raised:
        trainer.fit(module, loader(), ckpt_path=path)
    if how != "groups":  # Lightning loads the weights before there are optimizers
        assert_same_tensors(module.state_dict(), before)
    assert not any(optimizer.state for optimizer in trainer.optimizers)
    return str(raised.value)


@pytest.fixture(scope="module")
def trained(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    ranks.run(fit_saving, folder)
    return folder / "step=7.ckpt"


@pytest.mark.parametrize("how", list(WRONG))
def test_a_checkpoint_of_another_model_loads_nothing_and_says_what_differs(
    ranks: Ranks, trained: Path, how: str
) -> None:
    for message in ranks.run(resume_other, how, trained):
        assert str(trained) in message
        for problem in WRONG[how]:
            assert problem in message


def resume_foreign(path: Path) -> str:
    with pytest.raises(CheckpointError) as raised:
        make_trainer(make_strategy("megatron_ddp")).fit(AwkwardModule(), loader(), ckpt_path=path)
    return str(raised.value)


def test_a_trainer_says_what_is_wrong_with_a_file_on_every_rank(ranks: Ranks, trained: Path, tmp_path: Path) -> None:
    (tmp_path / "short.ckpt").write_bytes(trained.read_bytes()[:1000])
    torch.save(AwkwardModule().state_dict(), tmp_path / "weights.ckpt")
    torch.save([1, 2], tmp_path / "list.ckpt")
    problems = {"short": "is cut off", "weights": "is no checkpoint of a Trainer", "list": "got a list"}
    for name, problem in problems.items():
        path = tmp_path / f"{name}.ckpt"
        for message in ranks.run(resume_foreign, path):
            assert message.startswith(str(path))
            assert problem in message


def is_mapped(tensor: Tensor, path: Path) -> bool:
    """Whether the kernel knows the tensor's memory as a part of the file."""
    address = tensor.data_ptr()
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = (int(number, 16) for number in line.split()[0].split("-"))
        if start <= address < end:
            return line.endswith(str(path))
    raise AssertionError("no memory of this process")


def fabric_load(path: Path, sharded: bool) -> dict[str, str]:
    """Problem -> message; in each case model and optimizer must be as they were."""
    strategy = FabricStrategy(bucket_size=20, use_distributed_optimizer=sharded)
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch()

    def make(num_inputs: int = 5, num_groups: int = 1) -> tuple[Any, Any]:
        torch.manual_seed(num_inputs)
        module = nn.Sequential(nn.Linear(num_inputs, 7), nn.Linear(7, 3))
        params = list(module.parameters())
        groups = [{"params": params[:1]}, {"params": params[1:]}][-num_groups:]
        groups = groups if num_groups == 2 else [{"params": params}]
        model, optimizer = fabric.setup(module, torch.optim.AdamW(groups, lr=0.1))
        fabric.backward(model(torch.ones(2, num_inputs)).square().mean())
        optimizer.step()
        return model, optimizer

    model, optimizer = make()
    fabric.save(path, {"model": model, "optimizer": optimizer, "step": 3})
    messages = {}
    for problem, (other, others_optimizer) in {"shape": make(num_inputs=6), "groups": make(num_groups=2)}.items():
        weights = {name: value.clone() for name, value in other.state_dict().items()}
        state = unmapped_copy(others_optimizer.state_dict())
        # the part that fits comes first, and must not be loaded either
        objects = {"model": other, "optimizer": others_optimizer, "step": 0}
        keys = ["step", "model", "optimizer"] if problem == "groups" else ["step", "optimizer", "model"]
        asked = {key: objects[key] for key in keys}
        with pytest.raises(CheckpointError) as raised:
            fabric.load(path, asked)
        messages[problem] = str(raised.value)
        assert asked["step"] == 0
        assert_same_tensors(other.state_dict(), weights)
        assert str(others_optimizer.state_dict()) == str(state)
    with pytest.raises(KeyError, match="has no 'scheduler'"):
        fabric.load(path, {"model": model, "scheduler": 0})
    rest = fabric.load(path, {"optimizer": optimizer})
    assert rest["step"] == 3
    states = [value for values in optimizer.state.values() for value in values.values()]
    assert not any(is_mapped(tensor, path) for tensor in [*states, *rest["model"].values()])
    return messages


@pytest.mark.parametrize("sharded", [True, False])
def test_fabric_loads_everything_or_nothing(ranks: Ranks, tmp_path: Path, sharded: bool) -> None:
    path = tmp_path / "last.ckpt"
    for messages in ranks.run(fabric_load, path, sharded):
        assert str(path) in messages["shape"]
        assert "'optimizer' in" in messages["groups"]
        assert "it has 1 parameter group(s), the optimizer 2" in messages["groups"]


@pytest.mark.parametrize("strict", [True, False])
def test_the_check_finds_what_torch_finds(strict: bool) -> None:
    """Tied and lazily missing names, buffers, old scalars: torch itself says what is right."""

    def make(**changes: Any) -> dict[str, Tensor]:
        state = dict(AwkwardModule().state_dict())
        state.update({name: value for name, value in changes.items() if value is not None})
        return {name: value for name, value in state.items() if name not in changes or changes[name] is not None}

    states = {
        "itself": make(),
        "old scalar": make(scale=torch.ones(1)),
        "no counter": make(**{"norm.num_batches_tracked": None}),
        "no buffer": make(**{"norm.running_mean": None}),
        "no tied name": make(**{"head.weight": None}),
        "extra": make(nothing=torch.ones(1)),
        "shape": make(**{"out.bias": torch.ones(8)}),
        "dtype": make(**{"out.bias": torch.ones(7, dtype=torch.float64)}),
    }
    for name, state in states.items():
        theirs = ours = False
        module = AwkwardModule()
        try:
            check_module_state(module, state, strict, "file")
        except CheckpointError:
            ours = True
        try:
            module.load_state_dict(state, strict)
        except RuntimeError:
            theirs = True
        assert ours == theirs, name
