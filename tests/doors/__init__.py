"""Tests of the doors. Lightning reads the entry points of all installed packages in every Trainer and Fabric, which is
a third of a short fit: here they are read once, before rank processes are forked."""

import importlib.metadata

importlib.metadata.entry_points = importlib.metadata.entry_points().select
