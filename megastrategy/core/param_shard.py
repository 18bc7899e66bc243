"""The part of one parameter that one rank steps: a flat shard, or all of it."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True)
class ParamShard:
    """The part of one parameter that this rank steps.

    Attributes:
        param: index in the layout.
        start, end: the part of the parameter, in elements of its memory order.
        main: what the optimizer updates: fp32 memory of its own for 16-bit weights, else the weights themselves. Flat
            if the parameter is cut, of the parameter's shape if not.
        weights: the part of the parameter that ``main`` stands for, of the shape of ``main``, in the parameter buffer;
            None if every rank has all of the parameter, which may be re-pointed at any time.
        flat, offset: if the parameter is cut, ``main`` is the part of this 1-D tensor that begins there, among the
            mains of its neighbours.
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
        """Whether it is a flat shard: not if it is the whole parameter, on its owner or on every rank."""
        return self.flat is not None


def take_outside_changes(main: Tensor, weights: Tensor) -> None:
    """A main param takes the 16-bit weights' values where they are not its rounding; see sharded_step's
    [Note: main params]."""
    # NaN differs from itself, so a NaN in the weights is taken over too. Compared element by element: a checkpoint
    # loaded in 16 bits must not round the main params that it agrees with.
    changed = main.to(weights.dtype) != weights
    torch.where(changed, weights.float(), main, out=main)
