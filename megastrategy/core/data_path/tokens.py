"""The mean over tokens: losses are sums over tokens, and reduced gradients are divided by the number of tokens.

[Note: gradients of a mean over tokens]
With ragged batches the mean over ranks and microbatches of mean losses is not the mean over tokens. So a counted loss
is the sum over its tokens, as under Megatron's ``calculate_per_token_loss``. Gradients are reduced as others are, which
divides them by the number of ranks. At the end of a window the ranks exchange their numbers of tokens, and multiply the
reduced gradients once by ``ranks / tokens``. Where a framework divides the losses (by the microbatches of a step),
their numbers of tokens are divided, too.

[Note: which losses one mean covers]
A window ends with the backward that the user synchronises. The next one begins with the next prepared backward, or with
one that finds no gradients: they were dropped. A window in which only some losses are counted is an error on all ranks,
and so is a second synchronised backward before its gradients are used: they were divided by another number.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from ..collectives import Collectives, is_same_on_all_ranks
from ..errors import LossTokensError
from .bucket import Bucket, get_grad
from .replica_hook import HookQueue

_TOTAL = struct.Struct("<d")
"""The number of tokens of one rank."""
NONE = "counted none of its losses"
ALL = "counted all of its losses"
_SOME = "counted some of its losses and not others"
_AFTER_A_SYNC = "ran a backward after a synchronised one, whose gradients were not used or dropped"
_UNPREPARED = "counted a loss, and ran a backward that no forward of the wrapped model prepared"

TOO_LATE = (
    "losses are counted for the first time after a synchronised backward: with find_unused_parameters=False or "
    "static_graph=True the ranks agree only in their first one whether losses are counted. Count every loss, from the "
    "first on, or leave the two options as they are by default"
)

OTHER_TENSOR_RANKS = (
    "the ranks of a tensor group counted different tokens of one batch: count the tokens of the whole loss on each of "
    "them, also where each has a part of the sequence or of the vocabulary"
)


class TokenWindow:
    """Counts the tokens of a window, and divides its reduced gradients by them.

    Attributes:
        is_used: whether a loss was ever counted, on any rank.
        announced: the tokens of losses whose backward has not ended: of one, or of a batch's microbatches.
        has_loss: whether the running backward begins from a loss; that of a stage may begin from its outputs.
        state: a description of the window on this rank; None before its first backward.
        factor: the number by which the last window's gradients were multiplied; 0.0 if there was none.
    """

    def __init__(self, params: Sequence[Parameter]) -> None:
        self.is_used = False
        self.announced: list[float] = []
        self.has_loss = True
        self.state: str | None = None
        self.factor = 0.0
        self._params = params
        self._total = 0.0
        self._is_final = False
        self._num_steps = 0  # when the window ended

    def announce(self, num_tokens: float, *, in_batch: bool) -> None:
        """Notes the tokens of the loss whose backward comes next; in a batch, of one of its losses."""
        if not self.is_used:
            self.is_used = True
            is_open = self._has_grads() and not self._is_final
            self.state = NONE if is_open else None
        if not in_batch:  # a loss without a backward is not counted
            self.announced.clear()
        self.announced.append(num_tokens)

    def _has_grads(self) -> bool:
        # Not of frozen parameters, which may belong to another optimizer (toggle_optimizer).
        return any(get_grad(param) is not None for param in self._params if param.requires_grad)

    def note_unprepared(self) -> None:
        """Called when a backward that no forward prepared has brought a gradient."""
        if self.announced:
            self.restart()
            self.state = _UNPREPARED

    def begin_backward(self, num_steps: int) -> None:
        """Begins a new window if the gradients of this one were final, or were dropped. Not called in a batch."""
        if not self.is_used:
            return
        has_grads = self._has_grads()
        were_divided = self._is_final and self.state == ALL
        if self._is_final or not has_grads:
            self.restart()
        if were_divided and has_grads and self._num_steps == num_steps:
            self.state = _AFTER_A_SYNC

    def end_backward(self) -> None:
        """Called when a prepared backward has ended."""
        if not self.has_loss:
            return
        state = ALL if self.announced else NONE
        if self.announced:
            self._total += self.announced.pop(0)
        if self.state in (None, NONE, ALL):
            self.state = state if self.state in (None, state) else _SOME

    def restart(self) -> None:
        """Begins a new window after all gradients were dropped, also those of a backward that raised."""
        self.state = None
        self.factor = 0.0
        self._total = 0.0
        self._is_final = False

    @property
    def is_final(self) -> bool:
        """Whether a step may use the gradients of the window; True without any."""
        return self._is_final or self.state is None

    @property
    def counting(self) -> tuple[bool, bool]:
        """Whether a loss of the window was counted, and whether one was not; both for any other error."""
        return self.state not in (None, NONE), self.state not in (None, ALL)

    # --- reduced gradients --------------------------------------------------------------------------------------------

    def finish(
        self,
        buckets: Sequence[Bucket],
        ranks: Collectives,
        tensor_ranks: Collectives | None,
        replicas: HookQueue | None,
        num_steps: int,
    ) -> None:
        """Divides reduced gradients by the tokens of all ranks and replicas. Collective.

        Raises:
            LossTokensError: on all ranks, if ``tensor_ranks`` counted different tokens: replicated parameters would get
                different gradients on each of them.
        """
        # Each rank has bytes of its own, for which the others send zeros: one exchange, a sum in the order of ranks.
        table = bytearray(_TOTAL.size * ranks.size)
        _TOTAL.pack_into(table, _TOTAL.size * ranks.rank, self._total)
        of_ranks = bytes(ranks.max_of_bytes(table))
        if tensor_ranks is not None and not is_same_on_all_ranks(of_ranks, tensor_ranks):
            raise LossTokensError(OTHER_TENSOR_RANKS)
        total = sum(number for [number] in _TOTAL.iter_unpack(of_ranks))
        if replicas is not None:  # gradients are their mean, too
            [total] = replicas.means_of([total])
        self._divide(buckets, total, ranks.size)
        self.end_window(num_steps)

    def end_window(self, num_steps: int) -> None:
        """Records that the gradients are final: a step may use them."""
        self._is_final = True
        self._num_steps = num_steps

    def finish_on_this_rank(self, buckets: Sequence[Bucket], rank: str, num_steps: int) -> None:
        """Divides gradients that were not reduced, before a step uses them.

        Raises:
            LossTokensError: if the losses were not all counted.
        """
        if self.state is None or self.state == NONE or self._is_final:
            return
        if self.state != ALL:
            raise LossTokensError(describe_counting({rank: self.state}))
        self._divide(buckets, self._total, 1)
        self.end_window(num_steps)

    def _divide(self, buckets: Sequence[Bucket], total: float, num_ranks: int) -> None:
        self.factor = 0.0
        if total > 0.0:  # without any token every gradient is zero
            self.scale(buckets, num_ranks / total)

    def scale(self, buckets: Sequence[Bucket], factor: float) -> None:
        """Multiplies the gradients that a step may use on this rank."""
        self.factor = factor
        grads: list[Tensor] = [grad for bucket in buckets for grad in bucket.final_grads()]
        if not buckets:  # before there is a plan
            grads = [grad for grad in map(get_grad, self._params) if grad is not None]
        if grads:
            torch._foreach_mul_(grads, factor)


def read_count(num_tokens: float | Tensor) -> float:
    """Returns a user's number of tokens as a float.

    Raises:
        ValueError: if it is not a number of tokens.
    """
    if isinstance(num_tokens, Tensor) and num_tokens.numel() != 1:
        raise ValueError(f"num_tokens: expected one number, got a tensor of shape {tuple(num_tokens.shape)}")
    count = float(num_tokens)
    if not (math.isfinite(count) and count >= 0):
        raise ValueError(f"num_tokens: expected a number of tokens, 0 or more, got {num_tokens}")
    return count


def describe_counting(by_rank: Mapping[str, str]) -> str:
    """Returns the error message for a window in which not all losses were counted."""
    found = "; ".join(f"{rank} {state}" for rank, state in by_rank.items())
    return (
        f"gradients cannot be averaged by tokens: {found}. Count the tokens of every loss of a step on every rank, 0 "
        "where there is nothing to learn from, and accumulate inside no_sync()"
    )
