"""Wraps the modules of ``Accelerator.prepare`` in the engine.

Nothing is kept on the user's module: weak references remember prepared objects.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from .._prepared_models import PreparedModels
from ..core import (
    DistributedDataParallel,
    join_norm,
    norms_over_owners,
    scale_to_norm_,
    total_grad_norm,
)


class PreparedModel(DistributedDataParallel):
    """The engine around a prepared module.

    Attributes that it lacks are the module's, so that ``model.generate`` and the like work.
    """

    _has_uneven_batches = False
    _static_graph_delay_allreduce_enqueued = True  # sentence-transformers asks: the first backward is as the others

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = self.__dict__.get("_modules", {}).get("module")
            # in a copy that is being made there is no module yet, and to ask for it would come here again
            if module is None:
                raise
            return getattr(module, name)

    @property
    def config(self) -> Any:
        """The module's, as models of Transformers have one: scripts for FSDP2 and tensor parallelism, under which
        accelerate wraps nothing, read it from the prepared model. ``ddp_config`` where the module has none."""
        return self.module.config if hasattr(self.module, "config") else self.ddp_config

    def no_sync(self) -> Any:
        """Suspends synchronisation as the engine's does. ``LocalSGD`` is refused: each step reduces gradients."""
        if sys._getframe(1).f_globals.get("__name__") == "accelerate.local_sgd":
            raise NotImplementedError(
                "LocalSGD steps each rank's own gradients between synchronisations, and this engine's optimizers, "
                "sharded or not, step gradients that are reduced over the ranks: pass enabled=False, or use "
                "accelerate's own Accelerator"
            )
        return super().no_sync()

    @contextlib.contextmanager
    def uneven_batches(self) -> Iterator[None]:
        """Lets ranks run different numbers of forwards inside; a backward that would be synchronised is refused.

        Collective at both ends. A forward sends the module's buffers if they may differ, and inside some rank may have
        no forward. So they are sent on entering, and count as different afterwards, on all ranks alike.
        """
        self.check_open()
        if self.require_forward_param_sync and self.ddp_config.broadcast_buffers:
            self.engine.broadcast_buffers()
        self._has_uneven_batches = True
        try:
            yield
        finally:
            self._has_uneven_batches = False
            self.require_forward_param_sync = True

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs as the engine's. No module buffers are sent where ranks run different numbers of forwards."""
        if self._has_uneven_batches:
            self.require_forward_param_sync = False
        return super().forward(*args, **kwargs)

    def should_sync(self, decision: bool | None) -> bool:
        """Decides as the engine's. Raises NotImplementedError if ranks run different numbers of batches."""
        syncs = super().should_sync(decision)
        if self._has_uneven_batches and (syncs or self.layout.is_pooled):
            raise NotImplementedError(
                "a backward inside join_uneven_inputs with even_batches=False: a rank that is out of batches cannot "
                "take part in reducing the gradients of the others, nor in the steps of a sharded optimizer. Leave "
                "even_batches on (the last samples are repeated), or build the DataLoader with drop_last=True"
            )
        return syncs

    @property
    def is_sharded(self) -> bool:
        """Whether gradients are reduce-scattered, so that ``.grad`` is a placeholder when they are complete."""
        return self.layout.num_shards > 1

    def owned_grads(self, params: Sequence[Parameter]) -> list[Tensor]:
        """Returns this rank's parts of the reduced gradients of these parameters: views, to be changed in place."""
        engine = self.engine
        engine.finish_grads()
        if not self.is_sharded:
            return [grad for grad in engine.local_parts.local_grads(params) if grad is not None]
        return engine.reduced_grads(set(map(engine.index_by_id.__getitem__, map(id, params))))


# --- prepared models of this process ---------------------------------------------------------------------------------

PREPARED: PreparedModels[PreparedModel] = PreparedModels()
"""A module is prepared again by a second Trainer, and after every attempt of ``find_executable_batch_size``, so this
outlives each Accelerator."""


# --- gradients -------------------------------------------------------------------------------------------------------


def has_parts_of_grads(model: PreparedModel) -> bool:
    """Whether each rank has parts of gradients only, which torch's clipping cannot join."""
    return model.is_sharded or bool(model.engine.model_parallel.groups)


def trained_by(models: Sequence[PreparedModel], params: Sequence[Any]) -> list[tuple[PreparedModel, list[Parameter]]]:
    """Lists which of the models reduce which of the parameters, each once."""
    unique = dict(zip(map(id, params), params, strict=True))
    parts = []
    for model in models:
        is_trained = map(model.engine.index_by_id.__contains__, unique)
        model_params = list(itertools.compress(unique.values(), is_trained))
        if model_params:
            parts.append((model, model_params))
    return parts


def clip_norm_(
    parts: Sequence[tuple[PreparedModel, list[Parameter]]], extra: Sequence[Tensor], max_norm: float, norm_type: float
) -> Tensor:
    """Scales reduce-scattered gradients, and those of ``extra``, which each rank has by itself, so that their norm
    together is at most ``max_norm``. Collective.

    Returns the norm, the same bits on every rank.
    """
    grads = []
    counted = []  # without the replicas of other tensor ranks
    for model, params in parts:
        of_model = model.owned_grads(params)
        grads += of_model
        model_parallel = model.engine.model_parallel
        if model_parallel.groups:
            of_model = model.owned_grads([param for param in params if model_parallel.is_counted_here(param)])
        counted += of_model
    extra_grads = [param.grad for param in extra if param.grad is not None]
    first = parts[0][0]
    owners = first.engine.shard_collectives if first.is_sharded else None
    norm = total_grad_norm(counted, norm_type, owners, first.device)
    # the data-parallel ranks first, so that all get the same bits
    for ranks in first.engine.model_parallel.collectives:
        norm = norms_over_owners(norm, norm_type, ranks)
    if extra:
        groups = [first.engine.collectives, *first.engine.model_parallel.collectives]
        norm = join_norm(norm, extra_grads, norm_type, groups, first.device)
    in_fp64 = any(spec.grad_dtype == torch.float64 for model, _ in parts for spec in model.layout.params)
    norm = norm if in_fp64 else norm.to(torch.float32)
    with torch.no_grad():
        scale_to_norm_([*grads, *extra_grads], norm, max_norm)
        for model, _ in parts:
            model.engine.zero_padding()
    return norm


def clip_value_(
    parts: Sequence[tuple[PreparedModel, list[Parameter]]], extra: Sequence[Tensor], clip_value: float
) -> None:
    """Clamps every element of these gradients to ``[-clip_value, clip_value]``."""
    grads = [grad for model, params in parts for grad in model.owned_grads(params)]
    grads += [param.grad for param in extra if param.grad is not None]
    if grads:
        torch._foreach_clamp_min_(grads, -clip_value)
        torch._foreach_clamp_max_(grads, clip_value)
