"""Runs the stages of one rank under torch's pipeline schedules, and reports their backwards."""

from __future__ import annotations

import contextlib
import dataclasses
import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.pipelining import ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.pipelining.schedules import get_schedule_class
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from .backwards import StagedBackwards
from .plan import SCHEDULES, StagePlan
from .stage import Stage, as_before


class Chunk(nn.Module):
    """The layers of one stage.

    Args:
        layers: by their numbers, in order.
        inputs: by number, the names of a layer's arguments beside the output of the layer before.
    """

    def __init__(self, layers: Mapping[int, nn.Module], inputs: Mapping[int, Sequence[str]]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers.values())
        self._numbers = list(layers)
        self._inputs = [inputs.get(number, ()) for number in layers]
        self.last_layer = f"layer {self._numbers[-1]} ({type(self.layers[-1]).__name__})"

    def update_layers(self, layers: nn.ModuleList) -> None:
        """Replaces layers that user code has replaced in the pipeline, for example by a conversion of batch norms."""
        for place, number in enumerate(self._numbers):
            if self.layers[place] is not layers[number]:
                self.layers[place] = layers[number]

    def forward(self, *values: Any, **inputs: Any) -> Any:
        """Calls the layers in order. The elements of a returned tuple are the arguments of the next layer."""
        for layer, names in zip(self.layers, self._inputs, strict=True):
            output = layer(*values, **{name: inputs[name] for name in names})
            values = output if isinstance(output, tuple) else (output,)
        return values if len(values) > 1 else values[0]

    @property
    def input_names(self) -> set[str]:
        """The names of all arguments that layers get beside outputs."""
        return {name for names in self._inputs for name in names}


class Run:
    """A schedule for batches of one kind: torch's stages know the shapes of the tensors between them.

    Args:
        plan: the division of layers into stages, and stages onto ranks.
        chunks: the layers of this rank's stages, in order.
        group: the ranks of the stages.
        device: the device of this rank.
        schedule: the schedule's name.
        microbatches: their number in a batch.
        loss: a function of the last stage's output and a target, a mean over the microbatch; None for evaluation.
    """

    def __init__(
        self,
        plan: StagePlan,
        chunks: Sequence[Chunk],
        group: ProcessGroup,
        device: torch.device,
        schedule: str,
        microbatches: int,
        loss: Callable[[Any, Tensor], Tensor] | None,
    ) -> None:
        self._stages = [
            Stage(chunk, number, plan.num_stages, device, group=group, last_layer=chunk.last_layer)
            for chunk, number in zip(chunks, plan.stages_of(group.rank()), strict=True)
        ]
        self._chunks = chunks
        self._microbatches = microbatches
        params = [id(param) for chunk in chunks for param in chunk.parameters()]
        self._has_shared = len(params) > len(set(params))
        self.is_first = self._stages[0].is_first
        self.is_last = self._stages[-1].is_last
        self._mean = scaled = None if loss is None else _Mean(loss, microbatches, self._stages[-1])
        if SCHEDULES[schedule] == 1:
            kind: Any = ScheduleGPipe if loss is None else get_schedule_class(schedule)
            self._schedule = kind(self._stages[0], microbatches, loss_fn=scaled, scale_grads=False)
        else:
            kind = ScheduleInterleaved1F1B if loss is None else get_schedule_class(schedule)
            self._schedule = kind(self._stages, microbatches, loss_fn=scaled, scale_grads=False)

    def train(
        self, args: tuple[Any, ...], inputs: Mapping[str, Any], target: Any, backwards: StagedBackwards
    ) -> Tensor | None:
        """Forwards and backwards of a batch. Returns the mean loss on the last stage, else None."""
        left = dict.fromkeys(self._stages, self._microbatches)

        def before_backward(stage: Stage, outputs: Any) -> None:
            left[stage] -= 1
            # A parameter that two stages of this rank share gets gradients until both have finished.
            is_last = not any(left.values()) if self._has_shared else left[stage] == 0
            has_loss = self.is_last and stage is self._stages[-1]
            backwards.before_backward(outputs, is_last=is_last, has_loss=has_loss)

        for stage in self._stages:
            stage.before_backward = before_backward
        losses: list[Tensor] = []
        assert self._mean is not None, "it has a loss"
        numbers = self._mean.set_target(target) if self.is_last else None
        try:
            self._step(args, inputs, target=numbers, losses=losses, return_outputs=False)
        finally:
            self._mean.drop()
            for stage in self._stages:
                stage.before_backward = None
        return torch.stack([loss.detach() for loss in losses]).sum() if self.is_last else None

    def evaluate(self, args: tuple[Any, ...], inputs: Mapping[str, Any]) -> Any:
        """Returns the output of a batch on the last stage, else None, and None where there is a problem."""
        outputs = list[Any]()
        last = self._stages[-1]
        last.finish_microbatch = outputs.append
        try:
            self._step(args, inputs)
        finally:
            last.finish_microbatch = last.output = None
        if not self.is_last or self.problem:
            return None
        try:
            return merge(outputs)
        except (ValueError, RuntimeError) as error:
            last.problem = f"{self._chunks[-1].last_layer} is the last layer and {error}"
            return None

    @property
    def problem(self) -> str:
        """The reason of this rank to reject the schedule's results; empty if they are right."""
        return next((stage.problem for stage in self._stages if stage.problem), "")

    def _step(self, args: tuple[Any, ...], inputs: Mapping[str, Any], **options: Any) -> Any:
        names = set().union(*(chunk.input_names for chunk in self._chunks))
        own = {name: inputs[name] for name in inputs if name in names}
        return self._schedule.step(*(args if self.is_first else ()), **own, **options)


class _Mean:
    """The loss of a microbatch as a part of the batch's loss.

    torch's schedules divide a target that is one tensor. Here a target may be a tree of tensors, so they divide the
    numbers of the microbatches instead. The output may be a tree as well, which the stage keeps.
    """

    def __init__(self, loss: Callable[[Any, Any], Tensor], microbatches: int, stage: Stage) -> None:
        self._loss = loss
        self._microbatches = microbatches
        self._stage = stage
        self._targets: list[Any] = []

    def set_target(self, target: Any) -> Tensor:
        """Sets the batch's target. Returns the numbers of its microbatches, which a schedule divides."""
        self._targets = split(target, self._microbatches)
        return torch.arange(self._microbatches)

    def drop(self) -> None:
        self._targets = []

    def __call__(self, carrier: Tensor, number: Tensor) -> Tensor:
        """Returns the loss of one microbatch; ``carrier``: the output that torch has seen."""
        stage = self._stage
        output = stage.output
        stage.output = None
        if not stage.is_refused:
            with as_before(self._loss) if stage.is_learning else contextlib.nullcontext():
                loss = self._loss(output, self._targets[int(number)])
            try:
                return scalar(loss) / self._microbatches
            except ValueError as error:
                stage.problem = str(error)
        return carrier.sum() if carrier.requires_grad else torch.zeros((), requires_grad=True)


def scalar(loss: Any) -> Tensor:
    """Returns the loss if it is one real number. Raises ValueError otherwise."""
    if not isinstance(loss, Tensor) or loss.is_complex():
        what = "a complex number" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
        raise ValueError(
            f"the pipeline's loss function returned {what}: expected a tensor of one number, a mean. Return that only"
        )
    if loss.numel() != 1:
        raise ValueError(f"the pipeline's loss function returned {list(loss.shape)} numbers: expected one, a mean")
    return loss


def merge(outputs: Sequence[Any]) -> Any:
    """Returns the output of a batch from those of its microbatches.

    Tensors are joined along the first dimension. Numbers and tensors without dimensions are averaged if they are
    floating, and must be equal otherwise.

    Raises:
        ValueError: if they cannot be joined, with the reason.
    """
    flat = [tree_flatten(output) for output in outputs]
    if any(spec != flat[0][1] for _, spec in flat):
        raise ValueError("returned outputs of different structures for the microbatches of a batch")
    return tree_unflatten([_merged(leaves) for leaves in zip(*(leaves for leaves, _ in flat), strict=True)], flat[0][1])


def map_leaves(do: Callable[..., Any], first: Any, *others: Any) -> Any:
    """Applies a function to all leaves, as torch's ``tree_map``, and to the fields of dataclasses."""

    def of_leaf(one: Any, *same: Any) -> Any:
        if not _is_dataclass(one):
            return do(one, *same)
        names = [field.name for field in dataclasses.fields(one)]
        values = {name: map_leaves(do, *(getattr(each, name) for each in (one, *same))) for name in names}
        return dataclasses.replace(one, **values)

    return tree_map(of_leaf, first, *others)


def shapes_of(output: Any) -> Any:
    """Returns the output with tensors on meta, which have shapes and no memory."""
    return map_leaves(lambda t: torch.empty_like(t, device="meta") if isinstance(t, Tensor) else t, output)


def check_sent(output: Any) -> Any:
    """Returns the output of the last stage if it can be sent to the other stages. Raises ValueError with the reason
    otherwise."""
    try:
        pickle.dumps(shapes_of(output))
    except Exception as error:
        raise ValueError(
            f"the last layer returned what other stages cannot get ({type(error).__name__}: {error}): return tensors, "
            "numbers, and containers of them whose class is defined in a module"
        ) from error
    return output


def _is_dataclass(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _merged(leaves: Sequence[Any]) -> Any:
    first = leaves[0]
    if _is_dataclass(first) and all(type(leaf) is type(first) for leaf in leaves):
        names = [field.name for field in dataclasses.fields(first)]
        return dataclasses.replace(first, **{name: merge([getattr(leaf, name) for leaf in leaves]) for name in names})
    if isinstance(first, Tensor) and first.dim():
        if len({leaf.shape[1:] for leaf in leaves}) > 1:
            raise ValueError(
                f"returned {' and '.join(str(list(leaf.shape)) for leaf in leaves)} for the microbatches of a batch, "
                "which cannot be joined along the first dimension: pad to one shape"
            )
        return torch.cat(list(leaves))
    if isinstance(first, Tensor) and (first.is_floating_point() or first.is_complex()):
        return torch.stack(list(leaves)).mean(0)
    if type(first) is float:
        return sum(leaves) / len(leaves)
    if any(type(leaf) is not type(first) or _differ(leaf, first) for leaf in leaves):
        raise ValueError(
            f"returned {first!r} for one microbatch of a batch and another value for another one, which cannot be "
            "joined: return tensors with a row for each sample"
        )
    return first


def _differ(one: Any, other: Any) -> bool:
    try:
        return bool(one != other)
    except Exception:  # noqa: BLE001 - whatever a comparison of unknown values raises, they cannot be joined
        return True


def split(values: Any, count: int) -> list[Any]:
    """Returns the microbatches of a tree of tensors."""
    return [
        tree_map(lambda t: t.tensor_split(count)[n] if isinstance(t, Tensor) and t.dim() else t, values)  # noqa: B023
        for n in range(count)
    ]
