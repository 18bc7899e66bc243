"""Rounding at random: right on the mean, the same at any place of an element, and as the page has it."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from megastrategy.core.shards.random_rounding import draw, first_place, halves, key_of_step, mixed, round_at_random_
from tests.support.narrow_reference import chances, hashed, rounded_at_random

NAME = "layers.3.weight"


def places(numel: int, start: int = 0) -> Tensor:
    return torch.arange(numel, dtype=torch.int32) + first_place(NAME, start)


def rounded(values: Tensor, chance: Tensor) -> Tensor:
    result = torch.empty(values.shape, dtype=torch.bfloat16)
    round_at_random_(result, values, chance)
    return result


def test_the_hash_is_the_one_that_is_written_down() -> None:
    for number in (0, 1, 12345, 2**31, 2**32 - 1):
        assert mixed(number) == hashed(number)
        assert int(mixed(torch.tensor(number))) == hashed(number)
    for step in (1, 7, 2**20):
        pair = halves(draw(places(500), key_of_step(step, 0)))
        for number, chance in enumerate(pair):
            assert torch.equal(chance.long(), chances(NAME, 500, step, number))
        third = halves(draw(places(500), key_of_step(step, 1)))[0]
        assert torch.equal(third.long(), chances(NAME, 500, step, 2))


def test_a_step_that_a_device_counts_has_the_same_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host does not read it: on "meta", where there is nothing to read, a key comes out."""
    key = key_of_step(torch.tensor(3.0, device="meta"), 1)
    assert isinstance(key, Tensor)
    assert (key.dtype, key.shape) == (torch.int32, ())
    word = mixed(mixed(torch.tensor(3.0).to(torch.int64)) ^ 1).to(torch.int32)
    assert int(word) == key_of_step(3, 1)
    assert torch.equal(draw(places(50), word), draw(places(50), key_of_step(3, 1)))


@pytest.mark.parametrize("start", [1, 64, 2**31 - 3, 2**32 - 1])
def test_an_element_has_its_number_wherever_a_shard_begins(start: int) -> None:
    """Also where places wrap around."""
    key = key_of_step(5, 0)
    whole = draw(places(100, start), key)
    assert torch.equal(whole[37:], draw(places(63, start + 37), key))


def test_chances_are_even_and_independent() -> None:
    """For 2**20 elements: the mean, each bit, and the correlation of neighbours, of steps and of the two of one
    element; all within five standard deviations."""
    numel = 2**20
    of_step = {step: halves(draw(places(numel), key_of_step(step, 0))) for step in (1, 2, 3)}
    other = halves(draw(torch.arange(numel, dtype=torch.int32) + first_place("other", 0), key_of_step(1, 0)))[0]
    sigma = 1 / math.sqrt(numel)

    def normal(chance: Tensor) -> Tensor:
        return (chance.double() / 2**16 - 0.5) * math.sqrt(12)

    first = normal(of_step[1][0])
    assert abs(first.mean()) < 5 * sigma
    assert abs(first.square().mean() - 1) < 5 * sigma
    for bit in range(16):
        share = (of_step[1][0] >> bit).bitwise_and(1).double().mean()
        assert abs(share - 0.5) < 5 * sigma / 2, bit
    for beside in (of_step[1][1], of_step[2][0], of_step[3][0], other, of_step[1][0].roll(1), of_step[1][0].roll(64)):
        assert abs((first * normal(beside)).mean()) < 5 * sigma


def test_rounding_is_to_one_of_the_two_neighbours_as_the_chance_says() -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(20_000, generator=generator) * torch.exp(20 * torch.randn(20_000, generator=generator))
    special = [0.0, -0.0, 1.0, -1.0, 2.0**-130, -(2.0**-149), 1.99999, -1.99999, math.inf, -math.inf, 1e-40]
    values[: len(special)] = torch.tensor(special)
    chance = torch.randint(2**16, values.shape, generator=generator, dtype=torch.int32)
    result = rounded(values, chance)
    assert torch.equal(result.float(), rounded_at_random(values, chance.long()))
    assert torch.equal(result.float().signbit(), values.signbit()), "zeros keep their signs"
    exact = values.bfloat16()
    assert torch.equal(rounded(exact.float(), chance), exact), "what bf16 has is not changed"


def test_nan_stays_nan() -> None:
    """With every payload: the carry of one would run into the sign, of another leave infinity."""
    bits = torch.tensor([0x7FC00000, 0x7F800001, 0x7FFFFFFF, -1, -(2**31) + 0x7F800001], dtype=torch.int32)
    for chance in (0, 2**16 - 1):
        assert rounded(bits.view(torch.float32), torch.full((5,), chance, dtype=torch.int32)).isnan().all()


def test_a_moment_that_rounding_to_the_nearest_would_hold_in_place_decays() -> None:
    """Adam's second moment without gradients: 0.999 of itself a step. 1,000 elements, 2,000 steps."""
    exact = torch.full((1000,), 0.7)
    kept, nearest = exact.bfloat16(), exact.bfloat16()
    for step in range(2000):
        exact = exact * 0.999
        nearest = (nearest.float() * 0.999).bfloat16()
        kept = rounded(kept.float() * 0.999, halves(draw(places(1000), key_of_step(step + 1, 0)))[1])
    assert nearest[0] > 0.6, "it stands where it began"
    assert kept.float().mean() / exact[0] == pytest.approx(1, abs=0.02)
