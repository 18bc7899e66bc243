"""Parameters that start or stop requiring gradients in training, or join: synchronised from then on (torch DDP: never).

The reference is torch DDP wrapped again at that moment, around the same module and optimizer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from megastrategy import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from megastrategy.core.events import Event, EventKind
from tests.support.ranks import run_ranks
from tests.support.training import assert_same_state

SMALL_BUCKETS = {"bucket_size": 100}


def four_layers(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """5 -> 13 -> 13 -> 13 -> 3; always the same weights."""
    generator = torch.Generator().manual_seed(2)
    layers = [nn.Linear(5, 13), nn.Tanh(), nn.Linear(13, 13), nn.Tanh(), nn.Linear(13, 13), nn.Tanh(), nn.Linear(13, 3)]
    model = nn.Sequential(*layers)
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randn(param.shape, generator=generator) * 0.4)
    return model.to(dtype)


def batch(rank: int, step: int, microbatch: int = 0) -> Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(100 * step + 10 * microbatch + rank))


def ours(module: nn.Module, group: ProcessGroup, **options: Any) -> tuple[Any, Any]:
    model = DistributedDataParallel(module, DistributedDataParallelConfig(**SMALL_BUCKETS, **options), group)
    return model, DistributedOptimizer(adam(module.parameters()), model)


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.05, weight_decay=0.1)


Change = Callable[[int, nn.Sequential, Any], bool]
"""``change(step, module, optimizer)`` before a step; whether it changed which parameters require gradients."""


def unfreeze_one_by_one(step: int, module: nn.Sequential, optimizer: Any) -> bool:
    if step in (2, 4):
        module[6 - 2 * (step // 2)].requires_grad_(True)
        return True
    return False


def unfreeze_and_add_group(step: int, module: nn.Sequential, optimizer: Any) -> bool:
    if step == 3:
        module[0].requires_grad_(True)
        module[2].requires_grad_(True)
        optimizer.add_param_group({"params": [*module[0].parameters(), *module[2].parameters()], "lr": 0.01})
        return True
    return False


def freeze_and_unfreeze(step: int, module: nn.Sequential, optimizer: Any) -> bool:
    if step in (1, 3, 5):
        module[4].requires_grad_(step == 3)
        module[2].requires_grad_(step != 3)
        return True
    return False


def train(
    change: Change, *, in_optimizer: bool, accumulate: int, options: dict[str, Any] | None = None
) -> list[tuple[dict[str, Tensor], list[float], dict[str, Any]]]:
    """Eight steps with the last two layers trainable at first; weights, losses and optimizer state by rank.

    Without ``options`` under torch DDP, which is wrapped again after a change."""

    def run(rank: int, group: ProcessGroup) -> tuple[dict[str, Tensor], list[float], dict[str, Any]]:
        module = four_layers()
        for layer in module[:4]:
            layer.requires_grad_(False)
        optimizer: Any = adam([param for param in module.parameters() if in_optimizer or param.requires_grad])

        def wrap() -> Any:
            return TorchDDP(module, process_group=group, find_unused_parameters=True)

        model = wrap() if options is None else None
        if options is not None:
            model = DistributedDataParallel(module, DistributedDataParallelConfig(**options), group)
            optimizer = DistributedOptimizer(optimizer, model)
        losses = []
        for step in range(8):
            if change(step, module, optimizer) and options is None:
                model = wrap()
            optimizer.zero_grad()
            for microbatch in range(accumulate):
                last = microbatch == accumulate - 1
                with contextlib.nullcontext() if last else model.no_sync():
                    loss = model(batch(rank, step, microbatch)).square().mean() / accumulate
                    loss.backward()
            losses.append(loss.item())
            optimizer.step()
        return {name: value.clone() for name, value in module.state_dict().items()}, losses, optimizer.state_dict()

    return run_ranks(2, run)


@pytest.mark.parametrize(
    ("change", "in_optimizer", "accumulate", "sharded"),
    [
        (unfreeze_one_by_one, True, 1, True),
        (unfreeze_and_add_group, False, 3, False),
        (freeze_and_unfreeze, True, 1, True),
    ],
)
def test_it_equals_ddp_wrapped_again(change: Change, in_optimizer: bool, accumulate: int, sharded: bool) -> None:
    options = {**SMALL_BUCKETS, "use_distributed_optimizer": sharded}
    mine = train(change, in_optimizer=in_optimizer, accumulate=accumulate, options=options)
    theirs = train(change, in_optimizer=in_optimizer, accumulate=accumulate)
    assert_same_state(mine[0][2], theirs[0][2])
    for (weights, losses, _), (expected, expected_losses, _) in zip(mine, theirs, strict=True):
        assert losses == expected_losses
        for name, value in expected.items():
            assert torch.equal(weights[name], value), name
    start = four_layers().state_dict()
    for name in {unfreeze_one_by_one: ["2.weight", "4.weight"], unfreeze_and_add_group: ["0.bias", "2.weight"]}.get(
        change, ["2.weight", "6.weight"]
    ):
        assert not torch.equal(mine[0][0][name], start[name]), f"{name} was never trained"


def test_a_frozen_parameter_is_not_waited_for() -> None:
    """Its bucket goes out while backward runs, although its gradient never comes."""

    def rank_main(rank: int, group: ProcessGroup) -> None:
        module = four_layers()
        events: list[Event] = []
        config = DistributedDataParallelConfig(**SMALL_BUCKETS)
        model = DistributedDataParallel(module, config, group, listener=events.append)
        module[6].requires_grad_(False)
        module[4].bias.requires_grad_(False)
        for _ in range(2):  # the buckets are made at the end of the first backward
            events.clear()
            model(batch(rank, 0)).sum().backward()
        kinds = [(event.kind, event.index) for event in events]
        first = kinds.index((EventKind.REDUCE_START, 0))
        last_gradient = max(place for place, (kind, _) in enumerate(kinds) if kind is EventKind.GRAD_READY)
        assert first < last_gradient, "the first bucket waited for the end of backward"

    run_ranks(2, rank_main)


def test_state_of_frozen_bf16_param_is_loaded_exactly() -> None:
    """torch casts it to the weight's dtype, in which it would be rounded, and no state of a main param."""

    def run(rank: int, group: ProcessGroup) -> None:
        module = four_layers(torch.bfloat16)
        model, optimizer = ours(module, group)
        model(batch(rank, 0).bfloat16()).float().square().mean().backward()
        optimizer.step()
        [state, *_] = model.engine.collectives.all_gather_objects(optimizer.state_dict())
        frozen = four_layers(torch.bfloat16)
        frozen[0].requires_grad_(False)
        model, optimizer = ours(frozen, group)
        optimizer.load_state_dict(state)
        [again, *_] = model.engine.collectives.all_gather_objects(optimizer.state_dict())
        assert_same_state(again, state)
        frozen[0].requires_grad_(True)
        model(batch(rank, 1).bfloat16()).float().square().mean().backward()
        optimizer.step()

    run_ranks(2, run)


def test_a_new_module_may_join_with_its_own_group() -> None:
    """An adapter added in training: rank 0's values count, whatever the others made."""

    def rank_main(rank: int, group: ProcessGroup) -> Tensor:
        module = four_layers()
        model, optimizer = ours(module, group)
        model(batch(rank, 0)).sum().backward()
        optimizer.step()
        adapter = nn.Linear(3, 3)
        adapter.weight.data.fill_(float(rank + 1))
        adapter.bias.data.fill_(float(rank + 1))
        module.append(adapter)
        optimizer.add_param_group({"params": adapter.parameters()})
        assert adapter.weight[0, 0].item() == 1.0
        optimizer.zero_grad()
        model(batch(rank, 1)).sum().backward()
        optimizer.step()
        return adapter.weight.detach().clone()

    first, second = run_ranks(2, rank_main)
    assert torch.equal(first, second)
    assert not torch.equal(first, torch.ones(3, 3))
