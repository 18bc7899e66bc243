"""The oldest versions that the doors were tested with, and the error for older ones.

A door asks here before it imports its package, so that an old one is refused by name and version, and not by the first
name that it lacks. The minima are in pyproject.toml too, and a test compares them: pip reads only those,
and only when it is asked for the extra.
"""

from __future__ import annotations

import importlib.metadata
import re
import sys

LIGHTNING = "2.6"
"""Holds for all four packages. 2.5.6 neither trains nor resumes: its ``load_checkpoint`` takes no ``weights_only``."""

ACCELERATE = "1.15"

RAY = "2.60"

_DISTRIBUTIONS = {
    "lightning": ("lightning",),
    "pytorch_lightning": ("pytorch-lightning",),
    "lightning_fabric": ("lightning-fabric", "pytorch-lightning"),  # the second may bring the package without the first
    "accelerate": ("accelerate",),
    "ray": ("ray[train]",),
}


def require(package: str, minimum: str) -> None:
    """
    Raises:
        ImportError: if the package is installed in a version before ``minimum``. An unknown version passes.
    """
    top = package.partition(".")[0]
    found = _version(top)
    if found is not None and _release(found) < _release(minimum):
        distribution = _DISTRIBUTIONS[top][-1]
        raise ImportError(
            f"{package} {found} is installed, and megastrategy needs {minimum} or later: "
            f"pip install '{distribution}>={minimum}'",
            name=package,
        )


def _version(top: str) -> str | None:
    """Returns the version of the imported module, or else pip's, since importing an old package may fail."""
    if (version := getattr(sys.modules.get(top), "__version__", None)) is not None:
        return str(version)
    for name in _DISTRIBUTIONS[top]:
        try:
            return importlib.metadata.version(name.partition("[")[0])
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def _release(version: str) -> tuple[int, ...]:
    """Returns the numbers that a version begins with. Those of "2.6.0.dev1" are 2.6.0's: a development version passes
    as that."""
    numbers = re.match(r"[\d.]*", version.strip())
    assert numbers is not None, "it matches the empty text, too"
    return tuple(int(number) for number in numbers[0].split(".") if number)
