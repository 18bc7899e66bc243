"""Norms and zeros over owned shards, clipping, and one answer on all ranks to "is any gradient not finite?".

Each rank sums over the elements that it owns, so every element counts once, however often a parameter is tied or used.
Partial results are gathered and combined in the order of the ranks, so every rank has the same bits.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence

import torch
from torch import Tensor

from ..collectives import Collectives
from ..layout import SIXTEEN_BIT_DTYPES

_dtype = operator.attrgetter("dtype")


def total_grad_norm(
    grads: Sequence[Tensor], norm_type: float, collectives: Collectives | None, device: torch.device
) -> Tensor:
    """Returns the norm of all gradients on all ranks: a scalar, the same bits on every rank.

    In fp64, or in fp32 on a device without fp64.

    Args:
        grads: the gradients that this rank owns; all gradients if ``collectives`` is None.
        norm_type: p of the p-norm; ``inf`` for the largest absolute value.
        collectives: the ranks that own the other gradients. Collective if given.
    """
    norms = _norms_of(grads, norm_type)
    # A rank that owns nothing takes part in the gather with 0, since the others wait for it.
    norm = zero_norms((), device) if norms is None else _join_norms(norms, norm_type)
    return norm if collectives is None else norms_over_owners(norm, norm_type, collectives)


def zero_norms(shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Returns zeros in the dtype in which norms are joined: fp64, or fp32 on a device without fp64."""
    try:
        return torch.zeros(shape, dtype=torch.float64, device=device)
    except (TypeError, RuntimeError):  # Apple's GPUs and some of Intel's; another error would occur in fp32 too
        return torch.zeros(shape, dtype=torch.float32, device=device)


def _norms_of(grads: Sequence[Tensor], norm_type: float) -> Tensor | None:
    """Returns the norms of gradients, in no order: 1-D, at least fp32, with a few kernels per gradient dtype; None if
    none has elements: the kernel of the infinity norm needs one."""
    some = list(itertools.compress(grads, map(Tensor.numel, grads)))
    norms = []
    for kind in dict.fromkeys(map(_dtype, some)):
        # In fp32: a norm in 16 bits would be rounded before it is joined with thousands of others.
        wider = torch.float32 if kind in SIXTEEN_BIT_DTYPES else None
        of_kind = list(itertools.compress(some, map(operator.is_, map(_dtype, some), itertools.repeat(kind))))
        norms.append(torch.stack(list(torch._foreach_norm(of_kind, norm_type, dtype=wider))))
    if len(norms) > 1:
        return torch.cat(norms)
    return norms[0] if norms else None


def norms_over_owners(own: Tensor, norm_type: float, collectives: Collectives) -> Tensor:
    """Returns the norms of several gradients from the norms of each rank's parts. Collective.

    ``own`` (see :func:`zero_norms`) and the result have a number for each gradient, the same bits on every rank.
    """
    # Gathered and not all-reduced: every rank adds in the order of the ranks and gets the same bits. If norms differed
    # in the last bit, so would clipped gradients, and weights from then on.
    table = own.new_zeros(collectives.size, *own.shape)
    table[collectives.rank] = own
    collectives.all_gather(table.view(-1)).wait()
    return _join_norms(table, norm_type, dim=0)


def _join_norms(norms: Tensor, norm_type: float, dim: int | None = None) -> Tensor:
    """Returns the norm of a whole from the norms of its parts, along ``dim`` or of all."""
    try:
        joined: Tensor = torch.linalg.vector_norm(norms, norm_type, dim=dim, dtype=torch.float64)
    except (TypeError, RuntimeError):  # see zero_norms
        joined = torch.linalg.vector_norm(norms, norm_type, dim=dim)
    return joined


def scale_to_norm_(grads: Sequence[Tensor], total_norm: Tensor, max_norm: float) -> None:
    """Multiplies gradients in place so that their norm is at most ``max_norm``: torch's formula, without host sync."""
    # 1e-6 is torch's. Clamped and always multiplied: a comparison would make the host wait for the device.
    coefficient = torch.clamp(max_norm / (total_norm + 1e-6), max=1.0)
    if grads:
        # A foreach kernel raises for an empty list, which a rank without a shard has.
        torch._foreach_mul_(list(grads), coefficient)


def check_finite(total_norm: Tensor, norm_type: float) -> None:
    """Raises RuntimeError, as torch's ``clip_grad_norm_(error_if_nonfinite=True)`` does, on every rank alike."""
    # Waits for the device, so callers check only if the user wants the error.
    if not bool(torch.isfinite(total_norm)):
        raise RuntimeError(
            f"the total norm of order {norm_type} of the gradients is {total_norm.item()}, so it cannot be clipped. "
            "To clip non-finite gradients anyway, pass error_if_nonfinite=False"
        )


def unscale_grads_(
    grads: Sequence[Tensor], inv_scale: Tensor, collectives: Collectives | None, device: torch.device
) -> Tensor:
    """Multiplies the owned gradients by ``inv_scale`` (one element, fp32) in place.

    Returns 1.0 (shape (1,), fp32) on every rank if any rank has a gradient that is not finite, otherwise 0.0.
    Collective if ``collectives`` is given.
    """
    found_inf = torch.zeros(1, dtype=torch.float32, device=device)
    # The kernel accepts tensors of one dtype, and adds its result to found_inf.
    for dtype in dict.fromkeys(grad.dtype for grad in grads):
        torch._amp_foreach_non_finite_check_and_unscale_(
            [grad for grad in grads if grad.dtype == dtype], found_inf, inv_scale.to(device)
        )
    if collectives is not None:
        collectives.all_reduce_max(found_inf).wait()
    return found_inf
