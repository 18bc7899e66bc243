"""This rank's shards and whole parameters of one optimizer: made, loaded, saved, moved to another layout, given back.

Between steps the user's optimizer has the model's Parameters in its groups, and its state is keyed by the tensors that
are stepped in their place. Checkpoints and the engine need no more of an optimizer than its shard set.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from ..buffers import ParamBuffers
from ..collectives import Collectives
from ..engine import Engine, ShardHolder
from ..errors import DirectUseError
from ..layout import BufferLayout
from ..shards import (
    MAIN_PARAM,
    MAIN_PARAMS,
    STATE,
    Fragment,
    Gather,
    ParamShard,
    StateFragments,
    as_saved,
    cut_shards,
    gather_main_params,
    gather_state_dict,
    groups_as_saved,
    load_main_params,
    number_params,
    pending_main_params,
    shard_state,
    to_host,
)
from ..trials import Findings
from .extra_params import ExtraParams
from .main_param_buffer import MainParamBuffer
from .plain_optimizer import load_as_torchs
from .shard_states import ShardStates
from .state_hooks import without_state_hooks
from .whole_params import WholeParams


class ShardSet(ShardHolder):
    """The tensors that one optimizer steps on this rank. ``findings``: of its trials, if it is sharded.

    Attributes:
        inner: the user's optimizer.
        shards: by parameter (index in the layout): flat shards, and whole parameters that this rank steps.
        states: the state of flat shards.
        whole: the parameters that are stepped whole, each by its owner.
        extra_params: the optimizer's parameters that are not the model's.
        grad_views: the reduced gradients of ``shards``, if it is sharded.
        main_param_buffers: if it is not sharded: parameter indices, and the buffer of their main params.
        pending_main_params: loaded, full main params of parameters that have no shards yet, by the name in the file.
        hooks: handles of this package's hooks on the user's optimizer.
        is_given_back: True if the state is keyed by Parameter again; see plain_optimizer.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, engine: Engine, findings: Findings | None) -> None:
        self.inner = optimizer
        self.engine = engine
        self.extra_params = ExtraParams(optimizer, engine)
        self.extra_params.find()
        engine.shard_holders.append(weakref.ref(self))
        self.sharded = self.layout.num_shards > 1
        self.shards: dict[int, ParamShard] = {}
        self.states = ShardStates(optimizer, engine, findings)
        self.whole = WholeParams(engine, findings)
        self.grad_views: dict[int, Tensor] = {}
        self.main_param_buffers: list[tuple[tuple[int, ...], MainParamBuffer]] = []
        self.pending_main_params: dict[str, Tensor] = {}
        self.hooks: list[Any] = []
        self.is_given_back = False
        self.num_steps_begun = 0
        self.was_loaded = False
        self._with_shards: set[int] = set()  # the parameters whose shards were made, on whichever ranks they are
        self._is_called_by_us = False
        self._has_loaded_mains = False
        self.add_new_params()

    # --- ShardHolder: read by the engine -----------------------------------------------------------------------------

    @property
    def needs_ranks(self) -> bool:  # type: ignore[override]
        return self.sharded

    @property
    def layout(self) -> BufferLayout:
        """The model's layout; it grows when parameters join."""
        return self.engine.layout

    def num_kept(self) -> dict[int, int] | None:
        if (names := self.states.element_names) is None:
            return None
        num_whole, indices = self.whole.num_tensors, self.whole.indices
        dims, most = [len(spec.shape) for spec in self.layout.params], max(num_whole.values(), default=0)
        return {i: num_whole.get(dims[i], most) if i in indices else len(names) for i in self.param_indices()}

    def step_options(self) -> list[float]:
        """Returns the numbers with which the optimizer steps and which schedules change, in the order of its groups."""
        options = (group.get(name) for group in self.inner.param_groups for name in ("lr", "weight_decay", "momentum"))
        return [float(option) for option in options if isinstance(option, int | float)]  # a tensor may be on a device

    # --- parameters --------------------------------------------------------------------------------------------------

    @property
    def sharded_by_id(self) -> dict[int, int]:
        """``index_by_id`` without this optimizer's parameters that have no shards yet.

        Like frozen parameters, these have their full state on every rank.
        """
        if self.is_given_back:
            return {}
        waiting = self._without_shards()[0] if self.has_shards else {}
        return {key: index for key, index in self.engine.index_by_id.items() if index not in waiting}

    @property
    def has_shards(self) -> bool:
        """True if tensors other than the model's Parameters are stepped."""
        return not (self.is_given_back or self.engine.steps_params_themselves)

    def is_cut(self, index: int) -> bool:
        """Returns True if each rank has a part of the parameter; False if its owner, or every rank, has all of it."""
        return self.sharded and index in self._with_shards and index not in self.whole.indices

    @property
    def owner_collectives(self) -> Collectives | None:
        """The ranks that share out elements; None where every rank has all of them."""
        return self.engine.shard_collectives if self.sharded else None

    def names_by_id(self) -> dict[int, str]:
        """Returns names by ``id``: of all the model's parameters, frozen ones too, and of extra parameters."""
        return {id(param): name for name, param in self.engine.named_params().items()} | self.extra_params.names_by_id()

    def params(self) -> Iterator[Parameter]:
        """Iterates over the Parameters in the groups."""
        return itertools.chain.from_iterable(group["params"] for group in self.inner.param_groups)

    def param_indices(self) -> list[int]:
        """Returns the layout's indices of this optimizer's parameters."""
        return [i for i in map(self.engine.index_by_id.get, map(id, self.params())) if i is not None]

    def sharded_index(self, param: Tensor) -> int | None:
        """Returns the layout's index of a parameter whose shards were made, on whichever ranks; None for others."""
        index = self.engine.index_by_id.get(id(param))
        return index if index in self._with_shards and not self.is_given_back else None

    def stepped_tensor(self, param: Parameter) -> Tensor | None:
        """Returns the tensor that is stepped for a parameter: this rank's shard, or the parameter if it has no shards.

        None if other ranks step all of it.
        """
        if (index := self.sharded_index(param)) is None:
            return param
        return self.shards[index].main if index in self.shards else None

    # --- shards are made ---------------------------------------------------------------------------------------------

    def add_new_params(self) -> None:
        """Makes the shards of parameters without shards: at the start, and when some were unfrozen or added.

        Collective if there are any. Until then every rank has their full state, from the optimizer's construction or
        loaded while they were frozen; from then on it is that of shards.
        """
        if not self.has_shards or self.engine.is_closed:
            return
        params, whole = self._without_shards()
        self.whole.check_not_tensor_parallel(whole, type(self.inner).__name__)
        if whole and self.sharded:
            self.whole.assign_owners(whole)
        if params:
            self._make_shards(params)

    def _without_shards(self) -> tuple[dict[int, Parameter], set[int]]:
        """Returns the parameters in the groups that have no shards yet, by index, and which are stepped whole."""
        # Local names: each step reads both for each parameter.
        index_by_id, sharded = self.engine.index_by_id, self._with_shards
        params: dict[int, Parameter] = {}
        whole = set[int]()
        for number, group in enumerate(self.inner.param_groups):
            for param in group["params"]:
                index = index_by_id.get(id(param))
                if index is not None and index not in sharded:
                    params[index] = param
                    whole.update({index} if number in self.whole.groups else ())
        return params, whole

    def _make_shards(self, params: Mapping[int, Parameter]) -> None:
        buffers, names = self.engine.param_buffers, self.states.element_names
        if buffers is None:
            self._add_unsharded(params)
        else:
            self._add_shards(params, buffers)
        for index, param in params.items():
            state = self.inner.state.pop(param, None)
            if state and index in self.shards:
                shard = self.shards[index]
                # State that an optimizer created from a DTensor at construction is a DTensor of the full shape.
                state = {name: self.engine.local_parts.local_view(value) for name, value in state.items()}
                self.inner.state[shard.main] = shard_state(state, self.layout.params[index], shard, names)
        to_come = self.pending_main_params
        self._has_loaded_mains |= bool(to_come)
        load_main_params(to_come, {i: self.shards[i] for i in params if i in self.shards}, self.layout)
        self._with_shards.update(params)
        self.states.keep_loaded(self.shards[index] for index in self.shards.keys() & params)
        self.pending_main_params = self._pending(to_come)

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

    def _add_shards(self, indices: Collection[int], buffers: ParamBuffers) -> None:
        grads, layout, rank = self.engine.grad_buffers, self.layout, self.engine.collectives.rank
        for index in indices:
            if (owned := layout.owned_range(index, rank)) is not None:
                self.grad_views[index] = grads.reduced(layout.slots[index].bucket, *owned)
        flat = [index for index in indices if index not in self.whole.indices]
        self.shards |= cut_shards(flat, layout, rank, buffers.flats)
        self.shards |= self.whole.make_shards(self.whole.indices.intersection(indices))

    # --- the user's optimizer, with shards in its groups -------------------------------------------------------------

    def groups_of_shards(self) -> contextlib.AbstractContextManager[None]:
        """Puts this rank's shards into the optimizer's groups while this is open. A group may be empty."""
        if not self.has_shards:
            return contextlib.nullcontext()
        groups = [group["params"] for group in self.inner.param_groups]
        return self.groups_of([[t for p in params if (t := self.stepped_tensor(p)) is not None] for params in groups])

    @contextlib.contextmanager
    def groups_of(self, tensors: Sequence[list[Any]]) -> Iterator[None]:
        """Puts ``tensors``, by group, into the optimizer's groups while this is open, and allows calls of it."""
        params = [group["params"] for group in self.inner.param_groups]
        for group, stepped in zip(self.inner.param_groups, tensors, strict=True):
            group["params"] = stepped
        try:
            with self.calls_allowed():
                yield
        finally:
            # Read again, since load_state_dict makes new group dictionaries.
            for group, own in zip(self.inner.param_groups, params, strict=True):
                group["params"] = own

    @contextlib.contextmanager
    def calls_allowed(self) -> Iterator[None]:
        """Allows calls of the user's optimizer while this is open: this package makes them."""
        before, self._is_called_by_us = self._is_called_by_us, True
        try:
            yield
        finally:
            self._is_called_by_us = before

    def refuse_direct_use(self, *_: Any) -> None:
        """Hook on the user's optimizer, which has no shards in its groups between steps: raises DirectUseError.

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

    def start_gather(self, bucket: int, indices: Sequence[int]) -> None:
        """Starts to gather the new weights of a bucket; ``indices``: of this optimizer's parameters.

        In a bucket that contains whole parameters only these are sent: the rest is another optimizer's.
        """
        self.engine.param_gather.start(bucket, self.whole.spans(bucket, indices))

    # --- saved and loaded --------------------------------------------------------------------------------------------

    def _fragments(self, what: str) -> StateFragments:
        """Returns this rank's fragments of STATE or MAIN_PARAMS. Changes nothing."""
        shards, option, apart = dict(self.shards), self.engine.all_reduce_option, self.layout.has_separate_main
        owned = {index: shards.pop(index) for index in self.whole.indices & shards.keys()}
        names, whole = self.states.element_names, dict[int, Mapping[str, Any]]()
        if what == STATE:
            whole |= as_saved(self.inner, {index: shard.main for index, shard in owned.items()}) if owned else {}
            fragments = self.states.fragments(shards)
        else:
            names = {MAIN_PARAM}
            whole |= {index: {MAIN_PARAM: shard.main} for index, shard in owned.items() if apart(index)}
            with_main = [index for index in self.param_indices() if index in shards and apart(index)]
            fragments = [Fragment.of_main_param(shards[index]) for index in with_main]
        return StateFragments(fragments, self.layout, option, names, whole if self.whole.indices else None)

    def full_state(self, gather: Gather | None) -> dict[str, Any]:
        """Returns the state as torch DDP would have saved it; ``state`` is None on ranks other than the root.

        Collective over the ranks of ``gather``; it is None where every rank has the full state.
        """
        if gather is None:
            with self.groups_of_shards(), without_state_hooks(self.inner):
                return self.inner.state_dict()
        return gather_state_dict(self.inner, self.sharded_by_id, self._fragments(STATE), gather)

    def full_main_params(self, gather: Gather | None) -> dict[str, Tensor]:
        """Returns the full main params by name, as :meth:`full_state`; empty on ranks other than the root."""
        cut = [index for index in self.param_indices() if self.is_cut(index)]
        return gather_main_params(cut, self._fragments(MAIN_PARAMS), gather)

    def load_main_params(self, main_params: Mapping[str, Tensor]) -> None:
        """Loads saved main params; those of parameters without shards are kept until these have some.

        Raises:
            CheckpointError: if a shape does not fit, before anything is changed.
        """
        to_come = self._pending(main_params)
        self._has_loaded_mains |= bool(main_params)
        load_main_params(main_params, self.shards, self.layout)
        self.pending_main_params = to_come

    def _pending(self, main_params: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns those of the main params whose parameters have no shards yet."""
        names, sharded = self.names_by_id(), {id(self.engine.params[index]) for index in self._with_shards}
        params, part_of = {id(param): param for param in self.params()}, self.engine.local_parts.local_view
        waiting = {names[key]: part_of(params[key]) for key in (params.keys() & names.keys()) - sharded}
        return pending_main_params(main_params, waiting)

    # --- given back --------------------------------------------------------------------------------------------------

    def give_back(self, *, keep_hooks: bool = False) -> None:
        """Makes the optimizer a plain one; see plain_optimizer's [Note: what close() does to an optimizer].

        ``keep_hooks``: one of them is running.

        Raises:
            NotOnAllRanksError: if it is sharded, and not all ranks call this; nothing is changed then.
        """
        if self.has_shards:
            engine, inner = self.engine, self.inner
            if not self.sharded:
                numbers = number_params(inner)
                stepped = {numbers[id(p)]: t for p in self.params() if (t := self.stepped_tensor(p)) is not None}
                saved = {"state": as_saved(inner, stepped), "param_groups": groups_as_saved(inner, numbers)}
                main_params = to_host(self.full_main_params(None))
            else:
                what = f"the first use of a sharded {type(inner).__name__} after close()"
                engine.collectives.require_all_ranks(what)
                saved = self.full_state(gather_from(engine, everywhere=True))
                main_params = self.full_main_params(gather_from(engine))
            load_as_torchs(inner, saved, engine.local_parts)
            self.pending_main_params |= main_params
            self.is_given_back, self.sharded = True, False
            self._drop_shards()
            engine.release_groups()
        if not keep_hooks:
            for hook in self.hooks:
                hook.remove()
            self.hooks = []
            self.inner.__dict__.pop("__getstate__", None)

    def _drop_shards(self) -> None:
        self.shards, self.grad_views = {}, {}
        self.states.drop_runs()

    # --- another layout ----------------------------------------------------------------------------------------------

    def has_state(self) -> bool:
        return self.num_steps_begun > 0 or self._has_loaded_mains or any(self.inner.state.values())

    def release_shards(self) -> None:
        self._drop_shards()

    def make_shards_again(self) -> None:
        buffers = self.engine.param_buffers
        assert buffers is not None, "sharded"
        self._add_shards(self._with_shards, buffers)


def gather_from(engine: Engine, *, everywhere: bool = False) -> Gather:
    """Returns the way in which owners' shards come to the ranks that save them, or ``everywhere``."""
    is_root = engine.model_parallel.saves_parts(engine.collectives)
    owners = engine.shard_collectives
    return Gather(owners, engine.ranks_of, engine.device, is_root=is_root, everywhere=everywhere)
