"""Lightning's default ``CheckpointIO``, with files that are complete or not there."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from .._checkpoints.files import load_file, save_file
from ..core import place_at

if TYPE_CHECKING:
    from lightning.fabric.plugins import CheckpointIO
    from lightning.fabric.plugins import TorchCheckpointIO as _Base
else:
    _Base = object  # each of two packages puts its own there


class CompleteFileIO(_Base):
    """Comes before a package's ``TorchCheckpointIO``, which handles remote paths."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        local = place_at(path)
        if not isinstance(local, Path) or storage_options is not None:  # options are refused by Lightning's
            super().save_checkpoint(checkpoint, path, storage_options)
        else:
            save_file(checkpoint, local)

    def load_checkpoint(
        self,
        path: str | Path,
        map_location: Any = lambda storage, location: storage,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        local = place_at(path)
        if not isinstance(local, Path) or not local.exists():  # a missing file is reported by Lightning's
            return super().load_checkpoint(path, map_location, weights_only)
        loaded: dict[str, Any] = load_file(local, map_location, weights_only)
        return loaded


def with_default(default: type[CompleteFileIO]) -> property:
    """The property ``checkpoint_io`` of Lightning's strategies, with ``default`` where the user gave no plugin."""

    def checkpoint_io(self: Any) -> CheckpointIO:
        if self._checkpoint_io is None:
            self._checkpoint_io = default()
        elif hasattr(self._checkpoint_io, "_base_checkpoint_io_configured"):  # Lightning's wrappers, like the async one
            self._checkpoint_io.checkpoint_io = default()  # ignored if it has one
        checkpoint_io_of_base: CheckpointIO = self._checkpoint_io
        return checkpoint_io_of_base

    def set_checkpoint_io(self: Any, io: CheckpointIO) -> None:
        self._checkpoint_io = io

    return property(checkpoint_io, set_checkpoint_io)
