"""Mixed precision and 16-bit weights in a Fabric loop, against the same loop under ``"ddp"``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.fabric.plugins.precision import MixedPrecision
from torch.nn import functional as F

from ..fabric_loops import CLIP_NORM, CLIP_VALUE, AwkwardNet, assert_like_ddp, both_modes, make_data, set_up
from ..fits import weights_of
from ..rank_processes import Ranks


def train_fp16(name: str, strategy_options: dict[str, Any], clip: dict[str, Any] | None) -> Any:
    """Step 2 overflows on rank 1 alone: no rank may step, and every scale halves once."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    precision = MixedPrecision("16-mixed", "cpu", scaler=scaler)
    trainee = set_up(name, strategy_options, plugins=precision)
    fabric, scales, weights = trainee.fabric, trainee.losses, []
    for number, (features, tokens, targets) in enumerate(make_data(fabric)):
        overflows = number == 2 and fabric.global_rank == 1
        loss = F.cross_entropy(trainee.model(features, tokens), targets)
        fabric.backward(loss * float("inf") if overflows else loss)
        if clip is not None:
            trainee.clip(error_if_nonfinite=False, **clip)
        trainee.step()
        scales.append(scaler.get_scale())
        weights.append(weights_of(trainee.net)["inputs.weight"])
    assert precision.scaler is scaler, "the user may hold it, and save it"
    assert scaler.state_dict() == fabric.strategy.precision.state_dict()
    assert torch.equal(weights[1], weights[2])
    assert not torch.equal(weights[2], weights[3])
    assert scales[2] == scales[1] / 2
    return trainee.end(), weights


@pytest.mark.sample(1)
@both_modes
@pytest.mark.parametrize("clip", [None, {"max_norm": CLIP_NORM}, {"clip_val": CLIP_VALUE}], ids=["no", "norm", "value"])
def test_fp16_skips_a_step_on_all_ranks(ranks: Ranks, options: dict[str, Any], clip: dict[str, Any] | None) -> None:
    by_shards = options["use_distributed_optimizer"] and clip is not None and "max_norm" in clip
    assert_like_ddp(ranks, train_fp16, options, clip=clip, rtol=1e-6 if by_shards else 0.0)


def check_and_scale(enabled: bool) -> None:
    """The scaler is Fabric's own, or one that the user switched off."""
    scaler, net = torch.amp.GradScaler("cpu", enabled=enabled), AwkwardNet()
    options = {"net": net, "plugins": MixedPrecision("16-mixed", "cpu", scaler=scaler)}
    if not enabled:
        set_up("megatron_ddp", {"check_for_nan_in_grad": True}, **options).train(1)
        return
    with pytest.raises(ValueError, match=r"check_for_nan_in_grad=True contradicts .* MixedPrecision.*bf16-mixed"):
        set_up("megatron_ddp", {"check_for_nan_in_grad": True}, **options)
    assert all(param._post_accumulate_grad_hooks is None for param in net.parameters()), "it was not wrapped"


@pytest.mark.parametrize("enabled", [True, False])
def test_a_scaler_contradicts_the_check_for_nan(ranks: Ranks, enabled: bool) -> None:
    """It meets infinite gradients on purpose."""
    ranks.run(check_and_scale, enabled)
