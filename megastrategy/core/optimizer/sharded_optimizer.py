"""The step of one optimizer: one call of the user's optimizer, on this rank's runs.

[Note: what is in the optimizer's groups]
Between steps the groups contain the model's Parameters, so that schedulers, callbacks and freezing code see what they
expect. They contain runs only while the class's own step runs; hooks on the step and wrappers around it, which may read
gradients and shapes, see Parameters. The state is keyed by runs always.
"""

from __future__ import annotations

import contextlib
import operator
import weakref
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import Parameter

from .. import devices
from ..data_path import Bucket, Engine
from ..errors import CollectiveError, DirectUseError, LayoutMismatchError, OptimizerNotShardableError
from ..events import EventKind
from ..judge import GroupClasses, NotClassifiedError
from ..layout import EVERY_RANK, BufferLayout, Owners, Spans
from ..states import LocalState, redistribute
from . import full_state, state
from .extra_params import ExtraParams
from .optimizer_checks import check_main_params, not_shardable
from .runs import MainParams, Run, flat, group_members, main_params_of, make_runs, make_unsharded_runs
from .step_calls import Arguments, has_user_hooks, innermost_call, with_closure
from .step_memory import bring_back, copy_kept_grads

COMPARED_OPTIONS = ("lr", "weight_decay", "momentum", "betas")
"""The options that ranks compare after a step: schedules change them."""
_Reduced: TypeAlias = tuple[list[Tensor | None], int, list[Tensor]]
"""The ``.grad`` of all parameters, the update of the groups, and the reduced gradients that belong to both. The list
itself is kept: a later one may have its address."""


class ShardedOptimizer:
    """Steps the user's optimizer for one :class:`~megastrategy.DistributedOptimizer`.

    Attributes:
        inner: the user's optimizer.
        extra_params: its parameters that are not the model's.
        runs: the tensors that it steps; empty until the first step after the plan was made.
        has_made_runs: whether that step was reached; a rank may own no run then.
        pending, pending_layout: state that was loaded, or existed, before there were runs, and its plan.
        has_state: whether the optimizer had state at the wrap, or some was loaded, on any rank.
        loaded: parameters whose state was loaded, and has not been converted by the optimizer's ``load_state_dict``.
        frozen_main_params: loaded main params of parameters that were never trained, on the host, by name.
        last_main_params: after the model was closed, its main params by name, on rank 0.
        num_steps_begun, num_steps_done: steps that began to change weights, and completed ones.
        is_given_back: whether the model was closed and the state is keyed by Parameters again.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, engine: Engine, classes: GroupClasses | None) -> None:
        self.inner = optimizer
        self.engine = engine
        self.extra_params = ExtraParams(optimizer, engine)
        self.extra_params.find()
        self.is_sharded = engine.is_sharded
        self.has_runs = not engine.steps_params_themselves
        self.runs: list[Run] = []
        self.has_made_runs = False
        self.pending: LocalState = {}
        self.pending_layout: BufferLayout | None = None
        self.has_state = False
        self.loaded: set[int] = set()
        self.frozen_main_params: dict[str, Tensor] = {}
        self.last_main_params: dict[str, Tensor] = {}
        self.num_steps_begun = 0
        self.num_steps_done = 0
        self.hooks: list[Any] = []
        self.is_given_back = False
        self._classes = classes
        self._is_called_by_us = False
        self._is_torchs = type(optimizer).__module__.startswith("torch.optim.")
        self._lists: list[list[Parameter]] = []  # of parameters, by group
        self._sizes: list[int] = []
        self._num_updates = 0  # of what is read from the groups
        self._runs_are_of: tuple[BufferLayout, int] | None = None  # the plan, and the update of the groups
        self._group_of: dict[int, int] = {}  # by parameter in the layout
        self._pointers: list[int] = []  # of the memory of ``_params``, without shards
        self._params: list[Parameter] = []  # of the model and of this optimizer
        self._owners: dict[int, int] = {}  # by parameter that is stepped whole
        self._divided: set[int] = set()  # parameters in flat shards, on whichever ranks
        self._buckets: list[Bucket] = []  # with parameters of this optimizer
        self._runs_of: dict[int, list[Run]] = {}  # by bucket
        self._flags: dict[int, list[bool]] = {}  # by bucket, the parameters that the runs' gradients are for
        self._shown: list[Tensor | None] | None = None  # the ``.grad`` of all parameters that they are for, if settled
        self._reduced: dict[bool, _Reduced] = {}  # by ``counted``
        self._touched: list[Parameter] | None = None  # those that the last step has stepped, on whichever ranks
        self._stepped: list[list[Tensor]] = []  # by group
        self._main_params: list[MainParams] = []
        self._offloads = False
        self._casts: list[Run] = []  # those whose gradient has another dtype than their main param
        self._spans: dict[int, Spans] = {}  # by bucket that is gathered in part
        self._check_whole_groups()
        self._check_owners_agree()
        engine.optimizers.append(weakref.ref(self))
        if self.has_runs and optimizer.state:
            self._update_groups()
            state.put(self, state.taken_from(self))

    @property
    def needs_ranks(self) -> bool:
        """Whether this rank has only a part of the state."""
        return self.is_sharded and not self.is_given_back

    def forget_pending_state(self) -> None:
        """Drops what was loaded and waits for the plan, except main params, which are weights."""
        key = state.MAIN_PARAM
        self.pending = {index: {key: values[key]} for index, values in self.pending.items() if key in values}

    def params(self) -> list[Parameter]:
        """Returns all parameters in the groups."""
        return [param for group in self.inner.param_groups for param in group["params"]]

    def model_params(self) -> list[Parameter]:
        """Returns the model's trainable parameters in the groups."""
        self._update_groups()
        return self._params

    def names_by_id(self) -> dict[int, str]:
        """Returns names by ``id``: of all the model's parameters, frozen ones too, and of extra parameters."""
        return {id(param): name for name, param in self.engine.named_params().items()} | self.extra_params.names_by_id()

    def num_kept(self) -> dict[int, int] | None:
        """Returns how many numbers an element the state keeps, by parameter; None if that is not known."""
        if self._classes is None or self._classes.element_names is None:
            return None
        self._update_groups()
        specs = self.engine.layout.params
        return {i: self._classes.num_kept(group, len(specs[i].shape)) for i, group in self._group_of.items()}

    def neighbour_groups(self) -> dict[int, Hashable]:
        """Returns a key by parameter: neighbours with the same key are stepped as one tensor."""
        self._update_groups()
        joined = self._joined_groups()
        number = next(number for number, ref in enumerate(self.engine.optimizers) if ref() is self)
        return {i: (number, group, None if group in joined else i) for i, group in self._group_of.items()}

    def owners(self) -> dict[int, int]:
        """Returns the rank that steps each whole parameter, or :data:`EVERY_RANK`; before there is a plan, as it would
        be without another order."""
        self._update_groups()
        if not self.is_sharded or self._classes is None:
            return {}
        whole = {index for index, group in self._group_of.items() if group in self._whole_groups}
        replicated = {i for i in whole if self._group_of[i] in self._classes.replicated_groups}
        owners = {**self._owners, **dict.fromkeys(replicated, EVERY_RANK)}
        return dict(Owners(self.engine.layout, owners).extended_by(sorted(whole - owners.keys())).rank_of)

    def step_options(self) -> list[float]:
        """Returns the numbers with which the optimizer steps and which schedules change, in the order of its groups."""
        options = [group.get(name) for group in self.inner.param_groups for name in COMPARED_OPTIONS]
        return [number for option in options for number in _numbers(option)]

    # --- how groups are divided ---------------------------------------------------------------------------------------

    @property
    def element_names(self) -> frozenset[str] | None:
        """The names of element-wise state; None if they are not known."""
        return None if self._classes is None else self._classes.element_names

    @property
    def _whole_groups(self) -> set[int]:
        return set() if self._classes is None else self._classes.whole_groups

    def check_options(self) -> None:
        """Raises OptimizerNotShardableError if shards cannot be stepped with the present groups and options."""
        try:
            if self._classes is not None:
                self._classes.update()
        except NotClassifiedError as reason:
            raise not_shardable(self.inner, self.engine, str(reason)) from None

    def _check_whole_groups(self) -> None:
        """Raises OptimizerNotShardableError for a parameter that is stepped whole, and is divided over ranks."""
        engine = self.engine
        for number in self._whole_groups:
            for param in self.inner.param_groups[number]["params"]:
                index = engine.index_by_id.get(id(param))
                if index is not None and engine.local_parts.is_cut(param):
                    raise OptimizerNotShardableError(
                        f"{type(self.inner).__name__} updates parameters as wholes, and parameter "
                        f"{engine.layout.params[index].name!r} is {engine.model_parallel.kind_of_parts}: each rank has "
                        "a part of it, and none all. Give such parameters a group or an optimizer that updates every "
                        "element by itself (AdamW, SGD), or leave the parameter undivided"
                    )

    def _check_not_divided(self) -> None:
        """Raises OptimizerNotShardableError if a parameter with flat shards was put into a group of whole ones."""
        for index in sorted(self._divided):
            number = self._group_of.get(index)
            if number in self._whole_groups:
                raise OptimizerNotShardableError(
                    f"parameter {self.engine.layout.params[index].name!r} is divided into flat shards, and is in "
                    f"group {number} now, which {type(self.inner).__name__} steps whole: put it there before the "
                    "optimizer is wrapped"
                )

    def _check_not_whole_elsewhere(self) -> None:
        """Raises ValueError if another optimizer steps a parameter whole: this one's shards would not be gathered."""
        self._update_groups()
        flat = self._group_of.keys() - self.owners().keys()
        for other in (ref() for ref in self.engine.optimizers):
            taken = sorted(flat & other.owners().keys()) if other is not None and other is not self else []
            if taken:
                raise ValueError(
                    f"parameter {self.engine.layout.params[taken[0]].name!r} is in two optimizers: one steps it "
                    "whole, and this one as flat shards. Leave it in one of them"
                )

    def _check_owners_agree(self) -> None:
        """Raises LayoutMismatchError if the ranks have other groups of whole parameters. Collective."""
        if not (self.is_sharded and self._whole_groups):
            return
        of_ranks = self.engine.collectives.all_gather_objects(sorted(self.owners().items()))
        if any(owners != of_ranks[0] for owners in of_ranks):
            raise LayoutMismatchError(
                "ranks disagree on which parameters are stepped whole: their optimizers have different groups or "
                f"options. The number of these parameters by rank: {[len(owners) for owners in of_ranks]}"
            )

    # --- runs ---------------------------------------------------------------------------------------------------------

    def _update_groups(self) -> None:
        index_by_id = self.engine.index_by_id
        lists = [group["params"] for group in self.inner.param_groups]
        sizes = [len(index_by_id), *map(len, lists)]
        if sizes == self._sizes and all(map(operator.is_, lists, self._lists)):
            return
        self._lists = lists  # referenced, so that no later list has the address of one of them
        self._sizes = sizes
        self._num_updates += 1
        self._group_of = {}
        self._params = []
        for number, group in enumerate(self.inner.param_groups):
            for param in group["params"]:
                index = index_by_id.get(id(param))
                if index is not None:
                    self._group_of[index] = number
                    self._params.append(param)

    def prepare(self) -> None:
        """Makes the runs, as soon as there is a plan, and again when groups or parameters have changed."""
        memory = self.engine.reducer.memory
        if memory is None or not self.has_runs or self.is_given_back or self.engine.is_closed:
            return
        self._update_groups()
        if self._runs_are_of == (memory.layout, self._num_updates):
            return
        self._check_not_whole_elsewhere()
        self._check_not_divided()
        named = state.local_state(self)
        if not self.has_made_runs and named:
            named = state.moved(self, named, self.pending_layout or memory.layout)
            self.pending = {}
        for run in self.runs:
            self.inner.state.pop(run.main, None)
        named |= state.taken_from(self)  # of parameters that were frozen
        reducer = self.engine.reducer
        if self.is_sharded:
            self._owners = self.owners()
            self._divided = self._group_of.keys() - self._owners.keys()
            rank = self.engine.collectives.rank
            runs = make_runs(memory, reducer.buckets, rank, self._group_of, self._owners, self._joined_groups())
            self.engine.gather.connect(memory, memory.layout.buckets, self.engine.params, self.engine.module)
        else:
            parts = {index: self.engine.local_parts.local_view(self.engine.params[index]) for index in self._group_of}
            runs = make_unsharded_runs(memory, reducer.buckets, self._group_of, parts)
        self._runs_are_of = (memory.layout, self._num_updates)
        self._buckets = [
            bucket for bucket in reducer.buckets if not self._group_of.keys().isdisjoint(bucket.plan.params)
        ]
        self._spans = {}
        for bucket in self._buckets:
            if not self._owners.keys().isdisjoint(bucket.plan.params):
                mine = self._group_of.keys() & set(bucket.plan.params)
                self._spans[bucket.plan.index] = Owners(memory.layout, self._owners).stepped_spans(bucket.plan, mine)
        self.set_runs(runs)
        state.put_local(self, named)
        self._pointers = self._pointers_now() if not self.is_sharded else []

    def _joined_groups(self) -> set[int]:
        """Returns the groups in which neighbours are stepped as one tensor. A fused kernel of the host rounds the last
        elements of each tensor differently."""
        is_on_host = devices.is_on_host(self.engine.device) or self.engine.layout.offloads_state
        groups = enumerate(self.inner.param_groups)
        may_join = self._classes is not None
        return {n for n, group in groups if may_join and not (is_on_host and group.get("fused"))}

    def set_runs(self, runs: Sequence[Run]) -> None:
        """Steps these from now on."""
        self.runs = list(runs)
        self.has_made_runs = True
        self._runs_of = {bucket.plan.index: [] for bucket in self._buckets}
        for run in self.runs:
            self._runs_of[run.bucket].append(run)
        # In the order of the groups, not of the buckets: an update that looks at several tensors may add them up.
        places = {index: place for place, index in enumerate(self._group_of)}
        in_order = sorted(self.runs, key=lambda run: places[run.members[0].param])
        self._stepped = [[run.main for run in in_order if run.group == n] for n in range(len(self.inner.param_groups))]
        self._main_params = main_params_of(self.runs)
        self._casts = [run for run in runs if run.copies_grad]
        self._offloads = any(run.host_grad is not None for run in runs)
        self._flags = {}
        self._shown = None
        self._touched = None

    # --- the step -----------------------------------------------------------------------------------------------------

    def finish_grads(self) -> None:
        """Reduces the remaining gradients, and adopts those that user code wrote into ``.grad``; before any use.

        Without shards ``.grad`` is used as it is, reduced or not, as under torch DDP.
        """
        if self.is_sharded:
            self.engine.finish_grads()
            return
        self.engine.check_open()
        reducer = self.engine.reducer
        self.engine.backwards.recover()
        if self.has_runs:
            if self.engine.local_parts.has_parts:
                self._add_up_sums()
            self.engine.backwards.make_plan()
            for bucket in () if reducer.is_settled else reducer.buckets:
                if bucket.has_written():
                    bucket.adopt_local()

    def _add_up_sums(self) -> None:
        """Adds up gradients that are sums over tensor ranks, and were not reduced. Collective over tensor ranks."""
        parts = self.engine.local_parts
        with_grad = [(param, param.grad) for param in self.model_params()]
        sums = [param for param, grad in with_grad if grad is not None and not parts.is_cut_alike(param, grad)]
        for param, part in zip(sums, parts.local_grads(sums), strict=True):
            assert part is not None, "it has a gradient"
            param.grad = parts.as_grad(param, part)

    def step_params(self, arguments: Arguments, closure: Callable[[], Any] | None = None) -> Any:
        """Steps the Parameters themselves, without runs. The user's optimizer may call the closure several times."""
        if closure is None:
            self._begin_step()
        else:

            def evaluate() -> Any:
                loss = closure()
                self._begin_step()
                return loss

            arguments = with_closure(evaluate, arguments)
        args, kwargs = arguments
        result = self.inner.step(*args, **kwargs)
        if not self._is_torchs:
            copy_kept_grads(self.inner.state, ((param, param.grad) for param in self.params()))
        self._end_step()
        return result

    def step(self, arguments: Arguments) -> None:
        """Steps this rank's runs; ``arguments``: of the user's ``step``, without the closure."""
        self.finish_grads()
        if self.engine.reducer.drops_step:
            return
        args, kwargs = arguments
        if has_user_hooks(self.inner):
            with self.calls_allowed(), innermost_call(self.inner, self._watched_step):
                self.inner.step(*args, **kwargs)
        else:
            with self._runs_in_groups(), self.calls_allowed():
                self.inner.step(*args, **kwargs)

    def _watched_step(self) -> contextlib.AbstractContextManager[None]:
        self.finish_grads()  # again, after the hooks: one may have written a gradient
        return self._runs_in_groups()

    def _begin_step(self) -> None:
        self.num_steps_begun = self.num_steps_done + 1
        reducer = self.engine.reducer
        reducer.stepped_options += self.step_options()
        reducer.num_steps += 1
        if not self.is_sharded and reducer.tokens.is_used:
            reducer.tokens.finish_on_this_rank(
                reducer.buckets, f"rank {self.engine.collectives.rank}", reducer.num_steps
            )
        self.extra_params.warn_once()
        self.engine.emit(EventKind.STEP_START, 0)

    def _end_step(self) -> None:
        self.engine.emit(EventKind.STEP_END, 0)
        self.num_steps_done = self.num_steps_begun

    @contextlib.contextmanager
    def _runs_in_groups(self) -> Iterator[None]:
        """Puts the runs into the groups, with their gradients, while this is open, and gathers the new weights.

        Hazard: ranks have different runs, so a step that fails on all ranks fails at a different one on each, and not
        at all on a rank that has none. Code that catches the error continues. Then all ranks must have launched the
        same gathers. If a collective failed, the other ranks do not reach the next ones, so nothing is launched.
        """
        self._wait_for_weights()
        self.prepare()
        if self._offloads:  # the host waits for gradients next, and a rank may be gone
            self.engine.collectives.wait_for_device(self.engine.device, "a collective before the optimizer's step")
        self._set_grads()
        for main_params in self._main_params:
            main_params.take_outside_changes()
        self._begin_step()
        try:
            with self._memory_kept(), self.in_groups(self._with_extra_params()):
                yield
        except CollectiveError:
            raise
        except BaseException:
            with contextlib.suppress(CollectiveError):
                self._end_runs()
                self.engine.gather.finish()
            raise
        self._end_step()
        self._end_runs()

    @contextlib.contextmanager
    def _memory_kept(self) -> Iterator[None]:
        """Guards a step of a class that is not torch's: it may replace memory or keep gradients."""
        if self._is_torchs:
            yield
            return
        mains = [run.main for run in self.runs]
        grads = [main.grad for main in mains]
        memory = [main.detach() for main in mains]
        try:
            yield
        finally:  # after an error too: the next step uses the same tensors
            bring_back(mains, memory)
        copy_kept_grads(self.inner.state, zip(mains, grads, strict=True))

    def _wait_for_weights(self) -> None:
        self.engine.gather.finish()
        memory = self.engine.reducer.memory
        if memory is not None and memory.weights is not None:
            memory.weights.recapture()
        elif self.runs and self._pointers_now() != self._pointers:
            self._runs_are_of = None  # user code gave parameters other memory, and new runs are made

    def _pointers_now(self) -> list[int]:
        return list(map(Tensor.data_ptr, map(self.engine.local_parts.local_view, self._params)))

    def _end_runs(self) -> None:
        for main_params in self._main_params:
            main_params.round()
        if self.is_sharded:
            # All of them: a gradient that user code has written on one rank must not decide what all ranks send.
            # The first layers, which the next forward needs first, are in the last buckets.
            self.engine.gather.start([bucket.plan.index for bucket in self._buckets[::-1]], self._spans)
            self.engine.gather.finish_step()
        # A backward through a graph from before the step must raise, as it does with torch's optimizers.
        if self._touched is None:
            self._touched = [
                param
                for bucket in self._buckets
                for param, flag in zip(bucket.params, self._flags[bucket.plan.index], strict=True)
                if flag and self.engine.index_by_id[id(param)] in self._group_of
            ]
        torch.autograd.graph.increment_version(self._touched)

    def _with_extra_params(self) -> list[list[Tensor]]:
        if not self.extra_params.params:
            return self._stepped
        extra = self.extra_params.stepped()
        stepped = self._stepped or [[] for _ in extra]
        return [[*tensors, *others] for tensors, others in zip(stepped, extra, strict=True)]

    @contextlib.contextmanager
    def in_groups(self, stepped: Sequence[list[Tensor]]) -> Iterator[None]:
        """Puts these tensors into the groups while this is open."""
        groups = self.inner.param_groups
        params = [group["params"] for group in groups]
        for group, tensors in zip(groups, stepped or [[] for _ in groups], strict=True):
            group["params"] = tensors
        try:
            yield
        finally:
            # Read again, since load_state_dict makes new group dictionaries.
            for group, before in zip(self.inner.param_groups, params, strict=True):
                group["params"] = before

    # --- other methods of the user's optimizer ------------------------------------------------------------------------

    @contextlib.contextmanager
    def state_in_place(self) -> Iterator[None]:
        """Puts the tensors that have state into the groups while this is open: runs, or the Parameters before there is
        a plan and a state."""
        if self.pending:
            self.engine.backwards.make_plan()
        if self.engine.reducer.memory is None:
            try:
                with self.calls_allowed():
                    yield
            finally:
                state.put(self, state.taken_from(self))
            return
        self._wait_for_weights()
        self.prepare()
        with self._all_in_groups():
            yield

    @contextlib.contextmanager
    def _all_in_groups(self) -> Iterator[None]:
        for main_params in self._main_params:
            main_params.take_outside_changes()
        stepped = self._stepped or [[] for _ in self.inner.param_groups]
        extra = self.extra_params.by_group()
        with self.in_groups([[*runs, *others] for runs, others in zip(stepped, extra, strict=True)]):
            with self.calls_allowed():
                yield
        for main_params in self._main_params:
            main_params.round()

    @contextlib.contextmanager
    def all_in_groups(self) -> Iterator[None]:
        """Puts what is stepped into the place of each Parameter in the groups, where every rank steps all of them."""
        mains = {id(self.engine.params[run.members[0].param]): run.main for run in self.runs}
        groups = [[mains.get(id(param), param) for param in group["params"]] for group in self.inner.param_groups]
        with self.in_groups(groups), self.calls_allowed():
            yield

    @contextlib.contextmanager
    def runs_changed(self) -> Iterator[None]:
        """Gathers the weights of all runs, which are changed while this is open. Collective."""
        self._wait_for_weights()
        self.prepare()
        yield
        for main_params in self._main_params:
            main_params.round()
        if self.is_sharded:
            self.gather_all()

    def gather_all(self) -> None:
        """Gathers all weights after they were changed without a step. Collective."""
        gather = self.engine.gather
        gather.start([bucket.plan.index for bucket in self._buckets][::-1], self._spans)
        gather.finish()
        torch.autograd.graph.increment_version(self._params)  # a backward through an earlier graph must raise

    @contextlib.contextmanager
    def grads_in_place(self) -> Iterator[None]:
        """Puts main params with their gradients into the groups while this is open, where every rank has all."""
        self.finish_grads()
        self._wait_for_weights()
        self.prepare()
        self._set_grads()
        with_grad = [run for run in self.runs if run.main.grad is not None]
        with self._all_in_groups(), self._memory_kept():
            before = [(run, run.weights, run.weights.clone()) for run in self.runs if run.weights is not None]
            yield
        params = self.engine.params
        # Only changed weights: otherwise graphs that are still right would be invalid.
        changed = [run for run, weights, old in before if not torch.equal(weights, old)]
        torch.autograd.graph.increment_version([params[run.members[0].param] for run in changed])
        for run in with_grad:
            if run.main.grad is None:  # the method dropped it, which means the parameter's
                params[run.members[0].param].grad = None
            elif run.main.grad is not run.grad:
                grad = run.grad
                if grad is None:  # autograd's own
                    grad = self.engine.local_parts.local_grad(params[run.members[0].param])
                assert grad is not None, "it has a gradient"
                grad.copy_(run.main.grad)
        self._flags = {}
        self._shown = None

    # --- gradients ----------------------------------------------------------------------------------------------------

    def _set_grads(self) -> None:
        """Sets the runs' gradients: nothing where the same parameters have one as in the last step."""
        reducer = self.engine.reducer
        if not (self._shown is reducer.shown and reducer.is_settled):
            self._set_changed_grads()
            self._shown = reducer.shown if reducer.is_settled else None
        if self._casts:
            self._cast_grads()
        if self._owners:
            self._send_to_owners()
        if not self.is_sharded:
            self._take_own_grads()

    def _cast_grads(self) -> None:
        grads, reduced = [], []
        for run in self._casts:
            if run.main.grad is not None and run.grad is not None:
                grads.append(run.main.grad)
                reduced.append(run.grad)
        if grads:  # torch refuses an empty list
            torch._foreach_copy_(grads, reduced)

    def _set_changed_grads(self) -> None:
        for bucket in self._buckets:
            number = bucket.plan.index
            flags = bucket.grad_flags()
            if flags != self._flags.get(number):
                self._select(number, dict(zip(bucket.plan.params, flags, strict=True)))
                self._flags[number] = flags
                self._touched = None

    def _take_own_grads(self) -> None:
        """Takes gradients that are autograd's own; they are not in a bucket's memory."""
        for run in self.runs:
            if run.grad is None:
                grad = self.engine.local_parts.local_grad(self.engine.params[run.members[0].param])
                run.main.grad = None if grad is None else grad.to(run.main.dtype)

    def _select(self, bucket: int, has_grad: Mapping[int, bool]) -> None:
        """Sets or drops the gradients of a bucket's runs, and divides a run if only some of its members have one."""
        divided: dict[Run, list[Run]] = {}
        for run in self._runs_of[bucket]:
            parts = group_members(run.members, lambda member: has_grad[member.param])
            if len(parts) > 1:
                divided[run] = run.split(parts, self.inner.state)
        if divided:
            flags = self._flags
            self.set_runs([part for run in self.runs for part in divided.get(run, [run])])
            self._flags = flags
        for run in self._runs_of[bucket]:
            if not has_grad[run.members[0].param]:
                run.main.grad = None
            else:
                run.main.grad = run.grad_memory()

    def _send_to_owners(self) -> None:
        """Sends the gradients of whole parameters to the ranks that step them. Collective."""
        memory = self.engine.reducer.memory
        assert memory is not None
        layout = memory.layout
        ranks = self.engine.shard_collectives
        for number, buffer in enumerate(layout.buffers):
            params = [index for index in self._owners if layout.slots[index].buffer == number]
            params.sort(key=lambda index: layout.slots[index].start)
            held: list[list[tuple[int, int]]] = [[] for _ in range(ranks.size)]
            wanted: list[list[tuple[int, int]]] = [[] for _ in range(ranks.size)]
            for param in params:
                for rank, part in layout.holders(param):
                    held[rank].append((part.start, part.end))
                slot = layout.slots[param]
                owner = self._owners[param]
                if slot.start < slot.end:
                    for of_rank in wanted if owner == EVERY_RANK else [wanted[owner]]:
                        of_rank.append((slot.start, slot.end))
            values = redistribute(self._read_grad(number), held, wanted, ranks, buffer.sum_dtype, memory.device)
            runs = {run.start: run for run in self.runs if run.is_whole and self._buffer_of(run) == number}
            for (start, _), value in zip(wanted[ranks.rank], values, strict=True):
                grad = runs[start].main.grad
                if grad is not None:
                    flat(grad).copy_(value)

    def _buffer_of(self, run: Run) -> int:
        return self.engine.layout.buckets[run.bucket].buffer

    def _read_grad(self, buffer: int) -> Any:
        layout = self.engine.layout
        rank = self.engine.collectives.rank
        shards = {layout.shard_range(b.plan, rank): b.shard for b in self._buckets if b.plan.buffer == buffer}

        def read(start: int, end: int) -> Tensor:
            for (first, last), shard in shards.items():
                if first <= start and end <= last:
                    return shard[start - first : end - first]
            raise AssertionError("a held range is in one shard")

        return read

    def is_saved_here(self, run: Run) -> bool:
        """Whether this rank saves the state of a run: of one that every rank has, the first."""
        if self._owners.get(run.members[0].param) != EVERY_RANK:
            return True
        domain = self.engine.layout.buckets[run.bucket].domain
        return domain.shard_of(self.engine.collectives.rank) == 0

    def group_of(self, index: int) -> dict[str, Any]:
        """Returns the group of a parameter of the layout."""
        self._update_groups()
        return self.inner.param_groups[self._group_of[index]]

    def is_flat(self, index: int) -> bool:
        """Whether each rank steps a part of the parameter."""
        self._update_groups()
        return self.is_sharded and index in self._group_of and self._group_of[index] not in self._whole_groups

    def reduced_grads(self, *, counted: bool = False) -> list[Tensor]:
        """Returns the reduced gradients that this rank owns: a whole shard where all of it is this optimizer's.

        ``counted``: only those that this rank counts in sums over all ranks of the model.
        """
        self._update_groups()
        if not self.is_sharded:
            return list(self.owned_grads(counted=counted).values())
        reducer = self.engine.reducer
        is_settled = reducer.is_settled
        if is_settled and counted in self._reduced:
            shown, num_updates, grads = self._reduced[counted]
            if shown is reducer.shown and num_updates == self._num_updates:
                return grads
        grads = self.engine.reduced_grads(self._counted() if counted else self._group_of.keys())
        if is_settled:
            self._reduced[counted] = (reducer.shown, self._num_updates, grads)
        return grads

    def _counted(self) -> Collection[int]:
        """Returns the optimizer's parameters whose elements sums over all ranks of the model include on this rank."""
        engine = self.engine
        if not engine.model_parallel.groups:
            return self._group_of.keys()
        return {index for index in self._group_of if engine.model_parallel.is_counted_here(engine.params[index])}

    def owned_grads(self, *, counted: bool = False) -> dict[int, Tensor]:
        """Returns the reduced gradients of the optimizer's parameters that this rank owns, by parameter: views, in the
        gradient dtype. ``counted``: see :meth:`reduced_grads`."""
        self._update_groups()
        engine = self.engine
        members = self._counted() if counted else self._group_of.keys()
        if not self.is_sharded:
            # Of all: the local gradient of a sum over tensor ranks is collective over them.
            grads = {index: engine.local_parts.local_grad(engine.params[index]) for index in self._group_of}
            return {index: grad for index, grad in grads.items() if grad is not None and index in members}
        owned = {}
        for bucket in engine.reducer.buckets:
            for place, index in enumerate(bucket.plan.params):
                if index in members and bucket.params[place].grad is not None:
                    part = bucket.owned(place)
                    if part is not None:
                        owned[index] = part[1]
        return owned

    # --- the user's optimizer between steps ---------------------------------------------------------------------------

    @contextlib.contextmanager
    def calls_allowed(self) -> Iterator[None]:
        """Allows calls of the user's optimizer while this is open: this package makes them."""
        before = self._is_called_by_us
        self._is_called_by_us = True
        try:
            yield
        finally:
            self._is_called_by_us = before

    def refuse_direct_use(self, *_: Any) -> None:
        """Hook on the user's optimizer, which has no runs in its groups between steps: raises DirectUseError.

        If the model was closed or dropped, gives the optimizer back instead.
        """
        if self._is_called_by_us or self.is_given_back:
            return
        if not self.engine.is_in_use:
            self.engine.close()
        if self.engine.is_closed:
            self.give_back(keep_hooks=True)
        else:
            raise DirectUseError(
                "this optimizer steps shards, which it does not hold now: call step(), state_dict() and "
                "load_state_dict() of the DistributedOptimizer around it, on all ranks (self.optimizers() in a "
                "LightningModule, what fabric.setup() or accelerator.prepare() returned), not of the optimizer that "
                "was passed to it"
            )

    def give_back(self, *, keep_hooks: bool = False) -> None:
        """Makes the optimizer a plain one, with all of its state on every rank. Collective if it is sharded."""
        if self.has_runs:
            full_state.give_back(self)
            self.is_given_back = True
            self.runs = []
            self.engine.release_groups()
        if not keep_hooks:
            for hook in self.hooks:
                hook.remove()
            self.hooks = []
            self.inner.__dict__.pop("__getstate__", None)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As DistributedOptimizer's. Collective if any parameter of the wrapped model was not trained before."""
        # The user's optimizer fills in its defaults and refuses what torch refuses; what we refuse is taken out again.
        self.inner.add_param_group(param_group)
        try:
            self.extra_params.find()
            check_main_params(self.inner, self.engine)
            self.check_options()
            self._check_whole_groups()
        except ValueError:
            self.inner.param_groups.pop()
            raise
        self.engine.include_trainable()
        self._check_owners_agree()
        self.prepare()


def _numbers(option: Any) -> list[float]:
    """Returns the numbers of an option. A tensor on an accelerator has none: reading it would wait for the device."""
    if isinstance(option, Tensor):
        return [float(option)] if option.device.type == "cpu" and option.numel() == 1 else []
    if isinstance(option, tuple | list):
        return [number for entry in option for number in _numbers(entry)]
    return [float(option)] if isinstance(option, int | float) else []
