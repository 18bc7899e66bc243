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


class Ours:
    """Megastrategy around a module and an optimizer on part of its parameters, behind one face with the reference."""

    def __init__(self, module: nn.Module, optimizer: Any, group: ProcessGroup, options: dict[str, Any]) -> None:
        self.model = DistributedDataParallel(module, DistributedDataParallelConfig(**options), group)
        self.optimizer: Any = DistributedOptimizer(optimizer, self.model)

    def trainable_changed(self) -> None:
        """Noticed by itself."""


class Reference:
    def __init__(self, module: nn.Module, optimizer: Any, group: ProcessGroup, options: dict[str, Any]) -> None:
        self.module, self.group, self.optimizer = module, group, optimizer
        self.trainable_changed()

    def trainable_changed(self) -> None:
        self.model = TorchDDP(self.module, process_group=self.group, find_unused_parameters=True)


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
    engine: Callable[..., Any],
    change: Change,
    options: dict[str, Any],
    *,
    in_optimizer: bool = True,
    accumulate: int = 1,
    dtype: torch.dtype = torch.float32,
    size: int = 2,
) -> list[tuple[dict[str, Tensor], list[float], dict[str, Any]]]:
    """Eight steps with the last two layers trainable at first; weights, losses and optimizer state by rank."""

    def rank_main(rank: int, group: ProcessGroup) -> tuple[dict[str, Tensor], list[float], dict[str, Any]]:
        module = four_layers(dtype)
        for layer in module[:4]:
            layer.requires_grad_(False)
        params = list(module.parameters()) if in_optimizer else [p for p in module.parameters() if p.requires_grad]
        made = engine(module, adam(params), group, options)
        losses = []
        for step in range(8):
            if change(step, module, made.optimizer):
                made.trainable_changed()
            made.optimizer.zero_grad()
            for microbatch in range(accumulate):
                last = microbatch == accumulate - 1
                with contextlib.nullcontext() if last else made.model.no_sync():
                    loss = made.model(batch(rank, step, microbatch).to(dtype)).float().square().mean() / accumulate
                    loss.backward()
            losses.append(loss.item())
            made.optimizer.step()
        state = made.optimizer.state_dict()
        return {name: value.clone() for name, value in module.state_dict().items()}, losses, state

    return run_ranks(size, rank_main)


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
    ours = train(Ours, change, options, in_optimizer=in_optimizer, accumulate=accumulate)
    theirs = train(Reference, change, {}, in_optimizer=in_optimizer, accumulate=accumulate)
    assert_same_state(ours[0][2], theirs[0][2])
    for (weights, losses, _), (expected, expected_losses, _) in zip(ours, theirs, strict=True):
        assert losses == expected_losses
        for name, value in expected.items():
            assert torch.equal(weights[name], value), name
    start = four_layers().state_dict()
    for name in {unfreeze_one_by_one: ["2.weight", "4.weight"], unfreeze_and_add_group: ["0.bias", "2.weight"]}.get(
        change, ["2.weight", "6.weight"]
    ):
        assert not torch.equal(ours[0][0][name], start[name]), f"{name} was never trained"


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


def test_state_loaded_while_frozen_is_used_later() -> None:
    """A checkpoint from after the unfreezing, loaded before it is unfrozen again."""

    def rank_main(rank: int, group: ProcessGroup) -> tuple[Tensor, Tensor]:
        def steps(made: Ours, first: int, count: int) -> None:
            for step in range(first, first + count):
                made.optimizer.zero_grad()
                made.model(batch(rank, step)).square().mean().backward()
                made.optimizer.step()

        module = four_layers()
        whole = Ours(module, adam(module.parameters()), group, SMALL_BUCKETS)
        steps(whole, 0, 3)
        [state] = whole.model.engine.collectives.all_gather_objects(whole.optimizer.state_dict())[:1]
        again = four_layers()
        again.load_state_dict(module.state_dict())
        steps(whole, 3, 3)
        again[0].requires_grad_(False)
        resumed = Ours(again, adam(again.parameters()), group, SMALL_BUCKETS)
        resumed.optimizer.load_state_dict(state)
        again[0].requires_grad_(True)
        steps(resumed, 3, 3)
        return module[0].weight.detach().clone(), again[0].weight.detach().clone()

    for uninterrupted, resumed in run_ranks(2, rank_main):
        assert torch.equal(uninterrupted, resumed)


def test_state_of_frozen_bf16_param_is_loaded_exactly() -> None:
    """torch casts it to the weight's dtype, in which it would be rounded, and no state of a main param."""

    def run(rank: int, group: ProcessGroup) -> None:
        module = four_layers(torch.bfloat16)
        before = Ours(module, adam(module.parameters()), group, SMALL_BUCKETS)
        before.model(batch(rank, 0).bfloat16()).float().square().mean().backward()
        before.optimizer.step()
        [state, *_] = before.model.engine.collectives.all_gather_objects(before.optimizer.state_dict())
        frozen = four_layers(torch.bfloat16)
        frozen[0].requires_grad_(False)
        after = Ours(frozen, adam(frozen.parameters()), group, SMALL_BUCKETS)
        after.optimizer.load_state_dict(state)
        [again, *_] = after.model.engine.collectives.all_gather_objects(after.optimizer.state_dict())
        assert_same_state(again, state)
        frozen[0].requires_grad_(True)
        after.model(batch(rank, 1).bfloat16()).float().square().mean().backward()
        after.optimizer.step()

    run_ranks(2, run)


def test_a_new_module_may_join_with_its_own_group() -> None:
    """An adapter added in training: rank 0's values count, whatever the others made."""

    def rank_main(rank: int, group: ProcessGroup) -> Tensor:
        module = four_layers()
        made = Ours(module, adam(module.parameters()), group, SMALL_BUCKETS)
        made.model(batch(rank, 0)).sum().backward()
        made.optimizer.step()
        adapter = nn.Linear(3, 3)
        adapter.weight.data.fill_(float(rank + 1))
        adapter.bias.data.fill_(float(rank + 1))
        module.append(adapter)
        made.optimizer.add_param_group({"params": adapter.parameters()})
        assert adapter.weight[0, 0].item() == 1.0
        made.optimizer.zero_grad()
        made.model(batch(rank, 1)).sum().backward()
        made.optimizer.step()
        return adapter.weight.detach().clone()

    first, second = run_ranks(2, rank_main)
    assert torch.equal(first, second)
    assert not torch.equal(first, torch.ones(3, 3))
