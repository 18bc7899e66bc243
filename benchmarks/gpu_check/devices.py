"""The device that is checked, behind one interface: see gpu_check's [Note: the same lines on the host]."""

from __future__ import annotations

import collections
import contextlib
import gc
import os
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch

from megastrategy.core import devices as core_devices

from ..counters import tensor_bytes
from .counts import HostReads

MIB = 2**20


class Device(ABC):
    """A device, in the process of a rank that has taken it.

    Attributes:
        type: as torch calls it.
        index: the number of the one that this rank works on.
        launches: the category that what starts work has in a trace of torch.profiler's.
        kernels: the category that the work itself has there.
        streams: ``Stream``, ``Event``, ``stream``, ``current_stream``, as ``torch.cuda`` has them.
    """

    type: str
    launches: str
    kernels: str
    streams: Any

    def __init__(self) -> None:
        self.index = 0

    @property
    def torch_device(self) -> torch.device:
        """As torch wants it."""
        return torch.device(self.type, self.index) if self.type != "cpu" else torch.device("cpu")

    @abstractmethod
    def take(self, index: int) -> None:
        """Makes this the device that the process works on. Before it, nothing may have touched any."""

    @abstractmethod
    def backend(self, way: str) -> str:
        """The name of the backend by which ranks that go this way are connected; see ``ranks``."""

    @abstractmethod
    def synchronize(self) -> None:
        """Returns when all that is queued is done."""

    @abstractmethod
    def sleep(self, ms: float) -> None:
        """Holds the current stream up."""

    @abstractmethod
    def mark(self) -> Any:
        """A point on the current stream."""

    @abstractmethod
    def ms_between(self, first: Any, second: Any) -> float:
        """The time between two marks; waits for the second."""

    @abstractmethod
    def forbid_reads(self) -> contextlib.AbstractContextManager[None]:
        """A context in which core may not wait for the device.

        Raises:
            RuntimeError: if it does.
        """

    @abstractmethod
    def num_reads(self, run: Callable[[], object]) -> int:
        """Returns how often the host waits for the device in a call."""

    @abstractmethod
    def pinned_bytes(self) -> int:
        """Bytes of the host's memory that are pinned, as the allocator rounds them."""

    @abstractmethod
    def allocated_bytes(self) -> int:
        """Bytes in tensors that are alive."""

    @abstractmethod
    def reserved_bytes(self) -> int:
        """Bytes that the process has taken from the device for tensors, in use or not."""

    def partly_used(self) -> str:
        """The sizes of pieces that the process has taken and uses in part, with how much of them and how many."""
        return ""

    @abstractmethod
    def peak_bytes(self) -> int:
        """The most bytes in tensors since :meth:`reset_peak`."""

    @abstractmethod
    def reset_peak(self) -> None:
        """Begins to count the peak anew."""

    @abstractmethod
    def free_bytes(self) -> int:
        """Bytes that any process could still take."""

    @abstractmethod
    def as_on_an_accelerator(self) -> contextlib.AbstractContextManager[None]:
        """A context in which core arranges its work as on an accelerator."""

    def be_deterministic(self) -> None:
        """Makes the same arithmetic give the same bits. Warns of what cannot."""
        torch.use_deterministic_algorithms(True, warn_only=True)


class CudaDevice(Device):
    """A GPU that torch calls cuda, AMD's as well."""

    type, launches, kernels = "cuda", "cuda_runtime", "kernel"

    def __init__(self) -> None:
        super().__init__()
        self.streams = torch.cuda
        self._cycles_a_ms = 0.0

    def take(self, index: int) -> None:
        self.index = index
        torch.cuda.set_device(index)
        torch.cuda.init()

    def be_deterministic(self) -> None:
        super().be_deterministic()
        # Attention whose backward adds in any order would differ from itself.
        torch.backends.cuda.enable_flash_sdp(False)
        torch.backends.cuda.enable_mem_efficient_sdp(False)
        torch.backends.cuda.enable_cudnn_sdp(False)

    def backend(self, way: str) -> str:
        return {"staged": "gloo", "fake": "fake"}.get(way, "nccl")

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def sleep(self, ms: float) -> None:
        if not self._cycles_a_ms:
            self._cycles_a_ms = self._calibrate()
        torch.cuda._sleep(max(1, int(ms * self._cycles_a_ms)))

    def _calibrate(self, cycles: int = 5_000_000) -> float:
        torch.cuda._sleep(cycles)  # the first launch loads the kernel
        first = self.mark()
        torch.cuda._sleep(cycles)
        return cycles / max(self.ms_between(first, self.mark()), 1e-3)

    def mark(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def ms_between(self, first: Any, second: Any) -> float:
        second.synchronize()
        return float(first.elapsed_time(second))

    @contextlib.contextmanager
    def forbid_reads(self) -> Iterator[None]:
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)

    def num_reads(self, run: Callable[[], object]) -> int:
        before = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                run()
            finally:
                torch.cuda.set_sync_debug_mode(before)
        return sum("synchronizing" in str(one.message) for one in caught)

    def pinned_bytes(self) -> int:
        return int(torch.cuda.host_memory_stats().get("allocated_bytes.current", 0))

    def allocated_bytes(self) -> int:
        return int(torch.cuda.memory_allocated())

    def reserved_bytes(self) -> int:
        torch.cuda.empty_cache()
        return int(torch.cuda.memory_reserved())

    def partly_used(self) -> str:
        pieces = [(one["total_size"], one["allocated_size"]) for one in torch.cuda.memory_snapshot()]
        counted = collections.Counter((total, used) for total, used in pieces if used < total)
        largest = sorted(counted.items(), key=lambda one: (one[0][1] - one[0][0]) * one[1])[:6]
        return ", ".join(f"{n} x {used / MIB:.3f} of {total / MIB:.0f} MiB" for (total, used), n in largest)

    def peak_bytes(self) -> int:
        return int(torch.cuda.max_memory_allocated())

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats()

    def free_bytes(self) -> int:
        return int(torch.cuda.mem_get_info()[0])

    def as_on_an_accelerator(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


class HostDevice(Device):
    """The processor in a GPU's place. Work is done when it is queued; streams and events are names."""

    type, launches, kernels = "cpu", "cpu_op", "cpu_op"

    def __init__(self) -> None:
        super().__init__()
        self.streams = HostStreams()
        self._peak = 0

    def take(self, index: int) -> None:
        torch.set_num_threads(1)
        gc.freeze()  # what the process began with holds no tensor of a section's, and takes half a second to look at

    def backend(self, way: str) -> str:
        return "fake" if way == "fake" else "gloo"

    def synchronize(self) -> None:
        """Nothing is queued."""

    def sleep(self, ms: float) -> None:
        time.sleep(ms / 1e3)

    def mark(self) -> Any:
        return time.perf_counter()

    def ms_between(self, first: Any, second: Any) -> float:
        return 1e3 * float(second - first)

    @contextlib.contextmanager
    def forbid_reads(self) -> Iterator[None]:
        with self.as_on_an_accelerator(), HostReads() as reads:
            yield
        if found := _of_the_device(reads):
            raise RuntimeError(f"read on the host: {found}")

    def num_reads(self, run: Callable[[], object]) -> int:
        with self.as_on_an_accelerator(), HostReads() as reads:
            run()
        return sum(_of_the_device(reads).values())

    def pinned_bytes(self) -> int:
        return 0

    def allocated_bytes(self) -> int:
        gc.collect()
        now = tensor_bytes([])
        self._peak = max(self._peak, now)
        return now

    def reserved_bytes(self) -> int:
        return self.allocated_bytes()

    def peak_bytes(self) -> int:
        """As far as it was looked at."""
        return max(self._peak, self.allocated_bytes())

    def reset_peak(self) -> None:
        self._peak = 0

    def free_bytes(self) -> int:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

    def as_on_an_accelerator(self) -> contextlib.AbstractContextManager[None]:
        return mock.patch.object(core_devices, "is_on_host", return_value=False)


def _of_the_device(reads: HostReads) -> dict[str, int]:
    """Without the exchange at the end of a backward, which is between hosts, on a GPU too: never of a tensor there."""
    return {name: number for name, number in reads.counts.items() if ".interface." not in name}


class HostStreams:
    """In place of ``torch.cuda``'s streams."""

    class Stream:
        """A name for the one order in which the host works."""

        def __init__(self, device: object = None) -> None:
            self.device = device

        def wait_stream(self, other: object) -> None:
            """Nothing is behind."""

        def wait_event(self, event: object) -> None:
            """It has happened."""

    class Event:
        """Has happened when it is recorded."""

        def record(self, stream: object = None) -> None:
            """Nothing is queued before it."""

        def wait(self, stream: object = None) -> None:
            """It has happened."""

        def query(self) -> bool:
            """Whether it has happened."""
            return True

    def __init__(self) -> None:
        self._current = self.Stream()

    def current_stream(self, device: object = None) -> HostStreams.Stream:
        """The one in whose context this is."""
        return self._current

    @contextlib.contextmanager
    def stream(self, stream: HostStreams.Stream) -> Iterator[None]:
        """As ``torch.cuda.stream``; for one thread at a time."""
        before, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = before


DEVICES: dict[str, Callable[[], Device]] = {"cuda": CudaDevice, "cpu": HostDevice}


def why_no_device(kind: str, num_gpus: int) -> str:
    """Why so many devices cannot be checked here; empty if they can.

    It asks the driver, so it is for processes that do not fork.
    """
    if kind == "cpu":
        return ""
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} sees no GPU here (torch.cuda.is_available() is False)"
    if torch.cuda.device_count() < num_gpus:
        return f"--gpus {num_gpus}: torch sees {torch.cuda.device_count()} here"
    if float((torch.ones(8, device=kind) + 1).sum()) != 16.0:
        return "the GPU adds 1 and 1 to something else"
    return ""
