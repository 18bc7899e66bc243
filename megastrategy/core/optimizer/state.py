"""An optimizer's state outside of a step: by parameter, element-wise values as parts, other values as they are.

It is read from runs and put into runs here; :func:`.redistribute.redistribute` sends it. Three forms of it leave this
file: torch's own full-shaped format, the parts of a directory (:class:`~megastrategy.core.shards.FlatShard`), and state
that waits for the plan (full-shaped, by parameter).

[Note: counters of joined parameters]
Members of a run share one counter, and a saved state has one for each parameter: torch adds to it in place. Members
whose counters differ in a loaded state get runs of their own.
"""

from __future__ import annotations

import bisect
import copy
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..collectives import Collectives
from ..errors import CheckpointError
from ..layout import SIXTEEN_BIT_DTYPES, BufferLayout, Domain, ParamSpec
from ..states import as_saved, copied, groups_as_saved, number_params, per_element_keys, to_host
from ..trials import is_per_element
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


def local_state(optimizer: ShardedOptimizer, *, is_saved: bool = False) -> LocalState:
    """Returns this rank's state, as views; if ``is_saved``, that of whole parameters as the class saves it."""
    if not optimizer.runs:
        return optimizer.pending
    layout = optimizer.engine.layout
    named: LocalState = {}
    for run in optimizer.runs:
        values = dict(optimizer.inner.state.get(run.main, {}))
        if is_saved and run.is_whole:
            values = dict(as_saved(optimizer.inner, {0: run.main}).get(0, {}))
        if run.has_main_param:
            values[MAIN_PARAM] = run.main
        for member in run.members:
            of_param = named.setdefault(member.param, {})
            start = member.start - layout.slots[member.param].start
            for key, value in values.items():
                if _is_elementwise(optimizer, run, key, value):
                    of_param.setdefault(key, Parts()).append((start, run.read(value, member)))
                else:
                    of_param[key] = value
    return named


def _is_elementwise(optimizer: ShardedOptimizer, run: Run, key: str, value: Any) -> bool:
    if key == MAIN_PARAM:
        return True
    return not run.is_whole and is_per_element(key, value, tuple(run.main.shape), optimizer.element_names)


def put_local(optimizer: ShardedOptimizer, named: LocalState) -> None:
    """Puts this rank's state into the present runs, which cover the same elements."""
    if not named:
        return
    for run in optimizer.runs:
        optimizer.inner.state.pop(run.main, None)
    whole = {run.members[0].param for run in optimizer.runs if run.is_whole}
    _divide_runs(optimizer, {param: _shared_values(values) for param, values in named.items() if param not in whole})
    direct: dict[Tensor, Values] = {}
    loaded: dict[Tensor, Values] = {}
    for run in optimizer.runs:
        values = {key: join(run, key, named, optimizer) for key in named.get(run.members[0].param, {})}
        main = values.pop(MAIN_PARAM, None)
        if main is not None and run.weights is not None:
            run.main.copy_(main if main.shape == run.main.shape else main.view_as(run.main))
        if values:
            (loaded if run.members[0].param in optimizer.loaded else direct)[run.main] = values
    optimizer.inner.state.update(direct)
    _load_into_runs(optimizer, loaded)
    optimizer.loaded.clear()


def _load_into_runs(optimizer: ShardedOptimizer, loaded: Mapping[Tensor, Values]) -> None:
    """Loads the state of runs with the optimizer's own ``load_state_dict``, which converts it; groups stay as they are.

    torch casts state to the dtype of what is stepped, as under torch DDP.
    """
    inner = optimizer.inner
    defaults = dict(inner.defaults)  # torch adds to them in a load
    others = {tensor: values for tensor, values in inner.state.items() if tensor not in loaded}
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
    inner.state.update(others)


def _shared_values(values: Mapping[str, Any]) -> list[tuple[str, Any]]:
    shared = ((key, None if isinstance(value, Parts) else _comparable(value)) for key, value in values.items())
    return sorted(shared, key=lambda pair: pair[0])


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


def join(run: Run, key: str, named: LocalState, optimizer: ShardedOptimizer) -> Any:
    first = named[run.members[0].param][key]
    if not isinstance(first, Parts):
        return first
    slots = optimizer.engine.layout.slots
    parts = [part for member in run.members for _, part in named[member.param].get(key, ())]
    result = torch.zeros_like(run.main, dtype=parts[0].dtype if parts else torch.float32)
    for member in run.members:
        offset = slots[member.param].start
        for start, values in named[member.param][key]:
            low = max(start + offset, member.start)
            high = min(start + offset + values.numel(), member.end)
            if low < high:
                flat(result)[low - run.start : high - run.start] = values[low - offset - start : high - offset - start]
    return result


# --- full-shaped values -----------------------------------------------------------------------------------------------


def taken_from(optimizer: ShardedOptimizer) -> LocalState:
    """Takes this rank's part of the state of the model's parameters out of the optimizer: it waits for the plan."""
    index_by_id = optimizer.engine.index_by_id
    inner = optimizer.inner
    taken = {index_by_id[id(param)]: param for param in optimizer.params() if id(param) in index_by_id}
    local = optimizer.engine.local_parts.local_view
    named = {
        index: {key: local(value) for key, value in inner.state.pop(param).items()}
        for index, param in taken.items()
        if param in inner.state
    }
    return cut(optimizer, {index: values for index, values in named.items() if values}, is_loaded=False)


def load(optimizer: ShardedOptimizer, named: NamedState) -> None:
    """Cuts this rank's part of every value, and puts it into the runs; before there are any, it waits for the plan.

    Raises:
        CheckpointError: if a shape is not the parameter's, before anything is changed.
    """
    local = cut(optimizer, named)
    optimizer.loaded |= local.keys()
    put(optimizer, local)


def put(optimizer: ShardedOptimizer, local: LocalState) -> None:
    """Puts this rank's state of the present plan into the runs, or keeps it until there are some."""
    if optimizer.runs:
        put_local(optimizer, local)
    else:
        optimizer.pending = local
        optimizer.pending_layout = optimizer.engine.layout


def cut(optimizer: ShardedOptimizer, named: NamedState, *, is_loaded: bool = True) -> LocalState:
    """Returns this rank's parts of full-shaped values, in memory of their own and, if they are loaded, in the dtypes
    that torch's ``load_state_dict`` gives them. Raises as :func:`load`."""
    layout = optimizer.engine.layout
    rank = optimizer.engine.collectives.rank
    keys = element_keys(optimizer, named)
    _check_shapes(optimizer, named, keys)
    local: LocalState = {}
    for index, values in named.items():
        spec = layout.params[index]
        is_flat = optimizer.is_flat(index)
        local[index] = {}
        for key, value in values.items():
            kept = as_loaded(spec, key, value) if is_loaded else _as_made(spec, value)
            if is_flat and isinstance(value, Tensor) and (key in keys or key == MAIN_PARAM):
                owned = layout.owned_range(index, rank)
                whole = _in_order(spec, kept)
                kept = Parts()
                if owned is not None:
                    first = layout.slots[index].start
                    part = whole[owned[0] - first : owned[1] - first]
                    kept = Parts([(owned[0] - first, part.clone())])
            local[index][key] = kept
    return local


def _in_order(spec: ParamSpec, value: Tensor) -> Tensor:
    """Returns the elements in the order of the parameter's memory, 1-D."""
    if value.stride() != spec.stride:
        value = torch.empty_strided(spec.shape, spec.stride, dtype=value.dtype, device=value.device).copy_(value)
    return value.as_strided((spec.numel,), (1,))


def as_loaded(spec: ParamSpec, key: str, value: Any) -> Any:
    """Returns a copy of a value in the dtype that torch's ``load_state_dict`` gives it, as one of the main param."""
    dtype = torch.float32 if spec.has_main_param else spec.dtype
    if type(value) is Tensor and dtype.is_floating_point and key != "step":
        return value.detach().to(dtype, copy=True)
    return copied(value)


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
        elementwise = {MAIN_PARAM, *(keys if optimizer.is_flat(index) else ())}
        for key, value in values.items():
            if key in elementwise and isinstance(value, Tensor) and tuple(value.shape) != spec.shape:
                raise CheckpointError(
                    f"state {key!r} of parameter {spec.name!r} has shape {tuple(value.shape)}, the parameter "
                    f"{spec.shape}: this state is of another model"
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
        sent = redistribute(_read_from(parts), held, wanted, ranks, dtype, engine.device, end=end)
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


def full_state(
    optimizer: ShardedOptimizer, *, everywhere: bool = False
) -> tuple[dict[str, Any], dict[str, Tensor] | None]:
    """Returns the state as torch DDP would have saved it, on the host, and the main params by name. Collective.

    ``state`` and the main params are None on ranks that save nothing, unless ``everywhere``. Of a parameter that ranks
    of the model have in parts, both are of this rank's part.
    """
    optimizer.prepare()
    inner = optimizer.inner
    engine = optimizer.engine
    if optimizer.runs and not optimizer.is_sharded:
        return _unsharded_state(optimizer)
    numbers = number_params(inner)
    by_id = engine.index_by_id
    model_params = {id(param) for param in optimizer.params() if id(param) in by_id} if optimizer.has_runs else set()
    own = {numbers[id(p)]: p for p in optimizer.params() if id(p) not in model_params}
    states: dict[int, Any] = dict(as_saved(inner, own))
    named = _gathered(optimizer, everywhere=everywhere)
    if named is None:
        return {"state": None, "param_groups": groups_as_saved(inner, numbers)}, None
    if not optimizer.runs:
        for index, param in enumerate(engine.params):  # the first step makes them of the weights
            if engine.layout.params[index].has_main_param and optimizer.has_runs and id(param) in model_params:
                weight = engine.local_parts.local_view(param).detach()
                named.setdefault(index, {}).setdefault(MAIN_PARAM, weight.to("cpu", torch.float32))
    main_params: dict[str, Tensor] = {}
    number_of = {by_id[key]: number for key, number in numbers.items() if key in by_id}
    for index, values in sorted(named.items()):
        main = values.pop(MAIN_PARAM, None)
        if main is not None:
            main_params[engine.layout.params[index].name] = main
        is_empty = _EMPTY in values
        values.pop(_EMPTY, None)
        if values or is_empty:
            states[number_of[index]] = values
    return {"state": states, "param_groups": groups_as_saved(inner, numbers)}, main_params


def _unsharded_state(optimizer: ShardedOptimizer) -> tuple[dict[str, Any], dict[str, Tensor]]:
    inner = optimizer.inner
    specs = optimizer.engine.layout.params
    with optimizer.all_in_groups(), without_state_hooks(inner):
        saved = inner.state_dict()
    mains = {specs[run.members[0].param].name: run.main.detach() for run in optimizer.runs if run.weights is not None}
    return saved, to_host(mains)


def _gathered(optimizer: ShardedOptimizer, *, everywhere: bool) -> NamedState | None:
    """Returns the state of the model's parameters, in the shape that they have here, on the ranks that save, or
    ``everywhere``; None elsewhere."""
    engine = optimizer.engine
    is_root = everywhere or not optimizer.is_sharded or engine.model_parallel.saves_parts(engine.collectives)
    local = local_state(optimizer, is_saved=True)
    layout = engine.layout
    if not optimizer.is_sharded:
        return {
            index: {key: _shaped(layout.params[index], value) for key, value in values.items()}
            for index, values in local.items()
        }
    engine.collectives.wait_for_device(engine.device, "all-gather")  # the host copies next, and a rank may be gone
    named: NamedState = {}
    for domain in layout.domains:
        of_domain = {
            index: values
            for index, values in local.items()
            if layout.buckets[layout.slots[index].bucket].domain == domain
        }
        named |= _gathered_over(optimizer, of_domain, engine.ranks_of(domain), is_root)
    # A copy of each: torch adds to a counter in place, once for each parameter.
    return {index: {k: copied(v) for k, v in values.items()} for index, values in named.items()} if is_root else None


def _gathered_over(optimizer: ShardedOptimizer, local: LocalState, ranks: Collectives, is_root: bool) -> NamedState:
    """Returns the state of ``local`` on all ranks that share these parameters, full-shaped, if ``is_root``."""
    engine = optimizer.engine
    layout = engine.layout
    named: NamedState = {}
    held_by: dict[tuple[int, str, torch.dtype], list[list[tuple[int, int]]]] = {}
    keys_of: dict[tuple[int, str, torch.dtype], set[int]] = {}
    by_rank = ranks.all_gather_objects((is_root, _facts(optimizer, local)))
    for rank, (_, of_rank) in enumerate(by_rank):
        for index, key, spans, value in of_rank:
            if spans is None:
                named.setdefault(index, {}).setdefault(key, value)
                continue
            slot = layout.slots[index]
            name = (slot.buffer, key, value)
            held = held_by.setdefault(name, [[] for _ in range(ranks.size)])
            held[rank] += [(slot.start + start, slot.start + end) for start, end in spans]
            keys_of.setdefault(name, set()).add(index)
    for name, held in sorted(held_by.items(), key=lambda pair: str(pair[0])):
        buffer, key, dtype = name
        params = sorted(keys_of[name], key=lambda index: layout.slots[index].start)
        wanted = [(layout.slots[index].start, layout.slots[index].end) for index in params]
        roots = [wanted if saves else [] for saves, _ in by_rank]
        read = _reader(optimizer, local, buffer, key)
        held = [sorted(of_rank) for of_rank in held]
        end = layout.buffers[buffer].numel if len(layout.domains) > 1 else 0
        full = redistribute(read, held, roots, ranks, dtype, engine.device, onto_host=True, end=end)
        for index, value in zip(params, full, strict=True) if is_root else ():
            spec = layout.params[index]
            named.setdefault(index, {})[key] = value.as_strided(spec.shape, spec.stride)
    return named


def _facts(optimizer: ShardedOptimizer, local: LocalState) -> list[tuple[int, str, list[tuple[int, int]] | None, Any]]:
    """Returns this rank's values: parameter, name, ranges of an element-wise value or None, and its dtype or the other
    value itself."""
    facts: list[tuple[int, str, list[tuple[int, int]] | None, Any]] = []
    for run in optimizer.runs:
        if optimizer.inner.state.get(run.main) == {}:
            facts += [(member.param, _EMPTY, None, None) for member in run.members if member.param in local]
    for index, values in local.items():
        for key, value in values.items():
            if not isinstance(value, Parts):
                facts.append((index, key, None, _on_host(value)))
            elif value:
                facts.append((index, key, [(start, start + part.numel()) for start, part in value], value[0][1].dtype))
    return facts


def _reader(optimizer: ShardedOptimizer, local: LocalState, buffer: int, key: str) -> Callable[[int, int], Tensor]:
    slots = optimizer.engine.layout.slots
    return _read_from(
        [
            (slots[index].start + start, part)
            for index, values in local.items()
            if slots[index].buffer == buffer and isinstance(values.get(key), Parts)
            for start, part in values[key]
        ]
    )


def _read_from(parts: Sequence[tuple[int, Tensor]]) -> Callable[[int, int], Tensor]:
    """Returns a function that reads a range from parts with these addresses."""
    parts = sorted(parts, key=lambda pair: pair[0])

    def read(start: int, end: int) -> Tensor:
        pieces = [
            part[max(start - first, 0) : end - first]
            for first, part in parts
            if first < end and start < first + part.numel()
        ]
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
    others: dict[Any, Any] = {}
    numbers = set()
    for group, present in zip(groups, inner.param_groups, strict=True):
        for number, param in zip(group["params"], present["params"], strict=True):
            numbers.add(number)
            values = state_dict["state"].get(number, {})
            index = by_id.get(id(param))
            if index is None or not optimizer.has_runs:
                others[param] = values
            elif values:
                named[index] = dict(values)
    _check_shapes(optimizer, named, element_keys(optimizer, named))
    load_groups(optimizer, groups, others, {k: v for k, v in state_dict["state"].items() if k not in numbers})
    local = cut(optimizer, named)
    for index, values in optimizer.pending.items():  # a load of the other state keeps main params
        if MAIN_PARAM in values and not optimizer.runs:
            local.setdefault(index, {})[MAIN_PARAM] = values[MAIN_PARAM]
    optimizer.loaded = set(local)
    put(optimizer, local)


def load_groups(
    optimizer: ShardedOptimizer, groups: Any, others: Mapping[Tensor, Any], rest: Mapping[Any, Any]
) -> None:
    """Loads options, and the state of parameters that have no runs, with the optimizer's own ``load_state_dict``."""
    inner = optimizer.inner
    params = [group["params"] for group in inner.param_groups]
    inner.state.clear()
    without_runs = [[param for param in of_group if param in others] for of_group in params]
    numbers = {id(param): n for n, param in enumerate(param for of_group in without_runs for param in of_group)}
    saved = [
        {**group, "params": [numbers[id(param)] for param in of_group]}
        for group, of_group in zip(groups, without_runs, strict=True)
    ]
    state = {numbers[id(param)]: values for param, values in others.items() if values}
    for group, of_group in zip(inner.param_groups, without_runs, strict=True):
        group["params"] = of_group
    try:
        with optimizer.calls_allowed(), without_state_hooks(inner):
            inner.load_state_dict({"state": {**state, **rest}, "param_groups": saved})
    finally:
        for group, of_group in zip(inner.param_groups, params, strict=True):
            group["params"] = of_group
    # torch has cast the state to the Parameter's dtype. A frozen 16-bit one that joins later has an fp32 main param.
    for param in optimizer.engine.watch.frozen:
        for key, value in others.get(param, {}).items() if param.dtype in SIXTEEN_BIT_DTYPES else ():
            if type(value) is Tensor and key != "step":
                inner.state[param][key] = value.detach().to(param.device, torch.float32, copy=True)


def load_main_params(optimizer: ShardedOptimizer, main_params: Mapping[str, Tensor]) -> None:
    """Loads saved main params; those of parameters without runs wait for the plan."""
    specs = optimizer.engine.layout.params
    named = {
        index: {MAIN_PARAM: main_params[spec.name]}
        for index, spec in enumerate(specs)
        if spec.has_main_param and spec.name in main_params
    }
    local = cut(optimizer, named)
    if not optimizer.runs:
        put(
            optimizer,
            {index: {**optimizer.pending.get(index, {}), **values} for index, values in local.items()}
            | {index: values for index, values in optimizer.pending.items() if index not in local},
        )
    for run in optimizer.runs:
        if run.has_main_param and all(member.param in local for member in run.members):
            main = join(run, MAIN_PARAM, local, optimizer)
            run.main.copy_(main.view_as(run.main))


def give_back(optimizer: ShardedOptimizer) -> None:
    """Gathers the state to every rank, and keys it by the Parameters. Collective if it is sharded."""
    engine = optimizer.engine
    if optimizer.is_sharded:
        engine.collectives.require_all_ranks(
            f"the first use of a sharded {type(optimizer.inner).__name__} after close()"
        )
    saved, main_params = full_state(optimizer, everywhere=True)
    if not optimizer.is_sharded or engine.model_parallel.saves_parts(engine.collectives):
        optimizer.last_main_params = main_params or {}
    optimizer.runs = []
    with optimizer.calls_allowed():
        load_as_torchs(optimizer.inner, saved, engine.local_parts)
