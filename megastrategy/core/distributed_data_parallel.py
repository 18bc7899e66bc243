"""The wrapped module: wires layout, buffers, reducer and gather together, and behaves like torch DDP to its user."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import Parameter

from .buffers import ContiguousGradBuffers, FlattenedGradBuffers, GradBuffers, ParamBuffers
from .collectives import Collectives, make_collectives, private_group
from .config import DistributedDataParallelConfig
from .errors import LayoutMismatchError, ParameterChangedError
from .events import Event, EventKind, Listener
from .layout import BufferLayout, ParamSpec, build_layout, dense_stride
from .param_gather import ParamGather
from .reducer import Reducer


class DistributedDataParallel(nn.Module):
    """Data parallelism after Megatron-LM around any module.

    Args:
        module: on its device already, the same on every rank; rank 0's parameters and buffers are broadcast. Parameters
            that require no gradients now are left out.
        config: the options; None for the defaults.
        process_group: the data-parallel ranks; None for all. The engine makes a group of its own over the same ranks.
        collectives: how to send instead of what fits the group (for tests and measurements).
        listener: called with every :class:`~megastrategy.core.events.Event`.

    With the distributed optimizer the parameters' memory moves into a contiguous buffer that this object owns;
    :meth:`close` gives it back.

    Attributes:
        module: the wrapped module.
        require_backward_grad_sync: whether the next backward is synchronised; see :meth:`no_sync`.

    Raises:
        ValueError: if the module cannot be laid out (parameters on several devices, on meta, or uninitialised).
        LayoutMismatchError: if the ranks' modules or configurations differ.
    """

    def __init__(
        self,
        module: nn.Module,
        config: DistributedDataParallelConfig | None = None,
        process_group: ProcessGroup | None = None,
        *,
        collectives: Collectives | None = None,
        listener: Listener | None = None,
    ) -> None:
        super().__init__()
        self.module = module
        self.config = config = config or DistributedDataParallelConfig()
        named = [(name, param) for name, param in module.named_parameters() if param.requires_grad]
        self._names = [name for name, _ in named]
        self.params: list[Parameter] = [param for _, param in named]
        self._frozen = [(name, param) for name, param in module.named_parameters() if not param.requires_grad]
        self.device = _common_device(module)
        if collectives is None:
            collectives = make_collectives(private_group(process_group), self.device)
        self.collectives = collectives
        specs = [_spec(name, param, config) for name, param in named]
        self.layout = build_layout(specs, config, collectives.size)
        _check_layouts_agree(self.layout, collectives, self.device)

        self._listener = listener
        collectives.broadcast_all([*(param for _, param in module.named_parameters()), *module.buffers()])
        self.param_buffers: ParamBuffers | None = None
        self.grad_buffers: GradBuffers
        if config.use_contiguous_buffers:
            self.grad_buffers = ContiguousGradBuffers(self.layout, self.params, collectives.rank, self.device)
        else:
            self.grad_buffers = FlattenedGradBuffers(self.layout, self.params, self.device)
        if self.layout.num_shards > 1:
            self.param_buffers = ParamBuffers(self.layout, self.params, self.device)
            self.param_gather = ParamGather(self.param_buffers, collectives, listener)
        self.require_backward_grad_sync = True
        self._buffers_differ = True  # whether module buffers may have changed since they were last broadcast
        self.reducer = Reducer(
            self.layout,
            self.params,
            self.grad_buffers,
            collectives,
            config,
            lambda: self.require_backward_grad_sync,
            listener,
        )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward; broadcasts its buffers first where torch DDP would."""
        training = torch.is_grad_enabled()
        if training:
            self._check_frozen()
            self.reducer.before_forward()
        if self._buffers_differ and self.config.broadcast_buffers:
            self.collectives.broadcast_all(list(self.module.buffers()))
        outputs = self.module(*args, **kwargs)
        sync = self.require_backward_grad_sync
        self._buffers_differ = training and sync
        if training:
            self.reducer.after_forward(outputs, sync)
        return outputs

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients of forward and backward inside are accumulated and not sent, as under torch DDP's ``no_sync``."""
        before = self.require_backward_grad_sync
        self.require_backward_grad_sync = False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def watch_backward(self, outputs: Any) -> None:
        """Tells the engine that a backward may start from these tensors, where they are not what ``forward`` returns.

        Needed only for re-entrant checkpoints, with a loss that the forward did not return.
        """
        self.reducer.watch(outputs)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops (or zeroes) the gradients of all parameters."""
        every = range(len(self.params))
        if set_to_none:
            self.grad_buffers.clear(every)
        else:
            self.grad_buffers.zero(every)

    def full_grad(self, param: Parameter) -> Tensor | None:
        """The whole reduced gradient of a parameter: its shape, the gradient dtype, memory of its own; None if it has
        none.

        Collective with reduce-scatter, where ``param.grad`` is None after a synchronised backward.

        Raises:
            ValueError: if the parameter is not one of the wrapped module's trainable parameters.
        """
        index = next((i for i, candidate in enumerate(self.params) if candidate is param), None)
        if index is None:
            raise ValueError(
                f"a parameter of shape {tuple(param.shape)} is not a trainable parameter of the wrapped module"
            )
        grads = self.grad_buffers
        if not isinstance(grads, ContiguousGradBuffers) or not grads.is_sharded(index):
            return None if param.grad is None else param.grad.detach().clone()
        if not grads.has_grad[index]:
            return None
        spec, slot = self.layout.params[index], self.layout.slots[index]
        full = torch.zeros(spec.numel, dtype=spec.grad_dtype, device=self.device)
        owned = self.layout.owned_range(index, self.collectives.rank)
        if owned is not None:
            full[owned[0] - slot.start : owned[1] - slot.start] = grads.flats[slot.buffer][owned[0] : owned[1]]
        self.collectives.all_reduce(full, 1.0).wait()  # every element is non-zero on one rank at most
        return full.as_strided(spec.shape, spec.stride)

    def emit(self, kind: EventKind, index: int) -> None:
        """Tells the listener, if there is one."""
        if self._listener is not None:
            self._listener(Event(kind, index))

    def close(self) -> None:
        """Leaves a plain module: parameters own their memory, hooks are gone, ``.grad`` is None. May be called
        twice."""
        self.reducer.close()
        self.grad_buffers.close()
        if self.param_buffers is not None:
            self.param_buffers.restore()
            self.param_buffers = None
        self.collectives.close()

    def _check_frozen(self) -> None:
        for name, param in self._frozen:
            if param.requires_grad:
                raise ParameterChangedError(
                    f"parameter {name!r} required no gradients when the model was wrapped and does now, so it is in "
                    "no bucket and would never be synchronised. Unfreeze it before wrapping, or wrap the model again"
                )


def _spec(name: str, param: Parameter, config: DistributedDataParallelConfig) -> ParamSpec:
    low_precision = param.dtype in (torch.float16, torch.bfloat16)
    grad_dtype = torch.float32 if low_precision and config.grad_reduce_in_fp32 else param.dtype
    return ParamSpec(name, tuple(param.shape), dense_stride(param.shape, param.stride()), param.dtype, grad_dtype)


def _common_device(module: nn.Module) -> torch.device:
    device: torch.device | None = None
    first = ""
    for name, param in module.named_parameters():
        if isinstance(param, nn.parameter.UninitializedParameter):
            raise ValueError(f"parameter {name!r} is uninitialised: run one forward (dry run) before wrapping")
        if param.device.type == "meta":
            raise ValueError(f"parameter {name!r} is on the meta device: materialise the module before wrapping")
        if device is None:
            device, first = param.device, name
        if param.device != device:
            raise ValueError(
                f"parameters are on several devices ({first!r} on {device}, {name!r} on {param.device}): one device "
                "a rank is expected; move the module to one before wrapping"
            )
    return device or torch.device("cpu")


def _check_layouts_agree(layout: BufferLayout, collectives: Collectives, device: torch.device) -> None:
    digests = collectives.all_gather_bytes(layout.digest(), device)
    if len(set(digests)) == 1:
        return
    descriptions = collectives.all_gather_objects(layout.describe(), device)
    for what in descriptions[0]:
        for rank, description in enumerate(descriptions):
            pairs = itertools.zip_longest(descriptions[0][what], description[what], fillvalue="none")
            for expected, got in pairs:
                if expected != got:
                    raise LayoutMismatchError(
                        "the ranks do not hold the same model or configuration. First difference, in the "
                        f"{what}: rank 0 has {expected}, rank {rank} has {got}. Build the same module, in the same "
                        "order and with the same frozen parameters and options, on every rank"
                    )
    raise AssertionError("digests differ but descriptions do not")
