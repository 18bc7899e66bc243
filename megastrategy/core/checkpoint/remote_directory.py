"""Directories in object stores and on other file systems that fsspec reaches: ``s3://...``, ``memory://...``.

[Note: complete without a rename]
A store writes one object atomically, also in place of an older one. It cannot rename several together, so no checkpoint
can be prepared elsewhere and moved into place. Instead the contents of a directory are those that its ``.metadata``
lists, which is one object:

1. Every rank writes its part, under a name that belongs only to this save (``a1b2c3d4__0_0.distcp``).
2. Rank 0 checks that all parts exist, and writes ``meta-a1b2c3d4.pt``.
3. It removes ``meta.pt``, the copy under the name that other readers know, so that no reader finds it beside the
   tensors of another save.
4. It writes ``.metadata``, which lists the parts. Until then the old checkpoint is the complete one, then the new one.
5. It copies ``meta.pt`` again, and removes objects that are not needed any more.

An interrupted save leaves objects that no ``.metadata`` lists; the next save of that name removes them. A test
interrupts a save before and after each operation (``tests/core/checkpoint/test_remote_directories.py``).
"""

from __future__ import annotations

import dataclasses
import errno
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

MARKER = ".metadata"
"""The object that is written last and read first; torch.distributed.checkpoint recognises a directory by it."""

EXTRA_FILE = "meta.pt"
"""The file with everything except tensors of the model or of an optimizer; the name is Lightning's."""

_OUR_NAMES = re.compile(r"\.metadata|meta(-[0-9a-f]{8})?\.pt|([0-9a-f]{8})?__\d+_\d+\.distcp")
"""Names of files in a directory that this package or another user of torch.distributed.checkpoint has written."""


def save_prefix(save_id: str) -> str:
    """Returns the beginning of the names of parts that belong to one save."""
    return save_id[:8]


def extra_name(metadata: Any) -> str:
    """Returns the name of the object that ``EXTRA_FILE`` is a copy of, in directories that this package wrote."""
    # Metadata of older versions of torch has no id.
    save_id = metadata.storage_meta.save_id if metadata.storage_meta is not None else None
    return f"meta-{save_prefix(save_id or '00000000')}.pt"


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
        # Torch requires fsspec, so it is installed. The import is paid only for URLs.
        from torch.distributed.checkpoint._fsspec_filesystem import FileSystem

        store = FileSystem()
        store.init_path(self.url)
        found: Any = store.fs
        found.invalidate_cache()
        return found

    def object(self, name: str) -> str:
        """Returns the URL of an object in it."""
        return f"{self.url}/{name}"

    def kind(self) -> str | None:
        """Returns "directory", or "file" if an object has that name; None if nothing exists.

        Raises:
            OSError: if the store does not answer, or rejects the credentials.
        """
        found = self._info(self.url)
        return None if found is None else str(found["type"])

    def size(self, name: str) -> int | None:
        """Returns the bytes of an object; None if it does not exist. Raises as :meth:`kind`."""
        found = self._info(self.object(name))
        return None if found is None or found["type"] != "file" else int(found["size"])

    def _info(self, url: str) -> Any:
        # Not by isfile() or exists(), which return False for a store that does not answer.
        try:
            return self.file_system().info(url)
        except FileNotFoundError:
            return None

    def sizes(self) -> dict[str, int]:
        """Returns the bytes of each object in it, by name. Listings of a store may be a while behind."""
        try:
            found = self.file_system().ls(self.url, detail=True)
        except FileNotFoundError:
            return {}
        return {entry["name"].rsplit("/", 1)[-1]: entry["size"] for entry in found if entry["type"] == "file"}

    def file_sizes(self) -> Callable[[str], int | None]:
        """Returns a function like :meth:`size` that needs one request for all objects in the listing."""
        listed = self.sizes()
        return lambda name: listed[name] if name in listed else self.size(name)

    def read(self, name: str) -> bytes | None:
        """Returns the content of an object; None if it does not exist."""
        try:
            content: bytes = self.file_system().cat_file(self.object(name))
        except FileNotFoundError:
            return None
        return content

    def put(self, name: str, content: bytes) -> None:
        """Writes an object atomically: readers see all of it, or the object that had its name before."""
        self.file_system().pipe_file(self.object(name), content)

    def copy(self, name: str, other: str) -> None:
        """Copies an object to another name."""
        self.file_system().cp_file(self.object(name), self.object(other))

    def metadata(self) -> Any:
        """Returns torch's metadata from ``.metadata``; None if no save is complete here."""
        content = self.read(MARKER)
        return None if content is None else pickle.loads(content)

    def prepare(self) -> None:
        """Makes the directory, on file systems that have directories.

        Raises:
            OSError: if something exists there that is no checkpoint, and must not be replaced.
        """
        if self.kind() == "file":
            raise FileExistsError(errno.EEXIST, "it is a file, which a directory cannot replace at once", self.url)
        there = self.sizes()
        if MARKER not in there and not all(_OUR_NAMES.fullmatch(name) for name in there):
            raise IsADirectoryError(errno.EISDIR, "it is a directory, and no checkpoint", self.url)
        self.file_system().makedirs(self.url, exist_ok=True)

    def tidy(self) -> None:
        """Removes leftovers of other saves than the complete one, and copies its file for other readers."""
        metadata, kept = self.metadata(), set[str]()
        if metadata is not None:
            original = extra_name(metadata)
            kept = {MARKER, EXTRA_FILE, original} | {place.relative_path for place in metadata.storage_data.values()}
            if self.size(EXTRA_FILE) is None and self.size(original) is not None:
                self.copy(original, EXTRA_FILE)
        self._remove([self.object(name) for name in self.sizes() if _OUR_NAMES.fullmatch(name) and name not in kept])

    def remove(self) -> None:
        """Removes all of it. If that is interrupted, the rest is no checkpoint."""
        if self.size(MARKER) is not None:
            self._remove([self.object(MARKER)])
        if self.kind() is not None:
            self._remove([self.url], recursive=True)

    def _remove(self, urls: list[str], *, recursive: bool = False) -> None:
        file_system = self.file_system()
        # Together, which takes one request for a thousand objects; unless the URL would be read as a pattern.
        if not set("*?[") & set(self.url):
            if urls:
                file_system.rm(urls, recursive=recursive)
            return
        for url in urls:
            for name in file_system.find(url) if recursive else [url]:
                file_system.rm_file(name)


Directory = Path | RemoteDirectory
"""The place of a directory."""


def directory_at(path: str | Path | RemoteDirectory) -> Directory:
    """Returns the place for a user's argument: a string with a URL is remote, anything else is a path."""
    if isinstance(path, str) and "://" in path:
        return RemoteDirectory(path.rstrip("/"))
    return path if isinstance(path, RemoteDirectory) else Path(path)
