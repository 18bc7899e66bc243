"""An optimizer that knows its parameters as objects is refused: other tensors are stepped in their place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter

from megastrategy import DistributedDataParallel, DistributedOptimizer
from megastrategy.core.errors import OptimizerNotShardableError
from megastrategy.core.judge import GroupClasses, NotClassifiedError, check_main_param_steps
from megastrategy.core.judge.classification import classify
from tests.support.models import two_layers
from tests.support.optimizers import DistanceInGroup, InBlocks, KeepsOwn, Lamb, LookAhead, NeedsClosure, Simple
from tests.support.ranks import run_ranks

CPU = torch.device("cpu")


class Scaled(Simple):
    """Steps each parameter at a rate of its own, which it finds by the parameter."""

    def update(self, param: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        param.sub_(grad, alpha=group["lr"] * self.scale_of(param, group))

    def scale_of(self, param: Tensor, group: dict[str, Any]) -> float:
        return 1.0


class ById(Scaled):
    def __init__(self, params: Any, *slow: Parameter) -> None:
        super().__init__(params)
        self.slow = {id(param) for param in slow}

    def scale_of(self, param: Tensor, group: dict[str, Any]) -> float:
        return 0.1 if id(param) in self.slow else 1.0


class ByKey(Scaled):
    def __init__(self, params: Any, *slow: Parameter) -> None:
        super().__init__(params, scales=dict.fromkeys(slow, 0.1))

    def scale_of(self, param: Tensor, group: dict[str, Any]) -> float:
        return float(group["scales"].get(param, 1.0))


class ByAttribute(Scaled):
    def __init__(self, params: Any, *slow: Parameter) -> None:
        super().__init__(params)
        for param in slow:
            param.scale = 0.1  # type: ignore[attr-defined]

    def scale_of(self, param: Tensor, group: dict[str, Any]) -> float:
        return float(getattr(param, "scale", 1.0))


class Manager:
    """Notes exceptions by module, in the pattern of bitsandbytes' ``GlobalOptimManager``."""

    def __init__(self) -> None:
        self.exceptions: list[tuple[nn.Module, str, float]] = []


class ByModule(Scaled):
    def __init__(self, params: Any, *slow: Parameter) -> None:
        super().__init__(params)
        self.manager = Manager()
        for param in slow:
            module = nn.Module()
            module.weight = param
            self.manager.exceptions.append((module, "weight", 0.1))

    def scale_of(self, param: Tensor, group: dict[str, Any]) -> float:
        return min(
            (scale for module, name, scale in self.manager.exceptions if getattr(module, name) is param), default=1
        )


KNOWN = pytest.mark.parametrize("kind", [ById, ByKey, ByAttribute, ByModule])


@KNOWN
def test_it_is_refused_at_wrap_with_the_way_out(kind: Callable[..., Any]) -> None:
    def run(rank: int, group: Any) -> None:
        module = two_layers()
        model = DistributedDataParallel(module, process_group=group)
        slow = next(module.parameters())
        with pytest.raises(OptimizerNotShardableError, match="stepped in their place") as caught:
            DistributedOptimizer(kind(module.parameters(), slow), model)
        assert "use_distributed_optimizer=False" in str(caught.value)
        assert ("'scale'" in str(caught.value)) == (kind is ByAttribute)
        model.close()

    run_ranks(2, run)


@KNOWN
def test_one_that_knows_none_of_them_passes(kind: Callable[..., Any]) -> None:
    params, another = [Parameter(torch.ones(3)), Parameter(torch.ones(4, 4))], Parameter(torch.ones(2))
    for param in params:
        param._is_initialized = True  # type: ignore[attr-defined]  # as transformers does, and no optimizer asks for it
    optimizer = kind(params, another)
    optimizer.kept = list(params)  # for a zero_grad of its own
    (one,) = classify(optimizer, CPU, torch.float32)
    assert one.way == "flat", one


def test_optimizer_holding_another_is_refused() -> None:
    params = [Parameter(torch.ones(4, 4))]
    params[0].grad = torch.ones(4, 4)
    optimizer = LookAhead(torch.optim.SGD(params, lr=0.1))
    (one,) = classify(optimizer, CPU, torch.float32)
    with pytest.raises(NotClassifiedError) as refused:
        check_main_param_steps(optimizer)
    for reason in (one.reason, str(refused.value)):
        assert "another optimizer, in its attribute 'base'" in reason
        assert "Use that SGD itself" in reason
    assert bool((params[0] == 1).all())


class Delegates(torch.optim.Optimizer):
    """Has no groups of its own, as some wrappers have: they are a property that cannot be set."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        self.base = base
        self.defaults = base.defaults

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.base.param_groups

    @property
    def state(self) -> Any:
        return self.base.state

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self.base.step()


def test_optimizer_with_groups_of_another_is_refused() -> None:
    base = torch.optim.SGD([Parameter(torch.ones(4, 4))], lr=0.1)
    with pytest.raises(NotClassifiedError, match=r"another optimizer, in its attribute 'base'.*Use that SGD itself"):
        GroupClasses(Delegates(base), CPU, torch.float32, "auto")


@pytest.mark.parametrize("kind", [InBlocks, Lamb, DistanceInGroup, KeepsOwn])
def test_main_params_take_optimizers_that_couple(kind: Any) -> None:
    check_main_param_steps(kind([Parameter(torch.ones(4, 4))]))


def test_main_params_refuse_what_needs_a_closure() -> None:
    with pytest.raises(NotClassifiedError, match="closure would read the 16-bit weights"):
        check_main_param_steps(NeedsClosure([Parameter(torch.ones(4, 4))]))
