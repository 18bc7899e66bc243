"""Keeps of fp32 main params what their bf16 weights lack, exactly: 17 bits an element instead of 32.

[Note: the low bits of main params]
As whole numbers, the bits of a main param and those of its weight (with 16 zeros behind) differ by -2**15 to 2**15: a
weight is its main param's rounding to the nearest. Those are 65,537 differences, one more than 16 bits can tell apart.
The one too many is a main param that lies half way between two weights: it is rounded to the even one of the two, from
below or from above, and both have that weight. No choice of 16 bits for an element changes that, so there is a 17th: a
bit for each element, eight in a byte, set where the difference is +2**15. (apex has 16 bits and rounds from half way
up. Then main params are exact, and one weight in some 130,000 is not what torch rounds its own to.)

A weight that user code changes keeps the difference, less than half a unit in its own last place. Where
that would not be the rounding of any main param (beside zero, at infinity) the weight is taken as it is.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from .. import devices


class Bitmap:
    """A bit for each element, eight in a byte of ``held`` (uint8, 1-D), which is the caller's."""

    def __init__(self, held: Tensor) -> None:
        self.held = held

    def read(self, start: int, end: int) -> Tensor | None:
        """The bits of elements ``[start, end)``: bool, in a tensor of its own. On the host None, if none is set."""
        first = start // 8
        held = self.held[first : -(-end // 8)]
        if devices.is_on_host(held.device) and not bool(held.any()):  # nearly always
            return None
        shifts = torch.arange(8, dtype=torch.uint8, device=held.device)
        bits = (held.unsqueeze(1) >> shifts).bitwise_and_(1).view(-1)
        return bits[start - 8 * first : end - 8 * first].bool()

    def write_(self, start: int, numbers: Tensor, largest: int) -> None:
        """Sets, of the elements from ``start`` on, those whose number is ``largest``, and no others.

        Args:
            numbers: none is above ``largest``, but for those of NaN, which mean nothing.
        """
        first, end = start // 8, start + numbers.numel()
        held = self.held[first : -(-end // 8)]
        # On the host a look for the largest is a tenth of a comparison of each.
        has_bits = not devices.is_on_host(held.device) or bool(held.any())
        if not has_bits and (not numbers.numel() or int(numbers.amax()) < largest):
            return
        # Those beside them in the first byte and in the last stay as they are.
        shifts = torch.arange(8, dtype=torch.uint8, device=held.device)
        every = (held.unsqueeze(1) >> shifts).bitwise_and_(1).view(-1)
        every[start - 8 * first : end - 8 * first] = numbers == largest
        held.copy_((every.view(-1, 8) << shifts).sum(1, dtype=torch.uint8))


@dataclasses.dataclass(frozen=True, eq=False)
class LowBits:
    """The bits that the weights of some elements lack; see [Note: the low bits of main params].

    Attributes:
        low: int16, 1-D: the differences, of which 2**15 wraps to -2**15.
        bitmap, first: the bits of ``low`` begin at this one; set for 2**15.
    """

    low: Tensor
    bitmap: Bitmap
    first: int

    def part(self, low: Tensor, start: int) -> LowBits:
        """The low bits of the elements from ``start`` on; ``low`` is the part of this one's."""
        return LowBits(low, self.bitmap, self.first + start)

    def join(self, weights: Tensor) -> Tensor:
        """The main params, fp32, in memory of their own; see :func:`.param_shard.take_outside_changes` for those whose
        rounding is not the weight."""
        bits = weights.view(torch.int16).to(torch.int32).bitwise_left_shift_(16).add_(self.low)
        if (is_half := self.bitmap.read(self.first, self.first + self.low.numel())) is not None:
            bits.add_(is_half, alpha=2**16)
        return bits.view(torch.float32)

    def split_(self, main: Tensor, weights: Tensor) -> None:
        """Takes what ``weights`` lack of ``main``, of which they are the rounding."""
        bits = weights.view(torch.int16).to(torch.int32).bitwise_left_shift_(16)
        difference = torch.sub(main.view(torch.int32), bits, out=bits)
        self.bitmap.write_(self.first, difference, 2**15)
        self.low.copy_(difference)
