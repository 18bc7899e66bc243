"""A job under ``Fabric(strategy=...)`` and the same job under ``"ddp"``: same results, with both settings."""

from __future__ import annotations

from typing import Any

import pytest

from ..support.comparison import assert_equal
from .matrix import MODES
from .rank_processes import Ranks

CLIP_NORM = 0.5
CLIP_VALUE = 0.02

both_modes = pytest.mark.parametrize("options", MODES.values(), ids=MODES)


def assert_like_ddp(ranks: Ranks, job: Any, options: dict[str, Any], *, rtol: float = 0.0, **arguments: Any) -> None:
    """``job`` gives the same on every rank under both strategies."""
    ours = ranks.run(job, "megatron_ddp", options, **arguments)
    theirs = ranks.run(job, "ddp", {}, **arguments)
    for mine, other in zip(ours, theirs, strict=True):
        assert_equal(mine, other, rtol)
