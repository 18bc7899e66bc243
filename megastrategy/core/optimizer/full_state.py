"""An optimizer's state in torch's format: full-shaped, by number, in host memory, on the rank that saves.

Ranks report to each other which state they have, so that no value is saved if a part of it was never computed. Then
:func:`~..states.redistribute_state` sends the elements, and :func:`~..states.gather_states` the state of whole
parameters. Loading cuts it for this rank.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from ..collectives import Collectives
from ..errors import CheckpointError
from ..judge import describe_undividable
from ..layout import SIXTEEN_BIT_DTYPES, ParamSpec
from ..states import (
    LocalState,
    Parts,
    as_saved,
    copied,
    gather_states,
    groups_as_saved,
    number_params,
    redistribute_state,
    to_host,
)
from .plain_optimizer import load_as_torchs
from .state import (
    MAIN_PARAM,
    NamedState,
    check_shape,
    check_shapes,
    cut,
    element_keys,
    fill,
    is_elementwise,
    local_state,
    owned_parts,
    put,
    put_beside_main_params,
    values_of,
)
from .state_hooks import without_state_hooks

if TYPE_CHECKING:
    from .sharded_optimizer import ShardedOptimizer

_EMPTY = "(looked up)"
"""The name of nothing, for a parameter whose state the optimizer has looked up and left empty: torch saves that."""


# --- saving -----------------------------------------------------------------------------------------------------------


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
        named |= _gathered_over(optimizer, members, wanted, ranks, is_root)
    return named if is_root else None


_Kind = tuple[torch.dtype | None, Any]
"""What a rank reports of a value: the dtype of an element-wise one; None and the value, in host memory, of another."""

_Report = dict[int, dict[str, _Kind]]
"""By parameter and name."""


def _gathered_over(
    optimizer: ShardedOptimizer, members: Collection[int], wanted: Wanted, ranks: Collectives, is_root: bool
) -> NamedState:
    """Returns the wanted values of these parameters, which ``ranks`` share, full-shaped, if ``is_root``.

    Raises:
        CheckpointError: on all ranks, if the state of one cannot be saved, or those of several do not fit together.
    """
    engine = optimizer.engine
    specs = engine.layout.params
    # Names that the poison test did not find: a run of one element cannot distinguish such state from a counter.
    later_names = ranks.all_gather_objects(_names_of_long_runs(optimizer))
    names = None if optimizer.element_names is None else set(optimizer.element_names).union(*later_names)
    local = _wanted_state(optimizer, members, wanted, names)
    flat = {index: values for index, values in local.items() if optimizer.is_flat(index)}
    reports = ranks.all_gather_objects((is_root, _problem(optimizer, members, wanted, names), _report(optimizer, flat)))
    for rank, (_, problem, _) in enumerate(reports):
        if problem:
            raise CheckpointError(f"rank {rank}: {problem}")
    roots = [rank for rank, (is_receiver, _, _) in enumerate(reports) if is_receiver]
    by_rank = [report for _, _, report in reports]
    kinds = {index: _agreed_kinds(optimizer, index, by_rank) for index in sorted(set().union(*by_rank))}
    dtypes = {
        index: {key: dtype for key, (dtype, _) in of_param.items() if dtype is not None}
        for index, of_param in kinds.items()
    }
    elements = redistribute_state(
        flat,
        dtypes,
        lambda index: specs[index].numel,
        lambda index: owned_parts(engine.layout, index),
        lambda index: [(rank, 0, specs[index].numel) for rank in roots],
        ranks,
        engine.device,
        onto_host=True,
    )
    whole = {
        index: {key: _in_shape(specs[index], value) for key, value in values.items()}
        for index, values in local.items()
        if index not in flat
    }
    if not optimizer.has_made_runs:  # each rank has all of them
        wholes = to_host(whole)
    else:
        wholes = dict(gather_states(whole, ranks, engine.device, [rank in roots for rank in range(ranks.size)]))
    if not is_root:
        return {}
    named: NamedState = dict(wholes)
    for index, of_param in kinds.items():
        # A copy for each parameter: torch adds to a counter in place.
        named[index] = {
            key: copied(value) if dtype is None else _in_shape(specs[index], elements[index][key], dtype)
            for key, (dtype, value) in of_param.items()
        }
    return named


def _wanted_state(
    optimizer: ShardedOptimizer, members: Collection[int], wanted: Wanted, names: Collection[str] | None
) -> LocalState:
    local = {
        index: {key: value for key, value in values.items() if wanted(key)}
        for index, values in local_state(optimizer, is_saved=True, names=names).items()
        if index in members
    }
    for run in optimizer.runs if wanted(_EMPTY) else ():
        if optimizer.inner.state.get(run.main) == {} and optimizer.is_saved_here(run):
            for member in run.members:
                if member.param in members:
                    local[member.param][_EMPTY] = None
    return {index: values for index, values in local.items() if values}


def _names_of_long_runs(optimizer: ShardedOptimizer) -> set[str]:
    return {
        key
        for run in optimizer.runs
        if not run.is_whole and run.main.numel() > 1
        for key, value in optimizer.inner.state.get(run.main, {}).items()
        if is_elementwise(run, key, value, None)
    }


def _problem(
    optimizer: ShardedOptimizer, members: Collection[int], wanted: Wanted, names: Collection[str] | None
) -> str:
    """Describes state of a flat shard that cannot be saved; empty if there is none."""
    for run in optimizer.runs:
        if run.is_whole or run.members[0].param not in members:
            continue
        for key, value in values_of(optimizer, run).items():
            if wanted(key) and not is_elementwise(run, key, value, names):
                problem = describe_undividable(key, value, tuple(run.main.shape))
                if problem is not None:
                    name = optimizer.engine.layout.params[run.members[0].param].name
                    return f"the optimizer keeps {problem}, of {name!r}"
    return ""


def _report(optimizer: ShardedOptimizer, flat: LocalState) -> _Report:
    """Describes the state of the parameters that this rank owns a part of."""
    layout = optimizer.engine.layout
    hosts: dict[int, Any] = {}  # one copy of the counter that members of a run share: it is pickled once
    report: _Report = {}
    for index, values in flat.items():
        if layout.owned_range(index, optimizer.engine.collectives.rank) is None:
            continue
        report[index] = {}
        for key, value in values.items():
            if isinstance(value, Parts):
                report[index][key] = (value[0][1].dtype, None)
            else:
                if id(value) not in hosts:
                    hosts[id(value)] = to_host(value)
                report[index][key] = (None, hosts[id(value)])
    return report


def _agreed_kinds(optimizer: ShardedOptimizer, index: int, by_rank: Sequence[_Report]) -> dict[str, _Kind]:
    """Returns what the owners of a parameter report, after a check that all have the same state.

    Of a value that is not element-wise it is the lowest rank's.

    Raises:
        CheckpointError: if they have not: the missing part, as torch DDP would have it, was never computed.
    """
    layout = optimizer.engine.layout
    reports_by_owner = {
        rank: by_rank[rank].get(index, {}) for rank, start, end in owned_parts(layout, index) if start < end
    }
    if not reports_by_owner:  # a parameter without elements
        reports_by_owner = {rank: report[index] for rank, report in enumerate(by_rank) if index in report}
    kinds_by_owner = {
        owner: {key: dtype or "one value" for key, (dtype, _) in report.items()}
        for owner, report in reports_by_owner.items()
    }
    first = next(iter(reports_by_owner))
    if all(kinds == kinds_by_owner[first] for kinds in kinds_by_owner.values()):
        return reports_by_owner[min(reports_by_owner)]
    spec = layout.params[index]
    for name in dict.fromkeys(name for kinds in kinds_by_owner.values() for name in kinds if name != _EMPTY):
        if len({kinds.get(name) for kinds in kinds_by_owner.values()}) > 1:
            described = "; ".join(f"rank {owner}: {kinds.get(name, 'none')}" for owner, kinds in kinds_by_owner.items())
            raise CheckpointError(
                f"state {name!r} of parameter {spec.name!r} differs between the ranks that step parts of it, so that "
                f"none knows all of it: {described}. Load a state on all ranks or on none; an optimizer that begins to "
                "keep something when it sees certain gradients needs whole parameters: pass "
                f"{optimizer.engine.all_reduce_option}"
            )
    return reports_by_owner[first]  # they differ in empty states only


def _in_shape(spec: ParamSpec, value: Any, dtype: torch.dtype | None = None) -> Any:
    """Returns joined parts in the parameter's shape; other values as they are."""
    if not isinstance(value, Parts):
        return value
    elements = value.joined() if value else torch.empty(0, dtype=dtype, device="cpu")
    return elements.as_strided(spec.shape, spec.stride)


def _shaped(spec: ParamSpec, value: Any) -> Any:
    value = _in_shape(spec, value)
    return value.detach().cpu().clone() if isinstance(value, Tensor) else copy.deepcopy(value)


# --- loading ----------------------------------------------------------------------------------------------------------


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
    check_shapes(optimizer, named, element_keys(optimizer, named))
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
        check_shape(name, "main param", main_params[name], tuple(frozen[name].shape))
    local = cut(optimizer, named, copies=not optimizer.has_made_runs)
    for name in frozen.keys() & main_params.keys():
        optimizer.frozen_main_params[name] = main_params[name].to("cpu", torch.float32, copy=True)
    if not optimizer.has_made_runs:
        pending = optimizer.pending
        put(optimizer, {i: pending.get(i, {}) | local.get(i, {}) for i in pending.keys() | local.keys()})
    for run in optimizer.runs:
        if run.has_main_param:
            fill(run.main, run, MAIN_PARAM, local, optimizer)


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
