"""``--odd-offsets`` places weights of the engine and of torch DDP alike, and gradients."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed import ProcessGroup

from megastrategy import DistributedDataParallel
from megastrategy.core.buffers import contiguous_buffers, param_buffers
from tests.support import odd_offsets
from tests.support.ranks import run_ranks


def test_odd_offsets_place_weights_and_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (param_buffers, contiguous_buffers):
        monkeypatch.setitem(vars(module), "torch", torch)
    monkeypatch.setattr(nn.parallel.DistributedDataParallel, "__init__", nn.parallel.DistributedDataParallel.__init__)
    odd_offsets.install()

    def run(rank: int, group: ProcessGroup) -> None:
        x = torch.ones(4, 5)
        ours, reference = DistributedDataParallel(nn.Linear(5, 3), None, group), nn.Linear(5, 3)
        nn.init.constant_(reference.weight, 0.5)
        nn.init.zeros_(reference.bias)
        theirs = nn.parallel.DistributedDataParallel(reference, process_group=group)
        assert torch.equal(theirs(x), torch.full((4, 3), 2.5))
        ours(x).sum().backward()
        for param in (*ours.module.parameters(), *reference.parameters()):
            assert param.data_ptr() % 64 == 4
        for view in ours.engine.grad_buffers.views:
            assert view.data_ptr() % 64 == 8
        ours.close()

    run_ranks(2, run)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_odd_offsets_keep_elements_aligned(dtype: torch.dtype) -> None:
    made = odd_offsets.place((3, 2), dtype, 4)
    assert made.data_ptr() % 64 == max(4, dtype.itemsize)
    assert made.storage_offset() == 0
    assert not made.any()
