"""The facts that ranks exchange at the end of a synchronised backward: a byte each, in one reduction of the hosts."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from ..buffers import NonFinite, describe_nonfinite
from ..collectives import Collectives
from ..errors import (
    BucketInFlightError,
    LayoutMismatchError,
    LossTokensError,
    MegastrategyError,
    MicrobatchMismatchError,
    NonFiniteGradError,
)
from .loss_tokens import NONE, describe_counting


@dataclasses.dataclass(frozen=True)
class Reasons:
    """The facts that one rank reports to the others for a rejected backward; ``who``: its name in error messages."""

    who: str
    microbatch: int
    nonfinite: Sequence[NonFinite]
    counting: str | None
    options: Sequence[float] = ()


@dataclasses.dataclass(frozen=True)
class Agreement:
    """The facts of one rank, or those of all ranks together: there a flag is set if any rank set it.

    Attributes:
        used: by parameter, whether it has a gradient.
        late: by bucket, whether a gradient came after it was launched.
        microbatch: the number that the training loop counts, to which the reducer adds a digest of the step's options,
            compared in its last eight bits; None if the numbers of the ranks differ.
        has_nonfinite: whether a gradient is infinite or NaN.
        wants_other_order: whether buckets would be launched materially earlier in another order.
        counting: whether a loss was counted by tokens, and whether one was not. Both together are an error.
        others: further flags, the same number on all ranks.
        is_late_refused: whether a gradient came late in some replica, which is an error there.
    """

    used: Sequence[bool]
    late: Sequence[bool]
    microbatch: int | None
    has_nonfinite: bool
    wants_other_order: bool
    counting: tuple[bool, bool]
    others: Sequence[bool] = ()
    is_late_refused: bool = False

    def encode(self) -> list[int]:
        """Returns bytes whose maximum over ranks, element by element, encodes the facts of all ranks together."""
        return [*self.others, *self.used, *self.late, *self._shared()]

    def _shared(self) -> list[int]:
        """Returns the facts that do not belong to one parameter or bucket."""
        return [*_pair(self.microbatch), *self.counting, self.has_nonfinite, self.wants_other_order]

    @classmethod
    def decode(cls, numbers: Sequence[int], num_params: int, num_others: int = 0) -> Agreement:
        """Returns the facts in the maximum over ranks of :meth:`encode`, for so many parameters."""
        *flags, last, complement, is_counted, is_uncounted, has_nonfinite, wants_other_order = numbers
        return cls(
            used=[bool(flag) for flag in flags[num_others:][:num_params]],
            late=[bool(flag) for flag in flags[num_others + num_params :]],
            microbatch=last if complement == 255 - last else None,
            has_nonfinite=bool(has_nonfinite),
            wants_other_order=bool(wants_other_order),
            counting=(bool(is_counted), bool(is_uncounted)),
            others=[bool(flag) for flag in flags[:num_others]],
        )

    def over_ranks(self, collectives: Collectives, tensor_ranks: Collectives | None) -> Agreement:
        """Returns the facts of all ranks together. Collective: one reduction of a byte per parameter, between hosts.

        On one rank nothing is sent; see interface's [Note: why ranks agree over their hosts]. Tensor ranks reject a
        backward and move to another layout together, but used and late parameters are each tensor rank's own.
        """
        agreed = self
        if collectives.size > 1:
            agreed = Agreement.decode(collectives.max_of_bytes(self.encode()), len(self.used), len(self.others))
        if tensor_ranks is None:
            return agreed
        every = Agreement.decode(tensor_ranks.max_of_bytes(agreed._shared()), 0)
        return dataclasses.replace(every, used=agreed.used, late=agreed.late)

    @property
    def is_refused(self) -> bool:
        """Whether the gradients of all ranks are rejected."""
        return self.microbatch is None or self.has_nonfinite or all(self.counting) or self.is_late_refused

    def refusal(self, own: Reasons, collectives: Collectives, tensor_ranks: Collectives | None) -> MegastrategyError:
        """Returns the error that all ranks raise for rejected gradients. Collective."""
        if self.is_late_refused:
            return BucketInFlightError(_LATE)
        every: list[Reasons] = collectives.all_gather_objects(own)
        if tensor_ranks is not None:
            every = [reasons for of_one in tensor_ranks.all_gather_objects(every) for reasons in of_one]
        if self.microbatch is None:
            if len({reasons.microbatch for reasons in every}) == 1:
                options = "; ".join(f"{reasons.who}: {list(reasons.options)}" for reasons in every)
                return LayoutMismatchError(_OPTIONS.format(options))
            return MicrobatchMismatchError(
                describe_microbatches({reasons.who: reasons.microbatch for reasons in every})
            )
        if self.has_nonfinite:
            nonfinite = [found for reasons in every for found in reasons.nonfinite]
            return NonFiniteGradError(describe_nonfinite(nonfinite) if nonfinite else _ELSEWHERE)
        return LossTokensError(describe_counting({reasons.who: reasons.counting or NONE for reasons in every}))


_OPTIONS = (
    "the ranks have stepped with different options. lr, weight_decay and momentum by group, where the optimizer has "
    "them: {}. Each rank steps its shard with its own. Change options alike on all ranks: a schedule that follows a "
    "metric (ReduceLROnPlateau) needs the same metric everywhere (self.log(..., sync_dist=True), or an all-reduce)"
)
_ELSEWHERE = (
    "a gradient in another replica is infinite or NaN: the error of its ranks names the parameter. All replicas reject "
    "these gradients"
)
_LATE = (
    "a gradient arrived after its bucket had been sent (a layer used by two re-entrant checkpoints, or a backward "
    "inside another), in this replica or another one. With replicas a bucket cannot be reduced twice: use "
    "checkpoint(use_reentrant=False), or overlap_grad_reduce=False"
)


def name_of(collectives: Collectives, tensor_ranks: Collectives | None) -> str:
    """Returns this rank's name in error messages."""
    return f"rank {collectives.rank}" + (f", tensor rank {tensor_ranks.rank}" if tensor_ranks is not None else "")


def _pair(number: int | None) -> tuple[int, int]:
    """Returns two bytes whose maxima over ranks add up to 255 if all ranks have the same number, otherwise to more."""
    # One maximum cannot show that ranks differ. Eight bits are enough: ranks differ by one or two microbatches, and
    # every synchronised backward compares them.
    return (255, 255) if number is None else (number % 256, 255 - number % 256)


def describe_microbatches(by_rank: Mapping[str, int]) -> str:
    """Returns the error message with each rank's number."""
    return (
        "the ranks reduce the gradients of different microbatches: "
        + ", ".join(f"{rank} is at number {number}" for rank, number in by_rank.items())
        + ". A rank that is ahead ran a training_step without a backward (one that returned None, or skipped its "
        "batch) where others had one. Run a backward on every rank, on zero times the loss if need be"
    )
