"""Tests of the doors. Lightning reads the entry points of all installed packages in every Trainer and Fabric, which is
a third of a short fit: here each process reads them once."""

import functools
import importlib.metadata

importlib.metadata.entry_points = functools.cache(importlib.metadata.entry_points)
