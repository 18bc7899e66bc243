"""One memory of optimizers' trials for all models of a process, as Trainer and Fabric keep one for theirs.

A model of the engine's own tries its optimizer anew, for 10 ms of a processor on each rank: a tenth of all work of
``tests/core``. What a trial finds, and what may be remembered of it, is tested in ``tests/core/trials``.
"""

from __future__ import annotations

import threading

import pytest
import torch

from megastrategy.core import KnownFindings
from megastrategy.core.data_path import engine
from megastrategy.core.trials.elementwise import Findings


class SharedFindings(KnownFindings):
    """Ranks that are threads ask one after the other: the second finds what the first has found."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.RLock()

    def probe(self, optimizer: torch.optim.Optimizer, device: torch.device, dtype: torch.dtype) -> Findings:
        with self._lock:
            return super().probe(optimizer, device, dtype)


_FINDINGS = SharedFindings()


def share_findings(monkeypatch: pytest.MonkeyPatch) -> None:
    """All models that are wrapped from now on have one memory."""
    monkeypatch.setattr(engine, "KnownFindings", lambda: _FINDINGS)
