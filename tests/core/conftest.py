from __future__ import annotations

import pytest

from megastrategy.core.buffers import contiguous_buffers
from tests.support.known_findings import share_findings


@pytest.fixture(autouse=True)
def both_ways_into_a_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models of tests are small: of their parameters too some are copied into their bucket, and some added to zeros."""
    monkeypatch.setattr(contiguous_buffers, "FILLED_NUMEL", 64)


@pytest.fixture(autouse=True)
def optimizers_are_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    share_findings(monkeypatch)
