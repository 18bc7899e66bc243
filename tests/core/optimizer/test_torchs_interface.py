"""Every attribute of ``torch.optim.Optimizer``, at the class and at an object of it, acts on the user's optimizer.

A new one of a later torch makes the first test red: decide what it does, and write it into the table.
"""

from __future__ import annotations

import collections
import copy
import functools
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import ProcessGroup

from megastrategy import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from megastrategy.core.errors import DirectUseError
from tests.support.models import two_layers
from tests.support.programs import Trainee, assert_like_torch_ddp
from tests.support.ranks import run_ranks

OF_OBJECTS = {
    "_optimizer_load_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_step_post_hooks",
    "_optimizer_step_pre_hooks",
    "_warned_capturable_if_run_uncaptured",
    "_zero_grad_profile_name",
}
"""Attributes of every object, which are the user's optimizer's."""


def test_attributes_of_the_object_are_the_users() -> None:
    class Scaled(torch.optim.SGD):
        def __init__(self, params: Any) -> None:
            super().__init__(params, lr=0.1)
            self.scale = 1.0

    def run(rank: int, group: ProcessGroup) -> None:
        module = two_layers()
        model = DistributedDataParallel(module, DistributedDataParallelConfig(), group)
        inner = Scaled(module.parameters())
        optimizer: Any = DistributedOptimizer(inner, model)
        for name in OF_OBJECTS:
            assert getattr(optimizer, name) is getattr(inner, name)
        optimizer._warned_capturable_if_run_uncaptured = False
        optimizer.scale = 0.5
        optimizer.defaults = {"lr": 0.2}
        optimizer._patch_step_function()
        assert (inner._warned_capturable_if_run_uncaptured, inner.scale, inner.defaults) == (False, 0.5, {"lr": 0.2})
        assert not {"scale", "_zero_grad_profile_name"} & vars(optimizer).keys()
        assert not hasattr(DistributedOptimizer.step, "hooked"), "each hook would be called twice a step"

    run_ranks(2, run)


# --- against torch DDP -----------------------------------------------------------------------------------------------


def train(trainee: Trainee) -> None:
    trainee.step(3)


def forget(trainee: Trainee) -> None:
    trainee.step(2)
    trainee.optimizer.state = collections.defaultdict(dict)
    trainee.step(2)


def assign_its_own_state(trainee: Trainee) -> None:
    trainee.step(2)
    trainee.optimizer.state = trainee.optimizer.state
    trainee.step(2)


def change_attributes(trainee: Trainee) -> None:
    trainee.optimizer.defaults = {**trainee.optimizer.defaults, "lr": 0.3}
    last = trainee.optimizer.param_groups[0]["params"].pop()
    trainee.optimizer.add_param_group({"params": [last]})
    trainee.step(2)


def hook(trainee: Trainee) -> list[Any]:
    """The hooks of torch's documentation, registered before the wrap or after it."""
    optimizer, calls = trainee.optimizer, list[Any]()

    def after_save(opt: Any, saved: dict[str, Any]) -> dict[str, Any]:
        calls.append(("saved", len(saved["param_groups"][0]["params"])))
        return {**saved, "note": trainee.rank}

    def before_load(opt: Any, saved: dict[str, Any]) -> dict[str, Any]:
        # The state is the whole one: names of a file of another version may be translated.
        calls.append(("load", sorted(saved["state"]), saved["state"][0]["exp_avg"].shape, saved.pop("note")))
        saved["param_groups"] = [{**group, "lr": 0.5} for group in saved["param_groups"]]
        return saved

    handles = [
        optimizer.register_state_dict_pre_hook(lambda opt: calls.append("save")),
        optimizer.register_state_dict_post_hook(after_save),
        optimizer.register_load_state_dict_pre_hook(before_load),
        optimizer.register_load_state_dict_post_hook(lambda opt: calls.append(opt.param_groups[0]["lr"])),
        optimizer.register_step_pre_hook(lambda opt, args, kwargs: calls.append("step")),
        optimizer.register_step_post_hook(lambda opt, args, kwargs: calls.append("stepped")),
    ]
    trainee.step(2)
    saved = copy.deepcopy(optimizer.state_dict())
    assert set(saved) == {"state", "param_groups", "note"}
    trainee.step(1)
    optimizer.load_state_dict(saved)
    trainee.step(1)
    for handle in handles:
        handle.remove()
    optimizer.load_state_dict(optimizer.state_dict())
    trainee.step(1)
    return calls


def rmsprop(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Its ``__setstate__`` looks at the state of each parameter."""
    return torch.optim.RMSprop(params, lr=0.01, momentum=0.5)


def adam(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.1)


@pytest.mark.parametrize(
    ("program", "sharded", "make", "size"),
    [
        (train, True, adam, 2),
        (assign_its_own_state, True, adam, 2),
        (change_attributes, True, adam, 2),
        (hook, True, adam, 2),
        (forget, False, rmsprop, 1),
    ],
)
def test_its_methods_do_what_they_do_under_torch_ddp(program: Any, sharded: bool, make: Any, size: int) -> None:
    if program is hook and make is rmsprop:
        make = functools.partial(torch.optim.Adam, lr=0.1)
    assert_like_torch_ddp(program, make, size, sharded=sharded)


def test_state_of_a_sharded_parameter_is_not_set() -> None:
    def run(rank: int, group: ProcessGroup) -> None:
        module = two_layers()
        model = DistributedDataParallel(module, DistributedDataParallelConfig(), group)
        optimizer = DistributedOptimizer(torch.optim.AdamW(module.parameters()), model)
        state = {param: {"step": torch.zeros(())} for param in module.parameters()}
        with pytest.raises(DirectUseError, match=r"the state of parameter '.*' was looked up"):
            optimizer.state = state
        with pytest.raises(DirectUseError, match=r"call load_state_dict\(\) on all ranks"):
            optimizer.__setstate__({"state": state})
        assert not optimizer.state

    run_ranks(2, run)
