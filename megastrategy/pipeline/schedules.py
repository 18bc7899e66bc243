"""Runs one stage, or several, under torch's pipeline schedules, and tells the engine of their backwards."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.pipelining.schedules import get_schedule_class
from torch.utils._pytree import tree_map

from ..core import FollowsStages
from .plan import SCHEDULES, StagePlan


class Chunk(nn.Module):
    """The layers of one stage.

    Args:
        layers: by their numbers, in order.
        inputs: by number, the names of the arguments that a layer gets beside what comes from the one before.
    """

    def __init__(self, layers: Mapping[int, nn.Module], inputs: Mapping[int, Sequence[str]]) -> None:
        super().__init__()
        self.layers, self._numbers = nn.ModuleList(layers.values()), list(layers)
        self._inputs = [inputs.get(number, ()) for number in layers]

    def follow(self, layers: nn.ModuleList) -> None:
        """Takes the layers that somebody has put in the places of its own, as conversions of batch norms do."""
        for place, number in enumerate(self._numbers):
            if self.layers[place] is not layers[number]:
                self.layers[place] = layers[number]

    def forward(self, *values: Any, **inputs: Any) -> Any:
        """A layer that returns a tuple passes its elements on, one argument each."""
        for layer, names in zip(self.layers, self._inputs, strict=True):
            output = layer(*values, **{name: inputs[name] for name in names})
            values = output if isinstance(output, tuple) else (output,)
        return values if len(values) > 1 else values[0]

    @property
    def input_names(self) -> set[str]:
        """The names that some layer gets."""
        return {name for names in self._inputs for name in names}


class _Stage(PipelineStage):
    """A stage whose backwards the engine hears of.

    torch's learns the shapes of what passes between stages from one microbatch more, which it runs before the first.
    Here that leaves the batch and the module's buffers (statistics of a batch norm) as they were, and has no backward:
    a gradient has the shape of what it is of. What would come from another stage is zeros then, not memory that nobody
    has written: of indices that would be anything.

    Attributes:
        before_backward: called with the stage and what a backward starts from.
    """

    before_backward: Callable[[_Stage, Any], None] | None = None

    def _compute_outputs(self, *args: Tensor, module: nn.Module, **kwargs: Any) -> Any:
        buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
        if self.is_first:
            args = tree_map(_copy, args)
        else:
            for arg in args:
                getattr(arg, "_local_tensor", arg).detach().zero_()
        outputs = self._as_sent(module(*args, **tree_map(_copy, kwargs)))
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
        return outputs

    def _compute_input_grads(
        self, outputs: list[Tensor], all_fwd_inputs: list[Tensor], grad_outputs: list[Tensor | None] | None = None
    ) -> tuple[None, ...]:
        return (None,) * len(all_fwd_inputs)

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        return self._as_sent(super().forward_maybe_with_nosync(*args, **kwargs))

    def _as_sent(self, outputs: Any) -> Any:
        """A transposed output, say, with its elements in the order in which they are sent."""
        if self.is_last:
            return outputs
        return tree_map(lambda t: t.contiguous() if isinstance(t, Tensor) else t, outputs)

    def backward_maybe_with_nosync(
        self, backward_type: Any, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> Any:
        if self.before_backward is not None:
            self.before_backward(self, bwd_kwargs["stage_output"])
        return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)


class Run:
    """A schedule for batches of one kind: torch's stages know the shapes of what passes between them.

    Args:
        plan: which stages this rank has.
        chunks: their layers, in order.
        group: the ranks of the stages.
        device: of this rank.
        schedule: its name.
        microbatches: how many a batch is divided into.
        loss: of the last stage's output and a target, a mean over the microbatch; None where nothing is trained.
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
            _Stage(chunk, number, plan.num_stages, device, group=group)
            for chunk, number in zip(chunks, plan.stages_of(group.rank()), strict=True)
        ]
        self._chunks = chunks
        self._microbatches = microbatches
        params = [id(param) for chunk in chunks for param in chunk.parameters()]
        self._has_shared = len(params) > len(set(params))
        self.is_first, self.is_last = self._stages[0].is_first, self._stages[-1].is_last
        self._mean = scaled = None if loss is None else _Mean(loss, microbatches)
        if SCHEDULES[schedule] == 1:
            kind: Any = ScheduleGPipe if loss is None else get_schedule_class(schedule)
            self._schedule = kind(self._stages[0], microbatches, loss_fn=scaled, scale_grads=False)
        else:
            kind = ScheduleInterleaved1F1B if loss is None else get_schedule_class(schedule)
            self._schedule = kind(self._stages, microbatches, loss_fn=scaled, scale_grads=False)

    def train(
        self, args: tuple[Any, ...], inputs: Mapping[str, Any], target: Any, backwards: FollowsStages
    ) -> Tensor | None:
        """Forwards and backwards of a batch. Returns the mean loss on the last stage, else None."""
        left = dict.fromkeys(self._stages, self._microbatches)

        def before_backward(stage: _Stage, outputs: Any) -> None:
            left[stage] -= 1
            # A parameter that two stages of this rank share gets gradients until both are done.
            is_last = not any(left.values()) if self._has_shared else left[stage] == 0
            backwards.before_backward(outputs, is_last=is_last)

        for stage in self._stages:
            stage.before_backward = before_backward
        losses: list[Tensor] = []
        assert self._mean is not None, "it has a loss"
        numbers = self._mean.take(target) if self.is_last else None
        try:
            self._step(args, inputs, target=numbers, losses=losses, return_outputs=False)
        finally:
            self._mean.drop()
            for stage in self._stages:
                stage.before_backward = None
        return torch.stack([loss.detach() for loss in losses]).sum() if self.is_last else None

    def evaluate(self, args: tuple[Any, ...], inputs: Mapping[str, Any]) -> Any:
        """Returns the output of a batch on the last stage, else None."""
        return self._step(args, inputs)

    def _step(self, args: tuple[Any, ...], inputs: Mapping[str, Any], **options: Any) -> Any:
        names = set().union(*(chunk.input_names for chunk in self._chunks))
        own = {name: inputs[name] for name in inputs if name in names}
        return self._schedule.step(*(args if self.is_first else ()), **own, **options)


class _Mean:
    """The loss of a microbatch as a part of the batch's.

    torch's schedules divide a target that is one tensor. A target may be a tree of them here, so what they divide is
    the microbatches' numbers.
    """

    def __init__(self, loss: Callable[[Any, Any], Tensor], microbatches: int) -> None:
        self._loss, self._microbatches = loss, microbatches
        self._targets: list[Any] = []

    def take(self, target: Any) -> Tensor:
        """The batch's target has come. Returns what a schedule is to hand on to a call, divided."""
        self._targets = split(target, self._microbatches)
        return torch.arange(self._microbatches)

    def drop(self) -> None:
        self._targets = []

    def __call__(self, output: Any, number: Tensor) -> Tensor:
        return scalar(self._loss(output, self._targets[int(number)])) / self._microbatches


def scalar(loss: Tensor) -> Tensor:
    """Returns the loss, one number.

    Raises:
        ValueError: if it is several.
    """
    if loss.numel() != 1:
        raise ValueError(f"the pipeline's loss function returned {list(loss.shape)} numbers: expected one, a mean")
    return loss


def split(values: Any, count: int) -> list[Any]:
    """The microbatches of a tree of tensors."""
    return [
        tree_map(lambda t: t.tensor_split(count)[n] if isinstance(t, Tensor) and t.dim() else t, values)  # noqa: B023
        for n in range(count)
    ]


def _copy(value: Any) -> Any:
    return value.detach().clone().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value
