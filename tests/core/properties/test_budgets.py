"""The cost of a steady step on an accelerator, counted on the host: kernels, and reads that the host waits for.

Times need a device; counts do not. A kernel budget has one term a parameter and one a bucket, and none an element.
"""

from __future__ import annotations

import collections
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import ProcessGroup

from megastrategy import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from megastrategy.core.collectives import BackendCollectives
from tests.support.budgets import HostReads, Operations, work_as_on_an_accelerator
from tests.support.ranks import run_ranks, with_instances
from tests.support.thread_mode import ThreadMode

MODES: dict[str, dict[str, Any]] = {
    "default": {},
    "fp32 sums": {"grad_reduce_in_fp32": False, "reduce_scatter_with_fp32_accumulation": True},
}
OF_THE_EXCHANGE = "megastrategy.core.collectives.interface.max_of_bytes: "
"""What ranks agree on at the end of a synchronised backward is in the host's memory, and read there."""
LAYERS = 6


def model_of(hidden: int) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(hidden, hidden) for _ in range(LAYERS)]
    return nn.Sequential(*layers).bfloat16()


def step(model: DistributedDataParallel, optimizer: DistributedOptimizer, x: torch.Tensor) -> None:
    optimizer.zero_grad()
    model(x).sum().backward()
    optimizer.clip_grad_norm_(1.0)
    optimizer.step()


def steady(group: ProcessGroup, hidden: int, options: dict[str, Any]) -> tuple[Any, Any, torch.Tensor]:
    """A model after its second step, of a bucket for each layer whatever its width; nothing is on its way."""
    numel = hidden * hidden + hidden
    config = DistributedDataParallelConfig(bucket_size=numel, **options)
    # The backend's own collectives: what an accelerator has, and on this very thread.
    model = DistributedDataParallel(model_of(hidden), config, collectives=BackendCollectives(group))
    inner = torch.optim.AdamW(model.parameters(), foreach=True)
    optimizer = DistributedOptimizer(inner, model)
    x = torch.ones(2, hidden, dtype=torch.bfloat16)
    for _ in range(2):
        step(model, optimizer, x)
    model.finish_param_gather()
    assert len(model.layout.buckets) == LAYERS
    return model, optimizer, x


@pytest.mark.parametrize("mode", ["default", "fp32 sums"])
def test_kernels_do_not_grow_with_elements(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over 64k elements a bucket in the wider model, which the host would add in pieces."""
    work_as_on_an_accelerator(monkeypatch)

    def run(rank: int, group: ProcessGroup) -> list[collections.Counter[str]]:
        counts = []
        for hidden in (128, 640):  # both fill their buckets, so neither has a gap to be zeroed
            model, optimizer, x = steady(group, hidden, MODES[mode])
            with Operations() as operations:
                step(model, optimizer, x)
                model.finish_param_gather()
            counts.append(operations.counts)
            model.close()
        return counts

    for narrow, wide in run_ranks(2, run):
        assert wide == narrow, wide - narrow
        num_params = 2 * LAYERS
        # AdamW with foreach has 12 of them a step; forward and backward have 5 a parameter.
        assert sum(wide.values()) <= 40 + 7 * num_params + 5 * LAYERS, wide


@pytest.mark.parametrize("mode", ["default", "fp32 sums"])
def test_steady_step_reads_the_exchange_only(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    work_as_on_an_accelerator(monkeypatch)

    def run(rank: int, group: ProcessGroup) -> collections.Counter[str]:
        model, optimizer, x = steady(group, 64, MODES[mode])
        with HostReads() as reads:
            step(model, optimizer, x)
            model.finish_param_gather()
        model.close()
        return reads.counts

    for counts in run_ranks(2, run):
        of_exchange = {name: count for name, count in counts.items() if name.startswith(OF_THE_EXCHANGE)}
        # Of a tensor that was never on the device (test_host_exchange); once.
        assert max(of_exchange.values(), default=0) <= 1
        assert counts.keys() == of_exchange.keys()


@pytest.mark.parametrize("promise", [{"static_graph": True}, {"find_unused_parameters": False}], ids=str)
def test_nothing_is_read_without_an_agreement(promise: dict[str, bool], monkeypatch: pytest.MonkeyPatch) -> None:
    work_as_on_an_accelerator(monkeypatch)

    def run(rank: int, group: ProcessGroup) -> collections.Counter[str]:
        model, optimizer, x = steady(group, 64, promise)
        with HostReads() as reads:
            step(model, optimizer, x)
        model.close()
        return reads.counts

    assert run_ranks(2, run) == [collections.Counter()] * 2


@pytest.mark.parametrize(("num_layers", "grads_in_fp32", "ranks"), [(5, True, 1), (60, False, 2)])
def test_main_params_step_costs_four_kernels_a_bucket(
    num_layers: int, grads_in_fp32: bool, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the number of parameters: on one rank, and with all-reduce. torch's fused AdamW has two of the 20."""
    work_as_on_an_accelerator(monkeypatch)

    def run(rank: int, group: ProcessGroup) -> tuple[collections.Counter[str], int, int]:
        torch.manual_seed(0)
        module = nn.Sequential(*(nn.Linear(8, 8) for _ in range(num_layers))).to(torch.bfloat16)
        config = DistributedDataParallelConfig(
            bucket_size=num_layers * 15, grad_reduce_in_fp32=grads_in_fp32, use_distributed_optimizer=False
        )
        model = DistributedDataParallel(module, config, collectives=BackendCollectives(group))
        optimizer = DistributedOptimizer(torch.optim.AdamW(model.parameters(), fused=True), model)
        for _ in range(2):
            step(model, optimizer, torch.ones(2, 8, dtype=torch.bfloat16))
        model(torch.ones(2, 8, dtype=torch.bfloat16)).sum().backward()
        with Operations() as operations:
            optimizer.step()
            optimizer.zero_grad()
        num_buckets, num_params = len(model.layout.buckets), len(model.layout.params)
        model.close()
        return operations.counts, num_buckets, num_params

    for counts, num_buckets, num_params in run_ranks(ranks, run):
        assert num_params == 2 * num_layers
        assert 5 <= num_buckets <= 8
        assert sum(counts.values()) <= 20 + 4 * num_buckets, counts


class SentOverGroups(ThreadMode):
    """Counts what this thread sends, by the operation and the number of ranks that take part."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: collections.Counter[tuple[str, int]] = collections.Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            [group] = [ProcessGroup.unbox(arg) for arg in args if isinstance(arg, torch.ScriptObject) and is_group(arg)]
            self.counts[func._opname, group.size()] += 1
        return func(*args, **(kwargs or {}))


def is_group(argument: torch.ScriptObject) -> bool:
    return str(argument._type()).endswith(".ProcessGroup")


@pytest.mark.parametrize("sums", ["", "fp32 sums"])
def test_wrap_connects_all_that_carries_buckets(sums: str) -> None:
    """NCCL connects a communicator when it is first used, in memory of its own: in the first backward it may find none
    left. Of instances there are two groups of two ranks; the exchange between each pair is another way again."""

    def run(rank: int, group: ProcessGroup) -> tuple[set[Any], set[Any]]:
        config = DistributedDataParallelConfig(num_distributed_optimizer_instances=2, **MODES.get(sums, {}))
        collectives = with_instances(group, 2, BackendCollectives)
        with SentOverGroups() as sent:
            model = DistributedDataParallel(model_of(8), config, collectives=collectives)
        at_wrapping = {name for name, size in sent.counts if size == 2}
        with SentOverGroups() as sent:
            model(torch.ones(2, 8, dtype=torch.bfloat16)).sum().backward()
        model.close()
        return at_wrapping, {name for name, size in sent.counts if size == 2}

    for at_wrapping, in_backward in run_ranks(4, run):
        assert in_backward == {"allreduce_", "alltoall_base_" if sums else "_reduce_scatter_base_"}
        assert in_backward | {"_allgather_base_"} <= at_wrapping
