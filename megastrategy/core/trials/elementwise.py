"""Tests by trial steps whether an optimizer updates each element by itself; it never looks at the optimizer's name.

Flat shards cut parameters anywhere and forget their shapes. That changes nothing for an optimizer whose update of an
element depends on that element's own gradient and state (SGD, Adam and most others), and everything for one that
looks at norms, rows or matrices (LAMB, Adafactor, Muon, Shampoo), or estimates one number from all of them
(D-Adaptation, Prodigy, DoG).

[Note: what decides]
A copy of the optimizer steps whole tensors, others step flat pieces of them, and everything is compared: the tensors,
the state of each, and whatever else the optimizer keeps. A coupling that grows slowly shows in the state before it
shows in a weight. A comparison means something only if the weights moved by much more than rounding hides, so a trial
at a small learning rate is followed by one at a larger. State that cannot be saved from shards decides like a step that
cannot be made on them. A trial whose answer is no raises NotForShardsError with the reason.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .identity import check_identity
from .isolation import Isolation
from .trial import FALLBACK_LR, Problem, StateAtStart, Trial, copy_optimizer, cut, values_of
from .values import (
    Copier,
    NotForShardsError,
    describe_error,
    describe_undividable,
    distances,
    equal,
    is_per_element,
    tensors_in,
)

# RAdam's first five are not yet its own
_NUM_STEPS = 6
_NUM_MORE_STEPS = 12
_RELATIVE = 1e-5
"""The part of a movement or a state by which two kernels may differ in rounding: far less than a coupling changes."""
_WELL_ABOVE = 10
"""The least movement of a weight that means anything, in multiples of its rounding."""


@dataclasses.dataclass(frozen=True)
class Findings:
    """The findings of an optimizer's trial steps.

    Attributes:
        reason: in words, why shards would not be stepped, or saved, as whole parameters are; None if they would.
        element_names: the names of its per-element state. Known if there is no reason.
        in_parts: whether a step may be several calls, each with some of the tensors in the groups, to the bit. Not if
            the optimizer keeps anything but state of tensors: a count of its calls, in itself or in a group.
        changed_entries: the entries of groups that its steps change, beside options that the user sets.
        whole_groups: the numbers of groups whose shards would not be, but whose parameters are stepped each by itself,
            so that they can be divided among ranks as a whole.
        whole_tensors: how many numbers the optimizer keeps per element of these parameters, at most, by their number
            of dimensions: Adafactor keeps one of vectors, and none of matrices.
    """

    reason: str | None
    element_names: frozenset[str] = frozenset()
    in_parts: bool = False
    changed_entries: frozenset[str] = frozenset()
    whole_groups: frozenset[int] = frozenset()
    whole_tensors: Mapping[int, int] = dataclasses.field(default_factory=dict)


def check_main_param_steps(optimizer: torch.optim.Optimizer) -> None:
    """Checks that the optimizer can step fp32 main params in place of whole 16-bit weights.

    No step is tried: whole parameters are stepped as under torch DDP, for the first time in the user's first step.

    Raises:
        NotForShardsError: if it cannot.
    """
    check_no_inner_optimizer(optimizer)
    try:
        # the class's: a scheduler's wrapper around the object's has the signature of an unbound function
        inspect.signature(type(optimizer).step).bind(optimizer)
    except TypeError as error:
        raise NotForShardsError(
            f"its step() cannot be called without arguments ({error}), and a closure would read the 16-bit weights"
        ) from None
    name = attribute_with_params(optimizer)
    if name is not None:
        raise NotForShardsError(
            f"its attribute {name!r} holds the 16-bit weights themselves, which it would step in their place"
        )
    check_identity(optimizer)


def attribute_with_params(optimizer: torch.optim.Optimizer) -> str | None:
    """The name of an attribute, beside the groups and the state, that contains some of the optimizer's parameters."""
    params = _params_of(optimizer)
    for name, value in optimizer.__dict__.items():
        if name not in ("param_groups", "state") and any(id(tensor) in params for tensor in tensors_in(value)):
            return name
    return None


def check_fp32_state(optimizer: torch.optim.Optimizer, dtypes: Collection[torch.dtype]) -> None:
    """Checks that the optimizer's constructor made nothing in the 16-bit ``dtypes`` that is not state of a weight.

    Beside fp32 main params it would stay as it is: in bf16 a count ends at 256, and a sum where the next term is less
    than its rounding. A tensor in ``state[param]`` becomes fp32. Options are the user's, whatever their dtype.

    Raises:
        NotForShardsError: if it did.
    """
    params = _params_of(optimizer)
    for name, value in _kept_elsewhere(optimizer) if dtypes else ():
        for tensor in tensors_in(value):
            if tensor.dtype in dtypes and id(tensor) not in params:
                dtype = str(tensor.dtype).removeprefix("torch.")
                raise NotForShardsError(f"{name} has {dtype} tensors, which would stay in 16 bits")


def _params_of(optimizer: torch.optim.Optimizer) -> set[int]:
    """The ``id`` of each parameter in its groups."""
    return {id(param) for group in optimizer.param_groups for param in group["params"]}


def _kept_elsewhere(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Any]]:
    """Names in words and values of all but options and the tensors in the state of each parameter."""
    for name, value in optimizer.__dict__.items():
        if name not in ("defaults", "param_groups", "state"):
            yield f"its attribute {name!r}", value
    for number, group in enumerate(optimizer.param_groups):
        # Options have defaults; an entry without one was made by the constructor, or by a scheduler.
        for name in group.keys() - optimizer.defaults.keys() - {"params"}:
            yield f"entry {name!r} of parameter group {number}", group[name]
    for key, value in optimizer.state.items():
        # State of no parameter: nothing says which main param it should follow.
        if not isinstance(key, Tensor):
            yield f"state {key!r}", value
            continue
        for name, item in value.items():
            if not isinstance(item, Tensor):
                # an object of the optimizer's own, for this parameter only: it leads to nothing else
                yield f"state {name!r} of a parameter", [item, *getattr(item, "__dict__", {}).values()]


class GroupProbe:
    """Trials with one parameter group's options, on whole tensors and on flat pieces of them."""

    others = "flat tensors"
    moved_otherwise = (
        "on a trial tensor of shape {shape}, {where} gave other results when the tensor was cut into flat pieces"
    )

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        number: int,
        problem: Problem,
        isolation: Isolation,
    ) -> None:
        self.optimizer = optimizer
        self.problem = problem
        self.isolation = isolation
        self.group = optimizer.param_groups[number]
        self.where = f"parameter group {number}"
        self._state_at_start: StateAtStart | None = None

    def check_first_step(self) -> None:
        """Raises NotForShardsError if the first step of the problem shows a reason."""
        self._compare(trial_lr(self.group), 1)

    def findings(self) -> Findings:
        """Returns the findings of all steps.

        Raises:
            NotForShardsError: if shards would not be stepped or saved as whole tensors are.
        """
        lr = trial_lr(self.group)
        whole, is_exact = self._compare(lr, _NUM_STEPS)
        if not (is_exact and self._moved_well(whole)):
            # rounding may hide what a larger movement shows: at the start of a warm-up, or before an estimate has grown
            lr = None if lr is None else max(lr, FALLBACK_LR)
            whole, _ = self._compare(lr, _NUM_MORE_STEPS)
            if not self._moved_well(whole):
                raise NotForShardsError(self._moved_too_little(whole))
        names = set[str]()
        by_dim = dict[int, int]()
        for number, param in enumerate(whole.params):
            state = whole.state(number)
            kept = {name for name, value in state.items() if is_per_element(name, value, param.shape, None)}
            names |= kept
            by_dim[param.dim()] = max(by_dim.get(param.dim(), 0), len(kept))
        # Without tensors, which are the trial's: the model's own may be DTensors, which compare with their like only.
        after = {name: value for name, value in whole.optimizer.param_groups[0].items() if name != "params"}
        changed = frozenset(
            name for name in after if name not in self.group or not equal(self.group[name], after[name])
        )
        in_parts = self._steps_in_parts(whole, lr)
        self._check_modes(whole, lr)
        return Findings(None, frozenset(names), in_parts, frozenset(changed), whole_tensors=by_dim)

    def _copy(self, lr: float | None) -> torch.optim.Optimizer:
        # Made anew for each trial: an optimizer that keeps something outside of its state would carry it into the next.
        copied = copy_optimizer(self.optimizer, self.group, lr)
        if self._state_at_start is not None:
            copied.state = self._state_at_start.copy()
        return copied

    def _run_whole(self, lr: float | None, num_steps: int) -> Trial:
        try:
            return self.problem.run(self._copy(lr), num_steps)
        except KeyError:
            # its step may count on state that its constructor made, as Adagrad's does in torch 2.12
            if self._state_at_start is not None:
                raise
            self._state_at_start = StateAtStart.like(self.optimizer, self.group)
            return self.problem.run(self._copy(lr), num_steps)

    def _compare(self, lr: float | None, num_steps: int) -> tuple[Trial, bool]:
        """Returns the trial on whole tensors, and whether the weights are equal without an allowance for rounding."""
        try:
            whole = self._run_whole(lr, num_steps)
        except Exception as error:
            raise NotForShardsError(f"a trial step of {self.where} raised {describe_error(error)}") from error
        try:
            # With the gradients of the whole tensors, though pieces may have moved otherwise: else the two would differ
            # for rounding only.
            pieces = self._rerun(whole, lr)
        except Exception as error:
            said = describe_error(error)
            raise NotForShardsError(f"a trial step of {self.where} on {self.others} raised {said}") from error
        self._check_kept(whole, pieces)
        self._check_saved(whole)
        return whole, self._moves_alike(whole, pieces)

    def _rerun(self, whole: Trial, lr: float | None) -> list[Trial]:
        return self.problem.rerun_cut(lambda: self._copy(lr), whole)

    def _rounding(self, whole: Trial, number: int) -> Tensor:
        """The distance that rounding may take each element of a tensor in the trial."""
        start = self.problem.starts[number]
        # Half a unit in the last place for each step, in either of the two runs that are compared.
        return start.abs().mul_(len(whole.grads) * torch.finfo(start.dtype).eps)

    def _moves_alike(self, whole: Trial, pieces: Sequence[Trial]) -> bool:
        """Whether the weights are equal without an allowance for their rounding; raises if they are not with it."""
        is_exact = True
        for number, (param, other) in enumerate(zip(whole.params, self._joined(pieces), strict=True)):
            difference = (param.detach() - other.view_as(param)).abs_()
            moved = whole.reach[number]
            # As close as two kernels come: the weights' rounding is not needed to explain it, so nothing hides in it.
            if bool((difference <= _RELATIVE * moved).all()):
                continue
            is_exact = False
            if not bool((difference <= _RELATIVE * self._scale(moved) + self._rounding(whole, number)).all()):
                raise NotForShardsError(
                    self.moved_otherwise.format(shape=tuple(param.shape), where=self.where)
                    + f" (largest difference {difference.max().item():.3g} where the step was "
                    f"{moved.max().item():.3g})"
                )
        return is_exact

    def _joined(self, pieces: Sequence[Trial]) -> Iterator[Tensor]:
        """Yields the stepped tensors that are compared with the whole ones."""
        return (torch.cat(parts) for parts in zip(*(piece.params for piece in pieces), strict=True))

    def _scale(self, moved: Tensor) -> Tensor:
        return moved

    def _moved_well(self, whole: Trial) -> bool:
        """Whether in each piece half of the larger weights moved by much more than their rounding."""
        for number, spans in enumerate(self._parts_to_move()):
            well = (whole.reach[number] >= _WELL_ABOVE * self._rounding(whole, number)).reshape(-1)
            # Weights of zero move exactly, and small ones nearly so: only larger ones hide a coupling in rounding.
            large = (self.problem.starts[number].abs() > 0.1).reshape(-1)
            for span in spans:
                if well[slice(*span)][large[slice(*span)]].float().mean() < 0.5:
                    return False
        return True

    def _parts_to_move(self) -> Iterator[Sequence[tuple[int, int]]]:
        return zip(*self.problem.spans(), strict=True)

    def _moved_too_little(self, whole: Trial) -> str:
        most = max(reach.max().item() for reach in whole.reach)
        moved = "nothing" if most == 0 else f"weights of size 1 by {most:.3g} at most"
        return (
            f"{len(whole.grads)} trial steps of {self.where} moved {moved}, so they tell nothing: a step() without a "
            "closure has to move the tensors in its groups that have a gradient"
        )

    def _check_kept(self, whole: Trial, pieces: Sequence[Trial]) -> None:
        """Raises if the optimizer's state differs for flat pieces, or if their checkpoint cannot contain it."""
        for piece, spans in zip(pieces, self.problem.spans(), strict=True):
            self._check_names(whole, piece)
            self._check_values(whole, piece, spans)

    def _check_names(self, whole: Trial, piece: Trial) -> None:
        for number, param in enumerate(piece.params):
            kept = whole.state(number).keys()
            of_piece = piece.state(number)
            for name, value in of_piece.items():
                # First, since a reason that names what cannot be divided says more than names that differ.
                found = describe_undividable(name, value, param.shape)
                if found is not None:
                    raise NotForShardsError(f"for a flat piece of {param.numel()} elements {self.where} keeps {found}")
            if kept != of_piece.keys():
                raise NotForShardsError(
                    f"{self.where} keeps {sorted(map(str, kept))} for a whole trial tensor and "
                    f"{sorted(map(str, of_piece))} for flat pieces of it"
                )

    def _check_values(
        self, whole: Trial, piece: Trial, spans: Sequence[tuple[int, int]], others: str = "flat pieces of them"
    ) -> None:
        expected = dict(values_of(whole.optimizer))
        found = dict(values_of(piece.optimizer))
        for name in dict.fromkeys((*expected, *found)):  # in order, so that the reason is the same on all ranks
            one = _not_of_tensors(expected.get(name))
            other = _not_of_tensors(found.get(name))
            if name not in expected or name not in found or not equal(one, other):
                raise self._differs(name, expected.get(name), found.get(name), others)
        for number, span in enumerate(spans):
            for name, value in piece.state(number).items():
                if not self._is_same_state(whole, number, name, value, span):
                    raise self._differs(f"state {name!r}", whole.state(number)[name], value, others)

    def _is_same_state(self, whole: Trial, number: int, name: str, value: Any, span: tuple[int, int]) -> bool:
        expected = whole.state(number)[name]
        if not is_per_element(name, expected, whole.params[number].shape, None):
            return equal(expected, value)
        # Some quantise state from a size on: pieces then have another class or dtype than the whole.
        if type(expected) is not type(value) or expected.dtype != value.dtype or value.numel() != span[1] - span[0]:
            return False
        size = whole.sizes.get((number, name))
        if size is None:  # whole numbers
            return torch.equal(cut(expected, span), value)
        tolerance = max(_RELATIVE, 4 * torch.finfo(value.dtype).eps)  # 16-bit states round to another neighbour
        return bool((distances(cut(expected, span), value) <= tolerance * cut(size, span)).all())

    def _differs(self, name: str, whole: Any, piece: Any, others: str) -> NotForShardsError:
        one = _in_words(whole)
        other = _in_words(piece)
        differs = f"is {one} for" if one != other else "is otherwise for"
        than = f"and {other} for" if one != other else "than for"
        return NotForShardsError(f"after trial steps of {self.where}, {name} {differs} whole tensors {than} {others}")

    def _check_saved(self, whole: Trial) -> None:
        """Raises if ``state_dict`` has something else than the state of tensors, which checkpoints contain."""
        try:
            saved = whole.optimizer.state_dict()
            # Keys beside torch's own, and state under numbers that no parameter has, are lost in a checkpoint.
            more = [*(saved.keys() - {"state", "param_groups"})]
            more += saved["state"].keys() - set(range(len(whole.params)))
            for number in range(len(whole.params)):
                more += self._differing_names(saved["state"].get(number, {}), whole.state(number))
        except Exception as error:
            raise NotForShardsError(f"its state_dict() raised {describe_error(error)}") from error
        if more:
            names = ", ".join(map(repr, dict.fromkeys(more)))
            raise NotForShardsError(f"its state_dict() and the state of its tensors differ in {names}")

    def _differing_names(self, saved: dict[str, Any], kept: dict[str, Any]) -> list[str]:
        """The names of one tensor's state that are not saved as they are kept."""
        return sorted(saved.keys() ^ kept.keys(), key=str)

    def _check_modes(self, whole: Trial, lr: float | None) -> None:
        """Raises if ``eval()`` or ``train()`` moves weights otherwise than a step may, or without a record of it in an
        option or attribute, by which ranks know that they have to gather the weights."""
        if not callable(getattr(whole.optimizer, "train", None)) or not callable(
            getattr(whole.optimizer, "eval", None)
        ):
            return
        pieces = self._rerun(whole, lr)
        for name in ("eval", "train"):
            options = Copier().copy(dict(values_of(whole.optimizer)))
            weights = [param.detach().clone() for param in whole.params]
            try:
                with torch.no_grad():
                    for trial in (whole, *pieces):
                        getattr(trial.optimizer, name)()
            except Exception as error:
                raise NotForShardsError(f"a trial of its {name}() raised {describe_error(error)}") from error
            if not all(map(torch.equal, weights, whole.params)) and equal(options, dict(values_of(whole.optimizer))):
                raise NotForShardsError(f"its {name}() moves weights, and no option or attribute says that it did")
            self._check_kept(whole, pieces)
            self._moves_alike(whole, pieces)

    def _steps_in_parts(self, whole: Trial, lr: float | None) -> bool:
        before = dict(values_of(self._copy(lr)))
        # It counts its calls somewhere, and would count each part of a step as one.
        if not equal(before, dict(values_of(whole.optimizer))):
            return False
        found: list[Trial] = []
        copied = self._copy(lr)
        try:
            # Compared to the bit: the caller splits a step only for the cache's sake, and promises the same weights.
            if self.isolation.draws(lambda: found.append(self.problem.rerun_in_parts(copied, whole))):
                return False
        except Exception:  # noqa: BLE001 - whatever an unknown optimizer raises, it is an answer
            return False
        (parts,) = found
        states = all(equal(whole.state(number), parts.state(number)) for number in range(len(whole.params)))
        is_same = states and all(map(torch.equal, whole.params, parts.params))
        return is_same and equal(before, dict(values_of(parts.optimizer)))


def check_no_inner_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Raises NotForShardsError for an optimizer that contains another one: it steps the model's own parameters, also in
    a copy, whatever is in its groups."""
    for name, value in optimizer.__dict__.items():
        held = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else (value,)
        for inner in held:
            if isinstance(inner, torch.optim.Optimizer):
                raise NotForShardsError(
                    f"it steps another optimizer, its attribute {name!r}, which does not see what is put into its "
                    f"groups. Use that {type(inner).__name__} itself"
                )


def trial_lr(group: dict[str, Any]) -> float | None:
    """The group's own learning rate, from before a warm-up if that was larger; None if it has no number."""
    # Some have none (it is a schedule of their own); nothing is put in its place.
    if not isinstance(group.get("lr"), Tensor | float | int):
        return None
    # initial_lr is the scheduler's note of the rate before a warm-up began with nearly nothing.
    rates = [float(group[name]) for name in ("lr", "initial_lr") if isinstance(group.get(name), Tensor | float | int)]
    return max((rate for rate in rates if rate > 0), default=FALLBACK_LR)


def _not_of_tensors(value: Any) -> Any:
    """Leaves out state by tensor, which whole tensors and pieces cannot have alike: their movement is compared."""
    return (
        {key: item for key, item in value.items() if not isinstance(key, Tensor)} if isinstance(value, dict) else value
    )


def _in_words(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{value.item():.6g}" if value.numel() == 1 else f"{type(value).__name__} of {value.dtype}"
    if isinstance(value, float):
        return f"{value:.6g}"
    return str(value)[:40] if isinstance(value, int | str | None) else f"a {type(value).__name__}"
