"""An optimizer's state in directories: what each rank writes of it, and reads.

It is keyed by parameter name, as ``torch.distributed.checkpoint.state_dict`` has it.

[Note: parts of parts]
A tensor-parallel parameter is cut twice: each tensor rank has a box of it, and of that box each data-parallel rank of
this tensor rank has a range. What is written are boxes of the whole parameter, so that nobody who reads it has to know
either number of ranks. A parameter that tensor ranks have whole is divided by all of them alike (local_parts' [Note:
one layout on all tensor ranks]): each offers the same chunks, and torch's planner has one of them write each.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..errors import CheckpointError
from ..layout import BufferLayout, ParamSpec
from ..module import CutParam
from ..shards import REMAINDER, FlatShard, ParamShard, as_saved, groups_as_saved, per_element_keys, saved_name
from ..trials import is_per_element
from .directory_reader import OpenDirectory
from .remote_directory import Directory

if TYPE_CHECKING:  # see directory_reader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata


@dataclasses.dataclass(frozen=True)
class TensorParts:
    """The parameters of which each tensor rank has a part.

    Attributes:
        cut: these, by name.
    """

    cut: Mapping[str, CutParam]

    def placed(self, main_params: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Main params of parameters that have no shards, of which this rank has all of its part."""
        cuts = {name: self.cut.get(name.removesuffix(REMAINDER)) for name in main_params}
        return {name: _placed(value, None, None, cuts[name]) for name, value in main_params.items()}


def sharded_state_dict(
    optimizer: torch.optim.Optimizer,
    names: Mapping[int, str],
    stepped: Callable[[torch.nn.Parameter], Tensor | None],
    params_by_id: Mapping[int, int],
    shards: Mapping[int, ParamShard],
    layout: BufferLayout,
    known: set[str] | None,
    tensor_parts: TensorParts,
) -> dict[str, Any]:
    """This rank's part of the state: the tensors themselves, or :class:`FlatShard` around them; nothing is copied.

    Args:
        optimizer: its state is keyed by what ``stepped`` returns.
        names: of its parameters, by ``id``.
        stepped: what is stepped in a parameter's place on this rank; None if all of it is elsewhere.
        known: names of what has one number for each element; None if nobody knows them.
        tensor_parts: which parameters the tensor ranks have in part.
    """
    state: dict[str, dict[str, Any]] = {}
    main_params: dict[str, Tensor] = {}
    # None where another rank steps all of it, and writes it: a directory is the union of the ranks' parts.
    every = [param for group in optimizer.param_groups for param in group["params"]]
    tensors = {id(param): tensor for param in every if (tensor := stepped(param)) is not None}
    flat = {key for key, index in params_by_id.items() if index in shards and shards[index].is_cut}
    whole = as_saved(optimizer, {key: tensor for key, tensor in tensors.items() if key not in flat})
    for param in (param for param in every if id(param) in tensors):
        index, name = params_by_id.get(id(param)), names[id(param)]
        values = optimizer.state.get(tensors[id(param)], {}) if id(param) in flat else whole.get(id(param), {})
        shard = shards.get(index) if index is not None else None
        spec = layout.params[index] if index is not None and shard is not None else None
        cut = tensor_parts.cut.get(name)
        # A count is the same on all owners and written whole, by whichever of them the planner chooses.
        shape = shard.main.shape if shard is not None else cut.part_shape if cut is not None else ()
        state[name] = {
            key: _placed(value, shard, spec, cut) if is_per_element(key, value, shape, known) else value
            for key, value in values.items()
        }
        if index is not None and shard is not None and layout.has_separate_main(index):
            main_params[saved_name(layout, index)] = _placed(shard.main_param(), shard, spec, cut)
    state = {name: values for name, values in state.items() if values}
    groups = groups_as_saved(optimizer, names)
    return {"state": state, "param_groups": groups} | ({"main_params": main_params} if main_params else {})


def _placed(value: Tensor, shard: ParamShard | None, spec: ParamSpec | None, cut: CutParam | None) -> Tensor:
    """A tensor with a number for each element of what is stepped, as the part that it is of the whole parameter's."""
    if shard is not None and spec is not None and shard.is_cut:
        if spec.numel == 0 and cut is None:  # of no elements there is no part
            return value.view(spec.shape)
        return FlatShard(value, shard.start, spec.shape, spec.stride, cut)
    # A DTensor, which a frozen parameter's may be, says itself where it is.
    return value if cut is None or type(value) is not Tensor else FlatShard.of_part(value, cut)


def _sizes_of_state(metadata: Any, key: str) -> dict[int, dict[str, Tensor]]:
    """The tensors in the state of the optimizer under ``key``, without elements, each under a number of its own."""
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    sizes: dict[int, dict[str, Tensor]] = {}
    for number, (name, place) in enumerate((metadata.planner_data or {}).items()):
        saved = metadata.state_dict_metadata[name]
        if isinstance(saved, TensorStorageMetadata) and tuple(map(str, place[:2])) == (key, "state"):
            sizes[number] = {str(place[-1]): torch.empty(saved.size, device="meta")}
    return sizes


def read_optimizer(
    directory: OpenDirectory,
    key: str,
    names: Iterable[str],
    shards: Mapping[int, ParamShard],
    layout: BufferLayout,
    known: set[str] | None,
    whole: Collection[int],
    followed: Mapping[str, int],
    cut: Mapping[str, CutParam],
    elsewhere: Collection[str] = (),
) -> dict[str, Any]:
    """An optimizer's state by parameter name, of which only this rank's parts are read: a range of a tensor as
    :class:`FlatShard`, all else in its shape.

    Args:
        directory, key: the directory, and the key of the optimizer in it.
        names: of the optimizer's parameters.
        shards, layout, known: as for :func:`sharded_state_dict`.
        whole: parameters that are not divided among data-parallel ranks: each has one owner.
        followed: parameters that have shards, on some data-parallel rank, by name; of others every one reads all.
        cut: as :attr:`TensorParts.cut`.
        elsewhere: the names of parameters that other ranks of the model have, which are passed over.

    Raises:
        CheckpointError: if the directory cannot be read, or a parameter in it is not in ``names``, or of another shape.
    """
    per_element = per_element_keys(_sizes_of_state(directory.metadata, key), known)
    divided = set(followed.values()).difference(whole) if layout.num_shards > 1 else set[int]()
    present = {*names, *followed}
    targets = _Targets(
        directory.path,
        layout,
        shards,
        present,
        set(elsewhere).difference(present),
        followed,
        per_element,
        divided,
        set(whole),
        cut,
    )
    saved = directory.read(key, targets)
    if "state" in saved:
        saved["state"] = {
            name: {what: targets.shaped(name, value) for what, value in values.items()}
            for name, values in saved["state"].items()
        }
    if "main_params" in saved:
        saved["main_params"] = {name: targets.shaped(name, value) for name, value in saved["main_params"].items()}
    return saved


@dataclasses.dataclass(frozen=True)
class _Targets:
    """Makes the tensors that a rank reads an optimizer's state into; see :func:`read_optimizer`.

    Attributes:
        present: the names of all parameters that there are here.
        elsewhere: of those that are on other ranks of the model alone.
        indices: the layout's, of those that have shards, by name.
        divided: those of which each data-parallel rank has a range.
    """

    path: Directory
    layout: BufferLayout
    shards: Mapping[int, ParamShard]
    present: Collection[str]
    elsewhere: Collection[str]
    indices: Mapping[str, int]
    per_element: Collection[str]
    divided: Collection[int]
    whole: Collection[int]
    cut: Mapping[str, CutParam]

    def __call__(self, place: tuple[Any, ...], saved: TensorStorageMetadata) -> Tensor | None:
        """The tensor to read into; None if all of it is another rank's."""
        dtype, size = saved.properties.dtype, tuple(saved.size)
        if place[1] not in ("state", "main_params"):
            return torch.empty(size, dtype=dtype, device="cpu")
        name, what = str(place[2]).removesuffix(REMAINDER), str(place[-1])
        if name in self.elsewhere:
            return None
        # Before anything is loaded: a rank that left out what it does not know would resume another optimizer.
        if name not in self.present:
            raise CheckpointError(
                f"{self.path} has state {what!r} of a parameter {name!r}, which the model does not have"
            )
        index = self.indices.get(name)  # None: it is frozen now, or no shard was made yet
        if index in self.whole and index not in self.shards:
            return None
        if place[1] == "state" and what not in self.per_element:
            return torch.empty(size, dtype=dtype, device="cpu")
        return self._of_elements(name, what, size, dtype)

    def _of_elements(self, name: str, what: str, size: tuple[int, ...], dtype: torch.dtype) -> Tensor | None:
        """For what has a number for each element of a parameter."""
        index, part = self.indices.get(name), self.cut.get(name)
        shape, stride = part.part_shape if part is not None else size, None
        if index is not None:
            shape, stride = self.layout.params[index].shape, self.layout.params[index].stride
        # Nobody divides it, so it may be whatever the optimizer keeps, which need not be element-wise.
        if part is None and index not in self.divided:
            return _empty(size, stride if size == shape else None, dtype)
        if size != (expected := shape if part is None else part.shape):
            raise CheckpointError(
                f"{self.path} has state {what!r} of parameter {name!r} in shape {size}, the parameter has {expected}: "
                "it is of another model"
            )
        if part is not None and index not in self.divided:
            return FlatShard.of_part(_empty(shape, stride, dtype), part)
        # Another rank's: not read at all, which is what directories are for.
        shard = self.shards.get(index) if index is not None else None
        if shard is None or stride is None:
            return None
        return FlatShard(torch.empty(shard.numel, dtype=dtype, device="cpu"), shard.start, shape, stride, part)

    def shaped(self, name: str, value: Any) -> Any:
        """Returns what was read, in the shape of a parameter's part unless it is a range of one."""
        is_range = self.indices.get(name.removesuffix(REMAINDER)) in self.divided
        return value.as_part() if isinstance(value, FlatShard) and not is_range else value


def _empty(shape: tuple[int, ...], stride: tuple[int, ...] | None, dtype: torch.dtype) -> Tensor:
    return (
        torch.empty(shape, dtype=dtype, device="cpu")
        if stride is None
        else torch.empty_strided(shape, stride, dtype=dtype, device="cpu")
    )


def check_same_groups(
    path: Directory, saved: Sequence[Mapping[str, Any]], own: Sequence[Sequence[str]], elsewhere: Collection[str] = ()
) -> None:
    """Raises CheckpointError, naming the first difference, if saved groups are not of the same parameters. Those that
    are ``elsewhere`` alone do not count."""
    if len(saved) != len(own):
        raise CheckpointError(f"{path} has {len(saved)} parameter group(s), the optimizer {len(own)}")
    for number, (group, names) in enumerate(zip(saved, own, strict=True)):
        there = [name for name in group["params"] if name in names or name not in elsewhere]
        for name in sorted(set(names).symmetric_difference(there)):
            has, has_not = ("the optimizer", path) if name in names else (path, "the optimizer")
            raise CheckpointError(f"parameter {name!r} is in group {number} of {has}, but not of {has_not}")
