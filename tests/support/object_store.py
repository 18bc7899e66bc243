"""An object store that all processes of this machine share, and that fails on request: ``objects:///folder``.

It is a file system of fsspec with the semantics of S3. An object is put as a whole when its writer closes it, and in
the place of another; nothing is renamed; there are no directories, but names with slashes; a process remembers what it
has listed until its cache is cleared. The objects are in a folder of the disk, by their names.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any, Literal, NoReturn
from urllib.parse import quote, unquote

import fsspec
from fsspec.spec import AbstractBufferedFile

PROTOCOL = "objects"


Kind = Literal["once", "dead", "answer lost"]


@dataclasses.dataclass
class Faults:
    """The failures of this process, which counts what changes something: puts, copies and removals.

    Attributes:
        kind: "once": one operation does nothing and raises. "dead": so do all after it, reading too, as if the process
            had ended. "answer lost": one does what it shall, and raises.
        at: which operation; None for none.
        done: the operations so far, as (what, name of the object).
        raised: whether there was a failure.
    """

    kind: Kind = "once"
    at: int | None = None
    done: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    raised: bool = False

    def begin(self, kind: Kind, at: int) -> None:
        self.kind, self.at, self.done, self.raised = kind, at, [], False

    def end(self) -> None:
        self.at = None

    def fail(self, what: str) -> NoReturn:
        self.raised = True
        raise StoreError(f"{what}: {self.kind}")

    def check_alive(self) -> None:
        if self.kind == "dead" and self.at is not None and len(self.done) >= self.at:
            self.fail("reading")

    def change(self, what: str, path: str, action: Callable[[], object]) -> None:
        number = len(self.done)
        self.done.append((what, path.rsplit("/", 1)[-1]))
        fails = self.at is not None and (number == self.at or (number > self.at and self.kind == "dead"))
        if not fails or self.kind == "answer lost":
            action()
        if fails:
            self.fail(f"{what} of {path}")


FAULTS = Faults()


class StoreError(OSError):
    """Raised where a fault was asked for."""


class ObjectStore(fsspec.AbstractFileSystem):
    """See the module."""

    protocol = PROTOCOL
    root_marker = "/"
    requests = 0
    """How often this process has asked for bytes of an object."""

    # --- what changes something --------------------------------------------------------------------------------------

    def put_object(self, path: str, content: bytes) -> None:
        FAULTS.change("put", path, lambda: _write(path, content))

    def cp_file(self, path1: str, path2: str, **kwargs: Any) -> None:
        target = self._strip_protocol(path2)
        content = self._read(self._strip_protocol(path1))
        FAULTS.change("copy", target, lambda: _write(target, content))

    def _rm(self, path: str) -> None:
        path = self._strip_protocol(path)
        if self.info(path)["type"] == "directory":  # there are none
            return
        FAULTS.change("remove", path, _place(path).unlink)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """There are none."""

    # --- what reads --------------------------------------------------------------------------------------------------

    def _read(self, path: str, start: int | None = None, end: int | None = None) -> bytes:
        FAULTS.check_alive()
        type(self).requests += 1
        try:
            with _place(path).open("rb") as file:
                file.seek(start or 0)
                return file.read() if end is None else file.read(end - (start or 0))
        except (IsADirectoryError, NotADirectoryError) as error:
            raise FileNotFoundError(path) from error

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any) -> bytes:
        return self._read(self._strip_protocol(path), start, end)

    def invalidate_cache(self, path: str | None = None) -> None:
        self.dircache.clear()

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> list[Any]:
        FAULTS.check_alive()
        path = self._strip_protocol(path)
        if path not in self.dircache:
            self.dircache[path] = _listing(path)
        found = self.dircache[path]
        if not found:
            raise FileNotFoundError(path)
        return found if detail else [entry["name"] for entry in found]

    def info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        FAULTS.check_alive()
        path = self._strip_protocol(path)
        if _place(path).is_file():
            return {"name": path, "size": _place(path).stat().st_size, "type": "file"}
        entries = self.ls(path)
        return entries[0] if entries[0]["name"] == path else {"name": path, "size": 0, "type": "directory"}

    def _open(self, path: str, mode: str = "rb", block_size: Any = None, **options: Any) -> Any:
        if mode == "wb":
            return _Upload(self, path, bool(options.get("autocommit", True)))
        return _Download(self, path, mode, block_size or "default", **options)


class _Upload(BytesIO):
    """Is put when it is closed, also by an error, as fsspec's files are; in a transaction when that is complete."""

    def __init__(self, store: ObjectStore, path: str, autocommit: bool) -> None:
        super().__init__()
        self._store, self._path, self._autocommit = store, path, autocommit
        self._content = b""

    def close(self) -> None:
        if not self.closed:
            self._content = self.getvalue()
            super().close()
            if self._autocommit:
                self.commit()

    def commit(self) -> None:
        self._store.put_object(self._path, self._content)

    def discard(self) -> None:
        """Nothing was put."""


class _Download(AbstractBufferedFile):
    def _fetch_range(self, start: int, end: int) -> bytes:
        return self.fs._read(self.path, start, end)


def _place(path: str) -> Path:
    """The file for an object. A folder that is called like an object would keep it from being there."""
    return Path(path).with_name(f"{quote(Path(path).name)}.object")


def _write(path: str, content: bytes) -> None:
    target = _place(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f"{os.getpid()}.part of a put")
    part.write_bytes(content)
    part.replace(target)


def _listing(path: str) -> list[dict[str, Any]]:
    if _place(path).is_file():
        return [{"name": path, "size": _place(path).stat().st_size, "type": "file"}]
    found = []
    for child in sorted(Path(path).iterdir()) if Path(path).is_dir() else ():
        if child.name.endswith(".object"):
            name = unquote(child.name.removesuffix(".object"))
            found.append({"name": f"{path}/{name}", "size": child.stat().st_size, "type": "file"})
        elif child.is_dir() and next(child.rglob("*.object"), None) is not None:
            found.append({"name": f"{path}/{child.name}", "size": 0, "type": "directory"})
    return found


def objects_in(url: str) -> set[str]:
    """The names of the objects below a URL, whatever this process remembers."""
    file_system, path = fsspec.url_to_fs(url)
    file_system.invalidate_cache()
    return {name.rsplit("/", 1)[-1] for name in file_system.find(path)}


def copy_to_disk(url: str, folder: Path) -> None:
    """As ``aws s3 sync`` does."""
    folder.mkdir()
    source = Path(url.removeprefix(f"{PROTOCOL}://"))
    for path in source.glob("*.object"):
        shutil.copy(path, folder / unquote(path.name.removesuffix(".object")))


fsspec.register_implementation(PROTOCOL, ObjectStore, clobber=True)
