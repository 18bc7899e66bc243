"""An optimizer's state in directories: each rank writes and reads its part.

It is keyed by parameter name, as in ``torch.distributed.checkpoint.state_dict``. Where ranks share a model, tensors
have the names of the full model. If several pipeline stages have a copy of a parameter, the first of them writes it and
all read it. The groups are written in full, the same on every rank; a stage reads its own part of them.

[Note: how a tensor-parallel parameter is cut in a directory]
It is cut twice: each tensor rank has a box of it, and each data-parallel rank of this tensor rank has a range of that
box. Boxes of the whole parameter are written, so that no reader has to know either number of ranks. A parameter that
tensor ranks have in full is divided by all of them alike (local_parts' [Note: one layout on all tensor ranks]): each
offers the same boxes, and torch's planner has one of them write each.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Parameter

from ..errors import CheckpointError
from ..layout import ParamSpec, contiguous_stride
from ..module import CutParam
from ..optimizer import ShardSet
from ..shards import FlatShard, ParamShard, as_saved, groups_as_saved, per_element_keys
from ..trials import is_per_element
from .directory_reader import OpenDirectory
from .full_state import load_state
from .remote_directory import Directory

if TYPE_CHECKING:  # see directory_reader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata


# --- writing ---------------------------------------------------------------------------------------------------------


def state_to_write(shard_set: ShardSet) -> dict[str, Any]:
    """Returns this rank's part: the tensors themselves, or :class:`FlatShard` around them; nothing is copied. See
    :meth:`DistributedOptimizer.sharded_state_dict <megastrategy.DistributedOptimizer.sharded_state_dict>`. Collective
    over a pipeline's stages."""
    engine = shard_set.engine
    model = shard_set.engine.model_parallel
    names = shard_set.names_by_id()
    # The writer reads the device, which may wait for a rank that is gone.
    engine.collectives.wait_for_device(engine.device, "all-gather")
    shard_set.states.split()
    is_first = all(ranks.is_rank_zero for ranks in (engine.collectives, *model.collectives))
    of_others = set() if is_first else {id(param) for param in shard_set.extra_params.params}  # rank 0's are saved
    of_others |= {key for key, name in names.items() if model.name_in_model(name) != name}  # the first stage's
    cut = _cut_params(shard_set)
    state, main_params = _tensors_to_write(shard_set, names, of_others, cut)
    groups = groups_as_saved(shard_set.inner, names)
    for name, value in shard_set.pending_main_params.items():
        if model.name_in_model(name) == name:
            main_params[name] = _placed(value, None, None, cut.get(name))
    for group in model.states:
        groups = group.join_groups(shard_set, groups)
    return {"state": state, "param_groups": groups} | ({"main_params": main_params} if main_params else {})


def _cut_params(shard_set: ShardSet) -> Mapping[str, CutParam]:
    """Returns the parameters that tensor ranks have in parts, by their names in the full model."""
    engine = shard_set.engine
    name_in_model = shard_set.engine.model_parallel.name_in_model
    return engine.local_parts.cut_params({name_in_model(name): p for name, p in engine.named_params().items()})


def _tensors_to_write(
    shard_set: ShardSet, names: Mapping[int, str], of_others: Collection[int], cut_params: Mapping[str, CutParam]
) -> tuple[dict[str, dict[str, Any]], dict[str, Tensor]]:
    """Returns state by parameter name, and main params by saved name, without the parameters ``of_others`` (ids)."""
    optimizer = shard_set.inner
    shards = shard_set.shards
    layout = shard_set.layout
    params_by_id = shard_set.sharded_by_id
    known = shard_set.states.element_names
    state: dict[str, dict[str, Any]] = {}
    main_params: dict[str, Tensor] = {}
    # None if another rank steps all of it, and writes it: a directory is the union of the ranks' parts.
    stepped = {id(param): shard_set.stepped_tensor(param) for param in shard_set.params() if id(param) not in of_others}
    tensors = {key: tensor for key, tensor in stepped.items() if tensor is not None}
    flat = {key for key, index in params_by_id.items() if index in shards and shards[index].is_cut}
    whole = as_saved(optimizer, {key: tensor for key, tensor in tensors.items() if key not in flat})
    for key, tensor in tensors.items():
        index = params_by_id.get(key)
        name = names[key]
        values = optimizer.state.get(tensor, {}) if key in flat else whole.get(key, {})
        shard = shards.get(index) if index is not None else None
        spec = layout.params[index] if index is not None and shard is not None else None
        cut = cut_params.get(name)
        # A counter is the same on all owners. Each offers it, and the planner chooses the one that writes it.
        shape = shard.main.shape if shard is not None else cut.part_shape if cut is not None else ()
        state[name] = {
            kind: _placed(value, shard, spec, cut) if is_per_element(kind, value, shape, known) else value
            for kind, value in values.items()
        }
        if index is not None and shard is not None and layout.has_separate_main(index):
            main_params[layout.params[index].name] = _placed(shard.main, shard, spec, cut)
    return {name: values for name, values in state.items() if values}, main_params


def _placed(value: Tensor, shard: ParamShard | None, spec: ParamSpec | None, cut: CutParam | None) -> Tensor:
    """Returns element-wise state with its place in the full parameter's: as a FlatShard if it is only a part."""
    if shard is not None and spec is not None and shard.is_cut:
        if spec.numel == 0 and cut is None:  # a parameter without elements has no parts
            return value.view(spec.shape)
        return FlatShard(value, shard.start, spec.shape, spec.stride, cut)
    # A DTensor, as the state of a frozen parameter may be, has its place itself.
    return value if cut is None or type(value) is not Tensor else FlatShard.of_part(value, cut)


# --- reading ---------------------------------------------------------------------------------------------------------


def read_state(shard_set: ShardSet, directory: OpenDirectory, key: str) -> Callable[[], None]:
    """Reads this rank's part, and returns a function that loads it; see :meth:`DistributedOptimizer.read_sharded
    <megastrategy.DistributedOptimizer.read_sharded>`. Not collective.

    Raises:
        CheckpointError: if it cannot be read, or is of another model.
    """
    model = shard_set.engine.model_parallel
    names = {id_: model.name_in_model(name) for id_, name in shard_set.names_by_id().items()}
    targets = _Targets(
        shard_set,
        directory.path,
        set(names.values()),
        model.names_elsewhere.difference(names.values()),
        {names[id_]: index for id_, index in shard_set.sharded_by_id.items() if id_ in names},
        per_element_keys(_sizes_of_state(directory.metadata, key), shard_set.states.element_names),
        _cut_params(shard_set),
    )
    saved = directory.read(key, targets)
    if "param_groups" not in saved:
        raise CheckpointError(f"{directory} has no optimizer under the key {key!r}")
    own_groups = [[names[id(param)] for param in group["params"]] for group in shard_set.inner.param_groups]
    _check_same_groups(directory.path, saved["param_groups"], own_groups, model.names_elsewhere)
    main_params = {name: targets.shaped(name, value) for name, value in saved.get("main_params", {}).items()}

    def values_of(param: Parameter) -> dict[str, Any]:
        name = names[id(param)]
        values = {what: targets.shaped(name, value) for what, value in saved.get("state", {}).get(name, {}).items()}
        return {what: value.local if isinstance(value, FlatShard) else value for what, value in values.items()}

    def load() -> None:
        groups = saved["param_groups"]
        own_main_params = main_params
        for group in model.states:
            groups = group.divide_groups(shard_set, groups)
            own_main_params = group.divide_main_params(shard_set, own_main_params)
        load_state(shard_set, groups, values_of)
        shard_set.load_main_params(own_main_params)

    return load


def _sizes_of_state(metadata: Any, key: str) -> dict[int, dict[str, Tensor]]:
    """Returns meta tensors of the sizes in the state of the optimizer under ``key``, with a number for each."""
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    sizes: dict[int, dict[str, Tensor]] = {}
    for number, (name, place) in enumerate((metadata.planner_data or {}).items()):
        saved = metadata.state_dict_metadata[name]
        if isinstance(saved, TensorStorageMetadata) and tuple(map(str, place[:2])) == (key, "state"):
            sizes[number] = {str(place[-1]): torch.empty(saved.size, device="meta")}
    return sizes


@dataclasses.dataclass(frozen=True)
class _Targets:
    """Makes the tensors that a rank reads an optimizer's state into. Only this rank's parts are read: a range of a
    tensor as :class:`FlatShard`, all else in its shape.

    Attributes:
        present: the names of all parameters on this rank.
        elsewhere: the names of parameters that only other ranks of the model have.
        indices: by name, the layout's indices of parameters with shards, on whichever data-parallel ranks.
        per_element: the names of element-wise state.
        cut: by name, the parameters that tensor ranks have in parts.
    """

    shard_set: ShardSet
    path: Directory
    present: Collection[str]
    elsewhere: Collection[str]
    indices: Mapping[str, int]
    per_element: Collection[str]
    cut: Mapping[str, CutParam]

    def __call__(self, place: tuple[Any, ...], saved: TensorStorageMetadata) -> Tensor | None:
        """Returns the tensor to read into; None if other ranks read all of it."""
        dtype = saved.properties.dtype
        size = tuple(saved.size)
        if place[1] not in ("state", "main_params"):
            return torch.empty(size, dtype=dtype, device="cpu")
        name = str(place[2])
        what = str(place[-1])
        if name in self.elsewhere:
            return None
        # Raised before anything is loaded: without this entry the rank would resume a different optimizer.
        if name not in self.present:
            raise CheckpointError(
                f"{self.path} has state {what!r} of a parameter {name!r}, which the model does not have"
            )
        index = self.indices.get(name)  # None: it is frozen now, or no shard was made yet
        if index in self.shard_set.whole.indices and index not in self.shard_set.shards:
            return None
        if place[1] == "state" and what not in self.per_element:
            return torch.empty(size, dtype=dtype, device="cpu")
        return self._of_elements(name, what, size, dtype)

    def _of_elements(self, name: str, what: str, size: tuple[int, ...], dtype: torch.dtype) -> Tensor | None:
        """Returns the target for element-wise state, as :meth:`__call__`."""
        index = self.indices.get(name)
        part = self.cut.get(name)
        shape = part.part_shape if part is not None else size
        stride = None
        if index is not None:
            spec = self.shard_set.layout.params[index]
            shape = spec.shape
            stride = spec.stride
        # It is not divided, so it may be any state of this name, also one that is not element-wise.
        is_range = self._is_range(name)
        if part is None and not is_range:
            return _empty(size, stride if size == shape else None, dtype)
        if size != (expected := shape if part is None else part.shape):
            raise CheckpointError(
                f"{self.path} has state {what!r} of parameter {name!r} in shape {size}, the parameter has {expected}: "
                "it is of another model"
            )
        if part is not None and not is_range:
            return FlatShard.of_part(_empty(shape, stride, dtype), part)
        # Another rank's part is not read at all.
        shard = self.shard_set.shards.get(index) if index is not None else None
        if shard is None or stride is None:
            return None
        return FlatShard(torch.empty(shard.numel, dtype=dtype, device="cpu"), shard.start, shape, stride, part)

    def shaped(self, name: str, value: Any) -> Any:
        """Returns the value that was read: in the shape of a parameter's part, unless it is a range of one."""
        return value.as_part() if isinstance(value, FlatShard) and not self._is_range(name) else value

    def _is_range(self, name: str) -> bool:
        """Returns True if each data-parallel rank has a range of the parameter."""
        index = self.indices.get(name)
        return index is not None and self.shard_set.is_cut(index)


def _empty(shape: tuple[int, ...], stride: tuple[int, ...] | None, dtype: torch.dtype) -> Tensor:
    stride = contiguous_stride(shape) if stride is None else stride
    return torch.empty_strided(shape, stride, dtype=dtype, device="cpu")


def _check_same_groups(
    path: Directory, saved: Sequence[Mapping[str, Any]], own: Sequence[Sequence[str]], elsewhere: Collection[str]
) -> None:
    """Raises CheckpointError if saved groups have other parameters, not counting those ``elsewhere``."""
    if len(saved) != len(own):
        raise CheckpointError(f"{path} has {len(saved)} parameter group(s), the optimizer {len(own)}")
    for number, (group, names) in enumerate(zip(saved, own, strict=True)):
        there = [name for name in group["params"] if name in names or name not in elsewhere]
        for name in sorted(set(names).symmetric_difference(there)):
            has, has_not = ("the optimizer", path) if name in names else (path, "the optimizer")
            raise CheckpointError(f"parameter {name!r} is in group {number} of {has}, but not of {has_not}")
