"""Gathers the shards of an optimizer's state to torch's own full-shaped format.

That is the format that plain DDP writes: ``{"state": {index: {name: value}}, "param_groups": [...]}``, in which
element-wise state has the parameter's shape and strides. It does not depend on the number of ranks, buckets or padding.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import devices
from ..collectives import Collectives
from ..errors import CheckpointError
from ..layout import Bucket, BufferLayout, Domain
from .host_copies import to_host
from .pickled_states import gather_states, gather_states_everywhere
from .saved_state import MAIN_PARAM, as_saved, groups_as_saved
from .state_fragments import Description, Keys, StateFragments, agreed_keys


class Gather:
    """Gathers the ranks' parts of a state to rank 0, or ``everywhere``. Collective.

    Args:
        collectives: the ranks that own different elements.
        ranks_of: returns those of them that own a domain's buckets.
        is_root: whether this rank gets the result.
    """

    def __init__(
        self,
        collectives: Collectives,
        ranks_of: Callable[[Domain], Collectives],
        device: torch.device,
        *,
        is_root: bool,
        everywhere: bool = False,
    ) -> None:
        self.collectives, self._ranks_of, self.device = collectives, ranks_of, device
        self._everywhere, self.is_root = everywhere, everywhere or is_root

    def fill_bucket(self, flat: Tensor, domain: Domain) -> None:
        """Fills ``flat``, which has this rank's shard of a bucket in its place, with the other ranks' shards."""
        self._ranks_of(domain).all_gather(flat).wait()
        if self.is_root:  # it copies the bucket to the host next
            self.collectives.wait_for_device(self.device, "all-gather")

    def whole_params(self, own: Mapping[int, Mapping[str, Any]]) -> Iterable[tuple[int, Mapping[str, Any]]]:
        """Yields the states of parameters that ranks step whole, by parameter, in the root's host memory.

        Yields nothing on other ranks, which have to iterate nevertheless.
        """
        if self._everywhere:
            return gather_states_everywhere(own, self.collectives)
        wholes = gather_states(own, self.collectives, self.device)
        return (found for found in wholes if self.is_root)  # and not rank 0 of another instance


def number_params(optimizer: torch.optim.Optimizer) -> dict[int, int]:
    """Returns torch's numbers of parameters by ``id``: counted through the groups, the last place within a group."""
    numbers: dict[int, int] = {}
    start = 0
    for group in optimizer.param_groups:
        places = {id(param): place for place, param in enumerate(group["params"], start)}
        numbers = places | numbers
        start += len(group["params"])
    return numbers


def state_by_number(optimizer: torch.optim.Optimizer, params: Iterable[Tensor]) -> dict[int, dict[str, Any]]:
    """Returns the state of parameters that every rank steps by itself, in host memory.

    A parameter that was not stepped yet gets an empty entry, which differs from a parameter without an entry.
    """
    numbers = number_params(optimizer)
    of_params = {numbers[id(param)]: param for param in params}
    kept = as_saved(optimizer, {number: param for number, param in of_params.items() if optimizer.state.get(param)})
    return {number: to_host(dict(kept.get(number, {}))) for number in of_params}


def gather_state_dict(
    optimizer: torch.optim.Optimizer,
    params_by_id: Mapping[int, int],
    parts: StateFragments,
    gather: Gather,
) -> dict[str, Any]:
    """Returns the full state in the root's host memory; on other ranks ``state`` is None.

    One state tensor of one bucket is gathered at a time.

    Raises:
        CheckpointError: on all ranks, if the state of one cannot be saved, or those of several do not fit together.
    """
    numbers = number_params(optimizer)
    groups, layout = groups_as_saved(optimizer, numbers), parts.layout
    number_of = {index: numbers[key] for key, index in params_by_id.items() if key in numbers}
    scalars, sharded_keys = _describe_everywhere(parts, gather)
    state: dict[int, dict[str, Any]] = {}
    if gather.is_root:
        state = {number_of[index]: values for index, values in scalars.items() if index in number_of}
        # Parameters without shards, frozen or not in the model: every rank has all of their state.
        frozen = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in params_by_id]
        kept = as_saved(optimizer, {numbers[id(p)]: p for p in frozen if optimizer.state.get(p)})
        state.update({number: to_host(dict(values)) for number, values in kept.items()})
    scratch = _Scratch(layout, gather.device)
    for bucket in layout.buckets:
        members_by_key: dict[tuple[str, torch.dtype], list[int]] = {}
        for index in bucket.params:
            for key_and_dtype in sharded_keys.get(index, ()):
                members_by_key.setdefault(key_and_dtype, []).append(index)
        # In the same order on all ranks, since each of these is a collective: sharded_keys is the same everywhere.
        for (key, dtype), members in members_by_key.items():
            gathered = _gather_bucket(bucket, members, key, dtype, parts, gather, scratch)
            for index, full in gathered:
                if index in number_of:
                    state.setdefault(number_of[index], {})[key] = full
    wholes = gather.whole_params(parts.whole) if parts.whole is not None else ()
    state.update({number_of[index]: dict(values) for index, values in wholes if index in number_of})
    return {"state": dict(sorted(state.items())) if gather.is_root else None, "param_groups": groups}


def gather_main_params(params: Collection[int], parts: StateFragments, gather: Gather | None) -> dict[str, Tensor]:
    """Returns the full fp32 main params of ``params`` by name, in the order of registration, in the root's host memory.

    Other ranks get nothing. Without ``gather`` every rank has all of them, and they are returned without a copy, as in
    torch's own state dict. One bucket is gathered at a time.
    """
    main_params: dict[int, Tensor] = {}
    layout = parts.layout
    if gather is None:
        main_params = {
            shard.param: fragment.state[MAIN_PARAM] for fragment in parts.fragments for shard in fragment.shards
        }
    else:
        scratch = _Scratch(layout, gather.device)
        for bucket in layout.buckets:
            members = [i for i in bucket.params if i in params and layout.has_separate_main(i)]
            if members:
                name, dtype = MAIN_PARAM, torch.float32
                main_params.update(_gather_bucket(bucket, members, name, dtype, parts, gather, scratch))
        if parts.whole is not None:
            main_params |= {index: values[MAIN_PARAM] for index, values in gather.whole_params(parts.whole)}
    return {layout.params[index].name: main_params[index] for index in sorted(main_params)}


class _Scratch:
    """Memory for one bucket at a time, reused by the next: allocated and freed between copies that stay, it would leave
    holes in the heap of the size of the state itself."""

    def __init__(self, layout: BufferLayout, device: torch.device) -> None:
        self._largest, self._device = max((bucket.numel for bucket in layout.buckets), default=0), device
        self._on_device: dict[torch.dtype, Tensor] = {}
        self._on_host: dict[torch.dtype, Tensor] = {}

    def on_device(self, dtype: torch.dtype, numel: int) -> Tensor:
        """1-D, not initialised."""
        if dtype not in self._on_device:
            self._on_device[dtype] = torch.empty(self._largest, dtype=dtype, device=self._device)
        return self._on_device[dtype][:numel]

    def on_host(self, flat: Tensor) -> Tensor:
        """Returns ``flat`` in host memory, valid until the next call; on the host it is ``flat`` itself.

        One copy into pinned memory: thousands of small ones would each wait for the device, and be copied twice.
        """
        if devices.is_on_host(flat.device):
            return flat
        if flat.dtype not in self._on_host:
            self._on_host[flat.dtype] = devices.pinned_memory(self._largest, flat.dtype, flat.device)
        return self._on_host[flat.dtype][: flat.numel()].copy_(flat)


def _gather_bucket(
    bucket: Bucket,
    members: Sequence[int],
    key: str,
    dtype: torch.dtype,
    parts: StateFragments,
    gather: Gather,
    scratch: _Scratch,
) -> Iterable[tuple[int, Tensor]]:
    """Gathers one tensor for each of ``members`` from the ranks' parts; returns full tensors, only on the root."""
    layout = parts.layout
    flat = scratch.on_device(dtype, bucket.numel).zero_()  # else the previous bucket's values would stay in the gaps
    parts.put(flat, bucket, key)
    gather.fill_bucket(flat, bucket.domain)
    if not gather.is_root:
        return ()
    host = scratch.on_host(flat)
    starts = [layout.slots[index].start - bucket.start for index in members]
    specs = [layout.params[index] for index in members]
    # Scratch is overwritten for the next name, so even the root's own memory is copied.
    wholes = [host.as_strided(spec.shape, spec.stride, at).clone() for spec, at in zip(specs, starts, strict=True)]
    return zip(members, wholes, strict=True)


def _describe_everywhere(parts: StateFragments, gather: Gather) -> tuple[dict[int, dict[str, Any]], dict[int, Keys]]:
    """Returns the values of all ranks that are not element-wise (on the root), and the keys of element-wise state."""
    own: Description | str
    try:
        own = parts.describe()
    except CheckpointError as error:
        own = str(error)  # sent, since the other ranks wait for this one
    by_owner: list[Description] = []
    for rank, description in enumerate(gather.collectives.all_gather_objects(own)):
        if isinstance(description, str):
            raise CheckpointError(f"rank {rank}: {description}")
        by_owner.append(description)
    sharded = agreed_keys(by_owner, parts.layout, parts.all_reduce_option)
    scalars: dict[int, dict[str, Any]] = {}
    for description in by_owner if gather.is_root else ():  # other ranks do not need the thousands of tensors
        scalars = dict(description.values()) | scalars  # of several owners the lowest rank's value is saved
    return scalars, sharded
