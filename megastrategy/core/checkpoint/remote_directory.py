"""Directories in object stores and on other file systems that fsspec reaches: ``s3://...``, ``memory://...``.

[Note: complete without a rename]
A store puts one object at once, also in the place of another. It cannot rename several together, so nothing can be
made beside a checkpoint and moved there. Instead a directory is what its ``.metadata`` says, which is one object:

1. Every rank puts its part, under a name that belongs to this save alone (``a1b2c3d4__0_0.distcp``).
2. Rank 0 looks whether all parts are there, and puts ``meta-a1b2c3d4.pt``.
3. It removes ``meta.pt``, the copy under the name that other readers know: none may find it beside another's tensors.
4. It puts ``.metadata``, which names what was put before. Up to here the old checkpoint is the complete one, and from
   here on the new one.
5. It copies ``meta.pt`` anew, and removes what is of no use any more.

A save that is cut off leaves objects that no ``.metadata`` names; the next save of that name removes them. A test cuts
one off before and after each operation (``tests/core/checkpoint/test_remote_directories.py``).
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
"""The object that is put last, and read first; torch.distributed.checkpoint knows a directory by it."""

EXTRA_FILE = "meta.pt"
"""The file with all but tensors of the model or of an optimizer; the name is Lightning's."""

_OWN = re.compile(r"\.metadata|meta(-[0-9a-f]{8})?\.pt|([0-9a-f]{8})?__\d+_\d+\.distcp")
"""The names of everything that is in a directory, as this package or another user of that library writes it."""


def save_prefix(save_id: str) -> str:
    """Returns the beginning of the names of parts that belong to one save."""
    return save_id[:8]


def extra_name(metadata: Any) -> str:
    """Returns the name of the object that ``EXTRA_FILE`` is a copy of, if this package wrote the directory there."""
    # Torch's metadata had no id once.
    save_id = metadata.storage_meta.save_id if metadata.storage_meta is not None else None
    return f"meta-{save_prefix(save_id or '00000000')}.pt"


@dataclasses.dataclass(frozen=True)
class RemoteDirectory:
    """The place of a directory that is not on a local or mounted file system.

    How the store is reached (address, credentials) is a matter of fsspec's configuration: each rank asks for itself.

    Attributes:
        url: with a protocol that fsspec knows, without a slash at the end.
    """

    url: str

    def __str__(self) -> str:
        return self.url

    def file_system(self) -> Any:
        """Returns fsspec's file system, without what it remembers of earlier listings: other ranks and other jobs have
        written since.

        Raises:
            ValueError: if fsspec knows no such protocol.
            ImportError: if it lacks the package for it.
        """
        # Torch requires fsspec, so it is installed; only users of URLs pay for the import.
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
        """Returns what is there: "directory", or "file" for an object of that very name; None for nothing.

        Raises:
            OSError: if the store does not say, for want of credentials or of an answer.
        """
        found = self._info(self.url)
        return None if found is None else str(found["type"])

    def size(self, name: str) -> int | None:
        """Returns the bytes of an object; None if it is not there. Raises as :meth:`kind`."""
        found = self._info(self.object(name))
        return None if found is None or found["type"] != "file" else int(found["size"])

    def _info(self, url: str) -> Any:
        # Not by isfile() or exists(), to which no answer is the same as no.
        try:
            return self.file_system().info(url)
        except FileNotFoundError:
            return None

    def sizes(self) -> dict[str, int]:
        """Returns the bytes of each object in it, by name; empty if there is none.

        A store may list an object a while after it was put, or was removed.
        """
        try:
            found = self.file_system().ls(self.url, detail=True)
        except FileNotFoundError:
            return {}
        return {entry["name"].rsplit("/", 1)[-1]: entry["size"] for entry in found if entry["type"] == "file"}

    def size_of(self) -> Callable[[str], int | None]:
        """Returns what tells an object's bytes, None if it is not there; with one request for all that is listed."""
        listed = self.sizes()
        return lambda name: listed[name] if name in listed else self.size(name)

    def read(self, name: str) -> bytes | None:
        """Returns the content of an object; None if it is not there."""
        try:
            content: bytes = self.file_system().cat_file(self.object(name))
        except FileNotFoundError:
            return None
        return content

    def put(self, name: str, content: bytes) -> None:
        """Puts an object at once: it is there as a whole, or what had its name before is."""
        self.file_system().pipe_file(self.object(name), content)

    def copy(self, name: str, other: str) -> None:
        """Puts an object under another name, too."""
        self.file_system().cp_file(self.object(name), self.object(other))

    def metadata(self) -> Any:
        """Returns what torch has saved in ``.metadata``; None if no save is complete here."""
        content = self.read(MARKER)
        return None if content is None else pickle.loads(content)

    def prepare(self) -> None:
        """Makes the directory, on file systems that have such a thing.

        Raises:
            OSError: if there is something that is no checkpoint: what a user has there is not ours to replace.
        """
        if self.kind() == "file":
            raise FileExistsError(errno.EEXIST, "it is a file, which a directory cannot replace at once", self.url)
        there = self.sizes()
        if MARKER not in there and not all(_OWN.fullmatch(name) for name in there):
            raise IsADirectoryError(errno.EISDIR, "it is a directory, and no checkpoint", self.url)
        self.file_system().makedirs(self.url, exist_ok=True)

    def tidy(self) -> None:
        """Removes what saves have left that the complete one does not need, and copies its file for other readers."""
        metadata, kept = self.metadata(), set[str]()
        if metadata is not None:
            original = extra_name(metadata)
            kept = {MARKER, EXTRA_FILE, original} | {place.relative_path for place in metadata.storage_data.values()}
            if self.size(EXTRA_FILE) is None and self.size(original) is not None:
                self.copy(original, EXTRA_FILE)
        self._remove([self.object(name) for name in self.sizes() if _OWN.fullmatch(name) and name not in kept])

    def remove(self) -> None:
        """Removes all of it. If that is cut off, what is left is no checkpoint."""
        if self.size(MARKER) is not None:
            self._remove([self.object(MARKER)])
        if self.kind() is not None:
            self._remove([self.url], recursive=True)

    def _remove(self, urls: list[str], *, recursive: bool = False) -> None:
        file_system = self.file_system()
        # Together, which is a request for a thousand objects; unless a name would be taken for a pattern.
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
    """Returns the place for what a user gives: of text, a URL is remote, and all else a path."""
    if isinstance(path, str) and "://" in path:
        return RemoteDirectory(path.rstrip("/"))
    return path if isinstance(path, RemoteDirectory) else Path(path)
