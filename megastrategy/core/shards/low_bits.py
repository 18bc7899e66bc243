"""Keeps only the low bits of fp32 main params that their bf16 weights lack, exactly: 17 bits an element instead of 32.

[Note: the low bits of main params]
As integers, the bits of a main param and those of its weight (followed by 16 zeros) differ by -2**15 to 2**15, since a
weight is its main param rounded to the nearest. These are 65,537 differences, one more than 16 bits can represent. The
extra case is a main param half way between two weights: it is rounded to the even one of the two, from below or from
above, and both have that weight. No choice of 16 bits for an element changes that, so there is a 17th bit for each
element, eight in a byte, set where the difference is +2**15. (apex has 16 bits and rounds from half way up. Then main
params are exact, and one weight in some 130,000 is not torch's rounding.)

A weight that user code changes keeps its difference, less than half a unit in its own last place. Where weight and
difference would not round to the weight (next to zero, at infinity) the main param is the weight itself.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from .. import devices


class Bitmap:
    """A bit for each element, eight in a byte of the caller's tensor ``held`` (uint8, 1-D)."""

    def __init__(self, held: Tensor) -> None:
        self.held = held

    def read(self, start: int, end: int) -> Tensor | None:
        """Returns the bits of elements ``[start, end)`` as a new bool tensor. On the host None if none is set."""
        first = start // 8
        held = self.held[first : -(-end // 8)]
        if devices.is_on_host(held.device) and not bool(held.any()):  # nearly always
            return None
        shifts = torch.arange(8, dtype=torch.uint8, device=held.device)
        bits = (held.unsqueeze(1) >> shifts).bitwise_and_(1).view(-1)
        return bits[start - 8 * first : end - 8 * first].bool()

    def write_(self, start: int, numbers: Tensor, largest: int) -> None:
        """Sets the bit of each element from ``start`` on whose number is ``largest``, and clears the others.

        ``numbers``: none is above ``largest``, except those of NaN, which have no meaning.
        """
        first, end = start // 8, start + numbers.numel()
        held = self.held[first : -(-end // 8)]
        # On the host finding the largest number takes a tenth of comparing each.
        has_bits = not devices.is_on_host(held.device) or bool(held.any())
        if not has_bits and (not numbers.numel() or int(numbers.amax()) < largest):
            return
        # Bits of other elements in the first and last byte stay as they are.
        shifts = torch.arange(8, dtype=torch.uint8, device=held.device)
        every = (held.unsqueeze(1) >> shifts).bitwise_and_(1).view(-1)
        every[start - 8 * first : end - 8 * first] = numbers == largest
        held.copy_((every.view(-1, 8) << shifts).sum(1, dtype=torch.uint8))


@dataclasses.dataclass(frozen=True, eq=False)
class LowBits:
    """The low bits of some main params; see [Note: the low bits of main params].

    Attributes:
        low: int16, 1-D: the differences; 2**15 wraps to -2**15.
        bitmap, first: the bitmap's bits from ``first`` on belong to ``low``, and are set for 2**15.
    """

    low: Tensor
    bitmap: Bitmap
    first: int

    def part(self, low: Tensor, start: int) -> LowBits:
        """Returns the low bits of the elements from ``start`` on; ``low``: that slice of this object's ``low``."""
        return LowBits(low, self.bitmap, self.first + start)

    def join(self, weights: Tensor) -> Tensor:
        """Returns the main params, fp32, in memory of their own.

        Where these do not round to the weight, see :func:`.param_shard.take_outside_changes`.
        """
        bits = weights.view(torch.int16).to(torch.int32).bitwise_left_shift_(16).add_(self.low)
        if (is_half := self.bitmap.read(self.first, self.first + self.low.numel())) is not None:
            bits.add_(is_half, alpha=2**16)
        return bits.view(torch.float32)

    def split_(self, main: Tensor, weights: Tensor) -> None:
        """Stores the difference between ``main`` and ``weights``, which are its rounding."""
        bits = weights.view(torch.int16).to(torch.int32).bitwise_left_shift_(16)
        difference = torch.sub(main.view(torch.int32), bits, out=bits)
        self.bitmap.write_(self.first, difference, 2**15)
        self.low.copy_(difference)
