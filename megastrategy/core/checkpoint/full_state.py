"""Optimizer state: shards here, torch's own full-shaped format outside.

The format is what plain DDP would have written: ``{"state": {index: {name: value}}, "param_groups": [...]}``, where a
value that has one number for each element of the parameter has the parameter's shape and strides. It does not depend
on the number of ranks, buckets or padding.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import Parameter

from .. import devices
from ..collectives import Collectives
from ..errors import CheckpointError
from ..layout import SIXTEEN_BIT, Bucket, BufferLayout, ParamSpec
from ..param_shard import ParamShard
from ..state_hooks import without_state_hooks
from .flat_shard import FlatShard
from .host_copies import to_host
from .own_parts import Described, Keys, OwnParts, agreed_keys
from .whole_state import as_saved, gather_whole, gather_whole_everywhere, groups_as_saved


class Gather(Protocol):
    """Brings the ranks' parts of a state to rank 0."""

    @property
    def is_root(self) -> bool:
        """Whether this rank gets what is gathered."""

    def everybody(self, own: Any) -> list[Any]:
        """Every rank's picklable ``own``; on other ranks than the root it may be a part of them."""

    def bucket(self, bucket: Bucket, name: str, flat: Tensor) -> None:
        """``flat``, with this rank's part of a bucket in it, becomes whole on the root. ``name``: whose elements."""

    def whole(self, own: Mapping[int, Mapping[str, Any]]) -> Iterable[tuple[int, Mapping[str, Any]]]:
        """The states of parameters that ranks step whole, by parameter, on the root's host; nothing elsewhere, where it
        has to be exhausted too."""


class CollectiveGather:
    """Gathers by collectives, which all ranks call together; on rank 0, or ``everywhere``."""

    def __init__(self, collectives: Collectives, device: torch.device, *, everywhere: bool = False) -> None:
        self._collectives, self._device, self._everywhere = collectives, device, everywhere
        self.is_root = everywhere or collectives.is_rank_zero

    def everybody(self, own: Any) -> list[Any]:
        return self._collectives.all_gather_objects(own)

    def bucket(self, bucket: Bucket, name: str, flat: Tensor) -> None:
        self._collectives.all_gather(flat).wait()
        if self.is_root:  # which copies what has come to the host next
            self._collectives.wait_for_device(self._device, "all-gather")

    def whole(self, own: Mapping[int, Mapping[str, Any]]) -> Iterable[tuple[int, Mapping[str, Any]]]:
        if self._everywhere:
            return gather_whole_everywhere(own, self._collectives)
        wholes = gather_whole(own, self._collectives, self._device)
        return (found for found in wholes if self.is_root)  # and not rank 0 of another instance


MAIN_PARAM = "(main param)"
"""The name of a parameter's fp32 main param, beside those of its state."""
REMAINDER = " (remainder)"


def number_params(optimizer: torch.optim.Optimizer) -> dict[int, int]:
    """torch's numbering: ``id(param)`` -> its place, counted through the groups; its last one in its group."""
    numbers: dict[int, int] = {}
    start = 0
    for group in optimizer.param_groups:
        places = {id(param): place for place, param in enumerate(group["params"], start)}
        numbers = places | numbers
        start += len(group["params"])
    return numbers


def gather_state_dict(
    optimizer: torch.optim.Optimizer,
    params_by_id: Mapping[int, int],
    parts: OwnParts,
    gather: Gather,
    device: torch.device,
) -> dict[str, Any]:
    """The full state on rank 0's host memory, None in its place on other ranks.

    One state tensor of one bucket is gathered at a time.

    Raises:
        CheckpointError: on all ranks that gather, if the state of any cannot be saved, or those of several are no
            whole.
    """
    numbers = number_params(optimizer)
    groups, layout = groups_as_saved(optimizer, numbers), parts.layout
    number_of = {index: numbers[key] for key, index in params_by_id.items() if key in numbers}
    scalars, sharded_keys = _describe_everywhere(parts, gather)
    state: dict[int, dict[str, Any]] = {}
    if gather.is_root:
        state = {number_of[index]: values for index, values in scalars.items() if index in number_of}
        # Of no shard: what was frozen at the wrap, and strangers. Both are whole on every rank.
        frozen = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in params_by_id]
        kept = as_saved(optimizer, {numbers[id(p)]: p for p in frozen if optimizer.state.get(p)})
        state.update({number: to_host(dict(values)) for number, values in kept.items()})
    scratch = _Scratch(layout, device)
    for bucket in layout.buckets:
        members_by_key: dict[tuple[str, torch.dtype], list[int]] = {}
        for index in bucket.params:
            for key_and_dtype in sharded_keys.get(index, ()):
                members_by_key.setdefault(key_and_dtype, []).append(index)
        # In the same order on all ranks, since sharded_keys joins what any of them has: each of these is a collective.
        for (key, dtype), members in members_by_key.items():
            gathered = _gather_bucket(bucket, members, key, dtype, parts, gather, scratch)
            for index, full in gathered:
                if index in number_of:
                    state.setdefault(number_of[index], {})[key] = full
    wholes = gather.whole(parts.whole) if parts.whole is not None else ()
    state.update({number_of[index]: dict(values) for index, values in wholes if index in number_of})
    return {"state": dict(sorted(state.items())) if gather.is_root else None, "param_groups": groups}


def gather_main_params(
    params: Collection[int], parts: OwnParts, gather: Gather | None, device: torch.device
) -> dict[str, Tensor]:
    """The fp32 main params of the 16-bit ones among ``params``, by name in the order of registration, whole, on rank
    0's host memory; nothing on other ranks.

    Without ``gather`` all of them are here, and referred to, as torch's own state dict does. One bucket is gathered at
    a time.
    """
    main_params: dict[int, Tensor] = {}
    layout = parts.layout
    if gather is None:
        main_params = {shard.param: piece.state[MAIN_PARAM] for piece in parts.pieces for shard in piece.shards}
    else:
        scratch = _Scratch(layout, device)
        for bucket in layout.buckets:
            members = [i for i in bucket.params if i in params and layout.is_stepped_apart(i)]
            if members:
                name, dtype = MAIN_PARAM, torch.float32
                main_params.update(_gather_bucket(bucket, members, name, dtype, parts, gather, scratch))
        if parts.whole is not None:
            main_params |= {index: values[MAIN_PARAM] for index, values in gather.whole(parts.whole)}
    return {saved_name(layout, index): main_params[index] for index in sorted(main_params)}


def saved_name(layout: BufferLayout, param: int) -> str:
    """The name of a saved main param. Remainders have another than the fp32 values of 16-bit weights: a model with
    other options must not take one for the other."""
    name = layout.params[param].name
    return name + REMAINDER if layout.keeps_remainder(param) else name


def load_main_params(main_params: Mapping[str, Tensor], shards: Mapping[int, ParamShard], layout: BufferLayout) -> None:
    """Takes over this rank's part of saved main params. Names that are not there are left alone.

    Raises:
        CheckpointError: if a shape does not fit, before anything is changed.
    """
    for index, spec in enumerate(layout.params):  # of other ranks' shards too, so that all of them raise
        if layout.is_stepped_apart(index) and (name := saved_name(layout, index)) in main_params:
            _check_shape(main_params[name], "main_param", spec.name, spec.shape)
    parts: list[tuple[ParamShard, Tensor]] = []
    for index, shard in shards.items():
        spec, name = layout.params[index], saved_name(layout, index)
        if layout.is_stepped_apart(index) and name in main_params:
            parts.append((shard, _cut(main_params[name], spec, shard, "main_param", {"main_param"})))
        elif shard.keeps_remainder or shard.bits is not None:  # of weights that are gone
            parts.append((shard, torch.zeros_like(shard.main, dtype=shard.main_dtype)))
    for shard, saved in parts:  # all of them fit, or one has raised above
        shard.set_main_param(saved)


def main_params_to_come(
    main_params: Mapping[str, Tensor], params: Mapping[str, Tensor], *, with_remainders: bool
) -> dict[str, Tensor]:
    """Copies of those of saved main params that ``params``, which have no shards yet, may begin with.

    Raises:
        CheckpointError: if a shape does not fit.
    """
    to_come = {}
    for name, value in main_params.items():
        param = params.get(name.removesuffix(REMAINDER))
        if param is not None and (with_remainders if name.endswith(REMAINDER) else param.dtype in SIXTEEN_BIT):
            _check_shape(value, "main_param", name, tuple(param.shape))
            to_come[name] = value.clone()
    return to_come


def load_full_state_dict(
    optimizer: torch.optim.Optimizer,
    state_dict: Mapping[str, Any],
    params_by_id: Mapping[int, int],
    shards: Mapping[int, ParamShard],
    layout: BufferLayout,
    known: set[str] | None,
    groups_of_shards: Callable[[], AbstractContextManager[None]],
    stays_here: Callable[[ParamShard, Mapping[str, Any]], Iterable[str]],
) -> None:
    """Cuts a full state into this rank's shards and hands it to the optimizer's own ``load_state_dict``.

    ``known``: as for :func:`per_element_keys`; ``stays_here``: as for :func:`load_own_state`.

    Raises:
        CheckpointError: if groups or shapes do not fit, before anything is changed.
    """
    # As torch checks it, but before anything is cut: shards are loaded by places in the groups.
    groups = state_dict["param_groups"]
    if [len(group["params"]) for group in groups] != [len(group["params"]) for group in optimizer.param_groups]:
        raise CheckpointError(
            f"the state has parameter groups of {[len(group['params']) for group in groups]} parameters, the "
            f"optimizer of {[len(group['params']) for group in optimizer.param_groups]}: build the optimizer as it "
            "was when the state was saved"
        )
    own_numbers = {number for group in groups for number in group["params"]}
    others = {key: value for key, value in state_dict["state"].items() if key not in own_numbers}
    per_element: set[str] = set()
    if any(shard.is_cut for shard in shards.values()):
        of_params = {key: state_dict["state"][key] for key in state_dict["state"].keys() - others}
        per_element = per_element_keys(of_params, known)
    numbers = {
        id(param): number
        for saved, own in zip(groups, optimizer.param_groups, strict=True)
        for number, param in zip(saved["params"], own["params"], strict=True)
    }

    def values_of(param: Parameter) -> dict[str, Any]:
        values, index = state_dict["state"].get(numbers[id(param)], {}), params_by_id.get(id(param))
        if index is None:
            return {key: _own(value) for key, value in values.items()}
        spec, shard = layout.params[index], shards[index]
        return {key: _cut(value, spec, shard, key, per_element) for key, value in values.items()}

    load_own_state(optimizer, groups, values_of, params_by_id, shards, groups_of_shards, stays_here, others)


def load_own_state(
    optimizer: torch.optim.Optimizer,
    groups: Sequence[Mapping[str, Any]],
    values_of: Callable[[Parameter], dict[str, Any]],
    params_by_id: Mapping[int, int],
    shards: Mapping[int, ParamShard],
    groups_of_shards: Callable[[], AbstractContextManager[None]],
    stays_here: Callable[[ParamShard, Mapping[str, Any]], Iterable[str]],
    others: Mapping[Any, Any] | None = None,
) -> None:
    """Hands what this rank steps to the optimizer's own ``load_state_dict``.

    Args:
        optimizer: with the model's Parameters in its groups.
        groups: the saved hyper-parameters, group by group.
        values_of: the state of a parameter, cut to this rank's shard; asked only for those that have one here.
        params_by_id, shards: where the parameters are.
        groups_of_shards: puts the shards into the optimizer's groups.
        stays_here: names what is not to come to the device.
        others: state of no parameter.
    """
    state: dict[int, dict[str, Any]] = {}
    staying: dict[int, dict[str, Tensor]] = {}
    own_groups = []
    count = 0
    for saved, group in zip(groups, optimizer.param_groups, strict=True):
        first = count
        for param in group["params"]:
            index = params_by_id.get(id(param))
            if index is None or index in shards:  # else all of it is another rank's
                if values := values_of(param):
                    names = stays_here(shards[index], values) if index is not None else ()
                    staying[count] = {name: values[name] for name in names}
                    # Of no elements: torch chooses the dtype, and moves nothing.
                    state[count] = values | {name: value.new_empty(0) for name, value in staying[count].items()}
                count += 1
        own_groups.append({**saved, "params": list(range(first, count))})
    with groups_of_shards(), without_state_hooks(optimizer):
        optimizer.load_state_dict({"state": {**state, **(others or {})}, "param_groups": own_groups})
        # torch casts state to the parameter's dtype, as under DDP; that of a frozen 16-bit weight is of its main param,
        # to which it comes when the parameter is unfrozen
        stepped = [param for group in optimizer.param_groups for param in group["params"]]
        for number, values in state.items():
            is_narrow = stepped[number].dtype in (torch.bfloat16, torch.float16)
            for key, value in values.items() if is_narrow else ():
                if key in (kept := optimizer.state[stepped[number]]):
                    kept[key] = _in_saved_dtype(kept[key], value)
        for number, values in staying.items():
            kept = optimizer.state[stepped[number]]
            kept.update((name, value.to(kept[name].dtype)) for name, value in values.items())


def _in_saved_dtype(kept: Any, saved: Any) -> Any:
    """The value that an optimizer has loaded; where it has cast it, the saved one."""
    if isinstance(kept, Tensor) and isinstance(saved, Tensor):
        return kept if kept.dtype == saved.dtype else saved.to(kept.device)
    if isinstance(kept, dict) and isinstance(saved, dict) and kept.keys() == saved.keys():
        return {key: _in_saved_dtype(value, saved[key]) for key, value in kept.items()}
    if type(kept) is type(saved) and type(kept) in (list, tuple) and len(kept) == len(saved):
        return type(kept)(map(_in_saved_dtype, kept, saved))
    return kept


class _Scratch:
    """Memory for one bucket at a time, kept between them: one that came and went between the copies that stay would
    leave holes in the heap, as much as the state itself."""

    def __init__(self, layout: BufferLayout, device: torch.device) -> None:
        self._layout, self._device = layout, device
        self._on_device: dict[torch.dtype, Tensor] = {}
        self._on_host: dict[torch.dtype, Tensor] = {}

    def on_device(self, dtype: torch.dtype, numel: int) -> Tensor:
        """1-D, not initialised."""
        if dtype not in self._on_device:
            self._on_device[dtype] = torch.empty(self._largest, dtype=dtype, device=self._device)
        return self._on_device[dtype][:numel]

    def on_host(self, flat: Tensor) -> Tensor:
        """``flat`` in host memory, until the next call: on the host itself. In one piece, into pinned memory: thousands
        of small copies would wait for the device each, and the driver would copy once more."""
        if devices.is_on_host(flat.device):
            return flat
        if flat.dtype not in self._on_host:
            self._on_host[flat.dtype] = devices.pinned_memory(self._largest, flat.dtype, flat.device)
        return self._on_host[flat.dtype][: flat.numel()].copy_(flat)

    @property
    def _largest(self) -> int:
        return max(bucket.numel for bucket in self._layout.buckets)


def _gather_bucket(
    bucket: Bucket,
    members: Sequence[int],
    key: str,
    dtype: torch.dtype,
    parts: OwnParts,
    gather: Gather,
    scratch: _Scratch,
) -> Iterable[tuple[int, Tensor]]:
    """Gathers one tensor for each of ``members`` from the ranks' parts; returns them whole, on rank 0 alone."""
    layout = parts.layout
    flat = scratch.on_device(dtype, bucket.numel).zero_()  # of the bucket before
    parts.put(flat, bucket.start, bucket, key)
    gather.bucket(bucket, key, flat)
    if not gather.is_root:  # the collective was this rank's part
        return ()
    host = scratch.on_host(flat)
    starts = [layout.slots[index].start - bucket.start for index in members]
    specs = [layout.params[index] for index in members]
    # Scratch is overwritten for the next name, so even the root's own memory is copied.
    wholes = [host.as_strided(spec.shape, spec.stride, at).clone() for spec, at in zip(specs, starts, strict=True)]
    return zip(members, wholes, strict=True)


def _describe_everywhere(parts: OwnParts, gather: Gather) -> tuple[dict[int, dict[str, Any]], dict[int, Keys]]:
    """Describes the state of all ranks: on rank 0 values of whole parameters, and names and dtypes of element-wise
    ones."""
    own: Described | str
    try:
        own = parts.describe()
    except CheckpointError as error:
        own = str(error)  # sent, as the others wait for this rank's word
    everybody: list[Described] = []
    for rank, described in enumerate(gather.everybody(own)):
        if isinstance(described, str):
            raise CheckpointError(f"rank {rank}: {described}")
        everybody.append(described)
    sharded = agreed_keys(everybody, parts.layout, parts.all_reduce_option)
    scalars: dict[int, dict[str, Any]] = {}
    for described in everybody if gather.is_root else ():  # elsewhere nobody needs the thousands of tensors
        scalars = dict(described.values()) | scalars  # of several owners the lowest rank's word holds
    return scalars, sharded


def in_memory_order(value: Tensor, spec: ParamSpec) -> Tensor:
    """A state tensor as flat elements in the order of the parameter's memory (a no-op for flat shards)."""
    if value.dim() == 1:  # a shard, or a parameter that is flat itself
        return value
    if tuple(value.shape) != spec.shape:
        return value.reshape(-1)
    restrided = (
        value
        if value.stride() == spec.stride
        else torch.empty_strided(spec.shape, spec.stride, dtype=value.dtype, device=value.device).copy_(value)
    )
    return restrided.as_strided((spec.numel,), (1,))


def per_element_keys(state: Mapping[int, Mapping[str, Any]], known: set[str] | None) -> set[str]:
    """The names whose values have one number an element. One-element parameters cannot tell them from counters; trial
    steps of the optimizer can: ``known``, None if there were none."""
    tensors = [(key, value) for values in state.values() for key, value in values.items() if isinstance(value, Tensor)]
    if known is None:
        # No tensor has two elements, so nothing tells: all but torch's own counter is taken for element-wise.
        known = {key for key, _ in tensors} - {"step"} if all(value.numel() <= 1 for _, value in tensors) else set()
    return known | {key for key, value in tensors if value.numel() > 1}


def shard_state(values: dict[str, Any], spec: ParamSpec, shard: ParamShard, known: set[str] | None) -> dict[str, Any]:
    """The state that was kept for a parameter itself, as that of what is stepped in its place.

    What was made in the dtype of a 16-bit weight is in fp32 from here on, as the first step of an fp32 main param would
    have made it: a sum of ones stops at 256 in bf16. What was made in another dtype keeps it.

    Args:
        values: of the whole parameter; taken over where nothing is cut.
        spec, shard: the parameter, and what is stepped.
        known: as for :func:`per_element_keys`; asked for only where something is cut.
    """
    if shard.is_cut:
        per_element = per_element_keys({0: values}, known)
        values = {key: _cut(value, spec, shard, key, per_element) for key, value in values.items()}
    if not spec.has_main_param:
        return values
    return {
        key: value.to(shard.main_dtype) if isinstance(value, Tensor) and value.dtype == spec.dtype else value
        for key, value in values.items()
    }


def _cloned(value: Any) -> Any:
    """A copy of a tensor; of a subclass by the tensors that it consists of, since it may know no ``clone``."""
    if not hasattr(value, "__tensor_flatten__"):
        return value.clone()
    names, context = value.__tensor_flatten__()
    inner = {name: _cloned(getattr(value, name)) for name in names}
    return type(value).__tensor_unflatten__(inner, context, value.size(), value.stride())


def _own(value: Any) -> Any:
    """A copy of a value with all that it holds: a step changes tensors in a list in place."""
    return _cloned(value) if isinstance(value, Tensor) else copy.deepcopy(value)


def _cut(value: Any, spec: ParamSpec, shard: ParamShard, key: str, per_element: set[str]) -> Any:
    if not isinstance(value, Tensor):
        return _own(value)
    if isinstance(value, FlatShard):
        return value.local  # read for this very shard
    if not shard.is_cut:  # what is kept for a whole parameter stays with it, whatever its shape
        if type(value) is Tensor and tuple(value.shape) == spec.shape and value.stride() != spec.stride:
            return torch.empty_strided(spec.shape, spec.stride, dtype=value.dtype, device=value.device).copy_(value)
        return _cloned(value)  # torch's load_state_dict would go on using the caller's tensor
    if key not in per_element:  # a count, a flag: every owner has all of it
        return value.clone()
    _check_shape(value, key, spec.name, spec.shape)
    return in_memory_order(value, spec)[shard.start : shard.end].clone()


def _check_shape(value: Tensor, key: str, name: str, shape: tuple[int, ...]) -> None:
    own = value.part_shape if isinstance(value, FlatShard) else tuple(value.shape)
    if own != shape:
        raise CheckpointError(
            f"state {key!r} of parameter {name!r} has shape {own}, the parameter {shape}: this state is "
            "of another model"
        )
