"""The state of one optimizer that a replica takes over; see replica_state's
[Note: state of a rank, for the rank at its place]."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

from ..errors import LayoutMismatchError, OptimizerNotShardableError
from ..shards import ParamShard
from ..trials import is_per_element
from .shard_set import ShardSet


class Stepper(Protocol):
    """The members of a ShardedOptimizer that its state consists of."""

    inner: torch.optim.Optimizer
    shard_set: ShardSet
    num_steps_done: int
    reductions: dict[int, int]

    def add_param_group(self, param_group: dict[str, Any]) -> None: ...


class OptimizerState:
    """This rank's state of one sharded optimizer, or of one that every rank steps whole."""

    def __init__(self, optimizer: Stepper) -> None:
        self._optimizer = weakref.ref(optimizer)  # which refers to this object through its engine
        self.check()

    @property
    def _present(self) -> Stepper:
        optimizer = self._optimizer()
        if optimizer is None:
            raise ValueError("with replicas, a DistributedOptimizer lives as long as its model")
        return optimizer

    def check(self) -> None:
        """Raises ValueError for an optimizer whose state another replica could not take over."""
        shard_set, kind = self._present.shard_set, type(self._present.inner).__name__
        if shard_set.extra_params.params:
            raise ValueError(
                f"replicas=: {kind} has parameters that are not the wrapped model's, which replicas neither average "
                "nor take over. Wrap one module that contains them all, or give them an optimizer of their own"
            )
        if shard_set.sharded and not shard_set.states.in_parts:
            raise OptimizerNotShardableError(
                f"replicas=: {kind} keeps more than tensors in its state (a count of its calls, say), which a replica "
                "that comes back cannot take over. Use another optimizer"
            )

    def state(self) -> dict[str, Any]:
        impl = self._present
        impl.shard_set.states.split()
        state = impl.inner.state
        return {
            "state": {
                index: {name: _with_place(value, tensor) for name, value in state.get(tensor, {}).items()}
                for index, tensor, _ in self._stepped()
            },
            "main_params": {index: shard.main.detach() for index, _, shard in self._stepped() if shard is not None},
            "steps": (impl.shard_set.num_steps_begun, impl.num_steps_done),
            "reductions": dict(impl.reductions),
        }

    def load(self, state: dict[str, Any]) -> None:
        impl = self._present
        states, names = impl.shard_set.states, impl.shard_set.states.element_names
        states.split(replace=True)
        impl.inner.state.clear()
        for index, tensor, shard in self._stepped():
            if shard is not None:
                shard.main.copy_(state["main_params"][index])
            if values := state["state"][index]:
                found = impl.inner.state[tensor] = {}
                for name, (value, is_beside) in values.items():
                    # Copied: a received tensor is a view of the whole message.
                    if impl.shard_set.is_cut(index) and is_per_element(name, value, tensor.shape, names):
                        found[name] = states.copy_of(value.to(tensor.device) if is_beside else value)
                    elif isinstance(value, Tensor):
                        found[name] = value.to(tensor.device if is_beside else value.device, copy=True)
                    else:
                        found[name] = value
        impl.shard_set.num_steps_begun, impl.num_steps_done = state["steps"]
        impl.reductions.clear()
        impl.reductions.update(state["reductions"])

    def groups(self) -> list[dict[str, Any]]:
        """Returns the groups, with the names of their parameters."""
        impl = self._present
        names = {id(param): name for name, param in impl.shard_set.engine.named_params().items()}
        return [
            {**group, "params": [names[id(param)] for param in group["params"]]} for group in impl.inner.param_groups
        ]

    def load_groups(self, groups: list[dict[str, Any]]) -> None:
        """Adds groups that were added during the run, and replaces the hyper-parameters of the others. Collective.

        Raises:
            LayoutMismatchError: if there are other groups.
        """
        impl, own = self._present, self.groups()
        if [group["params"] for group in own] != [group["params"] for group in groups[: len(own)]]:
            raise LayoutMismatchError(
                f"this replica's {type(impl.inner).__name__} has other groups of parameters than that of the replicas "
                "that it comes back to. Build the same optimizers in all replicas, with the same groups in the same "
                "order"
            )
        params = impl.shard_set.engine.named_params()
        for theirs in groups[len(own) :]:
            impl.add_param_group({**theirs, "params": [params[name] for name in theirs["params"]]})
        for group, theirs in zip(impl.inner.param_groups, groups, strict=True):
            group.update({name: value for name, value in theirs.items() if name != "params"})

    def numbers(self) -> str:
        """Returns the hyper-parameters with which it steps now."""
        groups = self._present.inner.param_groups
        return repr([[(name, _number(group[name])) for name in sorted(group) if name != "params"] for group in groups])

    def _stepped(self) -> Iterator[tuple[int, Tensor, ParamShard | None]]:
        """Yields for each parameter that this rank steps the key of its state, and its shard if it has a main param."""
        shard_set = self._present.shard_set
        for index in sorted(shard_set.param_indices()):
            tensor = shard_set.stepped_tensor(shard_set.engine.params[index])
            if tensor is not None:
                shard = shard_set.shards.get(index) if shard_set.layout.has_separate_main(index) else None
                yield index, tensor, shard


def _with_place(value: Any, tensor: Tensor) -> tuple[Any, bool]:
    """Returns state, and whether it is on the device of its parameter: on its way it is in host memory."""
    if isinstance(value, Tensor):
        return value.detach(), value.device == tensor.device
    return value, False


def _number(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.item() if value.numel() == 1 else tuple(value.shape)
    if isinstance(value, tuple | list):
        return [_number(each) for each in value]
    return value if isinstance(value, bool | int | float | str | None) else type(value).__name__
