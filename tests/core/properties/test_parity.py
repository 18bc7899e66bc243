"""Training equals torch DDP with the same optimizer: to the bit on two ranks, within 1e-6 on more.

All switches of the configuration, each with each, are in ``test_every_pair_of_switches``.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megastrategy import DistributedDataParallelConfig
from tests.support.training import Run, assert_close, assert_same_bits, train_with_ddp, train_with_ours

OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "sgd_momentum": ("SGD", {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01}),
    "sgd_nesterov": ("SGD", {"lr": 0.05, "momentum": 0.9, "nesterov": True}),
    "adam": ("Adam", {"lr": 0.01, "weight_decay": 0.1}),
    "adam_foreach": ("Adam", {"lr": 0.01, "foreach": True}),
    "adam_amsgrad": ("Adam", {"lr": 0.01, "amsgrad": True}),
    "adamw": ("AdamW", {"lr": 0.01}),
    "adamw_amsgrad": ("AdamW", {"lr": 0.01, "amsgrad": True}),
    "adamw_fused": ("AdamW", {"lr": 0.01, "fused": True}),
    "nadam": ("NAdam", {"lr": 0.01}),
    "radam": ("RAdam", {"lr": 0.01}),
    "adagrad": ("Adagrad", {"lr": 0.01}),
    "rmsprop": ("RMSprop", {"lr": 0.01, "momentum": 0.9, "centered": True}),
    "adadelta": ("Adadelta", {"lr": 0.5}),
    "adamax": ("Adamax", {"lr": 0.01}),
    "rprop": ("Rprop", {"lr": 0.01}),
    "asgd": ("ASGD", {"lr": 0.01}),
}
FEW = ("sgd_momentum", "adam_foreach", "adamw_amsgrad", "radam", "rmsprop", "rprop")
ONE_PARAM, SOME, ALL = 1, 200, 10**9


def make_run(name: str, **changes: Any) -> Run:
    kind, options = OPTIMIZERS[name]
    return Run(optimizer=kind, options=tuple(options.items()), **changes)


@pytest.mark.parametrize(
    "name", [name if name in FEW else pytest.param(name, marks=pytest.mark.nightly) for name in OPTIMIZERS]
)
def test_every_optimizer_to_the_bit_on_two_ranks(name: str) -> None:
    """Sharded, where the optimizer steps pieces; with all-reduce it steps what torch DDP would give it."""
    run = make_run(name, groups=3, accumulate=3)
    config = DistributedDataParallelConfig(bucket_size=SOME)
    assert_same_bits(train_with_ours(run, 2, config), train_with_ddp(run, 2))


@pytest.mark.parametrize(
    ("bucket_size", "overlap", "sharded"),
    [(ONE_PARAM, True, True), (SOME, False, True), (ALL, True, True), (SOME, True, False), (ALL, False, False)],
)
def test_every_config_to_the_bit_on_two_ranks(bucket_size: int, overlap: bool, sharded: bool) -> None:
    config = DistributedDataParallelConfig(
        bucket_size=bucket_size, overlap_grad_reduce=overlap, use_distributed_optimizer=sharded
    )
    for accumulate in (1, 3):
        run = make_run("adamw", accumulate=accumulate, groups=3)
        assert_same_bits(train_with_ours(run, 2, config), train_with_ddp(run, 2))


WAYS = [{}, {"use_distributed_optimizer": False}, {"grad_buffer": "pooled"}]


@pytest.mark.parametrize(("size", "way"), [(1, {}), (3, {"use_distributed_optimizer": False})], ids=str)
def test_other_numbers_of_ranks(size: int, way: dict[str, Any]) -> None:
    config = DistributedDataParallelConfig(bucket_size=SOME, **way)
    for name in ("sgd_momentum", "adamw"):
        # Adam divides by the root of squared gradients: where those are rounding errors, so is the step; eps damps it.
        run = (
            make_run(name, accumulate=3)
            if name != "adamw"
            else Run(options=(("lr", 0.01), ("eps", 1e-4)), accumulate=3)
        )
        if size == 1:
            assert_same_bits(train_with_ours(run, 1, config), train_with_ddp(run, 1))
        else:
            assert_close(train_with_ours(run, size, config), train_with_ddp(run, size), 1e-6)


@pytest.mark.parametrize(
    ("size", "way"), [(2, {}), (3, {"use_distributed_optimizer": False}), (2, {"grad_buffer": "pooled"})], ids=str
)
def test_clipping_by_norm(size: int, way: dict[str, Any]) -> None:
    """Norms within 1e-6 of torch's and the same bits on all ranks; weights as close as that lets them be."""
    run = make_run("sgd_momentum", clip_norm=0.05, groups=3)
    config = DistributedDataParallelConfig(bucket_size=SOME, **way)
    ours, reference = train_with_ours(run, size, config), train_with_ddp(run, size)
    assert_close(ours, reference, 1e-6)
    for mine, theirs in zip(ours, reference, strict=True):
        torch.testing.assert_close(torch.stack(mine.norms), torch.stack(theirs.norms), rtol=1e-6, atol=0)
        assert [norm.item() for norm in mine.norms] == [norm.item() for norm in ours[0].norms]
        assert all(norm > 0.05 for norm in mine.norms[:3]), "the test clips"


def test_float64() -> None:
    run = make_run("adamw", dtype=torch.float64)
    for way in WAYS:
        config = DistributedDataParallelConfig(bucket_size=SOME, **way)
        assert_same_bits(train_with_ours(run, 2, config), train_with_ddp(run, 2))
