"""Main params in one piece of memory: the same bits as parameter by parameter, whatever was done to the weights."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable

import pytest
import torch
from megastrategy.core.optimizer.main_param_buffer import MainParamBuffer
from megastrategy.core.shards.param_shard import take_outside_changes
from torch import Tensor

from tests.support.budgets import work_as_on_an_accelerator

SHAPES = [(3, 5), (8,), (1,), (4, 2, 3, 3), (), (0, 4), (16, 8)]


def weights_of(dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(0)
    weights = [torch.randn(shape).to(dtype) for shape in SHAPES]
    weights[3] = weights[3].to(memory_format=torch.channels_last)
    return weights


def reload(weights: list[Tensor]) -> None:
    weights[0].normal_()


def write_one_element(weights: list[Tensor]) -> None:
    weights[3][1, 1, 2, 0] = 7.0


def write_what_does_not_compare(weights: list[Tensor]) -> None:
    weights[6][0] = torch.nan
    weights[6][1] = torch.inf
    weights[1][0] = -0.0


def point_elsewhere(weights: list[Tensor]) -> None:
    weights[0].data = torch.randn(5, 3).to(weights[0].dtype).t()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "change", [lambda _: None, reload, write_one_element, write_what_does_not_compare, point_elsewhere]
)
@pytest.mark.parametrize("on_accelerator", [False, True])
def test_changes_of_weights_are_taken_over_and_no_others(
    change: Callable[[list[Tensor]], None], dtype: torch.dtype, on_accelerator: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if on_accelerator:
        work_as_on_an_accelerator(monkeypatch)
    weights = weights_of(dtype)
    buffer = MainParamBuffer(weights)
    assert all(torch.equal(main, weight.float()) for main, weight in zip(buffer.mains, weights, strict=True))
    for main, weight in zip(buffer.mains, weights, strict=True):  # a step: main params have bits that weights lack
        main.add_(torch.randn(main.shape) * 1e-3)
        weight.copy_(main)
    one_by_one = copy.deepcopy(buffer.mains)
    change(weights)
    buffer.take_outside_changes(weights)
    for index, (main, other, weight) in enumerate(zip(buffer.mains, one_by_one, weights, strict=True)):
        take_outside_changes(other, weight, dtype)
        assert torch.equal(main.view(torch.int32), other.view(torch.int32)), SHAPES[index]
        assert main.stride() == other.stride()


def test_main_params_have_storages_of_their_own_without_gaps() -> None:
    buffer = MainParamBuffer(weights_of(torch.bfloat16))
    spans = sorted((main.data_ptr(), main.nbytes) for main in buffer.mains if main.numel())
    assert all(main.untyped_storage().nbytes() == main.nbytes for main in buffer.mains)
    assert all(start + nbytes == after for (start, nbytes), (after, _) in itertools.pairwise(spans))
    # sizes of a multiple of 16 bytes come first, so that these are aligned
    assert all(main.data_ptr() % 16 == 0 for main in buffer.mains if main.numel() % 4 == 0 and main.numel())


def test_a_main_param_that_was_given_other_memory_comes_back_with_its_values() -> None:
    buffer = MainParamBuffer(weights_of(torch.bfloat16))
    place, values = buffer.mains[0].data_ptr(), torch.full((3, 5), 2.5)
    buffer.mains[0].data = values.clone()
    buffer.bring_back()
    assert buffer.mains[0].data_ptr() == place
    assert torch.equal(buffer.mains[0], values)
