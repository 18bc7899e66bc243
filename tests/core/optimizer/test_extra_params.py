"""Parameters of an optimizer that the wrapped model has not; see [Note: parameters that are not the model's].

torch DDP is the reference, with the same head outside of the model.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from megastrategy import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer, GradScaler
from tests.support.models import two_layers
from tests.support.ranks import run_ranks, with_instances

MODES: dict[str, dict[str, Any]] = {
    "at the next forward": {"overlap_param_gather": True},
    "in the step": {},
    "two instances": {"num_distributed_optimizer_instances": 2},
    "all-reduce": {"use_distributed_optimizer": False},
}
STEPS = 4


class Loop:
    """A model with a head and a guide beside it: the guide requires gradients and never gets any."""

    def __init__(self, group: ProcessGroup, mode: dict[str, Any] | None, *, same: bool = False, **options: Any) -> None:
        self.module, self.rank, self.same = two_layers(), group.rank(), same
        generator = torch.Generator().manual_seed(5)
        self.head, self.guide = nn.Linear(7, 3), nn.Linear(4, 4)
        with torch.no_grad():
            self.head.weight.copy_(torch.randn(3, 7, generator=generator))
            self.head.bias.zero_()
            self.guide.weight.fill_(0.5)
            self.guide.bias.fill_(0.25)
        first, *rest = self.module.parameters()
        groups = [
            {"params": [self.head.weight, first, *self.guide.parameters()]},
            {"params": [*rest, self.head.bias], "lr": 0.02},
        ]
        inner = torch.optim.AdamW(groups, lr=0.01, **options)
        if mode is None:
            self.model: Any = TorchDDP(self.module, process_group=group)
            self.optimizer: Any = inner
        else:
            config = DistributedDataParallelConfig(bucket_size=100, **mode)
            instances = with_instances(group, 2) if config.num_distributed_optimizer_instances == 2 else None
            self.model = DistributedDataParallel(self.module, config, group, collectives=instances)
            self.optimizer = DistributedOptimizer(inner, self.model)

    def loss(self, step: int) -> Tensor:
        seed = step if self.same else 100 * self.rank + step
        x = torch.randn(4, 10, generator=torch.Generator().manual_seed(seed))
        loss: Tensor = self.head(self.model(x)).square().mean()
        return loss

    def step(self, step: int, *, zero: str = "none") -> None:
        self.loss(step).backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=zero == "none")

    def weights(self) -> list[Tensor]:
        return [param.detach().clone() for part in (self.module, self.head, self.guide) for param in part.parameters()]


def size_of(mode: dict[str, Any]) -> int:
    return 4 if "num_distributed_optimizer_instances" in mode else 2


@contextlib.contextmanager
def told() -> Iterator[None]:
    with pytest.warns(UserWarning, match=r"2 parameter\(s\) of this AdamW belong to no wrapped model") as caught:
        yield
    (message,) = (str(item.message) for item in caught)  # of rank 0, once
    assert "parameter 0 of group 0, of shape (3, 7); parameter 3 of group 1, of shape (3,)" in message


@pytest.mark.parametrize(
    ("mode", "zero"),
    [
        pytest.param(MODES["at the next forward"], "none", id="at the next forward-none"),
        pytest.param(MODES["in the step"], "zeros", id="in the step-zeros"),
        pytest.param(MODES["two instances"], "none", id="two instances-none"),
        pytest.param(MODES["all-reduce"], "none", id="all-reduce-none"),
    ],
)
def test_extra_params_step_as_under_torch_ddp(mode: dict[str, Any], zero: str) -> None:
    def run(rank: int, group: ProcessGroup, mode: dict[str, Any] | None) -> list[list[Tensor]]:
        loop = Loop(group, mode)
        seen = []
        for step in range(STEPS):
            loop.step(step, zero=zero)
            seen.append(loop.weights())
        return seen

    size = size_of(mode)
    expected = run_ranks(size, lambda rank, group: run(rank, group, None))
    with told():
        results = run_ranks(size, lambda rank, group: run(rank, group, mode))
    exact = size == 2  # else the order of sums over ranks differs
    for ours, theirs in zip(results, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0 if exact else 1e-5, atol=0 if exact else 1e-6)
    head = len(list(two_layers().parameters()))
    assert torch.equal(results[0][-1][0], results[1][-1][0]), "the model is one"
    assert not torch.equal(results[0][-1][head], results[1][-1][head]), "the heads part, as under torch DDP"
    assert torch.equal(results[0][-1][-1], results[0][0][-1]), "who has no gradient is left alone"


# --- gradients -------------------------------------------------------------------------------------------------------


def test_norm_with_extra_params_is_one_number() -> None:
    def run(rank: int, group: ProcessGroup) -> tuple[float, list[Tensor], list[float]]:
        loop = Loop(group, MODES["in the step"])
        loop.loss(0).backward()
        own = [param.grad.square().sum().item() for param in loop.head.parameters() if param.grad is not None]
        models = sum(loop.optimizer.full_grad(param).square().sum().item() for param in loop.module.parameters())
        norm = loop.optimizer.clip_grad_norm_(1e-3).item()
        loop.optimizer.step()
        return norm, loop.weights(), [sum(own), models]

    with told():
        results = run_ranks(2, run)
    (norm, weights, (own, models)), (other_norm, other_weights, (others, _)) = results
    assert norm == other_norm
    assert norm == pytest.approx((models + (own + others) / 2) ** 0.5, rel=1e-5)
    for mine, theirs in zip(weights[:4], other_weights[:4], strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("mode", [MODES["in the step"], MODES["all-reduce"]], ids=["sharded", "all-reduce"])
def test_scaler_unscales_extra_params(mode: dict[str, Any]) -> None:
    def run(rank: int, group: ProcessGroup, scale: float | None) -> list[list[Tensor]]:
        loop, seen = Loop(group, mode), []
        scaler = GradScaler("cpu", init_scale=scale or 1.0, growth_interval=100, enabled=scale is not None)
        for step in range(STEPS):
            scaler.scale(loop.loss(step)).backward()
            if step == 2 and rank == 1 and scale is not None:
                loop.head.bias.grad.fill_(float("inf"))  # on one rank alone
            if scale is not None or step != 2:
                scaler.unscale_(loop.optimizer)
                loop.optimizer.clip_grad_value_(0.01)
                scaler.step(loop.optimizer)
                scaler.update()
            loop.optimizer.zero_grad()
            seen.append(loop.weights())
        if scale is not None:
            assert scaler.get_scale() == scale / 2
        return seen

    with told():
        plain = run_ranks(2, lambda rank, group: run(rank, group, None))
    with told():
        scaled = run_ranks(2, lambda rank, group: run(rank, group, 1024.0))
    torch.testing.assert_close(scaled, plain, rtol=0, atol=0)


# --- checkpoints -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [MODES["in the step"], MODES["all-reduce"]], ids=["sharded", "all-reduce"])
def test_state_with_extra_params_is_torch_ddps(mode: dict[str, Any]) -> None:
    def run(rank: int, group: ProcessGroup, mode: dict[str, Any] | None, saved: Any = None) -> Any:
        loop = Loop(group, mode)
        if saved is not None:
            loop.optimizer.load_state_dict(copy.deepcopy(saved))
        for step in range(2):
            loop.step(step)
        state = loop.optimizer.state_dict()
        return {**state, "state": dict(sorted(state["state"].items()))}, loop.weights()

    expected = run_ranks(2, lambda rank, group: run(rank, group, None))
    with told():
        results = run_ranks(2, lambda rank, group: run(rank, group, mode))
    torch.testing.assert_close(results[0][0], expected[0][0], rtol=0, atol=0)
    assert sorted(expected[0][0]["state"]) == [0, 1, 4, 5, 6, 7], "the guide, numbers 2 and 3, has none"
    saved = expected[0][0]
    again = run_ranks(2, lambda rank, group: run(rank, group, None, saved))
    with told():
        ours = run_ranks(2, lambda rank, group: run(rank, group, mode, saved))
    for (_, weights), (_, theirs) in zip(ours, again, strict=True):
        torch.testing.assert_close(weights, theirs, rtol=0, atol=0)
