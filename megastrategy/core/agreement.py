"""The ranks exchange a few facts at the end of a synchronised backward: a byte each, in one reduction of the hosts."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from .collectives import Collectives


@dataclasses.dataclass(frozen=True)
class Agreement:
    """The facts of one rank, or those of all ranks together: there a flag is set if any rank set it.

    Attributes:
        used: by parameter, whether it has a gradient.
        late: by bucket, whether a gradient came after it was launched.
        microbatch: the number of the training loop's, of which the last eight bits are compared; None where the ranks
            did not all say the same.
        has_nonfinite: whether a gradient is infinite or NaN.
        wants_other_order: whether buckets would be launched materially earlier in another order.
    """

    used: Sequence[bool]
    late: Sequence[bool]
    microbatch: int | None
    has_nonfinite: bool
    wants_other_order: bool

    def encode(self) -> list[int]:
        """Bytes of which the maximum over ranks, element by element, is what they agree on."""
        assert self.microbatch is not None, "a rank knows where it is"
        # Eight bits are enough: ranks part by a microbatch or two, and are compared in every synchronised backward.
        last = self.microbatch % 256
        # A maximum cannot show that ranks differ. So each sends n and 255 - n: if all n are equal, the two maxima add
        # up to 255, else to more.
        return [*self.used, *self.late, last, 255 - last, self.has_nonfinite, self.wants_other_order]

    @classmethod
    def decode(cls, numbers: Sequence[int], num_params: int) -> Agreement:
        """Reads the maximum over ranks of what :meth:`encode` gave, for so many parameters."""
        *flags, last, complement, has_nonfinite, wants_other_order = numbers
        return cls(
            used=[bool(flag) for flag in flags[:num_params]],
            late=[bool(flag) for flag in flags[num_params:]],
            microbatch=last if complement == 255 - last else None,
            has_nonfinite=bool(has_nonfinite),
            wants_other_order=bool(wants_other_order),
        )

    def over_ranks(self, collectives: Collectives) -> Agreement:
        """Returns the facts of all ranks together. Collective: one reduction of a byte a parameter, between hosts.

        On one rank these are all the facts, and nothing is sent. See [Note: what the host waits for].
        """
        if collectives.size == 1:
            return self
        return Agreement.decode(collectives.max_of_bytes(self.encode()), len(self.used))
