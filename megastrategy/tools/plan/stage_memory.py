"""The most bytes that a stage of a pipeline holds at once, from its layers, each measured alone. Pure functions.

[Note: what a stage holds]
Always its weights, gradients and states, and what torch's stages receive into: every microbatch's input, and where
anything up to there is trained, the gradient of its output. On the first stage that is the batch. A microbatch between
its forward and its backward has what the layers' backwards need, but for the input, which lies where it was received,
and the output, which the schedule keeps for the backward. The most is held in the forward of the last microbatch that
runs ahead or in the first backward, in some layer: beside its own temporaries there is what the layers before it have
saved. Where 1F1B alternates, one output and one input's gradient more are on their way to the neighbours.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import NamedTuple


@dataclasses.dataclass(frozen=True)
class Layer:
    """One layer, measured for one microbatch.

    Attributes:
        name: for people.
        forward_flops, backward_flops: 0 backward for a layer in a frozen prefix.
        fixed_bytes: weights, gradients and optimizer state.
        saved_bytes: what its backward needs.
        forward_peak_bytes: the most that its forward holds, with what it saves and returns.
        backward_peak_bytes: the most that its backward holds beyond what is saved, with its output or that one's
            gradient.
        input_bytes, output_bytes: what it takes and returns.
        saved_input_bytes: of ``saved_bytes`` the input itself; 0 if the layer before has saved it as its output.
        saves_output: whether its output is among ``saved_bytes``.
        input_needs_grad: whether anything before it is trained, so that a gradient goes back.
    """

    name: str
    forward_flops: float
    backward_flops: float
    fixed_bytes: int
    saved_bytes: int
    forward_peak_bytes: int
    backward_peak_bytes: int = 0
    input_bytes: int = 0
    output_bytes: int = 0
    saved_input_bytes: int = 0
    saves_output: bool = False
    input_needs_grad: bool = True


class StageBytes(NamedTuple):
    """Bytes that a stage holds beside its layers' ``fixed_bytes``; see [Note: what a stage holds].

    Attributes:
        received: for each microbatch of a step.
        waiting: for each microbatch between its forward and its backward.
        working: for the one whose forward or backward runs, with what it has saved so far.
        on_their_way: where 1F1B alternates.
    """

    received: int
    waiting: int
    working: int
    on_their_way: int

    def peak(self, num_ahead: int, num_microbatches: int, *, alternates: bool) -> int:
        """The most at once. ``num_ahead``: the most microbatches between forward and backward."""
        others = (num_ahead - 1) * self.waiting + alternates * self.on_their_way
        return num_microbatches * self.received + others + self.working


def stages_from(layers: Sequence[Layer], start: int) -> Iterator[StageBytes]:
    """Yields what the stages hold that begin with layer ``start``, of one layer, of two and so on."""
    first, saved, forward, inner = layers[start], 0, 0, 0
    for number in range(start, len(layers)):
        layer, is_end = layers[number], number == len(layers) - 1
        # The input is alive in the layer's forward, wherever it lies.
        if number == start or layers[number - 1].saves_output:
            forward = max(forward, saved + layer.forward_peak_bytes)
        else:
            forward = max(forward, saved + layer.input_bytes + layer.forward_peak_bytes)
        saved += layer.saved_bytes - (first.saved_input_bytes if number == start else 0)
        own = saved + layer.backward_peak_bytes if layer.backward_flops or layer.backward_peak_bytes else 0
        # The last layer's gradient comes into a buffer, or from the loss; those between have room for it beside an
        # output that is saved.
        last = own + (layer.output_bytes if is_end and own else 0)
        returned = layer.output_bytes if not is_end and layers[number + 1].input_needs_grad else 0
        sent_back = first.input_bytes if start and first.input_needs_grad else 0
        yield StageBytes(
            received=first.input_bytes + returned,
            waiting=saved + (0 if layer.saves_output else layer.output_bytes),
            working=max(forward, inner + layer.output_bytes if inner else 0, last),
            on_their_way=sent_back + (0 if is_end else layer.output_bytes),
        )
        if own:
            inner = max(inner, own + (layer.output_bytes if layer.saves_output else 0))
