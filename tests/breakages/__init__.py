"""Faults put into the engine and its doors on purpose, one at a time, to see which tests turn red.

``python -m tests.breakages`` says what came of each; docs/breakages.md is what it wrote.
"""
