"""``offload_optimizer_states``: the optimizer's state is in the host's memory between steps, and changes no bit.

That it is the same training, in files, on other ranks and in every pair of switches, is in test_narrow_state.py and
test_every_pair_of_switches.py; the order of copies in tests/unit/test_offload.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megastrategy.core import narrow_state, offload, read_directory, save_directory, to_host
from megastrategy.core.layout import build_layout
from megastrategy.core.rebucketing.relayout import relayout
from tests.support.directories import saving_among_threads
from tests.support.given import Ours, adam, assert_same_file, trained
from tests.support.lazy_device import LazyDevice
from tests.support.ranks import run_ranks
from tests.support.two_memories import TwoMemories, told_apart

ON_HOST = {"offload_optimizer_states": True}
NARROW = {"optimizer_state_dtype": "bf16", "store_param_remainders": True}
WAYS = [ON_HOST, {**ON_HOST, **NARROW}]
PIECES = {"_AT_ONCE_NUMEL": 64, "CHUNK_NUMEL": 48}


def kept(ours: Ours) -> list[Tensor]:
    return [v for values in ours.optimizer.state.values() for v in values.values() if v.dim() > 0]


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_state_is_on_the_host_whatever_happens_to_it(way: dict[str, Any], tmp_path: Path) -> None:
    """And meets nothing there that is on the device, but in copies."""

    def run(rank: int, group: ProcessGroup) -> None:
        with TwoMemories() as memories:

            def check(what: str) -> None:
                tensors = kept(ours)
                assert len(tensors) >= 3, what
                is_there = memories.is_pinned if what.startswith("stepped") else memories.is_on_host
                assert all(map(is_there, tensors)), what

            ours = Ours(group, adam, torch.bfloat16, **way)
            ours.train(range(2))
            check("stepped")
            file = ours.file()
            state = {"model": dict(ours.module.state_dict()), "optimizer": ours.optimizer.sharded_state_dict()}
            save_directory(to_host(state), {}, tmp_path / "saved", ours.collectives)
            ours.train(range(2, 3))
            check("stepped after a save")
            engine = ours.model.engine
            numbers = range(len(engine.params))
            other = build_layout(engine.layout.params, ours.model.config, 2, numbers)
            assert relayout(engine, other)
            check("moved")
            ours.train(range(3, 4))
            check("stepped after a move")
            ours.module.load_state_dict(read_directory(tmp_path / "saved", "model"))
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

    with told_apart(), saving_among_threads(), mock.patch.multiple(narrow_state, **PIECES):
        run_ranks(2, run)


def test_state_of_parameters_that_join_later_goes_there_too() -> None:
    """What was loaded while they were frozen, and is whole on each rank until then."""
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


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_copies_may_be_late_or_early(way: dict[str, Any], early: bool) -> None:
    without = {name: value for name, value in way.items() if name not in ON_HOST}
    plain = trained(2, adam, torch.bfloat16, range(4), **without)

    def on_streams(device: torch.device) -> offload.Offload:
        return offload.Offload(device, LazyDevice(early=early))

    with mock.patch.multiple(narrow_state, Offload=on_streams, **PIECES):
        assert_same_file(trained(2, adam, torch.bfloat16, range(4), **way), plain)


def test_the_next_piece_is_on_its_way_while_one_is_stepped_and_the_last_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over the borders of buckets, too; and three pieces are the most that the device has memory for."""
    monkeypatch.setattr(narrow_state, "_AT_ONCE_NUMEL", 64)
    monkeypatch.setattr(narrow_state, "CHUNK_NUMEL", 48)

    def run(rank: int, group: ProcessGroup) -> None:
        seen: list[str] = []
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

            def settle(self) -> None:
                seen.append("settle")
                super().settle()

        class Watching(torch.optim.AdamW):
            def step(self, closure: Any = None) -> Any:
                seen.append("step")
                return super().step(closure)

        ours = Ours(group, Watching, torch.float32, **ON_HOST)
        ours.optimizer._impl.narrow._offload = Seen(torch.device("cpu"))
        assert len(ours.model.layout.buckets) > 1
        ours.train(range(1))  # makes the state
        seen.clear()
        on_device = most = 0
        ours.train(range(1, 2))
        num = seen.count("step")
        assert num > 5
        assert seen[0] == "fetch"
        steady = ["fetch", "step", "send", "let go"]
        assert seen == ["fetch", *steady[:3], *steady * (num - 2), *steady[1:], "settle", "let go"], seen
        assert most <= 3 * 2 * 64 * 4
        assert on_device == 0
        ours.model.close()

    run_ranks(2, run)


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_a_step_that_fails_leaves_its_state_on_the_host_and_the_next_one_goes_on(way: dict[str, Any]) -> None:
    def run(rank: int, group: ProcessGroup) -> None:
        luck = {"calls": 0, "fails at": 10**9}

        class Fails(torch.optim.AdamW):
            def step(self, closure: Any = None) -> Any:
                luck["calls"] += 1
                if luck["calls"] == luck["fails at"]:
                    raise RuntimeError("out of luck")
                return super().step(closure)

        with TwoMemories() as memories:
            ours = Ours(group, Fails, torch.bfloat16, **way)
            ours.train(range(2))
            file = ours.file()
            luck["fails at"] = luck["calls"] + 3
            with pytest.raises(RuntimeError, match="out of luck"):
                ours.train(range(2, 3))
            assert all(map(memories.is_pinned, kept(ours)))
            ours.load(file)
            assert_same_file(ours.file(), file)
            ours.train(range(2, 4))
            assert_same_file(ours.file(), expected)
            ours.model.close()

    expected = trained(2, torch.optim.AdamW, torch.bfloat16, range(4), **way)
    with told_apart(), mock.patch.multiple(narrow_state, **PIECES):
        run_ranks(2, run)
