"""Collectives that record, delay or fail, around real ones. Everything still reaches the other ranks."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megastrategy.core.collectives import Collectives, Handle, make_collectives


@dataclasses.dataclass(frozen=True)
class Call:
    """One collective: its name, the elements and bytes of the tensor, and when it was started."""

    name: str
    numel: int
    nbytes: int
    time_ns: int


class RecordingCollectives(Collectives):
    """Writes down every collective, then does it."""

    def __init__(self, group: ProcessGroup) -> None:
        super().__init__(group)
        self._real = make_collectives(group, torch.device("cpu"))
        self.calls: list[Call] = []

    def _do(
        self,
        name: str,
        tensor: Tensor,
        *args: float,
        start: Callable[..., Handle] | None = None,
        **options: bool,
    ) -> Handle:
        self.calls.append(Call(name, tensor.numel(), tensor.nbytes, time.perf_counter_ns()))
        handle: Handle = (start or getattr(self._real, name))(tensor, *args, **options)
        return handle

    def all_reduce(self, tensor: Tensor, scale: float, *, scale_sum: bool = False) -> Handle:
        return self._do("all_reduce", tensor, scale, scale_sum=scale_sum)

    def all_reduce_max(self, tensor: Tensor) -> Handle:
        return self._do("all_reduce_max", tensor)

    def reduce_scatter(self, tensor: Tensor, scale: float, *, scale_sum: bool = False) -> Handle:
        return self._do("reduce_scatter", tensor, scale, scale_sum=scale_sum)

    def reduce_scatter_into(self, sums: Tensor, tensor: Tensor, scale: float, *, scale_sum: bool = False) -> Handle:
        def start(sent: Tensor, *args: float, **options: bool) -> Handle:
            return self._real.reduce_scatter_into(sums, sent, *args, **options)

        return self._do("reduce_scatter_into", tensor, scale, start=start, scale_sum=scale_sum)

    def all_gather(self, tensor: Tensor) -> Handle:
        return self._do("all_gather", tensor)

    def broadcast(self, tensor: Tensor) -> Handle:
        return self._do("broadcast", tensor)

    def close(self) -> None:
        self._real.close()

    def named(self, *names: str) -> list[Call]:
        """The calls of these names, in order."""
        return [call for call in self.calls if call.name in names]


class DelayingCollectives(RecordingCollectives):
    """Before each reduction (or what else is named) ``delay_s`` passes in the worker's thread, so buckets stay in
    flight."""

    def __init__(
        self,
        group: ProcessGroup,
        delay_s: float,
        names: Sequence[str] = ("reduce_scatter", "reduce_scatter_into", "all_reduce"),
    ) -> None:
        super().__init__(group)
        self._delay_s = delay_s
        self._names = names

    def _do(self, name: str, tensor: Tensor, *args: float, **options: Any) -> Handle:
        if name in self._names:
            start = getattr(self._real, "_start")  # noqa: B009 - the worker of the real one, on purpose
            start("delay", lambda: time.sleep(self._delay_s))
        return super()._do(name, tensor, *args, **options)
