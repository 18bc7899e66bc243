"""The state of a wrapped model that a replica takes over from another one, and what has to be equal before.

[Note: state of a rank, for the rank at its place]
Replicas have one layout, so rank r of each owns the same elements. It serves its own part only: its shard of each
bucket's weights, and the state of its optimizers as it is stored, in 16 bits or on the host. The rank that takes it
gathers the weights over the ranks of its own replica. Frozen parameters and buffers, which every rank has, are served
by every rank. Parameters are found by their index, since a digest of the layout, which has their names and shapes, is
compared first.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ..collectives import Collectives, bytes_of, digest
from ..config import DistributedDataParallelConfig
from ..errors import LayoutMismatchError
from ..module import ModuleWatch, ignored_names, named_buffers, option_rows
from ..sync import WORD
from .relayout import Engine as MovableEngine


class Engine(MovableEngine, Protocol):
    """The members of :class:`~.engine.Engine` that a replica's state uses."""

    config: DistributedDataParallelConfig
    index_by_id: dict[int, int]
    watch: ModuleWatch

    @property
    def shard_collectives(self) -> Collectives: ...

    def named_params(self) -> dict[str, Any]: ...

    def include_trainable(self) -> None: ...


class StatefulOptimizer(Protocol):
    """The state of one optimizer of the model."""

    def state(self) -> Any:
        """Returns this rank's part; tensors are not copied."""

    def load(self, state: Any) -> None:
        """Replaces it by that of the same rank in another replica."""

    def groups(self) -> list[dict[str, Any]]:
        """Returns the groups, which are no part of :meth:`state`: names of parameters, and hyper-parameters."""

    def load_groups(self, groups: Any) -> None:
        """Adds those that are missing, and replaces the hyper-parameters of the others. Collective."""


def check_supported(engine: Engine, groups: Sequence[object], device: torch.device) -> None:
    """Raises ValueError if the model cannot be trained with replicas; ``groups``: of ranks that share the model."""
    config = engine.config
    refused = {
        "tensor-parallel parameters, experts and pipelines": bool(groups),
        f"parameters on {device.type}: only those on the CPU": device.type != "cpu",
        "num_distributed_optimizer_instances above 1": config.num_distributed_optimizer_instances > 1,
        "grad_buffer='pooled'": config.grad_buffer != "contiguous",
        "use_contiguous_buffers=False": not config.use_contiguous_buffers,
        "grad_wire_dtype": config.grad_wire_dtype is not None,
        "reduce_scatter_with_fp32_accumulation": config.reduce_scatter_with_fp32_accumulation,
        "_ddp_params_and_buffers_to_ignore": bool(ignored_names(engine.module)),
    }
    for what, is_there in refused.items():
        if is_there:
            raise ValueError(f"replicas=: {what} cannot be trained with replicas yet. Leave one of the two out")


class ReplicaState:
    """The state of one wrapped model on this rank; see [Note: state of a rank, for the rank at its place].

    Attributes:
        optimizers: of the model, in the order of their construction, the same in all replicas.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = weakref.ref(engine)  # its reducer refers to this object
        self.optimizers: list[StatefulOptimizer] = []
        self._digest: tuple[Any, bytes] | None = None
        self._unstepped: tuple[Any, list[tuple[str, Tensor, int]]] = None, []  # trained, with versions, in a layout

    def add_optimizer(self, optimizer: StatefulOptimizer) -> None:
        """Adds an optimizer to the state."""
        self.optimizers.append(optimizer)

    def begin_window(self) -> None:
        """Drops gradients that no optimizer's ``zero_grad`` drops: a replica that comes back has none to add to.

        Raises:
            ValueError: if an optimizer that is no DistributedOptimizer steps a trained parameter, or will do so. It
                would repeat a step on weights that were taken, which are after that step.
        """
        self._check_optimizers()
        engine = self._present
        indices = (engine.index_by_id.get(id(param)) for _, param, _ in self._unstepped[1])
        engine.reducer.buffers.clear(index for index in indices if index is not None)

    def _check_optimizers(self) -> None:
        engine = self._present
        layout, unstepped = self._unstepped
        changed = [name for name, param, version in unstepped if param._version != version]
        if layout is engine.layout and not changed:
            return
        stepped = {name for optimizer in self.optimizers for group in optimizer.groups() for name in group["params"]}
        changed = [name for name in changed if name not in stepped]
        if changed or not self.optimizers:
            what = f"{changed[0]} was changed by an optimizer that is not one" if changed else "there is none"
            raise ValueError(
                f"replicas=: a model with replicas is stepped by DistributedOptimizers, and {what}. Only they leave a "
                "step out that other replicas have made. Before the first batch, wrap each optimizer: "
                "DistributedOptimizer(optimizer, model)"
            )
        trained = {name: param for name, param in engine.named_params().items() if param.requires_grad}
        left = [(name, param, param._version) for name, param in trained.items() if name not in stepped]
        self._unstepped = engine.layout, left

    @property
    def _present(self) -> Engine:
        engine = self._engine()
        assert engine is not None, "the wrapped model is used"
        return engine

    @property
    def ranks(self) -> Collectives:
        return self._present.collectives

    def buffers(self) -> Sequence[Tensor]:
        """Returns the module's buffers that all ranks get from one; none if the configuration leaves them apart."""
        engine = self._present
        return list(engine.watch.buffers()) if engine.config.broadcast_buffers else []

    def drop_unfinished(self) -> None:
        """Drops gradients of a backward that raised."""
        self._present.reducer.drop_unfinished()

    def layout_digest(self) -> bytes:
        engine = self._present
        of = engine.layout, engine.owners
        if self._digest is None or self._digest[0] != of:
            described = {**engine.layout.describe(), "option": option_rows(engine.config)}
            owners = sorted(engine.owners.rank_of.items())
            self._digest = of, digest({**described, "owner": owners})[:WORD]
        return self._digest[1]

    def state_digest(self) -> bytes:
        found = hashlib.sha256()
        for leaf in tree_leaves(self.state()):
            found.update(bytes_of(leaf.cpu()) if isinstance(leaf, Tensor) else repr(leaf).encode())
        return found.digest()[:WORD]

    def state(self) -> dict[str, Any]:
        engine = self._present
        with torch.no_grad():
            return {
                "layout": self.layout_digest(),
                "weights": [part.detach() for part in self._weights()],
                "frozen": self._frozen(),
                # Copied: a forward changes them, perhaps before all of them are sent.
                "buffers": {name: buffer.detach().clone() for name, buffer in named_buffers(engine.module).items()},
                "optimizers": [optimizer.state() for optimizer in self.optimizers],
                "reductions": list(engine.reducer.num_reductions),
                "unit": engine.reducer.tokens.unit,
            }

    def load(self, state: Mapping[str, Any]) -> None:
        engine = self._present
        engine.include_trainable()
        if state["layout"] != self.layout_digest() or len(state["optimizers"]) != len(self.optimizers):
            raise LayoutMismatchError(
                "this replica's model is not that of the replicas that it comes back to: its layout or options differ, "
                "or its optimizers. Build the same module, with the same frozen parameters, options and optimizers, on "
                "as many ranks, in every replica"
            )
        with torch.no_grad():
            for part, theirs in zip(self._weights(), state["weights"], strict=True):
                part.copy_(theirs)
            for own, theirs in (
                (self._frozen(), state["frozen"]),
                (named_buffers(engine.module), state["buffers"]),
            ):
                for name, tensor in own.items():
                    tensor.detach().copy_(theirs[name])
            for optimizer, theirs in zip(self.optimizers, state["optimizers"], strict=True):
                optimizer.load(theirs)
            if engine.param_buffers is not None:
                for bucket in reversed(range(len(engine.layout.buckets))):
                    engine.param_gather.start(bucket)
                engine.param_gather.finish()
        self._unstepped = None, []  # they have changed here
        engine.reducer.num_reductions[:] = state["reductions"]
        engine.reducer.tokens.unit = state["unit"]

    def groups(self) -> dict[str, Any]:
        trained = {name: param.requires_grad for name, param in self._present.named_params().items()}
        return {"trained": trained, "optimizers": [optimizer.groups() for optimizer in self.optimizers]}

    def load_groups(self, groups: Mapping[str, Any]) -> None:
        for name, param in self._present.named_params().items():
            # Another name is an error of the layout, later.
            param.requires_grad_(groups["trained"].get(name, param.requires_grad))
        # Another number of optimizers is, too.
        for optimizer, theirs in zip(self.optimizers, groups["optimizers"], strict=False):
            optimizer.load_groups(theirs)

    def _weights(self) -> list[Tensor]:
        """Returns the parts of the weights that this rank owns: by bucket, or by parameter if nothing is sharded."""
        engine = self._present
        if engine.param_buffers is None:
            return [param.detach() for param in engine.params]
        engine.finish_param_gather()
        engine.param_buffers.recapture()
        size, rank = engine.layout.num_shards, engine.shard_collectives.rank
        return [engine.param_buffers.bucket(b.index).chunk(size)[rank] for b in engine.layout.buckets]

    def _frozen(self) -> dict[str, Tensor]:
        engine = self._present
        return {
            name: param.detach() for name, param in engine.named_params().items() if id(param) not in engine.index_by_id
        }
