"""Norms and zeros over owned shards, clipping, and one answer on all ranks to "is any gradient not finite?".

Each rank sums over the elements it owns, so every element counts once, however often a parameter is tied or used. The
partial results are gathered and combined in rank order, which gives every rank the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..collectives import Collectives
from ..layout import SIXTEEN_BIT_DTYPES


def total_grad_norm(
    grads: Sequence[Tensor], norm_type: float, collectives: Collectives | None, device: torch.device
) -> Tensor:
    """The norm of all gradients on all ranks: a scalar on ``device``, the same bits on every rank; in fp64, or in fp32
    on a device that has no fp64.

    Args:
        grads: what this rank owns (all gradients, if ``collectives`` is None).
        norm_type: p of the p-norm; ``inf`` for the largest absolute value.
        collectives: the ranks that own the rest. Collective if given.
    """
    # 0 for a rank that owns nothing: it takes part in the gather, or the others would wait for it.
    own = zero_norms(1, device)
    if grads:
        own = _join_norms(norms_of(grads, norm_type, own.dtype), norm_type).reshape(1)
    return own[0] if collectives is None else norms_over_owners(own, norm_type, collectives)[0]


def zero_norms(number: int, device: torch.device) -> Tensor:
    """So many norms of nothing, in the dtype in which norms are joined: fp64, and fp32 where a device has no fp64."""
    try:
        return torch.zeros(number, dtype=torch.float64, device=device)
    except (TypeError, RuntimeError):  # Apple's GPUs and some of Intel's; whatever else is wrong is so in fp32 too
        return torch.zeros(number, dtype=torch.float32, device=device)


def norms_of(grads: Sequence[Tensor], norm_type: float, dtype: torch.dtype) -> Tensor:
    """The norm of each gradient: 1-D, in ``dtype``, of at least fp32. A few kernels for all gradients of one dtype."""
    some = [grad for grad in grads if grad.numel()]
    # 0 for each of those without elements: a kernel has no largest of none.
    norms = [torch.zeros(len(grads) - len(some), dtype=dtype, device=grads[0].device)]
    for kind in dict.fromkeys(grad.dtype for grad in some):
        # Asked for in fp32: a norm in 16 bits would be rounded before it is joined with thousands of others.
        wider = torch.float32 if kind in SIXTEEN_BIT_DTYPES else None
        of_kind = [grad for grad in some if grad.dtype == kind]
        norms.append(torch.stack(list(torch._foreach_norm(of_kind, norm_type, dtype=wider))).to(dtype))
    return torch.cat(norms)


def norms_over_owners(own: Tensor, norm_type: float, collectives: Collectives) -> Tensor:
    """The norms of several things of which each rank has a part, from the norms of its parts.

    ``own`` (see :func:`zero_norms`) and the result are 1-D and of one dtype, one number a thing; the same bits on every
    rank. Collective.
    """
    # Gathered, not summed by an all-reduce: every rank then adds in the order of the ranks, and gets the same bits.
    # Ranks that clip by norms of different bits part for good.
    return _join_norms(_gathered(own, collectives), norm_type)


def count_zeros(tensors: Sequence[Tensor], groups: Sequence[Collectives], device: torch.device) -> Tensor:
    """The number of elements that are zero: an int64 scalar on ``device``, the same on every rank of the groups.

    Args:
        tensors: what this rank answers for.
        groups: those among which the rest is divided. Collective over each, in this order.
    """
    zeros = [tensor.numel() - torch.count_nonzero(tensor) for tensor in tensors]
    own = torch.stack(zeros).sum() if zeros else torch.zeros((), dtype=torch.int64, device=device)
    for collectives in groups:
        own = _gathered(own.reshape(1), collectives).sum()
    return own


def _gathered(own: Tensor, collectives: Collectives) -> Tensor:
    """Each rank's ``own``, 1-D and as long on every rank, as a row of a table. Collective."""
    table = own.new_zeros(collectives.size, own.numel())
    table[collectives.rank] = own
    collectives.all_gather(table.view(-1)).wait()
    return table


def _join_norms(norms: Tensor, norm_type: float) -> Tensor:
    """The norm of what parts have these norms (first dimension)."""
    # Powers and roots of infinity are 0, 1 or NaN; the norm is the largest of the parts'.
    if math.isinf(norm_type):
        return norms.amax(0)
    joined: Tensor = (norms**norm_type).sum(0) ** (1.0 / norm_type)
    return joined


def scale_to_norm_(grads: Sequence[Tensor], total_norm: Tensor, max_norm: float) -> None:
    """Multiplies the gradients in place so that their total norm is at most ``max_norm`` (torch's formula, no host
    sync)."""
    # 1e-6 is torch's. Clamped and always multiplied: a comparison would make the host wait for the device.
    coefficient = torch.clamp(max_norm / (total_norm + 1e-6), max=1.0)
    if grads:
        # A foreach kernel refuses an empty list, which a rank without a shard has.
        torch._foreach_mul_(list(grads), coefficient)


def check_finite(total_norm: Tensor, norm_type: float) -> None:
    """Raises RuntimeError, as torch's ``clip_grad_norm_(error_if_nonfinite=True)`` does, on every rank alike."""
    # Waits for the device, so it is asked for only where the caller wants the error.
    if not bool(torch.isfinite(total_norm)):
        raise RuntimeError(
            f"the total norm of order {norm_type} of the gradients is {total_norm.item()}, so it cannot be clipped. "
            "To clip non-finite gradients anyway, pass error_if_nonfinite=False"
        )


def unscale_grads_(
    grads: Sequence[Tensor], inv_scale: Tensor, collectives: Collectives | None, device: torch.device
) -> Tensor:
    """Multiplies the owned gradients by ``inv_scale`` (one element, fp32) in place.

    Returns 1.0 (shape (1,), fp32) on every rank if any rank met a gradient that is not finite, else 0.0. Collective if
    ``collectives`` is given.
    """
    found_inf = torch.zeros(1, dtype=torch.float32, device=device)
    # The kernel takes tensors of one dtype; it adds its finding to found_inf, so calls join.
    for dtype in dict.fromkeys(grad.dtype for grad in grads):
        torch._amp_foreach_non_finite_check_and_unscale_(
            [grad for grad in grads if grad.dtype == dtype], found_inf, inv_scale.to(device)
        )
    if collectives is not None:
        collectives.all_reduce_max(found_inf).wait()
    return found_inf
