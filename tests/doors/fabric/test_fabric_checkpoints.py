"""``fabric.save`` and ``fabric.load``: the files that "ddp" writes, and training goes on from them under either."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from megastrategy.fabric import MAIN_PARAMS_KEY
from tests.doors.lightning.test_lightning_checkpoints import amsgrad_in_groups, assert_same_value, load
from tests.support.comparison import assert_equal

from ..fabric_loops import (
    AwkwardNet,
    Loop,
    adamw,
    both_modes,
    make_data,
    make_fabric,
    set_up,
    sgd,
    state_of,
    step_with,
)
from ..fits import weights_of
from ..matrix import ALL_REDUCE, REDUCE_SCATTER
from ..rank_processes import Ranks

SAVED_AFTER = 3


def train_from(
    name: str,
    strategy_options: dict[str, Any],
    *,
    make_optimizer: Any = adamw,
    load: str | None = None,
    save: str | None = None,
    **fabric_options: Any,
) -> Loop:
    """An epoch, saved in the middle, or loaded and finished from there."""
    net = AwkwardNet(seed=None if load is None else 100)
    trainee = set_up(name, strategy_options, make_optimizer, net=net, **fabric_options)
    fabric, model, optimizer = trainee.fabric, trainee.model, trainee.optimizer
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "batches": 0, "note": "fresh"}
    if load is not None:
        remainder = fabric.load(load, state)
        assert remainder == {"extra": [1, 2]}
        assert (state["batches"], state["note"]) == (SAVED_AFTER, "saved")
    for number, (features, tokens, targets) in enumerate(make_data(fabric)):
        if number < state["batches"]:
            continue
        loss = F.cross_entropy(model(features.to(net.scale.dtype), tokens, number % 2 == 1), targets)
        fabric.backward(loss)
        trainee.step()
        trainee.losses.append(loss.item())
        if save is not None and number + 1 == SAVED_AFTER:
            fabric.save(save, {**state, "batches": number + 1, "note": "saved", "extra": [1, 2]})
    return trainee.end()


def assert_resumed(resumed: list[Loop], whole: list[Loop]) -> None:
    """To the bit: in the losses after the checkpoint, the weights and the state."""
    for mine, other in zip(resumed, whole, strict=True):
        assert mine.losses == other.losses[SAVED_AFTER:]
        assert_equal((mine.weights, mine.state), (other.weights, other.state))


@pytest.mark.parametrize(
    ("options", "make_optimizer"), [(REDUCE_SCATTER, adamw), (ALL_REDUCE, sgd), (REDUCE_SCATTER, amsgrad_in_groups)]
)
def test_files_are_ddps_and_resume_under_either(
    ranks: Ranks, options: dict[str, Any], make_optimizer: Any, tmp_path: Path
) -> None:
    """Saved under one strategy and loaded under the other, training ends in the bits of a run that never stopped."""
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    whole = ranks.run(train_from, "megatron_ddp", options, make_optimizer=make_optimizer, save=str(ours))
    reference = ranks.run(train_from, "ddp", {}, make_optimizer=make_optimizer, save=str(theirs))
    assert_equal(whole, reference)
    assert_same_value(load(ours), load(theirs), "checkpoint")
    for name, path in [("megatron_ddp", ours), ("megatron_ddp", theirs), ("ddp", ours)]:
        resumed = ranks.run(
            train_from, name, options if name != "ddp" else {}, make_optimizer=make_optimizer, load=str(path)
        )
        assert_resumed(resumed, reference)


@both_modes
def test_bf16_run_resumes_to_the_bit(ranks: Ranks, options: dict[str, Any], tmp_path: Path) -> None:
    """The file holds the fp32 main params beside the weights, under a key that load() takes for itself."""
    path = tmp_path / "checkpoint"
    whole = ranks.run(train_from, "megatron_ddp", options, precision="bf16-true", save=str(path))
    saved = load(path)
    assert saved["model"]["scale"].dtype == torch.bfloat16
    main = saved[MAIN_PARAMS_KEY]["optimizer"]
    trained = [key for key, param in AwkwardNet().named_parameters() if param.requires_grad]
    assert sorted(main) == sorted(trained)
    for key, value in main.items():
        assert_same_value(value.to(torch.bfloat16), saved["model"][key], key)
    assert not torch.equal(main["inputs.weight"], saved["model"]["inputs.weight"].float())
    resumed = ranks.run(train_from, "megatron_ddp", options, precision="bf16-true", load=str(path))
    assert_resumed(resumed, whole)


def save_and_load_in_many_ways(name: str, strategy_options: dict[str, Any], folder: str) -> Any:
    """Filters, the raw objects, strictness, single state dicts, a file without state, a compiled model."""
    fabric = make_fabric(name, strategy_options)
    net = AwkwardNet()
    own = sgd(net.parameters())
    model, optimizer = fabric.setup(net, own)
    step_with(fabric, model, optimizer, batches=1)

    filtered = f"{folder}/filtered"
    fabric.save(filtered, {"model": model, "optimizer": optimizer}, filter={"model": weights_only})
    raw = f"{folder}/raw"
    state: dict[str, Any] = {"model": net, "optimizer": own, "step": 3}
    fabric.save(raw, state)
    weights = dict(torch.load(raw, weights_only=True)["model"])  # rank 0's: BatchNorm's buffers differ by rank
    trained_state = state_of(fabric, optimizer)
    seen = [fabric.load(filtered), fabric.load(raw)]

    fresh = AwkwardNet(seed=5)
    fresh_own = sgd(fresh.parameters())
    fresh_model, fresh_optimizer = fabric.setup(torch.compile(fresh, backend="eager"), fresh_own)
    with pytest.raises(KeyError, match="'missing'"):
        fabric.load(raw, {"model": fresh_model, "missing": 1})
    asked: dict[str, Any] = {"model": fresh_model, "optimizer": fresh_own, "step": 0, "missing": 1}
    assert fabric.load(raw, asked, strict=False) == {}
    assert asked == {"model": fresh_model, "optimizer": fresh_own, "step": 3, "missing": 1}
    assert_equal(weights_of(fresh), weights)
    assert_equal(state_of(fabric, fresh_optimizer), trained_state)

    if fabric.is_global_zero:
        torch.save(weights, f"{folder}/weights")
        torch.save(sorted_state(seen[1])["optimizer"], f"{folder}/state")
    fabric.barrier()
    step_with(fabric, fresh_model, fresh_optimizer, batches=1)
    fabric.load_raw(f"{folder}/weights", fresh_model)
    fabric.load_raw(f"{folder}/state", fresh_optimizer)
    assert_equal(weights_of(fresh), weights)
    assert_equal(state_of(fabric, fresh_optimizer), trained_state)
    step_with(fabric, fresh_model, fresh_optimizer, batches=1)
    fabric.load_raw(f"{folder}/state", fresh_own)
    assert_equal(state_of(fabric, fresh_optimizer), trained_state)
    fresh_model.load_state_dict(model.state_dict())
    step_with(fabric, fresh_model, fresh_optimizer, batches=1)
    step_with(fabric, model, optimizer, batches=1)
    assert_equal(weights_of(fresh), weights_of(net))
    return [sorted_state(value) for value in seen], weights, weights_of(fresh)


def weights_only(key: str, value: Tensor) -> bool:
    return key.endswith("weight")


def sorted_state(checkpoint: dict[str, Any]) -> dict[str, Any]:
    optimizer = checkpoint["optimizer"]
    return {**checkpoint, "optimizer": {**optimizer, "state": dict(sorted(optimizer["state"].items()))}}


def test_many_ways_save_and_load(ranks: Ranks, tmp_path: Path) -> None:
    """The user's own module and optimizer may stand for Fabric's wrappers, as they may under "ddp"."""
    results = []
    for name, strategy_options in [("megatron_ddp", REDUCE_SCATTER), ("ddp", {})]:
        (tmp_path / name).mkdir()
        results.append(ranks.run(save_and_load_in_many_ways, name, strategy_options, str(tmp_path / name)))
    assert_equal(results[0], results[1])
    filtered = results[0][0][0][0]["model"]
    assert filtered
    assert all(key.endswith("weight") for key in filtered)
