"""Two nodes of torchrun end, whatever happens to one of them. In the long tier.

``python -m campaigns.many_machines`` says how long it takes, and takes under "ddp"."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from .__main__ import FAILURES, until_all_end

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1800)]


@pytest.mark.parametrize("failure", FAILURES)
def test_no_worker_is_left(tmp_path: Path, failure: str) -> None:
    assert until_all_end("megatron_ddp", FAILURES[failure], tmp_path) < math.inf
