"""Finds where a gradient stopped being finite, rank, parameter and bucket, before a reduction spreads it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .layout import BufferLayout


@dataclasses.dataclass(frozen=True)
class NonFinite:
    """A gradient with ``count`` of ``numel`` elements not finite, as it was on one rank, no other rank's added."""

    rank: int
    param: str
    bucket: int
    count: int
    numel: int

    def __str__(self) -> str:
        where = f"rank {self.rank}, parameter {self.param!r} (bucket {self.bucket})"
        return f"{where}: {self.count} of {self.numel} elements"


def is_finite(tensor: Tensor) -> bool:
    """Whether no element is infinite or NaN. Waits for the device; makes no temporary as large as the tensor."""
    # aminmax raises for no elements.
    if tensor.numel() == 0:
        return True
    # One pass, and NaN spreads through it: isfinite() would make a mask, a byte for each element of the bucket.
    smallest, largest = torch.aminmax(torch.view_as_real(tensor) if tensor.is_complex() else tensor)
    return math.isfinite(smallest.item()) and math.isfinite(largest.item())


def find_in_bucket(tensor: Tensor, bucket: int, layout: BufferLayout, rank: int) -> list[NonFinite]:
    """The parameters of a bucket whose gradients in ``tensor`` (1-D, the bucket's elements) are not finite."""
    # One look for the whole bucket; its parameters one by one only after something was found.
    if is_finite(tensor):
        return []
    place = layout.buckets[bucket]
    grads = {i: tensor[layout.slots[i].start - place.start : layout.slots[i].end - place.start] for i in place.params}
    return [found for index, grad in grads.items() for found in find_in_grad(grad, index, layout, rank)]


def find_in_grad(grad: Tensor, param: int, layout: BufferLayout, rank: int) -> list[NonFinite]:
    """One entry if the gradient (any shape) of parameter ``param`` is not finite, else none."""
    if is_finite(grad):
        return []
    count = int((~grad.isfinite()).sum())
    return [NonFinite(rank, layout.params[param].name, layout.slots[param].bucket, count, grad.numel())]


def describe_nonfinite(found: Sequence[NonFinite]) -> str:
    """The message for all ranks."""
    lines = "; ".join(str(item) for item in found[:10]) + ("; ..." if len(found) > 10 else "")
    return (
        f"gradients were not finite before they were reduced: {lines}. Look first at the parameter that comes last in "
        "the model: backward reached it first. With a GradScaler such steps are skipped on purpose: set "
        "check_for_nan_in_grad=False there"
    )
