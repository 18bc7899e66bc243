"""Reads checkpoints that are directories, into which every rank wrote its part with torch.distributed.checkpoint.

Readers see full tensors in the directory: a different number of ranks, FSDP, or a consolidation tool.
:mod:`.directory_state` describes an optimizer's entries in it.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..errors import CheckpointError
from ..module import dtensors_of, empty_like_part
from .remote_directory import MARKER, Directory, RemoteDirectory

if TYPE_CHECKING:  # importing it takes half a second, which is paid only to save or load directories
    from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
    from torch.distributed.checkpoint.storage import StorageReader


def is_directory_checkpoint(path: Directory) -> bool:
    """Returns True if a strategy of this package, FSDP or another user of torch.distributed.checkpoint wrote it."""
    if isinstance(path, RemoteDirectory):
        return MARKER in path.sizes()
    return (path / MARKER).is_file()


class OpenDirectory:
    """A checkpoint directory that is being read. Its metadata is loaded, and compared with its files, once.

    No member is collective. All raise CheckpointError if the directory is not complete, or cannot be read.
    """

    def __init__(self, path: Directory, reader: StorageReader | None = None) -> None:
        """``reader``: of the directory; by default torch's own, which makes objects of any class."""
        self.path = path
        self._given = reader

    def __str__(self) -> str:
        return str(self.path)

    @functools.cached_property
    def metadata(self) -> Metadata:
        """The description of the contents by torch.distributed.checkpoint; all files and tensors in it are complete."""
        try:
            metadata = self._reader().read_metadata()
            missing = describe_missing_file(metadata.storage_data.values(), self._sizes())
        except CheckpointError:
            raise
        # A broken pickle may raise anything, down to AttributeError and EOFError, and so may a store's client.
        except Exception as error:
            raise CheckpointError(
                f"{self} is no complete directory of torch.distributed.checkpoint: {error!r}"
            ) from error
        if missing:
            raise CheckpointError(f"{self} is not complete: {missing}. Resume from another checkpoint")
        hole = describe_missing_elements(metadata)
        if hole:
            raise CheckpointError(f"{self} is not complete: {hole}")
        return metadata

    @property
    def keys(self) -> set[str]:
        """The keys of the outermost dictionary."""
        return {str(place[0]) for place in self._places.values()}

    @property
    def _places(self) -> Mapping[str, tuple[Any, ...]]:
        """The place of each value (keys, outermost first) by its name in the format, in the order of the save."""
        return self.metadata.planner_data or {name: (name,) for name in self.metadata.state_dict_metadata}

    def read(
        self,
        key: str | None,
        make: Callable[[tuple[Any, ...], TensorStorageMetadata], Tensor | None] | None = None,
    ) -> dict[str, Any]:
        """Reads the values under ``key`` of the outermost dictionary, or all of it, nested as they were saved.

        ``make`` returns the tensor to read into, given its place (keys, outermost first) and its metadata. A
        :class:`FlatShard` reads only its part, a tensor on meta is returned unread, None omits the value. By default it
        is a full tensor in host memory.
        """
        from torch.distributed.checkpoint import api, state_dict_loader
        from torch.distributed.checkpoint._nested_dict import unflatten_state_dict
        from torch.distributed.checkpoint.metadata import TensorStorageMetadata

        metadata = self.metadata
        places = {
            name: place
            for name, place in self._places.items()
            if key is None or (str(place[0]) == key and len(place) > 1)
        }
        targets: dict[str, Any] = {}
        for name, place in places.items():
            saved = metadata.state_dict_metadata[name]
            # A plain value needs no target: the reader sets it here.
            if not isinstance(saved, TensorStorageMetadata):
                targets[name] = None
                continue
            target = make(place, saved) if make else torch.empty(saved.size, dtype=saved.properties.dtype, device="cpu")
            if target is not None:
                targets[name] = target
        read = {name: target for name, target in targets.items() if target is None or not target.is_meta}
        if read:
            reader = self._reader()
            reader.read_metadata = lambda *_: metadata  # type: ignore[method-assign]  # torch would load it again
            try:
                with warnings.catch_warnings():
                    warnings.filterwarnings("ignore", ".*to load in a single process")  # as each rank does here
                    state_dict_loader.load(read, storage_reader=reader, no_dist=True)
            except (Exception, api.CheckpointException) as error:  # CheckpointException is no Exception
                where = "" if key is None else f", {key!r} in it"
                raise CheckpointError(f"{self} cannot be read{where}: {error!r}") from error
        nested: dict[str, Any] = unflatten_state_dict(targets | read, places)
        return nested if key is None else nested.get(key, {})

    def read_weights(self, key: str, module: nn.Module, elsewhere: Collection[str] = ()) -> dict[str, Any]:
        """Reads the state of a module under ``key``: full tensors, and tensor-parallel parameters as DTensors.

        A rank reads only its part of a DTensor.

        ``elsewhere``: the names of parameters and buffers that other ranks have, and this one does not read.
        """
        params = dtensors_of(module, each_name=True)

        def make(place: tuple[Any, ...], saved: TensorStorageMetadata) -> Tensor | None:
            if str(place[1]) in elsewhere:
                return None
            param = params.get(str(place[1]))
            # A parameter of another shape is read in full: load_state_dict() will name it.
            if param is None or len(place) > 2 or tuple(saved.size) != tuple(param.shape):
                return torch.empty(saved.size, dtype=saved.properties.dtype, device="cpu")
            return empty_like_part(param, saved.properties.dtype)

        return self.read(key, make)

    def _reader(self) -> StorageReader:
        if self._given is not None:
            return self._given
        if isinstance(self.path, RemoteDirectory):
            from .remote_reader import RemoteReader

            return RemoteReader(self.path)
        from torch.distributed.checkpoint.filesystem import FileSystemReader

        return FileSystemReader(self.path)

    def _sizes(self) -> Callable[[str], int | None]:
        """Returns a function that returns a file's bytes by name; None for a file that does not exist."""
        path = self.path
        if isinstance(path, RemoteDirectory):
            return path.sizes().get
        return lambda name: (path / name).stat().st_size if (path / name).is_file() else None


# --- completeness -----------------------------------------------------------------------------------------------------


def describe_missing_file(places: Iterable[Any], size_of: Callable[[str], int | None]) -> str:
    """Says which file of a directory is missing or too short; empty if none.

    Args:
        places: file, offset and length in bytes of each value, from torch's ``Metadata.storage_data``.
        size_of: returns the bytes of a file by name; None if there is no such file.
    """
    ends: dict[str, int] = {}
    for place in places:
        # The last byte that is referred to: a file is shorter if a copy of it was interrupted.
        ends[place.relative_path] = max(ends.get(place.relative_path, 0), place.offset + place.length)
    for name, end in ends.items():
        size = size_of(name)
        if size is None:
            return f"{name} is missing"
        if size < end:
            return f"{name} is cut off after {size:,} of {end:,} bytes"
    return ""


def describe_missing_elements(metadata: Metadata) -> str:
    """Says which tensor is incomplete in the directory, and why; empty if none.

    If one rank saves without the others, the directory has only its parts. The format cannot express that, and its
    readers leave the rest of the target as it was in memory.
    """
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    for name, saved in metadata.state_dict_metadata.items():
        if not isinstance(saved, TensorStorageMetadata):
            continue
        numel = math.prod(saved.size)
        there = sum(math.prod(chunk.sizes) for chunk in saved.chunks)
        if there < numel:
            return (
                f"it has {there:,} of the {numel:,} elements of {name}, and another rank had the rest. All ranks have "
                "to save together"
            )
    return ""
