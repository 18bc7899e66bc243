"""Weighs gradients by how many tokens their loss is a mean over, so that their mean is one over tokens.

[Note: averages by tokens]
The mean over ranks and microbatches of mean losses is not the mean over tokens where batches are ragged. A user who
tells the count ``n`` of each loss gets each gradient times ``n / mean(n)``, the mean over all ranks and all
microbatches that are reduced together. Equal counts change nothing, and neither does it matter whether the loss was
divided by the number of microbatches.

``mean(n)`` is known when the last backward has ended, and buckets leave before. So each gradient is multiplied by ``n /
unit`` before autograd accumulates it, and what was reduced by ``unit / mean(n)`` once the ranks have exchanged their
sums. The unit is a number that all ranks have: a power of two near the mean before, so that 16-bit gradients neither
overflow nor vanish, and that a resumed run, which starts from another, ends with the same bits. A run begins with one
that is between counts of samples and of tokens: nothing was exchanged yet.

[Note: the window of a mean]
A mean is over the backwards from where gradients were dropped to the one that is synchronised, as users mean it (not
those that pooled gradients send under ``no_sync``). Gradients are final from there on, until they are stepped with or
dropped. With a second synchronised backward before that, two means would have to become one, and users may want either:
refused. So is a window in which some losses were counted and others were not. Each rank keeps what is wrong to itself
until the ranks agree, and then all of them raise: one that raised alone would leave the others waiting.
"""

from __future__ import annotations

import enum
import math
import struct
import weakref
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor
from torch.nn import Parameter

from .backward import Preparation
from .buffers import GradBuffers
from .collectives import Collectives
from .errors import LossTokensError
from .grad_accumulators import GradAccumulators, Prehook

_SUMS = struct.Struct("<dI")
"""A rank's tokens, and over how many backwards."""

_FIRST_UNIT = 2.0**8
"""In the first window a gradient that is sent in fp16 overflows above 65,504 times this, over the number of tokens."""


class Counting(enum.IntEnum):
    """The state of a window on a rank. The ranks must have the same, and one of the first two."""

    NOT_COUNTED = 0
    COUNTED = 1
    IN_PART = 2
    AFTER_A_SYNC = 3
    DROPPED_IN_PART = 4
    UNPREPARED = 5


_WHAT = {
    Counting.NOT_COUNTED: "counted none of its losses",
    Counting.COUNTED: "counted all of its losses",
    Counting.IN_PART: "counted some of its losses and not others",
    Counting.AFTER_A_SYNC: "ran a backward after a synchronised one, whose gradients were not used or dropped",
    Counting.UNPREPARED: "ran a backward that no forward of the wrapped model prepared, after loss_tokens(n)",
    Counting.DROPPED_IN_PART: "dropped the gradients of some parameters between two microbatches, and kept others",
}

TOO_LATE = (
    "loss_tokens(n) for the first time after a synchronised backward: with find_unused_parameters=False or "
    "static_graph=True the ranks agree in their first one alone whether losses are counted. Call it before every "
    "backward, from the first on, or leave the two options as they are by default"
)

PAST_AUTOGRAD = (
    "loss_tokens(n) weighs each gradient before autograd accumulates it, and layers of this model add theirs to "
    "main_grad themselves. Switch that off (fuse_wgrad_accumulation=False, gradient_accumulation_fusion=False), or "
    "multiply each loss by its number of tokens over the mean number"
)

OTHER_TENSOR_RANKS = (
    "the ranks of a tensor group counted other tokens of one batch: call loss_tokens(n) with the number of the whole "
    "loss on each of them, also where each has a part of the sequence or of the vocabulary"
)


class LossTokens:
    """Weighs the gradients of one reducer, and keeps the sums of its window. Does nothing before the first count.

    Args:
        dp_rank: whose shards are corrected.
        prepared: whether the next backward is one of the training; others are not counted.

    Attributes:
        is_used: whether a count was ever given.
    """

    def __init__(self, dp_rank: int, prepared: Preparation) -> None:
        self.is_used = False
        self._dp_rank, self._prepared = dp_rank, prepared
        self._buffers: GradBuffers
        self._index_by_id: dict[int, int] = {}
        self._given: float | None = None  # of the next backward
        self._count: float | None = None  # of the backward under way
        self._in_backward = False
        self._next_unit = _FIRST_UNIT
        self._joined: list[bool] = []  # parameters with gradients of this window
        self._final: list[tuple[int, int]] = []  # by parameter, versions from when gradients became final
        self._counting: Counting | None = None  # before the first backward of a window
        self._begin_window()

    def follow(self, buffers: GradBuffers) -> None:
        """Gradients are here from now on, perhaps of more parameters than those known so far."""
        self._buffers = buffers
        self._index_by_id = {id(param): index for index, param in enumerate(buffers.params)}
        self._joined += [False] * (len(buffers.params) - len(self._joined))

    def move(self, buffers: GradBuffers) -> None:
        """Gradients are in other buffers from now on; final ones stay final."""
        self.follow(buffers)
        if self._is_final:
            self.become_final()

    def give(self, count: float, accumulators: GradAccumulators, *, is_open: bool) -> None:
        """The loss of the next backward is a mean over so many tokens.

        Args:
            count: see :func:`read_count`.
            accumulators: of the parameters.
            is_open: whether what has accumulated is not final.
        """
        if not self.is_used:
            self.is_used = True
            accumulators.call_before(self._prehook_of)
            if is_open and any(present := self._present()):
                self._joined, self._counting = present, Counting.NOT_COUNTED
        accumulators.take_unfrozen()
        self._given = count

    # --- one backward ------------------------------------------------------------------------------------------------

    def _prehook_of(self, param: Parameter) -> Prehook:
        tokens, index = weakref.ref(self), self._index_by_id[id(param)]

        def weigh(grads: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
            present = tokens()
            weighed = None if present is None else present._weigh(index, grads[0])
            return None if weighed is None else (weighed,)

        return weigh

    def _weigh(self, index: int, grad: Tensor) -> Tensor | None:
        if not self._in_backward:
            if not self._prepared:
                return None
            self._begin_backward()
        self._joined[index] = True
        if self._count is None or self._count == self._unit:
            return None
        # A mean over nothing is NaN, and zero times NaN as well.
        if self._count == 0:
            return torch.zeros_like(grad)
        # Another tensor: autograd may hand the same one to other parameters, too.
        return grad * (self._count / self._unit)

    def _begin_backward(self) -> None:
        self._follow_drops()
        self._in_backward = True
        self._count, self._given = self._given, None
        own = Counting.NOT_COUNTED if self._count is None else Counting.COUNTED
        if self._counting is None:
            self._counting = own
        elif self._counting in (Counting.NOT_COUNTED, Counting.COUNTED) and self._counting != own:
            self._counting = Counting.IN_PART

    def _follow_drops(self) -> None:
        """Begins a new window where the gradients of this one were dropped, or have become final and were used."""
        present = self._present()
        params = self._buffers.params
        if self._is_final:
            # Frozen ones get nothing now: another optimizer's, which toggle_optimizer has put aside.
            kept = [index for index, is_present in enumerate(present) if is_present]
            unused = any(params[i].requires_grad and self._versions(i) == self._final[i] for i in kept)
            were_counted = self._counting is not Counting.NOT_COUNTED
            self._begin_window()
            self._carried = {index for index in kept if not params[index].requires_grad}
            if unused:  # sums of plain means, which torch DDP has as well, may go on
                self._counting = Counting.AFTER_A_SYNC if were_counted else Counting.NOT_COUNTED
        elif any(self._joined):
            dropped = [joined and not is_present for joined, is_present in zip(self._joined, present, strict=True)]
            if dropped == self._joined:
                self._begin_window()
            elif any(dropped):
                self._counting = Counting.DROPPED_IN_PART

    def _present(self) -> list[bool]:
        """Tells, by parameter, whether it has a gradient that was not dropped or zeroed since this was asked last."""
        buffers = self._buffers
        zeroed, buffers.zeroed = buffers.zeroed, set()
        return [
            has_grad and param.grad is not None and index not in zeroed
            for index, (param, has_grad) in enumerate(zip(buffers.params, buffers.has_grad, strict=True))
        ]

    def _begin_window(self) -> None:
        self._unit = self._next_unit
        self._counting = None
        self._is_final = False
        self._tokens, self._num_losses = 0.0, 0  # of this rank, not reduced yet
        self._reduced_tokens, self._num_reduced_losses = 0.0, 0  # of all ranks
        self._joined = [False] * len(self._joined)
        self._carried = set()

    def end_backward(self) -> None:
        """A backward has ended, and its loss counts."""
        self._in_backward = False
        if self._count is not None:
            self._tokens += self._count
            self._num_losses += 1
            self._count = None

    def meet_unprepared(self, found: Iterable[bool]) -> None:
        """Gradients are about to be used that no forward prepared; a count that was given for them has weighed nothing.

        Args:
            found: by gradient of such a backward, whether it is still there.
        """
        if self._given is not None and any(found):
            self._given, self._counting = None, Counting.UNPREPARED

    def drop(self) -> None:
        """A backward broke off, and all gradients were dropped. A count that was given since is of the next one."""
        self._in_backward, self._count = False, None
        self._begin_window()

    # --- reduced gradients -------------------------------------------------------------------------------------------

    @property
    def counting(self) -> Counting:
        """The state of this rank's window, for the others."""
        return self._counting or Counting.NOT_COUNTED

    def finish(self, collectives: Collectives, tensor_ranks: Collectives | None) -> None:
        """Corrects what was reduced. Collective, if all ranks count.

        Raises:
            LossTokensError: on all ranks, if ``tensor_ranks`` counted other tokens: what each of them has whole of the
                model would be weighed otherwise on each, and part.
        """
        if self._counting is not Counting.COUNTED:
            return
        sums = _SUMS.pack(self._tokens, self._num_losses)
        before, after = collectives.rank * len(sums), (collectives.size - collectives.rank - 1) * len(sums)
        # Each rank has a place of its own, where the others send zeros: one exchange, and sums in the order of ranks.
        every = bytes(collectives.max_of_bytes([*bytes(before), *sums, *bytes(after)]))
        if tensor_ranks is not None:
            largest = tensor_ranks.max_of_bytes([*every, *(255 - byte for byte in every)])
            if any(sum(pair) != 255 for pair in zip(largest[: len(every)], largest[len(every) :], strict=True)):
                raise LossTokensError(OTHER_TENSOR_RANKS)
        for tokens, num_losses in _SUMS.iter_unpack(every):
            self._reduced_tokens += tokens
            self._num_reduced_losses += num_losses
        self._tokens, self._num_losses = 0.0, 0
        # Nothing to divide by, and every gradient is zero.
        if self._reduced_tokens == 0:
            return
        mean = self._reduced_tokens / self._num_reduced_losses
        self._correct(mean)
        self._next_unit = 2.0 ** round(math.log2(mean))

    def finish_on_this_rank(self) -> None:
        """Corrects gradients that were not reduced and are about to be used as they are.

        Raises:
            LossTokensError: if the losses were not all counted.
        """
        if self._counting not in (None, Counting.NOT_COUNTED, Counting.COUNTED):
            raise LossTokensError(describe_counting({f"rank {self._dp_rank}": self.counting}))
        if self._num_losses and not self._is_final:
            if self._tokens:
                self._correct(self._tokens / self._num_losses)
            self._tokens, self._num_losses = 0.0, 0
            self.become_final()

    def _correct(self, mean: float) -> None:
        factor, self._unit = self._unit / mean, mean
        if factor == 1.0:
            return
        params = self._buffers.params
        counted = (i for i, param in enumerate(params) if param.requires_grad or i not in self._carried)
        parts = self._buffers.own_grads(counted)
        if parts:
            torch._foreach_mul_(parts, factor)

    def become_final(self) -> None:
        """The window has ended with gradients that anybody may use."""
        if not self.is_used:
            return
        self._is_final = True
        self._final = [self._versions(index) for index in range(len(self._buffers.params))]

    def _versions(self, index: int) -> tuple[int, int]:
        """Numbers that change when the parameter is stepped, or its whole gradient is changed in place."""
        param = self._buffers.params[index]
        is_whole = param.grad is not None and not self._buffers.is_sharded(index)
        return param._version, param.grad._version if is_whole and param.grad is not None else 0


def read_count(num_tokens: float | Tensor) -> float:
    """Reads what a user gave as a number of tokens.

    Raises:
        ValueError: if it is none.
    """
    if isinstance(num_tokens, Tensor) and num_tokens.numel() != 1:
        raise ValueError(f"loss_tokens: expected one number, got a tensor of shape {tuple(num_tokens.shape)}")
    count = float(num_tokens)
    if not (math.isfinite(count) and count >= 0):
        raise ValueError(f"loss_tokens: expected a number of tokens, 0 or more, got {num_tokens}")
    return count


def describe_counting(by_rank: Mapping[str, Counting]) -> str:
    """Says what is wrong with a window, and what to do."""
    found = "; ".join(f"{rank} {_WHAT[counting]}" for rank, counting in by_rank.items())
    return (
        f"gradients cannot be averaged by tokens: {found}. Call loss_tokens(n) on every rank before every backward of "
        "a step, with 0 where there is nothing to learn from, and accumulate inside no_sync()"
    )
