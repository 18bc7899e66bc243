"""Tests by trial steps whether an optimizer that is not element-wise steps each parameter by itself.

Muon orthogonalises a matrix, Shampoo multiplies by factors of it, LAMB divides by its norm: such an update needs the
whole parameter, but no other one. Ranks may then step some of the parameters each. What is estimated from all of them
(Prodigy's distance, a global norm inside the step) changes with the parameters that a rank has.

[Note: trials of whole parameters]
One copy of the optimizer steps several tensors together, others step one each with the same gradients, and everything
is compared as for flat pieces. The tensors have the numbers of dimensions that the group's parameters have, since an
update may refuse others; two have one shape, which an optimizer may step as a batch; and two are as large as states in
blocks need, if a parameter is. The state of a parameter may be anything that can be saved: its owner has all of it.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from .elementwise import Findings, GroupProbe, attribute_with_params
from .isolation import Isolation, seed
from .trial import SPIKE, Problem, Trial
from .values import NotForShardsError, distances, equal, same_bits, tensors_in, with_arithmetic

_RELATIVE = 1e-5  # as for flat pieces: far less than a coupling changes
_LARGE = 4_096  # states in blocks begin there


_SMALL: dict[int, tuple[tuple[int, ...], tuple[int, ...]]] = {
    0: ((), ()),
    1: ((61,), (40,)),
    2: ((12, 33), (40, 16)),
}


def trial_shapes(shapes: Sequence[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
    """The shapes of a trial for parameters of these shapes; see [Note: trials of whole parameters]."""
    found: list[tuple[int, ...]] = []
    for dim in sorted({len(shape) for shape in shapes}):
        largest = max(math.prod(shape) for shape in shapes if len(shape) == dim)
        small, other = _SMALL.get(dim, ((6, 5, *(3,) * (dim - 2)), (5, 8, *(2,) * (dim - 2))))
        found += [small, other, small]
        if dim > 0 and largest >= _LARGE:
            found += 2 * [(_LARGE,) if dim == 1 else (128, 2 ** max(7 - dim, 0), *(2,) * (dim - 2))]
    return tuple(found)


class PerParameterProbe(GroupProbe):
    """Trials with the options of the groups ``numbers``, on tensors together and on each of them alone."""

    others = "one tensor alone"
    moved_otherwise = (
        "a trial tensor of shape {shape} in {where} became another when it was stepped without the others of the group"
    )

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        numbers: Sequence[int],
        device: torch.device,
        dtype: torch.dtype,
        isolation: Isolation,
    ) -> None:
        groups = [optimizer.param_groups[number] for number in numbers]
        shapes = trial_shapes([tuple(param.shape) for group in groups for param in group["params"]] or [(12, 33)])
        super().__init__(optimizer, numbers[0], Problem(device, dtype, shapes=shapes), isolation)
        self._spikes = Problem(device, dtype, shapes=shapes, scale=SPIKE)
        self._device = device

    def findings(self) -> Findings:
        # A trial copies what the optimizer keeps, but not parameters, which are the model's: it would step those.
        name = attribute_with_params(self.optimizer)
        if name is not None:
            raise NotForShardsError(
                f"its attribute {name!r} holds the parameters themselves, which are not its owner's alone"
            )
        seed(self._device)  # the same on all ranks, which have to find the same
        found = super().findings()
        self.problem = self._spikes
        self.check_first_step()
        return found

    def _rerun(self, whole: Trial, lr: float | None) -> list[Trial]:
        return self.problem.rerun_alone(lambda: self._copy(lr), whole)

    def _joined(self, pieces: Sequence[Trial]) -> Iterator[Tensor]:
        return (alone.params[0] for alone in pieces)

    def _scale(self, moved: Tensor) -> Tensor:
        return moved.max()

    def _check_kept(self, whole: Trial, pieces: Sequence[Trial]) -> None:
        for number, alone in enumerate(pieces):
            kept = whole.state(number)
            found = alone.state(0)
            for name in dict.fromkeys((*kept, *found)):
                if name not in kept or name not in found or not equal(kept[name], found[name], _close):
                    raise NotForShardsError(
                        f"after trial steps of {self.where}, state {name!r} of a tensor depends on the others"
                    )
            self._check_values(whole, alone, (), "each of them alone")
            _check_can_be_saved(found)

    def _differing_names(self, saved: dict[str, Any], kept: dict[str, Any]) -> list[str]:
        return []  # its own state_dict() writes them, and its load_state_dict() reads them

    def _parts_to_move(self) -> Iterator[Sequence[tuple[int, int]]]:
        return ([(0, start.numel())] for start in self.problem.starts)


def _close(a: Tensor, b: Tensor) -> bool:
    """Equal, except for the rounding of a kernel that processes several tensors at once."""
    if type(a) is not Tensor or type(b) is not Tensor or not a.is_floating_point() or not a.numel():
        return same_bits(a, b)
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    largest = with_arithmetic(a).abs().nan_to_num_().max()
    return bool((distances(a, b) <= max(_RELATIVE, 4 * torch.finfo(a.dtype).eps) * largest).all())


def _check_can_be_saved(state: dict[str, Any]) -> None:
    for name, value in state.items():
        if any(isinstance(tensor, Parameter) for tensor in tensors_in(value)):
            raise NotForShardsError(f"it keeps parameters in state {name!r}, which a checkpoint would copy")
        try:
            torch.save(value, io.BytesIO())
        except Exception as error:
            raise NotForShardsError(f"state {name!r} cannot be saved ({type(error).__name__}: {error})") from error
