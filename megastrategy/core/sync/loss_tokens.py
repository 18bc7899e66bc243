"""Weighs losses by the number of tokens that they are means over, so that gradients are those of a mean over tokens.

[Note: gradients of a mean over tokens]
With ragged batches the mean over ranks and microbatches of mean losses is not the mean over tokens. A loss of ``n``
tokens needs the weight ``n / mean(n)``, with the mean over all ranks and all microbatches that are reduced together.
Equal counts change nothing, and it makes no difference whether the loss was divided by the number of microbatches.

``mean(n)`` is known at the end of the last backward, and buckets are sent before. So the gradient of each loss is
multiplied by ``n / unit`` where its backward begins, and the reduced gradients once by ``unit / mean(n)``, when the
ranks have exchanged their sums. Then all gradients of a loss have its weight: also those on other ranks (experts,
context parallelism), those that layers add themselves, and those of earlier pipeline stages. The unit is a power of two
near the last mean, the same on all ranks: 16-bit gradients neither overflow nor underflow, and a resumed run, which
begins with another unit, has the same bits. The first unit is between counts of samples and of tokens.

[Note: which losses one mean covers]
A mean covers the backwards from the moment when gradients were dropped to the backward that the user synchronises (not
those that pooled gradients send under ``no_sync``). From then on gradients are final, until they are used by a step or
dropped. A second synchronised backward before that would need one mean of two, for which users may want either meaning:
it is an error, and so is a window in which only some losses are weighed. A rank reports an error when the ranks agree,
and then all raise it: if one rank raised, the others would wait for it.
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
"""The sum of a rank's weights, and the number of its losses."""

_FIRST_UNIT = 2.0**8
"""In the first window a gradient that is sent in fp16 overflows above 65,504 times this, divided by the number of
tokens."""

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
    """The window of one reducer's gradients: the weights of its losses, and whether all were counted.

    Attributes:
        buffers: of the gradients.
        is_used: whether a loss was ever counted.
        announced: the count for the next backward, if it was announced before the loss.
        unit: see [Note: gradients of a mean over tokens].
        open_unit: the unit of losses that are not corrected yet; None if there are none.
        has_loss: whether the running backward begins from a loss; that of a stage may begin from its outputs.
        is_of_batch: whether a window begins only where :meth:`drop` is called.
        state: a description of the window on this rank; None before its first backward.
        factor: the factor of the last correction; 0.0 if there was none.
        totals: the sums of weights and losses, if they are known before :meth:`finish`.
    """

    buffers: GradBuffers
    state: str | None
    open_unit: float | None
    totals: tuple[float, int] | None = None
    _arrived: list[float]  # weights of losses whose backward is under way
    _seen: list[tuple[int, int] | None]  # by parameter, after the last backward; see _versions
    _carried: set[int]  # frozen parameters with gradients of an earlier window

    def __init__(self, name: str) -> None:
        self.is_used = self.is_of_batch = False
        self.has_loss = True
        self.announced: float | None = None
        self.unit = _FIRST_UNIT
        self._name = name

        self._is_due = False  # any rank has counted losses that are not corrected yet
        self._at_start: list[Any] | None = None
        self.drop()

    def move_to(self, buffers: GradBuffers) -> None:
        """Sets other buffers of the same gradients; final ones stay final."""
        self.buffers = buffers
        self.remember(is_final=self._is_final)

    def learn(self, *, are_counted: bool) -> None:
        """Makes this rank take part in :meth:`finish` if any rank has counted a loss."""
        self.is_used |= are_counted
        self._is_due |= are_counted

    def begin_use(self, *, is_open: bool) -> LossTokens:
        """Begins to count losses; ``is_open``: present gradients are not final."""
        if not self.is_used:
            self.is_used, self._seen = True, self._versions()
            self.state = NONE if is_open and any(grad is not None for grad in self._seen) else None
        return self

    def pop_announced(self) -> float | None:
        """Removes and returns the count that was announced for the next loss."""
        count, self.announced = self.announced, None
        return count

    # --- one backward ------------------------------------------------------------------------------------------------

    def on_backward_start(self) -> None:
        """Called when the outermost graph has begun, before it reaches a parameter."""
        if self.is_used:
            self._at_start, params = self._versions(), self.buffers.params
            left = (i for i, param in enumerate(params) if param.grad is not None and i not in self.buffers.zeroed)
            if self.state is _UNPREPARED and next(left, None) is None:
                self._begin_window()

    def arrive(self, weight: float, unit: float) -> None:
        """Called when the backward of a loss of this weight has begun."""
        self._arrived.append(weight)
        if any(param.requires_grad for param in self.buffers.params):
            self.open_unit = unit

    def drop_arrived(self) -> None:
        """Forgets the losses of a backward that raised before it reached a parameter."""
        self._arrived = []

    def begin_backward(self) -> None:
        """Begins a new window if the gradients of this one were dropped, or were final and have been used."""
        if not self.is_used or self.is_of_batch or self.state is _UNPREPARED:
            return
        now, params = self._at_start or self._versions(), self.buffers.params
        # Without frozen ones, which may belong to another optimizer (toggle_optimizer), and get nothing now.
        had = [i for i, grad in enumerate(self._seen) if grad is not None and params[i].requires_grad]
        kept = [i for i in had if now[i] is not None]
        if self._is_final:
            unused, were_counted = any(now[i] == self._seen[i] for i in kept), self.state is not NONE
            self._begin_window()
            if unused:  # without counted losses the sum of two means is allowed, as under torch DDP
                self.state = _AFTER_A_SYNC if were_counted else NONE
        elif not kept:
            self._begin_window()
        elif len(kept) < len(had):
            self.state = _DROPPED_IN_PART
        if self.state is None:
            self._carried = {i for i, grad in enumerate(now) if grad is not None and not params[i].requires_grad}

    def end_backward(self) -> None:
        """Called when a prepared backward has ended."""
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
        """Called when a backward has ended that was not prepared; ``is_kept``: it has left gradients."""
        if is_kept and self._arrived:
            self.state = _UNPREPARED
        self._arrived, self._at_start = [], None

    def _versions(self) -> list[tuple[int, int] | None]:
        """Returns version counters by parameter: of the parameter, and of its gradient if that is not sharded.

        None for a parameter without a gradient, or with one that was zeroed since :meth:`remember`.
        """
        buffers = self.buffers
        return [
            None
            if not has_grad or (grad := param.grad) is None or index in buffers.zeroed
            else (param._version, 0 if buffers.is_sharded(index) else grad._version)
            for index, (param, has_grad) in enumerate(zip(buffers.params, buffers.has_grad, strict=True))
        ]

    def remember(self, *, is_final: bool) -> None:
        """Records the gradients after a backward or a reduction; ``is_final``: a step may use them."""
        if self.is_used:
            self.buffers.zeroed.clear()
            self._seen, self._at_start, self._is_final = self._versions(), None, is_final

    def _begin_window(self) -> None:
        self.state = None
        self._weights, self._num_losses = 0.0, 0
        self._is_final = False
        self._carried = set()

    def drop(self) -> None:
        """Begins a new window after all gradients were dropped, also those of a backward that raised."""
        self._begin_window()
        self._arrived, self._seen = [], []
        self.open_unit, self.factor = None, 0.0

    @property
    def counting(self) -> tuple[bool, bool]:
        """Whether a loss of the window was counted, and whether one was not; both for any other error."""
        return self.state not in (None, NONE), self.state not in (None, ALL)

    # --- reduced gradients -------------------------------------------------------------------------------------------

    def finish(self, collectives: Collectives, tensor_ranks: Collectives | None) -> None:
        """Corrects reduced gradients to the mean over tokens. Collective if there are any to correct.

        Raises:
            LossTokensError: on all ranks, if ``tensor_ranks`` counted different tokens: replicated parameters would get
                different weights on each of them.
        """
        if not self._is_due:
            return
        self._is_due = False
        weights, number = self.totals or self.sums(collectives, tensor_ranks)
        self.totals = None
        self._correct(weights, number)
        self.remember(is_final=True)

    def sums(self, collectives: Collectives, tensor_ranks: Collectives | None) -> tuple[float, int]:
        """Returns the sum of all weights, and the number of losses. Collective; raises as :meth:`finish`."""
        sums = _SUMS.pack(self._weights, self._num_losses)
        before, after = collectives.rank * len(sums), (collectives.size - collectives.rank - 1) * len(sums)
        # Each rank has bytes of its own, for which the others send zeros: one exchange, sums in the order of the ranks.
        every = bytes(collectives.max_of_bytes([*bytes(before), *sums, *bytes(after)]))
        if tensor_ranks is not None and not is_same_on_all_ranks(every, tensor_ranks):
            raise LossTokensError(OTHER_TENSOR_RANKS)
        weights, numbers = zip(*_SUMS.iter_unpack(every), strict=True)
        return sum(weights), sum(numbers)

    def finish_on_this_rank(self) -> None:
        """Corrects gradients that were not reduced, before a step uses them.

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
        # Without any token every gradient is zero.
        if weights == 0.0:
            return
        self.factor = num_losses / weights
        self.unit = unit * 2.0 ** round(math.log2(weights / num_losses))
        if self.factor != 1.0:
            self.scale(self.factor)

    def scale(self, factor: float) -> None:
        """Multiplies this rank's gradients of the window by ``factor``."""
        params = self.buffers.params
        counted = (i for i, param in enumerate(params) if param.requires_grad or i not in self._carried)
        if grads := self.buffers.local_grads(counted):
            torch._foreach_mul_(grads, factor)


def weigh(loss: Tensor, count: float, windows: Sequence[LossTokens]) -> None:
    """Weighs the backward of ``loss``, a mean over ``count`` tokens, in all windows."""
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

    # A hook on the loss itself also weighs a backward of the tensor that the user has kept.
    loss.register_hook(on_grad)
    if count == 0:
        _keep_zeros(loss)


def _keep_zeros(loss: Tensor) -> None:
    """Makes gradients of a loss that is multiplied by zero zeros instead of NaN, for a mean over no elements."""
    nodes, seen = [loss.grad_fn], set[Any]()
    while nodes:
        node = nodes.pop()
        if node is not None and node not in seen and not hasattr(node, "variable"):
            seen.add(node)
            node.register_hook(_without_nan)
            nodes += [below for below, _ in node.next_functions]


def _without_nan(grads: Sequence[Tensor | None], _: Any) -> tuple[Tensor | None, ...]:
    # Infinite ones may come from other ranks' losses, which reach this rank's part of the model.
    return tuple(
        grad if grad is None or grad.layout != torch.strided else grad.nan_to_num(0.0, math.inf, -math.inf)
        for grad in grads
    )


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
