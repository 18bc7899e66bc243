"""The most bytes that a stage of a pipeline holds at once, from its layers, each measured alone. Pure functions.

[Note: what a stage holds]
Always its weights, gradients and states, and what torch's stages receive into: every microbatch's input, and where
anything up to there is trained, the gradient of its output. On the first stage that is the batch. A microbatch between
its forward and its backward has the tensors for the layers' backwards, except for the input, which is where it was
received, and the output, which the schedule keeps for the backward. The peak is in the forward of the last microbatch
that runs ahead or in the first backward, in some layer: beside its own temporaries there is what the layers before it
have saved. Where 1F1B alternates, one output and one input's gradient more are on their way to the neighbours. Under
GPipe all that was sent, outputs and inputs' gradients, stays until the end of the step, when torch's schedule waits for
it.
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
        backward_peak_bytes: the most that its backward holds beyond what is saved, its output and that one's gradient.
        inner_peak_bytes: the same with the gradient, which goes as soon as it is read.
        input_bytes, output_bytes: what it takes and returns.
        saved_input_bytes: of ``saved_bytes`` the input itself; 0 if the layer before has saved it as its output.
        saves_output: whether its output is among what it or a layer before it has saved.
        returns_input: whether its output is its input, or a view of it.
        passes_grad: whether its input's gradient is its output's, or a view of it.
        has_params: whether it has any: a stage without them cannot be trained by torch's optimizers.
        input_needs_grad: whether anything before it is trained, so that a gradient goes back.
    """

    name: str
    forward_flops: float
    backward_flops: float
    fixed_bytes: int
    saved_bytes: int
    forward_peak_bytes: int
    backward_peak_bytes: int = 0
    inner_peak_bytes: int = 0
    input_bytes: int = 0
    output_bytes: int = 0
    saved_input_bytes: int = 0
    saves_output: bool = False
    returns_input: bool = False
    passes_grad: bool = False
    has_params: bool = True
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
        in_flight = (num_ahead - 1) * self.waiting + alternates * self.on_their_way
        return num_microbatches * self.received + in_flight + self.working


def stages_from(layers: Sequence[Layer], start: int, *, keeps_sent: bool = False) -> Iterator[StageBytes]:
    """Yields what the stages hold that begin with layer ``start``, of one layer, of two and so on.

    Args:
        layers: all of them, in order.
        start: the first of the stage.
        keeps_sent: whether all that is sent stays until the end of the step, as under GPipe.
    """
    first = layers[start]
    saved = 0
    forward = 0
    sent_back = first.input_bytes if start and first.input_needs_grad else 0
    inner = 0  # backwards of layers whose output is not the stage's
    # Layers whose output shares the stage's output memory: without it, with it, and with layers behind that pass its
    # gradient on as it came into its buffer.
    beside = shared = passed = 0
    is_received = True  # whether the next layer's input is where the stage received it
    for number in range(start, len(layers)):
        layer = layers[number]
        is_end = number == len(layers) - 1
        # The input is alive in the layer's forward, in any memory.
        is_there = is_received or layers[number - 1].saves_output
        forward = max(forward, saved + (0 if is_there else layer.input_bytes) + layer.forward_peak_bytes)
        saved += layer.saved_bytes - (layer.saved_input_bytes if is_received else 0)
        if not layer.returns_input:
            inner = max(inner, beside)
            beside = 0
            shared = 0
            passed = 0
            is_received = False
        elif not layer.passes_grad:
            passed = shared
        has_backward = bool(layer.backward_flops or layer.backward_peak_bytes or layer.inner_peak_bytes)
        loose = 0 if is_received or layer.saves_output else layer.output_bytes
        # The gradient of a stage's output is in a buffer, that of the model's output comes from the loss.
        peak = layer.inner_peak_bytes if is_end else layer.backward_peak_bytes
        last = saved + loose + peak if has_backward else 0
        returned = layer.output_bytes if not is_end and layers[number + 1].input_needs_grad else 0
        waiting = saved + loose
        if keeps_sent:
            sent = 0 if is_end or is_received else layer.output_bytes
            # After its backward a microbatch has its input's gradient in place of what it had saved.
            waiting = sent + max(waiting - sent, sent_back)
        yield StageBytes(
            received=first.input_bytes + returned,
            waiting=waiting,
            working=max(forward, inner + layer.output_bytes if inner else 0, shared if is_end else passed, last),
            on_their_way=sent_back + (0 if is_end else layer.output_bytes),
        )
        if has_backward:
            nbytes = saved + layer.inner_peak_bytes
            beside = max(beside, nbytes)
            shared = max(shared, nbytes + loose)
            passed = max(passed, saved + layer.backward_peak_bytes + loose)
