"""The commit that is measured."""

from __future__ import annotations

import subprocess
from pathlib import Path


def current_commit() -> str:
    """Returns the commit, with a + if files differ from it; or "unknown" where there is no repository."""
    root = Path(__file__).parent

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(root), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()

    try:
        return git("rev-parse", "--short=12", "HEAD") + ("+" if git("status", "--porcelain") else "")
    except (OSError, subprocess.SubprocessError):
        return "unknown"
