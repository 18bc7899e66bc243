"""``python -m benchmarks``."""

from __future__ import annotations

import sys


def main() -> None:
    """Runs the command, or says what to install for it."""
    try:
        from .cli import benchmark
    except ModuleNotFoundError as error:
        if error.name not in ("click", "matplotlib", "megastrategy", "rich", "torch"):
            raise
        sys.exit(f"benchmarks: {error.name} is missing: pip install -e . --group bench")
    benchmark(prog_name="python -m benchmarks")


if __name__ == "__main__":
    main()
