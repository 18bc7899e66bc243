"""One parameter has one engine: torch DDP inside or around, and parameters that are divided over the ranks, are
refused by name. A module that is wrapped again is the new wrapper's."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from megastrategy import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from megastrategy.core.errors import ClosedError
from tests.support.models import two_layers
from tests.support.processes import run_processes
from tests.support.ranks import run_ranks


def nested() -> nn.Module:
    """A block whose inner part is called ``0.1``."""
    return nn.Sequential(nn.Sequential(nn.Tanh(), two_layers()), nn.Linear(7, 2))


# --- torch DDP -------------------------------------------------------------------------------------------------------


def test_torch_ddp_inside_is_refused() -> None:
    def run(rank: int, group: ProcessGroup) -> None:
        module = nested()
        module[0][1] = TorchDDP(module[0][1], process_group=group)
        with pytest.raises(ValueError, match=r"submodule '0\.1' is a DistributedDataParallel of torch's.*\.module"):
            DistributedDataParallel(module, process_group=group)
        with pytest.raises(ValueError, match="the module is a DistributedDataParallel of torch's"):
            DistributedDataParallel(module[0][1], process_group=group)
        module[0][1] = module[0][1].module  # the way out
        model = DistributedDataParallel(module, process_group=group)
        model(torch.ones(2, 10)).sum().backward()

    run_ranks(2, run)


@pytest.mark.parametrize("direct", [True, False])
def test_torch_ddp_around_is_refused(direct: bool) -> None:
    """Its constructor asks nothing of a submodule, so a forward is the first that can tell."""
    one_at_a_time = threading.Lock()  # torch notes whose forward is under way once for all threads of a process

    def run(rank: int, group: ProcessGroup) -> None:
        module = nested()
        model: nn.Module
        model = inner = DistributedDataParallel(module, process_group=group)
        outer = TorchDDP(inner if direct else nn.Sequential(nn.Linear(10, 10), inner), process_group=group)
        with pytest.raises(ValueError, match=r"inside a DistributedDataParallel of torch's \(around a \w+\)"):
            with one_at_a_time:
                outer(torch.ones(2, 10))
        model(torch.ones(2, 10)).sum().backward()  # the way out: without it
        assert inner.full_grad(module[1].bias) is not None

    run_ranks(2, run)


# --- DTensors --------------------------------------------------------------------------------------------------------


class Tied(nn.Module):
    """An embedding and a head of one weight, and a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layer = nn.Embedding(8, 6), nn.Linear(6, 6)
        self.head = nn.Linear(6, 8, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(self.embed(tokens)))


def message(run: Callable[[], object]) -> str:
    with pytest.raises(ValueError, match="module") as caught:
        run()
    return str(caught.value)


def refusals() -> dict[str, str]:
    """By what was done to the module."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    torch.manual_seed(0)
    one, sharded, later = Tied(), Tied(), Tied()
    parallelize_module(one, init_device_mesh("cpu", (2,)), {"layer": ColwiseParallel()})
    fully_shard(sharded, mesh=init_device_mesh("cpu", (2,)))
    model = DistributedDataParallel(later)
    parallelize_module(later, init_device_mesh("cpu", (2,)), {"layer": ColwiseParallel()})
    return {
        "one": message(lambda: DistributedDataParallel(one)),
        "fully_shard": message(lambda: DistributedDataParallel(sharded)),
        "after wrapping": message(lambda: model(torch.arange(4))),
    }


TEXTS = {
    "one": "parameter 'layer.weight' is a DTensor (Shard(dim=0) on a mesh of 2): ranks [0, 1] hold different parts",
    "fully_shard": "the module is wrapped by fully_shard",
    "after wrapping": "parameter 'layer.weight' is a DTensor, and when the module was wrapped there were none",
}


def test_dtensors_over_data_parallel_ranks_are_refused() -> None:
    for found in run_processes(2, refusals):
        for done, text in TEXTS.items():
            assert text in found[done]


# --- wrapped again, or with a layer that two models share -------------------------------------------------------------


class Shared(nn.Module):
    """A head of its own on an encoder that other models have too."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder, self.head = encoder, nn.Linear(7, 2)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.head(self.encoder(x))
        return output


def wrap(module: nn.Module, group: ProcessGroup, sharded: bool) -> DistributedDataParallel:
    return DistributedDataParallel(module, DistributedDataParallelConfig(use_distributed_optimizer=sharded), group)


@pytest.mark.parametrize(("size", "sharded"), [(1, True), (2, False)])
def test_a_wrapper_that_has_lost_its_module_says_so(size: int, sharded: bool) -> None:
    def run(rank: int, group: ProcessGroup) -> None:
        module = two_layers()
        first = wrap(module, group, sharded)
        second = wrap(module, group, sharded)
        assert first.is_closed
        with pytest.raises(ClosedError, match=r"(?s)was wrapped again since.*Call the newest wrapper"):
            first(torch.ones(1, 10))
        second(torch.ones(1, 10)).sum().backward()
        grads = {name: second.full_grad(param) for name, param in module.named_parameters()}
        assert all(grad is not None for grad in grads.values())
        second.close()
        second.close()

    run_ranks(size, run)


@pytest.mark.parametrize(("size", "sharded"), [(1, True), (2, False)])
def test_layer_of_dropped_model_is_taken_over(size: int, sharded: bool) -> None:
    """The old wrapper is in a circle of references, as a LightningModule and its Trainer are."""

    def run(rank: int, group: ProcessGroup) -> None:
        encoder = two_layers()
        first = wrap(Shared(encoder), group, sharded)
        first.itself = [first]
        optimizer: Any = DistributedOptimizer(torch.optim.AdamW(first.parameters(), lr=0.1), first)

        del first
        second = wrap(Shared(encoder), group, sharded)
        assert optimizer.is_closed
        new = DistributedOptimizer(torch.optim.SGD(second.parameters(), lr=0.1), second)
        before = encoder[0].weight.detach().clone()
        second.module.head(second.module.encoder(torch.ones(1, 10))).sum().backward()
        new.step()
        assert not torch.equal(encoder[0].weight, before)

    run_ranks(size, run)


def test_a_wrapper_is_no_part_of_another_one() -> None:
    def run(rank: int, group: ProcessGroup) -> None:
        model = wrap(two_layers(), group, sharded=True)
        with pytest.raises(ValueError, match=r"the module is wrapped already.*\(its \.module\)"):
            wrap(model, group, sharded=True)
        with pytest.raises(ValueError, match="the submodule '0' is wrapped already"):
            wrap(nn.Sequential(model), group, sharded=True)
        model(torch.ones(1, 10)).sum().backward()
        model.close()
        wrap(model, group, sharded=True)

    run_ranks(2, run)
