"""The poison test: change the gradient of some elements, and look at which others change with them.

[Note: the poison test]
A copy of the optimizer steps small tensors. Other copies do the same while some gradients are other numbers, 1e30,
infinite or NaN. Everything else has to stay equal to the bit: these are the same kernels on tensors of the same
shapes, so that no tolerance is needed.

- A group is *flat* if no other element becomes different, and the pieces of two ranks get the bits of the whole.
- It is *whole* if no other parameter becomes different, and two ranks, each with every second parameter, get the same.
- Anything else needs all of its parameters at once, and is refused.

What no step of the twelve and no size among the shapes wakes is not seen: a norm from the hundredth step on, or blocks
above some thousand elements.

[Note: tensors and gradients of the poison test]
- Two tensors of a shape, which an update may batch, and another one; of the numbers of dimensions that the group has,
  and vectors beside scalars, which are stepped as one.
- Large ones where a group has such: states in blocks begin at 4,096 elements or where both sides have 128, and some
  only where 256 divides the size. A large vector only where nothing else is large: of a vector with 4,096 elements
  some keep a matrix with as many rows.
- Small and zero weights, which show small steps. Pieces end at a multiple of 64, so that elements keep their place in
  the vectors of a processor's kernel.
- In some steps all gradients are zero, or of one sign: what is counted or skipped then shows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .copies import NUM_STEPS, Copies, Inputs, Place, as_it_is
from .element_state import describe_undividable
from .identity import check_kept
from .values import NotClassifiedError, StoppedError, describe_error, same

CUT = 64
LARGE = 4_096
_SHAPES: dict[int, list[tuple[int, ...]]] = {0: [(), ()], 1: [(7,), (256,)], 2: [(24, 24), (24, 24), (33, 5)]}
"""By number of dimensions."""
_HUGE = (1e30, math.inf, math.nan)

Reasons = dict[int, list[str]]
"""By group, why it is not flat, and behind it why it is not whole either."""


def make_inputs(number: int, shapes: Sequence[tuple[int, ...]], device: torch.device, dtype: torch.dtype) -> Inputs:
    """Returns weights and gradients for a group with parameters of these shapes, the same at each call."""
    dims = set(map(len, shapes))
    if 0 in dims:
        dims.add(1)  # scalars are stepped as one vector: its norm is not theirs, and its state is not of shape ()
    largest = {dim: max((math.prod(shape) for shape in shapes if len(shape) == dim), default=0) for dim in sorted(dims)}
    if max(largest.values(), default=0) < LARGE <= sum(map(math.prod, shapes)):
        largest[max(largest)] = LARGE  # neighbours are stepped as one tensor
    has_large_matrix = any(dim > 1 and numel >= LARGE for dim, numel in largest.items())
    generator = torch.Generator().manual_seed(number)
    inputs: dict[Place, Tensor] = {}
    for dim, numel in (largest or {1: 0, 2: 0}).items():
        chosen = list(_SHAPES.get(dim, [(6, 5, *(3,) * (dim - 2))] * 2))
        if numel >= LARGE and (dim > 1 or (dim == 1 and not has_large_matrix)):
            chosen.append({1: (LARGE + 256,), 2: (144, 128)}.get(dim, (64, 18, *(2,) * (dim - 2))))
        for shape in chosen:
            values = torch.randn((NUM_STEPS + 1, *shape), generator=generator).to(device, dtype)
            if dim > 0:
                values[0].view(-1)[::3] *= 0
                values[0].view(-1)[1::3] *= 1e-3
            inputs[number, len(inputs)] = values
    return inputs


def _with_blanks(inputs: Inputs) -> Inputs:
    """Sets some gradients to zero, and those of two steps to one sign."""
    changed = {place: values.clone() for place, values in inputs.items()}
    for place, values in changed.items():
        rows = values[0].reshape(len(values[0]), -1) if values.dim() > 2 else values[0].reshape(1, -1)
        along = (values[1].view_as(rows) * rows).sum(1, keepdim=True) / rows.square().sum(1, keepdim=True)
        values[1] -= 0.99 * (along * rows).view_as(values[0])  # some project only what is nearly orthogonal
        values[4].abs_()
        values[6 + place[1] % 2] = 0
        values[9] *= _index(values[0]) % 2
        values[10].abs_().neg_()
    return changed


def _index(tensor: Tensor) -> Tensor:
    return torch.arange(tensor.numel(), device=tensor.device).view(tensor.shape)


class PoisonTest:
    """The poison test of one optimizer on these inputs; see [Note: the poison test].

    Attributes:
        base: the copy whose gradients are as they are.
        reasons: see :data:`Reasons`.

    Raises:
        NotClassifiedError: if no copy can be stepped, or no group can be divided.
    """

    def __init__(self, copies: Copies, inputs: Inputs) -> None:
        self._copies = copies
        self._inputs = _with_blanks(inputs)
        self.base = copies.run_first(self._inputs)
        if not all(param.isfinite().all() for param in self.base.params.values()):  # it divides by a norm of zero
            self._inputs = inputs
            self.base = copies.run(inputs)
        check_kept(self.base.optimizer, self.base.params.values())
        self.reasons: Reasons = {number: [] for number, _ in inputs}
        self._check_moved()
        self._check_saved()
        self._check_elements()
        self._check_ranks()
        if any(len(reasons) == 1 for reasons in self.reasons.values()):
            self._check_parameters()

    def _check_moved(self) -> None:
        for number in self.reasons:
            params = [(place, param) for place, param in self.base.params.items() if place[0] == number]
            if all(torch.equal(param, self._inputs[place][0]) for place, param in params):
                raise NotClassifiedError(
                    f"steps of a copy change no parameter of group {number}: a step() without a closure has to"
                )

    def _check_saved(self) -> None:
        """Checks that checkpoints can have all of the state, and which state can be cut."""
        try:
            saved = self.base.optimizer.state_dict()
            names = [values.keys() for values in saved["state"].values() if isinstance(values, Mapping)]
        except Exception as error:
            raise NotClassifiedError(f"its state_dict() raised {describe_error(error)}") from error
        lost: list[Any] = [key for key in self.base.optimizer.state if not isinstance(key, Tensor)]
        lost += saved.keys() - {"state", "param_groups"}
        if lost:
            raise NotClassifiedError(
                f"it keeps state {lost[0]!r}, which belongs to no parameter: a checkpoint would lose it"
            )
        for place, param in self.base.params.items():
            state = self.base.state(place)
            problems = [describe_undividable(name, value, tuple(param.shape)) for name, value in state.items()]
            if state and state.keys() not in names:
                problems.append(f"state that its state_dict() has under other names than {sorted(map(str, state))}")
            for reason in filter(None, problems):
                self.reasons[place[0]] = [f"it keeps {reason}"]

    def _check_elements(self) -> None:
        """Poisons every seventh element, the first and the last."""
        poisoned = {}
        for place, values in self._inputs.items():
            index = _index(values[0])
            is_last = index + 1 == index.numel()
            poisoned[place] = (index % 7 == 0) | is_last if index.dim() else (index + place[1]) % 2 == 1
        for number in self._changed(poisoned):
            self.reasons[number] = self.reasons[number] or ["an element changes with the gradients of others"]

    def _check_parameters(self) -> None:
        """Poisons every second parameter, both ways."""
        for half in (0, 1):
            poisoned = {
                place: torch.full_like(values[0], place[1] % 2 == half, dtype=torch.bool)
                for place, values in self._inputs.items()
            }
            for number in self._changed(poisoned):
                if len(self.reasons[number]) == 1:
                    self.reasons[number].append("a parameter changes with the gradients of others")

    def _changed(self, poisoned: Mapping[Place, Tensor]) -> set[int]:
        """Returns the groups in which something changes where ``poisoned`` is false."""
        changed = set[int]()
        for poison in (_other_numbers, _huge_numbers):
            try:
                run = self._copies.run(
                    {
                        place: torch.where(poisoned[place], poison(values), values)
                        for place, values in self._inputs.items()
                    }
                )
            except StoppedError:
                raise
            except NotClassifiedError:  # an SVD raises for infinite numbers
                if poison is _other_numbers:
                    return set(self.reasons)
                continue
            if not same(self.base.kept_elsewhere(), run.kept_elsewhere()):
                return set(self.reasons)
            for place, mask in poisoned.items():
                clean = ~mask.reshape(-1)
                if clean.any() and not same(self.base.values(place, clean), run.values(place, clean)):
                    changed.add(place[0])
        return changed

    def _check_ranks(self) -> None:
        """Compares two ranks, each with its parts: pieces of flat groups, every second parameter of whole ones."""
        reasons: dict[int, str] | None = None
        while reasons is None or reasons:
            levels = {number: len(known) for number, known in self.reasons.items()}
            reasons = self._differing_on_rank(0, levels) | self._differing_on_rank(1, levels)
            for number, reason in reasons.items():
                self.reasons[number].append(reason)

    def _differing_on_rank(self, rank: int, levels: Mapping[int, int]) -> dict[int, str]:
        parts: dict[Place, Tensor] = {}
        spans: dict[Place, slice] = {}
        for place, values in self._inputs.items():
            span = _span(rank, levels[place[0]], place[1], values[0].numel())
            if span is not None:
                spans[place] = span
                parts[place] = values.reshape(len(values), -1)[:, span] if levels[place[0]] == 0 else values
        lowest = min(levels.values())
        if not parts or lowest == 2:
            return {}
        what = "the parts that a rank has" if lowest == 0 else "half of the parameters"
        undecided = [number for number, level in levels.items() if level == lowest]
        try:
            run = self._copies.run(parts, as_it_is)
        except NotClassifiedError as error:
            return dict.fromkeys(undecided, f"with {what}, {error}")
        if not same(_plain(self.base.kept_elsewhere()), _plain(run.kept_elsewhere())):
            return dict.fromkeys(undecided, f"with {what}, an option or attribute becomes another")
        return {
            place[0]: "the parts that a rank has become others than among all"
            for place, span in spans.items()
            if levels[place[0]] < 2 and not same(self.base.values(place, span), run.values(place))
        }


def _span(rank: int, level: int, place: int, numel: int) -> slice | None:
    """Returns the elements that a rank has of a parameter; None if it has none."""
    if level == 0:
        cut = numel // 2 // CUT * CUT or numel * (place % 2)
        span = slice(0, cut) if rank == 0 else slice(cut, numel)
        return span if span.start < span.stop else None
    return slice(None) if level == 2 or place % 2 == rank else None


def _plain(values: Sequence[Any]) -> list[Any]:
    return [value for value in values if not isinstance(value, Tensor) or value.dim() == 0]


def _other_numbers(values: Tensor) -> Tensor:
    return 0.5 - 3 * values


def _huge_numbers(values: Tensor) -> Tensor:
    """Replaces some values by 1e30 in every third step, others by infinity or NaN in another step: what is finite
    afterwards shows whether an infinite or missing number was replaced by one that other elements decide."""
    changed = values.clone()
    kinds = _index(values[0]) // 7 % 3
    for kind, number in enumerate(_HUGE):
        changed[kind::3].masked_fill_(kinds == kind, number)
    return changed
