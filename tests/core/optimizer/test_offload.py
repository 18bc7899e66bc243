"""``offload_optimizer_states``: the optimizer's state is in the host's memory between steps, and changes no bit.

The order of copies is in tests/core/shards/test_offload.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from megastrategy.core.shards import offload, state_storage
from torch import Tensor
from torch.distributed import ProcessGroup

from megastrategy import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from megastrategy._checkpoints.directory_writer import save_directory
from megastrategy.core import OpenDirectory, to_host
from megastrategy.core.collectives import Collectives
from megastrategy.core.errors import CollectiveError, OptimizerNotShardableError
from megastrategy.core.layout.memory import describe_setup, memory_use
from tests.support.devices import DeviceCollectives
from tests.support.directories import saving_among_threads
from tests.support.given import Given, Ours, adam, assert_same_file, momentum, trained
from tests.support.lazy_device import LazyDevice
from tests.support.notes import Notes
from tests.support.optimizers import Buffered, CountsCalls
from tests.support.ranks import run_ranks
from tests.support.two_memories import TwoMemories, told_apart

ON_HOST = {"offload_optimizer_states": True}
PIECES = {"_AT_ONCE_NUMEL": 64, "CACHE_BLOCK_NUMEL": 48}


def kept(ours: Ours) -> list[Tensor]:
    return [v for values in ours.optimizer.state.values() for v in values.values() if v.dim() > 0]


def test_state_is_on_the_host_whatever_happens_to_it(tmp_path: Path) -> None:
    """And meets nothing there that is on the device, but in copies."""

    def run(rank: int, group: ProcessGroup) -> None:
        with TwoMemories() as memories:

            def check(what: str) -> None:
                tensors = kept(ours)
                assert len(tensors) >= 3, what
                is_there = memories.is_pinned if what.startswith("stepped") else memories.is_on_host
                assert all(map(is_there, tensors)), what

            ours = Ours(group, adam, torch.bfloat16, **ON_HOST)
            ours.train(range(2))
            check("stepped")
            file = ours.file()
            state = {"model": dict(ours.module.state_dict()), "optimizer": ours.optimizer.sharded_state_dict()}
            save_directory(to_host(state), {}, tmp_path / "saved", ours.collectives)
            ours.train(range(2, 3))
            check("stepped after a save")
            ours.module.load_state_dict(OpenDirectory(tmp_path / "saved").read("model"))
            ours.optimizer.load_sharded(tmp_path / "saved")
            check("loaded from a directory")
            assert_same_file(ours.file(), file)
            ours.train(range(2, 3))
            ours.load(file)
            check("loaded from a file")
            ours.module.weights[3].requires_grad_(False)  # so that its shard is alone, and not stepped
            ours.train(range(2, 3))
            check("cut into other runs")
            ours.train(range(3, 4))
            ours.module.weights[3].requires_grad_(True)
            ours.optimizer.register_step_post_hook(lambda *_: None)
            ours.train(range(3, 4))
            check("stepped in one call")
            ours.model.close()

    with told_apart(), saving_among_threads(), mock.patch.multiple(state_storage, **PIECES):
        run_ranks(2, run)


def test_the_table_has_it_apart() -> None:
    """The bytes of the device are those of fp32 main params alone."""

    def run(rank: int, group: ProcessGroup) -> None:
        ours = Ours(group, torch.optim.AdamW, torch.bfloat16, **ON_HOST)
        numel = sum(shard.numel for shard in ours.optimizer._impl.shard_set.shards.values())
        use = memory_use(ours.model.layout, rank, state_tensors=2)
        assert (use.state_bytes, use.host_bytes) == (4 * numel, 8 * numel)
        line = f"the optimizer's state is on the host between steps: {8 * numel / 2**20:,.2f} MiB, not counted above"
        assert line in describe_setup(ours.model.layout, rank, True, 2)
        ours.model.close()

    run_ranks(2, run)


def test_state_of_parameters_that_join_later_goes_there_too() -> None:
    """State that was loaded while they were frozen, and is whole on each rank until then."""
    file = trained(2, adam, torch.bfloat16, range(2))
    uncut = trained(2, adam, torch.bfloat16, range(2, 4), file)

    def run(rank: int, group: ProcessGroup) -> None:
        with TwoMemories() as memories:
            ours = Ours(group, adam, torch.bfloat16, frozen=1, **ON_HOST)
            ours.load(file)
            ours.module.weights[1].requires_grad_(True)
            ours.train(range(2, 3))
            assert all(map(memories.is_pinned, kept(ours)))
            ours.train(range(3, 4))
            assert_same_file(ours.file(), uncut)
            ours.model.close()

    with told_apart():
        run_ranks(2, run)


def test_state_that_others_have_moved_to_the_device_comes_back() -> None:
    """Lightning moves what an optimizer has when a fit begins, and when a state is loaded; a user may write another."""
    uncut = trained(2, adam, torch.bfloat16, range(4))

    def run(rank: int, group: ProcessGroup) -> None:
        with TwoMemories() as memories:
            ours = Ours(group, adam, torch.bfloat16, **ON_HOST)
            ours.train(range(2))
            for values in ours.optimizer.state.values():
                for name in values.keys() - {"step"}:
                    values[name] = torch.empty(values[name].numel()).copy_(values[name])
            assert not any(map(memories.is_on_host, kept(ours)))
            ours.train(range(2, 4))
            assert all(map(memories.is_pinned, kept(ours)))
            assert_same_file(ours.file(), uncut)
            ours.model.close()

    with told_apart():
        run_ranks(2, run)


class Looks(torch.optim.AdamW):
    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.largest = max((float(v.max()) for values in self.state.values() for v in values.values()), default=0.0)


def hooked(params: Any) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(params)
    optimizer.register_load_state_dict_post_hook(lambda *_: None)
    return optimizer


@pytest.mark.parametrize(("make", "all_of_it"), [(torch.optim.AdamW, False), (Looks, True), (hooked, False)])
def test_a_file_is_loaded_past_the_device_unless_somebody_looks_at_it(
    make: Any, all_of_it: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch moves what it is given, which is all of this rank's state at once. A hook is given the file's state."""
    file = trained(2, torch.optim.AdamW, torch.bfloat16, range(2))
    given: dict[int, int] = {}
    load = torch.optim.Optimizer.load_state_dict

    def see(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        given[id(optimizer)] = sum(v.numel() for values in state["state"].values() for v in values.values() if v.dim())
        load(optimizer, state)

    def run(rank: int, group: ProcessGroup) -> None:
        ours = Ours(group, make, torch.bfloat16, **ON_HOST)
        expected = 2 * sum(shard.numel for shard in ours.optimizer._impl.shard_set.shards.values()) if all_of_it else 0
        ours.load(file)
        assert given.pop(id(ours.optimizer.optimizer)) == expected
        assert_same_file(ours.file()["optimizer"]["state"], file["optimizer"]["state"])
        save_directory({"optimizer": ours.optimizer.sharded_state_dict()}, {}, tmp_path / "saved", ours.collectives)
        ours.train(range(2, 3))
        ours.optimizer.load_sharded(tmp_path / "saved")
        assert given.pop(id(ours.optimizer.optimizer)) == expected
        assert_same_file(ours.file()["optimizer"]["state"], file["optimizer"]["state"])
        ours.model.close()

    monkeypatch.setattr(torch.optim.Optimizer, "load_state_dict", see)
    with saving_among_threads():
        run_ranks(2, run)


def test_what_an_accelerator_would_refuse_is_seen() -> None:
    with told_apart(), TwoMemories() as memories:
        on_host = offload.Offload(torch.device("cpu")).zeros(4, torch.float32)
        on_device = torch.ones(4)
        on_device.copy_(on_host)
        assert memories.is_pinned(on_host[2:])
        assert memories.is_on_host(on_host + 1)
        assert not memories.is_pinned(on_host + 1)
        with pytest.raises(AssertionError, match="of the host and of the device"):
            on_device += on_host

    def run(rank: int, group: ProcessGroup) -> None:
        with TwoMemories():
            group.allreduce([torch.ones(4)]).wait()
            with pytest.raises(AssertionError, match=r"c10d.* of tensors of the host"):
                group.allreduce([offload.Offload(torch.device("cpu")).zeros(4, torch.float32)])

    with told_apart():
        run_ranks(2, run)


@pytest.mark.parametrize("early", [False, True])
def test_copies_may_be_late_or_early(early: bool) -> None:
    plain = trained(2, adam, torch.bfloat16, range(4))

    def on_streams(device: torch.device) -> offload.Offload:
        return offload.Offload(device, LazyDevice(early=early))

    with mock.patch.multiple(state_storage, Offload=on_streams, **PIECES):
        assert_same_file(trained(2, adam, torch.bfloat16, range(4), **ON_HOST), plain)


def test_the_next_piece_is_on_its_way_while_one_is_stepped_and_the_last_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over the borders of buckets, too; and three pieces are the most that the device has memory for."""
    monkeypatch.setattr(state_storage, "_AT_ONCE_NUMEL", 64)
    monkeypatch.setattr(state_storage, "CACHE_BLOCK_NUMEL", 48)

    def run(rank: int, group: ProcessGroup) -> None:
        seen = Notes()
        on_device = 0
        most = 0

        class Seen(offload.Offload):
            def fetch(self, kept: Sequence[Tensor]) -> offload.Arriving:
                nonlocal on_device, most
                seen.append("fetch")
                on_device += sum(part.nbytes for part in kept)
                most = max(most, on_device)
                return super().fetch(kept)

            def send(self, kept: Sequence[Tensor], values: Sequence[Tensor]) -> None:
                seen.append("send")
                super().send(kept, values)

            def _let_go(self) -> None:
                nonlocal on_device
                seen.append("let go")
                on_device -= sum(value.nbytes for value in self._leaving[0][1])
                super()._let_go()

            def settle(self, collectives: Collectives) -> None:
                nonlocal on_device
                seen.append("settle")
                on_device -= sum(value.nbytes for _, values in self._leaving for value in values)
                super().settle(collectives)

        class Watching(torch.optim.AdamW):
            def step(self, closure: Any = None) -> Any:
                seen.append("step")
                return super().step(closure)

        ours = Ours(group, Watching, torch.float32, **ON_HOST)
        ours.optimizer._impl.shard_set.states.storage._offload = Seen(torch.device("cpu"))
        assert len(ours.model.layout.buckets) > 1
        ours.train(range(1))  # makes the state
        seen.clear()
        on_device = most = 0
        ours.train(range(1, 2))
        num = list(seen).count("step")
        assert num > 5
        assert seen[0] == "fetch"
        steady = ["fetch", "step", "send", "let go"]
        assert list(seen) == ["fetch", *steady[:3], *steady * (num - 2), *steady[1:], "settle"], seen
        assert most <= 3 * 2 * 64 * 4
        assert on_device == 0
        ours.model.close()

    run_ranks(2, run)


def test_a_step_waits_for_the_device_once_and_in_bounded_time() -> None:
    def run(rank: int, group: ProcessGroup) -> None:
        device = DeviceCollectives(group)
        module = Given(torch.bfloat16)
        config = DistributedDataParallelConfig(bucket_size=200, **ON_HOST)
        model = DistributedDataParallel(module, config, collectives=device)
        optimizer = DistributedOptimizer(adam(module.parameters()), model)
        for step in range(2):
            model(step).backward()
            before = device.num_waits
            optimizer.step()
            assert device.num_waits == before + 1
        model(2).backward()
        device.watchdog = lambda what, number: f"rank 1: ValueError: bad ({what})"
        device.is_stalled = True
        with pytest.raises(CollectiveError, match="was given up: rank 1: ValueError: bad"):
            optimizer.step()
        assert device.num_aborts == 1

    with mock.patch.object(state_storage, "Offload", lambda device: offload.Offload(device, LazyDevice())):
        run_ranks(2, run)


def test_a_step_that_fails_leaves_its_state_on_the_host_and_the_next_one_goes_on() -> None:
    def run(rank: int, group: ProcessGroup) -> None:
        calls, luck = Notes(), {"fails at": 10**9}

        class Fails(torch.optim.AdamW):
            def step(self, closure: Any = None) -> Any:
                calls.append(1)
                if len(calls) == luck["fails at"]:
                    raise RuntimeError("out of luck")
                return super().step(closure)

        with TwoMemories() as memories:
            ours = Ours(group, Fails, torch.bfloat16, **ON_HOST)
            ours.train(range(2))
            file = ours.file()
            luck["fails at"] = len(calls) + 3
            with pytest.raises(RuntimeError, match="out of luck"):
                ours.train(range(2, 3))
            assert all(map(memories.is_pinned, kept(ours)))
            ours.load(file)
            assert_same_file(ours.file(), file)
            ours.train(range(2, 4))
            assert_same_file(ours.file(), expected)
            ours.model.close()

    expected = trained(2, torch.optim.AdamW, torch.bfloat16, range(4), **ON_HOST)
    with told_apart(), mock.patch.multiple(state_storage, **PIECES):
        run_ranks(2, run)


@pytest.mark.parametrize("make", [adam, momentum])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_files_are_those_of_a_run_without(dtype: torch.dtype, make: Any) -> None:
    """And each goes on from the other, on other ranks."""
    half = trained(2, make, dtype, range(3))
    assert_same_file(trained(2, make, dtype, range(3), **ON_HOST), half)
    whole = trained(3, make, dtype, range(3, 5), half)
    assert_same_file(trained(3, make, dtype, range(3, 5), half, **ON_HOST, overlap_param_gather=False), whole)


@pytest.mark.parametrize(("at_once", "block"), [(64, 48), pytest.param(1, 1, marks=pytest.mark.long), (100, 100)])
def test_slices_change_no_bit(at_once: int, block: int) -> None:
    plain = trained(2, adam, torch.bfloat16, range(4))
    with mock.patch.multiple(state_storage, _AT_ONCE_NUMEL=at_once, CACHE_BLOCK_NUMEL=block):
        assert_same_file(trained(2, adam, torch.bfloat16, range(4), **ON_HOST), plain)


def test_step_hooks_see_all_parameters() -> None:
    def run(rank: int, group: ProcessGroup) -> Any:
        seen = list[int]()
        ours = Ours(group, adam, torch.bfloat16, **ON_HOST)
        ours.optimizer.register_step_post_hook(lambda inner, *_: seen.append(len(inner.param_groups[0]["params"])))
        ours.train(range(4))
        assert seen == [4] * 4
        file = ours.file()
        ours.model.close()
        return file

    assert_same_file(run_ranks(2, run)[0], trained(2, adam, torch.bfloat16, range(4)))


def test_fused_kernels_on_the_host_get_whole_shards() -> None:
    """They round the last few elements of a tensor differently."""

    def fused(params: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, lr=0.02, fused=True)

    plain = trained(2, fused, torch.bfloat16, range(4))
    with mock.patch.multiple(state_storage, _AT_ONCE_NUMEL=64, CACHE_BLOCK_NUMEL=13):
        assert_same_file(trained(2, fused, torch.bfloat16, range(4), **ON_HOST), plain)


def test_optimizers_that_count_calls_are_refused() -> None:
    def run(rank: int, group: ProcessGroup) -> None:
        with pytest.raises(OptimizerNotShardableError, match=r"CountsCalls keeps more .* Leave this option out"):
            Ours(group, CountsCalls, torch.bfloat16, **ON_HOST)

    run_ranks(2, run)


def test_methods_that_work_on_elements_are_refused() -> None:
    def run(rank: int, group: ProcessGroup) -> None:
        ours = Ours(group, Buffered, torch.float32, **ON_HOST)
        ours.train(range(2))
        with pytest.raises(OptimizerNotShardableError, match=r"eval.. of Buffered .* on the host between steps"):
            ours.optimizer.eval()
        ours.model.close()

    run_ranks(2, run)
