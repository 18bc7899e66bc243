"""The stand-in that ``.grad`` is after a reduce-scatter: a tensor with the gradient's shape and dtype, and no elements.

[Note: why .grad is a stand-in after reduce-scatter]
After a reduce-scatter this rank has a shard of each gradient. ``None`` in ``.grad`` would be silent, since torch's
clipping, its scalers and most libraries skip a gradient of None; the shard, or the buffer around it, would be a wrong
number. So ``.grad`` is a stand-in without storage. Reads of its shape, dtype or device return the gradient's; a
computation with it raises :class:`~.errors.ReducedGradError`, since every operation passes ``__torch_dispatch__``.
Operations that need no elements work: zeroing zeroes the reduced gradient, ``detach`` and ``to`` return another
stand-in, and autograd may add the next local gradient. A ``.grad`` of None was dropped by user code, in any way, as by
``zero_grad`` of a raw module.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, NoReturn, SupportsIndex

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._pytree import tree_leaves

from ..errors import ReducedGradError
from ..layout import ParamSpec

_ATEN = torch.ops.aten
NO_GRAPH_TASK = -1
"""torch's number for "no backward is running"; each graph task, nested ones too, has a number of its own."""


def inside_backward() -> bool:
    """Whether a backward is running on this thread."""
    return bool(torch._C._current_graph_task_id() != NO_GRAPH_TASK)


def inside_node() -> bool:
    """Whether a node of a graph is running on this thread: at the end of a graph, whether that is nested in another."""
    return torch._C._current_autograd_node() is not None


@dataclasses.dataclass(eq=False)
class RepresentedGrad:
    """One reduced gradient, until it is dropped: it has one stand-in, and copies where that was detached.

    Attributes:
        spec: the parameter's; stand-ins have its shape and stride, and the gradient's dtype.
        all_reduce_option: the option of the user's door that gives full gradients.
        zero: zeroes the gradient that it is called with.
    """

    spec: ParamSpec
    all_reduce_option: str
    zero: Callable[[RepresentedGrad], None]


class ReducedGrad(Tensor):
    """Represents the reduced gradient of one parameter; see [Note: why .grad is a stand-in after reduce-scatter].

    Attributes:
        pending: a local gradient (memory of its own, dense or sparse) that autograd has added since; None for none.
    """

    pending: Tensor | None
    represented: RepresentedGrad

    # properties are read by every loop over parameters, and mean what they mean for any tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls,
        represented: RepresentedGrad,
        device: torch.device,
        dtype: torch.dtype | None = None,
        pending: Tensor | None = None,
    ) -> ReducedGrad:
        spec = represented.spec
        made: ReducedGrad = Tensor._make_wrapper_subclass(
            cls, spec.shape, strides=spec.stride, dtype=dtype or spec.grad_dtype, device=device
        )
        # Its address is null: code that asks for it in C++ (to_dlpack, extensions) would read random memory, or crash.
        torch._C._set_throw_on_mutable_data_ptr(made)
        made.pending = pending
        made.represented = represented
        return made

    def take_pending(self) -> Tensor | None:
        """Returns the gradient that autograd has added, and forgets it."""
        pending = self.pending
        self.pending = None
        return pending

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        first = args[0] if args else None
        # zero_grad(set_to_none=False) passes a list, in which other gradients may be ordinary tensors.
        if func is _ATEN._foreach_zero_.default:
            for grad in first or ():
                grad.zero_()
            return None
        # As an operand elsewhere (x.add_(p.grad)) it would be read, and raises below.
        if isinstance(first, ReducedGrad):
            if func is _ATEN.zero_.default:
                first.represented.zero(first.represented)
                return first
            if func is _ATEN.detach.default:
                return first._like(first.device, first.dtype)
            if func is _ATEN._to_copy.default:  # module.to() takes gradients along
                options = kwargs or {}
                return first._like(options.get("device") or first.device, options.get("dtype") or first.dtype)
            # Inside backward only autograd adds; the same add_ elsewhere would be a user's, on a number
            # that is not there.
            if inside_backward() and len(args) == 2 and isinstance(args[1], Tensor) and not isinstance(args[1], cls):
                # Autograd adds in place, or with create_graph makes a sum. Its tensor may be reused, so it is copied;
                # autograd reuses no tensor of a subclass to which there is a reference, and a DTensor's clone would
                # be added up over the tensor ranks.
                if func is _ATEN.add_.Tensor:
                    copied = args[1].clone() if type(args[1]) is Tensor else args[1]
                    first.pending = copied if first.pending is None else first.pending + args[1]
                    return first
                if func is _ATEN.add.Tensor:
                    return first._like(first.device, first.dtype, pending=args[1].clone())
        # The first stand-in among the arguments, also in lists: foreach kernels take those.
        raise next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, cls)).error(str(func))

    def _like(self, device: torch.device, dtype: torch.dtype, pending: Tensor | None = None) -> ReducedGrad:
        return ReducedGrad(self.represented, torch.device(device), dtype, pending)

    def check_is_of(self, spec: ParamSpec, present: RepresentedGrad | None) -> None:
        """Raises ReducedGradError if it represents another parameter's gradient, or a different one than
        ``present``."""
        if spec.name != self.represented.spec.name:
            raise self.error(f"putting a .grad into that of {spec.name!r}")
        if present is not self.represented:
            raise self.error("putting back a .grad that was dropped")

    def error(self, what: str) -> ReducedGradError:
        """Returns the error for an operation ``what`` that needs elements."""
        name = self.represented.spec.name
        option = self.represented.all_reduce_option
        if "norm" in what or "clamp" in what:
            way_out = (
                "Clip with gradient_clip_val, self.clip_gradients, fabric.clip_gradients, accelerator.clip_grad_norm_ "
                "or optimizer.clip_grad_norm_"
            )
        else:
            way_out = "Step the optimizer that was prepared with this wrapper; scale with megastrategy.GradScaler"
        return ReducedGradError(
            f"{what} needs the gradient of {name!r}, which was reduce-scattered.\n"
            "This rank has a shard of it, and .grad has no elements.\n"
            f"{way_out}; read with full_grad(param) on all ranks; or pass {option}"
        )

    # --- methods that do not pass the dispatcher ---------------------------------------------------------------------

    @property
    def data(self) -> ReducedGrad:
        return self.detach()  # type: ignore[return-value]

    @data.setter
    def data(self, value: Tensor) -> None:
        # Module.to assigns a moved stand-in. Other values would exist only here, and the step would not use them.
        if not isinstance(value, ReducedGrad):
            raise self.error("assigning to its .data (assign to .grad itself, and the step takes it)")

    def numpy(self, *, force: bool = False) -> NoReturn:
        raise self.error("numpy()")

    def __array__(self, *_: Any, **__: Any) -> NoReturn:
        raise self.error("numpy()")

    def __dlpack__(self, **_: Any) -> NoReturn:
        raise self.error("from_dlpack()")

    def data_ptr(self) -> NoReturn:
        raise self.error("data_ptr()")

    def apply_(self, *_: Any) -> NoReturn:
        raise self.error("apply_()")

    def tolist(self) -> NoReturn:
        raise self.error("tolist()")

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise self.error("pickling")

    def __deepcopy__(self, memo: Any) -> ReducedGrad:
        # torch copies a parameter without its gradient, but a tensor-parallel one, like any Tensor, with it. The copy
        # represents no gradient of the engine's: zeroing it zeroes nothing. It has the dtype that a parameter accepts.
        spec = self.represented.spec
        return ReducedGrad(dataclasses.replace(self.represented, zero=lambda _: None), self.device, spec.dtype)

    def untyped_storage(self) -> torch.UntypedStorage:
        """Returns an empty storage, for tables of memory."""
        return torch.UntypedStorage(0, device=self.device)

    def share_memory_(self) -> ReducedGrad:
        """Does nothing: ``module.share_memory()`` calls it for gradients, and it has no memory."""
        return self

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"ReducedGrad(of {self.represented.spec.name!r}, shape={tuple(self.shape)}, dtype={self.dtype})"


def late_grad(param: Parameter) -> Tensor:
    """Returns the gradient that arrived while the bucket was sealed."""
    grad = param.grad.pending if isinstance(param.grad, ReducedGrad) else param.grad
    assert grad is not None
    return grad
