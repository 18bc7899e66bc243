"""Finds the wrappers of modules and optimizers among those that a door has made, and the models of an optimizer."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

from torch.nn import Module
from torch.optim import Optimizer

from .core import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer

Model = TypeVar("Model", bound=DistributedDataParallel)


class PreparedModels(Generic[Model]):
    """Knows wrappers by weak references, in the order of their making, while they are open. A copy knows none."""

    def __init__(self) -> None:
        self._known: list[tuple[weakref.ref[Module], weakref.ref[Model]]] = []
        self._optimizers: list[tuple[weakref.ref[DistributedOptimizer], weakref.ref[Model]]] = []

    def __reduce__(self) -> tuple[type[PreparedModels[Model]], tuple[()]]:
        return type(self), ()

    def add(self, module: Module, model: Model) -> Model:
        """Registers the wrapper of a user's module, which it may hold inside of another module."""
        self._known.append((weakref.ref(module), weakref.ref(model)))
        return model

    def open(self) -> list[Model]:
        """Lists the wrappers that are alive and not closed."""
        alive = [(refs, model) for refs in self._known if (model := refs[1]()) is not None and not model.is_closed]
        self._known = [refs for refs, _ in alive]
        return [model for _, model in alive]

    def wrappers_of(self, modules: Iterable[Module]) -> list[Model]:
        """Lists the open wrappers of these modules: the user's own, or the ones that the wrappers hold."""
        self.open()
        wanted = {id(module) for module in modules}
        known = ((key(), reference()) for key, reference in self._known)
        return [model for key, model in known if model is not None and wanted & {id(key), id(model.module)}]

    def fitting(self, module: Module, config: DistributedDataParallelConfig) -> Model | None:
        """Finds the wrapper that a module has already, if it fits; closes one that does not.

        A second wrapper would take the parameters out of the buffers that the first one's optimizer steps. One does not
        fit if the module was unfrozen or cast since, or the options differ: its buffers have the old layout.
        Rank 0's weights are sent again, as torch DDP's second wrap does. Collective then.
        """
        self.open()
        for key, reference in self._known:
            if key() is module and (model := reference()) is not None:
                if model.ddp_config == config and model.engine.is_as_wrapped():
                    model.engine.broadcast_all()
                    return model
                model.close()
        return None

    def owners(self, optimizer: Optimizer, prepare: str) -> list[Model]:
        """Finds the one model that has all of the optimizer's parameters, or the models that have some of them.

        Several are returned only where unsharded fp32 parameters are stepped, which any optimizer can do.

        Args:
            optimizer: the user's.
            prepare: the door's word for making a wrapper, for the error.

        Raises:
            ValueError: if there are several, and it would have to be sharded.
        """
        wanted = {id(param) for group in optimizer.param_groups for param in group["params"]}
        owned = [(model, wanted & set(map(id, model.engine.named_params().values()))) for model in self.open()]
        some = [model for model, ids in owned if ids]
        owners = [model for model, ids in owned if ids and ids == wanted][:1] or some
        if len(owners) > 1 and not all(model.engine.steps_params_themselves for model in owners):
            kinds = ", ".join(type(model.module).__name__ for model in owners)
            raise ValueError(
                f"the parameters of this {type(optimizer).__name__} belong to {len(owners)} models, {kinds}, and a "
                "sharded optimizer has one.\n"
                f"Give each model a separate optimizer; or {prepare} one module that contains them all "
                "(torch.nn.ModuleDict); or, for fp32 weights without shards, pass "
                f"{owners[0].engine.all_reduce_option}"
            )
        return owners

    def shard(self, optimizer: Optimizer, model: Model, log: Callable[[str], None]) -> DistributedOptimizer:
        """Shards an optimizer over the ranks of its model, or finds the sharded one that was made for it before.

        A second one would have a separate state, and both would step the same weights. One whose model is closed or
        gone, as in the next attempt after an error, is connected to the new model, with its state. Collective then.
        """
        if isinstance(optimizer, DistributedOptimizer):  # the .optimizer of what prepare or setup has returned
            optimizer = optimizer.optimizer
        for known, owner in self.optimizers():
            if known.optimizer is optimizer and owner is model:
                return known
        earlier = (reference() for reference, _ in self._optimizers)
        distributed = next((known for known in earlier if known is not None and known.optimizer is optimizer), None)
        if distributed is None:
            distributed = DistributedOptimizer(optimizer, model)
        else:
            distributed.connect(model)
            self._optimizers = [refs for refs in self._optimizers if refs[0]() is not distributed]
        self._optimizers.append((weakref.ref(distributed), weakref.ref(model)))
        model.engine.announce(log)
        return distributed

    def optimizers(self) -> list[tuple[DistributedOptimizer, Model]]:
        """Lists the sharded optimizers that are alive, each with its open model."""
        alive = [(refs, optimizer) for refs in self._optimizers if (optimizer := refs[0]()) is not None]
        self._optimizers = [refs for refs, _ in alive]
        pairs = [(optimizer, refs[1]()) for refs, optimizer in alive]
        return [(optimizer, model) for optimizer, model in pairs if model is not None and not model.is_closed]

    def sharded(self, optimizer: Any) -> DistributedOptimizer | None:
        """Returns the sharded optimizer around one of the user's, or None."""
        return next((known for known, _ in self.optimizers() if known.optimizer is optimizer), None)
