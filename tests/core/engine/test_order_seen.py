"""A model that registers its layers in another order than it runs them: after the first synchronised backward its
buckets are filled in the order in which gradients arrive, where that makes a difference.
"""

from __future__ import annotations

from typing import Any

import pytest
from torch.distributed import ProcessGroup

from megastrategy import DistributedOptimizer
from megastrategy.core.events import Event, EventKind
from megastrategy.core.layout.layout import BufferLayout
from tests.support.layers_in_any_order import Layers, adamw, batch, moves, wrap
from tests.support.ranks import run_ranks


@pytest.mark.parametrize(("reverse", "size", "sharded"), [(True, 2, True), (False, 3, False)])
def test_buckets_launch_early_from_second_step(reverse: bool, size: int, sharded: bool) -> None:
    """Also if the layers run in the order of registration: behind them is one that is never used."""

    def launched_after(events: list[Event]) -> list[int]:
        """How many gradients had arrived when each bucket was launched."""
        arrived, counts = 0, []
        for event in events:
            arrived += event.kind is EventKind.GRAD_READY
            if event.kind is EventKind.REDUCE_START:
                counts.append(arrived)
        return counts

    def run(rank: int, group: ProcessGroup) -> None:
        model, events, _ = wrap(group, Layers(reverse=reverse), use_distributed_optimizer=sharded)
        optimizer = DistributedOptimizer(adamw(model), model)
        by_step = []
        for step in range(3):
            events.clear()
            model(batch(rank, step)).backward()
            by_step.append(launched_after(events))
            assert moves(events) == (step == 0)
            optimizer.step()
            optimizer.zero_grad()
        used = 13  # of 15: one layer is never used
        assert min(by_step[0]) == used, "nothing could go before the unused layer was known to be unused"
        for counts in by_step[1:]:
            assert counts[0] < used / 2
            # all wait for no more than their own, except the bucket of the last gradient and that of the unused layer
            assert len(counts) > 5
            assert max(counts[:-2]) < used

    run_ranks(size, run)


def test_model_in_registered_order_stays() -> None:
    def run(rank: int, group: ProcessGroup) -> None:
        module = Layers(reverse=False)
        module.never.requires_grad_(False)
        model, events, collectives = wrap(group, module)
        optimizer = DistributedOptimizer(adamw(model), model)
        buckets = len(model.layout.buckets)
        assert buckets >= 6
        for step in range(3):
            collectives.calls.clear()
            model(batch(rank, step)).backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 0:  # rank 0 sends the others the order
                places = [param.data_ptr() for param in module.parameters()]
                continue
            assert [call.name for call in collectives.calls] == (
                ["reduce_scatter"] * buckets + ["all_reduce_max"] + ["all_gather"] * buckets
            )
        assert moves(events) == 0
        assert [param.data_ptr() for param in module.parameters()] == places

    run_ranks(2, run)


@pytest.mark.parametrize(
    "options",
    [
        {"overlap_grad_reduce": False},
        {"use_distributed_optimizer": False, "use_contiguous_buffers": False, "overlap_grad_reduce": False},
        {"bucket_size": 10**6},
    ],
    ids=["no overlap", "no buffers", "one bucket"],
)
def test_order_without_effect_moves_nothing(options: dict[str, Any]) -> None:
    def run(rank: int, group: ProcessGroup) -> list[str]:
        model, events, collectives = wrap(group, Layers(reverse=True), **options)
        model(batch(rank, 0)).backward()
        collectives.calls.clear()
        model(batch(rank, 1)).backward()
        first = [call.name for call in collectives.calls]
        assert moves(events) == 0
        return first

    assert len(set(map(tuple, run_ranks(2, run)))) == 1


class OtherOrders(Layers):
    """Runs its layers in an order of its own on each rank."""

    def __init__(self, order: list[int]) -> None:
        super().__init__(reverse=False)
        self.order = order


@pytest.mark.parametrize("find_unused_parameters", [True, False])
def test_other_orders_become_that_of_rank_0(find_unused_parameters: bool) -> None:
    """Also if it is rank 0 that is content: then everything stays, on all ranks."""
    upwards, downwards = [0, 1, 2, 3, 4, 5], [5, 4, 3, 2, 1, 0]

    def run(rank: int, group: ProcessGroup, orders: list[list[int]]) -> tuple[int, list[str], BufferLayout]:
        module = OtherOrders(orders[rank])
        module.never.requires_grad_(False)
        model, events, _ = wrap(group, module, find_unused_parameters=find_unused_parameters)
        optimizer = DistributedOptimizer(adamw(model), model)
        for step in range(3):
            model(batch(rank, step)).backward()
            optimizer.step()
        names = [model.layout.params[index].name for bucket in model.layout.buckets for index in bucket.params]
        return moves(events), [name for name in names if name.endswith("weight")], model.layout

    mixed = [0, 2, 4, 1, 3, 5]
    for orders in ([downwards, mixed, upwards], [upwards, downwards, mixed]):
        outcomes = run_ranks(3, lambda rank, group, orders=orders: run(rank, group, orders))
        for num_moves, weights, layout in outcomes:
            assert num_moves == (orders[0] == downwards)
            assert weights == [f"layers.{number}.weight" for number in orders[0][::-1]], "the last to run comes first"
            assert layout == outcomes[0][2]
