"""Tensor-parallel parameters: the only file of the engine that imports DTensor, loaded only for models that have some.

See local_parts' [Note: the local part of a parameter].

[Note: gradients of replicated parameters]
A parameter that is replicated over the tensor ranks (a norm's weight) may get a gradient that is a sum over them, for
example under sequence parallelism, where each rank has a different part of the sequence. If ``.grad`` were a
*replicated* view of the buffer, torch would all-reduce each such gradient by itself. Instead ``.grad`` of these
parameters stays autograd's own, a partial sum, until its bucket is complete. Then one all-reduce over the tensor ranks
adds up all of the bucket, as Megatron-LM's ``finalize_model_grads`` does for the whole model. All tensor ranks get the
same bits, and replicas stay equal, since norms and coefficients have the same bits too. Buckets are complete in the
same order on all tensor ranks, which run one program, so these reductions match.
"""

from __future__ import annotations

import itertools
import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn import Parameter

from ..collectives import Collectives, check_all_agree, private_group, ranks_of
from .local_parts import CutParam, LocalParts, as_dtensor, cut_of, cut_param, dtensors_of
from .model_parallel import ModelGroup


class DTensorParts(LocalParts):
    """The local parts of a model's parameters. Some parameters are DTensors, all of one mesh.

    Attributes:
        tensor_ranks: the ranks over which gradients may be sums; None if there are none.
    """

    has_parts = True
    tensor_ranks: Collectives | None = None

    def check(self, module: nn.Module) -> None:
        """Leaves it to :class:`TensorGroup`."""

    def local_view(self, tensor: Tensor) -> Tensor:
        # Not to_local(), which returns a new tensor: the memory of this one is moved, and its identity is compared.
        return tensor._local_tensor if isinstance(tensor, DTensor) else tensor

    def refresh(self, parts: list[Tensor], params: Sequence[Parameter]) -> None:
        parts[:] = map(self.local_view, params)

    def as_grad(self, param: Parameter, part: Tensor) -> Tensor:
        whole: Tensor = param  # for torch's stubs a Parameter is never a DTensor
        if not isinstance(whole, DTensor):
            return part
        with torch.no_grad():
            return as_dtensor(part, whole)

    def local_grad(self, param: Parameter) -> Tensor | None:
        grad: Tensor | None = param.grad
        whole: Tensor = param
        if isinstance(whole, DTensor) and isinstance(grad, DTensor):
            # autograd's may be cut differently, or be a partial sum; see [Note: gradients of replicated parameters].
            if grad.placements != whole.placements:
                grad = grad.redistribute(placements=whole.placements)
            return grad.to_local().detach()
        return None if grad is None else grad.detach()

    def local_grads(self, params: Sequence[Parameter]) -> list[Tensor | None]:
        grads: list[Any] = [param.grad for param in params]
        sums = [
            place
            for place, (param, grad) in enumerate(zip(params, grads, strict=True))
            if self.may_be_sum(param) and isinstance(grad, DTensor) and grad.placements[0].is_partial("sum")
        ]
        if self.tensor_ranks is None or len(sums) < 2:  # redistribute() does the same for one
            return [self.local_grad(param) for param in params]
        added_up: dict[int, Tensor] = {}
        local = {place: grads[place]._local_tensor.detach() for place in sums}
        for dtype in dict.fromkeys(part.dtype for part in local.values()):
            places = [place for place in sums if local[place].dtype == dtype]
            flat = torch.cat([local[place].flatten() for place in places])
            self.tensor_ranks.all_reduce(flat, 1.0).wait()
            parts = flat.split([local[place].numel() for place in places])
            added_up |= {place: part.view(local[place].shape) for place, part in zip(places, parts, strict=True)}
        return [added_up[i] if i in added_up else self.local_grad(param) for i, param in enumerate(params)]

    def may_be_sum(self, param: Any) -> bool:
        return self.tensor_ranks is not None and isinstance(param, DTensor) and param.placements[0].is_replicate()

    def is_cut_alike(self, param: Tensor, grad: Tensor) -> bool:
        if isinstance(param, DTensor) and isinstance(grad, DTensor):
            return bool(grad.placements == param.placements)
        return True

    def is_cut(self, param: Tensor) -> bool:
        if not isinstance(param, DTensor) or param.placements[0].is_replicate():
            return False
        return param.device_mesh.size() > 1

    def reserved_numel(self, param: Any) -> int:
        if not self.is_cut(param) or param.numel() == 0:
            return int(param.numel())
        rows = int(param.shape[param.placements[0].dim])
        _, largest = cut_of(rows, 0, param.device_mesh.size())  # the first rank's: parts are rounded up
        return largest * (int(param.numel()) // rows)

    def cut_params(self, named: Mapping[Any, Parameter]) -> dict[Any, CutParam]:
        cuts = {key: cut_param(param) for key, param in named.items() if self.is_cut(param)}
        assert all(cut.part_shape == self.local_view(named[key]).shape for key, cut in cuts.items()), "as DTensor cuts"
        return cuts


class PartsGroup(ModelGroup):
    """The ranks of one mesh dimension, which have parts of the same parameters: tensor ranks, or expert ranks.

    Attributes:
        parts: this rank's parts of the parameters.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.parts = DTensorParts()
        self._mesh = mesh

    def connect(self, device: torch.device) -> None:
        super().connect(device)
        if self._mesh.size() > 1:
            group = self._mesh.get_group()
            self.part_ranks = self._connected(private_group(group, device), group)

    def common_names(self, named: Mapping[str, Parameter]) -> dict[str, str]:
        return {name: name for name, param in named.items() if not self.parts.is_cut(param)}

    def is_counted_here(self, param: Tensor) -> bool:
        return self.ranks is None or self.ranks.is_rank_zero or self.parts.is_cut(param)


class TensorGroup(PartsGroup):
    """The ranks that have parts of the same parameters: those of ``mesh``, or of the mesh of the module's DTensors."""

    rank_name = "tensor rank"
    kind_of_parts = "tensor-parallel"
    has_one_batch = True

    def __init__(self, module: nn.Module, process_group: ProcessGroup | None, mesh: DeviceMesh | None = None) -> None:
        super().__init__(mesh if mesh is not None else next(iter(dtensors_of(module).values())).device_mesh)
        self._dp_ranks = ranks_of(process_group)
        self._looked_for_ties = False

    def connect(self, device: torch.device) -> None:
        super().connect(device)
        self.ranks = self.parts.tensor_ranks = self.part_ranks

    def check(self, module: nn.Module) -> None:
        """Raises ValueError for a module that ``fully_shard`` has wrapped, and for a parameter that is not cut over one
        mesh, or over data-parallel ranks."""
        if (kind := getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)) is not None:
            for name, child in module.named_modules():
                if isinstance(child, kind):
                    what = f"the submodule {name!r}" if name else "the module"
                    raise ValueError(
                        f"{what} is wrapped by fully_shard, which shards and reduces over the data-parallel ranks too. "
                        "Leave the fully_shard (or replicate) lines out, and keep parallelize_module"
                    )
        for name, param in dtensors_of(module).items():
            self._check(name, param)
        if not self._looked_for_ties:
            self._looked_for_ties = True
            if self._mesh.get_local_rank() == 0 and self._mesh.get_rank() == min(self._dp_ranks, default=0):
                _warn_of_broken_ties(module)

    def _check(self, name: str, param: Any) -> None:
        mesh = param.device_mesh
        what = (
            f"parameter {name!r} is a DTensor ({', '.join(map(repr, param.placements))} on a mesh of "
            f"{' x '.join(map(str, mesh.shape))})"
        )
        if mesh.ndim != 1:
            raise ValueError(
                f"{what}: a mesh of one dimension is expected, that of the tensor ranks. Pass it alone: "
                'parallelize_module(module, mesh["tp"], plan)'
            )
        # _StridedShard is a part that fully_shard has cut once more; Partial is a sum that has no value to step.
        if type(param.placements[0]) not in (Shard, Replicate):
            raise ValueError(f"{what}: only Shard and Replicate are understood here, as parallelize_module makes them")
        if mesh != self._mesh:
            raise ValueError(f"{what}, and another parameter on another mesh: one mesh of tensor ranks is expected")
        shared = sorted(self._dp_ranks.intersection(mesh.mesh.flatten().tolist()))
        if len(shared) > 1:
            raise ValueError(
                f"{what}: ranks {shared} hold different parts of it, and are data-parallel ranks of each other too.\n"
                'Make a mesh of two dimensions, "dp" and "tp": parallelize_module(module, mesh["tp"], plan), then '
                'DistributedDataParallel(module, config, process_group=mesh.get_group("dp")).\n'
                "Lightning and Fabric: MegatronDDPStrategy(tensor_parallel_size=2). "
                "Accelerate: ParallelismConfig(tp_size=2, dp_shard_size=...)"
            )

    def broadcast_common(self, tensors: Iterable[Tensor], *, joins: bool = False) -> None:
        if self.ranks is not None:
            parts = self.parts
            self.ranks.broadcast_all([parts.local_view(tensor) for tensor in tensors if not parts.is_cut(tensor)])

    def check_ranks_agree(
        self, named: Mapping[str, Parameter], options: Sequence[object], places: Sequence[object]
    ) -> None:
        if self.ranks is not None:
            rows = [[name, list(p.shape), str(p.dtype), self._placement(p)] for name, p in named.items()]
            what = "parameter (name, whole shape, dtype, placement)"
            where = "place (name, bucket, first element)"
            check_all_agree({what: rows, "option (name, value)": options, where: places}, self.ranks)

    def _placement(self, param: Tensor) -> str:
        return repr(param.placements) if isinstance(param, DTensor) else "plain"


def _warn_of_broken_ties(module: nn.Module) -> None:
    """Warns of pairs of parameters that were most likely one: matrices of equal values that are not constant.

    ``parallelize_module`` makes two parameters of a tied one, without a warning.
    """
    # Without vectors: biases and norms are equal at the start, and not tied. Without frozen copies.
    local = {
        name: param.to_local().detach()
        for name, param in dtensors_of(module).items()
        if param.dim() > 1 and param.requires_grad
    }
    # Without constant matrices, which two zero-initialised layers share.
    filled = {
        name: part
        for name, part in local.items()
        if part.numel() > 1 and not torch.equal(part, part.flatten()[0].expand_as(part))
    }
    for one, other in itertools.combinations(filled, 2):
        if filled[one].shape == filled[other].shape and torch.equal(filled[one], filled[other]):
            warnings.warn(
                f"parameters {one!r} and {other!r} have equal values, and are not one parameter: parallelize_module "
                "makes two of a tied one, which then part. Assign one to both modules after it, before the module is "
                "wrapped",
                stacklevel=2,
            )
