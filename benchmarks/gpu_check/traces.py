"""Reads what torch.profiler recorded: which work was started under which name, and when it ran."""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from .devices import Device


@dataclasses.dataclass(frozen=True)
class Span:
    """Something that ran, in microseconds of the profiler's clock."""

    name: str
    start_us: float
    end_us: float


@dataclasses.dataclass(frozen=True)
class _Launch:
    """A span, and when it was started on the host."""

    span: Span
    started_us: float


_COPIES = "gpu_memcpy", "gpu_memset"


class Trace:
    """The work of one or several steps.

    Attributes:
        copies: of memory, and fills, by the device itself.

    Args:
        events: of a trace in Chrome's format.
        device: whose work it is.
    """

    def __init__(self, events: list[dict[str, Any]], device: Device) -> None:
        whole = [event for event in events if event.get("ph") == "X" and "dur" in event]
        self._ranges = [_span(event) for event in whole if event.get("cat") == "user_annotation"]
        work = [event for event in whole if event.get("cat") == device.kernels]
        self.copies = [_span(event) for event in whole if event.get("cat") in _COPIES]
        if device.kernels == device.launches:  # what is started has run
            self._work = [_Launch(_span(event), event["ts"]) for event in _outermost(work)]
            return
        started = {
            event["args"]["correlation"]: float(event["ts"])
            for event in whole
            if event.get("cat") in (device.launches, "cuda_driver") and "correlation" in event.get("args", {})
        }
        self._work = [
            _Launch(_span(event), started[number])
            for event in work
            if (number := event.get("args", {}).get("correlation")) in started
        ]

    def ranges(self, name: str) -> list[Span]:
        """Lists what was recorded under this name, on the host, in order."""
        return sorted((found for found in self._ranges if found.name == name), key=lambda span: span.start_us)

    def work_of(self, host: Span) -> list[Span]:
        """Lists what was started during a range of the host's, by any thread, in the order in which it ran."""
        found = [launch.span for launch in self._work if host.start_us <= launch.started_us <= host.end_us]
        return sorted(found, key=lambda span: span.start_us)

    @property
    def work(self) -> list[Span]:
        """Every kernel that ran."""
        return [launch.span for launch in self._work]

    @property
    def busy_share(self) -> float:
        """The share of the time between the first work and the end of the last in which the device does something."""
        spans = merged([*self.work, *self.copies])
        return sum(end - start for start, end in spans) / (spans[-1][1] - spans[0][0]) if spans else 0.0


def record(device: Device, run: Callable[[], object]) -> Trace:
    """Records what ``run`` does. Ranges are ``torch.profiler.record_function``'s."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    device.synchronize()
    with torch.profiler.profile(activities=activities) as profiler:
        run()
        device.synchronize()
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return Trace(json.loads(path.read_text())["traceEvents"], device)


def merged(spans: list[Span]) -> list[tuple[float, float]]:
    """The times in which any of them runs, in order."""
    found: list[tuple[float, float]] = []
    for span in sorted(spans, key=lambda span: span.start_us):
        if found and span.start_us <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], span.end_us)
        else:
            found.append((span.start_us, span.end_us))
    return found


def _span(event: dict[str, Any]) -> Span:
    return Span(str(event["name"]), float(event["ts"]), float(event["ts"]) + float(event["dur"]))


def _outermost(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The events that are in no other of the same thread: an operator of torch's calls others."""
    found: list[dict[str, Any]] = []
    end_by_thread: dict[Any, float] = {}
    for event in sorted(events, key=lambda event: (event["ts"], -event["dur"])):
        if event["ts"] >= end_by_thread.get(event.get("tid"), -1.0):
            found.append(event)
            end_by_thread[event.get("tid")] = event["ts"] + event["dur"]
    return found
