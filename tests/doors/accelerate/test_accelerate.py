"""Ordinary loops under our ``Accelerator``, compared with those under accelerate's own and torch DDP."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from tests.support.comparison import assert_equal

from ..accelerate_loops import Run, Worlds, adamw, both_modes, groups, sgd, train, weights_of
from ..fits import AwkwardNet, loader
from ..matrix import MODES

LOOPS: dict[str, dict[str, Any]] = {
    "together": {},
    "apart, sgd": {"prepare": "apart", "make_optimizer": sgd},
    "optimizer first, groups": {"prepare": "reversed", "make_optimizer": groups},
    "zeroed through the model": {"zero": "model"},
    "accumulated, the last window is short": {"gradient_accumulation_steps": 3},
    "autocast": {"mixed_precision": "bf16"},
    "clipped by value": {"clip": ("value", 0.01)},
    "batches split": {"split_batches": True},
}


@pytest.mark.sample(3)
@both_modes
@pytest.mark.parametrize("options", LOOPS.values(), ids=LOOPS)
def test_a_loop_ends_in_the_bits_of_torch_ddp(worlds: Worlds, mode: dict[str, Any], options: dict[str, Any]) -> None:
    expected = worlds.run(train, "ddp", **options)
    assert expected[0].losses != expected[1].losses, "each rank has its own samples"
    assert_equal(worlds.run(train, "megatron_ddp", mode, **options), expected)


@both_modes
@pytest.mark.parametrize("norm", [0.05, 1e3])
def test_clipping_by_norm(worlds: Worlds, mode: dict[str, Any], norm: float) -> None:
    """Summed by shards: within 1e-6, the same bits on both ranks, and to the bit where nothing is clipped."""
    # not Adam: the bias before BatchNorm has a gradient of zero except for rounding, which Adam would make steps of
    options: dict[str, Any] = {"clip": ("norm", norm), "gradient_accumulation_steps": 2, "make_optimizer": sgd}
    expected = worlds.run(train, "ddp", **options)
    assert min(expected[0].norms) > 0.05
    ours = worlds.run(train, "megatron_ddp", mode, **options)
    assert ours[0].norms == ours[1].norms
    assert_equal(ours, expected, rtol=1e-6 if mode["use_distributed_optimizer"] else 0.0)
    if norm == 1e3:
        assert_equal([run.weights for run in ours], [run.weights for run in expected])


@pytest.mark.sample(1)
@both_modes
@pytest.mark.parametrize("clip", [None, ("norm", 0.05)])
def test_a_step_with_an_infinite_gradient_on_one_rank_is_skipped_by_both(
    worlds: Worlds, mode: dict[str, Any], clip: Any
) -> None:
    """fp16's scaler: the scale falls on both ranks, the scheduler waits, and later steps are those of torch DDP."""
    options: dict[str, Any] = {"scale": 1024.0, "inf_on": (1, 3), "clip": clip, "make_optimizer": sgd}
    expected = worlds.run(train, "ddp", **options)
    assert [run.skipped for run in expected] == [[3], [3]]
    rtol = 1e-6 if clip and mode["use_distributed_optimizer"] else 0.0
    assert_equal(worlds.run(train, "megatron_ddp", mode, **options), expected, rtol=rtol)


def train_16_bit_by_hand(epochs: int) -> Run:
    """The obvious way: bf16 weights for forward and backward, an fp32 copy of each for the optimizer."""
    net = AwkwardNet().bfloat16()
    weights = [param for param in net.parameters() if param.requires_grad]
    mains = [param.detach().float() for param in weights]
    optimizer = adamw(mains)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4, gamma=0.5)
    run = Run({})
    batches = [batch for _ in range(epochs) for batch in loader()]
    for number, (features, tokens, targets) in enumerate(batches):
        loss = F.cross_entropy(net(features.bfloat16(), tokens, number % 2 == 1).float(), targets)
        loss.backward()
        for param, main in zip(weights, mains, strict=True):
            main.grad = None if param.grad is None else param.grad.float()
            param.grad = None
        optimizer.step()
        scheduler.step()
        for param, main in zip(weights, mains, strict=True):
            param.data.copy_(main)
        run.losses.append(loss.item())
        run.rates.append(optimizer.param_groups[0]["lr"])
    run.weights = weights_of(net)
    return run


def test_16_bit_weights_have_fp32_main_params_in_one_process_too(worlds: Worlds) -> None:
    options: dict[str, Any] = {"dtype": torch.bfloat16, "size": 1}
    (expected,), (ours,) = worlds.run(train_16_bit_by_hand, 2, size=1), worlds.run(train, "megatron_ddp", **options)
    ours.state = None
    assert_equal(ours, expected)
    (plain,) = worlds.run(train, "ddp", **options)
    assert plain.losses != expected.losses


def test_16_bit_weights_of_two_ranks_stay_equal(worlds: Worlds) -> None:
    sharded, whole = (worlds.run(train, "megatron_ddp", mode, dtype=torch.bfloat16) for mode in MODES.values())
    assert_equal(sharded, whole)
    buffers = ("norm.running_mean", "norm.running_var")
    first, second = ({k: v for k, v in run.weights.items() if k not in buffers} for run in sharded)
    assert_equal(first, second)


def test_one_process_trains_as_without_us(worlds: Worlds) -> None:
    options: dict[str, Any] = {"gradient_accumulation_steps": 3, "clip": ("norm", 0.05)}
    expected = worlds.run(train, "ddp", size=1, **options)
    assert_equal(worlds.run(train, "megatron_ddp", size=1, **options), expected)
