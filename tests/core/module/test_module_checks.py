"""Modules whose forward replays a CUDA graph are not moved away from under it.

No graph can be captured on the host. What marks a captured module is made here by the inner function of torch's own
``make_graphed_callables`` that marks it there.
"""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import ProcessGroup

from megastrategy import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from megastrategy.core import materialise
from megastrategy.core.errors import ReplicaMismatchError
from tests.support.engines import engines
from tests.support.layers_in_any_order import Layers, batch
from tests.support.models import two_layers
from tests.support.ranks import run_ranks


def capture(module: nn.Module) -> None:
    """Replaces the forward as ``make_graphed_callables(module)`` does; the "graph" is the module's own forward."""
    outer = torch.cuda.make_graphed_callables.__code__
    [code] = [
        const
        for const in outer.co_consts
        if isinstance(const, types.CodeType) and const.co_name == "make_graphed_forward"
    ]
    make_graphed_forward: Any = types.FunctionType(code, torch.cuda.graphs.__dict__)
    module.forward = make_graphed_forward(module, module.training, module.forward, module.forward)


def refusal(group: ProcessGroup, module: nn.Module, **options: Any) -> str:
    with pytest.raises(ValueError, match="make_graphed_callables") as caught:
        DistributedDataParallel(module, DistributedDataParallelConfig(**options), group)
    return str(caught.value)


def test_captured_module_is_refused() -> None:
    def run(rank: int, group: ProcessGroup) -> None:
        inner = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3)))
        capture(inner[1])
        text = refusal(group, inner)
        assert text.startswith("'1' was captured")
        assert "capture there after the first optimizer step" in text
        assert "use_distributed_optimizer=False" in text
        whole = nn.Linear(3, 3)
        capture(whole)
        assert refusal(group, whole).startswith("the module itself was captured")

    run_ranks(2, run)


@pytest.mark.parametrize("captured_on", [0, 1])
def test_capture_before_first_backward_is_refused(captured_on: int) -> None:
    """The parameters move at the end of the first backward."""

    def run(rank: int, group: ProcessGroup) -> None:
        module = Layers(reverse=True)
        model = DistributedDataParallel(module, DistributedDataParallelConfig(bucket_size=500), group)
        if rank == captured_on:
            capture(module)
            with pytest.raises(ValueError, match=r"the module itself was captured.* after the first optimizer step"):
                model(batch(rank, 0))

    run_ranks(2, run)


def test_capture_after_first_step_trains() -> None:
    def run(rank: int, group: ProcessGroup) -> None:
        module = Layers(reverse=True)
        model = DistributedDataParallel(module, DistributedDataParallelConfig(bucket_size=500), group)
        optimizer = DistributedOptimizer(torch.optim.AdamW(model.parameters()), model)
        addresses = []
        for step in range(3):
            model(batch(rank, step)).backward()
            optimizer.step()
            optimizer.zero_grad()
            addresses.append([param.data_ptr() for param in module.parameters()])
            if step == 0:
                capture(module)
        assert addresses[1:] == addresses[:1] * 2

    run_ranks(2, run)


# Modules that were made on meta get memory, and others are left alone.

HOST = torch.device("cpu")


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight


def test_a_parameter_of_two_modules_stays_one() -> None:
    with torch.device("meta"):
        module = Tied()
    assert materialise(module, HOST) == []
    assert module.head.weight is module.embed.weight
    assert not module.head.weight.is_meta
    assert module.head.weight.abs().sum() > 0


def test_params_with_memory_keep_values() -> None:
    real = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    before = {name: tensor.clone() for name, tensor in real.state_dict().items()}
    weight = real[0].weight
    with torch.device("meta"):
        head = nn.Linear(3, 2)
    head.bias.requires_grad_(False)
    module = nn.Sequential(real, head)
    assert materialise(module, HOST) == []
    assert real[0].weight is weight
    for name, tensor in real.state_dict().items():
        assert torch.equal(tensor, before[name])
    assert (head.weight.requires_grad, head.bias.requires_grad) == (True, False)
    assert isinstance(head.weight, nn.Parameter)


class Silent(nn.Module):
    """Has a parameter and no way to choose its values."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2))
        self.register_buffer("seen", torch.zeros(2, dtype=torch.int64))


def test_a_class_that_cannot_choose_values_is_named() -> None:
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(2, 2), Silent())
    assert materialise(module, HOST) == ["1 (Silent)"]
    assert [tensor.dtype for tensor in (module[1].scale, module[1].seen)] == [torch.float32, torch.int64]
    assert not any(tensor.is_meta for tensor in module.state_dict().values())


# ``Embedding(max_norm=)`` writes the rows that a rank looks up: refused where a shard has an owner.


class Net(nn.Module):
    def __init__(self, kind: type[nn.Module], *, is_frozen: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = kind(6, 4, max_norm=0.5)
        self.words.requires_grad_(not is_frozen)
        self.head = nn.Linear(4, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.words(ids))


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_renorm_in_forward_is_refused(kind: type[nn.Module]) -> None:
    def run(rank: int, group: ProcessGroup) -> None:
        with pytest.raises(
            ValueError, match=r"'words' has max_norm=0\.5.*torch\.renorm.*use_distributed_optimizer=False"
        ):
            DistributedDataParallel(Net(kind), process_group=group)

    run_ranks(2, run)


def test_renorm_of_undivided_rows_trains() -> None:
    """With an all-reduce, on one rank, and frozen."""

    def run(rank: int, group: ProcessGroup, net: Net, *, shards: bool) -> None:
        config = DistributedDataParallelConfig(use_distributed_optimizer=shards)
        model = DistributedDataParallel(net, config, group)
        trained = [param for param in model.parameters() if param.requires_grad]
        optimizer = DistributedOptimizer(torch.optim.SGD(trained, lr=0.1), model)
        model(torch.arange(6)).square().mean().backward()
        optimizer.step()
        assert net.words(torch.arange(6)).norm(dim=1).max() < 0.501

    run_ranks(2, lambda rank, group: run(rank, group, Net(nn.Embedding), shards=False))
    run_ranks(1, lambda rank, group: run(rank, group, Net(nn.Embedding), shards=True))
    run_ranks(2, lambda rank, group: run(rank, group, Net(nn.Embedding, is_frozen=True), shards=True))


# ``model.check_replicas()``: weights that have diverged are named on all ranks.

MODES = engines("reduce-scatter", "all-reduce", "pooled", "forward")


def check_before_and_after_a_write(group: ProcessGroup, rank: int, mode: str) -> str:
    config = DistributedDataParallelConfig(bucket_size=100, **MODES[mode])
    model = DistributedDataParallel(two_layers(), config, group)
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    model(torch.ones(2, 10)).sum().backward()
    optimizer.step()
    model.check_replicas()
    if rank == 1:
        with torch.no_grad():
            model.module[0].weight[0, 0] += 1.0
    try:
        model.check_replicas()
    except ReplicaMismatchError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("mode", MODES)
def test_all_ranks_raise_with_the_first_parameter(mode: str) -> None:
    found = run_ranks(3, lambda rank, group: check_before_and_after_a_write(group, rank, mode))
    assert all("parameter '0.weight' has one value on data-parallel rank 0" in error for error in found)


def test_one_rank_compares_with_no_other() -> None:
    assert run_ranks(1, lambda rank, group: check_before_and_after_a_write(group, 1, "reduce-scatter")) == [""]
