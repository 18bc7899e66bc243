"""Makes the user's optimizer a plain one again, after the model that it stepped was closed.

[Note: what close() does to an optimizer]
Closing a model leaves its optimizers' shards where they are, and sends nothing. The first use of an optimizer after
that gives it back: ``step``, ``state_dict``, ``load_state_dict``, or the DistributedOptimizer of another model. Then
every rank has the full state, keyed by the model's Parameters, and no hook refuses calls. All ranks gather for it.
"""

from __future__ import annotations

import collections
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from ..module import LocalParts
from ..states import number_params
from .state_hooks import without_state_hooks


def load_as_torchs(optimizer: Optimizer, saved: Mapping[str, Any], local_parts: LocalParts) -> None:
    """Loads a full state by Parameter, without the user's hooks. The groups stay the objects that they are."""
    groups, state, numbers = optimizer.param_groups, optimizer.state, number_params(optimizer)
    params: dict[int, Parameter] = {numbers[id(param)]: param for group in groups for param in group["params"]}
    by_number = {number: as_kept(values, params.get(number), local_parts) for number, values in saved["state"].items()}
    others = {key: value for key, value in state.items() if not isinstance(key, Tensor)}
    loading: Any = optimizer
    is_torchs = type(optimizer).load_state_dict is Optimizer.load_state_dict
    if is_torchs:
        # torch makes new groups, and user code may hold the present ones. So the new ones are made in another object.
        loading = object.__new__(type(optimizer))
        loading.__dict__.update(optimizer.__dict__)
        loading.state = collections.defaultdict(dict)
    with without_state_hooks(loading):
        type(optimizer).load_state_dict(loading, {**saved, "state": by_number})
    if is_torchs:
        state.clear()
        state.update(loading.state)
        optimizer.param_groups = groups
    optimizer.state.update(others)


def as_kept(values: Mapping[str, Any], param: Parameter | None, local_parts: LocalParts) -> Mapping[str, Any]:
    """Converts the state of a tensor-parallel parameter to DTensors, which torch's optimizers keep for one."""
    if param is None or (part := local_parts.local_view(param)) is param:
        return values
    return {
        name: local_parts.as_grad(param, value) if isinstance(value, Tensor) and value.shape == part.shape else value
        for name, value in values.items()
    }
