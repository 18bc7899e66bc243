"""Weighs losses by how many tokens they are means over, so that the mean of their gradients is one over tokens.

[Note: averages by tokens]
The mean over ranks and microbatches of mean losses is not the mean over tokens where batches are ragged. A loss of
``n`` tokens is to have the weight ``n / mean(n)``, over all ranks and all microbatches that are reduced together.
Equal counts change nothing, and neither does it matter whether the loss was divided by the number of microbatches.

``mean(n)`` is known when the last backward has ended, and buckets leave before. So the gradient of each loss is
multiplied by ``n / unit``, where its backward begins, and the reduced gradients once by ``unit / mean(n)``, when the
ranks have exchanged their sums. All gradients of a loss have its weight then, also those that come to other ranks
(experts, context parallelism), that layers add themselves, and of the earlier stages of a pipeline. The unit is a power
of two that all ranks have, near the last mean: 16-bit gradients neither overflow nor vanish, and a resumed run, which
begins with another unit, has the same bits. The first is between counts of samples and of tokens.

[Note: the window of a mean]
A mean is over the backwards from where gradients were dropped to the one that is synchronised, as users mean it (not
those that pooled gradients send under ``no_sync``). Gradients are final from there on, until they are stepped with or
dropped. With a second synchronised backward before that, two means would have to become one, and users may want either:
refused. So is a window with weighed losses and others. Each rank keeps a fault to itself until the ranks agree, and
then all of them raise: one that raised alone would leave the others waiting.
"""

from __future__ import annotations

import math
import struct
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..buffers import GradBuffers
from ..collectives import Collectives, is_same_on_all_ranks
from ..errors import LossTokensError

_SUMS = struct.Struct("<dI")
"""A rank's weights, and of how many losses."""

_FIRST_UNIT = 2.0**8
"""In the first window a gradient that is sent in fp16 overflows above 65,504 times this, over the number of tokens."""

NONE, ALL = "counted none of its losses", "counted all of its losses"
_SOME = "counted some of its losses and not others"
_AFTER_A_SYNC = "ran a backward after a synchronised one, whose gradients were not used or dropped"
_DROPPED_IN_PART = "dropped the gradients of some parameters between two microbatches, and kept others"
_UNPREPARED = "ran a backward that no forward of the wrapped model prepared, of a loss that was counted"
_UNSEEN = "called loss_tokens(n), and then backward() of the loss itself instead of the framework's backward"

TOO_LATE = (
    "losses are counted for the first time after a synchronised backward: with find_unused_parameters=False or "
    "static_graph=True the ranks agree only in their first one whether losses are counted. Count every loss, from the "
    "first on, or leave the two options as they are by default"
)

OTHER_TENSOR_RANKS = (
    "the ranks of a tensor group counted different tokens of one batch: count the tokens of the whole loss on each of "
    "them, also where each has a part of the sequence or of the vocabulary"
)


class LossTokens:
    """The window of one reducer's gradients: the weights of its losses, and what is wrong with them.

    Attributes:
        is_used: whether a loss was ever counted.
        announced: the count of the next backward's loss, where the loss itself is to come.
        unit: see [Note: averages by tokens].
        open_unit: the unit of losses that are not corrected yet; None if there are none.
        has_loss: whether the backward under way begins from a loss; a stage's may begin from its outputs.
        is_of_batch: whether a window begins where :meth:`drop` is called, and nowhere else.
        state: what this rank did in the window, in words; None before its first backward.
        factor: of the last correction; 0.0 where there was nothing to correct.
    """

    state: str | None
    open_unit: float | None
    _arrived: list[float]  # weights of losses whose backward is under way
    _seen: list[tuple[int, int] | None]  # by parameter, after the last backward; see _look
    _carried: set[int]  # frozen parameters with gradients of an earlier window

    def __init__(self, name: str) -> None:
        self.is_used = self.is_of_batch = False
        self.has_loss = True
        self.announced: float | None = None
        self.unit = _FIRST_UNIT
        self._name = name
        self._buffers: GradBuffers
        self._is_due = False  # any rank has counted losses that are not corrected yet
        self._at_start: list[Any] | None = None
        self.drop()

    def follow(self, buffers: GradBuffers) -> None:
        """Gradients are in ``buffers`` from now on, perhaps of more parameters than those known so far."""
        self._buffers = buffers

    def move(self, buffers: GradBuffers) -> None:
        """Gradients are in other buffers from now on; final ones stay final."""
        self.follow(buffers)
        self.remember(is_final=self._is_final)

    def follow_others(self, *, are_counted: bool) -> None:
        """Takes part in :meth:`finish` where any rank has counted a loss."""
        self.is_used |= are_counted
        self._is_due |= are_counted

    def begin_use(self, *, is_open: bool) -> LossTokens:
        """Losses are counted from now on; ``is_open``: gradients that are there are not final."""
        if not self.is_used:
            self.is_used, self._seen = True, self._look()
            self.state = NONE if is_open and any(grad is not None for grad in self._seen) else None
        return self

    def take_announced(self) -> float | None:
        """Returns the count that was announced for the next loss, once."""
        count, self.announced = self.announced, None
        return count

    # --- one backward ------------------------------------------------------------------------------------------------

    def on_backward_start(self) -> None:
        """The outermost graph has begun, and has reached no parameter yet."""
        if self.is_used:
            self._at_start, params = self._look(), self._buffers.params
            left = (i for i, param in enumerate(params) if param.grad is not None and i not in self._buffers.zeroed)
            if self.state is _UNPREPARED and next(left, None) is None:
                self._begin_window()

    def arrive(self, weight: float, unit: float) -> None:
        """The backward of a loss of this weight has begun."""
        self._arrived.append(weight)
        if any(param.requires_grad for param in self._buffers.params):
            self.open_unit = unit

    def drop_arrived(self) -> None:
        """Forgets the losses of a backward that raised before it reached a parameter."""
        self._arrived = []

    def begin_backward(self) -> None:
        """Begins a new window where the gradients of this one were dropped, or have become final and were used."""
        if not self.is_used or self.is_of_batch or self.state is _UNPREPARED:
            return
        now, params = self._at_start or self._look(), self._buffers.params
        # Frozen ones get nothing now: another optimizer's, which toggle_optimizer has put aside.
        had = [i for i, grad in enumerate(self._seen) if grad is not None and params[i].requires_grad]
        kept = [i for i in had if now[i] is not None]
        if self._is_final:
            unused, were_counted = any(now[i] == self._seen[i] for i in kept), self.state is not NONE
            self._begin_window()
            if unused:  # sums of plain means, which torch DDP has as well, may go on
                self.state = _AFTER_A_SYNC if were_counted else NONE
        elif not kept:
            self._begin_window()
        elif len(kept) < len(had):
            self.state = _DROPPED_IN_PART
        if self.state is None:
            self._carried = {i for i, grad in enumerate(now) if grad is not None and not params[i].requires_grad}

    def end_backward(self) -> None:
        """A backward of the training has ended."""
        weights, self._arrived = self._arrived, []
        self._weights += sum(weights)
        self._num_losses += len(weights)
        if self.announced is not None:
            self.announced, self.state = None, _UNSEEN
        elif weights or self.has_loss:
            state = ALL if weights else NONE
            if self.state in (None, NONE, ALL):
                self.state = state if self.state in (None, state) else _SOME

    def end_another(self, *, is_kept: bool) -> None:
        """A backward has ended that is none of the training; ``is_kept``: it has left gradients."""
        if is_kept and self._arrived:
            self.state = _UNPREPARED
        self._arrived, self._at_start = [], None

    def _look(self) -> list[tuple[int, int] | None]:
        """Returns by parameter numbers that change when it is stepped or its whole gradient is changed in place; None
        where it has no gradient, or one that was zeroed since :meth:`remember`."""
        buffers = self._buffers
        return [
            None
            if not has_grad or (grad := param.grad) is None or index in buffers.zeroed
            else (param._version, 0 if buffers.is_sharded(index) else grad._version)
            for index, (param, has_grad) in enumerate(zip(buffers.params, buffers.has_grad, strict=True))
        ]

    def remember(self, *, is_final: bool) -> None:
        """Notes the gradients that a backward or a reduction has left; ``is_final``: for use by anybody."""
        if self.is_used:
            self._buffers.zeroed.clear()
            self._seen, self._at_start, self._is_final = self._look(), None, is_final

    def _begin_window(self) -> None:
        self.state = None
        self._weights, self._num_losses = 0.0, 0
        self._is_final = False
        self._carried = set()

    def drop(self) -> None:
        """All gradients were dropped, those of a backward that broke off among them."""
        self._begin_window()
        self._arrived, self._seen = [], []
        self.open_unit, self.factor = None, 0.0

    @property
    def counting(self) -> tuple[bool, bool]:
        """Whether a loss of the window was counted, and whether one was not; both where there is another fault."""
        return self.state not in (None, NONE), self.state not in (None, ALL)

    # --- reduced gradients -------------------------------------------------------------------------------------------

    def finish(self, collectives: Collectives, tensor_ranks: Collectives | None) -> None:
        """Corrects reduced gradients to the mean over tokens. Collective, if there are any to be corrected.

        Raises:
            LossTokensError: on all ranks, if ``tensor_ranks`` counted different tokens: what each of them has whole of
                the model would be weighed otherwise on each, and part.
        """
        if not self._is_due:
            return
        self._is_due = False
        sums = _SUMS.pack(self._weights, self._num_losses)
        before, after = collectives.rank * len(sums), (collectives.size - collectives.rank - 1) * len(sums)
        # Each rank has a place of its own, where the others send zeros: one exchange, and sums in the order of ranks.
        every = bytes(collectives.max_of_bytes([*bytes(before), *sums, *bytes(after)]))
        if tensor_ranks is not None and not is_same_on_all_ranks(every, tensor_ranks):
            raise LossTokensError(OTHER_TENSOR_RANKS)
        weights, numbers = zip(*_SUMS.iter_unpack(every), strict=True)
        self._correct(sum(weights), sum(numbers))
        self.remember(is_final=True)

    def finish_on_this_rank(self) -> None:
        """Corrects gradients that were not reduced and are about to be used as they are.

        Raises:
            LossTokensError: if the losses were not all counted.
        """
        if self.state not in (None, NONE, ALL):
            raise LossTokensError(describe_counting({self._name: self.state}))
        if self._num_losses:
            self._correct(self._weights, self._num_losses)
            self.remember(is_final=True)

    def _correct(self, weights: float, num_losses: int) -> None:
        unit = self.unit if self.open_unit is None else self.open_unit
        self._weights, self._num_losses, self.factor, self.open_unit = 0.0, 0, 0.0, None
        # Without any token there is nothing to divide by, and every gradient is zero.
        if weights == 0.0:
            return
        self.factor = num_losses / weights
        self.unit = unit * 2.0 ** round(math.log2(weights / num_losses))
        if self.factor != 1.0:
            self.scale(self.factor)

    def scale(self, factor: float) -> None:
        """Multiplies this rank's gradients of the window."""
        params = self._buffers.params
        counted = (i for i, param in enumerate(params) if param.requires_grad or i not in self._carried)
        if grads := self._buffers.local_grads(counted):
            torch._foreach_mul_(grads, factor)


def weigh(loss: Tensor, count: float, windows: Sequence[LossTokens]) -> None:
    """Has the backward of ``loss``, a mean over ``count`` tokens, be that of a weighed loss, in all of the windows."""
    refs = [weakref.ref(window) for window in windows]

    def on_grad(grad: Tensor) -> Tensor | None:
        present = [window for ref in refs if (window := ref()) is not None and window.is_used]
        if not present:
            return None
        unit = next((window.open_unit for window in present if window.open_unit is not None), present[0].unit)
        for window in present:
            window.arrive(count / unit, unit)
        if count == unit:
            return None
        return grad * (count / unit) if count else torch.zeros_like(grad)

    # On the loss itself: where a user goes on with the tensor from before, it is weighed as well.
    loss.register_hook(on_grad)
    if count == 0:
        _keep_zeros(loss)


def _keep_zeros(loss: Tensor) -> None:
    """Has the gradients of a loss that is multiplied by zero be zeros, also where it is a mean over nothing."""
    nodes, seen = [loss.grad_fn], set[Any]()
    while nodes:
        node = nodes.pop()
        if node is not None and node not in seen and not hasattr(node, "variable"):
            seen.add(node)
            node.register_hook(_without_nan)
            nodes += [below for below, _ in node.next_functions]


def _without_nan(grads: Sequence[Tensor | None], _: Any) -> tuple[Tensor | None, ...]:
    # Infinite ones may be other ranks', by the loss of which this rank's part of the model has gradients as well.
    return tuple(
        grad if grad is None or grad.layout != torch.strided else grad.nan_to_num(0.0, math.inf, -math.inf)
        for grad in grads
    )


def read_count(num_tokens: float | Tensor) -> float:
    """Reads what a user gave as a number of tokens.

    Raises:
        ValueError: if it is none.
    """
    if isinstance(num_tokens, Tensor) and num_tokens.numel() != 1:
        raise ValueError(f"num_tokens: expected one number, got a tensor of shape {tuple(num_tokens.shape)}")
    count = float(num_tokens)
    if not (math.isfinite(count) and count >= 0):
        raise ValueError(f"num_tokens: expected a number of tokens, 0 or more, got {num_tokens}")
    return count


def describe_counting(by_rank: Mapping[str, str]) -> str:
    """Says what is wrong with a window, and what to do."""
    found = "; ".join(f"{rank} {state}" for rank, state in by_rank.items())
    return (
        f"gradients cannot be averaged by tokens: {found}. Count the tokens of every loss of a step on every rank, 0 "
        "where there is nothing to learn from, and accumulate inside no_sync()"
    )
