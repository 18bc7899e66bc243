"""What the ranks say to each other at the end of a synchronised backward: a byte a fact, in one reduction."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from .collectives import Collectives


@dataclasses.dataclass(frozen=True)
class Agreement:
    """What one rank says, or what all of them have said: then every flag is set that was set on some rank.

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
        last = self.microbatch % 256
        # the maximum of a number and that of its complement are complements only if all ranks have the same number
        return [*self.used, *self.late, last, 255 - last, self.has_nonfinite, self.wants_other_order]

    @classmethod
    def decode(cls, numbers: Sequence[int], num_params: int) -> Agreement:
        """From the maximum over ranks of what :meth:`encode` gave, for so many parameters."""
        *flags, last, complement, has_nonfinite, wants_other_order = numbers
        return cls(
            used=[bool(flag) for flag in flags[:num_params]],
            late=[bool(flag) for flag in flags[num_params:]],
            microbatch=last if complement == 255 - last else None,
            has_nonfinite=bool(has_nonfinite),
            wants_other_order=bool(wants_other_order),
        )

    def over_ranks(self, collectives: Collectives, device: torch.device) -> Agreement:
        """What all ranks have said. Collective, over tensors on ``device``: one reduction of a byte a parameter."""
        tensor = torch.tensor(self.encode(), dtype=torch.uint8, device=device)
        collectives.all_reduce_max(tensor).wait()
        return Agreement.decode(tensor.tolist(), len(self.used))
