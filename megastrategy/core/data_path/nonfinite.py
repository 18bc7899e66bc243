"""Finds the rank, parameter and bucket of a gradient that is not finite, before a reduction spreads it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from .. import devices
from ..layout import BufferLayout


@dataclasses.dataclass(frozen=True)
class NonFinite:
    """A gradient of one rank, before others are added, with ``count`` of ``numel`` elements not finite (None: not
    counted). ``rank`` is the rank's name in messages."""

    rank: str
    param: str
    bucket: int
    count: int | None
    numel: int

    def __str__(self) -> str:
        where = f"{self.rank}, parameter {self.param!r} (bucket {self.bucket})"
        return f"{where}: {'some' if self.count is None else self.count} of {self.numel} elements"


def is_finite(tensor: Tensor) -> bool:
    """Whether no element is infinite or NaN. Waits for the device; makes no temporary as large as the tensor."""
    # aminmax raises if there are no elements.
    if tensor.numel() == 0:
        return True
    # One pass, and NaN spreads through it. isfinite() would make a mask with a byte per element of the bucket.
    smallest, largest = torch.aminmax(torch.view_as_real(tensor) if tensor.is_complex() else tensor)
    return math.isfinite(smallest.item()) and math.isfinite(largest.item())


class FiniteCheck:
    """Checks one rank's gradients before they are sent, and reports those that were not finite at the
    end of the backward.

    [Note: checking without a wait for the device]
    A rank's own gradient is overwritten when its bucket is on the wire, so it is checked before. On an accelerator the
    host would wait, in each bucket's hook, for all of backward so far. So the largest magnitude of each gradient stays
    on the device, one kernel per bucket, and the host reads all of them at once when backward has ended.

    ``rank``: its name. ``before_read`` is called before the host reads the device, a read that may wait for another
    rank: for weights that are gathered under the forward, or for the sums of pieces.
    """

    def __init__(self, rank: str, before_read: Callable[[torch.device], object] = lambda _: None) -> None:
        self.rank = rank
        self._before_read = before_read
        self._found: list[NonFinite] = []
        self._unread: list[tuple[Sequence[int], BufferLayout, Tensor]] = []  # parameters, and a flag for each

    def check_bucket(self, tensor: Tensor, bucket: int, layout: BufferLayout) -> None:
        """Checks the elements of a bucket, a 1-D ``tensor``."""
        # One check of the whole bucket; its parameters are checked one by one only if it fails.
        if devices.is_on_host(tensor.device) and is_finite(tensor):
            return
        place = layout.buckets[bucket]
        slots = layout.slots
        self.check_grads(
            {i: tensor[slots[i].start - place.start : slots[i].end - place.start] for i in place.params}, layout
        )

    def check_grads(self, grads: Mapping[int, Tensor], layout: BufferLayout) -> None:
        """Checks gradients of any shape, by parameter."""
        # A norm raises if there are no elements.
        grads = {index: grad for index, grad in grads.items() if grad.numel() > 0}
        if not grads:
            return
        if not devices.is_on_host(next(iter(grads.values())).device):
            # See [Note: checking without a wait for the device]. NaN spreads through the largest magnitude, and
            # no sum can overflow.
            norms = torch.stack(list(torch._foreach_norm(list(grads.values()), math.inf)))
            self._unread.append((list(grads), layout, norms.isfinite()))
            return
        for index, grad in grads.items():
            if not is_finite(grad):
                self._note(index, layout, int((~grad.isfinite()).sum()))

    def found(self) -> list[NonFinite]:
        """Returns the gradients that were not finite so far. Waits for the device once, if any were checked there."""
        if self._unread:
            joined = torch.cat([flags for _, _, flags in self._unread])
            self._before_read(joined.device)
            flags = joined.tolist()
            params = [(index, layout) for indices, layout, _ in self._unread for index in indices]
            self._unread.clear()
            for (index, layout), flag in zip(params, flags, strict=True):
                if not flag:
                    self._note(index, layout, None)
        return list(self._found)

    def clear(self) -> None:
        """Forgets all findings."""
        self._found.clear()
        self._unread.clear()

    def _note(self, param: int, layout: BufferLayout, count: int | None) -> None:
        spec = layout.params[param]
        bucket = layout.slots[param].bucket
        self._found.append(NonFinite(self.rank, spec.name, bucket, count, spec.numel))


def describe_nonfinite(found: Sequence[NonFinite]) -> str:
    """Returns the message for all ranks."""
    lines = "; ".join(str(item) for item in found[:10]) + ("; ..." if len(found) > 10 else "")
    return (
        f"gradients were not finite before they were reduced: {lines}. Look first at the parameter that comes last in "
        "the model: backward reached it first. With a GradScaler such steps are skipped on purpose: set "
        "check_for_nan_in_grad=False there"
    )
