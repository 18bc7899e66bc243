"""A chain of layers that is divided into stages, on one or several ranks."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from ..core import (
    LocalParts,
    ModelGroup,
    StagedModule,
    cut_state,
    gather_states,
    make_collectives,
    materialise,
    private_group,
    subgroup,
)
from ..errors import StageError
from .backwards import StagedBackwards
from .loss_buffers import LossBuffers
from .plan import StagePlan, check_schedule, make_plan
from .schedules import Chunk, Run, check_sent, map_leaves, scalar, shapes_of, split
from .stage import PlainValues
from .stage_group import Copies, StageGroup

_MOST_RUNS = 8
"""The number of schedules that are kept, one per kind of batch: each has memory for the tensors that it receives."""


class Pipeline(StagedModule):
    """A chain of layers that is cut into stages of any sizes, one or several a rank.

    In training its forward runs a whole schedule, forwards and backwards of all microbatches, and returns the mean
    loss, the same on all ranks; ``loss.backward()`` finds them done. Loops, callbacks and clipping do not change.

    Args:
        layers: the whole chain, on every rank. A layer gets what the one before it returned, a tuple as several
            arguments. Built on meta, those of this rank get memory, by each module's ``reset_parameters``.
        split_spec: the number of layers of each stage, such as the ``split_spec`` of :func:`megastrategy.plan`.
        loss: of the last layer's output and a target: a mean over the samples.
        microbatches: how many parts a batch is divided into, along the first dimension.
        schedule: "1F1B", "GPipe" or, with several stages a rank, "Interleaved1F1B", as torch calls them.
        mesh: of the ranks that have the stages, in their order; with a second dimension, of the tensor ranks that have
            parts of each stage's layers (``mesh["pp", "tp"]``), whether ``parallelize_module`` cuts the layers before
            or the Pipeline after. None where one process has all layers.
        keep_together: first and last layer, by number, of parts that are not to be cut.
        inputs: by a layer's number, the names of :meth:`forward`'s keyword arguments that it gets as well.

    Attributes:
        layers: all of them; those of other ranks are empty modules in their places, so that parameters have the
            names that they have in the whole model.
        plan: which stages and layers each rank has.
        first_stages: by rank of the stages' group, the number of its first stage.
        copies: all parameters that several ranks have, in one order on all ranks.

    Raises:
        ValueError: if the division does not fit the layers, the ranks or the schedule.
    """

    layers_name = "layers"
    first_stages: Sequence[int] = ()
    copies: Sequence[Copies] = ()

    def __init__(
        self,
        layers: Sequence[nn.Module],
        split_spec: Sequence[int],
        *,
        loss: Callable[[Any, Tensor], Tensor],
        microbatches: int,
        schedule: str = "1F1B",
        mesh: DeviceMesh | None = None,
        keep_together: Sequence[tuple[int, int]] = (),
        inputs: Mapping[int, str | Sequence[str]] | None = None,
    ) -> None:
        super().__init__()
        check_schedule(schedule)
        if microbatches < 1:
            raise ValueError(f"microbatches={microbatches}: expected at least one")
        if mesh is not None:
            mesh, self.tensor_mesh = _stages_and_tensor_ranks(mesh)
        self._device = _device_of(mesh, layers)
        names = [type(layer).__name__ for layer in layers]
        num_ranks = mesh.size() if mesh is not None else len(split_spec)
        plan = make_plan(names, split_spec, num_ranks, "1F1B" if mesh is None else schedule, keep_together)
        self.plan = plan if mesh is not None else StagePlan((len(layers),), 1)
        self.microbatches = microbatches
        self.schedule = schedule
        self._loss = loss
        self._inputs = {number: (n,) if isinstance(n, str) else tuple(n) for number, n in (inputs or {}).items()}
        unknown = sorted(number for number in self._inputs if not 0 <= number < len(layers))
        if unknown:
            raise ValueError(f"inputs has layer {unknown[0]}: expected numbers of layers, 0 to {len(layers) - 1}")
        # Not the mesh's local rank, which is a rank of its group: torch sorts the ranks of groups.
        in_order = mesh.mesh.flatten().tolist() if mesh is not None else [0]
        self._rank = in_order.index(dist.get_rank()) if mesh is not None else 0
        self._in_order: ProcessGroup | None = None  # the ranks in the order of the stages
        order: list[int] = []
        if mesh is not None and mesh.size() > 1:
            _check_loss(loss)
            self.stage_group = mesh.get_group()
            order = [dist.get_group_rank(self.stage_group, rank) for rank in in_order]
            self.first_stages = [order.index(rank) for rank in range(len(order))]
            self.copies = _find_copies(layers, self.plan, order)  # while they are still one parameter
        own = {number for stage in self.plan.stages_of(self._rank) for number in self.plan.layers(stage)}
        self.names_elsewhere = {
            f"layers.{number}.{name}"
            for number, layer in enumerate(layers)
            if number not in own
            for name, _ in (*layer.named_parameters(), *layer.named_buffers())
        }
        self.layers = nn.ModuleList(layer if i in own else _Elsewhere() for i, layer in enumerate(layers))
        without = materialise(self.layers, self._device)
        if without:
            raise TypeError(
                f"layer {without[0]} is on meta and has no reset_parameters(): give the class one, or build this layer "
                "on a device"
            )
        if mesh is not None and next(self.layers.parameters(), None) is None:
            raise ValueError(
                f"rank {self._rank} of the stages has {', '.join(names[i] for i in sorted(own))}, and no parameter, so "
                "that torch has no optimizer for it: move a layer with parameters there"
            )
        if self.stage_group is not None:
            group = self.stage_group
            self._ranks = make_collectives(private_group(group, self._device), self._device)
            self._in_order = subgroup(group, order, self._device)
        # Not registered: the layers are registered already, under their names.
        self._chunks = tuple(
            Chunk({number: self.layers[number] for number in self.plan.layers(stage)}, self._inputs)
            for stage in self.plan.stages_of(self._rank)
        )
        self._runs: dict[Any, Run] = {}
        self._seen: list[Any] = []  # layers and parameters for which the kept schedules were made
        self._numbers = PlainValues(self.layers)
        self._loss_buffers = LossBuffers(loss)
        self._backwards: StagedBackwards | None = None

    def make_group(self, module: nn.Module, parts: LocalParts) -> ModelGroup:
        return StageGroup(self, module, parts)

    def attach(self, backwards: StagedBackwards | None) -> None:
        """Sets the object to which the forward reports its backwards; None when the module is unwrapped."""
        self._backwards = backwards

    def layer_of(self, name: str) -> int:
        """Returns the number of the layer that a parameter or buffer of this module belongs to."""
        # A loss, which is no layer, is registered before the layers.
        return int(name.split(".")[1]) if name.startswith(f"{self.layers_name}.") else -1

    def __getstate__(self) -> dict[str, Any]:
        # A copy has this stage's layers, and no groups of ranks.
        alone = dict.fromkeys(("stage_group", "_in_order", "_ranks", "_backwards"))
        return {**super().__getstate__(), **alone, "_runs": {}}

    def forward(self, *args: Any, target: Tensor | None = None, **inputs: Any) -> Any:
        """Trains on a batch, or evaluates it.

        Args:
            args: of the first layer; the same on all ranks of the stages.
            target: of the loss.
            inputs: what layers are to get as well, by name.

        Returns:
            With ``target`` the mean loss, a scalar, else the last layer's output; on all ranks of the stages. If
            gradients are enabled and there is a target, the backwards have run, and ``loss.backward()`` only confirms
            them.

        Raises:
            ValueError: if the batch does not divide into the microbatches.
            StageError: if gradients were to accumulate over several batches.
        """
        trains = torch.is_grad_enabled() and target is not None
        if torch.is_grad_enabled() and self.training and target is None:
            raise StageError(
                "a pipeline trains on the loss that it was given: pass target, or evaluate under torch.no_grad(). A "
                "loss of its output outside would have nothing to go back through"
            )
        batch = _batch_size((args, inputs, target))
        if any(isinstance(leaf, Tensor) and not leaf.dim() for leaf in tree_leaves((args, inputs))):
            raise ValueError(
                "a tensor without dimensions among the arguments of layers does not divide into microbatches: pass a "
                "number (.item()), or one for each sample"
            )
        if trains and batch % self.microbatches:
            raise ValueError(
                f"a batch of {batch} does not divide into microbatches={self.microbatches}: choose a batch size that "
                "does, and drop_last=True for a loader whose last batch is smaller"
            )
        expected = set().union(*self._inputs.values())
        missing = sorted(expected - inputs.keys())
        unknown = sorted(inputs.keys() - expected)
        if missing:
            raise TypeError(f"forward() lacks the argument {missing[0]!r}, which a layer gets")
        if unknown:
            raise TypeError(f"forward() has an argument {unknown[0]!r}, which no layer gets: name it in inputs")
        if trains:
            alone = self.stage_group is None
            return self._loss_alone(args, inputs, target) if alone else self._train(args, inputs, target)
        with torch.no_grad():
            return self._evaluate(args, inputs, target, math.gcd(batch, self.microbatches))

    def _train(self, args: tuple[Any, ...], inputs: Mapping[str, Any], target: Any) -> Tensor:
        backwards = self._backwards
        if backwards is None:
            raise StageError(
                "a pipeline of several ranks trains inside of a megastrategy.DistributedDataParallel, which keeps its "
                "gradients from the forward to the step: wrap the module that has it"
            )
        backwards.begin(self.microbatches)
        try:
            run = self._run(True, self.microbatches, args, inputs, target)
            loss = self._from_last_stage(run.train(args, inputs, target, backwards))
            self._numbers.record()
        except BaseException:
            backwards.abandon()
            raise
        try:
            backwards.finish(run.problem or self._loss_buffers.problem())
        except StageError:
            self._runs.clear()
            raise
        self._loss_buffers.share(self._in_order, self.plan.num_ranks - 1)
        return _Done.apply(torch.zeros((), device=loss.device, requires_grad=True), loss, backwards)  # type: ignore[no-any-return]

    def _loss_alone(self, args: tuple[Any, ...], inputs: Mapping[str, Any], target: Any) -> Tensor:
        """Returns the loss, with a graph, on a process that has all layers."""
        parts = zip(*(split(value, self.microbatches) for value in (args, dict(inputs), target)), strict=True)
        chain = self._whole_chain()
        losses = [scalar(self._loss(chain(*part, **named), wanted)) for part, named, wanted in parts]
        return torch.stack(losses).mean()

    def _whole_chain(self) -> Chunk:
        """Returns all layers as one module; in a copy of a stage, layers of other stages raise when they are called."""
        return Chunk(dict(enumerate(self.layers)), self._inputs)

    def _evaluate(self, args: tuple[Any, ...], inputs: Mapping[str, Any], target: Any, microbatches: int) -> Any:
        if self.stage_group is None:
            output = self._whole_chain()(*args, **inputs)
            return output if target is None else scalar(self._loss(output, target))
        is_last = self._rank == self.plan.num_ranks - 1
        # Twice, if shapes have changed for a reason that stages cannot compare, such as an attribute of a class.
        for is_again in (False, True):
            run = self._run(False, microbatches, args, inputs, target)
            output = run.evaluate(args, inputs)
            problem = run.problem
            if is_last and not problem:
                try:
                    output = check_sent(output) if target is None else scalar(self._loss(output, target))
                except ValueError as error:
                    problem = str(error)
            problem = problem or self._loss_buffers.problem()
            self._numbers.record()
            if not any(self._ranks.host.max_of_bytes([bool(problem)])):
                break
            self._runs.clear()
            if is_again:
                raise StageError(next(filter(None, self._ranks.all_gather_objects(problem))))
        if target is None:
            return self._output_from_last_stage(output)
        self._loss_buffers.share(self._in_order, self.plan.num_ranks - 1)
        return self._from_last_stage(output)

    # --- between stages ----------------------------------------------------------------------------------------------

    def _run(self, trains: bool, microbatches: int, args: Any, inputs: Any, target: Any) -> Run:
        """Returns the schedule for such a batch. Collective over the stages, which must have the same kind of batch."""
        # Outputs of layers depend on it: under autocast they have 16 bits.
        cast = torch.is_autocast_enabled(self._device.type) and str(torch.get_autocast_dtype(self._device.type))
        batch = [_kind(leaf) for leaf in tree_leaves((args, dict(inputs)))]
        targets = [_kind(leaf) if isinstance(leaf, Tensor) else type(leaf).__name__ for leaf in tree_leaves(target)]
        kind = str((trains, microbatches, self.training, cast, batch, targets))
        for chunk in self._chunks:
            chunk.update_layers(self.layers)
        self._loss_buffers = LossBuffers(self._loss)
        seen = [*map(id, self.layers), *((param.requires_grad, param.dtype) for param in self.layers.parameters())]
        changed = seen != self._seen or self._numbers.have_changed()
        self._seen = seen
        digest = list(hashlib.sha256(kind.encode()).digest()[:8])
        copies = self._what_copies_need()
        largest = self._ranks.host.max_of_bytes([*digest, *(255 - byte for byte in digest), changed, *copies])
        if any(one + other != 255 for one, other in zip(largest[:8], largest[8:16], strict=True)):
            raise StageError(
                f"the stages were given batches of different kinds: rank {self._rank} has {kind}. All ranks of the "
                "stages need the same batch: choose a sampler's rank by the data-parallel rank"
            )
        for copied, needs, is_frozen in zip(self.copies, largest[17::2], largest[18::2], strict=True):
            if trains and needs and is_frozen:
                one, *others = copied.names.values()
                raise StageError(
                    f"parameter {one!r} is trained on one stage and frozen on another, where it is "
                    f"{' and '.join(map(repr, others))}: copies of a tied weight would part. Freeze or unfreeze it in "
                    "each of these layers"
                )
        # Tensors between stages may need gradients now, or need none any more, or have other shapes.
        if largest[16]:
            self._runs.clear()
            self._numbers = PlainValues(self.layers)
        if kind not in self._runs:
            assert self._in_order is not None
            while len(self._runs) >= _MOST_RUNS:  # the same on all stages, since they had the same batches
                del self._runs[next(iter(self._runs))]
            self._runs[kind] = Run(
                self.plan,
                self._chunks,
                self._in_order,
                self._device,
                self.schedule,
                microbatches,
                self._loss if trains else None,
            )
        return self._runs[kind]

    def _what_copies_need(self) -> list[int]:
        """Returns for each parameter with copies whether this rank's needs gradients, and whether it is frozen."""
        own = dist.get_rank(self.stage_group)
        params = [self.get_parameter(c.names[own]) if own in c.names else None for c in self.copies]
        return [f for p in params for f in ((p.requires_grad, not p.requires_grad) if p is not None else (0, 0))]

    def _from_last_stage(self, loss: Tensor | None) -> Tensor:
        value = torch.zeros((), device=self._device) if loss is None else loss.detach().float()
        dist.broadcast(value, group=self._in_order, group_src=self.plan.num_ranks - 1)
        return value

    def _output_from_last_stage(self, output: Any) -> Any:
        last = self.plan.num_ranks - 1
        is_last = self._rank == self.plan.num_ranks - 1
        known = [shapes_of(output)]
        dist.broadcast_object_list(known, group=self._in_order, group_src=last, device=self._device)

        def receive(value: Any, own: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            tensor = own.contiguous() if is_last else torch.empty(value.shape, dtype=value.dtype, device=self._device)
            sent = torch.view_as_real(tensor) if tensor.is_complex() else tensor
            dist.broadcast(sent, group=self._in_order, group_src=last)
            return tensor

        return map_leaves(receive, known[0], output if is_last else known[0])


def whole_state_dict(module: nn.Module) -> dict[str, Any]:
    """Returns the state of a module with a :class:`Pipeline` in it as of one process, in the order of the layers.

    In host memory on the lowest rank of the stages and of the tensor ranks; empty on the others. Collective over both.
    :func:`load_whole_state_dict` loads it on every rank.
    """
    name, pipeline = next((name, child) for name, child in module.named_modules() if isinstance(child, Pipeline))
    state = module.state_dict()
    tensor_mesh = pipeline.tensor_mesh
    if tensor_mesh is not None:
        is_first = tensor_mesh.get_local_rank() == 0
        state = {key: _whole(value, keep=is_first) for key, value in state.items()}
        if not is_first:  # the first tensor rank's stages have the same
            return {}
    if pipeline.stage_group is None:
        return state
    prefix = f"{name}." if name else ""
    outside = {key: value for key, value in state.items() if not key.startswith(f"{prefix}layers.")}
    # By layer, and in each layer in the order of the module.
    places = {
        key: (pipeline.layer_of(key.removeprefix(prefix)), i, key) for i, key in enumerate(state) if key not in outside
    }
    own = {place: {"": state[key]} for key, place in places.items()}
    found = dict(gather_states(own, pipeline._ranks.host, torch.device("cpu")))
    # Values outside of the layers are the same on all stages.
    in_order = {place[-1]: found[place][""] for place in sorted(found)}
    return outside | in_order if pipeline._ranks.is_rank_zero else {}


def load_whole_state_dict(module: nn.Module, state: Mapping[str, Any], strict: bool = True) -> None:
    """Loads a state of :func:`whole_state_dict`, or of a process that had all layers: each rank loads its own part.

    Args:
        module: a module with a :class:`Pipeline` in it.
        state: the full state, on every rank. DTensors in it are this rank's parts already.
        strict: as for ``module.load_state_dict``; parameters of other stages are never missing.
    """
    module.load_state_dict(cut_state(module, state), strict)


def _whole(value: Any, *, keep: bool) -> Any:
    """Returns the full tensor of a DTensor, in host memory if ``keep``, else None. Collective over its mesh."""
    if not isinstance(value, DTensor):
        return value
    whole = value.full_tensor()
    return whole.cpu() if keep else None


class _Elsewhere(nn.Module):
    """Placeholder for a layer of another rank, which ignores the layer's state when a full state is loaded."""

    def forward(self, *_: Any, **__: Any) -> Any:
        raise StageError("this layer is on another rank: call the pipeline, whose forward goes through all of them")

    def _load_from_state_dict(self, *_: Any, **__: Any) -> None:
        pass


class _Done(torch.autograd.Function):
    """Returns the loss of backwards that have run, and reports its own backward."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, loss: Tensor, backwards: StagedBackwards | None) -> Tensor:
        ctx.backwards = backwards
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None]:
        if ctx.backwards is not None:
            ctx.backwards.use(grads[0])
        return None, None, None


def _stages_and_tensor_ranks(mesh: DeviceMesh) -> tuple[DeviceMesh, DeviceMesh | None]:
    """Returns the mesh of the stages, and that of the tensor ranks or None."""
    names = mesh.mesh_dim_names or ()
    if mesh.ndim == 1:
        return mesh, None
    if mesh.ndim > 2 or len(names) < 2:
        raise ValueError(
            f"the mesh has {mesh.ndim} dimensions, named {list(names)}: pass that of the stages (mesh['pp']), or with "
            "the tensor ranks behind it (mesh['pp', 'tp'])"
        )
    return mesh[names[0]], mesh[names[1]]


def _check_loss(loss: Any) -> None:
    """Raises ValueError for a loss with trainable parameters: all stages have it, and only the last computes it."""
    params = loss.named_parameters() if isinstance(loss, nn.Module) else ()
    name = next((name for name, param in params if param.requires_grad), None)
    if name:
        raise ValueError(
            f"the loss is a {type(loss).__name__} with a parameter {name!r} that is trained: every stage would have "
            "one of its own, and they would part. Make it a part of the last layer, which may return a tuple of all "
            "that the loss needs, or freeze it (requires_grad_(False))"
        )


def _find_copies(layers: Sequence[nn.Module], plan: StagePlan, order: Sequence[int]) -> list[Copies]:
    """Returns the parameters that layers of several ranks share, in the order of the layers.

    ``order``: the ranks of the group in the order of their stages.
    """
    names: dict[int, dict[int, str]] = {}
    for number, layer in enumerate(layers):
        for name, param in layer.named_parameters(f"layers.{number}"):
            names.setdefault(id(param), {}).setdefault(order[plan.rank_of(number)], name)
    return [Copies(by_rank) for by_rank in names.values() if len(by_rank) > 1]


def _device_of(mesh: DeviceMesh | None, layers: Sequence[nn.Module]) -> torch.device:
    if mesh is None or mesh.device_type == "cpu":
        real = (param.device for layer in layers for param in layer.parameters() if not param.is_meta)
        return next(real, torch.device("cpu"))
    return torch.device(mesh.device_type, torch.get_device_module(mesh.device_type).current_device())


def _batch_size(values: Any) -> int:
    sizes = [leaf.shape[0] for leaf in tree_leaves(values) if isinstance(leaf, Tensor) and leaf.dim()]
    if not sizes or len(set(sizes)) > 1:
        raise ValueError(f"a batch's tensors have first dimensions of {sizes}: expected samples, as many in each")
    return sizes[0]


def _kind(leaf: Any) -> object:
    """Returns the facts on which shapes of outputs may depend: the shape of a tensor, the value of a number."""
    if isinstance(leaf, Tensor):
        return tuple(leaf.shape), str(leaf.dtype), leaf.requires_grad
    return repr(leaf) if isinstance(leaf, bool | int | float | str) else type(leaf).__name__
