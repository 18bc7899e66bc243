"""The entry point of the ``megastrategy`` command, which names missing dependencies."""

from __future__ import annotations

import sys


def main() -> None:
    """The console script."""
    try:
        from .commands import root
    except ModuleNotFoundError as error:
        if error.name not in ("click", "rich"):
            raise
        sys.exit(f"megastrategy: the command needs {error.name}: pip install 'megastrategy[cli]'")
    root()
