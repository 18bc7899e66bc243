"""Averages of weights that tensor ranks share: ``StochasticWeightAveraging`` averages full tensors on every rank.

Lightning copies the module in the callback's ``setup``, before ``configure_model`` cuts it, and averages parameter by
parameter. So the copy keeps full weights, the state that one process would save.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor
from torch.nn import Module

from ..core import cut_state

_CALLBACK = "StochasticWeightAveraging"
_METHODS = ("update_parameters", "transfer_weights")


class FullAverages:
    """Makes the callbacks of a Trainer average full weights, until :meth:`close`.

    Raises:
        ValueError: if ``configure_model`` made layers that the copies lack.
    """

    def __init__(self, callbacks: Iterable[Any], module: Module) -> None:
        self._callbacks = [each for each in callbacks if is_a(each, _CALLBACK)]
        names = [name for name, _ in module.named_parameters()]
        for callback in self._callbacks:
            copied = dict(callback._average_model.named_parameters())
            if list(copied) != names or any(param.is_meta for param in copied.values()):
                raise ValueError(
                    f"{type(callback).__name__} copies the module before configure_model(), when it has "
                    f"{len(copied)} parameters of the {len(names)} that are trained: build the layers in __init__(), "
                    "not on meta, and only cut them in configure_model()"
                )
            callback.update_parameters = functools.partial(_update_full, callback.update_parameters)
            callback.transfer_weights = functools.partial(_transfer_parts, callback.transfer_weights)

    def close(self) -> None:
        """Restores the callbacks."""
        for callback in self._callbacks:
            for method in _METHODS:
                vars(callback).pop(method, None)
        self._callbacks = []


class _Parameters:
    """A module's parameters, the only thing that Lightning's methods read."""

    def __init__(self, params: Iterable[Tensor]) -> None:
        self._params = params

    def parameters(self) -> Iterator[Tensor]:
        return iter(self._params)


def averages_weights(callback: Any) -> bool:
    """Whether a callback averages weights, of either of Lightning's classes."""
    return is_a(callback, "WeightAveraging") or is_a(callback, _CALLBACK)


def is_a(callback: Any, name: str) -> bool:
    """Whether a callback is of Lightning's class of that name, in either of its packages."""
    return any(kind.__name__ == name for kind in type(callback).__mro__)


def _update_full(
    method: Callable[..., None], average_model: Module, model: Module, num_averaged: Tensor, avg_fn: Any
) -> None:
    """Averages full tensors. Collective over the tensor ranks, a tensor at a time."""
    every = (param.detach() for param in model.parameters())
    full = (getattr(param, "full_tensor", lambda param=param: param)() for param in every)
    method(average_model, _Parameters(full), num_averaged, avg_fn)


def _transfer_parts(method: Callable[..., None], average_model: Module, model: Module) -> None:
    """Loads each rank's parts of the averages."""
    full = {name: param.detach() for name, param in average_model.named_parameters()}
    method(_Parameters(cut_state(model, full).values()), model)
