"""Lightning's place for what writes and reads checkpoints, with files that are complete or not there."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from .._checkpoints.files import load_file, local_path, save_file

if TYPE_CHECKING:
    from lightning.fabric.plugins import CheckpointIO
    from lightning.fabric.plugins import TorchCheckpointIO as _Base
else:
    _Base = object


class WholeFileIO(_Base):
    """Stands in front of a package's ``TorchCheckpointIO``, to which remote paths are left."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        local = local_path(path)
        if local is None or storage_options is not None:  # options are refused by Lightning's
            super().save_checkpoint(checkpoint, path, storage_options)
        else:
            save_file(checkpoint, local)

    def load_checkpoint(
        self,
        path: str | Path,
        map_location: Any = lambda storage, location: storage,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        local = local_path(path)
        if local is None or not local.exists():  # a missing file is reported by Lightning's
            return super().load_checkpoint(path, map_location, weights_only)
        loaded: dict[str, Any] = load_file(local, map_location, weights_only)
        return loaded


class WholeFilesByDefault:
    """A strategy that uses its ``_default_io`` where the user gave no ``CheckpointIO``, or one to be put around it."""

    _default_io: ClassVar[type[WholeFileIO]]
    _checkpoint_io: CheckpointIO | None

    @property
    def checkpoint_io(self) -> CheckpointIO:
        if self._checkpoint_io is None:
            self._checkpoint_io = self._default_io()
        elif hasattr(self._checkpoint_io, "_base_checkpoint_io_configured"):  # Lightning's wrappers, like the async one
            wrapper: Any = self._checkpoint_io
            wrapper.checkpoint_io = self._default_io()  # taken if there is none in it yet
        return self._checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> None:
        self._checkpoint_io = io
