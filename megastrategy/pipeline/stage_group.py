"""The ranks that have the stages of one model, as one of the engine's groups.

[Note: pipeline stages as a group]
Each rank has the layers of its stage only, and a layout, buffers and an optimizer for them, over its own data-parallel
ranks. As for tensor ranks, norms, "is any gradient not finite?" and checkpoints are joined over the group
(model_parallel's [Note: groups of one model]). Unlike tensor ranks, stages have other parameters, not parts of the
same. A stage may have tensor ranks as well, each with parts of its layers: tensor rank t of one stage then forms a
group with tensor rank t of the others.

[Note: copies of tied weights]
A weight that two stages use (an embedding and the head that is tied to it) is a parameter on each. Their gradients are
added up, and each stage steps its own copy with the sum. The copy has a bucket of its own on each stage, so that the
same data-parallel rank owns the same elements of it there: after the reduction over data-parallel ranks only shards are
added up over the stages, 1/d of the bytes of whole gradients. Both stages have the same sum and step to the same bits;
norms count the first copy.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import Parameter

from ..core import (
    Collectives,
    LocalParts,
    ModelGroup,
    check_all_agree,
    dtensors_of,
    named_params,
    names_elsewhere,
    private_group,
    subgroup,
)
from .backwards import StagedBackwards
from .saved_state import StageState


@dataclasses.dataclass(frozen=True)
class Copies:
    """A parameter that several stages have.

    Attributes:
        names: its name on each rank of the stages' group that has a copy, by rank, the first stage's first.
    """

    names: Mapping[int, str]


class StagedLayers(Protocol):
    """A pipeline, as its group sees it.

    Attributes:
        first_stages: by rank of the group, the number of its first stage.
        copies: all parameters that several stages have, in one order on all ranks.
        layers_name: of the submodule that has the layers of all stages.
    """

    stage_group: ProcessGroup | None
    tensor_mesh: DeviceMesh | None
    first_stages: Sequence[int]
    copies: Sequence[Copies]
    layers_name: str

    def layer_of(self, name: str) -> int:
        """Returns the number of the layer that a parameter or buffer of the pipeline belongs to."""

    def named_parameters(self) -> Iterable[tuple[str, Parameter]]:
        """As torch's."""

    def attach(self, backwards: StagedBackwards | None) -> None:
        """Sets the object to which the forward reports its backwards; None when the module is unwrapped."""


class StageGroup(ModelGroup):
    """The ranks that have the stages.

    Args:
        staged: the pipeline.
        module: the pipeline, or a module that contains it.
        parts: where this rank has the parameters of its stage.
    """

    rank_name = "rank of the stages"

    def __init__(self, staged: StagedLayers, module: nn.Module, parts: LocalParts) -> None:
        super().__init__()
        name = next(name for name, child in module.named_modules() if child is staged)
        self._staged = staged
        self._prefix = f"{name}." if name else ""
        self._parts = parts
        self.names_elsewhere = names_elsewhere(module)
        self._has_agreed = False
        self._own_copies: dict[int, Collectives] = {}  # by id of the parameter, in one order on all ranks
        self._counted_elsewhere: set[int] = set()
        self._first_names: dict[str, str] = {}
        self._copied: list[Parameter] = []  # parameters with copies on other stages, in one order on all ranks
        self._backwards: StagedBackwards | None = None

    def connect(self, device: torch.device) -> None:
        super().connect(device)
        group = self._staged.stage_group
        assert group is not None, "there are other stages"
        self.ranks = self._connected(private_group(group, device), group)
        params = dict(self._staged.named_parameters())
        by_ranks = dict[tuple[int, ...], Collectives | None]()
        for copies in self._staged.copies:
            holders = tuple(copies.names)
            first, *others = (f"{self._prefix}{copies.names[rank]}" for rank in holders)
            self._first_names |= dict.fromkeys(others, first)
            if holders not in by_ranks:
                holders_group = subgroup(group, holders, device)
                by_ranks[holders] = None if holders_group is None else self._connected(holders_group, group)
            ranks = by_ranks[holders]
            if ranks is not None:
                param = params[copies.names[group.rank()]]
                self._copied.append(param)
                self._own_copies[id(param)] = ranks
                if not ranks.is_rank_zero:
                    self._counted_elsewhere.add(id(param))

    @property
    def state(self) -> StageState | None:  # type: ignore[override] # an attribute of the base
        """Joins saved state; None before :meth:`connect`."""
        # Made anew: an attribute whose methods are bound here would keep a dropped pipeline until garbage is collected.
        return None if self.ranks is None else StageState(self.ranks, self.name_in_model, self._layer_of)

    def _layer_of(self, name: str) -> int:
        return self._staged.layer_of(name.removeprefix(self._prefix))

    def attach(self, engine: Any) -> None:
        self._backwards = StagedBackwards(engine, self, self._staged.first_stages)
        self._staged.attach(self._backwards)

    def detach(self) -> None:
        self._staged.attach(None)

    def takes_zero_grad(self) -> bool:
        return self._backwards is not None and self._backwards.takes_zero_grad()

    def check(self, module: nn.Module) -> None:
        dtensors = dtensors_of(module) if self._staged.tensor_mesh is None else {}
        if dtensors:
            raise ValueError(
                f"parameter {next(iter(dtensors))!r} is a DTensor, and the pipeline's mesh has the stages alone: pass "
                'the tensor ranks\' dimension, too (Pipeline(..., mesh=mesh["pp", "tp"]))'
            )
        outside = [
            name
            for name, param in named_params(module).items()
            if param.requires_grad and not name.startswith(f"{self._prefix}{self._staged.layers_name}.")
        ]
        if outside:
            raise ValueError(
                f"parameter {outside[0]!r} is trained and is outside of the pipeline's layers, so that every stage "
                "would have one of its own, and they would part. Put it into one of the pipeline's layers"
            )

    def check_ranks_agree(
        self, named: Mapping[str, Parameter], options: Sequence[object], places: Sequence[object]
    ) -> None:
        # Once: when one stage's parameters are unfrozen, the others have nothing to plan.
        if self.ranks is None or self._has_agreed:
            return
        self._has_agreed = True
        check_all_agree({"option (name, value)": options}, self.ranks)
        for param in self._copied:
            shape = [list(param.shape), list(self._parts.local_view(param).shape)]
            row = ["copy of a parameter", *shape, str(param.dtype), param.requires_grad]
            what = "copy (whole shape, shape of the part here, dtype, requires_grad)"
            check_all_agree({what: [row]}, self._own_copies[id(param)])

    # --- copies ------------------------------------------------------------------------------------------------------

    def common_names(self, named: Mapping[str, Parameter]) -> dict[str, str]:
        return {name: self.name_in_model(name) for name, param in named.items() if id(param) in self._own_copies}

    def broadcast_common(self, tensors: Iterable[Tensor], *, joins: bool = False) -> None:
        given = set(map(id, tensors))
        for param in self._copied:
            if id(param) in given and not joins:  # frozen copies were equal, and stayed so
                self._own_copies[id(param)].broadcast_all([self._parts.local_view(param)])

    def is_counted_here(self, param: Tensor) -> bool:
        return id(param) not in self._counted_elsewhere

    def needs_own_bucket(self, param: Tensor) -> bool:
        return id(param) in self._own_copies

    def name_in_model(self, name: str) -> str:
        return self._first_names.get(name, name)

    def agree_on_copies(self, params: Sequence[Parameter], has_grad: list[bool]) -> None:
        for index, param in self._copied_among(params):
            [used] = self._own_copies[id(param)].host.max_of_bytes([has_grad[index]])
            has_grad[index] = bool(used)

    def add_up_copies(self, params: Sequence[Parameter], grad_of: Callable[[int], Tensor]) -> None:
        handles = [
            self._own_copies[id(param)].all_reduce(grad_of(index), 1.0) for index, param in self._copied_among(params)
        ]
        for handle in handles:
            handle.wait()

    def _copied_among(self, params: Sequence[Parameter]) -> list[tuple[int, Parameter]]:
        if not self._copied:
            return []
        index_by_id = {id(param): index for index, param in enumerate(params)}
        return [(index_by_id[id(param)], param) for param in self._copied if id(param) in index_by_id]
