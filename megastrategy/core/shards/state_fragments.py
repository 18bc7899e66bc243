"""This rank's fragments of the optimizer state, and how the owners of one parameter check that theirs fit together.

[Note: fragments]
In a step neighbouring shards are one flat tensor, and so is their state (flat_run's [Note: runs]). It is described and
copied in that form: a model of 6,000 parameters has a few such fragments, and thousands of copies would cost more than
all bytes that are sent.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import CheckpointError
from ..layout import Bucket, BufferLayout
from ..trials import describe_undividable, is_per_element
from .param_shard import ParamShard

STATE, MAIN_PARAMS = "state_dict()", "main_params()"
"""The two parts of a checkpoint, by the call that returns them."""

Keys = tuple[tuple[str, torch.dtype], ...]
"""The names and dtypes of what is kept for each element of a parameter."""

Kind = tuple[torch.dtype, torch.Size] | None
"""The dtype and shape of a tensor that belongs to a parameter as a whole; None for any other value."""

Packed = list[tuple[list[list[int]], dict[str, Kind], dict[str, list[Any]]]]
"""Fragments whose values have the same names: the parameters of each, the kinds, and by name a value a fragment."""


@dataclasses.dataclass(frozen=True)
class Description:
    """A description of the state that a rank has, in a few fragments, to be sent."""

    scalars: Packed
    """The values that belong to a parameter as a whole."""
    params_by_keys: dict[Keys, list[int]]
    """The parameters, by what they have for each of their elements."""
    whole: tuple[int, ...] = ()
    """The parameters that the rank owns whole, and has state of."""

    @functools.cached_property
    def keys(self) -> dict[int, Keys]:
        """The names and dtypes of element-wise state, by parameter."""
        return {index: keys for keys, indices in self.params_by_keys.items() for index in indices}

    @functools.cached_property
    def kinds(self) -> dict[int, dict[str, Kind]]:
        """The names and kinds of values that belong to a whole parameter, by parameter."""
        return {index: kinds for members, kinds, _ in self.scalars for indices in members for index in indices}

    def values(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """The values that belong to whole parameters, by parameter, each in memory of its own."""
        for members, kinds, columns in self.scalars:
            unpacked = [
                columns[name]
                if kind is None
                else torch.tensor(columns[name], dtype=kind[0], device="cpu").reshape(len(members), *kind[1]).unbind()
                for name, kind in kinds.items()
            ]
            for indices, *values in zip(members, *unpacked, strict=True):
                for index in indices:
                    # A view would save all; a container would be shared by parameters that had one each.
                    yield (
                        index,
                        {
                            name: value.clone() if isinstance(value, Tensor) else copy.deepcopy(value)
                            for name, value in zip(kinds, values, strict=True)
                        },
                    )


class Fragment(NamedTuple):
    """Neighbouring shards whose state is one."""

    shards: tuple[ParamShard, ...]
    """Their order is that of their addresses."""
    numel: int
    """Counts from the first element of the first to the last of the last, padding between parameters included."""
    state: Mapping[str, Any]
    """Holds, flat and ``numel`` long, each tensor that is kept for each element."""


class LazyMainParam(Mapping[str, Tensor]):
    """The main param of a shard under a name; if it has to be made, it is made when it is read, and not kept."""

    def __init__(self, name: str, shard: ParamShard) -> None:
        self._name, self._shard = name, shard

    def __getitem__(self, name: str) -> Tensor:
        if name != self._name:
            raise KeyError(name)
        return self._shard.main_param()

    def __iter__(self) -> Iterator[str]:
        return iter((self._name,))

    def __len__(self) -> int:
        return 1


@dataclasses.dataclass(frozen=True)
class StateFragments:
    """The parts of an optimizer's state that this rank has.

    Attributes:
        fragments: all of them, by [Note: fragments].
        layout: where they are.
        all_reduce_option: how the user asks for whole parameters, for an error whose way out it is.
        known: the names of what the optimizer keeps for each element, where that is known.
        whole: by parameter, the state of those that this rank steps whole; None if no rank steps any so.
    """

    fragments: Sequence[Fragment]
    layout: BufferLayout
    all_reduce_option: str
    known: set[str] | None
    whole: Mapping[int, Mapping[str, Any]] | None = None

    @functools.cached_property
    def _by_bucket(self) -> dict[int, list[Fragment]]:
        by_bucket: dict[int, list[Fragment]] = {}
        for fragment in self.fragments:
            by_bucket.setdefault(self.layout.slots[fragment.shards[0].param].bucket, []).append(fragment)
        return by_bucket

    def describe(self) -> Description:
        """Describes them.

        Raises:
            CheckpointError: for what belongs neither to a parameter as a whole nor to each of its elements.
        """
        known, params_by_keys = self._known_here(), dict[Keys, list[int]]()
        alike: dict[tuple[tuple[str, Kind], ...], list[Fragment]] = {}
        for fragment in self.fragments:
            keys: list[tuple[str, torch.dtype]] = []
            kinds: list[tuple[str, Kind]] = []
            for name, value in fragment.state.items():
                if is_per_element(name, value, (fragment.numel,), known):
                    keys.append((name, value.dtype))
                    continue
                if (found := describe_undividable(name, value, (fragment.numel,))) is not None:
                    raise CheckpointError(f"the optimizer keeps {found}")
                kinds.append((name, (value.dtype, value.shape) if isinstance(value, Tensor) else None))
            if keys:
                params_by_keys.setdefault(tuple(keys), []).extend(shard.param for shard in fragment.shards)
            if kinds:
                alike.setdefault(tuple(kinds), []).append(fragment)
        packed = [_pack(kinds, fragments) for kinds, fragments in alike.items()]
        return Description(packed, params_by_keys, tuple(sorted(self.whole or ())))

    def _known_here(self) -> set[str] | None:
        """``known``, and names that came into being later: a tensor of two elements tells what one of one cannot."""
        if self.known is None:
            return None
        return self.known | {
            name
            for fragment in self.fragments
            if fragment.numel > 1
            for name, value in fragment.state.items()
            if name not in self.known and is_per_element(name, value, (fragment.numel,), None)
        }

    def put(self, flat: Tensor, bucket: Bucket, name: str) -> None:
        """Puts this rank's elements of a bucket, of one name and of the dtype of ``flat``, where they belong in it."""
        spans: list[tuple[int, int]] = []
        values: list[Tensor] = []
        for fragment in self._by_bucket.get(bucket.index, ()):
            value, shard = fragment.state.get(name), fragment.shards[0]
            if isinstance(value, Tensor) and value.dtype == flat.dtype and value.shape == (fragment.numel,):
                start = self.layout.slots[shard.param].start + shard.start - bucket.start
                spans.append((start, start + fragment.numel))
                values.append(value)
        if values:  # one call for all of them: there may be thousands
            torch._foreach_copy_(_views(flat, spans), values)


def agreed_keys(everybody: Sequence[Description], layout: BufferLayout, all_reduce_option: str) -> dict[int, Keys]:
    """The names and dtypes of element-wise state by parameter, in which all its owners agree.

    Args:
        everybody: what each owner of a part of the buckets has, in their order.

    Raises:
        CheckpointError: if one owner of a parameter keeps what another does not. The whole is made of both, and what
            torch DDP would have there was never computed.
    """
    keys: dict[int, Keys] = {}
    for described in reversed(everybody):
        keys.update(described.keys)
    for index, owners in divided_params(layout):
        words = [
            {**described.kinds.get(index, {}), **dict(described.keys.get(index, ()))}
            for described in everybody[owners.start : owners.stop]
        ]
        if all(word == words[0] for word in words):
            continue
        names = dict.fromkeys(name for word in words for name in word)
        param = layout.params[index].name
        agreed = [(name, _agree(name, param, owners, words, all_reduce_option)) for name in names]
        keys[index] = tuple((name, dtype) for name, dtype in agreed if dtype is not None)
    return keys


def divided_params(layout: BufferLayout) -> Iterator[tuple[int, range]]:
    """The parameters that have several owners in an instance, with these, bucket after bucket."""
    for bucket in layout.buckets:
        shard_numel = bucket.shard_numel
        # Not by holders(): of thousands of parameters few lie across a border, and all would be asked in every save.
        for index in bucket.params:
            slot = layout.slots[index]
            if slot.start == slot.end:  # has no elements, and its bucket may have none
                continue
            first, last = (slot.start - bucket.start) // shard_numel, (slot.end - 1 - bucket.start) // shard_numel
            if first < last:
                yield index, range(first, last + 1)


def _agree(
    name: str,
    param: str,
    owners: Sequence[int],
    words: Sequence[Mapping[str, torch.dtype | Kind]],
    all_reduce_option: str,
) -> torch.dtype | None:
    """The dtype of one name's element-wise state; None for a value that belongs to the whole parameter."""
    lacking = [owner for owner, word in zip(owners, words, strict=True) if name not in word]
    if lacking:
        having = [owner for owner in owners if owner not in lacking]
        raise CheckpointError(
            f"state {name!r} of parameter {param!r} is kept on rank(s) {having} and not on rank(s) {lacking}, which "
            "step other parts of it, so that the whole is unknown. Load a state on all ranks or on none; an "
            "optimizer that begins to keep something when it sees certain gradients needs whole parameters: "
            f"pass {all_reduce_option}"
        )
    kinds = [word[name] for word in words]
    dtypes = {kind for kind in kinds if isinstance(kind, torch.dtype)}
    if not dtypes:
        return None
    # A part of one element looks like a counter; the others' word holds.
    told = {kind[0] if isinstance(kind, tuple) and kind[1] == (1,) else kind for kind in kinds}
    if len(told) > 1:
        raise CheckpointError(
            f"state {name!r} of parameter {param!r} is kept in other ways on other ranks: "
            + "; ".join(f"rank {owner}: {kind}" for owner, kind in zip(owners, kinds, strict=True))
            + ". Load a state on all ranks or on none"
        )
    return dtypes.pop()


def _pack(
    kinds: tuple[tuple[str, Kind], ...], fragments: Sequence[Fragment]
) -> tuple[list[list[int]], dict[str, Kind], dict[str, list[Any]]]:
    """Packs thousands of small values into a few: to pickle a tensor takes 100 us, and keeps it alive for a while."""
    columns = {name: [fragment.state[name] for fragment in fragments] for name, _ in kinds}
    for name, kind in kinds:
        if kind is not None:
            columns[name] = torch.stack(columns[name]).tolist()
    return [[shard.param for shard in fragment.shards] for fragment in fragments], dict(kinds), columns


def _views(flat: Tensor, spans: Sequence[tuple[int, int]]) -> list[Tensor]:
    """The parts ``[start, end)`` of a flat tensor, in the order given."""
    order = sorted(range(len(spans)), key=spans.__getitem__)
    sizes, position = [], 0
    for number in order:
        start, end = spans[number]
        sizes += [start - position, end - start]
        position = end
    parts = flat[:position].split_with_sizes(sizes)[1::2]  # every other one is a gap
    views: list[Tensor] = [flat] * len(spans)
    for number, part in zip(order, parts, strict=True):
        views[number] = part
    return views
