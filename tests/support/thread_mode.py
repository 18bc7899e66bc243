"""A dispatch mode that several ranks, which are threads, may be in at a time."""

from benchmarks.gpu_check.counts import ThreadMode

__all__ = ["ThreadMode"]
