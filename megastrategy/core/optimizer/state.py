"""An optimizer's state outside of a step: by parameter, element-wise values as parts, other values as they are.

It is read from runs and put into runs here; :func:`.redistribute.redistribute` sends it. Three forms of it leave this
file: torch's own full-shaped format, the parts of a directory (:class:`~megastrategy.core.states.FlatShard`), and state
that waits for the plan (full-shaped, by parameter).

[Note: counters of joined parameters]
Members of a run share one counter, and a saved state has one for each parameter: torch adds to it in place. Members
whose counters differ in a loaded state get runs of their own.
"""

from __future__ import annotations

import bisect
import copy
import dataclasses
import functools
import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from ..collectives import Collectives
from ..errors import CheckpointError
from ..layout import SIXTEEN_BIT_DTYPES, BufferLayout, Domain, ParamSpec
from ..states import (
    as_saved,
    copied,
    gather_states,
    gather_states_everywhere,
    groups_as_saved,
    number_params,
    per_element_keys,
    to_host,
)
from ..trials import describe_undividable, is_per_element
from .plain_optimizer import load_as_torchs
from .redistribute import redistribute
from .runs import Run, Values, flat, group_members
from .state_hooks import without_state_hooks

if TYPE_CHECKING:
    from .sharded_optimizer import ShardedOptimizer

MAIN_PARAM = "(main param)"
"""The name of a parameter's fp32 main param, beside the names of its state."""

_EMPTY = "(looked up)"
"""The name of nothing, for a parameter whose state the optimizer has looked up and left empty: torch saves that."""

NamedState = dict[int, Values]
"""By parameter in the layout, the values of its state, full-shaped; the main param is one of them."""


class Parts(list[tuple[int, Tensor]]):
    """The parts of an element-wise value on this rank: the number of the first element, and a 1-D tensor, in order."""

    def joined(self) -> Tensor:
        """Returns one tensor of all parts, which are neighbours; itself if there is one."""
        return self[0][1] if len(self) == 1 else torch.cat([values for _, values in self])


LocalState = dict[int, dict[str, Any]]
"""By parameter in the layout, this rank's values: Parts of element-wise ones."""


# --- runs -------------------------------------------------------------------------------------------------------------


def local_state(
    optimizer: ShardedOptimizer, *, is_saved: bool = False, names: Collection[str] | None = None
) -> LocalState:
    """Returns this rank's state, as views.

    Args:
        is_saved: whether state of whole parameters is returned as the class saves it.
        names: of element-wise state; those that trials found by default.
    """
    if not optimizer.has_made_runs:
        return optimizer.pending
    layout = optimizer.engine.layout
    names = optimizer.element_names if names is None else names
    local: LocalState = {}
    for run in optimizer.runs:
        values = _values_of(optimizer, run, is_saved=is_saved)
        for member in run.members:
            of_param = local.setdefault(member.param, {})
            start = member.start - layout.slots[member.param].start
            for key, value in values.items():
                if _is_elementwise(run, key, value, names):
                    of_param.setdefault(key, Parts()).append((start, run.read(value, member)))
                else:
                    of_param[key] = value
    return local


def _values_of(optimizer: ShardedOptimizer, run: Run, *, is_saved: bool = False) -> Values:
    values = dict(optimizer.inner.state.get(run.main, {}))
    if is_saved and run.is_whole:
        values = dict(as_saved(optimizer.inner, {0: run.main}).get(0, {}))
    if run.has_main_param:
        values[MAIN_PARAM] = run.main
    return values


def _is_elementwise(run: Run, key: str, value: Any, names: Collection[str] | None) -> bool:
    if key == MAIN_PARAM:
        return True
    return not run.is_whole and is_per_element(key, value, tuple(run.main.shape), names)


def put_local(optimizer: ShardedOptimizer, local: LocalState) -> None:
    """Moves this rank's state out of ``local`` into the present runs, which cover the same elements."""
    if not local:
        return
    for run in optimizer.runs:
        optimizer.inner.state.pop(run.main, None)
    whole = {run.members[0].param for run in optimizer.runs if run.is_whole}
    _divide_runs(optimizer, {param: _shared_values(values) for param, values in local.items() if param not in whole})
    last_runs = {member.param: run for run in optimizer.runs for member in run.members}
    direct: dict[Tensor, Values] = {}
    loaded: dict[Tensor, Values] = {}
    for run in optimizer.runs:
        first = run.members[0].param
        if run.weights is not None:
            _fill(run.main, run, MAIN_PARAM, local, optimizer)
        values = {key: join(run, key, local, optimizer) for key in local.get(first, {}) if key != MAIN_PARAM}
        if values:
            (loaded if first in optimizer.loaded else direct)[run.main] = values
        for member in run.members:
            if last_runs[member.param] is run:
                local.pop(member.param, None)  # its memory is not needed beside the next run's
    optimizer.inner.state.update(direct)
    _load_into_runs(optimizer, loaded)
    optimizer.loaded.clear()


def _load_into_runs(optimizer: ShardedOptimizer, loaded: Mapping[Tensor, Values]) -> None:
    """Loads the state of runs with the optimizer's own ``load_state_dict``, which converts it; groups stay as they are.

    torch casts state to the dtype of what is stepped, as under torch DDP.
    """
    inner = optimizer.inner
    defaults = dict(inner.defaults)  # torch adds to them in a load
    unchanged = {tensor: values for tensor, values in inner.state.items() if tensor not in loaded}
    groups = inner.param_groups
    inner.param_groups = [
        {**group, "params": [run.main for run in optimizer.runs if run.group == number and run.main in loaded]}
        for number, group in enumerate(groups)
    ]
    tensors = [tensor for group in inner.param_groups for tensor in group["params"]]
    numbers = {id(tensor): number for number, tensor in enumerate(tensors)}
    saved = [{**group, "params": [numbers[id(t)] for t in group["params"]]} for group in inner.param_groups]
    try:
        with optimizer.calls_allowed(), without_state_hooks(inner):
            inner.load_state_dict({"state": {n: loaded[t] for n, t in enumerate(tensors)}, "param_groups": saved})
    finally:
        inner.param_groups = groups
        inner.defaults.clear()
        inner.defaults.update(defaults)
    inner.state.update(unchanged)


def _shared_values(values: Mapping[str, Any]) -> list[tuple[str, Any]]:
    names = sorted(values.keys() - {MAIN_PARAM})
    return [(key, None if isinstance(values[key], Parts) else _comparable(values[key])) for key in names]


def _comparable(value: Any) -> Any:
    return value.tolist() if isinstance(value, Tensor) and value.numel() <= 1 else value


def _divide_runs(optimizer: ShardedOptimizer, shared: Mapping[int, Any]) -> None:
    """Divides runs whose members have different values in common; see [Note: counters of joined parameters]."""
    runs: list[Run] = []
    for run in optimizer.runs:
        parts = group_members(run.members, lambda member: shared.get(member.param))
        runs += [run] if len(parts) == 1 else run.split(parts, optimizer.inner.state)
    if len(runs) != len(optimizer.runs):
        optimizer.set_runs(runs)


def join(run: Run, key: str, local: LocalState, optimizer: ShardedOptimizer) -> Any:
    """Returns a value of a run's state, in memory of its own: a parameter in two runs has two counters."""
    first = local[run.members[0].param][key]
    if not isinstance(first, Parts):
        return first if run.is_whole else copied(first)
    dtypes = [part.dtype for member in run.members for _, part in local[member.param].get(key, ())]
    dtype = dtypes[0] if dtypes else torch.float32
    if run.members[0].param in optimizer.loaded:
        dtype = loaded_dtype(optimizer.engine.layout.params[run.members[0].param], key, dtype)
    result = torch.zeros_like(run.main, dtype=dtype)
    _fill(result, run, key, local, optimizer)
    return result


def _fill(target: Tensor, run: Run, key: str, local: LocalState, optimizer: ShardedOptimizer) -> None:
    """Copies the values that a run's members have to their places in ``target``, a tensor of the shape of the run."""
    slots = optimizer.engine.layout.slots
    places: list[Tensor] = []
    sources: list[Tensor] = []
    for member in run.members:
        value = local.get(member.param, {}).get(key)
        if isinstance(value, Tensor):  # of a whole parameter
            target.copy_(value)
            return
        offset = slots[member.param].start
        for start, part in value or ():
            low = max(start + offset, member.start)
            high = min(start + offset + part.numel(), member.end)
            if low < high:
                places.append(flat(target)[low - run.start : high - run.start])
                sources.append(part[low - offset - start : high - offset - start])
    if places:
        torch._foreach_copy_(places, sources)


# --- full-shaped values -----------------------------------------------------------------------------------------------


def taken_from(optimizer: ShardedOptimizer) -> LocalState:
    """Takes this rank's part of the state of the model's parameters out of the optimizer: it waits for the plan."""
    engine = optimizer.engine
    local = engine.local_parts.local_view
    named: NamedState = {}
    for param in optimizer.model_params():
        index = engine.index_by_id[id(param)]
        values = {key: local(value) for key, value in optimizer.inner.state.pop(param, {}).items()}
        main = optimizer.frozen_main_params.pop(engine.layout.params[index].name, None)
        if main is not None:
            values[MAIN_PARAM] = main
        if values:
            named[index] = values
    return cut(optimizer, named, is_loaded=False)


def put(optimizer: ShardedOptimizer, local: LocalState) -> None:
    """Puts this rank's state of the present plan into the runs, or keeps it until there are some."""
    optimizer.has_state |= any(key != MAIN_PARAM for values in local.values() for key in values)
    if optimizer.has_made_runs:
        put_local(optimizer, local)
    else:
        optimizer.pending = local
        optimizer.pending_layout = optimizer.engine.layout


def put_beside_main_params(optimizer: ShardedOptimizer, local: LocalState) -> None:
    """As :func:`put`; main params stay where ``local`` has none, since they may have been loaded with the weights."""
    for index, values in optimizer.pending.items():
        if MAIN_PARAM in values and not optimizer.has_made_runs:
            local.setdefault(index, {}).setdefault(MAIN_PARAM, values[MAIN_PARAM])
    put(optimizer, local)


def cut(optimizer: ShardedOptimizer, named: NamedState, *, is_loaded: bool = True, copies: bool = True) -> LocalState:
    """Returns this rank's parts of full-shaped values, with the dtypes that torch's ``load_state_dict`` gives loaded
    ones.

    Args:
        copies: whether parts get memory of their own; otherwise they may be views, in their dtype, to be copied into
            runs at once.

    Raises:
        CheckpointError: if a shape is not the parameter's, before anything is changed.
    """
    layout = optimizer.engine.layout
    rank = optimizer.engine.collectives.rank
    keys = element_keys(optimizer, named)
    _check_shapes(optimizer, named, keys)
    local: LocalState = {}
    for index, values in named.items():
        spec = layout.params[index]
        is_flat = optimizer.is_flat(index)
        owned = layout.owned_range(index, rank)
        local[index] = {}
        for key, value in values.items():
            if not (is_flat and isinstance(value, Tensor) and (key in keys or key == MAIN_PARAM)):
                local[index][key] = as_loaded(spec, key, value) if is_loaded else _as_made(spec, value)
                continue
            local[index][key] = Parts()
            if owned is None:
                continue
            first = layout.slots[index].start
            part = _in_order(spec, value.detach())[owned[0] - first : owned[1] - first]
            if copies:
                part = as_loaded(spec, key, part) if is_loaded else _as_made(spec, part)
            local[index][key].append((owned[0] - first, part))
    return local


def _in_order(spec: ParamSpec, value: Tensor) -> Tensor:
    """Returns the elements in the order of the parameter's memory, 1-D."""
    if value.stride() != spec.stride:
        value = torch.empty_strided(spec.shape, spec.stride, dtype=value.dtype, device=value.device).copy_(value)
    return value.as_strided((spec.numel,), (1,))


def as_loaded(spec: ParamSpec, key: str, value: Any) -> Any:
    """Returns a copy of a value in the dtype that torch's ``load_state_dict`` gives it, as one of the main param."""
    if type(value) is Tensor:
        return value.detach().to(loaded_dtype(spec, key, value.dtype), copy=True)
    return copied(value)


def loaded_dtype(spec: ParamSpec, key: str, dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype that torch's ``load_state_dict`` gives a value of ``dtype``, as one of the main param."""
    main_dtype = torch.float32 if spec.has_main_param else spec.dtype
    return main_dtype if main_dtype.is_floating_point and key != "step" else dtype


def _as_made(spec: ParamSpec, value: Any) -> Any:
    """Returns a copy of a value that the optimizer made for a 16-bit weight, as it makes it for an fp32 main param: a
    sum of ones stops at 256 in bf16."""
    if type(value) is Tensor and spec.has_main_param and value.dtype == spec.dtype:
        return value.detach().to(torch.float32)
    return copied(value)


def element_keys(optimizer: ShardedOptimizer, named: NamedState) -> Collection[str]:
    """Returns the names of element-wise state."""
    states = {index: {k: v for k, v in values.items() if k != MAIN_PARAM} for index, values in named.items()}
    names = set(optimizer.element_names) if optimizer.element_names is not None else None
    return per_element_keys(states, names)


def _check_shapes(optimizer: ShardedOptimizer, named: NamedState, keys: Collection[str]) -> None:
    for index, values in named.items():
        spec = optimizer.engine.layout.params[index]
        elementwise = keys if optimizer.is_flat(index) else ()
        for key, value in values.items():
            if isinstance(value, Tensor) and (key in elementwise or key == MAIN_PARAM):
                _check_shape(spec.name, "main param" if key == MAIN_PARAM else f"state {key!r}", value, spec.shape)


def _check_shape(name: str, what: str, value: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(value.shape) != shape:
        raise CheckpointError(
            f"{what} of parameter {name!r} has shape {tuple(value.shape)}, the parameter {shape}: this state is of "
            "another model"
        )


def moved(optimizer: ShardedOptimizer, local: LocalState, before: BufferLayout) -> LocalState:
    """Returns this rank's state for the present plan, from its state for the plan ``before``. Collective, unless the
    plans are one."""
    engine = optimizer.engine
    after = engine.layout
    if before is after or not optimizer.is_sharded:
        return local
    result: LocalState = {}
    for domain in after.domains:
        result |= _moved_in_domain(optimizer, local, before, domain)
    return result


def _moved_in_domain(
    optimizer: ShardedOptimizer, local: LocalState, before: BufferLayout, domain: Domain
) -> LocalState:
    engine = optimizer.engine
    after = engine.layout
    ranks = engine.ranks_of(domain)
    owners = domain.ranks_with(engine.collectives.rank)[: domain.num_shards]  # those of other instances own the same
    local = {i: values for i, values in local.items() if after.buckets[after.slots[i].bucket].domain == domain}
    # One address space for both plans, and for ranks with other experts, which have to start as many collectives.
    starts = list(itertools.accumulate((spec.reserved_numel for spec in after.params), initial=0))
    facts = {
        (key, part.dtype): None
        for values in local.values()
        for key, parts in values.items()
        if isinstance(parts, Parts)
        for _, part in parts
    }
    names = sorted({name for of_rank in ranks.all_gather_objects(list(facts)) for name in of_rank}, key=str)
    result: LocalState = {
        index: {k: v for k, v in values.items() if not isinstance(v, Parts)} for index, values in local.items()
    }
    end = starts[-1] if len(after.domains) > 1 else 0
    for key, dtype in names:
        members = [index for index, values in local.items() if isinstance(values.get(key), Parts)]
        held = [_owned_by(before, members, starts, rank) for rank in owners]
        wanted = [_owned_by(after, members, starts, rank) for rank in owners]
        parts = [(starts[i] + start, part) for i in members for start, part in local[i][key]]
        sent = redistribute(_reader(parts), held, wanted, ranks, dtype, engine.device, end=end)
        for index in members:
            result[index][key] = Parts()
        for (start, _), values in zip(wanted[ranks.rank], sent, strict=True):
            index = bisect.bisect_right(starts, start) - 1
            result[index][key].append((start - starts[index], values))
    return result


def _owned_by(layout: BufferLayout, members: Sequence[int], starts: Sequence[int], rank: int) -> list[tuple[int, int]]:
    """Returns the ranges of the members that a rank owns, in an address space in which each begins at its start."""
    ranges = []
    for index in sorted(members):
        owned = layout.owned_range(index, rank)
        if owned is not None and owned[0] < owned[1]:
            shift = starts[index] - layout.slots[index].start
            ranges.append((owned[0] + shift, owned[1] + shift))
    return ranges


# --- torch's format ---------------------------------------------------------------------------------------------------


def full_state(optimizer: ShardedOptimizer, *, everywhere: bool = False) -> dict[str, Any]:
    """Returns the state as torch DDP would have saved it, on the host. Collective.

    ``state`` is None on ranks that save nothing, unless ``everywhere``. Of a parameter that ranks of the model have in
    parts, it is of this rank's part.
    """
    optimizer.prepare()
    inner = optimizer.inner
    if optimizer.has_made_runs and not optimizer.is_sharded:
        with optimizer.all_in_groups(), without_state_hooks(inner):
            return inner.state_dict()
    numbers = number_params(inner)
    by_id = optimizer.engine.index_by_id
    with_runs = set(map(id, optimizer.model_params())) if optimizer.has_runs else set()
    named = _gathered(optimizer, _is_state, everywhere=everywhere)
    if named is None:
        return {"state": None, "param_groups": groups_as_saved(inner, numbers)}
    without_runs = {numbers[id(p)]: p for p in optimizer.params() if id(p) not in with_runs}
    states = to_host(dict(as_saved(inner, without_runs)))
    number_of = {by_id[key]: number for key, number in numbers.items() if key in by_id}
    for index, values in sorted(named.items()):
        is_empty = _EMPTY in values
        values.pop(_EMPTY, None)
        if values or is_empty:
            states[number_of[index]] = values
    return {"state": states, "param_groups": groups_as_saved(inner, numbers)}


def full_main_params(optimizer: ShardedOptimizer, *, everywhere: bool = False) -> dict[str, Tensor] | None:
    """Returns the main params by name, as :func:`full_state`; None on ranks that save nothing. Collective."""
    optimizer.prepare()
    specs = optimizer.engine.layout.params
    if optimizer.has_made_runs and not optimizer.is_sharded:
        mains = {specs[run.members[0].param].name: run.main for run in optimizer.runs if run.has_main_param}
        return _in_order_of_registration(optimizer, to_host(mains | optimizer.frozen_main_params))
    named = _gathered(optimizer, _is_main_param, everywhere=everywhere)
    if named is None:
        return None
    if not optimizer.has_made_runs and optimizer.has_runs:
        engine = optimizer.engine
        for param in optimizer.model_params():  # the first step makes them of the weights
            index = engine.index_by_id[id(param)]
            if specs[index].has_main_param:
                weight = engine.local_parts.local_view(param).detach()
                named.setdefault(index, {}).setdefault(MAIN_PARAM, weight.to("cpu", torch.float32))
    mains = {specs[index].name: values[MAIN_PARAM] for index, values in sorted(named.items()) if MAIN_PARAM in values}
    return _in_order_of_registration(optimizer, mains | to_host(optimizer.frozen_main_params))


def _in_order_of_registration(optimizer: ShardedOptimizer, mains: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: mains[name] for name in optimizer.engine.named_params() if name in mains}


Wanted = Callable[[str], bool]
"""Whether a value of this name is gathered: either the state, or the main params."""


def _is_main_param(key: str) -> bool:
    return key == MAIN_PARAM


def _is_state(key: str) -> bool:
    return key != MAIN_PARAM


def _gathered(optimizer: ShardedOptimizer, wanted: Wanted, *, everywhere: bool) -> NamedState | None:
    """Returns the wanted values of the model's parameters, in the shape that they have here, on the ranks that save, or
    ``everywhere``; None elsewhere."""
    engine = optimizer.engine
    layout = engine.layout
    if not optimizer.is_sharded:
        local = local_state(optimizer, is_saved=True)
        return {
            index: {key: _shaped(layout.params[index], value) for key, value in values.items() if wanted(key)}
            for index, values in local.items()
        }
    engine.collectives.wait_for_device(engine.device, "all-gather")  # the host copies next, and a rank may be gone
    is_root = everywhere or engine.model_parallel.saves_parts(engine.collectives)
    indices = [engine.index_by_id[id(param)] for param in optimizer.model_params()]
    named: NamedState = {}
    for domain in layout.domains:
        members = {index for index in indices if layout.buckets[layout.slots[index].bucket].domain == domain}
        ranks = engine.ranks_of(domain)
        named |= _gathered_over(optimizer, members, wanted, ranks, is_root=is_root, everywhere=everywhere)
    return named if is_root else None


@dataclasses.dataclass(frozen=True)
class _Entry:
    """Describes the state of a run, or of a parameter before there are runs, to the other ranks.

    Attributes:
        spans: by parameter, the range of its elements.
        dtypes: of element-wise state, by name.
        values: the other state, in host memory.
    """

    spans: dict[int, tuple[int, int]]
    dtypes: dict[str, torch.dtype]
    values: dict[str, Any]


def _gathered_over(
    optimizer: ShardedOptimizer,
    members: Collection[int],
    wanted: Wanted,
    ranks: Collectives,
    *,
    is_root: bool,
    everywhere: bool,
) -> NamedState:
    """Returns the wanted values of these parameters, which ``ranks`` share, full-shaped, if ``is_root``.

    Raises:
        CheckpointError: on all ranks, if the state of one cannot be saved, or those of several do not fit together.
    """
    # Names that trials did not find: a run of one element cannot distinguish such state from a counter.
    later_names = ranks.all_gather_objects(_names_of_long_runs(optimizer))
    names = None if optimizer.element_names is None else set(optimizer.element_names).union(*later_names)
    problem, entries = _entries(optimizer, members, wanted, names)
    reports = ranks.all_gather_objects((is_root, problem, entries))
    for rank, (_, other_problem, _) in enumerate(reports):
        if other_problem:
            raise CheckpointError(f"rank {rank}: {other_problem}")
    by_rank = [_by_param(of_rank) for _, _, of_rank in reports]
    dtypes = {i: _agreed_dtypes(optimizer, i, by_rank) for i in sorted(set().union(*by_rank))}
    named: NamedState = {}
    for index in dtypes if is_root else ():
        named[index] = {}
        for entry in (entry for of_rank in by_rank for entry in of_rank.get(index, ())):
            # A copy for each parameter: torch adds to a counter in place. The lowest rank's value is saved.
            named[index] |= {key: copied(v) for key, v in entry.values.items() if key not in named[index]}
        named[index] |= dict.fromkeys(dtypes[index])  # in the optimizer's order; their values come below
    local = local_state(optimizer, names=names)
    roots = [saves for saves, _, _ in reports]
    _gather_elements(optimizer, local, dtypes, by_rank, roots, ranks, named)
    wholes = _gathered_wholes(optimizer, members, wanted, ranks, everywhere=everywhere)
    return named | {index: dict(values) for index, values in wholes if is_root}  # all ranks iterate


def _gathered_wholes(
    optimizer: ShardedOptimizer, members: Collection[int], wanted: Wanted, ranks: Collectives, *, everywhere: bool
) -> Iterable[tuple[int, Mapping[str, Any]]]:
    """Yields the wanted values of parameters that are stepped whole on rank 0, or ``everywhere``. Collective."""
    if not optimizer.has_made_runs:  # each rank has all of them
        for index, values in optimizer.pending.items():
            if index in members and not optimizer.is_flat(index):
                yield index, to_host({key: value for key, value in values.items() if wanted(key)})
        return
    states: LocalState = {}
    for run in optimizer.runs:
        index = run.members[0].param
        if run.is_whole and index in members:
            values = _values_of(optimizer, run, is_saved=True)
            states[index] = {key: value for key, value in values.items() if wanted(key)}
            if wanted(_EMPTY) and optimizer.inner.state.get(run.main) == {}:
                states[index][_EMPTY] = None
    states = {index: values for index, values in states.items() if values}
    if everywhere:
        yield from gather_states_everywhere(states, ranks)
    else:
        yield from gather_states(states, ranks, optimizer.engine.device)


def _names_of_long_runs(optimizer: ShardedOptimizer) -> set[str]:
    return {
        key
        for run in optimizer.runs
        if not run.is_whole and run.main.numel() > 1
        for key, value in optimizer.inner.state.get(run.main, {}).items()
        if _is_elementwise(run, key, value, None)
    }


def _entries(
    optimizer: ShardedOptimizer, members: Collection[int], wanted: Wanted, names: Collection[str] | None
) -> tuple[str, list[_Entry]]:
    """Returns what cannot be saved, if anything, and the state of divided parameters on this rank."""
    layout = optimizer.engine.layout
    entries: list[_Entry] = []
    for index, of_param in optimizer.pending.items() if not optimizer.has_made_runs else ():
        if index in members and optimizer.is_flat(index):
            values = {key: value for key, value in of_param.items() if wanted(key)}
            parts = {key: value for key, value in values.items() if isinstance(value, Parts)}
            rest = {key: value for key, value in values.items() if key not in parts}
            dtypes = {key: value[0][1].dtype for key, value in parts.items() if value}
            owned = layout.owned_range(index, optimizer.engine.collectives.rank)
            if owned is not None:
                start = layout.slots[index].start
                entries.append(_Entry({index: (owned[0] - start, owned[1] - start)}, dtypes, to_host(rest)))
    for run in optimizer.runs:
        if run.is_whole or run.members[0].param not in members:
            continue
        values = {key: value for key, value in _values_of(optimizer, run).items() if wanted(key)}
        dtypes = {key: value.dtype for key, value in values.items() if _is_elementwise(run, key, value, names)}
        rest = {key: value for key, value in values.items() if key not in dtypes}
        for key, value in rest.items():
            problem = describe_undividable(key, value, tuple(run.main.shape))
            if problem is not None:
                return f"the optimizer keeps {problem}, of {layout.params[run.members[0].param].name!r}", []
        if wanted(_EMPTY) and optimizer.inner.state.get(run.main) == {}:
            rest[_EMPTY] = None
        spans = {
            member.param: (
                member.start - layout.slots[member.param].start,
                member.end - layout.slots[member.param].start,
            )
            for member in run.members
        }
        if values or rest:
            entries.append(_Entry(spans, dtypes, to_host(rest)))
    return "", entries


def _by_param(entries: Sequence[_Entry]) -> dict[int, list[_Entry]]:
    by_param: dict[int, list[_Entry]] = {}
    for entry in entries:
        for index in entry.spans:
            by_param.setdefault(index, []).append(entry)
    return by_param


def _agreed_dtypes(
    optimizer: ShardedOptimizer, index: int, by_rank: Sequence[Mapping[int, Sequence[_Entry]]]
) -> dict[str, torch.dtype]:
    """Returns the dtypes of a parameter's element-wise state, after a check that all its owners have the same state.

    Raises:
        CheckpointError: if they have not: the missing part, as torch DDP would have it, was never computed.
    """
    layout = optimizer.engine.layout
    kinds_by_owner: dict[int, dict[str, Any]] = {}
    for owner, part in layout.holders(index):
        if part.start < part.end:
            kinds = [{**dict.fromkeys(e.values, "one value"), **e.dtypes} for e in by_rank[owner].get(index, ())]
            kinds_by_owner[owner] = kinds[0] if kinds else {}
    first = next(iter(kinds_by_owner.values()), {})
    if all(kinds == first for kinds in kinds_by_owner.values()):
        return next((of_rank[index][0].dtypes for of_rank in by_rank if index in of_rank), {})
    spec = layout.params[index]
    for name in dict.fromkeys(name for kinds in kinds_by_owner.values() for name in kinds if name != _EMPTY):
        lacking = [owner for owner, kinds in kinds_by_owner.items() if name not in kinds]
        if lacking:
            raise CheckpointError(
                f"state {name!r} of parameter {spec.name!r} is kept on rank(s) "
                f"{sorted(kinds_by_owner.keys() - lacking)} and not on rank(s) {lacking}, which step other parts of "
                "it, so that no rank knows all of it. Load a state on all ranks or on none; an optimizer that begins "
                "to keep something when it sees certain gradients needs whole parameters: pass "
                f"{optimizer.engine.all_reduce_option}"
            )
        if len({kinds[name] for kinds in kinds_by_owner.values()}) > 1:
            described = "; ".join(f"rank {owner}: {kinds[name]}" for owner, kinds in kinds_by_owner.items())
            raise CheckpointError(
                f"state {name!r} of parameter {spec.name!r} is kept in different ways on different ranks: {described}. "
                "Load a state on all ranks or on none"
            )
    return {name: kind for name, kind in first.items() if isinstance(kind, torch.dtype)}


def _gather_elements(
    optimizer: ShardedOptimizer,
    local: LocalState,
    dtypes: Mapping[int, Mapping[str, torch.dtype]],
    by_rank: Sequence[Mapping[int, Sequence[_Entry]]],
    roots: Sequence[bool],
    ranks: Collectives,
    named: NamedState,
) -> None:
    """Adds the full element-wise state to ``named`` on the ranks that are ``roots``. Collective."""
    layout = optimizer.engine.layout
    slots = layout.slots
    members_by_name: dict[tuple[int, str, torch.dtype], list[int]] = {}
    for index, of_param in dtypes.items():
        for key, dtype in of_param.items():
            members_by_name.setdefault((slots[index].buffer, key, dtype), []).append(index)
    for (buffer, key, dtype), members in sorted(members_by_name.items(), key=lambda pair: str(pair[0])):
        members.sort(key=lambda index: (slots[index].start, slots[index].end))
        held = [
            sorted(
                (slots[index].start + entry.spans[index][0], slots[index].start + entry.spans[index][1])
                for index in members
                for entry in of_rank.get(index, ())
            )
            for of_rank in by_rank
        ]
        full = [(slots[index].start, slots[index].end) for index in members]
        wanted = [full if is_root else [] for is_root in roots]
        read = _reader(
            [(slots[index].start + start, part) for index in members for start, part in _parts_of(local, index, key)]
        )
        # Ranks of other instances gather nothing, and start as many collectives.
        end = layout.buffers[buffer].numel if len(layout.domains) > 1 or layout.num_instances > 1 else 0
        results = redistribute(read, held, wanted, ranks, dtype, optimizer.engine.device, onto_host=True, end=end)
        for index, value in zip(members, results, strict=True) if roots[ranks.rank] else ():
            spec = layout.params[index]
            named[index][key] = value.as_strided(spec.shape, spec.stride)


def _parts_of(local: LocalState, index: int, key: str) -> Parts:
    value = local.get(index, {}).get(key)
    return value if isinstance(value, Parts) else Parts()


def _reader(parts: Sequence[tuple[int, Tensor]]) -> Callable[[int, int], Tensor]:
    """Returns a function that reads a range from parts with these addresses."""
    parts = sorted((pair for pair in parts if pair[1].numel()), key=lambda pair: pair[0])
    starts = [start for start, _ in parts]

    def read(start: int, end: int) -> Tensor:
        place = bisect.bisect_right(starts, start) - 1
        pieces = []
        while place < len(parts) and starts[place] < end:
            first, part = parts[place]
            pieces.append(part[max(start - first, 0) : end - first])
            place += 1
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    return read


def _shaped(spec: ParamSpec, value: Any) -> Any:
    if isinstance(value, Parts):
        return value.joined().as_strided(spec.shape, spec.stride).detach().cpu().clone()
    return _on_host(value)


def _on_host(value: Any) -> Any:
    return value.detach().cpu().clone() if isinstance(value, Tensor) else copy.deepcopy(value)


def load_full_state(optimizer: ShardedOptimizer, state_dict: Mapping[str, Any]) -> None:
    """Loads torch's format; every rank has all of it.

    Raises:
        CheckpointError: if groups or shapes do not fit, before anything is changed.
    """
    inner = optimizer.inner
    groups = state_dict["param_groups"]
    sizes = [len(group["params"]) for group in groups]
    if sizes != [len(group["params"]) for group in inner.param_groups]:
        raise CheckpointError(
            f"the state has parameter groups of {sizes} parameters, the optimizer of "
            f"{[len(group['params']) for group in inner.param_groups]}: build the optimizer as it was when the state "
            "was saved"
        )
    optimizer.prepare()
    by_id = optimizer.engine.index_by_id
    named: NamedState = {}
    without_runs: dict[Tensor, Any] = {}
    numbers = set()
    for group, present in zip(groups, inner.param_groups, strict=True):
        for number, param in zip(group["params"], present["params"], strict=True):
            numbers.add(number)
            values = state_dict["state"].get(number, {})
            index = by_id.get(id(param))
            if index is None or not optimizer.has_runs:
                without_runs[param] = values
            elif values:
                named[index] = dict(values)
    _check_shapes(optimizer, named, element_keys(optimizer, named))
    rest = {key: value for key, value in state_dict["state"].items() if key not in numbers}
    load_groups(optimizer, groups, without_runs, rest)
    local = cut(optimizer, named, copies=not optimizer.has_made_runs)
    optimizer.loaded = set(local)
    put_beside_main_params(optimizer, local)


def load_groups(
    optimizer: ShardedOptimizer, groups: Any, without_runs: Mapping[Tensor, Any], rest: Mapping[Any, Any]
) -> None:
    """Loads options with the optimizer's own ``load_state_dict``, and the state of parameters ``without_runs``.

    ``rest``: state of no parameter, by its key.
    """
    inner = optimizer.inner
    params = [group["params"] for group in inner.param_groups]
    inner.state.clear()
    lists = [[param for param in of_group if param in without_runs] for of_group in params]
    numbers = {id(param): n for n, param in enumerate(param for of_group in lists for param in of_group)}
    saved = [
        {**group, "params": [numbers[id(param)] for param in of_group]}
        for group, of_group in zip(groups, lists, strict=True)
    ]
    states = {numbers[id(param)]: values for param, values in without_runs.items() if values}
    for group, of_group in zip(inner.param_groups, lists, strict=True):
        group["params"] = of_group
    try:
        with optimizer.calls_allowed(), without_state_hooks(inner):
            inner.load_state_dict({"state": {**states, **rest}, "param_groups": saved})
    finally:
        for group, of_group in zip(inner.param_groups, params, strict=True):
            group["params"] = of_group
    # torch has cast the state to the Parameter's dtype. A frozen 16-bit one that joins later has an fp32 main param.
    for param in optimizer.engine.watch.frozen:
        for key, value in without_runs.get(param, {}).items() if param.dtype in SIXTEEN_BIT_DTYPES else ():
            if key != "step":
                inner.state[param][key] = tree_map(functools.partial(_in_fp32, param.device), value)


def _in_fp32(device: torch.device, value: Any) -> Any:
    return value.detach().to(device, torch.float32, copy=True) if type(value) is Tensor else copy.deepcopy(value)


def load_main_params(optimizer: ShardedOptimizer, main_params: Mapping[str, Tensor]) -> None:
    """Loads saved main params; those of parameters without runs wait for the plan, those of frozen ones until they are
    trained.

    Raises:
        CheckpointError: if a shape is not the parameter's, before anything is changed.
    """
    specs = optimizer.engine.layout.params
    named = {
        index: {MAIN_PARAM: main_params[spec.name]}
        for index, spec in enumerate(specs)
        if spec.has_main_param and spec.name in main_params
    }
    frozen = frozen_params(optimizer)
    for name in frozen.keys() & main_params.keys():
        _check_shape(name, "main param", main_params[name], tuple(frozen[name].shape))
    local = cut(optimizer, named, copies=not optimizer.has_made_runs)
    for name in frozen.keys() & main_params.keys():
        optimizer.frozen_main_params[name] = main_params[name].to("cpu", torch.float32, copy=True)
    if not optimizer.has_made_runs:
        pending = optimizer.pending
        put(optimizer, {i: pending.get(i, {}) | local.get(i, {}) for i in pending.keys() | local.keys()})
    for run in optimizer.runs:
        if run.has_main_param:
            _fill(run.main, run, MAIN_PARAM, local, optimizer)


def frozen_params(optimizer: ShardedOptimizer) -> dict[str, Tensor]:
    """Returns this rank's parts of the optimizer's 16-bit parameters that were never trained, by name."""
    engine = optimizer.engine
    names = {id(param): name for name, param in engine.named_params().items()}
    return {
        names[id(param)]: engine.local_parts.local_view(param)
        for param in optimizer.params()
        if id(param) in names and id(param) not in engine.index_by_id and param.dtype in SIXTEEN_BIT_DTYPES
    }


def give_back(optimizer: ShardedOptimizer) -> None:
    """Gathers the state to every rank, and keys it by the Parameters. Collective if it is sharded."""
    engine = optimizer.engine
    if optimizer.is_sharded:
        engine.collectives.require_all_ranks(
            f"the first use of a sharded {type(optimizer.inner).__name__} after close()"
        )
    saved = full_state(optimizer, everywhere=True)
    main_params = full_main_params(optimizer, everywhere=True)
    if not optimizer.is_sharded or engine.model_parallel.saves_parts(engine.collectives):
        optimizer.last_main_params = main_params or {}
    optimizer.runs = []
    optimizer.has_made_runs = False
    with optimizer.calls_allowed():
        load_as_torchs(optimizer.inner, saved, engine.local_parts)
