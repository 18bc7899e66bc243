"""Checkpoints on disk, for the doors: files, what they are checked for, and directories."""
