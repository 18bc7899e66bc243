"""An optimizer's state in directories of ``torch.distributed.checkpoint``: each rank writes and reads its part.

It is keyed by parameter name. Where ranks share a model, tensors have the names of the full model.

[Note: how a tensor-parallel parameter is cut in a directory]
It is cut twice: each tensor rank has a box of it, and each data-parallel rank of this tensor rank has a range of that
box. Boxes of the whole parameter are written, so that no reader has to know either number of ranks. A parameter that
tensor ranks have in full is divided by all of them alike: each offers the same boxes, and torch's planner has one of
them write each.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..errors import CheckpointError
from ..layout import ParamSpec, dense_stride
from ..module import CutParam
from ..optimizer import MAIN_PARAM, ShardedOptimizer, full_state, state
from ..states import FlatShard, LocalState, Parts, as_saved, groups_as_saved, per_element_keys
from .directory_reader import OpenDirectory
from .remote_directory import Directory

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata


def parts_to_write(optimizer: ShardedOptimizer) -> dict[str, Any]:
    """Returns this rank's part by parameter name; see ``DistributedOptimizer.sharded_state_dict``. Collective over a
    pipeline's stages."""
    engine = optimizer.engine
    model = engine.model_parallel
    # The writer reads the device, which may wait for a rank that is gone.
    engine.collectives.wait_for_device(engine.device, "all-gather")
    optimizer.prepare()
    names = optimizer.names_by_id()
    is_first = all(ranks.is_rank_zero for ranks in (engine.collectives, *model.collectives))
    extra = {id(param) for param in optimizer.extra_params.params}
    cut = _cut_params(optimizer)
    states: dict[str, dict[str, Any]] = {}
    main_params: dict[str, Tensor] = {}
    with_runs = engine.index_by_id.keys() if optimizer.has_runs else set()
    without_runs = {
        id(param): param
        for param in optimizer.params()
        if id(param) not in with_runs and (is_first or id(param) not in extra)
    }
    for name, main in optimizer.frozen_main_params.items():
        if model.name_in_model(name) == name:
            main_params[name] = _of_part(main, cut.get(name))
    for key, values in as_saved(optimizer.inner, without_runs).items():
        name = names[key]
        if model.name_in_model(name) == name:  # otherwise the first stage writes it
            states[name] = {what: _of_part(value, cut.get(name)) for what, value in values.items()}
    for index, values in state.local_state(optimizer, is_saved=True).items():
        spec = engine.layout.params[index]
        if model.name_in_model(spec.name) != spec.name:
            continue
        placed = {
            what: _placed(spec, value, cut.get(spec.name), optimizer.is_flat(index))
            for what, value in values.items()
            if not isinstance(value, Parts) or value
        }
        main = placed.pop(MAIN_PARAM, None)
        if main is not None:
            main_params[spec.name] = main
        if placed:
            states[spec.name] = placed
    groups = groups_as_saved(optimizer.inner, names)
    for group in model.states:
        groups = group.join_groups(optimizer, groups)
    written: dict[str, Any] = {"state": states, "param_groups": groups}
    return written | ({"main_params": main_params} if main_params else {})


def _cut_params(optimizer: ShardedOptimizer) -> Mapping[str, CutParam]:
    """Returns the parameters that tensor ranks have in parts, by their names in the full model."""
    engine = optimizer.engine
    name_in_model = engine.model_parallel.name_in_model
    return engine.local_parts.cut_params({name_in_model(name): p for name, p in engine.named_params().items()})


def _of_part(value: Any, cut: CutParam | None) -> Any:
    is_part = cut is not None and type(value) is Tensor and tuple(value.shape) == cut.part_shape
    return FlatShard.of_part(value, cut) if cut is not None and is_part else value


def _placed(spec: ParamSpec, value: Any, cut: CutParam | None, is_flat: bool) -> Any:
    """Returns a value with its place in the full parameter's, if it is only a part."""
    if not isinstance(value, Parts):
        return _of_part(value, cut)
    if spec.numel == 0 and cut is None:  # a parameter without elements has no parts
        return value.joined().view(spec.shape)
    if not is_flat:
        return _of_part(value.joined().as_strided(spec.shape, spec.stride), cut)
    return FlatShard([piece for _, piece in value], value[0][0], spec.shape, spec.stride, cut)


# --- reading ----------------------------------------------------------------------------------------------------------


def read_parts(optimizer: ShardedOptimizer, directory: OpenDirectory, key: str) -> Callable[[], None]:
    """Reads this rank's part, and returns a function that loads it; see ``DistributedOptimizer.read_sharded``. Not
    collective.

    Raises:
        CheckpointError: if it cannot be read, or is of another model.
    """
    targets = _Targets(optimizer, directory, key)
    saved = directory.read(key, targets.make)
    if "param_groups" not in saved:
        raise CheckpointError(f"{directory} has no optimizer under the key {key!r}")
    names = targets.names
    groups_here = [[names[id(param)] for param in group["params"]] for group in optimizer.inner.param_groups]
    elsewhere = optimizer.engine.model_parallel.names_elsewhere
    _check_same_groups(directory.path, saved["param_groups"], groups_here, elsewhere)

    def load() -> None:
        groups = saved["param_groups"]
        for group in optimizer.engine.model_parallel.states:
            groups = group.divide_groups(optimizer, groups)
        targets.load(saved.pop("state", {}), saved.pop("main_params", {}), groups)

    return load


class _Targets:
    """Makes the tensors that a rank reads into, and loads them.

    Attributes:
        names: by ``id``, the names of parameters in the full model.
    """

    def __init__(self, optimizer: ShardedOptimizer, directory: OpenDirectory, key: str) -> None:
        engine = optimizer.engine
        model = engine.model_parallel
        self._optimizer = optimizer
        self._path = directory.path
        self.names = {id_: model.name_in_model(name) for id_, name in optimizer.names_by_id().items()}
        self._present = set(self.names.values())
        self._elsewhere = model.names_elsewhere.difference(self._present)
        with_runs = engine.index_by_id if optimizer.has_runs else {}
        here = set(map(id, optimizer.model_params()))
        self._indices = {self.names[id_]: index for id_, index in with_runs.items() if id_ in here}
        self._dense = {  # shapes and strides of parameters that this rank steps in full
            self.names[id(param)]: (tuple(param.shape), dense_stride(param.shape, param.stride()))
            for param in optimizer.params()
        }
        names = optimizer.element_names
        sizes = _sizes_of_state(directory.metadata, key)
        self._per_element = per_element_keys(sizes, None if names is None else set(names))
        self._cut = _cut_params(optimizer)

    def make(self, place: tuple[Any, ...], saved: TensorStorageMetadata) -> Tensor | None:
        """Returns the tensor to read into: on meta if other data-parallel ranks own all of it, None for values of
        parameters that other ranks of the model have."""
        dtype = saved.properties.dtype
        size = tuple(saved.size)
        if place[1] not in ("state", "main_params"):
            return torch.empty(size, dtype=dtype, device="cpu")
        name = str(place[2])
        what = str(place[-1]) if place[1] == "state" else MAIN_PARAM
        if name in self._elsewhere:
            return None
        # Raised before anything is loaded: without this entry the rank would resume a different optimizer.
        if name not in self._present:
            raise CheckpointError(
                f"{self._path} has {_described(what)} of a parameter {name!r}, which the model does not have"
            )
        if what != MAIN_PARAM and what not in self._per_element:
            return torch.empty(size, dtype=dtype, device="cpu")
        return self._of_elements(name, what, size, dtype)

    def _of_elements(self, name: str, what: str, size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        index = self._indices.get(name)
        part = self._cut.get(name)
        is_flat = index is not None and self._optimizer.is_flat(index)
        if part is None and not is_flat:  # it may be any state of this name, also one that is not element-wise
            shape, stride = self._dense.get(name, (None, ()))
            if shape == size:
                return torch.empty_strided(size, stride, dtype=dtype, device="cpu")
            return torch.empty(size, dtype=dtype, device="cpu")
        layout = self._optimizer.engine.layout
        expected = part.shape if part is not None else layout.params[self._indices[name]].shape
        if size != expected:
            raise CheckpointError(
                f"{self._path} has {_described(what)} of parameter {name!r} in shape {size}, the parameter has "
                f"{expected}: it is of another model"
            )
        if index is None or not is_flat:
            assert part is not None
            return FlatShard.of_part(torch.empty(part.part_shape, dtype=dtype, device="cpu"), part)
        spec = layout.params[index]
        owned = layout.owned_range(index, self._optimizer.engine.collectives.rank)
        if owned is None or (owned[0] == owned[1] and spec.numel):
            return torch.empty(0, dtype=dtype, device="meta")
        start = owned[0] - layout.slots[index].start
        return FlatShard(
            torch.empty(owned[1] - owned[0], dtype=dtype, device="cpu"), start, spec.shape, spec.stride, part
        )

    def load(
        self, states: dict[str, dict[str, Any]], main_params: dict[str, Any], groups: Sequence[Mapping[str, Any]]
    ) -> None:
        """Loads the values that were read, out of these dictionaries."""
        optimizer = self._optimizer
        specs = optimizer.engine.layout.params
        name_in_model = optimizer.engine.model_parallel.name_in_model
        optimizer.frozen_main_params = {
            name: _shaped(main_params.pop(name_in_model(name))).float()
            for name in full_state.frozen_params(optimizer)
            if name_in_model(name) in main_params
        }
        local: LocalState = {}
        for name, index in self._indices.items():
            values = states.pop(name, {})
            if specs[index].has_main_param and name in main_params:
                values[MAIN_PARAM] = main_params.pop(name)
            for what in list(values):  # out of them, since a converted value is a copy
                value = _as_local(specs[index], what, values.pop(what), optimizer.is_flat(index))
                local.setdefault(index, {})[what] = value
        without_runs: dict[Tensor, dict[str, Any]] = {
            param: {what: _shaped(value) for what, value in states.pop(self.names[id(param)], {}).items()}
            for param in optimizer.params()
            if self.names[id(param)] not in self._indices
        }
        optimizer.prepare()
        full_state.load_groups(optimizer, groups, without_runs, {})
        state.put_beside_main_params(optimizer, local)


def _described(what: str) -> str:
    return "main param" if what == MAIN_PARAM else f"state {what!r}"


def _shaped(value: Any) -> Any:
    return value.as_part() if isinstance(value, FlatShard) else value


def _as_local(spec: ParamSpec, what: str, value: Any, is_flat: bool) -> Any:
    """Returns a value that was read, in the dtype that torch's ``load_state_dict`` gives it; no parts of one on meta,
    which other ranks own."""
    if isinstance(value, Tensor) and value.is_meta:
        return Parts()
    if isinstance(value, FlatShard) and is_flat:
        return Parts([(value.start, value.local.to(state.loaded_dtype(spec, what, value.dtype)))])
    value = _shaped(value)
    return value.to(state.loaded_dtype(spec, what, value.dtype)) if type(value) is Tensor else value


def _sizes_of_state(metadata: Any, key: str) -> dict[int, dict[str, Tensor]]:
    """Returns meta tensors of the sizes in the state of the optimizer under ``key``, with a number for each."""
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    sizes: dict[int, dict[str, Tensor]] = {}
    for number, (name, place) in enumerate((metadata.planner_data or {}).items()):
        saved = metadata.state_dict_metadata[name]
        if isinstance(saved, TensorStorageMetadata) and tuple(map(str, place[:2])) == (key, "state"):
            sizes[number] = {str(place[-1]): torch.empty(saved.size, device="meta")}
    return sizes


def _check_same_groups(
    path: Directory,
    saved: Sequence[Mapping[str, Any]],
    groups_here: Sequence[Sequence[str]],
    elsewhere: Collection[str],
) -> None:
    """Raises CheckpointError if saved groups have other parameters, not counting those ``elsewhere``."""
    if len(saved) != len(groups_here):
        raise CheckpointError(f"{path} has {len(saved)} parameter group(s), the optimizer {len(groups_here)}")
    for number, (group, names) in enumerate(zip(saved, groups_here, strict=True)):
        there = [name for name in group["params"] if name in names or name not in elsewhere]
        for name in sorted(set(names).symmetric_difference(there)):
            has, has_not = ("the optimizer", path) if name in names else (path, "the optimizer")
            raise CheckpointError(f"parameter {name!r} is in group {number} of {has}, but not of {has_not}")
