"""``offload_optimizer_states``: main params and state are in host memory, where the step runs, and no bit changes."""

from __future__ import annotations

import bisect
import contextlib
import threading
from collections.abc import Iterator
from typing import Any, Self
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils._pytree import tree_leaves

from megastrategy.core import devices
from megastrategy.core.layout.memory import describe_setup, memory_use
from tests.support.data_path import grads_of
from tests.support.prescribed_grads import Ours, adam, assert_same_file, momentum, trained
from tests.support.ranks import run_ranks
from tests.support.thread_mode import ThreadMode

_present = threading.local()
_make_pinned = devices.pinned_memory


class TwoMemories(ThreadMode):
    """Counts this thread's tensors from ``devices.pinned_memory`` as the host's, and all others as the device's.

    While entered, it raises an AssertionError if an operation other than a copy has tensors of both, and if one of the
    host's is sent.

    One of a single element counts for neither: an accelerator takes it from the host. Within :func:`told_apart`.
    """

    def __init__(self) -> None:
        super().__init__()
        self._starts: list[int] = []
        # By address of their memory, which is not given out again: a tensor, and whether it is pinned.
        self._on_host: dict[int, tuple[Tensor, bool]] = {}

    def __enter__(self) -> Self:
        _present.mode = self
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        _present.mode = None

    def is_on_host(self, tensor: Tensor) -> bool:
        return self._found(tensor) is not None

    def is_pinned(self, tensor: Tensor) -> bool:
        return self._found(tensor) is True

    def _found(self, tensor: Tensor) -> bool | None:
        """Whether it is in pinned memory; None on the device."""
        # By place and not by storage: a part of a tensor may have one of its own.
        number = bisect.bisect_right(self._starts, tensor.data_ptr())
        if number == 0:
            return None
        start = self._starts[number - 1]
        whole, is_pinned = self._on_host[start]
        return is_pinned if tensor.data_ptr() - start < whole.untyped_storage().nbytes() else None

    def put_on_host(self, tensor: Tensor, *, is_pinned: bool) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.nbytes() and not self.is_on_host(tensor):
            bisect.insort(self._starts, storage.data_ptr())
            self._on_host[storage.data_ptr()] = tensor, is_pinned
        return tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and leaf.numel() > 1]
        where = {self.is_on_host(tensor) for tensor in given}
        copies = func.overloadpacket in (torch.ops.aten.copy_, torch.ops.aten._foreach_copy_)
        assert copies or len(where) < 2, f"{func} of tensors of the host and of the device"
        assert func.namespace != "c10d" or True not in where, f"{func} of tensors of the host"
        made = func(*args, **kwargs or {})
        for leaf in tree_leaves(made) if where == {True} else ():
            if isinstance(leaf, Tensor):
                self.put_on_host(leaf, is_pinned=False)
        return made


def told_apart() -> Any:
    """While this is open threads may enter a :class:`TwoMemories`."""
    return mock.patch.multiple(devices, pinned_memory=_pinned_memory, is_pinned=_is_pinned, on_host=_on_host)


def _pinned_memory(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    made, mode = _make_pinned(numel, dtype, device), getattr(_present, "mode", None)
    return made if mode is None else mode.put_on_host(made, is_pinned=True)


def _on_host(tensor: Tensor, dtype: torch.dtype, *, copy: bool = False) -> Tensor:
    mode: TwoMemories | None = getattr(_present, "mode", None)
    if mode is None or mode.is_on_host(tensor):
        return tensor.to(dtype, copy=copy)
    return mode.put_on_host(tensor.to(dtype, copy=True), is_pinned=False)


def _is_pinned(tensor: Tensor, device: torch.device) -> bool:
    mode: TwoMemories | None = getattr(_present, "mode", None)
    return mode is None or mode.is_pinned(tensor)


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


@pytest.mark.parametrize(("dtype", "make"), [(torch.float32, adam), (torch.bfloat16, momentum)])
def test_state_is_on_the_host(dtype: torch.dtype, make: Any) -> None:
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
def test_table_has_host_memory_apart(dtype: torch.dtype) -> None:
    """Main params and gradients are one pinned allocation each, which torch rounds up to a power of two."""
    device = torch.device("cuda")

    def run(rank: int, group: ProcessGroup) -> None:
        ours = OursThere(group, adam, dtype)
        ours.train(range(2))
        mains = sum(run.main.nbytes for run in ours.optimizer._impl.runs)
        total = sum(tensor.nbytes for tensor in ours.state_tensors())
        num_kept = ours.optimizer._impl.num_kept() or 0
        use = memory_use(ours.model.layout, rank, num_kept, device=device)
        assert use.state_bytes == 0
        assert use.host_bytes == total - mains + 2 * devices.pinned_bytes(mains, device)
        assert use.grad_bytes == sum(tensor.nbytes for tensor in grads_of(ours.model)), "copies are on the host"
        text = describe_setup(ours.model.layout, rank, True, num_kept, device=device)
        assert f"with {use.host_bytes / 2**10:,.2f} KiB of main params, gradients and state there" in text
        ours.model.close()

    with accelerator():
        run_ranks(2, run)
