"""Hooks on the step of a sharded optimizer, and wrappers around it, see the model's Parameters, not shards."""

from __future__ import annotations

import threading
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from megastrategy import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from megastrategy.core.errors import ReducedGradError
from tests.core.data_path.test_reduced_grad import Net, loss_of, sharded
from tests.support.ranks import run_ranks

Watch = Callable[[Optimizer], Callable[[], object]]
"""Lets something watch an optimizer's steps; returns what ends that."""


@torch.no_grad()
def renorm(optimizer: Optimizer) -> None:
    """The rows of matrices have a norm of 0.5 at most: on a flat shard nothing has rows."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param.dim() > 1:
                param.copy_(param.renorm(2, 0, 0.5))


def hook_after(optimizer: Optimizer) -> Callable[[], object]:
    return optimizer.register_step_post_hook(lambda one, *_: renorm(one)).remove


def global_hook_after(optimizer: Optimizer) -> Callable[[], object]:
    own = optimizer

    def hook(one: Optimizer, *_: Any) -> None:
        if one is own:
            renorm(one)

    return register_optimizer_step_post_hook(hook).remove


def wrapper(optimizer: Optimizer) -> Callable[[], object]:
    step = optimizer.step

    def stepping(self: Optimizer, *args: Any) -> None:
        step(*args)
        renorm(self)

    optimizer.step = types.MethodType(stepping, optimizer)  # type: ignore[method-assign]
    return lambda: None


def trained(watch: Watch, options: dict[str, Any] | None, *, is_wrapped: bool = False) -> list[Any]:
    """The weights by rank; under torch DDP without ``options``. The wrapped optimizer is watched, or the user's."""
    # Global hooks are the process's: one that comes or goes while another rank's step walks them ends that step.
    together = threading.Barrier(2, timeout=30.0)

    def run(rank: int, group: ProcessGroup) -> list[Tensor]:
        net = Net()
        model: Any = TorchDDP(net, process_group=group, find_unused_parameters=True)
        if options is not None:
            model = DistributedDataParallel(net, DistributedDataParallelConfig(**options), group)
        inner = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        end = watch(inner) if not is_wrapped else lambda: None
        try:
            together.wait()
            optimizer: Any = inner if options is None else DistributedOptimizer(inner, model)
            if is_wrapped:
                end = watch(optimizer)
            for step in range(4):
                optimizer.zero_grad()
                loss_of(model, rank, step).backward()
                optimizer.step()
            together.wait()
        finally:
            end()
        return [param.detach().clone() for param in net.parameters()]

    return run_ranks(2, run)


@pytest.mark.parametrize(
    ("watch", "options"),
    [(hook_after, {}), (global_hook_after, {"grad_buffer": "pooled"}), (wrapper, {"overlap_param_gather": True})],
)
def test_hooks_changing_weights_equal_torch_ddp(watch: Watch, options: dict[str, Any]) -> None:
    ours = trained(watch, {"bucket_size": 40, **options})
    for mine, theirs in zip(ours, trained(watch, None), strict=True):
        assert all(map(torch.equal, mine, theirs))


def centralizes(optimizer: Optimizer, *_: Any) -> None:
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param.grad is not None and param.dim() > 1:
                param.grad.sub_(param.grad.mean(dim=1, keepdim=True))


def wrapper_before(optimizer: Optimizer) -> Callable[[], object]:
    step = optimizer.step

    def stepping(self: Optimizer, *args: Any) -> None:
        centralizes(self)
        step(*args)

    optimizer.step = types.MethodType(stepping, optimizer)  # type: ignore[method-assign]
    return lambda: None


@pytest.mark.parametrize("watch", [lambda optimizer: optimizer.register_step_pre_hook(centralizes), wrapper_before])
def test_hooks_reading_grads_are_refused(watch: Watch) -> None:
    def run(rank: int, group: ProcessGroup) -> None:
        net = Net()
        model = DistributedDataParallel(net, DistributedDataParallelConfig(bucket_size=40), group)
        inner = torch.optim.SGD(net.parameters(), lr=0.1)
        watch(inner)
        optimizer = DistributedOptimizer(inner, model)
        loss_of(model, rank, 0).backward()
        before = [param.detach().clone() for param in net.parameters()]
        with pytest.raises(ReducedGradError, match=r"(?s)'first\.weight'.*full_grad"):
            optimizer.step()
        assert all(map(torch.equal, net.parameters(), before))
        assert optimizer.num_steps == (0, 0)
        assert [id(param) for param in inner.param_groups[0]["params"]] == list(map(id, net.parameters()))

    run_ranks(2, run)


def centralizes_whole(optimizer: Any) -> Callable[[], object]:
    """With whole gradients, which are the reduced ones under torch DDP."""
    full_grad = getattr(optimizer, "full_grad", lambda param: param.grad)

    def hook(one: Optimizer, *_: Any) -> None:
        for param in one.param_groups[0]["params"]:
            if (grad := full_grad(param)) is not None and param.dim() > 1:
                param.grad = grad - grad.mean(dim=1, keepdim=True)

    handle: Callable[[], object] = optimizer.register_step_pre_hook(hook).remove
    return handle


@sharded
def test_a_hook_may_write_whole_gradients(options: dict[str, Any]) -> None:
    ours, reference = (trained(centralizes_whole, either, is_wrapped=True) for either in (options, None))
    for mine, theirs in zip(ours, reference, strict=True):
        assert all(map(torch.equal, mine, theirs))


def test_global_hooks_are_called_for_real_steps_only() -> None:
    calls: list[tuple[str, Optimizer]] = []
    handles = [
        register_optimizer_step_pre_hook(lambda one, *_: calls.append(("pre", one))),
        register_optimizer_step_post_hook(lambda one, *_: calls.append(("post", one))),
    ]
    torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))])

    def run(rank: int, group: ProcessGroup) -> Optimizer:
        net = Net()
        inner = torch.optim.AdamW(net.parameters(), lr=0.1, weight_decay=0.0)
        model = DistributedDataParallel(net, DistributedDataParallelConfig(bucket_size=40), group)
        optimizer = DistributedOptimizer(inner, model)
        for step in range(2):
            loss_of(model, rank, step).backward()
            inner.param_groups[0]["weight_decay"] = 0.1 * step  # tried again at the second step
            optimizer.step()
            optimizer.zero_grad()
        return inner

    try:
        optimizers = run_ranks(2, run)
    finally:
        for handle in handles:
            handle.remove()
    for optimizer in optimizers:
        assert [which for which, one in calls if one is optimizer] == 2 * ["pre", "post"]
    assert len(calls) == 2 * 2 * 2
