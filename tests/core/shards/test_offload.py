"""Copies to a device and back beside its work: right however late or early each stream does its own.

Memory is reused as by an allocator that counts only the caller's stream: the next new tensor gets a block as soon as no
tensor refers to it, whatever is still queued elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megastrategy.core.shards import offload
from megastrategy.core.shards.offload import Offload
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from tests.support.lazy_device import LazyDevice

HOST = torch.device("cpu")
NO_WAIT: Any = SimpleNamespace(wait_for_device=lambda *_: None)
"""Collectives of one rank."""
NUM_PIECES, NUMEL, NUM_STEPS = 7, 6, 3


class Memory:
    """The device's memory: blocks of one size, in place of ``torch.empty``."""

    def __init__(self) -> None:
        self._blocks: list[Tensor] = []
        self._lent: list[StorageWeakRef] = []

    @property
    def num_blocks(self) -> int:
        return len(self._blocks)

    def empty(self, shape: torch.Size, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        free = [number for number, lent in enumerate(self._lent) if lent.expired()]
        if not free:
            self._blocks.append(torch.full(shape, torch.nan, dtype=dtype))
            self._lent.append(StorageWeakRef(self._blocks[-1].untyped_storage()))
        number = free[0] if free else -1
        lent = _another(self._blocks[number])
        self._lent[number] = StorageWeakRef(lent.untyped_storage())
        return lent

    def of(self, argument: Any) -> Any:
        """A kernel's view: an address, without a reference that prevents reuse."""
        if isinstance(argument, Tensor):
            for block in self._blocks:
                if block.data_ptr() == argument.data_ptr():
                    return _another(block)
        return argument


def _another(block: Tensor) -> Tensor:
    """Another storage over the same memory."""
    return torch.from_numpy(block.numpy())


def steps(early: str, spoil: Callable[[Any], object] = lambda _: None) -> tuple[bool, int]:
    """Whether all values are right after each of several steps, and the most blocks of the device's memory.

    ``early``: the names of the streams that do their work as early as they may; the others, and the caller's, as late.
    """
    memory = Memory()
    device = LazyDevice(lazy_caller=True, memory_of=memory.of)
    offload_: Any = Offload(HOST, device)
    for name in early.split():
        getattr(offload_, name).is_early = True
    spoil(offload_)
    kept = [offload_.zeros(NUMEL, torch.float32) + number for number in range(NUM_PIECES)]
    expected = [part.clone() for part in kept]

    def step(part: Tensor) -> None:
        values = memory.of(part)
        device.caller.queue(lambda: values.mul_(3).add_(1))

    is_right = True
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(offload, "torch", SimpleNamespace(empty=memory.empty))
        for _ in range(NUM_STEPS):
            coming = offload_.fetch(kept[:1])
            for number, part in enumerate(kept):
                present = coming
                if number + 1 < NUM_PIECES:
                    coming = offload_.fetch(kept[number + 1 : number + 2])
                (place,) = offload_.arrive(present)
                step(place)
                offload_.send([part], [place])
                del place, present
            del coming
            offload_.settle(NO_WAIT)
            expected = [part * 3 + 1 for part in expected]
            is_right &= all(map(torch.equal, kept, expected))
    return is_right, memory.num_blocks


@pytest.mark.parametrize("early", ["", "_to_device", "_to_host", "_to_device _to_host"])
def test_three_pieces_are_enough_and_right(early: str) -> None:
    assert steps(early) == (True, 3)


SPOILT: dict[str, tuple[str, Callable[[Any], object]]] = {
    "brought into memory that is still used": ("_to_device", lambda one: leave_out(one._to_device, "wait_stream")),
    "stepped before it has come": ("", lambda one: setattr(one, "arrive", lambda arriving: arriving.places)),
    "taken before it is stepped": ("_to_host", lambda one: leave_out(one._to_host, "wait_stream")),
    "given away before it is taken": ("_to_device", lambda one: setattr(one, "_let_go", one._leaving.popleft)),
    "read before it is there": ("", lambda one: leave_out(one._to_host, "synchronize")),
}
"""By what goes wrong: the streams that have to be early for that, and how a wait is left out."""


def leave_out(owner: Any, name: str) -> None:
    setattr(owner, name, lambda *_: None)


@pytest.mark.parametrize("what", SPOILT)
def test_without_any_one_wait_values_are_wrong(what: str) -> None:
    early, spoil = SPOILT[what]
    is_right, _ = steps(early=early, spoil=spoil)
    assert not is_right


def test_after_a_step_that_failed_what_was_on_its_way_to_the_device_writes_to_nobodys_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And what was on its way to the host arrives."""
    memory = Memory()
    monkeypatch.setattr(offload, "torch", SimpleNamespace(empty=memory.empty))
    device = LazyDevice(lazy_caller=True, memory_of=memory.of)
    one: Any = Offload(HOST, device)
    kept = [one.zeros(NUMEL, torch.float32), one.zeros(NUMEL, torch.float32)]
    first, second = one.fetch(kept[:1]), one.fetch(kept[1:])
    (place,) = one.arrive(first)
    device.write(memory.of(place), torch.ones(NUMEL))
    one.send(kept[:1], [place])
    one.settle(NO_WAIT)
    one.settle(NO_WAIT)
    assert torch.equal(kept[0], torch.ones(NUMEL))
    del first, second, place
    others = [memory.empty(torch.Size([NUMEL]), dtype=torch.float32, device=HOST) for _ in range(2)]
    assert memory.num_blocks == 2
    for other in others:
        device.write(memory.of(other), torch.full((NUMEL,), 5.0))
    device.synchronize()
    one._to_device.run(one._to_device.length)
    assert all(torch.equal(other, torch.full((NUMEL,), 5.0)) for other in others)


def test_what_a_failed_step_had_brought_is_not_written_over_what_has_its_memory_now(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memory = Memory()
    device = LazyDevice(lazy_caller=True, memory_of=memory.of)
    one = Offload(HOST, device)
    kept = one.zeros(NUMEL, torch.float32) + 5
    monkeypatch.setattr(offload, "torch", SimpleNamespace(empty=memory.empty))
    arriving = one.fetch([kept])
    del arriving
    one.settle(NO_WAIT)
    other = memory.empty(kept.shape, dtype=kept.dtype, device=HOST)
    assert memory.num_blocks == 1
    device.write(memory.of(other), torch.ones(NUMEL))
    device.synchronize()
    one._to_device.run(one._to_device.length)
    assert torch.equal(other, torch.ones(NUMEL))


def test_the_wait_for_copies_is_watched() -> None:
    """They are queued behind what may wait for a rank that is gone."""
    device = LazyDevice(lazy_caller=True)
    one: Any = Offload(HOST, device)
    kept = [one.zeros(NUMEL, torch.float32)]
    one.send(kept, [torch.ones(NUMEL)])

    class GoneError(Exception):
        pass

    def wait_for_device(of: torch.device, what: str) -> None:
        assert device.current_stream(of) is one._to_host
        raise GoneError

    watched: Any = SimpleNamespace(wait_for_device=wait_for_device)
    with pytest.raises(GoneError):
        one.settle(watched)
    assert not kept[0].any()
    one.settle(NO_WAIT)
    assert kept[0].all()


def test_on_the_host_itself_copies_are_made_at_once() -> None:
    one = Offload(HOST)
    kept = [one.zeros(NUMEL, torch.bfloat16)]
    (place,) = one.arrive(one.fetch(kept))
    assert place.data_ptr() != kept[0].data_ptr()
    one.send(kept, [place.add_(2)])
    assert torch.equal(kept[0], torch.full((NUMEL,), 2.0, dtype=torch.bfloat16))
    one.settle(NO_WAIT)
