"""One rank's part of weights and optimizers, for the same rank of another replica: the layout is the same there.

The weights of runs are one more value of their state. They are complete after a step, before the other ranks' weights
have arrived. Weights without a run never change (frozen ones), or every rank steps them.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..errors import LayoutMismatchError
from ..module import option_rows
from ..states import LocalState, Parts
from .runs import flat
from .sharded_optimizer import ShardedOptimizer
from .state import join, local_state, put_local

if TYPE_CHECKING:
    from ..data_path import Engine

_WEIGHTS = "(weights)"


def get_rank_state(engine: Engine) -> dict[str, Any]:
    """Returns the state. Tensors are not copied, except module buffers, which a forward changes."""
    return {
        "layout": layout_digest(engine),
        "weights": [part.detach() for part in _complete_weights(engine)],
        "buffers": [buffer.detach().clone() for buffer in engine.watch.buffers()],
        "optimizers": [_of_optimizer(optimizer) for optimizer in _optimizers(engine)],
    }


@torch.no_grad()
def load_rank_state(engine: Engine, state: Mapping[str, Any]) -> None:
    """Loads the state of the same rank of another replica. Collective.

    Raises:
        LayoutMismatchError: if it is of another model, before anything is changed.
    """
    engine.check_open()
    optimizers = _optimizers(engine)
    if state["layout"] != layout_digest(engine) or len(state["optimizers"]) != len(optimizers):
        raise LayoutMismatchError(
            "the state is of another model, other options or another number of ranks: build the same in all replicas"
        )
    engine.backwards.make_plan()
    for part, weights in zip(_complete_weights(engine), state["weights"], strict=True):
        part.data.copy_(weights)
    for buffer, values in zip(engine.watch.buffers(), state["buffers"], strict=True):
        buffer.data.copy_(values)
    for optimizer, of_optimizer in zip(optimizers, state["optimizers"], strict=True):
        _load_optimizer(optimizer, of_optimizer)


def layout_digest(engine: Engine) -> str:
    """Returns a digest of everything on which the sizes of sums and states depend."""
    optimizers = [
        [type(optimizer.inner).__qualname__, [len(group["params"]) for group in optimizer.inner.param_groups]]
        for optimizer in _optimizers(engine)
    ]
    description = [engine.layout.describe(), option_rows(engine.config), optimizers]
    return hashlib.sha256(json.dumps(description, default=str).encode()).hexdigest()


def weights_digest(engine: Engine) -> str:
    """Returns a digest of all weights of this rank, frozen ones too; reads each of them once."""
    digest = hashlib.sha256()
    for name, param in engine.named_params().items():
        values = flat(engine.local_parts.local_view(param).detach())
        digest.update(f"{name} {int(values.view(torch.uint8).sum(dtype=torch.int64))}".encode())
    return digest.hexdigest()


def _optimizers(engine: Engine) -> list[ShardedOptimizer]:
    present = (ref() for ref in engine.optimizers)
    return [optimizer for optimizer in present if isinstance(optimizer, ShardedOptimizer)]


def _complete_weights(engine: Engine) -> list[Tensor]:
    """Returns this rank's parts of the trained weights where the Parameters themselves are stepped."""
    return list(map(engine.local_parts.local_view, engine.params)) if engine.steps_params_themselves else []


def _of_optimizer(optimizer: ShardedOptimizer) -> dict[str, Any]:
    if optimizer.extra_params.params:
        raise ValueError(
            f"{type(optimizer.inner).__name__} has parameters that are not in the wrapped model, and replicas average "
            "no gradients of such parameters: give them an optimizer of their own, or put them into the model"
        )
    if not optimizer.has_runs:
        return optimizer.inner.state_dict()
    named: LocalState = {index: dict(values) for index, values in local_state(optimizer).items()}
    slots = optimizer.engine.layout.slots
    for run in optimizer.runs:
        for member in run.members:
            parts = named.setdefault(member.param, {}).setdefault(_WEIGHTS, Parts())
            parts.append((member.start - slots[member.param].start, run.read(run.main, member).detach()))
    groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.inner.param_groups]
    return {"state": named, "groups": groups}


def _load_optimizer(optimizer: ShardedOptimizer, state: Mapping[str, Any]) -> None:
    if not optimizer.has_runs:
        optimizer.inner.load_state_dict(copy.copy(dict(state)))
        return
    for group, options in zip(optimizer.inner.param_groups, state["groups"], strict=True):
        group.update(options)
    with optimizer.runs_changed():
        named: LocalState = {index: _on_device(optimizer, index, values) for index, values in state["state"].items()}
        weights = {index: {_WEIGHTS: values.pop(_WEIGHTS)} for index, values in named.items() if _WEIGHTS in values}
        put_local(optimizer, named)
        for run in optimizer.runs if weights else ():
            flat(run.main).copy_(flat(join(run, _WEIGHTS, weights, optimizer)))


def _on_device(optimizer: ShardedOptimizer, index: int, values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns values of the state with those tensors on the device that the optimizer expects there."""
    device = optimizer.runs[0].main.device if optimizer.runs else optimizer.engine.device
    group = optimizer.group_of(index)
    has_counters = bool(group.get("capturable") or group.get("fused"))
    return {
        key: value.to(device) if isinstance(value, Tensor) and (value.dim() or has_counters) else value
        for key, value in values.items()
    }
