"""One stage of a pipeline under torch's schedules, and the values that it sends to the next one.

[Note: schedules end on all stages]
torch's schedules send tensors whose shapes every stage has learned once, in an additional microbatch. If a stage raised
in the middle, the others would wait for it, and if it sent another size, their processes would end. So a stage whose
output cannot be sent, or has another shape than before, records it (:attr:`Stage.problem`), sends zeros of the expected
shape and continues. All stages exchange their problems when the schedule has ended, and raise an error or begin anew.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map

_PASSES_WHOLE_NUMBERS = not hasattr(PipelineStage, "_shape_inference")
"""torch 2.11 needs a gradient for each tensor that a stage receives."""

_PLAIN = (bool, int, float, str, type(None))


class Slot(NamedTuple):
    """One element of a stage's output, as it was in the first microbatch.

    Attributes:
        kind: "tensor", the name of a number's type, or "None", for which nothing is sent.
        shape, dtype: of a tensor.
        value: of a number.
    """

    kind: str
    shape: tuple[int, ...] = ()
    dtype: torch.dtype | None = None
    value: float | None = None


class _Learned(NamedTuple):
    """The description of a stage's output that it sends with the first microbatch on torch 2.11."""

    sent: list[Slot] | None
    problem: str
    is_refused: bool


def _tensors_alone(values: Any) -> Any:
    return tuple(value for value in values or () if not isinstance(value, _Learned))


class Stage(PipelineStage):
    """A stage that reports its backwards; see [Note: schedules end on all stages].

    torch's stage learns the shapes of tensors between stages in an additional microbatch before the first. Here this
    microbatch leaves the batch and the module's buffers (statistics of a batch norm) and numbers unchanged, and has no
    backward, since a gradient has the shape of its tensor. Its inputs from another stage are zeros instead of memory
    that was never written, which would contain invalid indices.

    Args:
        last_layer: a description of this stage's last layer for error messages.
        others: the arguments of torch's class.

    Attributes:
        before_backward: called with the stage and the outputs at which a backward starts.
        problem: the reason to reject the schedule's results; empty if they are right.
        output: on the last stage, the output of the last microbatch. torch's code does not see it, so it may be any
            argument of the loss.
        finish_microbatch: called with ``output`` on the last stage.
        is_learning: whether the additional microbatch is running.
        is_refused: whether the output of this stage, or of one before it, could not be sent in the first microbatch.
    """

    before_backward: Callable[[Stage, Any], None] | None = None
    output: Any = None
    finish_microbatch: Callable[[Any], None] | None = None

    def __init__(self, *others: Any, last_layer: str, **options: Any) -> None:
        super().__init__(*others, **options)
        self.problem = ""
        self._last_layer = last_layer
        self._sent: list[Slot] | None = None
        self._received: list[Slot] | None = None
        self.is_refused = self.is_learning = False

    # --- the first microbatch, whose shapes are learned -----------------------------------------------------------

    def _compute_outputs(self, *args: Tensor, module: nn.Module, **kwargs: Any) -> Any:
        if self.is_refused:
            return self._zero_after(args)
        self.is_learning = True
        if self.is_first:
            args = tree_map(_copy, args)
        else:
            for arg in args:
                getattr(arg, "_local_tensor", arg).detach().zero_()
        with as_before(module):
            output = module(*self._from_slots(args, is_first_time=True), **tree_map(_copy, kwargs))
        if self.is_last:
            self.output = output
            return torch.zeros(1, device=self.device)
        values = output if isinstance(output, tuple) else (output,)
        try:
            self._sent = [_slot(value) for value in values]
            if not any(slot.kind != "None" for slot in self._sent):
                raise TypeError("nothing but None")
            if self.has_backward and not _PASSES_WHOLE_NUMBERS and any(map(_is_whole, self._sent)):
                raise TypeError("whole numbers, which torch passes on in training since 2.12")
        except TypeError as error:
            self.problem = (
                f"{self._last_layer} is the last layer of its stage and returned {error}. Tensors, numbers and None "
                "pass from stage to stage, one or a tuple of them: return these, or keep the layer together with the "
                "next one (split_spec, keep_together)"
            )
            self.is_refused = True
            return self._zero_after(args)
        return self._to_send(values)

    def _compute_input_grads(
        self, outputs: list[Tensor], all_fwd_inputs: list[Tensor], grad_outputs: list[Tensor | None] | None = None
    ) -> tuple[Tensor | None, ...]:
        return tuple(value.detach() if value.requires_grad else None for value in all_fwd_inputs)

    def _create_grad_send_info(self, args_recv_info: Any) -> Any:
        """Omits tensors that need no gradient, for which the stage before does not wait. torch 2.12 would raise."""
        sources = super()._create_grad_send_info(args_recv_info)
        if not _PASSES_WHOLE_NUMBERS or self._stage_meta.input_grads is None:
            return sources
        grads = self._stage_meta.input_grads
        return [source if grad is not None else None for source, grad in zip(sources, grads, strict=True)]

    def _send_meta(self, meta: Any, dst_stage: int) -> None:
        forward = (self._sent, self.is_refused and self.problem) if dst_stage > self.stage_index else None
        super()._send_meta((meta, forward), dst_stage)

    def _recv_meta(self, src_stage: int) -> Any:
        meta, forward = super()._recv_meta(src_stage)
        if forward is not None:
            self._received, refusal = forward
            self.problem = refusal or ""
            self.is_refused = bool(refusal)
        return meta

    def _shape_inference(self, args: Any, kwargs: dict[str, Any] | None = None) -> Any:
        """Learns shapes on torch 2.11, which calls the layers itself here and sends all of their output."""
        layers = self.submod

        def learn(*values: Any, **inputs: Any) -> Any:
            if values and isinstance(values[-1], _Learned):
                *values, (self._received, self.problem, self.is_refused) = values  # type: ignore[assignment]
            output = self._compute_outputs(*values, module=layers, **inputs)
            outputs = output if isinstance(output, tuple) else (output,)
            learned = _Learned(self._sent, self.problem if self.is_refused else "", self.is_refused)
            return outputs if self.is_last else (*outputs, learned)

        self.submod = learn  # type: ignore[assignment]
        try:
            found = super()._shape_inference(args, kwargs)  # type: ignore[misc]
        finally:
            self.submod = layers
        self.inputs_meta: Any = _tensors_alone(self.inputs_meta)
        return found

    def _configure_outputs_meta(self, outputs_meta: Any) -> None:
        super()._configure_outputs_meta(_tensors_alone(outputs_meta))  # type: ignore[misc]

    def _validate_fwd_input(self, args: Any, kwargs: Any) -> None:
        """Does nothing: torch 2.11 would raise for a batch that is a view of a larger tensor."""

    # --- every microbatch --------------------------------------------------------------------------------------------

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        self.is_learning = False
        if self.is_refused:
            return self._zero_after(args)
        output = super().forward_maybe_with_nosync(*self._from_slots(args), **kwargs)
        if self.is_last:
            self.output = output
            if self.finish_microbatch is not None:
                self.finish_microbatch(output)
            return torch.zeros(1, device=self.device)
        values = output if isinstance(output, tuple) else (output,)
        assert self._sent is not None, "it was learned before"
        try:
            slots = [_slot(value) for value in values]
        except TypeError as error:
            return self._of_expected_shape(values, str(error))
        if [slot[:3] for slot in slots] != [slot[:3] for slot in self._sent]:
            return self._of_expected_shape(values, _described(slots))
        return self._to_send(values)

    def backward_maybe_with_nosync(
        self, backward_type: Any, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> Any:
        if self.before_backward is not None:
            self.before_backward(self, bwd_kwargs["stage_output"])
        grads, groups = super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
        # Before torch 2.13 a gradient of each input is sent, also if the input was not used.
        values = bwd_kwargs.get("input_values", ())
        filled = (_zeros_if_missing(grad, value) for grad, value in zip(grads, values, strict=False))
        return (tuple(filled) if len(values) == len(grads) else grads), groups

    def _zero_after(self, args: Sequence[Any]) -> Tensor:
        """Returns a zero whose backward reaches this stage's inputs."""
        zero = torch.zeros(1, device=self.device)
        return zero + _zero_of(args)

    def _of_expected_shape(self, values: Sequence[Any], found: str) -> Any:
        assert self._sent is not None
        self.problem = self.problem or (
            f"{self._last_layer} is the last layer of its stage and returned {found}, and {_described(self._sent)} in "
            "the microbatch that its schedule was made for.\n"
            "Shapes are the same in all microbatches of a batch: pad to one shape, or keep the layer together with the "
            "next one (split_spec, keep_together)"
        )
        nothing = _zero_of(values)
        template = next((value for value in values if isinstance(value, DTensor)), None)
        zeros = []
        for slot in self._sent:
            if slot.kind == "None":
                continue
            zero = torch.zeros(slot.shape, dtype=slot.dtype or _WIRE[slot.kind], device=self.device)
            if template is not None and slot.kind == "tensor":
                zero = DTensor.from_local(zero, template.device_mesh, template.placements, run_check=False)
            zeros.append(zero + nothing.to(zero.dtype) if zero.is_floating_point() else zero)
        return tuple(zeros) if len(zeros) > 1 else zeros[0]

    # --- numbers beside tensors --------------------------------------------------------------------------------------

    def _to_send(self, values: Sequence[Any]) -> Any:
        """Returns the tensors of an output, contiguous, with numbers as tensors."""
        sent = [
            value.contiguous()
            if isinstance(value, Tensor)
            else torch.tensor(value, dtype=_WIRE[type(value).__name__], device=self.device)
            for value in values
            if value is not None
        ]
        return tuple(sent) if len(sent) > 1 else sent[0]

    def _from_slots(self, args: Sequence[Any], *, is_first_time: bool = False) -> Iterator[Any]:
        """Yields the output of the stage before, made from the received tensors."""
        if self._received is None:
            yield from args
            return
        received = iter(args)
        for slot in self._received:
            value: Any = None if slot.kind == "None" else next(received)
            if slot.kind in _WIRE:
                value = slot.value if is_first_time else _TYPES[slot.kind](value.item())
            yield value


_WIRE = {"bool": torch.int64, "int": torch.int64, "float": torch.float64}
_TYPES: dict[str, Callable[[Any], Any]] = {"bool": bool, "int": int, "float": float}


def _slot(value: Any) -> Slot:
    """Returns the description of a value. Raises TypeError, with the reason, if it cannot be sent."""
    if isinstance(value, Tensor):
        if value.is_complex() or value.layout != torch.strided:
            raise TypeError(f"a {'complex' if value.is_complex() else 'sparse'} tensor")
        local = getattr(value, "_local_tensor", value)
        return Slot("tensor", tuple(local.shape), value.dtype)
    if value is None:
        return Slot("None")
    if type(value) is int and not -(2**63) <= value < 2**63:
        raise TypeError(f"the number {value}, which needs more than 64 bits")
    if type(value) in _TYPES.values():
        return Slot(type(value).__name__, value=value)
    raise TypeError(f"a {type(value).__name__}")


def _zeros_if_missing(grad: Tensor | None, value: Any) -> Tensor | None:
    is_missing = grad is None and isinstance(value, Tensor) and value.requires_grad
    return torch.zeros_like(value) if is_missing else grad


def _is_whole(slot: Slot) -> bool:
    return slot.kind in ("bool", "int") or (slot.dtype is not None and not slot.dtype.is_floating_point)


def _described(slots: Sequence[Slot]) -> str:
    return " and ".join(
        f"{list(slot.shape)} of {str(slot.dtype).removeprefix('torch.')}" if slot.kind == "tensor" else f"{slot.kind}"
        for slot in slots
    )


def _zero_of(values: Sequence[Any]) -> Tensor:
    """Returns a zero whose backward reaches all values."""
    tensors = [getattr(v, "to_local", lambda v=v: v)() for v in values if isinstance(v, Tensor) and v.requires_grad]
    zeros = [torch.zeros((), device=tensor.device, dtype=tensor.dtype) * tensor.sum() for tensor in tensors]
    return torch.stack([zero.float() for zero in zeros]).nan_to_num().sum() if zeros else torch.zeros(())


@contextlib.contextmanager
def as_before(module: Any) -> Iterator[None]:
    """Restores the buffers and numbers of a module after the block."""
    modules = list(module.modules()) if isinstance(module, nn.Module) else []
    buffers = [(child, name, buffer) for child in modules for name, buffer in child.named_buffers(recurse=False)]
    values = [buffer.clone() for _, _, buffer in buffers]
    numbers = PlainValues(module) if modules else None
    yield
    with torch.no_grad():
        for (child, name, buffer), value in zip(buffers, values, strict=True):
            buffer.copy_(value)
            setattr(child, name, buffer)  # a layer may have replaced it
    if numbers is not None:
        numbers.restore()


class PlainValues:
    """Numbers and strings in attributes of a module, of its submodules and of their objects, such as a configuration.

    Shapes may depend on them. They are found once, and then read in a fraction of the time. They are recorded at the
    end of a batch, so that a layer that counts its calls does not count as changed.
    """

    def __init__(self, module: nn.Module) -> None:
        self._numbers: list[tuple[dict[str, Any], str]] = []
        self._objects: list[tuple[dict[str, Any], str]] = []
        seen: set[int] = set()
        for child in module.modules():
            self._find_in(vars(child))
            for name, value in vars(child).items():
                inside = value if isinstance(value, dict) else getattr(value, "__dict__", None)
                is_module = isinstance(value, nn.Module | Tensor | type)
                if isinstance(inside, dict) and not is_module and id(inside) not in seen:
                    seen.add(id(inside))
                    self._objects.append((vars(child), name))
                    self._find_in(inside)
        self._recorded = self._read()

    def _find_in(self, attributes: dict[Any, Any]) -> None:
        for name, value in attributes.items():
            each = value if isinstance(value, tuple | list) else (value,)
            # The mode is a part of the kind of batch.
            if name != "training" and isinstance(name, str) and all(isinstance(one, _PLAIN) for one in each):
                self._numbers.append((attributes, name))

    def record(self) -> None:
        """Records the present values."""
        self._recorded = self._read()

    def have_changed(self) -> bool:
        """Whether any value differs from the recorded one."""
        return self._read() != self._recorded

    def _read(self) -> list[Any]:
        values = [attributes.get(name) for attributes, name in self._numbers]
        values = [tuple(value) if isinstance(value, list) else value for value in values]
        return values + [id(attributes.get(name)) for attributes, name in self._objects]

    def restore(self) -> None:
        """Sets all attributes to the recorded values, except elements of lists."""
        for (attributes, name), value, now in zip(self._numbers, self._recorded, self._read(), strict=False):
            if now != value and not isinstance(attributes.get(name), list):
                attributes[name] = value


def _copy(value: Any) -> Any:
    return value.detach().clone().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value
