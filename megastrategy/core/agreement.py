"""The ranks exchange a few facts at the end of a synchronised backward: a byte for each, in one reduction."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

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

    def over_ranks(self, collectives: Collectives, device: torch.device) -> Agreement:
        """Returns the facts of all ranks together. Collective: one reduction on ``device``, of a byte a parameter."""
        tensor = torch.tensor(self.encode(), dtype=torch.uint8, device=device)
        collectives.all_reduce_max(tensor).wait()
        # The host decides by it what becomes of .grad, so on CUDA this waits for the device, once a synchronised
        # backward.
        return Agreement.decode(tensor.tolist(), len(self.used))
