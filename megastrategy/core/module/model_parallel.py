"""The groups of ranks that share one model, beside the data-parallel ranks.

:class:`~.local_parts.LocalParts` says where on this rank a parameter's memory is. The groups here say which other ranks
have the same elements of it, or other parameters of the model.

[Note: groups of one model]
Each kind of group is one :class:`ModelGroup`: tensor ranks, which have parts of the same parameters and one layout, or
stages, which have other parameters and layouts of their own. Each rank reduces gradients over its own data-parallel
ranks. Only norms, "is any gradient not finite?" and checkpoints are joined over the groups as well: over the
data-parallel ranks first, then over the groups in the order of :attr:`ModelParallel.groups`, and in each group in the
order of its ranks. So every rank gets the same bits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import Parameter

from ..collectives import Collectives, close_when_collected, make_collectives
from ..layout import Domain
from .first_batch import check_first_batch


class NamedOptimizer(Protocol):
    """The members of a sharded optimizer that a :class:`GroupState` uses."""

    inner: torch.optim.Optimizer

    def names_by_id(self) -> dict[int, str]:
        """Returns the names of the optimizer's parameters by ``id``."""


class GroupState(ABC):
    """Joins the saved state of ranks that have other parameters of the model, and divides it again."""

    @abstractmethod
    def join(self, optimizer: NamedOptimizer, saved: dict[str, Any]) -> dict[str, Any]:
        """Returns the state of all ranks' optimizers on the first rank; elsewhere "state" is None. Collective.

        Raises:
            CheckpointError: on all ranks of the group, if their optimizers have different groups.
        """

    @abstractmethod
    def join_groups(self, optimizer: NamedOptimizer, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Returns the parameter groups of all ranks, with names for parameters. Collective; raises as :meth:`join`."""

    @abstractmethod
    def join_main_params(self, saved: dict[str, Tensor]) -> dict[str, Tensor] | None:
        """Returns main params of all ranks by name on the first rank, None elsewhere. Collective."""

    @abstractmethod
    def divide(self, optimizer: NamedOptimizer, saved: dict[str, Any]) -> dict[str, Any]:
        """Returns this rank's part of the whole model's state, under its optimizer's numbers. Collective."""

    @abstractmethod
    def divide_groups(self, optimizer: NamedOptimizer, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Returns the options of the whole model's groups as those of this rank's groups."""

    @abstractmethod
    def divide_main_params(self, optimizer: NamedOptimizer, saved: dict[str, Tensor]) -> dict[str, Tensor]:
        """Returns main params under the names that this rank's parameters have."""


class ModelGroup:
    """One group of ranks that share the model. Methods of this class are for a group in which nothing has to be done.

    Attributes:
        rank_name: what error messages call a rank of the group.
        ranks: None before :meth:`connect`, and if this rank is the only one.
        part_ranks: the ranks that have the other parts of this rank's parameters, which a file joins.
        kind_of_parts: how error messages describe a parameter that is divided over the ranks; empty if none is.
        has_one_batch: whether the ranks get one batch.
        state: joins saved state, from :meth:`connect` on, if the ranks have other parameters of the model, in layouts
            of their own; None if they have parts of the same parameters, in one layout.
        names_elsewhere: the names of parameters and buffers that only other ranks have.
    """

    rank_name = "rank"
    ranks: Collectives | None = None
    part_ranks: Collectives | None = None
    kind_of_parts = ""
    has_one_batch = False
    state: GroupState | None = None
    names_elsewhere: Collection[str] = ()

    def __init__(self) -> None:
        self._ends: list[Callable[[], object]] = []  # of process groups
        self._device = torch.device("cpu")
        self._has_seen_batch = False

    def connect(self, device: torch.device) -> None:
        """Makes the process groups. Collective over the group."""
        self._device = device

    def _connected(self, group: ProcessGroup, passed: ProcessGroup) -> Collectives:
        """Returns collectives that end with this object, and the group with them unless user code ``passed`` it."""
        ranks = make_collectives(group, self._device)
        own = group if group is not passed else ranks.host.group if ranks.host is not ranks else None
        self._ends.append(close_when_collected(self, ranks, own))
        return ranks

    def attach(self, engine: Any) -> None:
        """The engine is complete; the group may keep a weak reference."""

    def detach(self) -> None:
        """The engine is closed."""

    def close(self) -> None:
        """Ends the process groups that were made in :meth:`connect`."""
        for end in self._ends:
            end()

    def check(self, module: nn.Module) -> None:
        """Raises ValueError for a parameter that the group cannot share."""

    def check_ranks_agree(
        self, named: Mapping[str, Parameter], options: Sequence[object], places: Sequence[object]
    ) -> None:
        """Raises LayoutMismatchError, on all ranks of the group, if their models do not match. Collective."""

    def before_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Compares the arguments of the first forward that trains; see check_first_batch. Collective in that one."""
        if self.ranks is not None and not self._has_seen_batch:
            self._has_seen_batch = True
            check_first_batch(args, kwargs, self.ranks, self._device, of_stages=self.state is not None)

    def takes_zero_grad(self) -> bool:
        """Whether gradients are to be kept in a ``zero_grad`` that comes now."""
        return False

    # --- parameters that several ranks of the group have -------------------------------------------------------------

    def common_names(self, named: Mapping[str, Parameter]) -> dict[str, str]:
        """Returns the names in the model of the parameters that several ranks have alike, by their names here."""
        return {}

    def broadcast_common(self, tensors: Iterable[Tensor], *, joins: bool = False) -> None:
        """Gives those of the tensors that several ranks have alike the values of the first of these ranks. Collective.

        ``joins``: the tensors are parameters that were unfrozen in training.
        """

    def is_counted_here(self, param: Tensor) -> bool:
        """Whether sums over the group (a norm, a count) include this rank's elements: true on one rank for each."""
        return True

    def domain_of(self, param: Tensor) -> Domain | None:
        """Returns the data-parallel ranks that hold the same elements of a parameter; None for all."""
        return None

    def saves_parts(self, collectives: Collectives) -> bool:
        """Whether this one of the data-parallel ranks gathers parts, beside the first of them."""
        return False

    def replica_name(self, name: str, param: Tensor) -> str:
        """Returns the name under which data-parallel ranks compare a parameter's values."""
        return name

    def needs_own_bucket(self, param: Tensor) -> bool:
        """Whether the parameter needs a bucket without any other parameter."""
        return False

    def name_in_model(self, name: str) -> str:
        """Returns the name that the parameter has in a model of one process: a copy has that of the first."""
        return name

    def agree_on_copies(self, params: Sequence[Parameter], has_grad: list[bool]) -> None:
        """Sets ``has_grad`` of a parameter if any rank with a copy has a gradient. Collective over these ranks."""

    def add_up_copies(self, params: Sequence[Parameter], grad_of: Callable[[int], Tensor]) -> None:
        """Adds up the gradients of copies, in place; ``grad_of`` returns them by index. Collective."""


class ModelParallel:
    """The groups of ranks that share the wrapped model, in one order on all ranks: tensor ranks first."""

    def __init__(self, groups: Iterable[ModelGroup] = ()) -> None:
        self.groups = tuple(groups)

    @property
    def collectives(self) -> tuple[Collectives, ...]:
        """The groups of several ranks, to be joined over one after the other; see [Note: groups of one model]."""
        return tuple(group.ranks for group in self.groups if group.ranks is not None)

    @property
    def tensor_ranks(self) -> Collectives | None:
        """The ranks that have parts of the same parameters, in one layout, and one batch; None if there is only one."""
        return next((group.ranks for group in self.groups if group.has_one_batch), None)

    @property
    def part_ranks(self) -> Collectives | None:
        """The ranks that have the other parts of this rank's parameters; None if parameters are not divided."""
        return next((group.part_ranks for group in self.groups if group.part_ranks is not None), None)

    @property
    def states(self) -> list[GroupState]:
        """The :class:`GroupState` of each group whose ranks have other parameters of the model."""
        return [group.state for group in self.groups if group.state is not None]

    @property
    def names_elsewhere(self) -> frozenset[str]:
        """The names of parameters and buffers that only other ranks have."""
        return frozenset().union(*(group.names_elsewhere for group in self.groups))

    @property
    def kind_of_parts(self) -> str:
        """The words of error messages for a parameter that is divided over the ranks."""
        return next((group.kind_of_parts for group in self.groups if group.kind_of_parts), "divided")

    def domain_of(self, param: Tensor) -> Domain | None:
        """Returns the data-parallel ranks that hold the same elements of a parameter; None for all."""
        domains = (group.domain_of(param) for group in self.groups)
        return next((domain for domain in domains if domain is not None), None)

    def saves_parts(self, collectives: Collectives) -> bool:
        """Whether this one of the data-parallel ranks gathers its parts of the model, to be joined with others'."""
        return any(group.saves_parts(collectives) for group in self.groups) or collectives.is_rank_zero

    def broadcast_common(self, tensors: Sequence[Tensor], *, joins: bool = False) -> None:
        """See :meth:`ModelGroup.broadcast_common`."""
        for group in self.groups:
            group.broadcast_common(tensors, joins=joins)

    def is_counted_here(self, param: Tensor) -> bool:
        """Whether sums over all ranks of the model include this rank's elements: true on one rank for each."""
        return all(group.is_counted_here(param) for group in self.groups)

    def name_in_model(self, name: str) -> str:
        """Returns the name that the parameter has in a model of one process."""
        for group in self.groups:
            name = group.name_in_model(name)
        return name

    def replica_name(self, name: str, param: Tensor) -> str:
        """Returns the name under which data-parallel ranks compare a parameter's values."""
        for group in self.groups:
            name = group.replica_name(name, param)
        return name
