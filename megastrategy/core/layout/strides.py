"""Strides of tensors without gaps. No tensors."""

from __future__ import annotations

from collections.abc import Sequence


def dense_stride(shape: Sequence[int], stride: Sequence[int]) -> tuple[int, ...]:
    """Returns ``stride`` if it covers ``prod(shape)`` adjacent elements once each, otherwise contiguous strides."""
    expected = 1
    # Dimensions of size one have any stride, and leave no gaps.
    for size, step in sorted(((n, s) for n, s in zip(shape, stride, strict=True) if n > 1), key=lambda pair: pair[1]):
        if step != expected:
            return contiguous_stride(shape)
        expected *= size
    return tuple(stride)


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """Returns the row-major strides of ``shape``, in elements."""
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))
