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
A window begins with the first prepared backward after gradients were dropped, or used by a step, and ends with the
backward that the user synchronises. A window in which only some losses are counted is an error on all ranks, and so is
a second synchronised backward before its gradients are used: users may want one mean of two, or the sum of both.
"""

from __future__ import annotations

import math
import operator
import struct
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from ..collectives import Collectives, is_same_on_all_ranks
from ..errors import LossTokensError
from .bucket import Bucket, get_grad
from .replica_hook import HookQueue

_SUMS = struct.Struct("<dI")
"""The sum of a rank's weights, and the number of its losses."""
_FIRST_UNIT = 2.0**8
NONE = "counted none of its losses"
ALL = "counted all of its losses"
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


class TokenWindow:
    """Counts the losses of a window, and corrects its reduced gradients.

    Attributes:
        is_used: whether a loss was ever counted, on any rank.
        announced: the count for the next backward, if it was announced before the loss.
        unit: a power of two near the last mean, the same on all ranks.
        open_unit: the unit of losses that are not corrected yet; None if there are none.
        has_loss: whether the running backward begins from a loss; that of a stage may begin from its outputs.
        is_of_batch: whether a window begins only where :meth:`drop` is called.
        state: a description of the window on this rank; None before its first backward.
        factor: the factor of the last correction; 0.0 if there was none.
    """

    def __init__(self, params: Sequence[Parameter]) -> None:
        self.is_used = False
        self.announced: float | None = None
        self.unit = _FIRST_UNIT
        self.open_unit: float | None = None
        self.has_loss = True
        self.is_of_batch = False
        self.state: str | None = None
        self.factor = 0.0
        self._params = params
        self._arrived: list[float] = []  # weights of losses whose backward is under way
        self._weights = 0.0
        self._num_losses = 0
        self._is_final = False
        self._num_steps = 0  # when the window ended
        self._has_unprepared = False  # since the last prepared backward
        self._had_grad = b""  # a byte for each parameter, after the last backward

    def begin_use(self) -> TokenWindow:
        """Begins to count losses."""
        if not self.is_used:
            self.is_used = True
            has_grad = self._flags()
            is_open = any(has_grad) and not self._is_final
            self.state = NONE if is_open else None
            self._had_grad = has_grad if is_open else b""
        return self

    def pop_announced(self) -> float | None:
        """Removes and returns the count that was announced for the next loss."""
        count = self.announced
        self.announced = None
        return count

    def _flags(self) -> bytes:
        return bytes(grad is not None for grad in map(get_grad, self._params))

    def arrive(self, weight: float, unit: float) -> None:
        """Called when the backward of a loss of this weight has begun."""
        self._arrived.append(weight)
        self.open_unit = unit

    def note_unprepared(self) -> None:
        """Called when a backward that no forward prepared has brought a gradient."""
        self._has_unprepared = True

    def zero(self, places: Iterable[int]) -> None:
        """Counts the gradients of these parameters as dropped: they were zeroed."""
        had_grad = bytearray(self._had_grad)
        for place in places:
            had_grad[place : place + 1] = b"\0" if place < len(had_grad) else b""
        self._had_grad = bytes(had_grad)

    def begin_backward(self, num_steps: int) -> None:
        """Begins a new window if the gradients of this one were dropped, or were final and have been used."""
        if not self.is_used or self.is_of_batch:
            return
        has_grad = self._flags()
        required = map(operator.attrgetter("requires_grad"), self._params)
        # Without frozen ones, which may belong to another optimizer (toggle_optimizer), and get nothing now.
        pairs = enumerate(zip(self._had_grad, required, strict=False))
        places = [place for place, (had_grad, is_required) in pairs if had_grad and is_required]
        num_dropped = sum(not has_grad[place] for place in places)
        is_unprepared = bool(self._arrived) and self._has_unprepared
        self._arrived = []
        self._has_unprepared = False
        if is_unprepared:
            self.state = _UNPREPARED
        elif self._is_final:
            is_unused = num_dropped < len(places) and self._num_steps == num_steps
            were_counted = self.state is not NONE
            self._begin_window()
            if is_unused:  # without counted losses the sum of two means is allowed, as under torch DDP
                self.state = _AFTER_A_SYNC if were_counted else NONE
        elif num_dropped == len(places):
            self._begin_window()
        elif num_dropped > 0:
            self.state = _DROPPED_IN_PART

    def end_backward(self) -> None:
        """Called when a prepared backward has ended."""
        if not self.is_used:  # another rank may count its losses
            self.state = NONE if self.has_loss else self.state
            return
        weights = self._arrived
        self._arrived = []
        self._weights += sum(weights)
        self._num_losses += len(weights)
        if self.announced is not None:
            self.announced = None
            self.state = _UNSEEN
        elif self.state in (None, NONE, ALL) and (weights or self.has_loss):
            state = ALL if weights else NONE
            self.state = state if self.state in (None, state) else _SOME
        self._had_grad = self._flags()

    def _begin_window(self) -> None:
        self.state = None
        self._weights = 0.0
        self._num_losses = 0
        self._is_final = False

    def drop(self) -> None:
        """Begins a new window after all gradients were dropped, also those of a backward that raised."""
        self._begin_window()
        self._arrived = []
        self._had_grad = b""
        self.open_unit = None
        self.factor = 0.0

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
        """Corrects reduced gradients to the mean over tokens of all ranks and replicas. Collective.

        Raises:
            LossTokensError: on all ranks, if ``tensor_ranks`` counted different tokens: replicated parameters would get
                different weights on each of them.
        """
        weights: float
        num_losses: float
        weights, num_losses = self._sums(ranks, tensor_ranks)
        if replicas is not None:  # a replica that comes back has another unit, and contributes nothing
            unit = self.unit if self.open_unit is None else self.open_unit
            weights, num_losses, self.open_unit = replicas.means_of((weights, num_losses, unit))
        self._correct(buckets, weights, num_losses)
        self.end_window(num_steps)

    def end_window(self, num_steps: int) -> None:
        """Records that the gradients are final: a step may use them."""
        self._is_final = True
        self._num_steps = num_steps
        self.note_grads()

    def note_grads(self) -> None:
        """Records which parameters have a gradient, to see later which ones were dropped."""
        if self.is_used:
            self._had_grad = self._flags()

    def _sums(self, ranks: Collectives, tensor_ranks: Collectives | None) -> tuple[float, int]:
        sums = _SUMS.pack(self._weights, self._num_losses)
        # Each rank has bytes of its own, for which the others send zeros: one exchange, sums in the order of the ranks.
        table = bytearray(len(sums) * ranks.size)
        table[ranks.rank * len(sums) : (ranks.rank + 1) * len(sums)] = sums
        of_ranks = bytes(ranks.max_of_bytes(table))
        if tensor_ranks is not None and not is_same_on_all_ranks(of_ranks, tensor_ranks):
            raise LossTokensError(OTHER_TENSOR_RANKS)
        weights, numbers = zip(*_SUMS.iter_unpack(of_ranks), strict=True)
        return sum(weights), sum(numbers)

    def finish_on_this_rank(self, buckets: Sequence[Bucket], rank: str, num_steps: int) -> None:
        """Corrects gradients that were not reduced, before a step uses them.

        Raises:
            LossTokensError: if the losses were not all counted.
        """
        if self.state not in (None, NONE, ALL):
            raise LossTokensError(describe_counting({rank: self.state}))
        if self._num_losses and not self._is_final:
            self._correct(buckets, self._weights, self._num_losses)
            self.end_window(num_steps)

    def _correct(self, buckets: Sequence[Bucket], weights: float, num_losses: float) -> None:
        unit = self.unit if self.open_unit is None else self.open_unit
        self._weights = 0.0
        self._num_losses = 0
        self.open_unit = None
        self.factor = 0.0
        if weights == 0.0:  # without any token every gradient is zero
            return
        self.factor = num_losses / weights
        self.unit = unit * 2.0 ** round(math.log2(weights / num_losses))
        self.scale(buckets, self.factor)

    def scale(self, buckets: Sequence[Bucket], factor: float) -> None:
        """Multiplies the gradients that a step may use on this rank."""
        grads: list[Tensor] = [grad for bucket in buckets for grad in bucket.final_grads()]
        if not buckets:  # before there is a plan
            grads = [grad for grad in map(get_grad, self._params) if grad is not None]
        if grads and factor != 1.0:
            torch._foreach_mul_(grads, factor)


def weigh(loss: Tensor, count: float, windows: Sequence[TokenWindow]) -> None:
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
    nodes = [loss.grad_fn]
    seen = set[Any]()
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
