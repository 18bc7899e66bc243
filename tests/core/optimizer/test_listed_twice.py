"""A parameter that is listed twice in a group: torch warns, and steps, clips and unscales it twice."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from torch.nn.utils import clip_grad_norm_

from megastrategy import GradScaler
from megastrategy.core.trials import equal
from tests.support.gradients import batch
from tests.support.optimizers import Lamb
from tests.support.programs import Trainee, assert_like_torch_ddp, run_program

pytestmark = pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate parameters")

MAKE = {
    "SGD": lambda params: torch.optim.SGD([*params, params[2], params[0]], lr=0.1, momentum=0.9),
    "AdamW": lambda params: torch.optim.AdamW([params[0], *params], lr=0.1),
    "foreach": lambda params: torch.optim.AdamW([*params, *params[:2]], lr=0.1, foreach=True),
    "fused": lambda params: torch.optim.AdamW([*params, *params[:2]], lr=0.1, fused=True),
    "every one": lambda params: torch.optim.Adam([*params, *params], lr=0.1),
    "two groups": lambda params: torch.optim.Adam([{"params": params[:2] * 3}, {"params": params[2:]}], lr=0.1),
    "whole": lambda params: Lamb([*params, params[0]], lr=0.01),
}


def train(trainee: Trainee) -> None:
    trainee.step(4)


def unscale_and_clip(trainee: Trainee) -> float:
    """By a factor that multiplies a gradient twice where torch's functions do."""
    scaler = GradScaler("cpu", init_scale=2.0) if trainee.is_ours else torch.amp.GradScaler("cpu", init_scale=2.0)
    params = [param for group in trainee.inner.param_groups for param in group["params"]]
    scaler.scale(trainee.model(batch(trainee.rank)).square().mean()).backward()
    scaler.unscale_(trainee.optimizer)
    clip = trainee.optimizer.clip_grad_norm_ if trainee.is_ours else functools.partial(clip_grad_norm_, params)
    norm: float = clip(0.01).item()
    scaler.step(trainee.optimizer)
    return norm


@pytest.mark.parametrize("sharded", [True, False])
def test_it_is_unscaled_and_clipped_as_often(sharded: bool) -> None:
    make: Any = MAKE["SGD"]
    options = {"bucket_size": 100, "use_distributed_optimizer": sharded}
    expected, ours = (run_program(unscale_and_clip, make, 2, given) for given in (None, options))
    for (norm, weights), (own_norm, own_weights) in zip(expected, ours, strict=True):
        assert own_norm == pytest.approx(norm, rel=1e-6)
        torch.testing.assert_close(own_weights, weights, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)
@pytest.mark.parametrize("sharded", [True, False])
@pytest.mark.parametrize("size", [2, 1])
def test_it_is_stepped_as_often_as_it_is_listed(make: Any, sharded: bool, size: int) -> None:
    assert_like_torch_ddp(train, make, size, sharded=sharded)


@pytest.mark.parametrize(
    "options", [{"overlap_param_gather": False}, {"grad_buffer": "pooled"}, {"offload_optimizer_states": True}]
)
def test_in_every_kind_of_step(options: dict[str, Any]) -> None:
    assert_like_torch_ddp(train, MAKE["AdamW"], **options)


def save_and_load(trainee: Trainee) -> dict[str, Any]:
    trainee.step(2)
    saved = copy.deepcopy(trainee.optimizer.state_dict())
    trainee.step(2)
    trainee.optimizer.load_state_dict(copy.deepcopy(saved))
    trainee.step(1)
    return saved


@pytest.mark.parametrize("name", ["SGD", "AdamW", "every one", "two groups"])
def test_its_state_is_saved_under_torchs_number(name: str) -> None:
    make: Any = MAKE[name]
    (theirs, weights), *_ = run_program(save_and_load, make, 2, None)
    (ours, own_weights), *_ = run_program(save_and_load, make, 2, {"bucket_size": 100})
    assert equal(ours, theirs)
    assert equal(own_weights, weights)
