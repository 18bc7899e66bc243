"""Measures the layers of a model once each, by their shapes alone: no memory, no devices."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from ...core import replace_meta
from .live_bytes import LARGE_BYTES, LiveBytes
from .stage_memory import Layer


class LayerError(ValueError):
    """Says which layer cannot be measured, and why."""


def first_line(error: BaseException) -> str:
    """Says an exception in a line."""
    said = str(error).strip().splitlines()
    return f"{type(error).__name__}: {said[0].strip()}" if said else type(error).__name__


def measure_layers(layers: Sequence[nn.Module], sample: Tensor, frozen: Collection[int] | None = None) -> list[Layer]:
    """Runs forward and backward of each layer on one microbatch, whose tensors have no values if they are large.

    Args:
        layers: in order; each takes what the one before returns, one tensor. They may be on meta.
        sample: one microbatch, for the first.
        frozen: the layers that are not trained; None for those whose parameters require no gradients.

    Raises:
        ValueError: if a layer is none, fails, or does not return one tensor, or a frozen layer is not there.
    """
    if not isinstance(sample, Tensor) or sample.is_meta:
        what = "on meta" if isinstance(sample, Tensor) else f"a {type(sample).__name__}"
        raise ValueError(f"the sample is {what}: expected a tensor with values, one microbatch")
    wrong = [number for number in frozen or () if not 0 <= number < len(layers)]
    if wrong:
        raise ValueError(f"frozen has {wrong[0]}: expected layers from 0 to {len(layers) - 1}")
    measured_layers: list[Layer] = []
    x = sample.detach()
    is_behind_trained = False
    is_saved = False
    for number, layer in enumerate(layers):
        if not isinstance(layer, nn.Module):
            raise ValueError(f"layer {number} is a {type(layer).__name__}: expected an nn.Module")
        layer = _with_memory(layer, sample.device)
        params = list(layer.parameters())
        with _frozen(params, frozen is not None, number in (frozen or ())), _as_it_was(layer):
            is_trained = any(param.requires_grad for param in params)
            name = f"{number}: {type(layer).__name__}"
            fixed_bytes = _fixed_bytes(layer)
            try:
                measured, out = _measure(name, layer, x, needs_input_grad=is_behind_trained)
            except LayerError:
                raise
            except Exception as error:
                description = f"{str(x.dtype).removeprefix('torch.')} of {tuple(x.shape)}"
                where = "the sample" if number == 0 else f"what layer {number - 1} returns"
                raise LayerError(f"layer {name} fails with {where}, {description}: {first_line(error)}") from error
        # A tensor that a layer returns and the next also saves is one tensor; so are views of it between them.
        twice = measured.saved_input_bytes if is_saved else 0
        is_saved = measured.saves_output or (is_saved and measured.returns_input)
        measured_layers.append(
            dataclasses.replace(
                measured,
                saved_bytes=measured.saved_bytes - twice,
                saved_input_bytes=measured.saved_input_bytes - twice,
                saves_output=is_saved,
                input_needs_grad=is_behind_trained,
                has_params=bool(params),
                fixed_bytes=fixed_bytes,
            )
        )
        x = out
        is_behind_trained = is_behind_trained or is_trained
    return measured_layers


@contextlib.contextmanager
def _frozen(params: Sequence[nn.Parameter], is_given: bool, is_frozen: bool) -> Iterator[None]:
    """Parameters require gradients as it is asked for, while this is open, and as before afterwards."""
    before = [param.requires_grad for param in params]
    if is_given:
        for param in params:
            param.requires_grad_(not is_frozen)
    try:
        yield
    finally:
        for param, required in zip(params, before, strict=True):
            param.requires_grad_(required)


def _with_memory(layer: nn.Module, device: torch.device) -> nn.Module:
    """The layer; or, where some of it is on meta, a copy that is not: zeros, which take no memory where they are
    large."""
    if not any(tensor.is_meta for tensor in (*layer.parameters(), *layer.buffers())):
        return layer
    layer = copy.deepcopy(layer)
    with LiveBytes(computes=False):
        replace_meta(layer, lambda tensor: torch.zeros(tensor.shape, dtype=tensor.dtype, device=device))
    return layer


@contextlib.contextmanager
def _as_it_was(layer: nn.Module) -> Iterator[None]:
    """Buffers, and the numbers that are drawn by chance, are afterwards as before: running statistics, dropout."""
    # Into large ones nothing is written, see [Note: tensors without values].
    before = [(buffer, buffer.detach().clone()) for buffer in layer.buffers() if buffer.nbytes < LARGE_BYTES]
    try:
        with torch.random.fork_rng(devices=()):
            yield
    finally:
        with torch.no_grad():
            for buffer, value in before:
                buffer.copy_(value)


class _LayerBehind(torch.autograd.Function):
    """Represents a layer behind: it saves nothing, and its backward makes a gradient that autograd alone holds."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, made: Callable[[Tensor], object]) -> Tensor:
        ctx.like = (out.shape, out.stride(), out.dtype, out.device)
        ctx.made = made
        return out.new_zeros((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        shape, stride, dtype, device = ctx.like
        grad = torch.empty_strided(shape, stride, dtype=dtype, device=device).zero_()
        ctx.made(grad)
        return grad, None


def _measure(name: str, layer: nn.Module, x: Tensor, *, needs_input_grad: bool) -> tuple[Layer, Tensor]:
    """The layer by itself, and what it returns."""
    params = list(layer.parameters())
    trained = [param for param in params if param.requires_grad]
    grads = [param.grad for param in trained]
    live = LiveBytes(computes=False)
    flops = FlopCounterMode(display=False)
    weights = {_key(tensor) for tensor in (*params, *layer.buffers())}
    saved = dict[int, int]()
    seeds: list[int | None] = []
    sent: list[int | None] = []  # the gradients of its input

    def pack(tensor: Tensor) -> Tensor:
        if _key(tensor) not in weights:
            saved[_key(tensor)] = tensor.untyped_storage().nbytes()
        return tensor

    backward_flops = 0.0
    # Whether or not the caller has gradients switched off.
    with torch.inference_mode(False), torch.enable_grad(), live:
        # No leaf, since a layer may write into what the one before it returns; and nothing of the user's.
        leaf = x.detach().requires_grad_(needs_input_grad and x.is_floating_point())
        layer_input = leaf.clone()
        if layer_input.requires_grad:
            layer_input.register_hook(lambda grad: sent.append(live.number(grad)))
        live.start()
        with flops, torch.set_grad_enabled(bool(trained) or needs_input_grad):
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                out = layer(layer_input)
        if not isinstance(out, Tensor):
            raise LayerError(f"layer {name} returns {type(out).__name__}: stages send one tensor to each other")
        forward_flops = float(flops.get_total_flops())
        returned = live.position()
        output = live.number(out)
        # A layer whose output depends on nothing that is trained has no backward.
        if out.requires_grad:
            try:
                for param in trained:  # as in the buffers of a stage, to which autograd adds what it makes
                    param.grad = torch.zeros_like(param)
                live.keep(param.grad for param in trained if param.grad is not None)
                end = _LayerBehind.apply(out, lambda grad: seeds.append(live.number(grad)))
                with flops:
                    end.backward()
            finally:
                for param, grad in zip(trained, grads, strict=True):
                    param.grad = grad
            # The counter began at zero again.
            backward_flops = float(flops.get_total_flops())
        live.stop()
    # What is saved of the input was there before; the output is where the stage has it, or in what is saved.
    saves_output = _key(out) in saved
    returns_input = _key(out) == _key(layer_input)
    made = sum(nbytes for key, nbytes in saved.items() if key not in (_key(layer_input), _key(out)))
    backward_peak, inner_peak = (
        max(0, live.peak_bytes(returned, without=without) - made) if out.requires_grad else 0
        for without in ((output, *seeds), (output,))
    )
    measured = Layer(
        name,
        forward_flops,
        backward_flops,
        0,
        sum(saved.values()),
        live.peak_bytes(0, returned),
        backward_peak,
        inner_peak,
        x.nbytes,
        out.nbytes,
        saved_input_bytes=x.nbytes if _key(layer_input) in saved else 0,
        saves_output=saves_output,
        returns_input=returns_input,
        passes_grad=bool(seeds) and seeds == sent,
    )
    return measured, out.detach()


def _key(tensor: Tensor) -> int:
    key: int = tensor.untyped_storage()._cdata
    return key


def _fixed_bytes(layer: nn.Module) -> int:
    """Weights and buffers; of trained ones gradients and Adam's two moments in fp32, and main params of 16-bit ones."""
    nbytes = sum(tensor.nbytes for tensor in (*layer.parameters(), *layer.buffers()))
    for param in layer.parameters():
        wide = max(4, param.dtype.itemsize)
        nbytes += param.requires_grad * param.numel() * wide * (3 + (param.dtype.itemsize < 4))
    return nbytes
