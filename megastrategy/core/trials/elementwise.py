"""Does an optimizer update each element by itself? A numerical probe, never a list of names.

Flat shards cut parameters anywhere and forget their shapes. That changes nothing for an optimizer whose update of an
element depends on that element's own gradient and state (SGD, Adam and most others), and everything for one that
looks at norms, rows or matrices (LAMB, Adafactor, Muon, Shampoo), or estimates one number from all of them
(D-Adaptation, Prodigy, DoG).

[Note: what decides]
A copy of the optimizer steps whole tensors, others step flat pieces of them, and everything is compared: the tensors,
the state of each, and whatever else the optimizer keeps. A coupling that grows slowly shows in what is kept before it
shows in a weight. A comparison tells only if the weights moved by much more than rounding hides, so a trial at a small
learning rate is followed by one at a larger. What cannot be saved from shards is no better than what cannot be stepped.
"""

from __future__ import annotations

import collections
import dataclasses
import inspect
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from .isolation import Isolation
from .known_params import why_not_others
from .step_arguments import StepArguments
from .trial import FALLBACK_LR, Problem, StateAtStart, Trial, cut, distances, double_of, tensors_in, values_of

_NUM_STEPS, _NUM_MORE_STEPS = 6, 12  # RAdam's first five are not yet its own
_RELATIVE = 1e-5
"""The part of a movement or a state by which two kernels may differ in rounding: far less than a coupling changes."""
_WELL_ABOVE = 10
"""The least movement of a weight that tells anything of it, in multiples of its rounding."""


@dataclasses.dataclass(frozen=True)
class Findings:
    """The findings of an optimizer's trial steps.

    Attributes:
        reason: in words, why shards would not be stepped, or saved, as whole parameters are; None if they would.
        element_names: the names of what it keeps for each element. Known where there is no reason.
        in_parts: whether a step may be several calls, each with some of the tensors in the groups, to the bit. Not if
            the optimizer keeps anything but state of tensors: a count of its calls, in itself or in a group.
        changed_entries: the entries of groups that its steps change, beside options that the user sets.
        whole_groups: the numbers of groups whose shards would not be, but whose parameters are stepped each by itself,
            so that they can be divided among ranks as a whole.
        whole_tensors: how many numbers the optimizer keeps for each element of those, at most, by their number of
            dimensions: Adafactor keeps one of vectors, and none of matrices.
        may_communicate: whether the code of its step names torch.distributed.
    """

    reason: str | None
    element_names: frozenset[str] = frozenset()
    in_parts: bool = False
    changed_entries: frozenset[str] = frozenset()
    whole_groups: frozenset[int] = frozenset()
    whole_tensors: Mapping[int, int] = dataclasses.field(default_factory=dict)
    may_communicate: bool = False


class Raised(str):
    """The reason of findings whose trial step raised, with whole tensors too."""

    __slots__ = ()


def why_not_main_params(optimizer: torch.optim.Optimizer) -> str | None:
    """Why the optimizer cannot step fp32 main params in the place of whole 16-bit weights, in words; None if it can.

    It is looked at and not tried: whole parameters are stepped as under torch DDP, by nobody before the first step.
    """
    if (reason := why_not_trialled(optimizer)) is not None:
        return reason
    try:
        # the class's: a scheduler's wrapper around the object's has the signature of an unbound function
        inspect.signature(type(optimizer).step).bind(optimizer)
    except TypeError as error:
        return f"its step() cannot be called without arguments ({error}), and a closure would read the 16-bit weights"
    if (name := attribute_with_params(optimizer)) is not None:
        return f"its attribute {name!r} holds the 16-bit weights themselves, which it would step in their place"
    return why_not_others(optimizer)


def attribute_with_params(optimizer: torch.optim.Optimizer) -> str | None:
    """The name of an attribute, beside the groups and the state, that contains some of the optimizer's parameters."""
    params = _params_of(optimizer)
    for name, value in optimizer.__dict__.items():
        if name not in ("param_groups", "state") and any(id(tensor) in params for tensor in tensors_in(value)):
            return name
    return None


def why_not_in_fp32(optimizer: torch.optim.Optimizer, dtypes: Collection[torch.dtype]) -> str | None:
    """Names what the optimizer made in the 16-bit ``dtypes`` of its weights when it was constructed, where nobody can
    tell that it is state of a weight; None if nothing.

    Beside fp32 main params it would stay as it is: in bf16 a count ends at 256, and a sum where the next term is less
    than its rounding. A tensor in ``state[param]`` becomes fp32. Options are the user's, whatever their dtype.
    """
    params = _params_of(optimizer)
    for name, value in _kept_elsewhere(optimizer) if dtypes else ():
        for tensor in tensors_in(value):
            if tensor.dtype in dtypes and id(tensor) not in params:
                return f"{name} has {str(tensor.dtype).removeprefix('torch.')} tensors, which would stay in 16 bits"
    return None


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
        # State of no parameter: nobody can tell which main param it should follow.
        if not isinstance(key, Tensor):
            yield f"state {key!r}", value
            continue
        for name, item in value.items():
            if not isinstance(item, Tensor):
                # an object of the optimizer's own, for this parameter alone: it leads to nothing else
                yield f"state {name!r} of a parameter", [item, *_attributes(item)]


def _attributes(item: Any) -> list[Any]:
    declared = [vars(kind).get("__slots__", ()) for kind in type(item).__mro__]
    slots = [name for names in declared for name in ([names] if isinstance(names, str) else names)]
    return [*getattr(item, "__dict__", {}).values(), *(getattr(item, name, None) for name in slots)]


class GroupProbe:
    """Trials with one parameter group's options, on whole tensors and on flat pieces of them.

    Attributes:
        others: the tensors of the second kind, in words.
    """

    others = "flat tensors"

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        number: int,
        problem: Problem,
        arguments: StepArguments,
        isolation: Isolation,
    ) -> None:
        self.optimizer, self.problem, self.arguments, self.isolation = optimizer, problem, arguments, isolation
        self.group = optimizer.param_groups[number]
        self.where = f"parameter group {number}"
        self._state_at_start: StateAtStart | None = None

    def early_reason(self) -> str | None:
        """The reason that one step of a small problem shows, or None."""
        return self._compare(trial_lr(self.group), 1)[1]

    def findings(self) -> Findings:
        lr = trial_lr(self.group)
        whole, reason, is_exact = self._compare(lr, _NUM_STEPS)
        if whole is not None and reason is None and not (is_exact and self._moved_well(whole)):
            # rounding may hide what a larger movement shows: at the start of a warm-up, or before an estimate has grown
            lr = None if lr is None else max(lr, FALLBACK_LR)
            whole, reason, _ = self._compare(lr, _NUM_MORE_STEPS)
            if whole is not None and reason is None and not self._moved_well(whole):
                reason = self._moved_too_little(whole)
        if whole is None or reason is not None:
            return Findings(reason)
        names, by_dim = set[str](), dict[int, int]()
        for number, param in enumerate(whole.params):
            state = whole.state(number)
            kept = {name for name, value in state.items() if is_per_element(name, value, param.shape, None)}
            names |= kept
            by_dim[param.dim()] = max(by_dim.get(param.dim(), 0), len(kept))
        # Without tensors, which are the trial's: the model's own may be DTensors, which compare with their like alone.
        after = {name: value for name, value in whole.optimizer.param_groups[0].items() if name != "params"}
        changed = frozenset(
            name for name in after if name not in self.group or not equal(self.group[name], after[name])
        )
        in_parts = self._steps_in_parts(whole, lr)
        return Findings(None, frozenset(names), in_parts, frozenset(changed), whole_tensors=by_dim)

    def _double(self, lr: float | None) -> torch.optim.Optimizer:
        # Made anew for each trial: an optimizer that keeps something outside of its state would carry it into the next.
        self.isolation.restore()
        double = double_of(self.optimizer, self.group, lr, self.arguments)
        if self._state_at_start is not None:
            double.state = self._state_at_start.copy()
        return double

    def _run_whole(self, lr: float | None, num_steps: int) -> Trial:
        try:
            return self.problem.run(self._double(lr), num_steps)
        except KeyError:
            # its step may count on state that its constructor made, as Adagrad's does in torch 2.12
            if self._state_at_start is not None:
                raise
            self._state_at_start = StateAtStart.like(self.optimizer, self.group)
            return self.problem.run(self._double(lr), num_steps)

    def _compare(self, lr: float | None, num_steps: int) -> tuple[Trial | None, str | None, bool]:
        """The trial on whole tensors, the reason found, and whether no rounding of weights was needed to find none."""
        try:
            whole = self._run_whole(lr, num_steps)
        except Exception as error:  # noqa: BLE001 - whatever an unknown optimizer raises, it is an answer
            return None, Raised(f"a trial step of {self.where} raised {_said(error)}"), False
        try:
            # With the gradients of the whole tensors, though pieces may have moved otherwise: else the two would part
            # for rounding alone.
            pieces = self._rerun(whole, lr)
        except Exception as error:  # noqa: BLE001 - as above
            return None, f"a trial step of {self.where} on {self.others} raised {_said(error)}", False
        reason = self._keeps_otherwise(whole, pieces) or self._saves_otherwise(whole)
        moved, is_exact = self._moves_otherwise(whole, pieces)
        return whole, reason or moved, is_exact

    def _rerun(self, whole: Trial, lr: float | None) -> list[Trial]:
        return self.problem.rerun_cut(lambda: self._double(lr), whole)

    def _rounding(self, whole: Trial, number: int) -> Tensor:
        """The distance that rounding may take each element of a tensor in the trial."""
        start = self.problem.starts[number]
        # Half a unit in the last place for each step, in either of the two runs that are compared.
        return start.abs().mul_(len(whole.grads) * torch.finfo(start.dtype).eps)

    def _moves_otherwise(self, whole: Trial, pieces: Sequence[Trial]) -> tuple[str | None, bool]:
        is_exact = True
        for number, param in enumerate(whole.params):
            flat = torch.cat([piece.params[number] for piece in pieces])
            difference, moved = (param.detach().reshape(-1) - flat).abs_(), whole.reach[number].reshape(-1)
            # As close as two kernels come: the weights' rounding is not needed to explain it, so nothing hides in it.
            if bool((difference <= _RELATIVE * moved).all()):
                continue
            is_exact = False
            if not bool((difference <= _RELATIVE * moved + self._rounding(whole, number).reshape(-1)).all()):
                return (
                    f"on a trial tensor of shape {tuple(param.shape)}, {self.where} gave other results when the tensor "
                    f"was cut into flat pieces (largest difference {difference.max().item():.3g} where the step was "
                    f"{moved.max().item():.3g})"
                ), is_exact
        return None, is_exact

    def _moved_well(self, whole: Trial) -> bool:
        """Whether in each piece half of the larger weights moved by much more than their rounding."""
        for number, spans in enumerate(self._parts_to_move()):
            well = (whole.reach[number] >= _WELL_ABOVE * self._rounding(whole, number)).reshape(-1)
            # Weights of zero move exactly, and small ones nearly so: only the larger can hide a coupling in their
            # rounding.
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

    def _keeps_otherwise(self, whole: Trial, pieces: Sequence[Trial]) -> str | None:
        """The reason, if the optimizer keeps other things for flat pieces, or what a checkpoint of them cannot hold."""
        for piece, spans in zip(pieces, self.problem.spans(), strict=True):
            if (reason := self._names_differ(whole, piece) or self._values_differ(whole, piece, spans)) is not None:
                return reason
        return None

    def _names_differ(self, whole: Trial, piece: Trial) -> str | None:
        for number, param in enumerate(piece.params):
            kept, of_piece = whole.state(number).keys(), piece.state(number)
            for name, value in of_piece.items():
                # First, since a reason that names what cannot be divided says more than names that differ.
                if (reason := why_not_saved(name, value, param.shape)) is not None:
                    return f"for a flat piece of {param.numel()} elements {self.where} keeps {reason}"
            if kept != of_piece.keys():
                return (
                    f"{self.where} keeps {sorted(map(str, kept))} for a whole trial tensor and "
                    f"{sorted(map(str, of_piece))} for flat pieces of it"
                )
        return None

    def _values_differ(self, whole: Trial, piece: Trial, spans: Sequence[tuple[int, int]]) -> str | None:
        expected, found = dict(values_of(whole.optimizer)), dict(values_of(piece.optimizer))
        for name in dict.fromkeys((*expected, *found)):  # in order, so that ranks say the same
            one, other = _not_of_tensors(expected.get(name)), _not_of_tensors(found.get(name))
            if name not in expected or name not in found or not equal(one, other):
                return self._otherwise(name, expected.get(name), found.get(name))
        for number, span in enumerate(spans):
            for name, value in piece.state(number).items():
                if not self._is_same_state(whole, number, name, value, span):
                    return self._otherwise(f"state {name!r}", whole.state(number)[name], value)
        return None

    def _is_same_state(self, whole: Trial, number: int, name: str, value: Any, span: tuple[int, int]) -> bool:
        expected = whole.state(number)[name]
        if not is_per_element(name, expected, whole.params[number].shape, None):
            return equal(expected, value)
        # Some quantise state from a size on: pieces then have another class or dtype than the whole.
        if type(expected) is not type(value) or expected.dtype != value.dtype or value.numel() != span[1] - span[0]:
            return False
        if (size := whole.sizes.get((number, name))) is None:  # whole numbers
            return torch.equal(cut(expected, span), value)
        tolerance = max(_RELATIVE, 4 * torch.finfo(value.dtype).eps)  # 16-bit states round to another neighbour
        return bool((distances(cut(expected, span), value) <= tolerance * cut(size, span)).all())

    def _otherwise(self, name: str, whole: Any, piece: Any) -> str:
        one, other = _in_words(whole), _in_words(piece)
        differs = f"is {one} for" if one != other else "is otherwise for"
        than = f"and {other} for" if one != other else "than for"
        return f"after trial steps of {self.where}, {name} {differs} whole tensors {than} flat pieces of them"

    def _saves_otherwise(self, whole: Trial) -> str | None:
        """The reason, if ``state_dict`` has something else than the state of tensors, which checkpoints hold."""
        try:
            saved = whole.optimizer.state_dict()
            # Keys beside torch's own, and state under numbers that no parameter has, are lost in a checkpoint.
            more = [*(saved.keys() - {"state", "param_groups"})]
            more += saved["state"].keys() - set(range(len(whole.params)))
            for number in range(len(whole.params)):
                more += self._differing_names(saved["state"].get(number, {}), whole.state(number))
        except Exception as error:  # noqa: BLE001 - whatever an unknown optimizer raises, it is an answer
            return f"its state_dict() raised {_said(error)}"
        names = ", ".join(map(repr, dict.fromkeys(more)))
        return f"its state_dict() and the state of its tensors differ in {names}" if more else None

    def _differing_names(self, saved: dict[str, Any], kept: dict[str, Any]) -> list[str]:
        """The names of one tensor's state that are not saved as they are kept."""
        return sorted(saved.keys() ^ kept.keys(), key=str)

    def _steps_in_parts(self, whole: Trial, lr: float | None) -> bool:
        before = dict(values_of(self._double(lr)))
        # It counts its calls somewhere, and would count each part of a step as one.
        if not equal(before, dict(values_of(whole.optimizer))):
            return False
        found: list[Trial] = []
        double = self._double(lr)
        try:
            # Compared to the bit: the caller splits a step only for the cache's sake, and promises the same weights.
            if self.isolation.counts_calls(lambda: found.append(self.problem.rerun_in_parts(double, whole))):
                return False
        except Exception:  # noqa: BLE001 - whatever an unknown optimizer raises, it is an answer
            return False
        (parts,) = found
        states = all(equal(whole.state(number), parts.state(number)) for number in range(len(whole.params)))
        is_same = states and all(map(torch.equal, whole.params, parts.params))
        return is_same and equal(before, dict(values_of(parts.optimizer)))


def why_not_trialled(optimizer: torch.optim.Optimizer) -> str | None:
    """Why trials would tell nothing: an optimizer that holds another one steps the model's own parameters, also in a
    copy, whatever is in its groups. None if it holds none."""
    for name, value in optimizer.__dict__.items():
        held = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else (value,)
        for inner in held:
            if isinstance(inner, torch.optim.Optimizer):
                return (
                    f"it steps another optimizer, its attribute {name!r}, which does not see what is put into its "
                    f"groups. Use that {type(inner).__name__} itself"
                )
    return None


def trial_lr(group: dict[str, Any]) -> float | None:
    """The group's own learning rate, from before a warm-up if that was larger; None if it has no number."""
    # Some have none (it is a schedule of their own); nothing is put in its place.
    if not isinstance(group.get("lr"), Tensor | float | int):
        return None
    # initial_lr is the scheduler's note of the rate before a warm-up began with nearly nothing.
    rates = [float(group[name]) for name in ("lr", "initial_lr") if isinstance(group.get(name), Tensor | float | int)]
    return max((rate for rate in rates if rate > 0), default=FALLBACK_LR)


def _not_of_tensors(value: Any) -> Any:
    """Leaves out what is kept by tensor: whole tensors and pieces cannot have it alike, and their movement tells."""
    return (
        {key: item for key, item in value.items() if not isinstance(key, Tensor)} if isinstance(value, dict) else value
    )


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".rstrip(".: ")


def _in_words(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{value.item():.6g}" if value.numel() == 1 else f"{type(value).__name__} of {value.dtype}"
    if isinstance(value, float):
        return f"{value:.6g}"
    return str(value)[:40] if isinstance(value, int | str | None) else f"a {type(value).__name__}"


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have one dtype, shape and content; a NaN is equal to a NaN."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(a, b) or (a.is_floating_point() and not bool(distances(a, b).any()))


def equal(a: Any, b: Any, same: Callable[[Tensor, Tensor], bool] = same_bits) -> bool:
    """Whether two values of an optimizer's state or options are alike; what cannot be compared is not. ``same``: when
    two tensors are."""
    # Tensors first: a comparison by == would be a tensor, whose truth is an error.
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        if type(a) is type(b) and hasattr(a, "__tensor_flatten__"):  # a subclass, which may know no comparison
            one, other = ({name: getattr(value, name) for name in value.__tensor_flatten__()[0]} for value in (a, b))
            return equal(one, other, same)
        return isinstance(a, Tensor) and isinstance(b, Tensor) and same(a, b)
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key], same) for key in a)
    if isinstance(a, list | tuple | collections.deque) and type(a) is type(b):
        return len(a) == len(b) and all(equal(one, other, same) for one, other in zip(a, b, strict=True))
    try:
        if a is b or bool(a == b) or (a != a and b != b):  # NaN
            return True
        return type(a) is type(b) and hasattr(a, "__dict__") and not callable(a) and equal(vars(a), vars(b), same)
    except (TypeError, ValueError, RuntimeError):
        return False


def is_per_element(name: str, value: Any, shape: tuple[int, ...], names: Collection[str] | None) -> bool:
    """Whether a state value has a number for each element of a tensor of this shape.

    ``names`` of those that do (:func:`probe`) decides for a tensor of one element, where it is known.
    """
    # By shape, but one element has the shape of a counter: there only the trials' names can tell.
    is_shaped = isinstance(value, Tensor) and value.shape == shape
    return is_shaped and (value.numel() > 1 or names is None or name in names)


def why_not_saved(name: str, value: Any, shape: tuple[int, ...]) -> str | None:
    """Why a checkpoint cannot hold this state of a flat shard, in words; None if it can."""
    if not isinstance(value, Tensor):
        # In a container nothing says which elements of a tensor belong to which of the shard; numbers are of the whole.
        is_sequence = isinstance(value, list | tuple | set | collections.deque)
        items = value.values() if isinstance(value, dict) else value if is_sequence else ()
        if any(isinstance(item, Tensor) or why_not_saved(name, item, shape) is not None for item in items):
            return f"state {name!r}, tensors in a {type(value).__name__}, which cannot be divided among ranks"
        return None
    # A subclass may keep other elements than it shows: blocks with a scale, which a cut would part.
    if type(value) not in (Tensor, Parameter):
        return f"state {name!r} as {type(value).__name__}, whose elements cannot be divided among ranks"
    if value.numel() > 1 and not is_per_element(name, value, shape, None):
        return (
            f"state {name!r} of shape {tuple(value.shape)}, which has neither one number nor one for each of the "
            f"{math.prod(shape)} elements of its shard"
        )
    return None
