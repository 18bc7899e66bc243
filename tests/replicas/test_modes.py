"""A replica leaves, and comes back with other weights, in every mode: both end with the same bits, and the training is
that of one process with the batches of those that took part."""

from __future__ import annotations

import pytest
import torch

from tests.support.replicas import (
    ALONE,
    END,
    TOGETHER,
    Case,
    assert_equal,
    end_one_after_the_other,
    leave_and_come_back,
    momentum,
    muon,
    run_in_replicas,
    train_plainly,
    two,
)

FP32_ACCUMULATION = (("grad_reduce_in_fp32", False), ("reduce_scatter_with_fp32_accumulation", True))
NOT_CONTIGUOUS = (
    ("use_distributed_optimizer", False),
    ("use_contiguous_buffers", False),
    ("overlap_grad_reduce", False),
)
CASES = {
    "default": Case(),
    "one-rank": Case(ranks=1),
    "all-reduce": Case(options=(("use_distributed_optimizer", False),)),
    "all-reduce-bf16": Case(momentum, (("use_distributed_optimizer", False),), torch.bfloat16),
    "overlap-gather": Case(options=(("overlap_param_gather", True),)),
    "not-contiguous": Case(momentum, NOT_CONTIGUOUS),
    "pooled": Case(options=(("grad_buffer", "pooled"),), microbatches=2),
    "bf16": Case(dtype=torch.bfloat16),
    "wire": Case(options=(("grad_wire_dtype", "bf16"),)),
    "fp32-accumulation": Case(options=FP32_ACCUMULATION, dtype=torch.bfloat16),
    "instances": Case(options=(("num_distributed_optimizer_instances", 2),)),
    "muon": Case(muon),
    "two-optimizers": Case(two),
    "scaler": Case(scales=True),
    "accumulate": Case(momentum, microbatches=3),
    "tokens": Case(momentum, counts_tokens=True, microbatches=2),
}
TOLERANCES = {"muon": 2e-3, "wire": 2e-2, "bf16": 5e-2, "fp32-accumulation": 5e-2, "all-reduce-bf16": 5e-2}


@pytest.mark.parametrize("name", CASES)
def test_returning_replica_continues_to_the_bit(name: str) -> None:
    case = CASES[name]
    first, second = run_in_replicas(leave_and_come_back, case.ranks, case, ALONE)
    for mine, other in zip(first, second, strict=True):
        assert (mine["steps"], other["steps"]) == (END, END)
        assert mine["healed in"] < 0
        assert ALONE <= other["healed in"] < END
        for key in ("weights", "states", "schedule", "scale"):
            assert_equal(mine[key], other[key], key)
    assert_equal(first[0]["buffers"], second[0]["buffers"])
    tolerance = TOLERANCES.get(name, 2e-5)
    for key, expected in train_plainly(case, second[0]["healed in"]).items():
        torch.testing.assert_close(first[0]["weights"][key], expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", ["one-rank", "scaler"])
def test_return_after_the_last_step_drops_its_batch(name: str) -> None:
    """Replica 0 has no batch more when the other one comes back, and waits for it in ``finish``."""
    case = CASES[name]
    first, second = run_in_replicas(leave_and_come_back, case.ranks, case, END)
    for mine, other in zip(first, second, strict=True):
        assert other.pop("healed in") == END - 1
        assert mine.pop("healed in") < 0
        assert_equal(mine, other)


def test_replica_with_more_batches_ends_with_the_other() -> None:
    case = CASES["scaler"]
    first, second = run_in_replicas(end_one_after_the_other, case.ranks, case)
    for mine, other in zip(first, second, strict=True):
        assert mine["steps"] == TOGETHER
        del mine["buffers"], other["buffers"]  # the forward of the dropped batch has changed them
        assert_equal(mine, other)
