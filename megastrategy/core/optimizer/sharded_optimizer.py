"""The step of one sharded optimizer, and the gathers of new weights after it.

[Note: main params]
A 16-bit weight has an fp32 main param on the rank that owns it: the optimizer updates that and the weight gets its
rounding. Before each step the two are compared element by element; where the weight is not the rounding of the main
param, user code changed it (``load_state_dict``, averaging, ``p.data = x``), and the main param takes the weight's
value. fp32 and fp64 weights need no main param: the shard is a view of the weights themselves.

[Note: one call a step]
The optimizer is called once a step, with all of this rank's shards in its groups, and all gathers follow. Only state on
the host is stepped in slices, one call each (state_storage's [Note: offloaded state]), unless user code watches the
steps. That is the same step for an optimizer that treats each tensor by itself and counts nothing else, which a probe
finds out (``Findings.in_parts``).

[Note: hooks and wrappers]
A hook on the step, or a wrapper around it, may read gradients, weights and their shapes. On shards a norm, a mean over
rows, or a test of ``dim()`` would silently give another result. So the user's optimizer is called with the model's
Parameters in its groups, as at any other time: before the step each ``.grad`` is a stand-in, which refuses to be
misread and may be written, and after it all weights are full. The groups hold shards only while the class's own step
runs.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator, Sequence, Set
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from ..engine import Engine
from ..errors import CollectiveError
from ..events import EventKind
from ..shards import FlatRun, take_outside_changes
from ..trials import Findings, LaterTrials
from .optimizer_checks import check_main_params, not_shardable
from .replica_state import OptimizerState
from .shard_set import ShardSet
from .step_arguments import StepArguments
from .step_hooks import has_user_hooks, innermost_call
from .step_memory import bring_back, copy_kept_grads
from .unsharded_step import step_main_params
from .whole_params import WholeParam

if TYPE_CHECKING:
    from ..shards.state_storage import StateStorage, StepSlice

Steppable: TypeAlias = "FlatRun | WholeParam | StepSlice"


@dataclasses.dataclass(frozen=True)
class _Begun:
    """A step that has begun.

    Attributes:
        indices: the optimizer's parameters, by index in the layout.
        with_grads: the parameters that this rank steps.
        runs: their shards, neighbours joined.
        changing: buckets in which any rank steps something; all ranks gather them.
        order: the buckets, in the order in which they are stepped.
    """

    indices: list[int]
    with_grads: Set[int]
    runs: list[FlatRun]
    changing: Set[int]
    order: list[int]


class ShardedOptimizer:
    """Steps a :class:`~.shard_set.ShardSet`, for one :class:`~megastrategy.DistributedOptimizer`.

    Attributes:
        num_steps_done: the number of steps that were completed on this rank.
        reductions: by parameter, how often its gradient was reduced before the last step.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, engine: Engine, findings: Findings | None) -> None:
        self.shard_set = ShardSet(optimizer, engine, findings)
        self.inner, self.engine = optimizer, engine
        self.num_steps_done = 0
        self.reductions: dict[int, int] = {}
        self._later_trials = LaterTrials(optimizer, findings, engine.device) if findings is not None else None
        self._replica_state: OptimizerState | None = None
        if engine.reducer.across is not None:
            self._replica_state = OptimizerState(self)
            engine.reducer.across.model.add_optimizer(self._replica_state)

    def finish_grads(self) -> None:
        """Reduces the remaining gradients, and adopts those that user code wrote into ``.grad``; before any use.

        Without shards ``.grad`` is used as it is, reduced or not, as under torch DDP.
        """
        engine, shard_set = self.engine, self.shard_set
        engine.check_open()
        if shard_set.sharded:
            engine.finish_grad_sync()
        shard_set.add_new_params()
        if shard_set.sharded:
            engine.grad_buffers.adopt_written_grads(shard_set.param_indices())
        else:
            engine.grad_buffers.cut_grads(shard_set.param_indices())
            engine.reducer.tokens.finish_on_this_rank()

    # --- trials of new options ---------------------------------------------------------------------------------------

    @property
    def accepts_arguments(self) -> bool:
        """Whether ``step`` may have other arguments than a closure: not with parts of parameters, where a norm or a
        mean that they switch on would be another one."""
        return self._later_trials is None

    def try_options(self) -> str | None:
        """Tries new groups and options. Returns the reason why shards cannot be stepped with them, or None."""
        if (trials := self._later_trials) is None:
            return None
        return self._learn(trials.of_options(self.engine.known_findings, self.shard_set.layout.main_dtype))

    def _learn(self, findings: Findings | None) -> str | None:
        if findings is None or findings.reason is not None:
            return None if findings is None else findings.reason
        self.shard_set.whole.groups |= findings.whole_groups
        return self.shard_set.states.learn(findings)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As DistributedOptimizer's. Collective if any parameter of the wrapped model was not trained before."""
        # the user's optimizer fills in its defaults and refuses what torch refuses; what we refuse is taken out again
        self.inner.add_param_group(param_group)
        try:
            self.shard_set.extra_params.find()
            check_main_params(self.inner, self.engine)
            if (reason := self.try_options()) is not None:
                raise not_shardable(self.inner, self.engine, reason)
        except ValueError:
            self.inner.param_groups.pop()
            raise
        self.engine.include_trainable()
        self.shard_set.add_new_params()

    # --- the step ----------------------------------------------------------------------------------------------------

    @property
    def has_replicas(self) -> bool:
        """Whether its model trains with replicas."""
        return self._replica_state is not None

    def note_scaler(self) -> None:
        """Reports to the replicas that a scaler decides whether this optimizer steps: the window has ended."""
        across = self.engine.reducer.across
        assert across is not None
        across.replicas.note_scaler()

    def skips_step(self) -> bool:
        """Returns True if there is nothing to step: other replicas have, or fewer than their ``minimum`` are left.

        Raises:
            ValueError: for gradients that this step would reduce: it would come too late to know it.
        """
        across = self.engine.reducer.across
        assert across is not None
        assert self._replica_state is not None
        if self.engine.reducer.has_local_grads:
            raise ValueError(
                "step() with gradients of backwards under no_sync() only: with replicas the last one before a step "
                "is outside of no_sync()"
            )
        self._replica_state.check()
        across.replicas.note_step(self._replica_state.numbers())
        return across.replicas.is_skipped

    def step_params(self, arguments: StepArguments) -> Any:
        """Steps the Parameters themselves, without shards. The user's optimizer may call the closure several times."""
        if (closure := arguments.closure) is None:
            self._begin_step()
        else:

            def evaluate() -> Any:
                loss = closure()
                self._begin_step()
                return loss

            arguments = arguments.with_closure(evaluate)
        result = arguments.call(self.inner.step)
        if not type(self.inner).__module__.startswith("torch.optim."):  # torch's keep no gradients
            copy_kept_grads(self.inner.state, ((param, param.grad) for param in self.shard_set.params()))
        self.engine.emit(EventKind.STEP_END, 0)
        self.num_steps_done += 1
        return result

    def step(self, arguments: StepArguments) -> None:
        """Steps this rank's shards or main params; ``arguments``: of the user's ``step``, without the closure, none for
        shards."""
        self.finish_grads()
        storage = self.shard_set.states.storage
        if not self.shard_set.sharded:
            self._begin_step()
            step_main_params(self.shard_set, arguments)
            self.engine.emit(EventKind.STEP_END, 0)
        else:
            try:
                self._step_watched() if has_user_hooks(self.inner) else self._step_shards()
            finally:
                if storage is not None:
                    storage.end_step(self.engine.collectives)
        # A wrapper of user code may have skipped the step: then none has begun, and none is counted.
        self.num_steps_done = self.shard_set.num_steps_begun

    def _begin_step(self) -> None:
        self.shard_set.num_steps_begun = self.num_steps_done + 1
        self.engine.reducer.stepped_options += self.shard_set.step_options()
        self.shard_set.extra_params.warn_once()
        if not self.shard_set.sharded:
            self.engine.reducer.tokens.finish_on_this_rank()
        self.engine.emit(EventKind.STEP_START, 0)

    def _step_watched(self) -> None:
        """Calls the optimizer once, with the model's Parameters in its groups; see [Note: hooks and wrappers]."""

        def innermost() -> contextlib.AbstractContextManager[None]:
            self.finish_grads()  # again, after the hooks: one may have written a gradient
            return self._in_one_call(self._begin_shards())

        with self.shard_set.calls_allowed(), innermost_call(self.inner, innermost):
            self.inner.step()

    @contextlib.contextmanager
    def _in_one_call(self, begun: _Begun) -> Iterator[None]:
        """Puts all that this rank steps into the groups while this is open, and gathers the new weights afterwards."""
        storage, buckets = self.shard_set.states.storage, sorted(begun.changing, reverse=True)
        whole = [param for bucket in begun.order for param in self._whole_params_ready_in(bucket, begun.with_grads)]
        flat = begun.runs if storage is None else storage.uncut_slices(begun.runs)
        with (
            self._gathering_after_an_error(begun, buckets),
            self._holding([*flat, *whole], with_extra_params=True),
        ):
            yield
        self._end_shards(begun, buckets)

    def _step_shards(self) -> None:
        begun, storage = self._begin_shards(), self.shard_set.states.storage
        if storage is None:
            with self._in_one_call(begun):
                self.inner.step()
        else:
            self._step_slices(begun, storage)

    def _step_slices(self, begun: _Begun, storage: StateStorage) -> None:
        """Calls the optimizer for one slice after the other, so that few of them have state on the device."""
        states, buckets = self.shard_set.states, sorted(begun.changing, reverse=True)
        cuts = {run.group: states.may_join(self.inner.param_groups[run.group]) for run in begun.runs}
        with self._gathering_after_an_error(begun, buckets):
            storage.begin_step(begun.runs, begun.order, cuts)
            for bucket in begun.order:
                for slices in storage.slices(bucket):
                    self._step_runs(slices)
                    del slices  # before the next ones are made
                self._step_runs(self._whole_params_ready_in(bucket, begun.with_grads))
            self._step_runs([], with_extra_params=bool(self.shard_set.extra_params.grads()))
        self._end_shards(begun, buckets)

    @contextlib.contextmanager
    def _gathering_after_an_error(self, begun: _Begun, buckets: Sequence[int]) -> Iterator[None]:
        """Gathers these buckets with the present weights if the optimizer's step fails in the block.

        Hazard: ranks have different parameters, so a step that fails on all ranks fails at a different bucket on each,
        and not at all on a rank that steps none. Code that catches the error continues. Then all ranks must have
        launched the same collectives, and have the same weights, with no gather pending. If a collective failed, the
        other ranks do not reach the next ones, so nothing is launched.
        """
        engine = self.engine
        assert engine.param_buffers is not None, "sharded"
        try:
            yield
        except CollectiveError:
            raise
        except BaseException:
            with contextlib.suppress(CollectiveError):
                for bucket in buckets:
                    self.shard_set.start_gather(bucket, begun.indices)
                engine.param_gather.finish()
            raise

    def _begin_shards(self) -> _Begun:
        engine, shard_set, layout = self.engine, self.shard_set, self.shard_set.layout
        assert engine.param_buffers is not None, "sharded"
        indices, whole = shard_set.param_indices(), shard_set.whole
        whole.check_not_owned(indices)
        whole.check_groups(shard_set.inner, shard_set.sharded_index)
        engine.param_gather.finish()
        engine.param_buffers.recapture()
        changing_params, has_grad = self._changing(indices), engine.grad_buffers.has_grad
        with_grads = {index for index in changing_params if has_grad[index]}
        shards = shard_set.shards
        if whole.indices:
            shards = {index: shard for index, shard in shards.items() if shard.is_cut}
        runs = shard_set.states.join(shards, with_grads)
        changing = {layout.slots[index].bucket for index in changing_params}
        self._begin_step()
        # Buckets are numbered in the order of backward; the next forward needs the last one first.
        order = sorted(changing | {run.bucket for run in runs}, reverse=True)
        if whole.indices:
            whole.send_grads(order, changing_params)
        return _Begun(indices, with_grads, runs, changing, order)

    def _changing(self, indices: Iterable[int]) -> set[int]:
        """Returns the parameters that some rank may step.

        It is the same on all ranks, since it depends only on ``requires_grad`` and on the reductions, not on gradients,
        which user code may write on one rank only. A parameter that was frozen after its gradient was reduced is
        stepped once more, with that gradient.
        """
        params, reductions, stepped = self.engine.params, self.engine.reducer.num_reductions, self.reductions
        return {i for i in indices if params[i].requires_grad or reductions[i] != stepped.get(i, 0)}

    def _end_shards(self, begun: _Begun, to_gather: Iterable[int]) -> None:
        engine = self.engine
        engine.emit(EventKind.STEP_END, 0)
        for bucket in to_gather:
            self.shard_set.start_gather(bucket, begun.indices)
        if engine.config.overlap_param_gather:
            engine.param_gather.wait_on_first_read()
        else:
            engine.param_gather.finish()
        self.shard_set.states.cut_begun(begun.runs)
        # A backward through a graph from before the step must raise, as it does with torch's optimizers.
        torch.autograd.graph.increment_version([engine.params[index] for index in begun.with_grads])
        num_reductions = map(engine.reducer.num_reductions.__getitem__, begun.indices)
        self.reductions.update(zip(begun.indices, num_reductions, strict=True))

    # --- the calls of the user's optimizer ---------------------------------------------------------------------------

    def _whole_params_ready_in(self, bucket: int, with_grads: Set[int]) -> list[WholeParam]:
        """Waits for the gradients of a bucket's whole parameters; returns those that this rank owns and steps now."""
        states, slots, shards = self.shard_set.states, self.shard_set.layout.slots, self.shard_set.shards
        return [
            WholeParam(bucket, states.group_of[index], slots[index].start, shards[index], grad)
            for index, grad in self.shard_set.whole.wait_for_grads(bucket).items()
            if index in with_grads
        ]

    def _step_runs(self, runs: Sequence[Steppable], *, with_extra_params: bool = False) -> None:
        """Calls the optimizer with these in its groups, if there are any. Extra parameters are in one call a step."""
        if runs or with_extra_params:
            with self._holding(runs, with_extra_params=with_extra_params):
                self.inner.step()

    @contextlib.contextmanager
    def _holding(self, runs: Sequence[Steppable], *, with_extra_params: bool) -> Iterator[None]:
        """Puts these into the optimizer's groups, with their gradients, while this is open."""
        stepped = self.shard_set.extra_params.stepped() if with_extra_params else [[] for _ in self.inner.param_groups]
        tensors = [tensor for run in runs for tensor in run.tensors]
        places = [tensor.detach() for tensor in tensors]
        try:
            with self._state_on_device(runs), self._main_params_loaded(runs):
                for run in runs:
                    run.set_grad()
                    stepped[run.group] += run.tensors
                grads = [tensor.grad for tensor in tensors]
                try:
                    with self.shard_set.groups_of(stepped):
                        yield
                finally:  # after an error too: the next step uses the same tensors
                    bring_back(tensors, places)
                copy_kept_grads(self.inner.state, zip(tensors, grads, strict=True))
        finally:
            for tensor in tensors:
                tensor.grad = None

    def _state_on_device(self, runs: Sequence[Steppable]) -> contextlib.AbstractContextManager[None]:
        """Fetches the state of slices while this is open, if a storage has it."""
        if (storage := self.shard_set.states.storage) is None:
            return contextlib.nullcontext()
        return storage.on_device(runs)

    @contextlib.contextmanager
    def _main_params_loaded(self, runs: Sequence[Steppable]) -> Iterator[None]:
        """On entry copies outside changes of weights into main params; on exit writes these back into the weights."""
        with_weights = [(run.main, run.weights) for run in runs if run.weights is not None]
        for main, weights in with_weights:
            take_outside_changes(main, weights, weights.dtype)
        yield
        for main, weights in with_weights:
            weights.copy_(main)
