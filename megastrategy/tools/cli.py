"""The entry point of the ``megastrategy`` command, which names missing dependencies."""

from __future__ import annotations

import sys


def main() -> None:
    """The console script."""
    try:
        from .commands import root
    except ModuleNotFoundError as error:
        if error.name != "click":
            raise
        sys.exit("megastrategy: the command needs click: pip install 'megastrategy[cli]'")
    root()
