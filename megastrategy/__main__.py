"""The command ``megastrategy``, as ``python -m megastrategy`` for a clone that is not installed."""

from .tools.commands import root

if __name__ == "__main__":
    root()
