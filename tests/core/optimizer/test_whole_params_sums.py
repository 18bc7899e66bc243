"""Whole parameters on three and four ranks, where torch DDP adds gradients in another order.

Muon rounds what it orthogonalises to bf16, and Shampoo takes roots of near-singular factors: either makes thousands of
the last bit of a sum. So equality is shown where that bit does not matter, in fp64, and where it is the same, against
plain torch that adds in the same order.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megastrategy import DistributedDataParallelConfig
from tests.support.training import assert_close, train_with_ddp, train_with_ours
from tests.support.whole_params import SOME, WholeRun


@pytest.mark.parametrize(
    ("kind", "size", "run", "options"),
    [
        ("muon", 1, {}, {}),
        ("muon_and_adamw", 1, {}, {}),
        ("adafactor", 3, {"accumulate": 3}, {"grad_buffer": "pooled"}),
    ],
    ids=str,
)
def test_equal_to_torch_ddp_in_fp64(kind: str, size: int, run: dict[str, Any], options: dict[str, Any]) -> None:
    """Clipped too. More ranks than there are matrices, too."""
    made = WholeRun(kind=kind, dtype=torch.float64, **run)
    ours = train_with_ours(made, size, DistributedDataParallelConfig(bucket_size=SOME, **options))
    reference = train_with_ddp(made, size)
    assert_close(ours, reference, 1e-10)
    for mine, theirs in zip(ours, reference, strict=True):
        torch.testing.assert_close(mine.norms, theirs.norms, rtol=1e-12, atol=0)
