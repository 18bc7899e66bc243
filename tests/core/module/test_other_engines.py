"""One parameter has one engine: torch DDP inside or around, and parameters that are divided over the ranks, are
refused by name."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from megastrategy import DistributedDataParallel
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
