"""Modules that were made on meta get memory, and others are left alone."""

from __future__ import annotations

import torch
from torch import nn

from megastrategy.core import materialise

HOST = torch.device("cpu")


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight


def test_a_parameter_of_two_modules_stays_one() -> None:
    with torch.device("meta"):
        module = Tied()
    assert materialise(module, HOST) == []
    assert module.head.weight is module.embed.weight
    assert not module.head.weight.is_meta
    assert module.head.weight.abs().sum() > 0


def test_params_with_memory_keep_values() -> None:
    real = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    before = {name: tensor.clone() for name, tensor in real.state_dict().items()}
    weight = real[0].weight
    with torch.device("meta"):
        head = nn.Linear(3, 2)
    head.bias.requires_grad_(False)
    module = nn.Sequential(real, head)
    assert materialise(module, HOST) == []
    assert real[0].weight is weight
    for name, tensor in real.state_dict().items():
        assert torch.equal(tensor, before[name])
    assert (head.weight.requires_grad, head.bias.requires_grad) == (True, False)
    assert isinstance(head.weight, nn.Parameter)


class Silent(nn.Module):
    """Has a parameter and no way to choose its values."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2))
        self.register_buffer("seen", torch.zeros(2, dtype=torch.int64))


def test_a_class_that_cannot_choose_values_is_named() -> None:
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(2, 2), Silent())
    assert materialise(module, HOST) == ["1 (Silent)"]
    assert [tensor.dtype for tensor in (module[1].scale, module[1].seen)] == [torch.float32, torch.int64]
    assert not any(tensor.is_meta for tensor in module.state_dict().values())
