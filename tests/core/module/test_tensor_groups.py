"""The common state of a tensor group's ranks is compared, and differences are named."""

from __future__ import annotations

import dataclasses
import warnings
from collections import UserDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

from megastrategy import DistributedDataParallel
from megastrategy.errors import BatchMismatchError, ReplicaMismatchError
from tests.support.processes import run_processes
from tests.support.tensor_parallel import meshes


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Any, *_: Any, **__: Any) -> Tensor:
        return self.down(torch.relu(self.up(x if isinstance(x, Tensor) else torch.ones(2, 8))))  # type: ignore[no-any-return]


@dataclasses.dataclass
class Batch:
    tokens: Tensor
    weights: list[Tensor]


def wrapped(mesh: Any, **styles: Any) -> DistributedDataParallel:
    torch.manual_seed(0)
    plan = {"up": ColwiseParallel(**styles), "down": RowwiseParallel()}
    return DistributedDataParallel(parallelize_module(Pair(), mesh["tp"], plan), process_group=mesh.get_group("dp"))


def told(mesh: Any, call: Callable[[DistributedDataParallel], Any], **styles: Any) -> str:
    """The error of a call of a fresh model, or nothing."""
    model = wrapped(mesh, **styles)
    try:
        call(model)
    except BatchMismatchError as error:
        return str(error)
    finally:
        model.close()
    return ""


def batches(mesh: Any) -> dict[str, str]:
    """Rank 3, which is tensor rank 1 of the second data-parallel rank, has something else each time."""
    other = torch.distributed.get_rank() == 3
    dp, same, mine = mesh.get_local_rank("dp"), torch.ones(2, 8), torch.full((2, 8), 1.0 + other)
    part = DTensor.from_local(torch.full((1, 8), float(mesh.get_local_rank("tp"))), mesh["tp"], [Shard(0)])

    def second(model: DistributedDataParallel) -> None:
        model(same)
        model(mine)

    def evaluated(model: DistributedDataParallel) -> None:
        with torch.no_grad():
            model(mine)

    return {
        "values": told(mesh, lambda model: model(mine)),
        "order": told(mesh, lambda model: model(torch.arange(16.0).view(2, 8).roll(int(other), 0))),
        "keyword": told(mesh, lambda model: model(same, labels={"ids": [same, mine]})),
        "encoding": told(mesh, lambda model: model(UserDict({"tokens": mine.bool().logical_xor(mine > 1)}))),
        "dataclass": told(mesh, lambda model: model(Batch(same, [mine.bfloat16()]))),
        "shape": told(mesh, lambda model: model(same, torch.zeros(2 + other))),
        "missing": told(mesh, lambda model: model(same, **({} if other else {"mask": same}))),
        "by data-parallel rank": told(mesh, lambda model: model(same + dp)),
        "parts": told(mesh, lambda model: model(part), input_layouts=Shard(0)),
        "the second one": told(mesh, second),
        "without gradients": told(mesh, evaluated),
    }


TOLD = {
    "values": "argument 0 is float32[2, 8]",
    "order": "argument 0 is float32[2, 8]",
    "keyword": "labels['ids'][1] is float32[2, 8]",
    "encoding": "argument 0['tokens'] is bool[2, 8]",
    "dataclass": "argument 0.weights[0] is bfloat16[2, 8]",
    "shape": "argument 1 is float32[2] with digest",
    "missing": "mask is float32[2, 8]",
    "by data-parallel rank": "",
    "parts": "",
    "the second one": "",
    "without gradients": "",
}


def random_states(mesh: Any) -> list[str]:
    """The warnings of a forward whose ranks have seeds by the rank, and of the one after it."""
    model = wrapped(mesh)
    torch.manual_seed(torch.distributed.get_rank())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model(torch.ones(2, 8))
        model(torch.ones(2, 8))
    model.close()
    return [str(warning.message) for warning in caught if "random state" in str(warning.message)]


def cut_twice(mesh: Any) -> str:
    module = parallelize_module(Pair(), mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    part = torch.ones(8, 8)
    placement = _StridedShard(0, split_factor=2)
    module.up.weight = nn.Parameter(DTensor.from_local(part, mesh["tp"], [placement], shape=(16, 8), stride=(8, 1)))
    with pytest.raises(ValueError, match="StridedShard") as caught:
        DistributedDataParallel(module, process_group=mesh.get_group("dp"))
    return str(caught.value)


def replicas(mesh: Any) -> list[str]:
    """The findings, for the model as it was wrapped and after some ranks have changed a weight."""
    found = []
    for name, ranks in (("down.bias", ()), ("up.weight", (2,)), ("down.bias", (1, 3))):
        model = wrapped(mesh)
        if torch.distributed.get_rank() in ranks:
            param = model.module.get_parameter(name)
            with torch.no_grad():
                getattr(param, "_local_tensor", param).view(-1)[3] += 1e-3
        try:
            model.check_replicas()
            found.append("")
        except ReplicaMismatchError as error:
            found.append(str(error))
        model.close()
    return found


def parted_before_the_wrap(mesh: Any) -> tuple[float, float]:
    """A value of a replica and one of a part. Each was the rank's number when the model was wrapped."""
    module = parallelize_module(Pair(), mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    replica, part = module.down.bias.to_local(), module.up.weight.to_local()
    with torch.no_grad():
        replica.fill_(torch.distributed.get_rank())
        part.fill_(torch.distributed.get_rank())
    model = DistributedDataParallel(module, process_group=mesh.get_group("dp"))
    found = module.down.bias.to_local()[0].item(), module.up.weight.to_local()[0, 0].item()
    model.close()
    return found


def answers() -> dict[str, Any]:
    mesh = meshes(2)
    asked = (batches, random_states, cut_twice, replicas, parted_before_the_wrap)
    return {ask.__name__: ask(mesh) for ask in asked}


@pytest.fixture(scope="module")
def answered() -> list[dict[str, Any]]:
    return run_processes(4, answers, timeout_s=300.0)


@pytest.mark.parametrize("what", TOLD)
def test_batch_differing_in_tensor_group_is_named(answered: list[dict[str, Any]], what: str) -> None:
    for rank, text in enumerate(answer["batches"][what] for answer in answered):
        if rank < 2 or not TOLD[what]:  # a group of its own, whose batches are equal
            assert text == ""
        else:
            assert TOLD[what] in text
            assert "tensor rank 1" in text
            assert "mesh.get_local_rank" in text


def test_random_states_differing_in_group_warn_once(answered: list[dict[str, Any]]) -> None:
    texts = [answer["random_states"] for answer in answered]
    assert [len(text) for text in texts] == [1, 0, 1, 0], "once a group"
    assert "the random state of cpu differs" in texts[0][0]
    assert "tensor rank 1" in texts[0][0]


def test_param_cut_twice_is_refused(answered: list[dict[str, Any]]) -> None:
    for answer in answered:
        assert "parameter 'up.weight' is a DTensor (_StridedShard" in answer["cut_twice"]


def test_replicas_that_parted_are_named_on_all_ranks(answered: list[dict[str, Any]]) -> None:
    for answer in answered:
        equal, over_data, over_tensors = answer["replicas"]
        assert equal == ""
        assert "'up.weight' has one value on data-parallel rank 0 and another on data-parallel rank 1" in over_data
        assert "'down.bias' has one value on tensor rank 0 and another on tensor rank 1" in over_tensors


def test_replicas_begin_as_those_of_rank_0(
    answered: list[dict[str, Any]],
) -> None:
    assert [answer["parted_before_the_wrap"] for answer in answered] == [(0.0, 0.0), (0.0, 1.0)] * 2
