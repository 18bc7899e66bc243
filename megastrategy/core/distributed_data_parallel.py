"""The wrapped module: wires layout, buffers, reducer and gather together, and behaves like torch DDP to its user."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import Parameter

from .buffers import ContiguousGradBuffers, FlattenedGradBuffers, GradBuffers, ParamBuffers
from .collectives import Collectives, destroy_group, make_collectives, private_group
from .config import DistributedDataParallelConfig
from .errors import ClosedError, LayoutMismatchError, ParameterChangedError
from .events import Event, EventKind, Listener
from .layout import SIXTEEN_BIT, BufferLayout, ParamSpec, build_layout, dense_stride, digest
from .param_gather import ParamGather
from .reducer import Reducer, is_wrapped


class DistributedDataParallel(nn.Module):
    """Data parallelism after Megatron-LM around any module.

    Args:
        module: on its device already, the same on every rank; rank 0's parameters and buffers are broadcast. Parameters
            that require no gradients now are left out.
        config: the options; None for the defaults.
        process_group: the data-parallel ranks; None for all. The engine makes a group of its own over the same ranks.
        collectives: how to send instead of what fits the group (for tests and measurements).
        listener: called with every :class:`~megastrategy.core.events.Event`.

    Hooks of your own on a parameter's accumulated gradient (``register_post_accumulate_grad_hook``) run before the
    gradient is sent if they are registered before wrapping.

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
        self.is_closed = False
        self.config = config = config or DistributedDataParallelConfig()
        named = [(name, param) for name, param in module.named_parameters() if param.requires_grad]
        self._names = [name for name, _ in named]
        self.params: list[Parameter] = [param for _, param in named]
        self._frozen = [(name, param) for name, param in module.named_parameters() if not param.requires_grad]
        self.device = _common_device(module)
        _check_memory_is_own(module)
        self._holders = _holders(module)
        self._own_group: ProcessGroup | None = None
        if collectives is None:
            group = private_group(process_group, self.device)
            self._own_group = group if group is not process_group else None
            collectives = make_collectives(group, self.device)
        self.collectives = collectives
        specs = [_spec(name, param, config) for name, param in named]
        self.layout = build_layout(specs, config, collectives.size)
        _check_ranks_agree(self.layout, config, collectives, self.device)

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
        self.check_open()
        training = torch.is_grad_enabled()
        if training:
            self._check_params()
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

    def check_open(self) -> None:
        """Raises ClosedError after :meth:`close`."""
        if self.is_closed:
            raise ClosedError(
                "this DistributedDataParallel was closed, and its module is a plain one again: wrap the module "
                "again, and make a new DistributedOptimizer"
            )

    def close(self) -> None:
        """Leaves a plain module: parameters own their memory, hooks are gone, ``.grad`` is None. May be called twice.

        Save optimizer state before: a group that this object made for itself ends here.
        """
        self.is_closed = True
        self.reducer.close()
        self.grad_buffers.close()
        if self.param_buffers is not None:
            self.param_buffers.restore()
            self.param_buffers = None
        self.collectives.close()
        if self._own_group is not None:
            destroy_group(self._own_group)
            self._own_group = None

    def _check_params(self) -> None:
        for index, (holder, key) in enumerate(self._holders):
            if holder.get(key) is not self.params[index]:
                self._find_holders_again()
                break
        for name, param in self._frozen:
            if param.requires_grad:
                raise ParameterChangedError(
                    f"parameter {name!r} required no gradients when the model was wrapped and does now, so it is in "
                    "no bucket and would never be synchronised. Unfreeze it before wrapping, or wrap the model again"
                )

    def _find_holders_again(self) -> None:
        """Parameters may move between modules (pruning, weight norm), but not be replaced."""
        present = {id(param) for param in self.module.parameters()}
        for index, param in enumerate(self.params):
            if id(param) not in present:
                raise ParameterChangedError(
                    f"parameter {self._names[index]!r} was replaced by another object (load_state_dict(assign=True), "
                    "or an assignment to the module), which nobody would train. Load in place (assign=False, or "
                    "param.data = x), or wrap the model again"
                )
        holders = _holders(self.module)
        by_id = {id(holder[key]): (holder, key) for holder, key in holders}
        self._holders = [by_id.get(id(param), holder) for param, holder in zip(self.params, self._holders, strict=True)]


def _holders(module: nn.Module) -> list[tuple[dict[str, Parameter | None], str]]:
    """For each trainable parameter, in order, the module dictionary that holds it and its key there."""
    holders: dict[int, tuple[dict[str, Parameter | None], str]] = {}
    for child in module.modules():
        for key, param in child._parameters.items():
            if param is not None and param.requires_grad:
                holders.setdefault(id(param), (child._parameters, key))
    return list(holders.values())


def _check_memory_is_own(module: nn.Module) -> None:
    """Raises ValueError for a parameter that is wrapped already, or whose memory another parameter or buffer uses
    too."""
    spans: list[tuple[int, int, str, bool]] = []
    for name, param in module.named_parameters():
        if param.requires_grad and is_wrapped(param):
            raise ValueError(f"parameter {name!r} belongs to a DistributedDataParallel already: call its close() first")
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if tensor.numel() > 0 and tensor.layout == torch.strided:
            last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
            start = tensor.data_ptr()
            spans.append((start, start + (last + 1) * tensor.element_size(), name, tensor.requires_grad))
    spans.sort()
    for (_, end, name, trained), (start, _, other, other_trained) in itertools.pairwise(spans):
        if start < end and (trained or other_trained):
            raise ValueError(
                f"{name!r} and {other!r} share memory without being the same Parameter, and would part when "
                "parameters move into the buffer. Tie them by assigning the Parameter itself (b.weight = a.weight), "
                "or give each its own memory"
            )


def _spec(name: str, param: Parameter, config: DistributedDataParallelConfig) -> ParamSpec:
    grad_dtype = torch.float32 if param.dtype in SIXTEEN_BIT and config.grad_reduce_in_fp32 else param.dtype
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


def _check_ranks_agree(
    layout: BufferLayout, config: DistributedDataParallelConfig, collectives: Collectives, device: torch.device
) -> None:
    options: list[list[object]] = [[field.name, getattr(config, field.name)] for field in dataclasses.fields(config)]
    description = {**layout.describe(), "option (name, value)": options}
    digests = collectives.all_gather_bytes(digest(description), device)
    if len(set(digests)) == 1:
        return
    descriptions = collectives.all_gather_objects(description, device)
    for what in descriptions[0]:
        for rank, theirs in enumerate(descriptions):
            pairs = itertools.zip_longest(descriptions[0][what], theirs[what], fillvalue="none")
            for expected, got in pairs:
                if expected != got:
                    raise LayoutMismatchError(
                        "the ranks do not hold the same model or configuration. First difference, in the "
                        f"{what}: rank 0 has {expected}, rank {rank} has {got}. Build the same module, in the same "
                        "order and with the same frozen parameters and options, on every rank"
                    )
    raise AssertionError("digests differ but descriptions do not")
