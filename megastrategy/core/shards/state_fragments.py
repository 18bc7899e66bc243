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
from .saved_state import MAIN_PARAM

STATE, MAIN_PARAMS = "state_dict()", "main_params()"
"""The two contents of a checkpoint, by the call that returns them."""

Keys = tuple[tuple[str, torch.dtype], ...]
"""The names and dtypes of a parameter's element-wise state."""

Kind = tuple[torch.dtype, torch.Size] | None
"""The dtype and shape of a tensor that is not element-wise (a counter); None for a value that is no tensor."""

Packed = list[tuple[list[list[int]], dict[str, Kind], dict[str, list[Any]]]]
"""Fragments whose values have the same names: the parameters of each, the kinds, and by name a value a fragment."""


@dataclasses.dataclass(frozen=True)
class Description:
    """Describes one rank's state to the other ranks."""

    scalars: Packed
    """The values that are not element-wise."""
    params_by_keys: dict[Keys, list[int]]
    """The parameters, by their element-wise state."""
    whole: tuple[int, ...] = ()
    """The parameters that the rank steps whole and has state of."""

    @functools.cached_property
    def keys(self) -> dict[int, Keys]:
        """Names and dtypes of element-wise state, by parameter."""
        return {index: keys for keys, indices in self.params_by_keys.items() for index in indices}

    @functools.cached_property
    def kinds(self) -> dict[int, dict[str, Kind]]:
        """Names and kinds of values that are not element-wise, by parameter."""
        return {index: kinds for members, kinds, _ in self.scalars for indices in members for index in indices}

    def values(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yields the values that are not element-wise, by parameter, each in memory of its own."""
        for members, kinds, columns in self.scalars:
            unpacked = [
                columns[name]
                if kind is None
                else torch.tensor(columns[name], dtype=kind[0], device="cpu").reshape(len(members), *kind[1]).unbind()
                for name, kind in kinds.items()
            ]
            for indices, *values in zip(members, *unpacked, strict=True):
                for index in indices:
                    # A saved view saves all of its storage; parameters that had a container each would share one.
                    yield (
                        index,
                        {
                            name: value.clone() if isinstance(value, Tensor) else copy.deepcopy(value)
                            for name, value in zip(kinds, values, strict=True)
                        },
                    )


class Fragment(NamedTuple):
    """The state of one shard, or of neighbouring shards that are joined."""

    shards: tuple[ParamShard, ...]
    """In the order of their addresses."""
    numel: int
    """From the first element of the first shard to the last of the last, padding between parameters included."""
    state: Mapping[str, Any]
    """Element-wise tensors are flat and have ``numel`` elements."""

    @classmethod
    def of_main_param(cls, shard: ParamShard) -> Fragment:
        """Returns the fragment with the main param of one shard, under MAIN_PARAM."""
        return cls((shard,), shard.numel, {MAIN_PARAM: shard.main})


@dataclasses.dataclass(frozen=True)
class StateFragments:
    """This rank's part of an optimizer's state; see [Note: fragments].

    Attributes:
        all_reduce_option: the option for whole parameters in the form of the user's door, for errors.
        known: the names of element-wise state, where they are known.
        whole: by parameter, the state of parameters that this rank steps whole; None if no rank steps any whole.
    """

    fragments: Sequence[Fragment]
    layout: BufferLayout
    all_reduce_option: str
    known: set[str] | None
    whole: Mapping[int, Mapping[str, Any]] | None = None

    @functools.cached_property
    def _by_bucket(self) -> dict[int, list[Fragment]]:
        by_bucket: dict[int, list[Fragment]] = {}
        for fragment in sorted(self.fragments, key=lambda each: (self._start(each), each.numel)):
            by_bucket.setdefault(self.layout.slots[fragment.shards[0].param].bucket, []).append(fragment)
        return by_bucket

    def _start(self, fragment: Fragment) -> int:
        """Returns the position of the first element in the bucket's buffer."""
        return self.layout.slots[fragment.shards[0].param].start + fragment.shards[0].start

    def describe(self) -> Description:
        """Describes the fragments to other ranks.

        Raises:
            CheckpointError: for state that is neither element-wise nor a value of the parameter, like a counter.
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
                if (reason := describe_undividable(name, value, (fragment.numel,))) is not None:
                    raise CheckpointError(f"the optimizer keeps {reason}")
                kinds.append((name, (value.dtype, value.shape) if isinstance(value, Tensor) else None))
            # An owner without state is in it too, beside owners of other parts that may have some.
            if keys or (not kinds and fragment.numel):
                params_by_keys.setdefault(tuple(keys), []).extend(shard.param for shard in fragment.shards)
            if kinds:
                alike.setdefault(tuple(kinds), []).append(fragment)
        packed = [_pack(kinds, fragments) for kinds, fragments in alike.items()]
        return Description(packed, params_by_keys, tuple(sorted(self.whole or ())))

    def _known_here(self) -> set[str] | None:
        """Adds names that came into being later: only a tensor of two or more elements is known to be element-wise."""
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
        """Writes this rank's elements of a bucket, of one name and of the dtype of ``flat``, to their places in it."""
        sizes: list[int] = []
        values: list[Tensor] = []
        position = 0
        for fragment in self._by_bucket.get(bucket.index, ()):
            value = fragment.state.get(name)
            if isinstance(value, Tensor) and value.dtype == flat.dtype and value.shape == (fragment.numel,):
                gap = self._start(fragment) - bucket.start - position
                sizes += [gap, fragment.numel]
                position += gap + fragment.numel
                values.append(value)
        if values:  # one call for all of them: there may be thousands
            torch._foreach_copy_(flat[:position].split_with_sizes(sizes)[1::2], values)


def agreed_keys(by_owner: Sequence[Description], layout: BufferLayout, all_reduce_option: str) -> dict[int, Keys]:
    """Returns the element-wise state of each parameter, after checking that all its owners have the same.

    ``by_owner``: the descriptions of all data-parallel ranks, in their order.

    Raises:
        CheckpointError: if one owner of a parameter keeps state that another does not: the missing part, as torch DDP
            would have it, was never computed.
    """
    keys: dict[int, Keys] = {}
    for description in reversed(by_owner):
        keys.update(description.keys)
    # As the ranks say it: of an expert a rank knows its own part, which may be of another size than the others'.
    owners_of: dict[int, list[int]] = {}
    for rank, description in enumerate(by_owner):
        for index in description.keys.keys() | description.kinds.keys():
            owners_of.setdefault(index, []).append(rank)
    for index, owners in sorted(owners_of.items()):
        if len(owners) == 1:
            continue
        descriptions = (by_owner[owner] for owner in owners)
        found = [{**each.kinds.get(index, {}), **dict(each.keys.get(index, ()))} for each in descriptions]
        if all(state == found[0] for state in found):
            continue
        names = dict.fromkeys(name for state in found for name in state)
        param = layout.params[index].name
        agreed = [(name, _agree(name, param, owners, found, all_reduce_option)) for name in names]
        keys[index] = tuple((name, dtype) for name, dtype in agreed if dtype is not None)
    return keys


def _agree(
    name: str,
    param: str,
    owners: Sequence[int],
    found: Sequence[Mapping[str, torch.dtype | Kind]],
    all_reduce_option: str,
) -> torch.dtype | None:
    """Returns the dtype of one name's element-wise state; None for state that is not element-wise."""
    lacking = [owner for owner, state in zip(owners, found, strict=True) if name not in state]
    if lacking:
        having = [owner for owner in owners if owner not in lacking]
        raise CheckpointError(
            f"state {name!r} of parameter {param!r} is kept on rank(s) {having} and not on rank(s) {lacking}, which "
            "step other parts of it, so that no rank knows all of it. Load a state on all ranks or on none; an "
            "optimizer that begins to keep something when it sees certain gradients needs whole parameters: "
            f"pass {all_reduce_option}"
        )
    kinds = [state[name] for state in found]
    dtypes = {kind for kind in kinds if isinstance(kind, torch.dtype)}
    if not dtypes:
        return None
    # A part of one element looks like a counter, and so does one of none: the owners of longer parts decide.
    dtypes_found = {kind[0] if isinstance(kind, tuple) and kind[1] in ((0,), (1,)) else kind for kind in kinds}
    if len(dtypes_found) > 1:
        raise CheckpointError(
            f"state {name!r} of parameter {param!r} is kept in different ways on different ranks: "
            + "; ".join(f"rank {owner}: {kind}" for owner, kind in zip(owners, kinds, strict=True))
            + ". Load a state on all ranks or on none"
        )
    return dtypes.pop()


def _pack(
    kinds: tuple[tuple[str, Kind], ...], fragments: Sequence[Fragment]
) -> tuple[list[list[int]], dict[str, Kind], dict[str, list[Any]]]:
    # Thousands of small values become a few: pickling a tensor takes 100 us, and keeps it alive for a while.
    columns = {name: [fragment.state[name] for fragment in fragments] for name, _ in kinds}
    for name, kind in kinds:
        if kind is not None:
            columns[name] = torch.stack(columns[name]).tolist()
    return [[shard.param for shard in fragment.shards] for fragment in fragments], dict(kinds), columns
