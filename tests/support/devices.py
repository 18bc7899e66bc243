"""Collectives that behave as those of a device do: the host launches them and goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroup

from megastrategy.core.collectives import Handle
from megastrategy.core.collectives.gloo import HostCollectives

from .doubles import RecordingCollectives
from .ranks import gloo_group, retire_with


class DeviceCollectives(RecordingCollectives):
    """Sends as gloo does, but has a group of its own for the hosts, as on a device. Told to, it stalls as NCCL does.

    Args:
        group: the ranks, and how the device sends.
        timeout_s: of the hosts' group.

    Attributes:
        num_waits: how often the host has waited for the device.
        num_aborts: how often what is on the device was aborted.
        is_stalled: nothing launched from now on ever comes, and its ``wait()`` returns at once, as on a stream.
    """

    def __init__(self, group: ProcessGroup, timeout_s: float = 30.0) -> None:
        super().__init__(group)
        hosts = gloo_group(PrefixStore("hosts", group.get_group_store()), group.rank(), group.size(), timeout_s)
        retire_with(group, hosts)
        self.hosts = HostCollectives(hosts)
        self._host = self.hosts
        self.num_waits = self.num_aborts = 0
        self.is_stalled = False

    def _do(self, name: str, tensor: Tensor, *args: float, **options: Any) -> Handle:
        if self.is_stalled:
            options["start"] = lambda *_, **__: _Never()
        return super()._do(name, tensor, *args, **options)

    def _end_of_queue(self, device: torch.device) -> Callable[[], bool]:
        self.num_waits += 1
        return lambda: not self.is_stalled or self.num_aborts > 0

    def abort(self) -> None:
        self.num_aborts += 1

    def close(self) -> None:
        super().close()
        self.hosts.close()


class _Never(Handle):
    """A stream's order that has no effect."""

    def wait(self) -> None:
        """Returns at once, as on a stream."""
