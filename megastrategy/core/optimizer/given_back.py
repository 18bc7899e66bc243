"""Makes the user's optimizer one of torch's own again, after the model that it stepped was closed.

[Note: when an optimizer is given back]
Closing a model gives its optimizers back: the state is whole on every rank, under the model's Parameters, and no hook
refuses to be called. All ranks gather for it. Where they do not all close the model, or an exception is being handled,
or a door leaves the state in shards because no user code has the optimizer, the shards stay until the optimizer is used
again: in ``step``, ``state_dict``, ``load_state_dict``, or in the DistributedOptimizer of another model.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from ..collectives import Collectives
from ..engine import Engine
from ..shards import (
    MAIN_PARAMS,
    STATE,
    Gather,
    OwnParts,
    as_saved,
    gather_main_params,
    gather_state_dict,
    groups_as_saved,
    number_params,
    to_host,
)
from .state_hooks import without_state_hooks


class Stepped(Protocol):
    """An optimizer whose state is that of shards or main params."""

    inner: Optimizer
    engine: Engine
    sharded: bool

    @property
    def followed_by_id(self) -> dict[int, int]: ...

    @property
    def owner_collectives(self) -> Collectives | None: ...

    def param_indices(self) -> list[int]: ...

    def is_cut(self, index: int) -> bool: ...

    def own_parts(self, what: str) -> OwnParts: ...

    def stepped_tensor(self, param: Parameter) -> Tensor | None: ...


def give_back(stepped: Stepped) -> dict[str, Tensor]:
    """Puts the whole state into the optimizer, by Parameter. Collective if it is sharded.

    Returns:
        the main params that a file would have, on the host of rank 0; nothing elsewhere.

    Raises:
        NotOnAllRanksError: if it is sharded, and not all ranks call this; nothing is changed then.
    """
    inner, engine = stepped.inner, stepped.engine
    numbers = number_params(inner)
    params: dict[int, Parameter] = {numbers[id(p)]: p for group in inner.param_groups for p in group["params"]}
    if (owners := stepped.owner_collectives) is None:
        own = stepped.own_parts(MAIN_PARAMS)
        main_params = to_host(gather_main_params([], own, None, engine.device))
        mains = {number: stepped.stepped_tensor(param) for number, param in params.items()}
        owned = {number: main for number, main in mains.items() if main is not None}
        saved: dict[str, Any] = {"state": as_saved(inner, owned), "param_groups": groups_as_saved(inner, numbers)}
    else:
        engine.collectives.require_all_ranks(f"the first use of a sharded {type(inner).__name__} after close()")
        everywhere = Gather(owners, engine.device, everywhere=True)
        saved = gather_state_dict(inner, stepped.followed_by_id, stepped.own_parts(STATE), everywhere, engine.device)
        cut = [index for index in stepped.param_indices() if stepped.is_cut(index)]
        on_rank_zero = Gather(owners, engine.device)
        main_params = gather_main_params(cut, stepped.own_parts(MAIN_PARAMS), on_rank_zero, engine.device)
    as_grad = engine.local_parts.as_grad
    state = {number: _shown(values, params.get(number), as_grad, engine) for number, values in saved["state"].items()}
    _load(inner, {**saved, "state": state})
    return dict(main_params)


def _shown(
    values: Mapping[str, Any], param: Parameter | None, as_grad: Callable[[Parameter, Tensor], Tensor], engine: Engine
) -> Mapping[str, Any]:
    """The state of a tensor-parallel parameter as DTensors, which torch's optimizers keep of one."""
    if param is None or (part := engine.local_parts.local_view(param)) is param:
        return values
    return {
        name: as_grad(param, value) if isinstance(value, Tensor) and value.shape == part.shape else value
        for name, value in values.items()
    }


def _load(optimizer: Optimizer, saved: dict[str, Any]) -> None:
    """Loads a state without the user's hooks, and leaves the groups the objects that they are."""
    groups, state = optimizer.param_groups, optimizer.state
    others = {key: value for key, value in state.items() if not isinstance(key, Tensor)}
    loading: Any = optimizer
    is_torchs = type(optimizer).load_state_dict is Optimizer.load_state_dict
    if is_torchs:
        # torch makes new groups, and user code may have the present ones: they are made in an object of its own
        loading = object.__new__(type(optimizer))
        loading.__dict__.update(optimizer.__dict__)
        loading.state = collections.defaultdict(dict)
    with without_state_hooks(loading):
        type(optimizer).load_state_dict(loading, saved)
    if is_torchs:
        state.clear()
        state.update(loading.state)
        optimizer.param_groups = groups
    optimizer.state.update(others)


def remove(handles: Iterable[Any]) -> None:
    """Removes hooks, from an optimizer in which none of them runs."""
    for handle in handles:
        handle.remove()
