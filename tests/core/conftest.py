from __future__ import annotations

import pytest

from tests.support.known_findings import share_findings


@pytest.fixture(autouse=True)
def optimizers_are_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    share_findings(monkeypatch)
