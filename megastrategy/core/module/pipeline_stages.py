"""A model whose layers lie on several ranks, a stage on each: what the engine of one stage asks the others.

[Note: stages]
Each rank has the layers of its stage alone, and a layout, buffers and an optimizer of those, over its own data-parallel
ranks. What looks over the border is what does so for tensor ranks (local_parts' [Note: parts of parameters]): norms,
"is any gradient not finite?" and checkpoints, with one difference: stages have other parameters, not parts of the same.
A stage may have tensor ranks as well, each with parts of its layers. Rank t of one stage's then speaks with rank t of
the others'.

[Note: copies]
A weight that two stages use (an embedding and the head that is tied to it) is a parameter on each. Their gradients have
to be added up, and each steps its own copy with the sum. The copy has a bucket of its own on each stage, so that the
same data-parallel rank owns the same elements of it there: after the reduction over data-parallel ranks only shards are
added up over the stages, 1/d of what the whole gradients would be. Both stages have the same sum, and step to the same
bits; norms count the first copy.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import Parameter

from ..collectives import Collectives, check_all_agree, close_when_collected, make_collectives, private_group, subgroup
from .first_batch import check_first_batch
from .local_parts import LocalParts, dtensors_of
from .module_params import named_params


@dataclasses.dataclass(frozen=True)
class Copies:
    """A parameter that several stages have.

    Attributes:
        names: its name on each rank of the stages' group that has a copy, by rank, the first stage's first.
    """

    names: Mapping[int, str]


class FollowsStages(ABC):
    """Hears of the backwards that a :class:`StagedModule` runs in its forward."""

    @abstractmethod
    def begin(self) -> None:
        """A forward that trains begins.

        Raises:
            StageError: if gradients are to accumulate over several batches.
        """

    @abstractmethod
    def before_backward(self, outputs: Any, *, is_last: bool, has_loss: bool) -> None:
        """A backward is about to start from ``outputs``, which are the loss of a microbatch if it ``has_loss``;
        ``is_last``: no other of this batch will reach a parameter that it reaches."""

    @abstractmethod
    def finish(self, problem: str = "") -> None:
        """The schedule has ended on this stage, and nothing is on its way between stages. Collective over all stages.

        Args:
            problem: why its gradients are of no use, as far as this stage knows; empty if they are right.

        Raises:
            StageError: on all stages, if there is a problem on any.
            MegastrategyError: on all stages, if the gradients of any are refused; all are dropped then.
        """

    @abstractmethod
    def abandon(self) -> None:
        """The schedule broke off in an exception."""

    @abstractmethod
    def use(self, grad: Tensor) -> None:
        """The backward of the loss has come; ``grad``: one number, with which the loss was multiplied since.

        Raises:
            StageError: if it came before, or the next forward did.
        """


class StagedModule(nn.Module):
    """A module of which this rank has some of the layers.

    Attributes:
        stage_group: the ranks that have the others, in any order; None if this one has all.
        tensor_mesh: of one dimension, the ranks that have parts of the same layers; None where layers are whole.
        places: by rank of the group, the number of its first stage.
        elsewhere: the names of parameters and buffers that other stages have. Names are this module's.
        copies: of parameters that several of them have, all, in one order on all ranks.
        layers_name: of the submodule that has the layers of all stages.
    """

    stage_group: ProcessGroup | None = None
    tensor_mesh: DeviceMesh | None = None
    places: Sequence[int] = ()
    elsewhere: Collection[str] = ()
    copies: Sequence[Copies] = ()
    layers_name = "layers"

    def layer_of(self, name: str) -> int:
        """The number of the layer that a parameter or buffer of this module, by its name here, belongs to."""
        raise NotImplementedError

    def attach(self, backwards: FollowsStages | None) -> None:
        """The module was wrapped: its forward tells ``backwards`` of those that it runs. None where it no longer is."""
        raise NotImplementedError


def find_staged(module: nn.Module) -> StagedModule | None:
    """The staged module in ``module`` of which other ranks have a part; None if there is none.

    Raises:
        ValueError: if there are two.
    """
    staged = [child for child in module.modules() if isinstance(child, StagedModule) and child.stage_group is not None]
    if len(staged) > 1:
        raise ValueError("there are two pipelines in the module: one schedule is expected, of one chain of layers")
    return staged[0] if staged else None


def names_elsewhere(module: nn.Module) -> frozenset[str]:
    """The names in ``module`` of parameters and buffers that it would have, were it whole."""
    return frozenset(
        f"{prefix}.{name}" if prefix else name
        for prefix, child in module.named_modules()
        if isinstance(child, StagedModule)
        for name in child.elsewhere
    )


class StageParts(LocalParts):
    """The parameters of one stage.

    It leaves to :class:`LocalParts`, or to what stands there in a class of both (StagedTensorParts), where on this
    rank a parameter lies.

    Args:
        staged: it or a module around it is ``module``.
    """

    def __init__(self, staged: StagedModule, module: nn.Module) -> None:
        name = next(name for name, child in module.named_modules() if child is staged)
        self._staged, self._prefix = staged, f"{name}." if name else ""
        self.elsewhere = names_elsewhere(module)
        self._stages_agreed = self._stages_saw_batch = False
        self._device = torch.device("cpu")
        self._ends: list[Callable[[], object]] = []  # of groups
        self._own_copies: dict[int, Collectives] = {}  # by id of the parameter, in one order on all ranks
        self._counted_elsewhere: set[int] = set()
        self._first_names: dict[str, str] = {}
        self.copied: list[Parameter] = []
        """Parameters that other stages have copies of, in one order on all ranks."""

    def name_in_model(self, name: str) -> str:
        return self._first_names.get(name, name)

    def layer_of(self, name: str) -> int:
        """The number of the layer that a parameter of any stage belongs to."""
        return self._staged.layer_of(name.removeprefix(self._prefix))

    def stage_of(self, rank: int) -> int:
        """The first stage of a rank of :attr:`stage_ranks`."""
        return self._staged.places[rank]

    def connect(self, device: torch.device) -> None:
        super().connect(device)
        group = self._staged.stage_group
        assert group is not None, "there are other stages"
        self._device = device
        made = private_group(group, device)
        self.stage_ranks = self._connected(made, device)
        params, by_ranks = dict(self._staged.named_parameters()), dict[tuple[int, ...], Collectives | None]()
        for copies in self._staged.copies:
            holders = tuple(copies.names)
            first, *others = (f"{self._prefix}{copies.names[rank]}" for rank in holders)
            self._first_names |= dict.fromkeys(others, first)
            if holders not in by_ranks:
                holders_group = subgroup(group, holders, device)
                by_ranks[holders] = None if holders_group is None else self._connected(holders_group, device)
            if (ranks := by_ranks[holders]) is not None:
                param = params[copies.names[group.rank()]]
                self.copied.append(param)
                self._own_copies[id(param)] = ranks
                if not ranks.is_rank_zero:
                    self._counted_elsewhere.add(id(param))

    def _connected(self, group: ProcessGroup, device: torch.device) -> Collectives:
        ranks = make_collectives(group, device)
        own = group if group is not self._staged.stage_group else ranks.host.group if ranks.host is not ranks else None
        self._ends.append(close_when_collected(self, ranks, own))
        return ranks

    def check(self, module: nn.Module) -> None:
        if self._staged.tensor_mesh is None and (cut := next(iter(dtensors_of(module)), None)) is not None:
            raise ValueError(
                f"parameter {cut!r} is a DTensor, and the pipeline's mesh has the stages alone: pass the tensor ranks' "
                'dimension, too (Pipeline(..., mesh=mesh["pp", "tp"]))'
            )
        super().check(module)
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

    def is_counted_here(self, param: Tensor) -> bool:
        return id(param) not in self._counted_elsewhere and super().is_counted_here(param)

    def needs_own_bucket(self, param: Tensor) -> bool:
        return id(param) in self._own_copies

    def replicas(self, named: Mapping[str, Parameter]) -> list[tuple[str, Collectives, dict[str, str]]]:
        assert self.stage_ranks is not None
        copies = {name: self.name_in_model(name) for name, param in named.items() if id(param) in self._own_copies}
        return [*super().replicas(named), ("rank of the stages", self.stage_ranks, copies)]

    def broadcast_replicas(self, tensors: Iterable[Tensor], *, joins: bool = False) -> None:
        given = {id(tensor): tensor for tensor in tensors}
        super().broadcast_replicas(given.values(), joins=joins)
        for param in self.copied:
            if id(param) in given and not joins:  # frozen copies were equal, and stayed so
                self._own_copies[id(param)].broadcast_all([self.local_view(param)])

    def check_ranks_agree(
        self, named: Mapping[str, Parameter], options: Sequence[object], places: Sequence[object]
    ) -> None:
        super().check_ranks_agree(named, options, places)
        # Once: where one stage's parameters are unfrozen, the others have nothing to plan.
        if self.stage_ranks is None or self._stages_agreed:
            return
        self._stages_agreed = True
        check_all_agree({"option (name, value)": options}, self.stage_ranks)
        for param in self.copied:
            shape = [list(param.shape), list(self.local_view(param).shape)]
            row = ["copy of a parameter", *shape, str(param.dtype), param.requires_grad]
            what = "copy (whole shape, shape of the part here, dtype, requires_grad)"
            check_all_agree({what: [row]}, self._own_copies[id(param)])

    def before_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().before_forward(args, kwargs)
        if self.stage_ranks is not None and not self._stages_saw_batch:
            self._stages_saw_batch = True
            check_first_batch(args, kwargs, self.stage_ranks, self._device, of_stages=True)

    def agree_on_copies(self, params: Sequence[Parameter], has_grad: list[bool]) -> None:
        """Makes ``has_grad`` true of a parameter that other stages have copies of where it is on any of them.
        Collective over the stages that have copies."""
        for index, param in self._copied_among(params):
            [used] = self._own_copies[id(param)].host.max_of_bytes([has_grad[index]])
            has_grad[index] = bool(used)

    def add_up_copies(self, params: Sequence[Parameter], grad_of: Callable[[int], Tensor]) -> None:
        """Adds up over the stages, in place, what ``grad_of`` gives for parameters that others have copies of, by
        index. Collective over the stages that have copies."""
        handles = [
            self._own_copies[id(param)].all_reduce(grad_of(index), 1.0) for index, param in self._copied_among(params)
        ]
        for handle in handles:
            handle.wait()

    def _copied_among(self, params: Sequence[Parameter]) -> list[tuple[int, Parameter]]:
        if not self.copied:
            return []
        index_by_id = {id(param): index for index, param in enumerate(params)}
        return [(index_by_id[id(param)], param) for param in self.copied if id(param) in index_by_id]

    def close(self) -> None:
        super().close()
        for end in self._ends:
            end()
