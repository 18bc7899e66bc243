"""``offload_optimizer_states``: main params and state are in host memory, where the step runs, and no bit changes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megastrategy.core import devices
from megastrategy.core.layout import memory
from megastrategy.core.layout.memory import describe_setup, memory_use
from tests.support.data_path import kept_numel, main_params_of
from tests.support.given import Ours, adam, assert_same_file, momentum, trained
from tests.support.ranks import run_ranks
from tests.support.two_memories import TwoMemories, told_apart

ON_HOST = {"offload_optimizer_states": True}


@contextlib.contextmanager
def accelerator() -> Iterator[None]:
    """Makes the engine take the processor for an accelerator with a memory of its own."""
    with told_apart(), mock.patch.object(devices, "is_on_host", return_value=False):
        yield


class OursThere(Ours):
    """Every operation is watched: none may use tensors of both memories, except copies."""

    def __init__(self, group: ProcessGroup, make: Any, dtype: torch.dtype, **options: Any) -> None:
        self.memories = TwoMemories()
        with self.memories:
            super().__init__(group, make, dtype, **ON_HOST, **options)

    def train(self, steps: range) -> None:
        with self.memories:
            super().train(steps)

    def state_tensors(self) -> list[Tensor]:
        impl = self.optimizer._impl
        state = [v for values in impl.inner.state.values() for v in values.values() if v.dim() > 0]
        return [*state, *(run.main for run in impl.runs)]


@pytest.mark.parametrize("make", [adam, momentum])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_is_on_the_host_and_files_are_those_without(dtype: torch.dtype, make: Any) -> None:
    """A file goes on on the device, and one of the device goes on here."""

    def run(rank: int, group: ProcessGroup, before: Any) -> Any:
        ours = OursThere(group, make, dtype)
        if before is not None:
            ours.load(before)
        first = 0 if before is None else 2
        ours.train(range(first, first + 2))
        tensors = ours.state_tensors()
        assert len(tensors) >= 2
        assert all(map(ours.memories.is_on_host, tensors))
        assert not any(map(ours.memories.is_on_host, ours.module.parameters()))
        file = ours.file()
        ours.model.close()
        return file

    with accelerator():
        first = run_ranks(2, lambda rank, group: run(rank, group, None))[0]
    expected = trained(2, make, dtype, range(2))
    assert_same_file(first, expected)
    with accelerator():
        resumed = run_ranks(2, lambda rank, group: run(rank, group, expected))[0]
    assert_same_file(resumed, trained(2, make, dtype, range(2, 4), first))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_changed_between_steps_are_taken(dtype: torch.dtype) -> None:
    def run(rank: int, group: ProcessGroup, kind: type[Ours]) -> list[Tensor]:
        ours = kind(group, adam, dtype)
        ours.train(range(2))
        for weight in ours.module.weights:
            weight.data.mul_(2)
        ours.train(range(2, 4))
        return [weight.detach().clone() for weight in ours.module.weights]

    with accelerator():
        [mine, _] = run_ranks(2, lambda rank, group: run(rank, group, OursThere))
    [expected, _] = run_ranks(2, lambda rank, group: run(rank, group, Ours))
    assert all(map(torch.equal, mine, expected))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_on_the_host_are_the_tables(dtype: torch.dtype) -> None:
    """Main params, their gradients, and the state, without the padding between parameters."""

    def run(rank: int, group: ProcessGroup) -> None:
        ours = OursThere(group, adam, dtype)
        ours.train(range(2))
        numel = sum(main.numel() for main in main_params_of(ours.optimizer).values())
        runs = ours.optimizer._impl.runs
        assert all(run.host_grad is not None and run.host_grad.shape == run.main.shape for run in runs)
        use = memory_use(ours.model.layout, rank, state_tensors=3)  # with amsgrad
        assert kept_numel(ours.optimizer) == 3 * numel
        assert (use.state_bytes, use.host_bytes) == (0, 4 * 5 * numel)
        assert "on the host" in describe_setup(ours.model.layout, rank, True, 2)
        ours.model.close()

    with accelerator(), mock.patch.object(memory, "is_on_host", return_value=False):
        run_ranks(2, run)
