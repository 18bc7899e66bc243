"""The device memory that a move to another layout needs, counted with a model of CUDA's allocator."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree

from megastrategy import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from megastrategy.core.buffers.contiguous_buffers import ContiguousGradBuffers
from megastrategy.core.engine.relayout import relayout
from tests.support.layers_in_any_order import adamw
from tests.support.ranks import run_ranks
from tests.support.thread_mode import ThreadMode

from .test_relayout import other_layout

WIDTH = 128
GRANULE = 2**15
"""CUDA's allocator takes memory in multiples of 2 MiB, and this model in multiples of so many bytes, as tensors here
are so much smaller."""


class Reserved(ThreadMode):
    """Memory that would be reserved for what this thread allocates: a freed block is used again for what fits into it,
    of several the smallest, and what is left of it is one more block.

    Args:
        least: bytes. Smaller tensors are not looked at.
        present: is there already, each in a block of its own.
    """

    def __init__(self, least: int, present: list[Tensor]) -> None:
        super().__init__()
        self._least = least
        self._used: dict[int, tuple[StorageWeakRef, int]] = {}
        self._free: list[int] = []
        self.nbytes = 0
        self.num_allocated = 0
        for tensor in present:
            self._allocate(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        for key, (storage, block) in list(self._used.items()):
            if storage.expired():
                del self._used[key]
                self._free.append(block)
        result = func(*args, **(kwargs or {}))
        # Whatever else returns a tensor looks into one that is there.
        if func in (torch.ops.aten.zeros.default, torch.ops.aten.empty.memory_format, torch.ops.aten.clone.default):
            _pytree.tree_map_only(Tensor, self._allocate, result)
        return result

    def _allocate(self, tensor: Tensor) -> None:
        nbytes = tensor.untyped_storage().nbytes()
        if nbytes < self._least:
            return
        self.num_allocated += 1
        fitting = [block for block in self._free if block >= nbytes]
        if fitting:
            block = min(fitting)
            self._free.remove(block)
            if (rest := block - nbytes) >= GRANULE:
                self._free.append(rest)
                block = nbytes
        else:
            block = -(-nbytes // GRANULE) * GRANULE
            self.nbytes += block
        reference = StorageWeakRef(tensor.untyped_storage())
        self._used[reference.cdata] = reference, block


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("dtype", "options"),
    [(torch.float32, {}), (torch.bfloat16, {}), (torch.bfloat16, {"grad_reduce_in_fp32": False})],
)
def test_a_move_takes_no_more_memory_than_there_was(dtype: torch.dtype, options: dict[str, Any]) -> None:
    """For parameters and gradients: on four ranks a shard of anything is smaller than half of the parameters."""

    def run(rank: int, group: ProcessGroup) -> tuple[int, int, int]:
        module = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(6)]).to(dtype)
        config = DistributedDataParallelConfig(bucket_size=20_000, overlap_grad_reduce=False, **options)
        model = DistributedDataParallel(module, config, group)
        optimizer = DistributedOptimizer(adamw(model), model)
        model(torch.ones(1, WIDTH, dtype=dtype)).sum().backward()
        optimizer.step()
        engine = model.engine
        assert isinstance(engine.grad_buffers, ContiguousGradBuffers)
        assert engine.param_buffers is not None
        [weights], [grads] = engine.param_buffers.flats, engine.grad_buffers.flats
        reserved = Reserved(weights.nbytes * 3 // 4, [weights, grads])
        del weights, grads
        before = reserved.nbytes
        with reserved:
            assert relayout(engine, other_layout(model))
        model.close()
        return before, reserved.nbytes, reserved.num_allocated

    for before, after, num_allocated in run_ranks(4, run):
        assert num_allocated == 4, "both were made anew"
        assert after == before
