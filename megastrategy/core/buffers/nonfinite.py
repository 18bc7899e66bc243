"""Finds where a gradient stopped being finite, rank, parameter and bucket, before a reduction spreads it."""

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
    """A gradient with ``count`` of ``numel`` elements not finite, as it was on one rank, no other rank's added;
    ``count`` is None where nobody counted. ``rank`` is the rank's name."""

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
    # aminmax raises for no elements.
    if tensor.numel() == 0:
        return True
    # One pass, and NaN spreads through it: isfinite() would make a mask, a byte for each element of the bucket.
    smallest, largest = torch.aminmax(torch.view_as_real(tensor) if tensor.is_complex() else tensor)
    return math.isfinite(smallest.item()) and math.isfinite(largest.item())


class FiniteCheck:
    """Looks at one rank's gradients before they are sent, and tells at the end of the backward what was not finite.

    [Note: looking without waiting]
    A rank's own gradient is gone when its bucket is on the wire, so it is looked at before. On an accelerator the host
    would wait for all of backward so far, in each bucket's hook. So the largest magnitude of each gradient stays there,
    one kernel a bucket, and the host reads all of them at once when backward has ended.

    Args:
        rank: its name.
        before_read: called before the host reads the device, which may wait for another rank: for weights that came
            under the forward, or for the sums of pieces.
    """

    def __init__(self, rank: str, before_read: Callable[[torch.device], object] = lambda _: None) -> None:
        self.rank, self._before_read = rank, before_read
        self._found: list[NonFinite] = []
        self._unread: list[tuple[Sequence[int], BufferLayout, Tensor]] = []  # parameters, and a flag for each

    def check_bucket(self, tensor: Tensor, bucket: int, layout: BufferLayout) -> None:
        """``tensor``: 1-D, the bucket's elements."""
        # One look for the whole bucket; its parameters one by one only after something was found.
        if devices.is_on_host(tensor.device) and is_finite(tensor):
            return
        place, slots = layout.buckets[bucket], layout.slots
        self.check_grads(
            {i: tensor[slots[i].start - place.start : slots[i].end - place.start] for i in place.params}, layout
        )

    def check_grads(self, grads: Mapping[int, Tensor], layout: BufferLayout) -> None:
        """``grads``: by parameter, of any shape."""
        # A norm of no elements raises.
        grads = {index: grad for index, grad in grads.items() if grad.numel() > 0}
        if not grads:
            return
        if not devices.is_on_host(next(iter(grads.values())).device):
            # See [Note: looking without waiting]. NaN spreads through the largest magnitude, and no sum can overflow.
            norms = torch.stack(list(torch._foreach_norm(list(grads.values()), math.inf)))
            self._unread.append((list(grads), layout, norms.isfinite()))
            return
        for index, grad in grads.items():
            if not is_finite(grad):
                self._note(index, layout, int((~grad.isfinite()).sum()))

    def found(self) -> list[NonFinite]:
        """Returns what was not finite so far. Waits for the device once, if it was looked at there."""
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
        """Forgets what was seen."""
        self._found.clear()
        self._unread.clear()

    def _note(self, param: int, layout: BufferLayout, count: int | None) -> None:
        spec, bucket = layout.params[param], layout.slots[param].bucket
        self._found.append(NonFinite(self.rank, spec.name, bucket, count, spec.numel))


def describe_nonfinite(found: Sequence[NonFinite]) -> str:
    """The message for all ranks."""
    lines = "; ".join(str(item) for item in found[:10]) + ("; ..." if len(found) > 10 else "")
    return (
        f"gradients were not finite before they were reduced: {lines}. Look first at the parameter that comes last in "
        "the model: backward reached it first. With a GradScaler such steps are skipped on purpose: set "
        "check_for_nan_in_grad=False there"
    )
