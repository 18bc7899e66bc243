"""Copies of an optimizer whose groups have other tensors, and their steps.

[Note: what is copied]
A copy is an object of the same class, made without its constructor, which may ask for more, register hooks, or make
state of the model's parameters. Its attributes and options are deep copies, so that what a step counts is counted
there. The model's parameters, and modules in attributes, are not copied: a step that uses one is stopped before it
reads or writes it. State begins empty, as the constructor leaves it. Where a step counts on state that the constructor
made, the constructor makes it for the copy's tensors too.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from .isolation import Guard
from .values import NotClassifiedError, StoppedError, describe_error, leaves

NUM_STEPS = 12
"""RAdam's first five steps are not yet its own, and some optimizers take a norm at every eighth or tenth."""
FALLBACK_LR = 1e-2
"""The learning rate of a copy whose group has a rate of zero, as at the start of a warm-up."""

Place = tuple[int, int]
"""The number of a group, and of a parameter in it."""
Inputs = Mapping[Place, Tensor]
"""By parameter, its first value and its gradient in each step, along the first dimension."""


@dataclasses.dataclass
class Run:
    """A copy that has stepped.

    Attributes:
        params: its tensors after the steps.
        modes: the values of its tensors after its ``eval()`` and after the ``train()`` behind it, if it has these.
    """

    optimizer: Optimizer
    params: Mapping[Place, Tensor]
    modes: list[dict[Place, Tensor]] = dataclasses.field(default_factory=list)

    def state(self, place: Place) -> dict[str, Any]:
        """Returns the state of one tensor."""
        state: dict[str, Any] = self.optimizer.state.get(self.params[place], {})
        return state

    def values(self, place: Place, where: slice | Tensor = slice(None)) -> list[Any]:
        """Returns all that belongs to one tensor; of tensors of its size the elements ``where``."""
        numel = self.params[place].numel()
        state = sorted(self.state(place).items(), key=lambda item: str(item[0]))
        values = leaves([self.params[place], *(mode[place] for mode in self.modes), state])
        return [
            value.detach().reshape(-1)[where] if isinstance(value, Tensor) and value.numel() == numel else value
            for value in values
        ]

    def kept_elsewhere(self) -> list[Any]:
        """Returns what it keeps beside tensors and their state: options and attributes."""
        groups = [
            {name: value for name, value in group.items() if name != "params"} for group in self.optimizer.param_groups
        ]
        attributes = [vars(self.optimizer)[name] for name in attributes_of(self.optimizer)]
        return leaves([groups, attributes], keys=False)


def attributes_of(optimizer: Optimizer) -> list[str]:
    """Returns the names of the attributes beside groups, state, hooks and a scheduler's wrapper of ``step``."""
    of_torch = ("param_groups", "state", "defaults", "step")
    return [name for name in vars(optimizer) if name not in of_torch and not name.endswith("_hooks")]


class Copies:
    """Makes and steps copies of one optimizer; see [Note: what is copied].

    Raises:
        NotClassifiedError: if it cannot be copied.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._model_params = [param for group in optimizer.param_groups for param in group["params"]]
        self._makes_state = False
        self._is_guarded = True
        attributes = [vars(optimizer)[name] for name in attributes_of(optimizer)]
        # these may lead to the model
        self._has_functions = any(callable(value) or isinstance(value, Parameter) for value in leaves(attributes))
        modules = [value for value in attributes if isinstance(value, Module)]
        self._shared: dict[int, Any] = {id(value): value for value in (*self._model_params, *modules)}

    def run_first(self, inputs: Inputs) -> Run:
        """Does as :meth:`run`, with state as the constructor makes it if a step needs that, and guards the model."""
        try:
            try:
                return self.run(inputs)
            except NotClassifiedError as error:
                if not isinstance(error.__cause__, KeyError):
                    raise
                self._makes_state = True
                return self.run(inputs)
        finally:
            self._is_guarded = self._has_functions

    def run(self, inputs: Inputs, make: Callable[[Tensor], Tensor] = Parameter) -> Run:
        """Steps a copy on tensors that ``make`` returns.

        Raises:
            NotClassifiedError: if a step raised, communicated or reached the model.
        """
        params = {place: make(values[0].clone()) for place, values in inputs.items()}
        grads = {place: values.clone().unbind() for place, values in inputs.items()}  # a step may write them
        run = Run(self._copy_onto(params), params)
        guard = Guard(self._model_params)
        try:
            with guard if self._is_guarded else contextlib.nullcontext(), torch.set_grad_enabled(make is not as_it_is):
                for step in range(1, len(next(iter(inputs.values())))):
                    for place, param in params.items():
                        param.grad = grads[place][step]
                    run.optimizer.step()
                has_modes = all(callable(getattr(run.optimizer, name, None)) for name in ("eval", "train"))
                for name in ("eval", "train") if has_modes else ():
                    with torch.no_grad():
                        getattr(run.optimizer, name)()
                    run.modes.append({place: param.detach().clone() for place, param in run.params.items()})
        except Exception as error:  # whatever an unknown optimizer raises, it is an answer
            if not guard.reason:
                raise NotClassifiedError(f"a step of a copy raised {describe_error(error)}") from error
        if guard.reason:  # also if the step caught the error
            raise StoppedError(guard.reason)
        return run

    def _copy_onto(self, params: Mapping[Place, Tensor]) -> Optimizer:
        optimizer = self._optimizer
        copied = object.__new__(type(optimizer))
        memo = {**self._shared, id(optimizer): copied}
        for name, value in vars(optimizer).items():
            if name.endswith("_hooks"):  # they count, log or profile the user's own steps
                vars(copied)[name] = collections.OrderedDict()
            elif name not in ("step", "state", "param_groups"):
                vars(copied)[name] = _deep_copy(value, memo, f"its attribute {name!r}")
        copied.state = collections.defaultdict(dict)
        copied.param_groups = []
        for number in sorted({number for number, _ in params}):
            tensors = [param for place, param in params.items() if place[0] == number]
            options = {name: value for name, value in optimizer.param_groups[number].items() if name != "params"}
            options = _deep_copy(options, memo, f"an option of parameter group {number}")
            copied.param_groups.append({**options, "params": tensors})
            if self._makes_state:
                copied.state.update(self._state_of(copied.param_groups[-1]))
            _raise_lr(copied.param_groups[-1])
        if callable(train := getattr(copied, "train", None)):
            train()  # Schedule-Free does not step in evaluation
        return copied

    def _state_of(self, group: dict[str, Any]) -> dict[Tensor, dict[str, Any]]:
        """Returns state of a group's tensors as the constructor makes it; none if it refuses the options."""
        names = inspect.signature(type(self._optimizer)).parameters.keys() & (group.keys() - {"params"})
        with contextlib.suppress(Exception):  # whatever an unknown constructor raises, it makes no state
            return dict(type(self._optimizer)([copy.copy(group)], **{name: group[name] for name in names}).state)
        return {}


def as_it_is(tensor: Tensor) -> Tensor:
    """Returns a tensor that is no parameter, as ranks step it."""
    return tensor


def _deep_copy(value: Any, memo: dict[int, Any], what: str) -> Any:
    try:
        return copy.deepcopy(value, memo)
    except Exception as error:  # a lock or a file
        raise NotClassifiedError(f"{what} cannot be copied ({describe_error(error)})") from error


def _raise_lr(group: dict[str, Any]) -> None:
    """Sets a learning rate of zero to that of the schedule's start; a tensor replaces a tensor."""
    lr = group.get("lr")
    if isinstance(lr, Tensor | float | int) and float(lr) == 0:
        group["lr"] = lr + (float(group.get("initial_lr", 0)) or FALLBACK_LR)
