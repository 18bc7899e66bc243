"""Runs one stage, or several, under torch's pipeline schedules, and tells the engine of their backwards."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.pipelining.schedules import get_schedule_class

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
        self.layers = nn.ModuleList(layers.values())
        self._inputs = [inputs.get(number, ()) for number in layers]

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
    Here that leaves the module's buffers (statistics of a batch norm) as they were, and has no backward: a gradient has
    the shape of what it is of.

    Attributes:
        before_backward: called with the stage and what a backward starts from.
    """

    before_backward: Callable[[_Stage, Any], None] | None = None

    def _compute_outputs(self, *args: Tensor, module: nn.Module, **kwargs: Any) -> Any:
        buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
        outputs = module(*args, **kwargs)
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
        return outputs

    def _compute_input_grads(
        self, outputs: list[Tensor], all_fwd_inputs: list[Tensor], grad_outputs: list[Tensor | None] | None = None
    ) -> tuple[None, ...]:
        return (None,) * len(all_fwd_inputs)

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
        scaled = None if loss is None else _Mean(loss, microbatches)
        if SCHEDULES[schedule] == 1:
            kind: Any = ScheduleGPipe if loss is None else get_schedule_class(schedule)
            self._schedule = kind(self._stages[0], microbatches, loss_fn=scaled, scale_grads=False)
        else:
            kind = ScheduleInterleaved1F1B if loss is None else get_schedule_class(schedule)
            self._schedule = kind(self._stages, microbatches, loss_fn=scaled, scale_grads=False)

    def train(
        self, args: tuple[Any, ...], inputs: Mapping[str, Any], target: Tensor, backwards: FollowsStages
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
        try:
            self._step(args, inputs, target=target if self.is_last else None, losses=losses, return_outputs=False)
        finally:
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
    """The loss of a microbatch as a part of the batch's."""

    def __init__(self, loss: Callable[[Any, Tensor], Tensor], microbatches: int) -> None:
        self._loss, self._microbatches = loss, microbatches

    def __call__(self, output: Any, target: Tensor) -> Tensor:
        return self._loss(output, target) / self._microbatches
