"""Optimizers of an Accelerate user: prepared in any order, on one rank, forgotten, and of what no model has."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megastrategy.core.errors import ReducedGradError

from ..accelerate_loops import (
    Trainee,
    Worlds,
    adamw,
    assert_like_ddp,
    both_modes,
    inputs,
    make_accelerator,
    net_of,
    set_up,
    sgd,
    state_of,
    weights_of,
)
from ..matrix import MODES

# --- optimizers ------------------------------------------------------------------------------------------------------


def schedule_free(params: Any) -> torch.optim.Optimizer:
    from tests.support.optimizers_with_methods import ScheduleFree

    return ScheduleFree(params, lr=0.05)


def train_schedule_free(name: str, mode: dict[str, Any]) -> list[dict[str, Tensor]]:
    """Weights in both modes; the optimizer begins in evaluation."""
    trainee, seen = set_up(name, mode, schedule_free), []
    for step in range(3):
        trainee.optimizer.train()
        seen.append(weights_of(trainee.net))
        trainee.train(step)
        trainee.optimizer.eval()
        seen.append(weights_of(trainee.net))
    return seen


@both_modes
def test_schedule_free_optimizers_have_the_modes_of_torch_ddp(worlds: Worlds, mode: dict[str, Any]) -> None:
    assert_like_ddp(worlds, train_schedule_free, mode)


# --- one optimizer of two models -------------------------------------------------------------------------------------


def one_optimizer_of_two_models(name: str, mode: dict[str, Any]) -> list[dict[str, Tensor]]:
    accelerator = make_accelerator(name, mode)
    nets = net_of(1), net_of(2)
    first, second, optimizer = accelerator.prepare(*nets, adamw([*nets[0].parameters(), *nets[1].parameters()]))
    accelerator.backward((first(inputs(accelerator)) - second(inputs(accelerator))).square().mean())
    accelerator.clip_grad_norm_(itertools.chain(first.parameters(), second.parameters()), 0.1)
    optimizer.step()
    return [weights_of(net) for net in nets]


def test_one_optimizer_of_two_models_without_sharding(worlds: Worlds) -> None:
    assert_like_ddp(worlds, one_optimizer_of_two_models, MODES["all-reduce"])


# --- parameters that no model has -------------------------------------------------------------------------------------


def train_strangers(name: str, mode: dict[str, Any], prepare: str) -> list[dict[str, Tensor]]:
    """As sentence-transformers does: the optimizer has the loss's parameters too, a head and a guide."""
    accelerator = make_accelerator(name, mode)
    net, head, guide = net_of(1), nn.Linear(3, 2), nn.Linear(2, 2)
    with torch.no_grad():
        for param in itertools.chain(head.parameters(), guide.parameters()):
            param.fill_(0.3)
    if prepare == "one optimizer":
        made = [adamw(itertools.chain(net.parameters(), head.parameters(), guide.parameters()))]
    else:
        made = [adamw(net.parameters()), adamw([*head.parameters(), *guide.parameters()])]
    model, *optimizers = accelerator.prepare(net, *made)
    told = name != "ddp" and accelerator.is_main_process
    warning = pytest.warns(UserWarning, match=r"2 param.* of this AdamW belong to no wrapped model")
    with warning if told else contextlib.nullcontext():
        for step in range(3):
            accelerator.backward(head(model(inputs(accelerator, step))).square().mean())
            accelerator.clip_grad_norm_(model.parameters(), 0.01)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    states = [state_of(accelerator, item) or {} for item in optimizers]
    return [weights_of(part) for part in (net, head, guide)] + states


@both_modes
@pytest.mark.parametrize("prepare", ["one optimizer", "two optimizers"])
def test_parameters_that_no_model_has_are_stepped_as_under_torch_ddp(
    worlds: Worlds, mode: dict[str, Any], prepare: str
) -> None:
    results = assert_like_ddp(worlds, train_strangers, mode, 1e-6, prepare)
    (_, head, guide, *_), (_, other_head, other_guide, *_) = results
    assert not torch.equal(head["weight"], other_head["weight"]), "its gradient is not reduced"
    assert torch.equal(guide["weight"], other_guide["weight"]), "it has none"


# --- forgotten -------------------------------------------------------------------------------------------------------


def forget_the_optimizer() -> str:
    accelerator = make_accelerator("megatron_ddp")
    net = net_of()
    model = accelerator.prepare(net)
    optimizer = sgd(net.parameters())
    accelerator.backward(model(inputs(accelerator)).square().mean())
    with pytest.raises(ReducedGradError) as caught:
        optimizer.step()
    return str(caught.value)


def test_an_optimizer_that_was_not_prepared_is_missed(worlds: Worlds) -> None:
    for message in worlds.run(forget_the_optimizer):
        assert "accelerator.prepare" in message
        assert "use_distributed_optimizer=False" in message


# --- options that are set after prepare ------------------------------------------------------------------------------


def weight_decay_is_set(trainee: Trainee, folder: str) -> None:
    trainee.optimizer.param_groups[0]["weight_decay"] = 0.1


def maximize_is_set(trainee: Trainee, folder: str) -> None:
    trainee.optimizer.param_groups[0]["maximize"] = True


def a_group_is_added(trainee: Trainee, folder: str) -> None:
    last = list(trainee.net.parameters())[-1]
    trainee.optimizer.add_param_group({"params": [last], "weight_decay": 0.2, "maximize": True})


def a_state_is_loaded(trainee: Trainee, folder: str) -> None:
    """One that was saved with other options."""
    [group] = trainee.optimizer.param_groups
    before, group["weight_decay"] = group["weight_decay"], 0.1
    trainee.accelerator.save_state(folder)
    trainee.accelerator.wait_for_everyone()
    trainee.optimizer.param_groups[0]["weight_decay"] = before
    trainee.accelerator.load_state(folder)


def train_with_options_set_later(
    name: str, mode: dict[str, Any], folder: str, set_later: Callable[[Trainee, str], None]
) -> dict[str, Tensor]:
    def all_but_the_last(params: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(list(params)[:-1], lr=0.01, weight_decay=0.0)

    trainee = set_up(name, mode, all_but_the_last, find_unused=False)
    trainee.train(0, 1)
    set_later(trainee, f"{folder}/{name}")
    return trainee.train(2, 3)


@pytest.mark.sample(1)
@both_modes
@pytest.mark.parametrize(
    "set_later",
    [weight_decay_is_set, maximize_is_set, a_group_is_added, a_state_is_loaded],
    ids=lambda f: f.__name__,
)
def test_options_may_change_after_prepare(
    worlds: Worlds, tmp_path: Any, mode: dict[str, Any], set_later: Callable[..., None]
) -> None:
    assert_like_ddp(worlds, train_with_options_set_later, mode, 0.0, str(tmp_path), set_later)
