"""For tests that run other projects' files, which are fetched when the test runs and kept nowhere."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest


def checked_out(folder: Path, url: str, commit: str, part: str) -> Path:
    """The files under ``part`` of a public repository, at one commit; skips the test where git cannot get them.

    Git's own settings hold: with ``url.PATH.insteadOf`` in them a copy on this machine will do.
    """
    folder.mkdir(parents=True)
    # Without the filter all of the commit's files would come, of which the examples are a hundredth.
    for arguments in (
        ["init"],
        ["remote", "add", "origin", url],
        ["sparse-checkout", "set", part],
        ["fetch", "--depth", "1", "--filter=blob:none", "origin", commit],
        ["-c", "advice.detachedHead=false", "checkout", "FETCH_HEAD"],
    ):
        environment = os.environ | {"GIT_TERMINAL_PROMPT": "0"}
        done = subprocess.run(["git", *arguments], cwd=folder, env=environment, capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"{url} at {commit[:10]} cannot be had here: {done.stderr.strip().splitlines()[-1]}")
    return folder
