"""The optimizer's state of this rank's shards, in its two forms: by shard between steps, by run in a step.

Checkpoints, users and moves to another layout see the state of single shards. In a step neighbouring shards are one
tensor, a run, and so is their state (flat_run's [Note: runs]). With a state storage the state is in neither form while
it is stepped: see state_storage's [Note: offloaded state].
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..engine import Engine
from ..errors import OptimizerNotShardableError
from ..shards import FlatRun, Fragment, ParamShard, build_runs
from ..trials import Findings

if TYPE_CHECKING:  # imported only where the option is used
    from ..shards.state_storage import StateStorage


class ShardStates:
    """The state of one optimizer's shards.

    Attributes:
        element_names: the names of element-wise state that trials and steps have found; None if nothing is sharded.
            One set, which grows.
        in_parts: True if one step may be several calls with some of the shards each, since the optimizer keeps nothing
            but tensors in its state.
        storage: stores state on the host; None where no option asks for it.
        group_of: the number of each parameter's group, when the runs were built.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, engine: Engine, findings: Findings | None) -> None:
        self._optimizer, self._engine = optimizer, engine
        self._is_on_cpu = engine.device.type == "cpu"
        self.element_names = set(findings.element_names) if findings is not None else None
        self.in_parts = findings is not None and findings.in_parts
        self.storage = self._storage()
        self._runs: list[FlatRun] = []
        self._members: list[list[int]] = []  # the parameters of each group when the runs were built
        self._is_joined = False  # whether the state is by run
        self.group_of: dict[int, int] = {}

    def _storage(self) -> StateStorage | None:
        if not self._engine.layout.offloads_state:
            return None
        if (reason := self.why_not_in_slices()) is not None:
            raise OptimizerNotShardableError(reason)
        from ..shards.state_storage import StateStorage

        assert self.element_names is not None, "sharded"
        return StateStorage(self._optimizer, self._engine.device, self.element_names)

    def why_not_in_slices(self) -> str | None:
        """Returns the reason why shards may not be stepped in slices; None if they may, or need not be."""
        if not self._engine.layout.offloads_state or self.in_parts:
            return None
        return (
            f"{type(self._optimizer).__name__} keeps more than state of tensors (a count of its calls, say), and with "
            "offload_optimizer_states it is called for one slice of the shards after the other. Leave this option out"
        )

    def learn(self, findings: Findings) -> str | None:
        """Adds the findings of later trials; returns :meth:`why_not_in_slices`."""
        assert self.element_names is not None, "sharded"
        self.element_names |= findings.element_names
        self.in_parts = self.in_parts and findings.in_parts
        return self.why_not_in_slices()

    # --- the two forms -----------------------------------------------------------------------------------------------

    def join(self, shards: Mapping[int, ParamShard], with_grads: Set[int]) -> list[FlatRun]:
        """Converts the state to that of runs, and returns the runs that have gradients.

        Called at the start of each step; nearly always the state is joined already and nothing is copied. Runs are
        built again only if

        - groups or layout have changed,
        - one shard of a run has a gradient and its neighbour none: stepped together, the neighbour would get a step, or
        - the state was split since, and shards of a run have different histories now (loaded or edited state).

        They are built from the state of single shards, since runs of the last step may be other ones.
        """
        index_by_id = self._engine.index_by_id
        members = [[index_by_id.get(id(param), -1) for param in g["params"]] for g in self._optimizer.param_groups]
        stepping = set(with_grads & shards.keys())
        state = self._optimizer.state
        if members != self._members or any(
            len({shard.param in stepping for shard in run.shards}) > 1
            or (not self._is_joined and not run.has_one_history(state))
            for run in self._runs
        ):
            self.split()
            self._members = members
            self._build_runs(shards, stepping)
        if not self._is_joined:
            for run in self._runs:
                run.join_state(state, in_blocks=self._in_blocks(run))
            self._is_joined = True
        return [run for run in self._runs if run.shards[0].param in stepping]

    def _build_runs(self, shards: Mapping[int, ParamShard], stepping: set[int]) -> None:
        members, groups, buffers = self._members, self._optimizer.param_groups, self._engine.param_buffers
        assert buffers is not None, "sharded"
        assert self.element_names is not None, "sharded"
        self.group_of = {index: number for number, indices in enumerate(members) for index in indices}
        by_group = [[shards[index] for index in indices if index in shards] for indices in members]
        apart = {number for number, group in enumerate(groups) if not self.may_join(group)}
        was_joined = {shard.param for run in self._runs if len(run.shards) > 1 for shard in run.shards}
        state, names = self._optimizer.state, self.element_names
        layout, reduced = self._engine.layout, self._engine.grad_buffers.reduced
        self._runs = build_runs(by_group, apart, stepping, layout, buffers.flats, reduced, state, names)
        for run in self._runs:  # a shard that left its run has a view of the run's state, and keeps all of it alive
            if len(run.shards) == 1 and run.shards[0].param in was_joined:
                run.unshare_state(state)

    def split(self, *, replace: bool = False) -> None:
        """Converts the state to that of single shards until the next step. ``replace``: it is about to be replaced."""
        if self._is_joined:
            for run in self._runs:
                run.split_state(self._optimizer.state)
                run.names |= run.element_names()  # an optimizer may create state later than in the trials' steps
            self._is_joined = False
        if replace:
            for run in self._runs:
                run.forget_state()

    def cut_begun(self, runs: Iterable[FlatRun]) -> None:
        """Cuts state that a first step has created in one tensor into blocks, which later steps see."""
        for run in runs:
            if run.begins:
                run.split_state(self._optimizer.state)
                run.join_state(self._optimizer.state, in_blocks=self._in_blocks(run))

    def drop_runs(self) -> None:
        """Drops the runs, after :meth:`split`, so that their memory can be freed."""
        self._runs, self._members = [], []

    def may_join(self, group: Mapping[str, Any]) -> bool:
        """Returns True if shards may be stepped as one tensor; not if the optimizer may know tensors by identity."""
        return self.in_parts and not (group.get("fused") and self._is_on_cpu)

    def _in_blocks(self, run: FlatRun) -> bool:
        """Returns True if the optimizer does one operation after the other on the CPU."""
        if self.storage is not None:  # it cuts runs into slices itself
            return False
        group = self._optimizer.param_groups[run.group]
        return self.may_join(group) and self._is_on_cpu and not group.get("foreach")

    def fragments(self, shards: Mapping[int, ParamShard]) -> list[Fragment]:
        """Returns the state of these shards as it is saved, in whichever form it is. Changes nothing."""
        state, joined = self._optimizer.state, set[int]()
        fragments: list[Fragment] = []
        for run in self._runs if self._is_joined else ():
            fragments.append(Fragment(run.shards, run.main.numel(), run.joined_state(state)))
            joined.update(shard.param for shard in run.shards)
        single = (shard for index, shard in shards.items() if index not in joined)
        fragments += [Fragment((shard,), shard.numel, state.get(shard.main, {})) for shard in single]
        return fragments

    # --- loaded state ------------------------------------------------------------------------------------------------

    def keep_loaded(self, shards: Iterable[ParamShard]) -> None:
        """Stores state that was set from outside, as the option for state storage requires."""
        if self.storage is not None:
            self.storage.keep_loaded(shards)

    def names_kept_on_host(self, shard: ParamShard, values: Mapping[str, Any]) -> Iterable[str]:
        """Returns the names of loaded state that is kept on the host."""
        return self.storage.names_kept_on_host(shard, values) if self.storage is not None else ()

    def copy_of(self, part: Tensor) -> Tensor:
        """Returns a copy of state, in the memory in which state is stored."""
        return part.clone() if self.storage is None else self.storage.copy_of(part)
