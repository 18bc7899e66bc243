"""Keeps what the user's optimizer steps on this rank, shards and whole parameters, and the state of both.

Between steps each shard has its own state, as checkpoints want it; in a step neighbours are one tensor
(flat_run's [Note: runs]). When the layout changes, what was cut moves with it; a whole parameter stays at its owner.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Parameter

from ..buffers import ParamBuffers
from ..collectives import Collectives
from ..engine import Contents, Engine, PerElement, ShardHolder
from ..errors import OptimizerNotShardableError
from ..layout import BufferLayout
from ..module import is_used_elsewhere
from ..shards import (
    CHUNK_NUMEL,
    MAIN_PARAM,
    STATE,
    FlatRun,
    MainParamWhenRead,
    OwnParts,
    ParamShard,
    Piece,
    as_saved,
    build_runs,
    cut_shards,
    load_main_params,
    main_params_to_come,
    own_state,
    shard_state,
)
from ..trials import Findings, is_per_element
from .extra_params import Strangers
from .given_back import give_back, remove
from .main_param_buffer import MainParamBuffer
from .whole_params import WholeParams

if TYPE_CHECKING:  # only those import it who ask for it
    from ..shards.state_storage import KeptState


class OptimizerShards(ShardHolder):
    """An optimizer, its model, and what this rank steps between them. ``findings`` are there if it is sharded.

    Attributes:
        element_names: of the state that has one number for each element, as far as trials and steps have shown; None if
            nothing is sharded.
        main_params_to_come: loaded ones, whole, of parameters that have no shards yet, by the name in the file.
        kept_state: keeps state or main params in 16 bits, or state on the host; None where they are as they are
            stepped.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, engine: Engine, findings: Findings | None) -> None:
        self.inner = optimizer
        self.engine = engine
        self.strangers = Strangers(optimizer, engine)
        self.check_groups()
        engine.shard_holders.append(weakref.ref(self))
        self.sharded = self.layout.num_shards > 1
        self.shards: dict[int, ParamShard] = {}
        self.main_param_buffers: list[tuple[tuple[int, ...], MainParamBuffer]] = []  # with their parameters
        self._followed: set[int] = set()  # the parameters that were given their shards, or have none on this rank
        self.main_params_to_come: dict[str, Tensor] = {}
        self._passing_through = False
        self._grad_views: dict[int, Tensor] = {}
        self.num_steps_begun = self.num_steps_done = 0
        self._reductions: dict[int, int] = {}  # by parameter, how often its gradient was reduced before the last step
        self._runs: list[FlatRun] = []
        self._members: list[list[int]] = []  # by group, the parameters of which there are runs
        self._groups: dict[int, int] = {}  # by parameter, its group's number
        self._times = Counter[int]()  # by parameter, how often it is in its group
        self._is_joined = False  # whether state is that of the runs
        self._is_on_cpu = engine.device.type == "cpu"
        self.element_names = set(findings.element_names) if findings is not None else None
        self._keeps_state_only = findings is not None and findings.in_parts
        self.kept_state = self._kept_state()
        self._whole_groups = set(findings.whole_groups) if findings is not None else set[int]()
        self._whole = WholeParams(engine)
        self._num_whole_tensors = findings.whole_tensors if findings is not None else {}
        self._staying: dict[int, tuple[ParamShard, Any]] = {}  # while the layout changes, what stays at this owner
        self.hooks: list[Any] = []  # handles of ours on the user's optimizer, which the face registers
        self.is_given_back = False  # the state is by Parameter again, and the optimizer one of torch's
        self.follow_model()

    def _kept_state(self) -> KeptState | None:
        if not self.layout.steps_in_slices:
            return None
        if (reason := self.why_not_in_pieces()) is not None:
            raise OptimizerNotShardableError(reason)
        from ..shards.state_storage import KeptState

        layout = self.layout
        return KeptState(self.inner, layout.state_dtype, self.engine.device, offloads=layout.offloads_state)

    def why_not_in_pieces(self) -> str | None:
        """Why shards may not be stepped in pieces, in words; None if they may, or nobody asked."""
        if not self.layout.steps_in_slices or self._keeps_state_only:
            return None
        return (
            f"{type(self.inner).__name__} keeps more than state of tensors (a count of its calls, say), and with "
            "optimizer_state_dtype, store_param_remainders or offload_optimizer_states it is called for one piece of "
            "the shards after the other. Leave these options out"
        )

    @property
    def needs_ranks(self) -> bool:  # type: ignore[override]
        return self.sharded

    @property
    def is_used_elsewhere(self) -> bool:  # type: ignore[override]
        return is_used_elsewhere(self.inner)

    @property
    def has_state_of_main_params(self) -> bool:  # type: ignore[override]
        return any(map(self.layout.has_separate_main, self.param_indices()))

    @property
    def layout(self) -> BufferLayout:
        """The model's; it grows when parameters join."""
        return self.engine.layout

    @property
    def index_by_id(self) -> dict[int, int]:
        return self.engine.index_by_id

    @property
    def followed_by_id(self) -> dict[int, int]:
        """``index_by_id`` without this optimizer's parameters that have no shards yet: their state is whole on every
        rank, like that of frozen ones."""
        if self.is_given_back:
            return {}
        waiting = self._not_followed()[0] if self.has_shards else {}
        return {key: index for key, index in self.index_by_id.items() if index not in waiting}

    def is_cut(self, index: int) -> bool:
        """Whether ranks have a part of the parameter each: not if its owner has all of it, or every rank has."""
        return self.sharded and index in self._followed and index not in self._whole.indices

    @property
    def owner_collectives(self) -> Collectives | None:
        """The ranks among which elements are divided; None where every rank has all of them."""
        return self.engine.shard_collectives if self.sharded else None

    @property
    def whole_params(self) -> Collection[int]:
        """The parameters that are stepped whole, each by its owner, whoever that is."""
        return self._whole.indices

    @property
    def has_shards(self) -> bool:
        """Whether stepping goes through tensors other than the model's Parameters."""
        return not (self.is_given_back or self.engine.steps_params_themselves)

    def check_groups(self) -> None:
        """Looks for parameters that the model has not; see :meth:`Strangers.find`."""
        self.strangers.find()

    def follow_model(self) -> None:
        """Makes the shards of parameters that have none yet: at the start, and when some were unfrozen or added.
        Collective if there are any.

        Until then the state of these is whole on every rank, as it was made when the optimizer was constructed or
        loaded while they were frozen. From then on it is that of shards.
        """
        if not self.has_shards or self.engine.is_closed:
            return
        params, whole = self._not_followed()
        self._whole.check(whole, type(self.inner).__name__)
        if whole and self.sharded:
            self._whole.add(whole)
        if params:
            self._follow(params)

    def _follow(self, params: Mapping[int, Parameter]) -> None:
        buffers = self.engine.param_buffers
        if buffers is None:
            self._add_unsharded(params)
        else:
            self._add_shards(params, buffers)
        for index, param in params.items():
            state = self.inner.state.pop(param, None)
            if state and index in self.shards:
                shard = self.shards[index]
                # What an optimizer made of a DTensor at construction is one, too, and of the whole's shape.
                state = {name: self.engine.local_parts.local_view(value) for name, value in state.items()}
                self.inner.state[shard.main] = shard_state(state, self.layout.params[index], shard, self.element_names)
        to_come = self.main_params_to_come
        load_main_params(to_come, {i: self.shards[i] for i in params if i in self.shards}, self.layout)
        self._followed.update(params)
        self.keep_loaded(params)
        remainders = self.sharded and self.engine.config.param_wire_dtype is not None
        self.main_params_to_come = main_params_to_come(to_come, self._params_to_come(), with_remainders=remainders)

    def _add_unsharded(self, params: Mapping[int, Parameter]) -> None:
        specs, mains = self.layout.params, dict[int, Tensor]()
        by_bucket: dict[int, list[int]] = {}
        for index, param in params.items():
            mains[index] = self.engine.local_parts.local_view(param)
            if specs[index].has_main_param:
                by_bucket.setdefault(self.layout.slots[index].bucket, []).append(index)
        for indices in by_bucket.values():
            buffer = MainParamBuffer([mains[index].detach() for index in indices])
            mains.update(zip(indices, buffer.mains, strict=True))
            self.main_param_buffers.append((tuple(indices), buffer))
        self.shards |= {index: ParamShard(index, 0, specs[index].numel, main, None) for index, main in mains.items()}

    def keep_loaded(self, indices: Iterable[int] | None = None) -> None:
        """Keeps state that these parameters (None for all) were given as other state of shards is kept."""
        if self.kept_state is not None:
            indices = self.shards.keys() if indices is None else self.shards.keys() & indices
            self.kept_state.keep_loaded([self.shards[index] for index in indices], self.element_names)

    def stays_here(self, shard: ParamShard, values: Mapping[str, Any]) -> Iterable[str]:
        """The names of loaded state that is kept on the host."""
        return self.kept_state.stays_here(shard, values, self.element_names) if self.kept_state is not None else ()

    def load_main_params(self, main_params: Mapping[str, Tensor]) -> None:
        """Takes over saved main params, those of parameters without shards until they have some.

        Raises:
            CheckpointError: if a shape does not fit, before anything is changed.
        """
        remainders = self.sharded and self.engine.config.param_wire_dtype is not None
        to_come = main_params_to_come(main_params, self._params_to_come(), with_remainders=remainders)
        load_main_params(main_params, self.shards, self.layout)
        self.main_params_to_come = to_come

    def _params_to_come(self) -> dict[str, Tensor]:
        """The model's parameters (parts) in the groups that have no shards yet, by name."""
        names, followed = self.names_by_id(), {id(self.engine.params[index]) for index in self._followed}
        params = {id(param): param for group in self.inner.param_groups for param in group["params"]}
        part_of = self.engine.local_parts.local_view
        return {names[key]: part_of(params[key]) for key in (params.keys() & names.keys()) - followed}

    def _not_followed(self) -> tuple[dict[int, Parameter], set[int]]:
        """The parameters in the groups that have no shards yet, by index, and which of them are stepped whole."""
        index_by_id, followed = self.index_by_id, self._followed  # asked in each step, for each parameter
        params: dict[int, Parameter] = {}
        whole = set[int]()
        for number, group in enumerate(self.inner.param_groups):
            for param in group["params"]:
                index = index_by_id.get(id(param))
                if index is not None and index not in followed:
                    params[index] = param
                    whole.update({index} if number in self._whole_groups else ())
        return params, whole

    def check_whole_groups(self) -> None:
        """Raises OptimizerNotShardableError if a parameter that is divided was put into a group of whole ones since:
        its shards would be stepped as if they were parameters."""
        for number, group in enumerate(self.inner.param_groups):
            if number not in self._whole_groups:
                continue
            for index in map(self.index_by_id.get, map(id, group["params"])):
                if index is not None and index in self._followed and index not in self._whole.indices:
                    name = self.layout.params[index].name
                    raise OptimizerNotShardableError(
                        f"parameter {name!r} is divided into flat shards, and is in group {number} now, which "
                        f"{type(self.inner).__name__} steps whole: put it there before the optimizer is wrapped"
                    )

    def _add_shards(self, indices: Collection[int], buffers: ParamBuffers) -> None:
        grads, layout, rank = self.engine.grad_buffers, self.layout, self.engine.collectives.rank
        for index in indices:
            if (owned := layout.owned_range(index, rank)) is not None:
                self._grad_views[index] = grads.reduced(layout.slots[index].bucket, *owned)
        flat = [index for index in indices if index not in self._whole.indices]
        self.shards |= cut_shards(flat, layout, rank, buffers.flats, buffers.bitmaps)
        self.shards |= self._whole.own_shards(self._whole.indices.intersection(indices))

    def num_kept(self) -> dict[int, int] | None:
        if self.element_names is None:
            return None
        num_flat, num_whole = len(self.element_names), self._num_whole_tensors
        dims, most = [len(spec.shape) for spec in self.layout.params], max(num_whole.values(), default=0)
        return {i: num_whole.get(dims[i], most) if i in self._whole.indices else num_flat for i in self.param_indices()}

    def start_gather(self, bucket: int, indices: Sequence[int], *, exact: bool = False) -> None:
        """Starts to bring each rank what others have stepped of a bucket; ``indices``: of this optimizer's parameters.

        Where shards and whole parameters lie side by side those alone are sent: the rest is another optimizer's.
        """
        self.engine.param_gather.start(bucket, self._whole.spans(bucket, indices), exact=exact)

    def names_by_id(self) -> dict[int, str]:
        """By ``id``, the names of the model's parameters, frozen ones too, and of strangers."""
        return {id(param): name for name, param in self.engine.named_params().items()} | self.strangers.names_by_id()

    def param_indices(self) -> list[int]:
        """The layout's indices of this optimizer's parameters."""
        return list(self.times_listed())

    def times_listed(self) -> Counter[int]:
        """The number of times that each of this optimizer's parameters is in its groups, by the layout's index."""
        params = itertools.chain.from_iterable(group["params"] for group in self.inner.param_groups)
        return Counter(index for index in map(self.index_by_id.get, map(id, params)) if index is not None)

    def changing(self, indices: Iterable[int]) -> set[int]:
        """Those of the parameters that some rank may step.

        The same on all ranks, as it depends on what they share alone (``requires_grad``, reductions): a gradient may be
        written on one rank only. What was frozen after its gradient was reduced is stepped once more, with that.
        """
        params, reductions, stepped = self.engine.params, self.engine.reducer.num_reductions, self._reductions
        return {i for i in indices if params[i].requires_grad or reductions[i] != stepped.get(i, 0)}

    def with_grads(self, changing: Iterable[int]) -> set[int]:
        """Those of :meth:`changing` parameters that the next step has a gradient for on this rank."""
        has_grad = self.engine.grad_buffers.has_grad
        return {index for index in changing if has_grad[index]}

    # --- groups ------------------------------------------------------------------------------------------------------

    def stepped_tensor(self, param: Parameter) -> Tensor | None:
        """The tensor in its place: this rank's shard, itself if it has no shards, None if all of it is elsewhere."""
        index = self.index_by_id.get(id(param))
        if index is None or index not in self._followed:
            return param
        return self.shards[index].main if index in self.shards else None

    def why_no_state(self, param: Tensor) -> str | None:
        """Why nothing is kept under one of the model's Parameters, in words; None for one that is stepped itself."""
        index = self.index_by_id.get(id(param))
        if index is None or index not in self._followed or self.stepped_tensor(self.engine.params[index]) is param:
            return None
        return (
            f"the state of parameter {self.layout.params[index].name!r} was looked up, and what is stepped in its "
            "place (a shard, or a main param) has it. On all ranks, state_dict() of the optimizer that setup, prepare "
            "or DistributedOptimizer returned has it whole, and load_state_dict() takes it back; what is done to every "
            "number alike may be done to optimizer.state.values(). Methods of the optimizer's class are called on that "
            f"object, not as functions of the class. Or pass {self.engine.all_reduce_option}"
        )

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
        try:
            with self.passing():
                yield
        finally:
            # asked for again: load_state_dict makes new group dictionaries
            for group, params in zip(self.inner.param_groups, whole, strict=True):
                group["params"] = params

    @contextlib.contextmanager
    def passing(self) -> Iterator[None]:
        """The user's optimizer may be called while this is open: it is us who call it."""
        before, self._passing_through = self._passing_through, True
        try:
            yield
        finally:
            self._passing_through = before

    # --- state -------------------------------------------------------------------------------------------------------

    def split_state(self, *, replace: bool = False) -> None:
        """The optimizer's state is that of single shards until the next step.

        Args:
            replace: another state is about to be loaded.
        """
        if self._is_joined:
            for run in self._runs:
                run.split_state(self.inner.state, self.element_names)
                if self.element_names is not None:  # state may come into being later than the probe's first step
                    self.element_names |= run.element_names(self.element_names)
            self._is_joined = False
        if replace:
            for run in self._runs:
                run.forget_state()

    def whole_states(self) -> dict[int, Mapping[str, Any]]:
        """The state of parameters that this rank owns whole, by parameter, as it is saved."""
        owned = self._whole.indices & self.shards.keys()
        return as_saved(self.inner, {index: self.shards[index].main for index in owned})

    def own_parts(self, what: str) -> OwnParts:
        """This rank's parts of a ``what``, STATE or MAIN_PARAMS. Changes nothing."""
        state, shards, names = self.inner.state, dict(self.shards), self.element_names
        pieces: list[Piece] = []
        whole: dict[int, Mapping[str, Any]] | None = None
        if self._whole.indices:
            owned = {index: shards.pop(index) for index in self._whole.indices & shards.keys()}
            if what == STATE:
                whole = self.whole_states()
            else:
                apart = self.layout.has_separate_main
                whole = {i: {MAIN_PARAM: shard.main} for i, shard in owned.items() if apart(i)}
        if what == STATE:
            for run in self._runs if self._is_joined else ():
                pieces.append(Piece(run.shards, run.main.numel(), run.joined_state(state, names)))
                for shard in run.shards:
                    shards.pop(shard.param, None)
            pieces += [Piece((shard,), shard.numel, state.get(shard.main, {})) for shard in shards.values()]
            if self.kept_state is not None:
                pieces = [Piece(piece.shards, piece.numel, self.kept_state.as_saved(piece.state)) for piece in pieces]
        else:
            own, names = self.param_indices(), {MAIN_PARAM}
            with_main = [shards[i] for i in own if i in shards and self.layout.has_separate_main(i)]
            pieces += [Piece((shard,), shard.numel, MainParamWhenRead(MAIN_PARAM, shard)) for shard in with_main]
        return OwnParts(pieces, self.layout, self.engine.all_reduce_option, names, whole)

    def _join_state(self, with_grads: Set[int]) -> list[FlatRun]:
        """Makes the state that of the runs, and returns those that have gradients to step with."""
        groups, index_by_id = self.inner.param_groups, self.index_by_id
        members = [[index_by_id.get(id(param), -1) for param in group["params"]] for group in groups]
        shards = self.shards
        if self._whole.indices:
            shards = {index: shard for index, shard in shards.items() if shard.is_cut}
        stepping = with_grads & shards.keys()
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
            self._groups = {index: number for number, indices in enumerate(members) for index in indices}
            self._times = self.times_listed()
            buffers, grads = self.engine.param_buffers, self.engine.grad_buffers
            assert buffers is not None
            by_group = [[shards[index] for index in dict.fromkeys(indices) if index in shards] for indices in members]
            apart = {number for number, group in enumerate(groups) if not self._may_join(group)}
            was_joined = {shard.param for run in self._runs if len(run.shards) > 1 for shard in run.shards}
            self._runs = build_runs(
                by_group, self._times, apart, stepping, self.layout, buffers.flats, grads.reduced, state, names
            )
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

    def _chunk_numel(self, run: FlatRun) -> int:
        """The most elements stepped at once: all, unless the optimizer does single operations on the CPU."""
        if self.kept_state is not None:  # which cuts runs itself, while their state is fp32
            return run.main.numel()
        group = self.inner.param_groups[run.group]
        in_chunks = self._may_join(group) and self._is_on_cpu and not group.get("foreach")
        return CHUNK_NUMEL if in_chunks else run.main.numel()

    def give_back(self, *, keep_hooks: bool = False) -> None:
        """See given_back's [Note: when an optimizer is given back]. ``keep_hooks``: one of them is running."""
        if self.has_shards:
            self.main_params_to_come |= give_back(self)
            self.is_given_back, self.sharded = True, False
            self.shards, self._grad_views, self._runs, self._members = {}, {}, [], []
            self.engine.release_groups()
        if not keep_hooks:
            remove(self.hooks)
            self.hooks = []
            self.inner.__dict__.pop("__getstate__", None)

    # --- another layout ----------------------------------------------------------------------------------------------

    def describe(self) -> Contents | None:
        if not self._keeps_state_only:
            return None
        self.split_state()
        contents: Contents = {}
        for index, shard in self.shards.items():
            if not shard.is_cut:
                continue
            contents[index] = {MAIN_PARAM: PerElement(torch.float32)} if self.layout.has_separate_main(index) else {}
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
            return shard.main_param() if shard is not None else None
        part: Tensor | None = self.inner.state.get(shard.main, {}).get(name)
        return part

    def copy_of(self, name: str, part: Tensor) -> Tensor:
        return part.clone() if self.kept_state is None or name == MAIN_PARAM else self.kept_state.copy_of(part)

    def release(self) -> None:
        states = {index: self.inner.state.pop(shard.main, None) for index, shard in self.shards.items()}
        self._staying = {index: (self.shards[index], states[index]) for index in self._whole.indices & states.keys()}
        self.shards, self._grad_views, self._runs, self._members = {}, {}, [], []

    def take(self, contents: Contents) -> None:
        buffers, state = self.engine.param_buffers, self.inner.state
        assert buffers is not None, "sharded"
        self._add_shards(contents.keys() | self._whole.indices, buffers)
        for index, values in contents.items():
            if (main := values.pop(MAIN_PARAM, None)) is not None:
                self.shards[index].set_main_param(main)
            if values:
                state[self.shards[index].main] = values
        # An owner keeps its parameters in every layout; the memory that the model reads is another.
        for index, (before, kept) in self._staying.items():
            if self.layout.has_separate_main(index):
                self.shards[index].main.copy_(before.main)
            if kept:
                state[self.shards[index].main] = kept
        self._staying = {}
        self.keep_loaded(contents)
