"""Faults put into the engine and its doors on purpose, one at a time, to see which tests turn red.

They are in catalogue.txt. ``python -m tests.breakages`` says which test failed for each, and writes
docs/project/breakages.md.
"""
