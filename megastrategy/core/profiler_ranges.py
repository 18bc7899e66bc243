"""Gives what torch.profiler records names of ours."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch


def profiler_range(what: str, number: int | None = None) -> AbstractContextManager[object]:
    """A range ``megastrategy::reduce 3`` around a block, where the calling thread is being profiled; else nothing."""
    if not torch._C._autograd._profiler_enabled():  # a tenth of a microsecond, where a range takes ten
        return nullcontext()
    name = what if number is None else f"{what} {number}"
    return torch.profiler.record_function(f"megastrategy::{name}")
