"""An optimizer's state outside of a step: by parameter, element-wise values as parts, other values as they are.

It is read from runs and put into runs here; :func:`~..states.redistribute_state` sends it. :mod:`.full_state` makes
torch's full-shaped format of it, and :mod:`~..checkpoint.directories` the parts of a directory.

[Note: counters of joined parameters]
Members of a run share one counter, and a saved state has one for each parameter: torch adds to it in place. Members
whose counters differ in a loaded state get runs of their own.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..errors import CheckpointError
from ..judge import is_per_element
from ..layout import BufferLayout, ParamSpec
from ..states import LocalState, Parts, as_saved, copied, per_element_keys, redistribute_state
from .runs import Run, Values, flat, group_members
from .state_hooks import without_state_hooks

if TYPE_CHECKING:
    from .sharded_optimizer import ShardedOptimizer

MAIN_PARAM = "(main param)"
"""The name of a parameter's fp32 main param, beside the names of its state."""

NamedState = dict[int, Values]
"""By parameter in the layout, the values of its state, full-shaped; the main param is one of them."""


# --- runs -------------------------------------------------------------------------------------------------------------


def local_state(
    optimizer: ShardedOptimizer, *, is_saved: bool = False, names: Collection[str] | None = None
) -> LocalState:
    """Returns this rank's state, as views.

    Args:
        is_saved: whether state of whole parameters is returned as the class saves it, and by one rank only.
        names: of element-wise state; those of flat groups by default.
    """
    if not optimizer.has_made_runs:
        return optimizer.pending
    layout = optimizer.engine.layout
    names = optimizer.element_names if names is None else names
    local: LocalState = {}
    for run in optimizer.runs:
        if is_saved and not optimizer.is_saved_here(run):
            continue
        values = values_of(optimizer, run, is_saved=is_saved)
        for member in run.members:
            of_param = local.setdefault(member.param, {})
            start = member.start - layout.slots[member.param].start
            for key, value in values.items():
                if is_elementwise(run, key, value, names):
                    of_param.setdefault(key, Parts()).append((start, run.read(value, member)))
                else:
                    of_param[key] = value
    return local


def values_of(optimizer: ShardedOptimizer, run: Run, *, is_saved: bool = False) -> Values:
    values = dict(optimizer.inner.state.get(run.main, {}))
    if is_saved and run.is_whole:
        values = dict(as_saved(optimizer.inner, {0: run.main}).get(0, {}))
    if run.has_main_param:
        values[MAIN_PARAM] = run.main
    return values


def is_elementwise(run: Run, key: str, value: Any, names: Collection[str] | None) -> bool:
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
            fill(run.main, run, MAIN_PARAM, local, optimizer)
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
    fill(result, run, key, local, optimizer)
    return result


def fill(target: Tensor, run: Run, key: str, local: LocalState, optimizer: ShardedOptimizer) -> None:
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
    check_shapes(optimizer, named, keys)
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


def check_shapes(optimizer: ShardedOptimizer, named: NamedState, keys: Collection[str]) -> None:
    for index, values in named.items():
        spec = optimizer.engine.layout.params[index]
        elementwise = keys if optimizer.is_flat(index) else ()
        for key, value in values.items():
            if isinstance(value, Tensor) and (key in elementwise or key == MAIN_PARAM):
                check_shape(spec.name, "main param" if key == MAIN_PARAM else f"state {key!r}", value, spec.shape)


def check_shape(name: str, what: str, value: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(value.shape) != shape:
        raise CheckpointError(
            f"{what} of parameter {name!r} has shape {tuple(value.shape)}, the parameter {shape}: this state is of "
            "another model"
        )


# --- another plan -----------------------------------------------------------------------------------------------------


def moved(optimizer: ShardedOptimizer, local: LocalState, before: BufferLayout) -> LocalState:
    """Returns this rank's state for the present plan, from its state for the plan ``before``. Collective, unless the
    plans are one."""
    engine = optimizer.engine
    after = engine.layout
    if before is after or not optimizer.is_sharded:
        return local
    result: LocalState = {}
    for domain in after.domains:
        ranks = engine.ranks_of(domain)
        of_domain = {i: values for i, values in local.items() if after.buckets[after.slots[i].bucket].domain == domain}
        facts = {
            (index, key): value[0][1].dtype
            for index, values in of_domain.items()
            for key, value in values.items()
            if isinstance(value, Parts) and value
        }
        dtypes: dict[int, dict[str, torch.dtype]] = {}
        for of_rank in ranks.all_gather_objects(facts):
            for (index, key), dtype in of_rank.items():
                dtypes.setdefault(index, {})[key] = dtype
        sent = redistribute_state(
            of_domain,
            dtypes,
            lambda index: after.params[index].numel,
            lambda index: owned_parts(before, index),
            lambda index: owned_parts(after, index),
            ranks,
            engine.device,
        )
        for index, values in of_domain.items():
            result[index] = {
                key: sent.get(index, {}).get(key, value) if isinstance(value, Parts) else value
                for key, value in values.items()
            }
    return result


def owned_parts(layout: BufferLayout, index: int) -> Iterator[tuple[int, int, int]]:
    """Yields the owners of a parameter's elements: the rank among those that share it, and the elements
    ``[start, end)``."""
    first = layout.slots[index].start
    for rank, part in layout.holders(index):
        yield rank, part.start - first, part.end - first
