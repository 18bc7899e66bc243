"""``python -m campaigns.kills.s3 FOLDER``: what the tests of object stores do, against moto's S3 by way of s3fs.

Saves are cut off at each of their operations, and ranks are killed at random moments, as they are there.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.distributed.checkpoint._fsspec_filesystem import FileSystem

from tests.core.checkpoint.test_remote_directories import cut_off_at_each_operation, save_near_and_far
from tests.support.object_store import FAULTS, Kind
from tests.support.ports import free_port
from tests.support.processes import run_processes

from .runs import with_s3
from .test_kills import train_under_fire

ENDPOINT = "FSSPEC_S3_ENDPOINT_URL"

KINDS: tuple[Kind, ...] = ("once", "dead", "answer lost")


class Faulty:
    """A file system of fsspec whose puts and removals fail as :data:`FAULTS` says."""

    def __init__(self, file_system: Any) -> None:
        self._file_system = file_system

    def __getattr__(self, name: str) -> Any:
        FAULTS.check_alive()
        return getattr(self._file_system, name)

    def pipe_file(self, path: str, content: bytes) -> None:
        FAULTS.change("put", path, lambda: self._file_system.pipe_file(path, content))

    def rm_file(self, path: str) -> None:
        FAULTS.change("remove", path, lambda: self._file_system.rm_file(path))

    def rm(self, paths: list[str], recursive: bool) -> None:
        FAULTS.change("remove", paths[0], lambda: self._file_system.rm(paths, recursive))

    def open(self, path: str, mode: str, **options: Any) -> Any:
        FAULTS.check_alive()
        file = self._file_system.open(path, mode, **options)
        if mode == "wb":
            close = file.close

            def put() -> None:
                if not file.closed:
                    FAULTS.change("put", path, close)

            file.close = put
        return file


def cut_off(url: str, kind: Kind, rank: int) -> list[str]:
    """On each rank, of :func:`cut_off_at_each_operation`."""
    init_path = FileSystem.init_path

    def init_faulty(self: FileSystem, path: str, **options: Any) -> Any:
        found = init_path(self, path, **options)
        self.fs = Faulty(self.fs)
        return found

    with mock.patch.object(FileSystem, "init_path", init_faulty):
        return cut_off_at_each_operation(url, kind, rank)


def main(folder: Path) -> None:
    import s3fs
    from moto.server import ThreadedMotoServer

    address, port = os.environ[ENDPOINT].removeprefix("http://").split(":")
    server = ThreadedMotoServer(ip_address=address, port=int(port), verbose=False)
    server.start()
    s3fs.S3FileSystem().mkdir("bucket")
    run_processes(3, save_near_and_far, folder, "s3://bucket/run/last.ckpt", torch.float32)
    for kind in KINDS:
        outcomes, _ = run_processes(2, cut_off, f"s3://bucket/{kind}/last.ckpt", kind, 0)
        assert outcomes == ["failed"] * 3 + ["complete"], (kind, outcomes)
    train_under_fire(with_s3, folder, seed=6, count=6)
    server.stop()


def environment() -> dict[str, str]:
    """The environment of a process that reaches the server, and of its children; fsspec reads it at import."""
    credentials = {"AWS_ACCESS_KEY_ID": "anyone", "AWS_SECRET_ACCESS_KEY": "anything"}
    return {ENDPOINT: f"http://127.0.0.1:{free_port()}", "AWS_DEFAULT_REGION": "us-east-1", **credentials}


if __name__ == "__main__":
    if ENDPOINT in os.environ:
        torch.set_num_threads(1)
        main(Path(sys.argv[1]))
    else:
        os.execve(sys.executable, [sys.executable, "-m", __spec__.name, *sys.argv[1:]], os.environ | environment())
