"""The part of one parameter that one rank steps: a flat shard, or all of it.

[Note: remainders of sent changes]
With ``param_wire_dtype`` owners send rounded changes of fp32 weights, which they add to their own weights too, so that
all ranks hold the same bits. What rounding left out is the owner's to keep: it is what ``main`` holds between steps. A
step begins with ``main += weights``, which are the exact weights then, and ends with ``main -= weights``, when those
have changed by what could be sent. So nothing is lost but for a while; and weights that user code writes
are those that the next step begins with, without being looked for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from .. import devices
from ..wire import publish_change_

if TYPE_CHECKING:  # only those import it who ask for it
    from .low_bits import LowBits


class HasMain(Protocol):
    """Something with a ``main`` that may keep remainders."""

    @property
    def main(self) -> Tensor: ...

    @property
    def keeps_remainder(self) -> bool: ...


@dataclasses.dataclass(frozen=True)
class ParamShard:
    """The part of one parameter that this rank steps.

    Attributes:
        param: index in the layout.
        start, end: the part of the parameter, in elements of its memory order.
        main: what the optimizer updates: fp32 memory of its own for 16-bit weights and those that are sent as changes,
            else the weights themselves. Flat if the parameter is cut, of the parameter's shape if not. With ``bits``
            it is their ``low``, and the optimizer updates fp32 values that are made for the step.
        weights: the part of the parameter that ``main`` stands for, of the shape of ``main``, in the parameter buffer;
            None if every rank has all of the parameter, which may be re-pointed at any time.
        flat, offset: if the parameter is cut, ``main`` is the part of this 1-D tensor that begins there, among the
            mains of its neighbours.
        keeps_remainder: see [Note: remainders of sent changes].
        bits: the low bits of the main param, where only these are kept; see low_bits'
            [Note: the low bits of main params].
    """

    param: int
    start: int
    end: int
    main: Tensor
    weights: Tensor | None
    flat: Tensor | None = None
    offset: int = 0
    keeps_remainder: bool = False
    bits: LowBits | None = None

    @property
    def numel(self) -> int:
        return self.end - self.start

    @property
    def main_dtype(self) -> torch.dtype:
        """That of what the optimizer updates."""
        return self.main.dtype if self.bits is None else torch.float32

    def main_param(self) -> Tensor:
        """``main``; or the main param that is made of weights and bits, in memory of its own."""
        if self.bits is None:
            return self.main
        assert self.weights is not None, "sharded"
        main = self.bits.join(self.weights)
        take_outside_changes(main, self.weights, self.weights.dtype)
        return main

    def set_main_param(self, value: Tensor) -> None:
        """Takes over what :meth:`main_param` returned, here or on another rank. Of what has bits those are taken,
        whatever the weights are now: they may be loaded later."""
        if self.bits is None:
            self.main.copy_(value)
        else:
            value = value.to(self.main.device, torch.float32)
            self.bits.split_(value, value.to(torch.bfloat16))

    @property
    def is_cut(self) -> bool:
        """Whether it is a flat shard: not if it is the whole parameter, on its owner or on every rank."""
        return self.flat is not None


def take_outside_changes(main: Tensor, weights: Tensor, dtype: torch.dtype) -> None:
    """Writes the weights into a main param that does not round to them; see sharded_optimizer's [Note: main params].

    Args:
        main: fp32.
        weights: of the shape of ``main``, as they are or exactly in fp32.
        dtype: of the parameter, 16 bits.
    """
    rounded = main.to(dtype)
    # Nearly always nothing has changed. On the host a look at all bits finds that in a third of the time of the rest.
    if devices.is_on_host(main.device) and torch.equal(rounded.view(torch.int16), weights.view(torch.int16)):
        return
    # NaN differs from itself, so a NaN in the weights is taken over too. Compared element by element: a checkpoint
    # loaded in 16 bits must not round the main params that it agrees with.
    changed = rounded != weights
    torch.where(changed, weights.float(), main, out=main)


def begin_step(main: Tensor, weights: Tensor, *, keeps_remainder: bool) -> None:
    """Makes ``main`` what the optimizer steps in the place of the weights that it stands for."""
    if keeps_remainder:
        main.add_(weights)
    else:
        take_outside_changes(main, weights, weights.dtype)


def end_step(main: Tensor, weights: Tensor, change: Tensor | None, bits: LowBits | None) -> None:
    """Brings the weights what the optimizer did to ``main``: rounded to their dtype, or by a change that is sent.

    Args:
        main, weights: dense, of the same shape and strides.
        change: 1-D, as many elements in memory order, and sent to others afterwards; None where weights are sent.
        bits: take what the weights lack of ``main`` then; None where that stays.
    """
    if change is None:
        weights.copy_(main)
        if bits is not None:
            bits.split_(main, weights)
    else:
        publish_change_(_flat(main), _flat(weights), change)


def drop_remainders(stepped: Iterable[HasMain]) -> None:
    """Forgets what others were not sent: it is unknown how much of it ``main`` holds."""
    for each in stepped:
        if each.keeps_remainder:
            each.main.zero_()


def _flat(dense: Tensor) -> Tensor:
    return dense.as_strided((dense.numel(),), (1,))
