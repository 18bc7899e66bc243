"""Averages of weights that tensor ranks share: ``StochasticWeightAveraging`` averages whole tensors on every rank.

Lightning copies the module in the callback's ``setup``, before ``configure_model`` cuts it, and averages parameter by
parameter. So the copy stays whole, with the state that one process would save.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor
from torch.nn import Module

from ..core import cut_state

CALLBACK = "StochasticWeightAveraging"
_METHODS = ("update_parameters", "transfer_weights")


class WholeAverages:
    """The callbacks of a Trainer that average a module's weights, until :meth:`close`.

    Raises:
        ValueError: if ``configure_model`` made layers that the copies lack.
    """

    def __init__(self, callbacks: Iterable[Any], module: Module) -> None:
        # By name: Lightning has the class under two addresses.
        self._callbacks = [each for each in callbacks if is_a(each, CALLBACK)]
        names = [name for name, _ in module.named_parameters()]
        for callback in self._callbacks:
            copied = dict(callback._average_model.named_parameters())
            if list(copied) != names or any(param.is_meta for param in copied.values()):
                raise ValueError(
                    f"{type(callback).__name__} copies the module before configure_model(), when it has "
                    f"{len(copied)} parameters of the {len(names)} that are trained: build the layers in __init__(), "
                    "not on meta, and only cut them in configure_model()"
                )
            callback.update_parameters = functools.partial(_update_whole, callback.update_parameters)
            callback.transfer_weights = functools.partial(_transfer_parts, callback.transfer_weights)

    def close(self) -> None:
        """Gives the callbacks back as they were."""
        for callback in self._callbacks:
            for method in _METHODS:
                vars(callback).pop(method, None)
        self._callbacks = []


class _Parameters:
    """A module's parameters, for Lightning's methods, which ask for nothing else."""

    def __init__(self, params: Iterable[Tensor]) -> None:
        self._params = params

    def parameters(self) -> Iterator[Tensor]:
        return iter(self._params)


def is_a(callback: Any, name: str) -> bool:
    """Whether a callback is of Lightning's class of that name, under any of its addresses."""
    return any(kind.__name__ == name for kind in type(callback).__mro__)


def _update_whole(
    method: Callable[..., None], average_model: Module, model: Module, num_averaged: Tensor, avg_fn: Any
) -> None:
    """Averages whole tensors. Collective over the tensor ranks, a tensor at a time."""
    every = (param.detach() for param in model.parameters())
    whole = (getattr(param, "full_tensor", lambda param=param: param)() for param in every)
    method(average_model, _Parameters(whole), num_averaged, avg_fn)


def _transfer_parts(method: Callable[..., None], average_model: Module, model: Module) -> None:
    """Gives each rank its parts of the averages."""
    whole = {name: param.detach() for name, param in average_model.named_parameters()}
    method(_Parameters(cut_state(model, whole).values()), model)
