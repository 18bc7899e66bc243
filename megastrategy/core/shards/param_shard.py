"""The part of one parameter that one rank steps: a flat shard, or all of it."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from .. import devices


@dataclasses.dataclass(frozen=True)
class ParamShard:
    """The part of one parameter that this rank steps.

    Attributes:
        param: index in the layout.
        start, end: the range of the parameter, in elements of its memory order.
        main: the tensor that the optimizer updates: an fp32 main param for 16-bit weights, otherwise the
            weights themselves. Flat if the parameter is cut, otherwise of its shape.
        weights: the same range of the param buffer, of the shape of ``main``; None if every rank has all of the
            parameter, whose memory user code may replace at any time.
        flat, offset: if the parameter is cut: the 1-D tensor of the mains of neighbours, in which ``main`` begins here.
    """

    param: int
    start: int
    end: int
    main: Tensor
    weights: Tensor | None
    flat: Tensor | None = None
    offset: int = 0

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
