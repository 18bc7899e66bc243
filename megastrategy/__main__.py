"""The command ``megastrategy``, as ``python -m megastrategy`` for a clone that is not installed."""

from .tools.cli import main

if __name__ == "__main__":
    main()
