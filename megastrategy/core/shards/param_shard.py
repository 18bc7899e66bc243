"""The part of one parameter that one rank steps: a flat shard, or all of it.

[Note: remainders of sent changes]
With ``param_wire_dtype`` owners send rounded changes of fp32 weights, and add the same rounded changes to their own
weights, so that all ranks have the same bits. The owner keeps what rounding left out, the *remainder*: between steps
``main`` is the remainder. A step begins with ``main += weights``, which gives the exact weights, and ends with ``main
-= weights`` after the weights have changed by the rounded change. So nothing is lost, only delayed. Weights that user
code writes between steps are the ones that the next step begins with, without a search for changes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import torch
from torch import Tensor

from .. import devices
from ..wire import publish_change_


@dataclasses.dataclass(frozen=True)
class ParamShard:
    """The part of one parameter that this rank steps.

    Attributes:
        param: index in the layout.
        start, end: the range of the parameter, in elements of its memory order.
        main: the tensor that the optimizer updates: an fp32 main param for 16-bit weights and for weights that are sent
            as changes, otherwise the weights themselves. Flat if the parameter is cut, otherwise of its shape.
        weights: the same range of the param buffer, of the shape of ``main``; None if every rank has all of the
            parameter, whose memory user code may replace at any time.
        flat, offset: if the parameter is cut: the 1-D tensor of the mains of neighbours, in which ``main`` begins here.
        keeps_remainder: see [Note: remainders of sent changes].
    """

    param: int
    start: int
    end: int
    main: Tensor
    weights: Tensor | None
    flat: Tensor | None = None
    offset: int = 0
    keeps_remainder: bool = False

    @property
    def numel(self) -> int:
        return self.end - self.start

    @property
    def is_cut(self) -> bool:
        """True for a flat shard; False for the whole parameter, on its owner or on every rank."""
        return self.flat is not None


def take_outside_changes(main: Tensor, weights: Tensor, dtype: torch.dtype) -> None:
    """Writes the weights into a main param that does not round to them; see sharded_optimizer's [Note: main params].

    Args:
        main: fp32.
        weights: of the shape of ``main``, in their dtype or exactly in fp32.
        dtype: of the parameter, 16 bits.
    """
    rounded = main.to(dtype)
    # Nearly always nothing has changed. On the host a comparison of all bits takes a third of the time of the rest.
    if devices.is_on_host(main.device) and torch.equal(rounded.view(torch.int16), weights.view(torch.int16)):
        return
    # NaN differs from itself, so a NaN in the weights is copied too. Element by element: a checkpoint loaded in 16 bits
    # must not round the main params that agree with it.
    changed = rounded != weights
    torch.where(changed, weights.float(), main, out=main)


def begin_step(main: Tensor, weights: Tensor, *, keeps_remainder: bool) -> None:
    """Prepares a main param for the optimizer's step: adds the weights to a remainder, or adopts outside changes."""
    if keeps_remainder:
        main.add_(weights)
    else:
        take_outside_changes(main, weights, weights.dtype)


def end_step(main: Tensor, weights: Tensor, change: Tensor | None) -> None:
    """Writes the stepped main param into the weights: rounded to their dtype, or as a change that is sent.

    Args:
        main, weights: dense, of the same shape and strides.
        change: 1-D, as many elements in memory order, sent to other ranks afterwards; None where weights are sent.
    """
    if change is None:
        weights.copy_(main)
    else:
        publish_change_(_flat(main), _flat(weights), change)


def drop_remainders(mains: Iterable[tuple[Tensor, bool]]) -> None:
    """Zeroes remainders after a failed step: a main param may be anything between a remainder and a stepped value.

    ``mains``: each with its ``keeps_remainder``.
    """
    for main, keeps_remainder in mains:
        if keeps_remainder:
            main.zero_()


def _flat(dense: Tensor) -> Tensor:
    return dense.as_strided((dense.numel(),), (1,))
