"""Finds the memory in which this rank has a parameter: the parameter itself, or its part of a tensor-parallel one.

[Note: the local part of a parameter]
Layout, buckets, reductions and shards describe memory on this rank. For a parameter that torch's
``parallelize_module`` has cut this is its local tensor, so each tensor rank lays out its own parts, over its own
data-parallel ranks. ``param.grad`` stays a DTensor, around a view of the buffer, and autograd adds into that in place.

[Note: one layout on all tensor ranks]
If a dimension does not divide, tensor ranks have parts of different sizes (a vocabulary of 50,257 on two ranks).
Layouts by these sizes would put the elements of a replicated parameter at different offsets, in shards of different
owners. A ring adds the gradients of three or more ranks in an order that depends on the owner, so replicas would get
different last bits and drift apart without an error. Therefore each parameter reserves the size of its largest part,
and all tensor ranks have one layout: offsets, buckets and owners. They
also agree on the order of buckets that a backward shows.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter


@dataclasses.dataclass(frozen=True)
class CutParam:
    """A parameter that is cut over the tensor ranks.

    Attributes:
        shape: of the full parameter.
        dim: the dimension that is cut.
        part: this rank's elements ``[start, end)`` of that dimension.
    """

    shape: tuple[int, ...]
    dim: int
    part: tuple[int, int]

    @property
    def part_shape(self) -> tuple[int, ...]:
        start, end = self.part
        return (*self.shape[: self.dim], end - start, *self.shape[self.dim + 1 :])

    def cut(self, value: Any) -> Any:
        """Returns this rank's part of a value of the full shape, as a view; other values as they are."""
        if isinstance(value, Tensor) and tuple(value.shape) == self.shape:
            start, end = self.part
            return value.narrow(self.dim, start, end - start)
        return value


def cut_of(numel: int, rank: int, size: int) -> tuple[int, int]:
    """Returns the elements ``[start, end)`` of a dimension that DTensor's ``Shard`` puts on a rank.

    Parts are equal, rounded up; the last ranks may have fewer elements, or none.
    """
    part = -(-numel // size)
    start = min(rank * part, numel)
    return start, min(start + part, numel)


class LocalParts:
    """The memory in which this rank has each parameter: here the parameter itself.

    :class:`~.tensor_parallel.DTensorParts` takes its place where parameters are DTensors.

    Attributes:
        has_parts: whether a parameter may be another object than its part here, on one tensor rank too.
    """

    has_parts = False

    def check(self, module: nn.Module) -> None:
        """Raises ValueError for a parameter that cannot be laid out."""
        if dtensors := dtensors_of(module):
            raise ValueError(
                f"parameter {next(iter(dtensors))!r} is a DTensor, and when the module was wrapped there were none: "
                "call parallelize_module before the module is wrapped"
            )

    def local_view(self, tensor: Tensor) -> Tensor:
        """Returns this rank's part of a parameter or gradient, as a view."""
        return tensor

    def refresh(self, parts: list[Tensor], params: Sequence[Parameter]) -> None:
        """Replaces ``parts`` by the present parts of the parameters: user code may have assigned new ones."""

    def as_grad(self, param: Parameter, part: Tensor) -> Tensor:
        """Returns memory of the shape of the parameter's part as a gradient of the parameter."""
        return part

    def local_grad(self, param: Parameter) -> Tensor | None:
        """Returns this rank's part of ``param.grad``, cut as the parameter is, or None without a gradient.

        A view if the gradient is cut that way already. Otherwise collective over the tensor ranks.
        """
        return None if param.grad is None else param.grad.detach()

    def local_grads(self, params: Sequence[Parameter]) -> list[Tensor | None]:
        """Returns :meth:`local_grad` of several parameters, with one collective for all sums over the tensor ranks."""
        return [self.local_grad(param) for param in params]

    def may_be_sum(self, param: Parameter) -> bool:
        """Whether gradients of the parameter may be sums over the tensor ranks that are not added up yet."""
        return False

    def is_cut_alike(self, param: Tensor, grad: Tensor) -> bool:
        """Whether the tensor ranks have the same parts of both."""
        return True

    def is_cut(self, param: Tensor) -> bool:
        """Whether the tensor ranks have different parts of the parameter."""
        return False

    def reserved_numel(self, param: Tensor) -> int:
        """Returns the number of elements of the largest part that any tensor rank has; see
        [Note: one layout on all tensor ranks]."""
        return param.numel()

    def cut_params(self, named: Mapping[Any, Parameter]) -> dict[Any, CutParam]:
        """Returns those of the parameters that are cut, under the given keys."""
        return {}


def dtensors_of(module: nn.Module, *, each_name: bool = False) -> dict[str, Any]:
    """Returns the parameters that are DTensors by name; with ``each_name`` a tied one under each of its names."""
    # Importing the class takes time in every process; without an import there are no instances.
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ())
    if not kind:
        return {}
    # Not the module's method: an override may have a different signature, or hide parameters.
    named = nn.Module.named_parameters(module, remove_duplicate=not each_name)
    return {name: param for name, param in named if isinstance(param, kind)}


def cut_param(param: Any) -> CutParam:
    """Returns how a DTensor of one mesh dimension is cut."""
    [placement] = param.placements
    mesh = param.device_mesh
    dim = placement.dim % param.dim()
    return CutParam(tuple(param.shape), dim, cut_of(param.shape[dim], mesh.get_local_rank(), mesh.size()))


def as_dtensor(part: Tensor, like: Any) -> Tensor:
    """Returns this rank's part, in the same memory, as a DTensor that is cut as ``like`` is. Sends nothing."""
    made: Tensor = type(like).from_local(
        part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
    return made


def cut_state(module: nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a state of full tensors with this rank's parts, as views, of the parameters that are cut in ``module``.

    DTensors stay as they are, and so do tensors of a different shape, for which torch raises an error with the name.
    """
    cut = dict(state)
    for name, param in dtensors_of(module, each_name=True).items():
        value = state.get(name)
        if isinstance(value, Tensor) and not hasattr(value, "placements") and value.shape == param.shape:
            cut[name] = as_dtensor(value if param.placements[0].is_replicate() else cut_param(param).cut(value), param)
    return cut


def empty_like_part(param: Any, dtype: torch.dtype) -> Tensor:
    """Returns a DTensor that is cut as ``param`` is, with host memory for this rank's part only."""
    # from_local() would move its tensor to the mesh's device, and all weights would be there twice.
    return torch.empty_like(param.detach(), dtype=dtype, device="cpu")
