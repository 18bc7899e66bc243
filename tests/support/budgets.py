"""Counts of what an accelerator would pay for, on the host, while core works as it would there."""

import pytest

from benchmarks.gpu_check.counts import HostReads, Operations
from megastrategy.core import devices

__all__ = ["HostReads", "Operations", "work_as_on_an_accelerator"]


def work_as_on_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes core arrange its work as on an accelerator from now on, with tensors of the host: see
    [Note: work on the host and on an accelerator] in ``core.devices``."""
    monkeypatch.setattr(devices, "is_on_host", lambda device: False)
