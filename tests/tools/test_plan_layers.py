"""Layers of every kind under ``megastrategy.plan``: what is measured of them, and what they are afterwards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import megastrategy
from megastrategy.tools.plan.cards import parse_cards
from megastrategy.tools.plan.layers import measure_layers

CARDS = parse_cards("mine=8GB@1TFLOPS:2")


def test_plan_changes_no_layer_sample_or_generator() -> None:
    torch.manual_seed(0)
    layers = [nn.ReLU(inplace=True), nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8), nn.Dropout(0.5), nn.Conv2d(8, 8, 1)]
    sample = torch.randn(4, 3, 8, 8)
    values = [tensor.clone() for layer in layers for tensor in layer.state_dict().values()]
    given, drawn = sample.clone(), torch.get_rng_state()
    megastrategy.plan(layers, sample, devices=CARDS, microbatches=4)
    assert torch.equal(torch.get_rng_state(), drawn)
    assert torch.equal(sample, given)
    after = [tensor for layer in layers for tensor in layer.state_dict().values()]
    assert all(torch.equal(a, b) for a, b in zip(values, after, strict=True))


def mlp(*, parameters: int) -> list[nn.Module]:
    return [module for _ in range(parameters) for module in (nn.Linear(8, 8), nn.ReLU(), nn.ReLU())]


def test_stage_without_parameters_is_refused() -> None:
    plan = megastrategy.plan(mlp(parameters=2), torch.ones(2, 8), devices=CARDS, microbatches=4)
    assert plan.split_spec in ((1, 5), (2, 4), (3, 3))
    with pytest.raises(ValueError, match=r"stage 1 without parameters \(4: ReLU, 5: ReLU\), for which torch has no"):
        megastrategy.plan(mlp(parameters=2), torch.ones(2, 8), devices=CARDS, microbatches=4, split_spec=[4, 2])
    with pytest.raises(ValueError, match="1 of 3 layers have parameters, for 2 cards: expected one in each stage"):
        megastrategy.plan(mlp(parameters=1), torch.ones(2, 8), devices=CARDS, microbatches=4)


def test_too_few_microbatches_are_refused() -> None:
    layers, x, cards = mlp(parameters=3), torch.ones(2, 8), parse_cards("mine=8GB@1TFLOPS:3")
    with pytest.raises(ValueError, match="2 microbatches for 3 cards: expected at least as many with '1f1b'"):
        megastrategy.plan(layers, x, devices=cards, microbatches=2)
    assert sum(megastrategy.plan(layers, x, devices=cards, microbatches=2, schedule="gpipe").split_spec) == len(layers)


class Tied(nn.Module):
    """One weight twice, and a buffer to look up in."""

    places: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(512, 512, bias=False), nn.Linear(512, 512, bias=False)
        self.down.weight = self.up.weight
        self.table = nn.Embedding(4, 512)
        self.register_buffer("places", torch.arange(4))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down(self.up(x + self.table(self.places))).relu()
        return result


def test_layers_on_meta_are_planned() -> None:
    def made() -> list[nn.Module]:
        return [Tied(), nn.BatchNorm1d(4), Tied().requires_grad_(False), Tied()]

    with torch.device("meta"):
        on_meta = made()
    x = torch.randn(8, 4, 512)
    assert measure_layers(on_meta, x) == measure_layers(made(), x)
    assert all(tensor.is_meta for layer in on_meta for tensor in (*layer.parameters(), *layer.buffers()))


@pytest.mark.parametrize(
    ("sample", "devices", "says"),
    [
        (None, CARDS, "the sample is a NoneType: expected a tensor with values"),
        (torch.ones(2, 8, device="meta"), CARDS, "the sample is on meta: expected a tensor with values"),
        (torch.ones(2, 8), ["3090", "2080"], "devices has '3090': expected cards, such as parse_cards"),
    ],
    ids=["no sample", "on meta", "names"],
)
def test_wrong_sample_or_card_is_named(sample: Any, devices: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        megastrategy.plan(mlp(parameters=2), sample, devices=devices, microbatches=4)
