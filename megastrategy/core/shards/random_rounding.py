"""Rounds fp32 to bf16 at random, the same way in every run that computes the same numbers.

[Note: rounding at random]
Adam's second moment changes by a thousandth in a step, and bf16 has a step of 1/256: rounded to the nearest, the moment
would never change. Rounded up with the probability of the part that is cut off, it is right on average.

The random numbers are hashed from the parameter's name, the element's position in it, and the number of the step. So no
generator has a state that must be saved; and an element is rounded the same way on any number of ranks, in any buckets,
and in a run that was resumed.
"""

from __future__ import annotations

import zlib
from typing import Any

import torch
from torch import Tensor

from .. import devices

_MASK = 2**32 - 1
_FACTORS = 0x7FEB352D, 0x846CA68B
"""Factors of Chris Wellons' ``lowbias32``, with shifts of 16, 15 and 16: each input bit flips each output bit in about
half of all cases."""


def mixed(word: Any) -> Any:
    """Returns the hash of one number in [0, 2**32): a Python integer, or a tensor of int64."""
    word = word ^ (word >> 16)
    word = word * _FACTORS[0] & _MASK
    word = word ^ (word >> 15)
    # A product in int64 may wrap; its lower half is right nevertheless.
    word = word * _FACTORS[1] & _MASK
    return word ^ (word >> 16)


def first_place(name: str, element: int) -> int:
    """Returns the position of an element of a parameter, in memory order. The positions of later elements follow it."""
    return signed(zlib.crc32(name.encode()) + element)


def key_of_step(step: float | Tensor, number: int) -> int | Tensor:
    """Returns the number that the hashes of one step have in common.

    Args:
        step: the number of the step; the host does not read it from a tensor on a device.
        number: differs between the hashes that one step needs for the same elements.
    """
    if isinstance(step, Tensor) and step.device.type != "cpu":
        key: Tensor = mixed(mixed(step.reshape(()).to(torch.int64)) ^ number)
        return key.to(torch.int32)  # wraps into the sign
    return signed(mixed(mixed(int(step)) ^ number))


def draw(places: Tensor, key: int | Tensor) -> Tensor:
    """Returns 32 random bits for each of ``places``, in a new tensor; both are int32."""
    word = places.bitwise_xor(key)
    # A shift of int32 copies the sign, which is no bit of the number: hence the masks.
    word ^= (word >> 16).bitwise_and_(0xFFFF)
    word *= signed(_FACTORS[0])
    word ^= (word >> 15).bitwise_and_(0x1FFFF)
    word *= signed(_FACTORS[1])
    word ^= (word >> 16).bitwise_and_(0xFFFF)
    return word


def halves(bits: Tensor) -> tuple[Tensor, Tensor]:
    """Returns two numbers in [0, 2**16) from 32 random bits each, in int32."""
    return bits & 0xFFFF, (bits >> 16).bitwise_and_(0xFFFF)


def round_at_random_(rounded: Tensor, values: Tensor, chances: Tensor) -> None:
    """Rounds fp32 ``values`` to bf16: away from zero with the probability of the part that is cut off, else towards it.

    NaN stays NaN, and infinity stays infinite. A value that bf16 can represent is not changed.

    Args:
        rounded, values: 1-D and contiguous.
        chances: int32, uniform in [0, 2**16).
    """
    # bf16 lacks the lower half of an fp32 number. The sum of it and a chance carries into the upper half as often
    # as the number should be rounded up; where the mantissa is full the carry goes into the exponent.
    moved = values.view(torch.int32) + chances
    rounded.view(torch.int16).copy_(moved.bitwise_right_shift_(16))
    # The carry of a NaN would run into the sign, or leave infinity. On the host a sum finds NaN in a tenth of the time.
    if not devices.is_on_host(values.device) or bool(values.sum().isnan()):
        rounded.masked_fill_(values.isnan(), torch.nan)


def signed(word: int) -> int:
    """Returns the int32 number that has the bits of ``word`` modulo 2**32."""
    word &= _MASK
    return word - 2**32 if word >= 2**31 else word
