"""Directories in object stores and on other file systems that fsspec reaches: ``s3://...``, ``memory://...``.

[Note: complete without a rename]
A store writes one object atomically. It cannot rename several together, so no directory can be prepared elsewhere and
moved into place. Instead ``.metadata``, which is one object, appears last, and a directory without it is no checkpoint:
torch and Lightning agree on that. torch writes it as ``.metadata.tmp`` and renames it: in a store, a copy of one
object. A complete directory is never written into again, as in Megatron-LM, torchtitan and NeMo, whose directories have
the step in their names. An interrupted save leaves objects without a ``.metadata``, and the next save of that name
writes over them.
"""

from __future__ import annotations

import dataclasses
import errno
import re
from pathlib import Path
from typing import Any

MARKER = ".metadata"
"""The object that is written last and read first; torch.distributed.checkpoint recognises a directory by it."""

EXTRA_FILE = "meta.pt"
"""The file with everything except tensors of the model or of an optimizer; the name is Lightning's."""

_OUR_NAMES = re.compile(r"meta\.pt|\.metadata\.tmp|__\d+_\d+\.distcp")
"""Names of files in an incomplete directory that this package or another user of torch.distributed.checkpoint wrote."""


@dataclasses.dataclass(frozen=True)
class RemoteDirectory:
    """The place of a directory that is not on a local or mounted file system.

    fsspec's configuration has the store's address and credentials, for each rank.

    Attributes:
        url: with a protocol that fsspec knows, without a slash at the end.
    """

    url: str

    def __str__(self) -> str:
        return self.url

    def file_system(self) -> Any:
        """Returns fsspec's file system with an empty cache of listings: other ranks and jobs have written since.

        Raises:
            ValueError: if fsspec knows no such protocol.
            ImportError: if it lacks the package for it.
        """
        file_system = _file_system_of(self.url)
        file_system.invalidate_cache()
        return file_system

    def object(self, name: str) -> str:
        """Returns the URL of an object in it."""
        return f"{self.url}/{name}"

    def is_dir(self) -> bool:
        """Returns whether objects exist in it.

        Raises:
            OSError: if the store does not answer, or rejects the credentials.
        """
        # Not by fsspec's isdir(), which returns False for a store that does not answer.
        try:
            return bool(self.file_system().info(self.url)["type"] == "directory")
        except FileNotFoundError:
            return False

    def sizes(self) -> dict[str, int]:
        """Returns the bytes of each object in it, by name."""
        try:
            found = self.file_system().ls(self.url, detail=True)
        except FileNotFoundError:
            return {}
        return {entry["name"].rsplit("/", 1)[-1]: entry["size"] for entry in found if entry["type"] == "file"}

    def prepare(self) -> None:
        """Makes the directory, on file systems that have directories.

        Raises:
            OSError: if a complete checkpoint exists there, or something that is no checkpoint.
        """
        names = self.sizes()
        if MARKER in names:
            raise FileExistsError(
                errno.EEXIST,
                "it is a complete checkpoint, and a directory in an object store is never overwritten. Save under "
                "another name, with the step in it (ModelCheckpoint(filename='{step}') without save_last), remove the "
                "old one first, or save one file (state_dict_type='full'), which a store replaces at once",
                self.url,
            )
        if not all(_OUR_NAMES.fullmatch(name) for name in names):
            raise IsADirectoryError(errno.EISDIR, "it is a directory, and no checkpoint", self.url)
        self.file_system().makedirs(self.url, exist_ok=True)

    def remove(self) -> None:
        """Removes all of it. If that is interrupted, the rest is no checkpoint."""
        file_system = self.file_system()
        if MARKER in self.sizes():
            file_system.rm_file(self.object(MARKER))
        if not set("*?[") & set(self.url):  # together, which takes one request for a thousand objects
            if self.is_dir():
                file_system.rm(self.url, recursive=True)
            return
        for name in self.file_system().find(self.url):  # rm() would read the URL as a pattern
            file_system.rm_file(name)


Directory = Path | RemoteDirectory
"""The place of a directory."""


def place_at(path: str | Path | RemoteDirectory) -> Directory:
    """Returns the place at a path or URL: a Path on a local or mounted file system, otherwise a RemoteDirectory."""
    if isinstance(path, RemoteDirectory):
        return path
    if "://" not in str(path) and "::" not in str(path):
        return Path(path)
    file_system = _file_system_of(str(path))
    if "file" in file_system.protocol:
        return Path(file_system._strip_protocol(str(path)))
    return RemoteDirectory(str(path).rstrip("/"))


def _file_system_of(url: str) -> Any:
    # Torch requires fsspec, so it is installed. The import is paid only for URLs.
    from torch.distributed.checkpoint._fsspec_filesystem import FileSystem

    store = FileSystem()
    store.init_path(url)
    return store.fs
