"""Copies and averages of what ``Fabric.setup`` returns, in mid-training."""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.wrappers import is_wrapped

from tests.support.comparison import assert_equal

from ..fabric_loops import assert_like_ddp, both_modes, set_up, sgd, step_with
from ..fits import weights_of
from ..rank_processes import Ranks


def copies(name: str, strategy_options: dict[str, Any], folder: str) -> Any:
    """An average of the weights made from the module in mid-training, a pickled copy, and unwrapping."""
    trainee = set_up(name, strategy_options)
    net, model = trainee.net, trainee.model
    assert is_wrapped(model)
    assert is_wrapped(trainee.optimizer)
    assert not is_wrapped(net)
    assert isinstance(trainee.optimizer, torch.optim.SGD)
    average = torch.optim.swa_utils.AveragedModel(model.module)
    for _ in range(3):
        trainee.train(1)
        average.update_parameters(model)
    copied, pickled = copy.deepcopy(net), pickle.loads(pickle.dumps(net))
    trainee.train(1)
    path = Path(folder) / f"{name}{trainee.fabric.global_rank}.pt"
    torch.save(net.inputs.weight, path)
    return weights_of(average), weights_of(copied), weights_of(pickled), weights_of(net), path.stat().st_size


@both_modes
def test_copies_are_made_in_mid_training(ranks: Ranks, options: dict[str, Any], tmp_path: Path) -> None:
    """Copies own their memory, and a saved parameter does not bring its buffer."""
    ours = ranks.run(copies, "megatron_ddp", options, folder=str(tmp_path))
    theirs = ranks.run(copies, "ddp", {}, folder=str(tmp_path))
    for mine, other in zip(ours, theirs, strict=True):
        assert_equal(mine[:-1], other[:-1])
        assert mine[-1] == pytest.approx(other[-1], abs=64), "the file's name stands in the file"


def average_of_the_wrapper(name: str, strategy_options: dict[str, Any], use_buffers: bool) -> Any:
    """A moving average made from what fabric.setup returned, and evaluated, while training goes on."""
    trainee = set_up(name, strategy_options)
    average = torch.optim.swa_utils.AveragedModel(
        trainee.model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.7), use_buffers=use_buffers
    )
    outputs = []
    for _ in range(3):
        trainee.train(1)
        average.update_parameters(trainee.model)
        with torch.no_grad():
            outputs.append(average.eval()(torch.ones(2, 5), torch.tensor([0, 1])))
    # torch DDP's copy is one that communicates: its forward overwrites rank 1's BatchNorm statistics by rank 0's
    of_rank_0 = (outputs, weights_of(average)) if trainee.fabric.is_global_zero else None
    return trainee.losses, [param.detach() for param in average.parameters()], weights_of(trainee.net), of_rank_0


@both_modes
@pytest.mark.parametrize("use_buffers", [False, True])
def test_an_average_of_what_setup_returns(ranks: Ranks, options: dict[str, Any], use_buffers: bool) -> None:
    assert_like_ddp(ranks, average_of_the_wrapper, options, use_buffers=use_buffers)


def copies_of_the_wrapper(name: str, strategy_options: dict[str, Any]) -> Any:
    """The result of fabric.setup is copied, pickled and saved whole; the copies are evaluated and trained further."""
    trainee = set_up(name, strategy_options)
    fabric, model = trainee.fabric, trainee.model
    trainee.train(3)
    saved = io.BytesIO()
    torch.save(model, saved)
    saved.seek(0)
    twins = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(saved, weights_only=False)]
    trainee.train(3)
    results = [weights_of(trainee.net), *map(weights_of, twins)]
    for twin in twins:
        assert is_wrapped(twin)
        with torch.no_grad():
            outputs = twin.eval()(torch.ones(2, 5), torch.tensor([0, 1]))
        results.append(outputs if fabric.is_global_zero else None)  # see average_of_the_wrapper
        again, own = fabric.setup(twin.module.train(), sgd(twin.module.parameters()))
        results += [step_with(fabric, again, own), weights_of(again)]
    return results


@pytest.mark.sample(1)
@both_modes
def test_what_setup_returns_may_be_copied(ranks: Ranks, options: dict[str, Any]) -> None:
    assert_like_ddp(ranks, copies_of_the_wrapper, options)
