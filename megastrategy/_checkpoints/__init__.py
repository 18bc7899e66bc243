"""Checkpoints on disk, for the doors: files, their checks, and directories."""
