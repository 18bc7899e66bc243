"""``no_decay_groups``: which parameters decay, each of them once."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

import megastrategy
from megastrategy import no_decay_groups


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(5, 4)
        self.norm = nn.LayerNorm(4)
        self.conv = nn.Conv1d(4, 4, 3)
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.guide = nn.Linear(4, 4)
        self.mixed = nn.Bilinear(2, 3, 4)
        self.mixed.bias = nn.Parameter(torch.zeros(4, 1))  # two dimensions, and a bias
        self.unbias = nn.Parameter(torch.zeros(2, 2))  # no bias
        self.head = nn.Linear(4, 5)
        self.head.weight = self.words.weight
        self.guide.requires_grad_(False)


def test_matrices_decay_and_vectors_scalars_and_biases_do_not() -> None:
    module = Model()
    names = {id(param): name for name, param in module.named_parameters()}
    decayed, others = no_decay_groups(module, 0.1)
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    matrices = ["words.weight", "conv.weight", "guide.weight", "mixed.weight", "unbias"]
    assert sorted(names[id(p)] for p in decayed["params"]) == sorted(matrices)
    rest = ["norm.weight", "norm.bias", "conv.bias", "scale", "guide.bias", "mixed.bias", "head.bias"]
    assert sorted(names[id(p)] for p in others["params"]) == sorted(rest)


def test_each_parameter_comes_once_in_the_order_of_the_module() -> None:
    module = Model()
    order = {id(param): place for place, param in enumerate(module.parameters())}
    places = [[order[id(param)] for param in group["params"]] for group in no_decay_groups(module, 0.1)]
    assert sorted(itertools.chain(*places)) == list(range(len(order)))
    assert all(group == sorted(group) for group in places)


def test_what_is_unfrozen_later_is_trained() -> None:
    module = Model()
    optimizer = torch.optim.SGD(no_decay_groups(module, 0.0), lr=1.0)
    before = module.guide.weight.detach().clone()
    module.guide.requires_grad_(True)
    module.guide(torch.ones(4)).sum().backward()
    optimizer.step()
    assert torch.equal(module.guide.weight, before - 1)


@pytest.mark.parametrize(("module", "decay"), [(nn.Embedding(3, 2), [0.3]), (nn.LayerNorm(3), [0.0])])
def test_an_empty_group_is_left_out(module: nn.Module, decay: list[float]) -> None:
    assert [group["weight_decay"] for group in no_decay_groups(module, 0.3)] == decay


def test_it_is_found_by_its_public_name() -> None:
    assert "no_decay_groups" in megastrategy.__all__
    assert megastrategy.no_decay_groups is no_decay_groups
