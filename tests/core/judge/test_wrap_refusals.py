"""An optimizer that knows its parameters as objects is refused: other tensors are stepped in their place."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from megastrategy import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from megastrategy.core.errors import OptimizerNotShardableError
from megastrategy.core.judge import GroupClasses, NotClassifiedError, check_main_param_steps
from megastrategy.core.judge.classification import classify
from tests.support.gradients import batch
from tests.support.models import two_layers
from tests.support.optimizers import DistanceInGroup, InBlocks, LookAhead, NeedsClosure, Simple
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


@pytest.mark.parametrize("kind", [InBlocks, DistanceInGroup])
def test_main_params_take_optimizers_that_couple(kind: Any) -> None:
    check_main_param_steps(kind([Parameter(torch.ones(4, 4))]))


def test_main_params_refuse_what_needs_a_closure() -> None:
    with pytest.raises(NotClassifiedError, match="closure would read the 16-bit weights"):
        check_main_param_steps(NeedsClosure([Parameter(torch.ones(4, 4))]))


# Optimizers whose ``step()`` does more than step: it counts, draws or communicates.

# --- communication ---------------------------------------------------------------------------------------------------

Communicate = Callable[[ProcessGroup, Tensor], Any]


def send_and_receive(group: ProcessGroup, tensor: Tensor) -> None:
    if group.rank() == 0:
        group.send([tensor], 1, 0).wait()
    else:
        group.recv([tensor], 0, 0).wait()


COMMUNICATE: dict[str, Communicate] = {
    "allreduce": lambda group, tensor: group.allreduce([tensor]).wait(),
    "broadcast": lambda group, tensor: group.broadcast([tensor]).wait(),
    "send|recv": send_and_receive,
}


class Communicates(torch.optim.SGD):
    """Communicates in each step; it catches errors where ``catches``."""

    def __init__(self, params: Any, group: ProcessGroup, communicate: Communicate, catches: bool = False) -> None:
        super().__init__(params, lr=0.1)
        self.talk = lambda tensor: communicate(group, tensor)
        self.catches = catches

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                try:
                    self.talk(param.grad)
                except RuntimeError:
                    if not self.catches:
                        raise
        return super().step(closure)


def wrapped(group: ProcessGroup, make: Callable[[Any], torch.optim.Optimizer], **options: Any) -> Any:
    module = two_layers()
    model = DistributedDataParallel(module, DistributedDataParallelConfig(bucket_size=100, **options), group)
    return module, model, DistributedOptimizer(make(module.parameters()), model)


@pytest.mark.parametrize(
    ("name", "catches"),
    [("allreduce", False), ("send|recv", False), ("broadcast", True)],
)
def test_communicating_step_is_refused(name: str, catches: bool) -> None:
    def run(rank: int, group: ProcessGroup) -> str:
        with pytest.raises(OptimizerNotShardableError) as caught:
            wrapped(group, lambda params: Communicates(params, group, COMMUNICATE[name], catches=catches))
        # Nothing is on its way: the next collective of the same group is this one on all ranks.
        total = torch.ones(3)
        group.allreduce([total]).wait()
        assert total.tolist() == [2.0] * 3
        return str(caught.value)

    for message in run_ranks(2, run):
        assert f"its step() communicates ({'' if '|' in name else name}" in message
        assert "use_distributed_optimizer=False" in message


def test_with_all_reduce_an_optimizer_may_communicate() -> None:
    def run(rank: int, group: ProcessGroup) -> list[Tensor]:
        make = lambda params: Communicates(params, group, COMMUNICATE["allreduce"])  # noqa: E731
        module, model, optimizer = wrapped(group, make, use_distributed_optimizer=False)
        for step in range(2):
            optimizer.zero_grad()
            model(batch(rank, step)).square().mean().backward()
            optimizer.step()
        return [param.detach().clone() for param in module.parameters()]

    ours = run_ranks(2, run)
    assert all(map(torch.equal, *ours))


# ``sharding=``: the user says how a group is divided, for the optimizer or as an entry of a parameter group.


class Locked(Simple):
    """Element-wise; keeps a lock, which no copy of it can have, so that it cannot be tested."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr)
        self.lock = threading.Lock()

    def update(self, param: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        with self.lock:
            state["momentum"] = state.get("momentum", 0) * 0.9 + grad
            param.sub_(state["momentum"], alpha=group["lr"])


def train(module: nn.Module, model: Any, optimizer: Any, rank: int) -> tuple[list[Tensor], Any]:
    for step in range(3):
        optimizer.zero_grad()
        model(batch(rank, step)).square().mean().backward()
        optimizer.step()
    return [param.detach().clone() for param in module.parameters()], optimizer.state_dict()["state"]


def groups_of(module: nn.Module, *entries: dict[str, Any]) -> list[dict[str, Any]]:
    params = list(module.parameters())
    return [{"params": params[:2], **entries[0]}, {"params": params[2:], **entries[1]}]


def wrap(module: nn.Module, group: ProcessGroup) -> DistributedDataParallel:
    return DistributedDataParallel(module, DistributedDataParallelConfig(bucket_size=100), group)


@pytest.mark.parametrize(
    ("argument", "entries", "num_whole"),
    [
        ("flat", [{}, {}], 0),
        ("whole", [{}, {}], 4),
        ("auto", [{"sharding": "whole"}, {"sharding": "flat"}], 2),
        ("flat", [{}, {"sharding": "whole"}], 2),
    ],
)
def test_groups_are_divided_as_the_user_says(argument: Any, entries: Any, num_whole: int) -> None:
    def run(rank: int, group: ProcessGroup) -> None:
        ours, theirs = two_layers(), two_layers()
        model = wrap(ours, group)
        with pytest.raises(OptimizerNotShardableError, match=r"'lock' cannot be copied.*sharding='flat'"):
            DistributedOptimizer(Locked(ours.parameters()), model)
        optimizer = DistributedOptimizer(Locked(groups_of(ours, *entries)), model, sharding=argument)
        weights, state = train(ours, model, optimizer, rank)
        expected, expected_state = train(
            theirs, TorchDDP(theirs, process_group=group), Locked(theirs.parameters()), rank
        )
        assert len(optimizer._impl.owners()) == num_whole
        assert all(map(torch.equal, weights, expected))
        for number, values in expected_state.items() if rank == 0 else ():
            assert torch.equal(state[number]["momentum"], values["momentum"])
        optimizer.param_groups[0]["lr"] = 0.05  # what the user said is not tested later either
        train(ours, model, optimizer, rank)
        model.close()

    run_ranks(2, run)


@pytest.mark.parametrize("size", [1, 2])
def test_an_unknown_word_is_refused(size: int) -> None:
    def run(rank: int, group: ProcessGroup) -> None:
        module = two_layers()
        model = wrap(module, group)
        said = "sharding must be one of 'auto', 'flat', 'whole', 'replicated', got 'none'"
        for optimizer, argument in (
            (Locked(module.parameters()), "none"),
            (Locked(groups_of(module, {"sharding": "none"}, {})), "auto"),
        ):
            with pytest.raises(ValueError, match=said):
                DistributedOptimizer(optimizer, model, sharding=argument)  # type: ignore[arg-type]
        model.close()

    run_ranks(size, run)
