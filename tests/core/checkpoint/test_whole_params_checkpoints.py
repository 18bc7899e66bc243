"""State of whole parameters, of whatever kind, is saved and resumed on any number of ranks."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megastrategy import DistributedOptimizer
from megastrategy.core.states import copied
from tests.support import optimizers
from tests.support.models import two_layers
from tests.support.ranks import run_ranks
from tests.support.whole_params import batch, model_on, same, train


@pytest.mark.parametrize(
    ("kind", "sizes"), [(optimizers.Shampoo, (2, 3)), (optimizers.KeepsNested, (3, 1)), (optimizers.WrapsState, (1, 2))]
)
def test_state_of_any_kind_resumes_on_other_ranks(
    kind: Callable[..., torch.optim.Optimizer], sizes: tuple[int, int]
) -> None:
    """The gathered state equals the saved one, and torch's own optimizer loads it and steps alike."""
    file = io.BytesIO()

    def write(rank: int, group: ProcessGroup) -> None:
        module, model = model_on(group, width=500)
        optimizer = DistributedOptimizer(kind(module.parameters(), lr=0.02), model)
        train(model, optimizer, rank, range(3))
        state = optimizer.state_dict()
        if rank == 0:
            torch.save({"model": module.state_dict(), "optimizer": state}, file)

    run_ranks(sizes[0], write)
    saved = torch.load(io.BytesIO(file.getvalue()), weights_only=True)

    def resume(rank: int, group: ProcessGroup) -> Any:
        module, model = model_on(group, width=500)
        optimizer = DistributedOptimizer(kind(module.parameters(), lr=0.5), model)
        module.load_state_dict(saved["model"])
        optimizer.load_state_dict(copy.deepcopy(saved["optimizer"]))
        again = copy.deepcopy(optimizer.state_dict())
        model(batch(0, 9)).square().mean().backward()  # of every rank the same, so that their mean is it
        optimizer.step()
        return again, [param.detach().clone() for param in module.parameters()]

    by_rank = run_ranks(sizes[1], resume)
    module = two_layers(500)
    module.load_state_dict(saved["model"])
    optimizer = kind(module.parameters(), lr=0.5)
    optimizer.load_state_dict(copy.deepcopy(saved["optimizer"]))  # which casts as torch does
    assert same(by_rank[0][0], optimizer.state_dict())
    module(batch(0, 9)).square().mean().backward()
    optimizer.step()
    for _, weights in by_rank:
        for mine, theirs in zip(weights, module.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-6 if sizes[1] < 3 else 1e-4, atol=1e-6)


class Coded(Tensor):
    """Two tensors in one, as quantised ones are; it knows no operation."""

    codes: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, codes: Tensor, scale: Tensor) -> Coded:
        return Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)

    def __init__(self, codes: Tensor, scale: Tensor) -> None:
        self.codes, self.scale = codes, scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], context: None, size: Any, stride: Any) -> Coded:
        return cls(**inner)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(f"{func}")


def test_quantised_state_is_copied_by_its_parts() -> None:
    """The caller's stay the caller's; nothing is asked of the class but its parts."""
    given = Coded(torch.arange(6, dtype=torch.int8), torch.ones(1))
    taken = copied(given)
    taken.codes += 1
    assert given.codes.tolist() == [0, 1, 2, 3, 4, 5]
    assert taken.codes.tolist() == [1, 2, 3, 4, 5, 6]
