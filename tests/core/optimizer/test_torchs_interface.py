"""The attributes of ``torch.optim.Optimizer`` act on the user's optimizer, and state of shards is not looked up by
parameter."""

from __future__ import annotations

import collections
import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import ProcessGroup

from megastrategy import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from megastrategy.core.errors import DirectUseError
from tests.core.data_path.test_reduced_grad import Net, loss_of
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


# --- state: looking up a Parameter raises, iterating over all of it does not ------------------------------------------


class Shrinks(torch.optim.SGD):
    @torch.no_grad()
    def shrink(self) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if "momentum_buffer" in self.state[param]:
                    self.state[param]["momentum_buffer"].mul_(0.5)


def forget_state(state: Any, param: Any) -> None:
    del state[param]


LOOK_UPS: dict[str, Callable[[Any, Any], object]] = {
    "in": lambda optimizer, param: param in optimizer.state,
    "[]": lambda optimizer, param: optimizer.state[param],
    "get": lambda optimizer, param: optimizer.state.get(param),
    "del": lambda optimizer, param: forget_state(optimizer.state, param),
    "a method called as a function of the class": lambda optimizer, param: Shrinks.shrink(optimizer),
}


def started(rank: int, group: ProcessGroup, **options: Any) -> tuple[Net, Any]:
    net = Net()
    net.idle.requires_grad_(False)
    model = DistributedDataParallel(net, DistributedDataParallelConfig(bucket_size=40, **options), group)
    optimizer = DistributedOptimizer(Shrinks(net.parameters(), lr=0.1, momentum=0.9), model)
    loss_of(model, rank, 0).backward()
    optimizer.step()
    return net, optimizer


@pytest.mark.parametrize("look_up", LOOK_UPS.values(), ids=LOOK_UPS)
def test_state_lookup_by_param_is_refused(look_up: Callable[[Any, Any], object]) -> None:
    def run(rank: int, group: ProcessGroup) -> None:
        net, optimizer = started(rank, group)
        with pytest.raises(DirectUseError, match=r"(?s)'first\.weight'.*state_dict\(\).*optimizer=False") as error:
            look_up(optimizer, net.first.weight)
        assert len(str(error.value)) <= 400

    run_ranks(2, run)


def test_whole_state_is_shown() -> None:
    def run(rank: int, group: ProcessGroup) -> None:
        net, optimizer = started(rank, group)
        state = optimizer.state
        assert net.idle.weight not in state
        assert state.get(net.idle.weight) is None
        assert state.pop("nothing", 3) == 3
        assert len(state) == len(list(state)) == len(optimizer.optimizer.state) > 0
        assert all(values["momentum_buffer"].any() for values in state.values())
        for values in state.values():
            values["momentum_buffer"].zero_()
        saved = optimizer.state_dict()["state"]
        assert rank or not any(values["momentum_buffer"].any() for values in saved.values())
        state["a note"] = 1
        assert optimizer.optimizer.state["a note"] == 1
        state.clear()
        assert not optimizer.optimizer.state

    run_ranks(2, run)


def test_state_truth_is_the_same_on_all_ranks() -> None:
    """torch's checkpoint helpers step an optimizer whose state is false, and a step is collective."""

    def run(rank: int, group: ProcessGroup) -> int:
        def started() -> tuple[Any, Any]:
            model = DistributedDataParallel(nn.Linear(1, 1, bias=False), process_group=group)
            return model, DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model)

        model, optimizer = started()
        assert not optimizer.state
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()
        assert optimizer.state
        _, loaded = started()
        loaded.load_state_dict(optimizer.state_dict())
        assert loaded.state
        return len(optimizer.state)

    assert run_ranks(2, run) == [1, 0], "the second rank steps nothing"


def test_with_an_all_reduce_it_is_the_optimizers_own() -> None:
    def run(rank: int, group: ProcessGroup) -> None:
        net, optimizer = started(rank, group, use_distributed_optimizer=False)
        assert isinstance(optimizer.state, collections.defaultdict)
        Shrinks.shrink(optimizer)
        assert "momentum_buffer" in optimizer.state[net.first.weight]

    run_ranks(2, run)
