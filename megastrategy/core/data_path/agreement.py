"""The facts that ranks exchange at the end of a synchronised backward: a byte each, in one maximum over ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch

from ..collectives import Collectives
from ..errors import (
    BackwardFailedError,
    LayoutMismatchError,
    LossTokensError,
    MegastrategyError,
    MicrobatchMismatchError,
    NonFiniteGradError,
)
from .nonfinite import NonFinite, describe_nonfinite
from .tokens import NONE, describe_counting


@dataclasses.dataclass(frozen=True)
class Reasons:
    """The facts that one rank reports to the others for rejected gradients.

    Attributes:
        rank: its name in error messages.
        options: lr, weight_decay, momentum and betas of its last step.
        failure: the exception of its forward or backward, as text; None for none.
        counting: which of its losses were counted by tokens; None for none yet.
    """

    rank: str
    microbatch: int
    nonfinite: Sequence[NonFinite]
    options: Sequence[float]
    failure: str | None
    counting: str | None


@dataclasses.dataclass(frozen=True)
class Agreement:
    """The facts of one rank, or of all ranks together: there a flag is set if any rank has set it.

    Attributes:
        used: a byte for each parameter, in launch order: whether it has a gradient.
        late: a byte for each bucket: whether a gradient came after its launch.
        has_failed: whether a forward or a backward raised.
        has_nonfinite: whether a gradient is infinite or NaN.
        counting: whether a loss was counted by tokens, and whether one was not. Both together are an error.
        microbatch: the number that the training loop counts, with a digest of the step's options added, compared in
            its last eight bits; None if the ranks differ.
    """

    used: bytes
    late: bytes
    has_failed: bool
    has_nonfinite: bool
    counting: tuple[bool, bool]
    microbatch: int | None

    def over_ranks(self, ranks: Collectives, tensor_ranks: Collectives | None) -> Agreement:
        """Returns the facts of all ranks together. Collective, between hosts; on one rank nothing is sent.

        Tensor ranks reject gradients together; used and late parameters are each tensor rank's own.
        """
        agreed = self._over(ranks)
        if tensor_ranks is None:
            return agreed
        of_model = dataclasses.replace(agreed, used=b"", late=b"")._over(tensor_ranks)
        return dataclasses.replace(of_model, used=agreed.used, late=agreed.late)

    def _over(self, ranks: Collectives) -> Agreement:
        if ranks.size == 1:
            return self
        # One maximum cannot show that ranks differ. Two can: they add up to 255 only if all ranks have one number.
        number = 255 if self.microbatch is None else self.microbatch % 256
        complement = 255 if self.microbatch is None else 255 - number
        flags = bytes((self.has_failed, self.has_nonfinite, *self.counting, number, complement))
        sent = self.used + self.late + flags
        facts = bytearray(sent)
        ranks.max_of_facts(torch.frombuffer(facts, dtype=torch.uint8))
        if facts == sent:
            return self
        num_used = len(self.used)
        num_flags = num_used + len(self.late)
        has_failed, has_nonfinite, is_counted, is_uncounted, last, complement = facts[num_flags:]
        return Agreement(
            used=bytes(facts[:num_used]),
            late=bytes(facts[num_used:num_flags]),
            has_failed=bool(has_failed),
            has_nonfinite=bool(has_nonfinite),
            counting=(bool(is_counted), bool(is_uncounted)),
            microbatch=number if last + complement == 255 else None,
        )

    @property
    def is_refused(self) -> bool:
        """Whether the gradients of all ranks are rejected."""
        return self.has_failed or self.has_nonfinite or all(self.counting) or self.microbatch is None

    def refusal(self, reasons: Reasons, ranks: Collectives, tensor_ranks: Collectives | None) -> MegastrategyError:
        """Returns the error that all ranks raise for rejected gradients. Collective."""
        of_ranks: list[Reasons] = ranks.all_gather_objects(reasons)
        if tensor_ranks is not None:
            of_ranks = [reasons for of_one in tensor_ranks.all_gather_objects(of_ranks) for reasons in of_one]
        if self.has_failed:
            failed = "; ".join(f"{one.rank}: {one.failure}" for one in of_ranks if one.failure is not None)
            return BackwardFailedError(_FAILED.format(failed))
        if self.has_nonfinite:
            return NonFiniteGradError(describe_nonfinite([found for one in of_ranks for found in one.nonfinite]))
        if self.microbatch is not None:
            counted = {one.rank: one.counting or NONE for one in of_ranks}
            return LossTokensError(describe_counting(counted))
        if len({one.microbatch for one in of_ranks}) > 1:
            return MicrobatchMismatchError(describe_microbatches({one.rank: one.microbatch for one in of_ranks}))
        return LayoutMismatchError(_OPTIONS.format("; ".join(f"{one.rank}: {list(one.options)}" for one in of_ranks)))


_FAILED = (
    "a forward or a backward raised on another rank, and all ranks drop the gradients of this batch: {}. If that rank "
    "goes on with its next batch, catch this error and do the same"
)
_OPTIONS = (
    "the ranks have stepped with different options, and each rank steps its shard with its own.\n"
    "lr, weight_decay, momentum and betas by group, where the optimizer has them: {}.\n"
    "Change options alike on all ranks: a schedule that follows a metric (ReduceLROnPlateau) needs the same metric "
    "everywhere (self.log(..., sync_dist=True), or an all-reduce)"
)


def name_of_rank(ranks: Collectives, tensor_ranks: Collectives | None) -> str:
    """Returns this rank's name in error messages."""
    return f"rank {ranks.rank}" + (f", tensor rank {tensor_ranks.rank}" if tensor_ranks is not None else "")


def describe_microbatches(by_rank: Mapping[str, int]) -> str:
    """Returns the error message with each rank's number."""
    return (
        "the ranks reduce the gradients of different microbatches: "
        + ", ".join(f"{rank} is at number {number}" for rank, number in by_rank.items())
        + ". A rank that is ahead ran a training_step without a backward (one that returned None, or skipped its "
        "batch) where others had one. Run a backward on every rank, on zero times the loss if need be"
    )
