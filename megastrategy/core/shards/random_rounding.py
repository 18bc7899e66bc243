"""Rounds fp32 to bf16 at random, the same way in every run that comes to the same numbers.

[Note: rounding at random]
Adam's second moment moves by a thousandth of itself in a step, and bf16 has one number for each 256th: rounded to the
nearest it would stay where it is for good. Rounded up with the probability of what is cut off, it is right on the mean.

The random numbers are hashed from the name of the parameter, the element's place in it, and the number of the step. So
there is no generator whose state has to be saved; and the same element is rounded the same way wherever it
lies, on any number of ranks, in any buckets, and in a run that was resumed.
"""

from __future__ import annotations

import zlib
from typing import Any

import torch
from torch import Tensor

from .. import devices

_MASK = 2**32 - 1
_FACTORS = 0x7FEB352D, 0x846CA68B
"""Those of Chris Wellons' ``lowbias32``, with shifts of 16, 15 and 16: each bit of what comes in flips each of what
comes out in about half of all cases."""


def mixed(word: Any) -> Any:
    """The hash of one number in [0, 2**32): of Python, or in a tensor of int64."""
    word = word ^ (word >> 16)
    word = word * _FACTORS[0] & _MASK
    word = word ^ (word >> 15)
    # A product in int64 may wrap, and its lower half is right all the same.
    word = word * _FACTORS[1] & _MASK
    return word ^ (word >> 16)


def first_place(name: str, element: int) -> int:
    """The place of an element of a parameter, counted in the order of its memory. Its neighbours' places follow."""
    return signed(zlib.crc32(name.encode()) + element)


def key_of_step(step: float | Tensor, number: int) -> int | Tensor:
    """The number that the hashes of one step have in common.

    Args:
        step: the number of the step; one in a tensor on a device is not read by the host.
        number: tells apart the hashes that one step needs several of for the same elements.
    """
    if isinstance(step, Tensor) and step.device.type != "cpu":
        key: Tensor = mixed(mixed(step.reshape(()).to(torch.int64)) ^ number)
        return key.to(torch.int32)  # wraps into the sign
    return signed(mixed(mixed(int(step)) ^ number))


def draw(places: Tensor, key: int | Tensor) -> Tensor:
    """32 random bits for each of ``places``, in a new tensor; both are int32."""
    word = places.bitwise_xor(key)
    # A shift of int32 copies the sign, which is no bit of the number: hence the masks.
    word ^= (word >> 16).bitwise_and_(0xFFFF)
    word *= signed(_FACTORS[0])
    word ^= (word >> 15).bitwise_and_(0x1FFFF)
    word *= signed(_FACTORS[1])
    word ^= (word >> 16).bitwise_and_(0xFFFF)
    return word


def halves(bits: Tensor) -> tuple[Tensor, Tensor]:
    """Two numbers in [0, 2**16) from 32 random bits each, in int32."""
    return bits & 0xFFFF, (bits >> 16).bitwise_and_(0xFFFF)


def round_at_random_(rounded: Tensor, values: Tensor, chances: Tensor) -> None:
    """Writes fp32 ``values`` to ``rounded``, in bf16: away from zero with the probability of what is cut off, else
    towards it.

    NaN stays NaN, and what is infinite stays so. A value that bf16 has is not changed.

    Args:
        rounded, values: 1-D and contiguous.
        chances: int32 in [0, 2**16), of which an element is rounded away from zero with as many as its lower half says.
    """
    # The lower half of an fp32 number is what bf16 lacks. Its sum with a chance carries into the upper half as often as
    # the number should be rounded up; the exponent takes the carry where the mantissa is full.
    moved = values.view(torch.int32) + chances
    rounded.view(torch.int16).copy_(moved.bitwise_right_shift_(16))
    # The carry of a NaN would run into the sign, or leave infinity. On the host a sum tells whether there may be one,
    # at a tenth of the time.
    if not devices.is_on_host(values.device) or bool(values.sum().isnan()):
        rounded.masked_fill_(values.isnan(), torch.nan)


def signed(word: int) -> int:
    """The number in int32 that has the bits of ``word`` modulo 2**32."""
    word &= _MASK
    return word - 2**32 if word >= 2**31 else word
