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
somebody watches its steps, the optimizer is called once, and all gathers follow.

[Note: hooks and wrappers]
A hook on the step, or a wrapper around it, may look at gradients, at weights, at their shapes. On shards a norm, a mean
over rows, or a test of ``dim()`` would be another in silence. So the user's optimizer is called with the model's
Parameters in its groups, as at any other time: before the step each ``.grad`` is a stand-in, which refuses to be
misread and may be written, and after it all weights are whole. Shards are there while the class's own step runs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from ..collectives import Collectives
from ..engine import Engine
from ..errors import CollectiveError, DirectUseError
from ..events import EventKind
from ..module import collect_garbage
from ..shards import FlatRun, ParamShard, begin_step, drop_remainders, end_step
from ..sync import count_zeros, norms_over_owners, total_grad_norm
from ..trials import Findings, LaterTrials, StepArguments
from ..wire import wire_part
from .optimizer_checks import sending_nothing
from .optimizer_shards import OptimizerShards
from .step_memory import bring_back, copy_kept_grads, is_shared
from .step_watchers import InnermostCall, is_watched
from .whole_params import WholeParam

if TYPE_CHECKING:
    from ..shards.state_storage import KeptState, StepPiece

Steppable: TypeAlias = "FlatRun | WholeParam | StepPiece"


@dataclasses.dataclass(frozen=True)
class _Begun:
    """A step that has begun.

    Attributes:
        indices: the optimizer's parameters, by index in the layout.
        with_grads: those of them that this rank steps.
        runs: their shards, neighbours joined, as they are stepped.
        changing: buckets in which any rank steps something; all ranks gather them.
        order: the buckets, in the order in which they are stepped.
    """

    indices: list[int]
    with_grads: Set[int]
    runs: list[FlatRun]
    changing: Set[int]
    order: list[int]


class ShardedStep(OptimizerShards):
    """Steps the optimizer of one :class:`~megastrategy.DistributedOptimizer`."""

    def __init__(self, optimizer: torch.optim.Optimizer, engine: Engine, findings: Findings | None) -> None:
        super().__init__(optimizer, engine, findings)
        self._arguments = StepArguments()  # the arguments of the step that is under way
        self._may_communicate = findings is not None and findings.may_communicate
        self._later_trials = LaterTrials(optimizer, findings, engine.device) if findings is not None else None

    def _watch(self) -> contextlib.AbstractContextManager[None]:
        return sending_nothing(self.inner, self.engine, is_watched=self._may_communicate)

    # --- gradients ---------------------------------------------------------------------------------------------------

    def owned_grads(self) -> dict[int, Tensor]:
        """The reduced gradients of this optimizer's parameters that this rank answers for, by parameter: views, in the
        gradient dtype."""
        if not self.sharded:
            params, grad_of = self.engine.params, self.engine.local_parts.local_grad
            return {i: grad for i in self.param_indices() if (grad := grad_of(params[i])) is not None}
        has_grad = self.engine.grad_buffers.has_grad
        return {i: self._grad_views[i] for i in self.param_indices() if has_grad[i] and i in self._grad_views}

    def owned_weights(self) -> list[Tensor]:
        """The weights of this optimizer's parameters, frozen ones too, that this rank answers for: each element on one
        of the ranks over which norms are joined. Views. Strangers are left out."""
        engine, owned = self.engine, list[Tensor]()
        strangers = {id(param) for param in self.strangers.params}
        for param in itertools.chain.from_iterable(group["params"] for group in self.inner.param_groups):
            index = self.index_by_id.get(id(param))
            if id(param) in strangers or not engine.local_parts.is_counted_here(param):
                continue
            if self.sharded and index is not None and index in self._followed:
                shard = self.shards.get(index)
                owned += [] if shard is None else [shard.main if shard.weights is None else shard.weights]
            elif not self.sharded or engine.shard_collectives.rank == 0:  # every data-parallel rank has all of it
                owned.append(engine.local_parts.local_view(param).detach())
        return owned

    def param_norm(self, norm_type: float) -> Tensor:
        """The norm of :meth:`owned_weights` over all that have some. Collective."""
        engine = self.engine
        engine.check_open()
        self.follow_model()
        if engine.param_buffers is not None:  # new weights may be on their way, or have been given other memory
            engine.param_gather.finish()
            engine.param_buffers.recapture()
        total = total_grad_norm(self.owned_weights(), norm_type, self.owner_collectives, engine.device)
        return self._in_norm_dtype(self._over_model(total, norm_type))

    def num_zeros(self) -> Tensor:
        """The number of zeros in the reduced gradients, without strangers'. Collective."""
        self.finish_grads()
        owners = [] if self.owner_collectives is None else [self.owner_collectives]
        groups = [*owners, *self.engine.local_parts.model_groups]
        return count_zeros([*self._counted(self.owned_grads()).values()], groups, self.engine.device)

    def norm(self, grads: Mapping[int, Tensor], norm_type: float) -> Tensor:
        """The norm over all owners of ``grads``, and of strangers: a scalar in fp32, or fp64 if the model has fp64
        gradients."""
        total = total_grad_norm(
            self.as_listed(self._counted(grads)), norm_type, self.owner_collectives, self.engine.device
        )
        total = self._over_model(total, norm_type)
        if self.strangers.params:
            total = self.strangers.join_norm(total, norm_type, self._ranks_of_norms())
        return self._in_norm_dtype(total)

    def _counted(self, grads: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Those of the gradients that this tensor rank counts."""
        is_counted_here, params = self.engine.local_parts.is_counted_here, self.engine.params
        return {index: grad for index, grad in grads.items() if is_counted_here(params[index])}

    def as_listed(self, grads: Mapping[int, Tensor]) -> list[Tensor]:
        """Gradients by parameter as torch's functions find them in the groups: as often as the parameter is there."""
        times = self.times_listed()
        return [grad for index, grad in grads.items() for _ in range(times[index])]

    def _over_model(self, norm: Tensor, norm_type: float) -> Tensor:
        for ranks in self.engine.local_parts.model_groups:
            norm = norms_over_owners(norm.reshape(1), norm_type, ranks)[0]
        return norm

    def _in_norm_dtype(self, norm: Tensor) -> Tensor:
        in_fp64 = any(spec.grad_dtype == torch.float64 for spec in self.layout.params)
        return norm if in_fp64 else norm.to(torch.float32)

    def _ranks_of_norms(self) -> list[Collectives]:
        """The groups over which a norm has to be one number: those in which what is stepped is divided."""
        dp = [self.engine.collectives] if self.sharded else []
        return [*dp, *self.engine.local_parts.model_groups]

    # --- step --------------------------------------------------------------------------------------------------------

    def finish_grads(self) -> None:
        """Reduces what is not yet, and takes in what the user wrote into ``.grad`` since; comes before gradients' use.

        Without shards ``.grad`` is the truth, local or not, as under torch DDP.
        """
        self.engine.check_open()
        if self.sharded:
            self.engine.finish_grad_sync()
        self.follow_model()
        if self.sharded:
            self.engine.grad_buffers.adopt_written_grads(self.param_indices())
        else:
            self.engine.grad_buffers.cut_grads(self.param_indices())
            self.engine.reducer.tokens.finish_on_this_rank()

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
        params = itertools.chain.from_iterable(group["params"] for group in self.inner.param_groups)
        self._copy_kept((p, grad) for p in params if (grad := p.grad) is not None and is_shared(grad))
        self.engine.emit(EventKind.STEP_END, 0)
        self.num_steps_done += 1
        return result

    def _begin_step(self) -> None:
        self.num_steps_begun = self.num_steps_done + 1
        self.strangers.warn_once()
        if not self.sharded:
            self.engine.reducer.tokens.finish_on_this_rank()
        self.engine.emit(EventKind.STEP_START, 0)

    def try_arguments(self, arguments: StepArguments) -> str | None:
        """Says why shards cannot be stepped with arguments that are new, by trial steps; None if they can."""
        if (trials := self._later_trials) is None:
            return None
        return self._learn(trials.of_arguments(arguments, self.layout.main_dtype))

    def try_options(self) -> str | None:
        """Says why shards cannot be stepped with groups or options that are new, by trial steps; None if they can."""
        if (trials := self._later_trials) is None:
            return None
        return self._learn(trials.of_options(self.engine.known_findings, self.layout.main_dtype))

    def _learn(self, findings: Findings | None) -> str | None:
        if findings is not None and findings.reason is None:
            self._whole_groups |= findings.whole_groups
            self._keeps_state_only = self._keeps_state_only and findings.in_parts
            assert self.element_names is not None, "sharded"
            self.element_names |= findings.element_names
            return self.why_not_in_pieces()
        return findings.reason if findings is not None else None

    def step(self, arguments: StepArguments) -> None:
        """Steps what this rank owns; ``arguments`` are those of the user's ``step``, without the closure."""
        self.finish_grads()
        self._arguments = arguments
        if not self.sharded:
            self._step_main_params()
        else:
            try:
                self._step_watched() if is_watched(self.inner) else self._step_shards()
            finally:
                if self.kept_state is not None:
                    self.kept_state.end_step(self.engine.collectives)
        # A wrapper of user code may have left the step out: then none has begun, and none is counted.
        self.num_steps_done = self.num_steps_begun
        if self._later_trials is not None:
            self._later_trials.end_step()

    def _step_main_params(self) -> None:
        self._begin_step()
        with self.main_params_with_grads() as own:
            self._arguments.call(self.inner.step)
            stepped = [shard for shard in own if shard.main.grad is not None]
            parts = [self._part(shard).detach() for shard in stepped]
            apart = [pair for pair in zip(parts, stepped, strict=True) if pair[0].data_ptr() != pair[1].main.data_ptr()]
            if apart:
                torch._foreach_copy_([part for part, _ in apart], [shard.main.detach() for _, shard in apart])
        # The parts of a tensor-parallel parameter change unseen: a backward through a graph from before must raise.
        torch.autograd.graph.increment_version(
            [param for shard in stepped if self._part(shard) is not (param := self.engine.params[shard.param])]
        )
        self.engine.emit(EventKind.STEP_END, 0)

    @contextlib.contextmanager
    def main_params_with_grads(self) -> Iterator[list[ParamShard]]:
        """The optimizer's groups hold parameters that are whole on every data-parallel rank, main params for 16-bit
        ones and this rank's parts of tensor-parallel ones, with their gradients, while this is open; yields both."""
        engine = self.engine
        every = [self.shards[index] for index in self.param_indices()]
        own = [shard for shard in every if shard.main is not engine.params[shard.param]]
        for indices, buffer in self.main_param_buffers:
            buffer.take_outside_changes([self._part(self.shards[index]).detach() for index in indices])
        try:
            for shard in own:
                part = self._part(shard)
                # given other memory from outside
                if not self.layout.params[shard.param].has_main_param and part.data_ptr() != shard.main.data_ptr():
                    shard.main.data = part.detach()
            self._set_grads(own)
            grads = [shard.main.grad for shard in own]
            with self.groups_of_shards():
                yield own
            self._copy_kept(zip([shard.main for shard in own], grads, strict=True))
        finally:
            for shard in own:
                shard.main.grad = None
            for _, buffer in self.main_param_buffers:
                buffer.bring_back()

    def _set_grads(self, shards: Sequence[ParamShard]) -> None:
        """Gives what is stepped its gradients: views where the dtype is the same, otherwise copies."""
        narrow: list[Tensor] = []
        wide: list[Tensor] = []
        for shard in shards:
            grad = self.engine.local_parts.local_grad(self.engine.params[shard.param])
            if grad is not None and grad.dtype != shard.main.dtype:
                narrow.append(grad)
                wide.append(grad := torch.empty_like(shard.main))
            shard.main.grad = grad
        if narrow:
            torch._foreach_copy_(wide, narrow)

    def _part(self, shard: ParamShard) -> Tensor:
        """This rank's part of the parameter, which the model reads."""
        return self.engine.local_parts.local_view(self.engine.params[shard.param])

    def _step_watched(self) -> None:
        """Calls the optimizer once, with the model's Parameters in its groups for whoever watches; see [Note: hooks and
        wrappers]."""

        def innermost() -> contextlib.AbstractContextManager[None]:
            self.finish_grads()  # again, now that hooks have run: one may have written a gradient
            return self._in_one_call(self._begin_shards())

        with self.passing(), InnermostCall(self.inner, innermost):
            self._arguments.call(self.inner.step)

    @contextlib.contextmanager
    def _in_one_call(self, begun: _Begun) -> Iterator[None]:
        """All that this rank steps is in the groups while this is open; afterwards every rank gets all new weights."""
        buckets = sorted(begun.changing, reverse=True)
        whole = [run for bucket in begun.order for run in self._arrived_whole(bucket, begun.with_grads)]
        flat = begun.runs if self.kept_state is None else self.kept_state.whole_pieces(begun.runs)
        with (
            self._gathering_after_an_error(begun, buckets),
            self._holding([*flat, *whole], with_strangers=True),
        ):
            yield
        self.engine.emit(EventKind.STEP_END, 0)
        for bucket in buckets:
            self.start_gather(bucket, begun.indices)
        self._end_shards(begun)

    def _step_shards(self) -> None:
        engine, begun = self.engine, self._begin_shards()
        has_some = bool(begun.runs) or self._whole.owns_any
        is_early = engine.config.overlap_param_gather is not False
        # In parts also where gathers wait for the end of the step, so as not to have all state in fp32 at once.
        if not ((is_early or self.kept_state is not None) and has_some and self._keeps_state_only):
            with self._in_one_call(begun):
                self._arguments.call(self.inner.step)
            return
        to_gather = [bucket for bucket in begun.order if bucket in begun.changing]
        try:
            if self.kept_state is not None:
                cuts = {run.group: self._may_join(self.inner.param_groups[run.group]) for run in begun.runs}
                self.kept_state.begin_step(begun.runs, begun.order, cuts, self.element_names)
            for bucket in begun.order:
                flat: Sequence[Steppable] = [run for run in begun.runs if run.bucket == bucket]
                whole = self._arrived_whole(bucket, begun.with_grads)
                with self._gathering_after_an_error(begun, to_gather):
                    if self.kept_state is not None:
                        self._step_pieces(self.kept_state, bucket)
                        flat = ()
                    self._step_runs([*flat, *whole])
                if is_early and to_gather and bucket == to_gather[0]:
                    self.start_gather(to_gather.pop(0), begun.indices)
            with self._gathering_after_an_error(begun, to_gather):
                self._step_runs([], with_strangers=bool(self.strangers.grads()))
        except BaseException:  # whoever catches it may read weights: none may be on its way
            with contextlib.suppress(CollectiveError):
                engine.param_gather.finish()
            raise
        engine.emit(EventKind.STEP_END, 0)
        for bucket in to_gather:
            self.start_gather(bucket, begun.indices)
        self._end_shards(begun)

    @contextlib.contextmanager
    def _gathering_after_an_error(self, begun: _Begun, buckets: Sequence[int]) -> Iterator[None]:
        """Gathers these buckets as the optimizer's own step has left them, where that fails in the block.

        Hazard: ranks have other parameters, so a step that fails on all of them fails at another bucket on each, and
        not at all on one that has none. Whoever catches the error goes on; then all ranks have to have launched the
        same collectives, and to have the same weights, none of which is on its way. Where a collective failed the
        others do not come to the next ones, so nothing is launched.
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
                    if (change := engine.param_buffers.change(bucket)) is not None:
                        change.zero_()  # the last step's, and no weight has changed
                    self.start_gather(bucket, begun.indices)
                engine.param_gather.finish()
            raise

    def _begin_shards(self) -> _Begun:
        engine, indices = self.engine, self.param_indices()
        assert engine.param_buffers is not None, "sharded"
        self._whole.check_others_are_not_owned(indices)
        self.check_whole_groups()
        engine.param_gather.finish()
        engine.param_buffers.recapture()
        changing_params = self.changing(indices)
        with_grads = self.with_grads(changing_params)
        runs = self._join_state(with_grads)
        changing = {self.layout.slots[index].bucket for index in changing_params}
        self._begin_step()
        # buckets are numbered as backward meets them, and the next forward needs the last of them first
        order = sorted(changing | {run.bucket for run in runs}, reverse=True)
        if self._whole.indices:
            self._whole.start(order, changing_params)
        return _Begun(indices, with_grads, runs, changing, order)

    def _end_shards(self, begun: _Begun) -> None:
        engine = self.engine
        if engine.config.overlap_param_gather == "forward":
            engine.param_gather.defer()
        else:
            engine.param_gather.finish()
        for run in begun.runs:  # state that the step has made in one piece is seen in chunks from now on
            if run.begins:
                run.split_state(self.inner.state, self.element_names)
                run.join_state(self.inner.state, self.element_names, self._chunk_numel(run))
        # a backward through a graph from before the step must raise, as it does where torch's optimizers step
        torch.autograd.graph.increment_version([engine.params[index] for index in begun.with_grads])
        num_reductions = map(engine.reducer.num_reductions.__getitem__, begun.indices)
        self._reductions.update(zip(begun.indices, num_reductions, strict=True))

    def _arrived_whole(self, bucket: int, with_grads: Set[int]) -> list[WholeParam]:
        """The whole parameters of a bucket that this rank steps now."""
        groups, slots, times = self._groups, self.layout.slots, self._times
        return [
            WholeParam(bucket, groups[index], slots[index].start, self.shards[index], grad, times[index])
            for index, grad in self._whole.arrived(bucket).items()
            if index in with_grads
        ]

    def _step_runs(self, runs: Sequence[Steppable], *, with_strangers: bool = False) -> None:
        """Calls the optimizer with these in its groups, if there are any; with strangers in one call a step."""
        if runs or with_strangers:
            with self._holding(runs, with_strangers=with_strangers):
                self._arguments.call(self.inner.step)

    def _step_pieces(self, kept_state: KeptState, bucket: int) -> None:
        """Calls the optimizer with the pieces of a bucket's shards, one list of them after the other."""
        for pieces in kept_state.pieces(bucket, self.element_names):
            with self._holding(pieces, with_strangers=False):
                self._arguments.call(self.inner.step)
            del pieces  # before the next ones are made

    @contextlib.contextmanager
    def _holding(self, runs: Sequence[Steppable], *, with_strangers: bool) -> Iterator[None]:
        """These are in the optimizer's groups, with their gradients, while this is open."""
        stepped = self.strangers.stepped() if with_strangers else [[] for _ in self.inner.param_groups]
        tensors = [tensor for run in runs for tensor in run.tensors]
        places = [tensor.detach() for tensor in tensors]
        try:
            with self._widened(runs), self._in_place_of_weights(runs):
                for run in runs:
                    run.set_grad()
                    stepped[run.group] += run.tensors * run.times
                grads = [tensor.grad for tensor in tensors]
                try:
                    with self._groups_of(stepped), self._watch():
                        yield
                finally:  # after an error too: the next step is of the same tensors
                    bring_back(tensors, places)
                self._copy_kept(zip(tensors, grads, strict=True))
        finally:
            for tensor in tensors:
                tensor.grad = None

    def _copy_kept(self, stepped: Iterable[tuple[Tensor, Tensor | None]]) -> None:
        for tensor, grad in stepped:
            if grad is not None and (kept := self.inner.state.get(tensor)):
                copy_kept_grads(kept, grad)

    def _widened(self, runs: Sequence[Steppable]) -> contextlib.AbstractContextManager[None]:
        """The state of pieces is fp32, and there, while this is open, where it is kept otherwise."""
        if self.kept_state is None:
            return contextlib.nullcontext()
        return self.kept_state.widened(runs, self.element_names, self.layout)

    @contextlib.contextmanager
    def _in_place_of_weights(self, runs: Sequence[Steppable]) -> Iterator[None]:
        """Gives what is stepped apart from the weights their values while this is open, and changes them at its end."""
        begun: list[tuple[Steppable, Tensor]] = []
        try:
            for run in runs:
                if run.weights is not None:
                    begun.append((run, run.weights))
                    begin_step(run.main, run.weights, keeps_remainder=run.keeps_remainder)
            yield
            while begun:
                run, weights = begun[-1]
                end_step(run.main, weights, self._change_of(run), run.bits)
                begun.pop()
        finally:
            # A step that failed is lost where the weights did not get it: the next one begins with the weights.
            drop_remainders(run for run, _ in begun)

    def _change_of(self, run: Steppable) -> Tensor | None:
        """The place from which the change of a run's weights is sent; None where weights are sent themselves."""
        buffers = self.engine.param_buffers
        assert buffers is not None, "sharded"
        if (change := buffers.change(run.bucket)) is None:
            return None
        start = run.start - self.layout.buckets[run.bucket].start
        return wire_part(change, start, start + run.main.numel())

    def refuse_direct_use(self, *_: Any) -> None:
        """Hook on the user's object: between steps it does not hold what it steps, and its state is of shards.

        After the model was closed, or dropped, it is given back, if it was not yet.
        """
        if self._passing_through or self.is_given_back:
            return
        if not self.engine.is_closed:
            collect_garbage()
            if not self.engine.is_in_use:
                self.engine.close("later")
        if self.engine.is_closed:
            self.give_back(keep_hooks=True)
        else:
            raise DirectUseError(
                "this optimizer steps shards, which it does not hold now: call step(), state_dict() and "
                "load_state_dict() of the DistributedOptimizer around it, on all ranks (self.optimizers() in a "
                "LightningModule, what fabric.setup() or accelerator.prepare() returned), not of the optimizer that "
                "was passed to it"
            )
