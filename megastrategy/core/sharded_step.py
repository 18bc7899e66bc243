"""Steps the user's optimizer on this rank's shards, for a :class:`~megastrategy.DistributedOptimizer`.

[Note: main params]
A 16-bit weight has an fp32 main param on the rank that owns it: the optimizer updates that and the weight gets its
rounding. Before each step the two are compared element by element; where the weight is not the rounding of the main
param, somebody changed it from outside (``load_state_dict``, averaging, ``p.data = x``), and the main param takes the
weight's value. fp32 and fp64 weights need no main param: the shard is a view of the weights themselves.

[Note: bucket by bucket]
With ``overlap_param_gather`` the optimizer is called once for each bucket, with what this rank has of it in its groups,
and the bucket's gather goes on while the next is stepped. That is the same step for an optimizer that treats each
tensor by itself and counts nothing else, which a probe finds out (``Findings.in_parts``); where it is not, or where
somebody's hook counts steps, the optimizer is called once, and all gathers follow.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from .checkpoint.full_state import MAIN_PARAM, shard_state
from .checkpoint.hand_over import STATE, AtRest, Version
from .checkpoint.own_parts import OwnParts, Piece
from .clip_grads import total_grad_norm
from .collectives import Collectives
from .engine import Engine
from .errors import CollectiveError, DirectUseError
from .events import EventKind
from .layout import BufferLayout
from .param_buffers import ParamBuffers
from .param_shard import ParamShard, take_outside_changes
from .rebucketing.shard_holder import Contents, PerElement, ShardHolder
from .step_tensors import CHUNK_NUMEL, Run, build_runs, cut_shards, own_state
from .strangers import Strangers
from .trials.elementwise import Findings, counts_calls, is_per_element
from .trials.later_trials import LaterTrials
from .trials.step_arguments import StepArguments


class ShardedStep(ShardHolder):
    """The optimizer of one :class:`~megastrategy.DistributedOptimizer`, its model, and this rank's shards between
    them. ``findings`` are there if it is sharded.

    Attributes:
        element_names: of the state that has one number for each element, as far as trials and steps have shown; None if
            nothing is sharded.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, engine: Engine, findings: Findings | None) -> None:
        self.inner = optimizer
        self.engine = engine
        self.strangers = Strangers(optimizer, engine)
        self.check_groups()
        engine.shard_holders.append(weakref.ref(self))
        self.sharded = self.layout.num_shards > 1
        self.shards: dict[int, ParamShard] = {}
        self._followed: set[int] = set()  # the parameters that were given their shards, or have none on this rank
        self._passing_through = False
        self._grad_views: dict[int, Tensor] = {}
        self.num_steps_begun = self.num_steps_done = 0
        self._reductions: dict[int, int] = {}  # by parameter, how often its gradient was reduced before the last step
        self._runs: list[Run] = []
        self._members: list[list[int]] = []  # by group, the parameters of which there are runs
        self._is_joined = False  # whether state is that of the runs
        self.at_rest = AtRest()
        self._is_on_cpu = engine.device.type == "cpu"
        self.element_names = set(findings.element_names) if findings is not None else None
        self._keeps_state_only = findings is not None and findings.in_parts
        self._arguments = StepArguments()  # of the step in work
        self._later_trials = LaterTrials(optimizer, findings, engine) if findings is not None else None
        self.follow_model()

    @property
    def layout(self) -> BufferLayout:
        """The model's; it grows when parameters join."""
        return self.engine.layout

    @property
    def index_by_id(self) -> dict[int, int]:
        return self.engine.index_by_id

    @property
    def owner_collectives(self) -> Collectives | None:
        """The ranks among which elements are divided; None where every rank has all of them."""
        return self.engine.shard_collectives if self.sharded else None

    @property
    def has_shards(self) -> bool:
        """Whether stepping goes through tensors other than the model's Parameters."""
        return not self.engine.steps_params_themselves

    def check_groups(self) -> None:
        """Looks for parameters that the model has not; see :meth:`Strangers.find`."""
        self.strangers.find()

    def follow_model(self) -> None:
        """Makes the shards of parameters that have none yet: at the start, and when some were unfrozen or added.

        State that was there before, made when the optimizer was constructed or loaded while a parameter was frozen, is
        from then on that of its shard.
        """
        if not self.has_shards or self.engine.is_closed:
            return
        index_by_id, followed = self.index_by_id, self._followed
        params = {
            index: param
            for group in self.inner.param_groups
            for param in group["params"]
            if (index := index_by_id.get(id(param))) is not None and index not in followed
        }
        if not params:
            return
        buffers = self.engine.param_buffers
        if buffers is None:
            for index, param in params.items():
                spec = self.layout.params[index]
                main = param.detach().to(torch.float32, copy=True) if spec.has_main_param else param
                self.shards[index] = ParamShard(index, 0, spec.numel, main, None)
        else:
            self._add_shards(params, buffers)
        for index, param in params.items():
            state = self.inner.state.pop(param, None)
            if state and index in self.shards:
                shard = self.shards[index]
                self.inner.state[shard.main] = shard_state(state, self.layout.params[index], shard, self.element_names)
        followed.update(params)

    def _add_shards(self, indices: Collection[int], buffers: ParamBuffers) -> None:
        grads, slots = self.engine.grad_buffers, self.layout.slots
        for index, shard in cut_shards(indices, self.layout, self.engine.collectives.rank, buffers.flats).items():
            slot = slots[index]
            self.shards[index] = shard
            self._grad_views[index] = grads.reduced(slot.bucket, slot.start + shard.start, slot.start + shard.end)

    def names_by_id(self) -> dict[int, str]:
        """By ``id``, the names of the model's parameters, frozen ones too, and of strangers."""
        return {id(param): name for name, param in self.engine.module.named_parameters()} | self.strangers.names_by_id()

    # --- gradients ---------------------------------------------------------------------------------------------------

    def param_indices(self) -> list[int]:
        """The layout's indices of this optimizer's parameters."""
        index_by_id = self.index_by_id
        ids = {id(param): None for group in self.inner.param_groups for param in group["params"]}
        return [index_by_id[key] for key in ids if key in index_by_id]

    def owned_grads(self) -> list[Tensor]:
        """The reduced gradients of this optimizer's parameters that this rank answers for: views, in the gradient
        dtype."""
        if not self.sharded:
            params = [self.engine.params[index] for index in self.param_indices()]
            return [param.grad for param in params if param.grad is not None]
        has_grad = self.engine.grad_buffers.has_grad
        return [self._grad_views[i] for i in self.param_indices() if has_grad[i] and i in self._grad_views]

    def may_step(self, index: int) -> bool:
        """Whether the next step has a gradient of this sharded parameter to step with."""
        return self.engine.grad_buffers.has_grad[index] and self._may_change(index)

    def _may_change(self, index: int) -> bool:
        """Whether some rank may step the parameter, the same on all ranks, whatever they do to ``.grad``.

        What was frozen after its gradient was reduced is stepped once more, with that gradient.
        """
        reductions = self.engine.reducer.num_reductions[index]
        return self.engine.params[index].requires_grad or reductions != self._reductions.get(index, 0)

    def norm(self, grads: list[Tensor], norm_type: float) -> Tensor:
        """The norm over all owners of ``grads``, and of strangers: a scalar in fp32, or fp64 if the model has fp64
        gradients."""
        total = total_grad_norm(grads, norm_type, self.owner_collectives, self.engine.device)
        if self.strangers.params:
            total = self.strangers.join_norm(total, norm_type, over_ranks=self.sharded)
        in_fp64 = any(spec.grad_dtype == torch.float64 for spec in self.layout.params)
        return total if in_fp64 else total.to(torch.float32)

    # --- groups ------------------------------------------------------------------------------------------------------

    def stepped_tensor(self, param: Parameter) -> Tensor | None:
        """The tensor in its place: this rank's shard, itself if frozen, None if all of it is elsewhere."""
        index = self.index_by_id.get(id(param))
        if index is None:
            return param
        return self.shards[index].main if index in self.shards else None

    def groups_of_shards(self) -> contextlib.AbstractContextManager[None]:
        """The optimizer's groups hold this rank's shards while this is open; a group may be empty, none is missing."""
        groups = [group["params"] for group in self.inner.param_groups]
        stepped = [[tensor for p in params if (tensor := self.stepped_tensor(p)) is not None] for params in groups]
        return self._groups_of(stepped)

    @contextlib.contextmanager
    def _groups_of(self, tensors: Sequence[list[Any]]) -> Iterator[None]:
        whole = [group["params"] for group in self.inner.param_groups]
        for group, params in zip(self.inner.param_groups, tensors, strict=True):
            group["params"] = params
        self._passing_through = True
        try:
            yield
        finally:
            self._passing_through = False
            # asked for again: load_state_dict makes new group dictionaries
            for group, params in zip(self.inner.param_groups, whole, strict=True):
                group["params"] = params

    # --- state -------------------------------------------------------------------------------------------------------

    def split_state(self, *, replace: bool = False) -> None:
        """The optimizer's state is that of single shards until the next step.

        Args:
            replace: another state is about to be loaded.
        """
        with self.at_rest.lock:
            self.follow_model()
            if self._is_joined:
                for run in self._runs:
                    run.split_state(self.inner.state, self.element_names)
                    if self.element_names is not None:  # state may come into being later than the probe's first step
                        self.element_names |= run.element_names(self.element_names)
                self._is_joined = False
            if replace:
                for run in self._runs:
                    run.forget_state()

    def version(self) -> Version:
        rest, size = self.at_rest, len(self.layout.params)
        return Version(self.num_steps_begun, self.num_steps_done, rest.num_replaced, rest.num_moves, size)

    def own_parts(self, what: str) -> OwnParts:
        state, shards, names = self.inner.state, dict(self.shards), self.element_names
        pieces: list[Piece] = []
        if what == STATE:
            for run in self._runs if self._is_joined else ():
                pieces.append(Piece(run.shards, run.main.numel(), run.joined_state(state, names)))
                for shard in run.shards:
                    shards.pop(shard.param, None)
            pieces += [Piece((shard,), shard.numel, state.get(shard.main, {})) for shard in shards.values()]
        else:
            own, names = self.param_indices(), {MAIN_PARAM}
            with_main = [shards[i] for i in own if i in shards and self.layout.params[i].has_main_param]
            pieces += [Piece((shard,), shard.numel, {MAIN_PARAM: shard.main}) for shard in with_main]
        return OwnParts(pieces, self.layout, self.engine.shard_collectives.rank, names)

    def _join_state(self) -> list[Run]:
        """Makes the state that of the runs, and returns those that have gradients to step with."""
        groups, index_by_id, may_step = self.inner.param_groups, self.index_by_id, self.may_step
        members = [[index_by_id.get(id(param), -1) for param in group["params"]] for group in groups]
        stepping = {index for indices in members for index in indices if index in self.shards and may_step(index)}
        state, names = self.inner.state, self.element_names
        # other runs: groups or layout changed, one shard of a run has a gradient and its neighbour none, or state was
        # loaded that tells them apart
        if members != self._members or any(
            len({shard.param in stepping for shard in run.shards}) > 1
            or (not self._is_joined and not run.has_one_history(state, names))
            for run in self._runs
        ):
            self.split_state()
            self._members = members
            buffers, grads = self.engine.param_buffers, self.engine.grad_buffers
            assert buffers is not None
            shards = [[self.shards[index] for index in indices if index in self.shards] for indices in members]
            apart = {number for number, group in enumerate(groups) if not self._may_join(group)}
            was_joined = {shard.param for run in self._runs if len(run.shards) > 1 for shard in run.shards}
            self._runs = build_runs(shards, apart, stepping, self.layout, buffers.flats, grads.reduced, state, names)
            for run in self._runs:  # a shard that is alone now has a part of the run's state, and keeps all of it alive
                if len(run.shards) == 1 and run.shards[0].param in was_joined:
                    own_state(state.get(run.main, {}))
        if not self._is_joined:
            for run in self._runs:
                run.join_state(state, names, self._chunk_numel(run))
            self._is_joined = True
        return [run for run in self._runs if run.shards[0].param in stepping]

    def _may_join(self, group: dict[str, Any]) -> bool:
        """Whether shards may be stepped as one tensor: not if the optimizer may know tensors by their identity."""
        return self._keeps_state_only and not (group.get("fused") and self._is_on_cpu)

    def _chunk_numel(self, run: Run) -> int:
        """The most elements stepped at once: all, unless the optimizer does single operations on the CPU."""
        group = self.inner.param_groups[run.group]
        in_chunks = self._may_join(group) and self._is_on_cpu and not group.get("foreach")
        return CHUNK_NUMEL if in_chunks else run.main.numel()

    # --- another layout ----------------------------------------------------------------------------------------------

    def describe(self) -> Contents | None:
        if not self._keeps_state_only:
            return None
        self.split_state()
        contents: Contents = {}
        for index, shard in self.shards.items():
            contents[index] = (
                {MAIN_PARAM: PerElement(torch.float32)} if self.layout.params[index].has_main_param else {}
            )
            for name, value in self.inner.state.get(shard.main, {}).items():
                if is_per_element(name, value, shard.main.shape, self.element_names):
                    value = PerElement(value.dtype)
                elif isinstance(value, Tensor) and value.numel() > 1:
                    return None  # no part of it is known to be this shard's
                elif not isinstance(value, Tensor | int | float | str | None):
                    return None  # an object, which may not be one rank's to give or to copy
                contents[index][name] = value
        return contents

    def part(self, param: int, name: str) -> Tensor | None:
        shard = self.shards.get(param)
        if shard is None or name == MAIN_PARAM:
            return shard.main if shard is not None else None
        part: Tensor | None = self.inner.state.get(shard.main, {}).get(name)
        return part

    def release(self) -> None:
        self.at_rest.num_moves += 1
        for shard in self.shards.values():
            self.inner.state.pop(shard.main, None)
        self.shards, self._grad_views, self._runs, self._members = {}, {}, [], []

    def take(self, contents: Contents) -> None:
        buffers, state = self.engine.param_buffers, self.inner.state
        assert buffers is not None, "sharded"
        self._add_shards(contents, buffers)
        for index, values in contents.items():
            if (main := values.pop(MAIN_PARAM, None)) is not None:
                self.shards[index].main.copy_(main)
            if values:
                state[self.shards[index].main] = values
        self.at_rest.num_moves += 1

    # --- step --------------------------------------------------------------------------------------------------------

    def finish_grads(self) -> None:
        """Reduces what is not yet, and takes in what the user wrote into ``.grad`` since; comes before gradients' use.

        Without shards ``.grad`` is the truth, local or not, as under torch DDP.
        """
        self.engine.check_open()
        self.follow_model()
        if self.sharded:
            self.engine.reducer.finish_grad_sync()
            self.engine.grad_buffers.adopt_written(self.param_indices())

    def step_whole(self, arguments: StepArguments) -> Any:
        """Without shards the user's optimizer steps the Parameters themselves, and may call the closure as it likes."""
        if (closure := arguments.closure) is None:
            self._begin_step()
        else:

            def evaluate() -> Any:
                loss = closure()
                self._begin_step()
                return loss

            arguments = arguments.with_closure(evaluate)
        result = arguments.call(self.inner.step)
        self.engine.emit(EventKind.STEP_END, 0)
        self.num_steps_done += 1
        return result

    def _begin_step(self) -> None:
        self.num_steps_begun = self.num_steps_done + 1
        self.strangers.warn_once()
        self.engine.emit(EventKind.STEP_START, 0)

    def try_arguments(self, arguments: StepArguments) -> str | None:
        """Says why shards cannot be stepped with arguments that are new, by trial steps; None if they can."""
        return self._learn(self._later_trials.of_arguments(arguments)) if self._later_trials is not None else None

    def try_options(self) -> str | None:
        """Says why shards cannot be stepped with groups or options that are new, by trial steps; None if they can."""
        return self._learn(self._later_trials.of_options()) if self._later_trials is not None else None

    def _learn(self, findings: Findings | None) -> str | None:
        if findings is not None and findings.reason is None:
            self._keeps_state_only = self._keeps_state_only and findings.in_parts
            assert self.element_names is not None, "sharded"
            self.element_names |= findings.element_names
        return findings.reason if findings is not None else None

    def step(self, arguments: StepArguments) -> None:
        """``arguments``: of the user's optimizer, without the closure."""
        self.finish_grads()
        with self.at_rest.lock:
            self._arguments = arguments
            if self.sharded:
                self._step_shards()
            else:
                self._step_main_params()
            self.num_steps_done += 1

    def _step_main_params(self) -> None:
        self._begin_step()
        with self.main_params_with_grads() as own:
            self._arguments.call(self.inner.step)
            for shard in own:
                if shard.main.grad is not None:
                    self.engine.params[shard.param].detach().copy_(shard.main)
        self.engine.emit(EventKind.STEP_END, 0)

    @contextlib.contextmanager
    def main_params_with_grads(self) -> Iterator[list[ParamShard]]:
        """The optimizer's groups hold parameters that are whole on every rank, main params for 16-bit ones, with their
        gradients, while this is open; yields those of the 16-bit ones."""
        own = [self.shards[index] for index in self.param_indices() if self.layout.params[index].has_main_param]
        try:
            for shard in own:
                param = self.engine.params[shard.param]
                take_outside_changes(shard.main, param.detach())
                shard.main.grad = None if param.grad is None else param.grad.to(shard.main.dtype)
            with self.groups_of_shards():
                yield own
        finally:
            for shard in own:
                shard.main.grad = None

    def _step_shards(self) -> None:
        engine, indices = self.engine, self.param_indices()
        assert engine.param_buffers is not None, "sharded"
        engine.param_gather.finish()
        engine.param_buffers.recapture()
        runs = self._join_state()
        changing = self._changing_buckets(indices)
        overlap = engine.config.overlap_param_gather
        self._begin_step()
        if overlap and runs and self._keeps_state_only and not counts_calls(self.inner):
            try:  # buckets are numbered as backward meets them, and the next forward needs the last of them first
                for bucket in sorted(changing | {run.bucket for run in runs}, reverse=True):
                    self._step_runs([run for run in runs if run.bucket == bucket])
                    if bucket in changing:
                        engine.param_gather.start(bucket)
                self._step_runs([], with_strangers=bool(self.strangers.grads()))
            except BaseException:  # whoever deals with it reads weights that are not on their way
                with contextlib.suppress(CollectiveError):
                    engine.param_gather.finish()
                raise
            engine.emit(EventKind.STEP_END, 0)
        else:
            self._step_runs(runs, with_strangers=True)
            engine.emit(EventKind.STEP_END, 0)
            for bucket in sorted(changing, reverse=True):
                engine.param_gather.start(bucket)
        if overlap == "forward":
            engine.param_gather.defer()
        else:
            engine.param_gather.finish()
        for run in runs:  # state that the step has made in one piece is seen in chunks from now on
            if run.begins:
                run.split_state(self.inner.state, self.element_names)
                run.join_state(self.inner.state, self.element_names, self._chunk_numel(run))
        # a backward through a graph from before the step must raise, as it does where torch's optimizers step
        stepped = [engine.params[index] for index in indices if self.may_step(index)]
        torch.autograd.graph.increment_version(stepped)
        self._reductions.update({index: engine.reducer.num_reductions[index] for index in indices})

    def _step_runs(self, runs: Sequence[Run], *, with_strangers: bool = False) -> None:
        """Calls the optimizer with these runs in its groups, if there are any; with strangers in one call a step."""
        if not runs and not with_strangers:
            return
        stepped = self.strangers.stepped() if with_strangers else [[] for _ in self.inner.param_groups]
        tensors = [tensor for run in runs for tensor in run.tensors]
        try:
            for run in runs:
                if run.weights is not None:
                    take_outside_changes(run.main, run.weights)
                run.set_grad()
                stepped[run.group] += run.tensors
            with self._groups_of(stepped):
                self._arguments.call(self.inner.step)
            for tensor in tensors:
                for name, value in self.inner.state.get(tensor, {}).items():
                    # torch's next gradient would be another tensor, ours is not
                    if isinstance(value, Tensor) and value is tensor.grad:
                        self.inner.state[tensor][name] = value.clone()
            for run in runs:
                if run.weights is not None:
                    run.weights.copy_(run.main)
        finally:
            for tensor in tensors:
                tensor.grad = None

    def _changing_buckets(self, indices: Sequence[int]) -> set[int]:
        """The buckets whose parameters may change in this step on any rank, which all ranks gather. So it depends on
        what ranks share alone (``requires_grad``, reductions): a gradient may be written on one rank only."""
        return {self.layout.slots[index].bucket for index in indices if self._may_change(index)}

    def refuse_direct_use(self, *_: Any) -> None:
        """Hook on the user's object: between steps it does not hold what it steps, and its state is of shards."""
        if not self._passing_through:
            raise DirectUseError(
                "this optimizer steps shards, which it does not hold now: call step(), state_dict() and "
                "load_state_dict() of the DistributedOptimizer around it, on all ranks (self.optimizers() in a "
                "LightningModule, what fabric.setup() or accelerator.prepare() returned), not of the optimizer that "
                "was passed to it"
            )
