"""The memory for saving and loading an optimizer's state on a rank: every storage that any operation makes, on the
rank's thread or on its collectives' thread, is counted while it is alive, and the peak is held to a formula."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from megastrategy import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from megastrategy.core.collectives import GlooCollectives, Handle
from megastrategy.core.states import mover
from megastrategy.core.states.flat_shard import FlatShard
from tests.support.ranks import run_ranks
from tests.support.thread_mode import ThreadMode

SLACK = 0.02
"""Of a round: counters, and the table in which ranks tell each other which state they have."""

ROUND_NUMEL = 150_000
"""The addresses that are sent in a round, patched to less than the model has."""


class AllocationWatch(ThreadMode):
    """The bytes of all storages that came into being since it was made and are alive, and the most they ever were.

    A mode sees the operations of the thread that enters it, so every thread of a rank enters this one object.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._seen: dict[int, tuple[StorageWeakRef, int]] = {}
        self._lock = threading.Lock()

    @property
    def alive(self) -> int:
        with self._lock:
            return self._count()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.set_.source_Storage_storage_offset:  # a part of a storage: no new memory
            return result
        before = {id_of(tensor) for tensor in tensors_in((args, kwargs))}
        with self._lock:
            for tensor in tensors_in(result):
                if id_of(tensor) not in before | self._seen.keys():
                    storage = tensor.untyped_storage()
                    self._seen[id_of(tensor)] = StorageWeakRef(storage), storage.nbytes()
            self.peak = max(self.peak, self._count())
        return result

    def _count(self) -> int:
        self._seen = {key: entry for key, entry in self._seen.items() if not entry[0].expired()}
        return sum(nbytes for _, nbytes in self._seen.values())


def tensors_in(values: Any) -> list[Tensor]:
    """A shard, or a DTensor, has the shape of the whole tensor, and the memory of its part."""
    leaves = [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor) and not leaf.is_meta]
    found: list[Tensor] = []
    for leaf in leaves:
        found += leaf.pieces if isinstance(leaf, FlatShard) else [getattr(leaf, "_local_tensor", leaf)]
    return found


def id_of(tensor: Tensor) -> int:
    return StorageWeakRef(tensor.untyped_storage()).cdata


class WatchedCollectives(GlooCollectives):
    """Gloo's, whose thread is watched, too."""

    watch: AllocationWatch | None = None

    def _start(self, what: str, run: Callable[[], object]) -> Handle:
        watch = self.watch

        def watched() -> None:
            if watch is None:
                run()
            else:
                with watch:
                    run()

        return super()._start(what, watched)


def wide(dtype: torch.dtype) -> nn.Module:
    """Six parameters in three buckets, the largest neither first nor last; a weight in channels_last."""
    model = nn.Sequential(
        nn.Conv2d(64, 192, 3, bias=False).to(memory_format=torch.channels_last),
        nn.Flatten(),
        nn.Linear(192, 1111),
        nn.Linear(1111, 77),
        nn.Linear(77, 1, bias=False),
    )
    return model.to(dtype)


CONFIG = {"bucket_size": 80_000}


class Rank:
    """One rank's model and optimizer after two steps, and what is watched while they do something."""

    def __init__(self, group: ProcessGroup, dtype: torch.dtype, sharded: bool) -> None:
        self.collectives = WatchedCollectives(group)
        config = DistributedDataParallelConfig(use_distributed_optimizer=sharded, **CONFIG)
        self.model = DistributedDataParallel(wide(dtype), config, collectives=self.collectives)
        adam = torch.optim.AdamW(self.model.parameters(), amsgrad=True)
        self.optimizer = DistributedOptimizer(adam, self.model)
        for _ in range(2):
            self.optimizer.zero_grad()
            self.model(torch.ones(2, 64, 3, 3, dtype=dtype)).sum().backward()
            self.optimizer.step()

    def watched(self, do: Callable[[], Any]) -> tuple[Any, AllocationWatch]:
        """The result of ``do`` and the watch, which still counts what is alive."""
        watch = self.collectives.watch = AllocationWatch()
        with watch:
            result = do()
        self.collectives.watch = None
        return result, watch

    @property
    def stepped_numel(self) -> int:
        """Elements that this rank steps, with the padding between parameters."""
        return sum(run.main.numel() for run in self.optimizer._impl.runs)


def bytes_in(value: Any) -> int:
    """The bytes of all tensors, each with its own memory."""
    return sum(tensor.nbytes for tensor in tensors_in(value))


@pytest.mark.parametrize(("size", "dtype"), [(2, torch.float32), (3, torch.bfloat16)])
def test_saving_memory_is_one_round(size: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """On every rank: what is sent or received in a round. What is returned is rank 0's alone."""
    monkeypatch.setattr(mover, "ROUND_NUMEL", ROUND_NUMEL)

    def run(rank: int, group: ProcessGroup) -> None:
        me = Rank(group, dtype, sharded=True)
        round_bytes = 4 * ROUND_NUMEL
        numel = sum(param.numel() for param in me.model.engine.params)
        assert numel > 2 * ROUND_NUMEL, "a round and the model are told apart"
        assert me.optimizer.state, "from here on each shard has counters of its own, four bytes each"
        for save, state_tensors in ((me.optimizer.state_dict, 3), (me.optimizer.main_params, 1)):
            if dtype == torch.float32 and save == me.optimizer.main_params:
                continue
            result, watch = me.watched(save)
            returned = bytes_in(result)
            counters = 4 * len(me.model.engine.params) if state_tensors == 3 else 0
            assert returned == (4 * state_tensors * numel + counters if rank == 0 else 0)
            assert watch.alive == returned, "nothing else is left"
            assert round_bytes / 4 <= watch.peak <= returned + round_bytes * (1 + SLACK)

    run_ranks(size, run)


def test_shard_in_several_runs_is_not_copied() -> None:
    """Until a directory is written: then the elements of one box after the other are put together."""

    def run(rank: int, group: ProcessGroup) -> None:
        collectives = WatchedCollectives(group)
        model = DistributedDataParallel(nn.Linear(1024, 600, bias=False), collectives=collectives)
        optimizer = DistributedOptimizer(torch.optim.AdamW(model.parameters()), model)
        model(torch.ones(2, 1024)).sum().backward()
        optimizer.step()
        with AllocationWatch() as watch:
            shard = optimizer.sharded_state_dict()["state"]["weight"]["exp_avg"]
            assert len(shard.pieces) > 1, "an optimizer steps so many elements in several runs"
            assert watch.peak < 1000, "counters"
            parts = [shard.__get_tensor_shard__(item.index) for item in shard.__create_write_items__("weight", shard)]
            assert watch.peak <= bytes_in(parts) + 1000
        assert torch.equal(torch.cat([part.reshape(-1) for part in parts]), torch.cat(shard.pieces))

    run_ranks(2, run)


@pytest.mark.parametrize(("size", "dtype"), [(2, torch.float32), (3, torch.bfloat16)])
def test_loading_costs_the_shard_and_nothing_else(size: int, dtype: torch.dtype) -> None:
    """Its part of each tensor is cloned; the file's tensors stay whole nowhere, and the state before is let go."""

    def run(rank: int, group: ProcessGroup) -> None:
        me = Rank(group, dtype, sharded=True)
        saved = {"state": me.optimizer.state_dict(), "main": me.optimizer.main_params()}
        [saved, *_] = me.collectives.all_gather_objects(saved)
        expected = 4 * 3 * me.stepped_numel + 4 * sum(len(values) > 0 for values in me.optimizer.state.values())
        for _ in range(2):  # the second time there is a loaded state to let go
            _, watch = me.watched(lambda: me.optimizer.load_state_dict(saved["state"]))
            assert watch.alive == expected
            assert watch.peak <= expected + 4 * ROUND_NUMEL * SLACK
        own = tensors_in(list(me.optimizer.state.values()))
        assert sum(tensor.untyped_storage().nbytes() for tensor in own) == expected, "no view of anything larger"
        _, watch = me.watched(lambda: me.optimizer.load_main_params(saved["main"]))
        assert watch.alive == 0
        assert watch.peak <= (4 * me.stepped_numel if dtype == torch.bfloat16 else 0)

    run_ranks(size, run)
