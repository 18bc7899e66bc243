"""The bytes that CommunicationMonitor logs, where the optimizer has several instances."""

from __future__ import annotations

import pytest
import torch

from megastrategy import DistributedDataParallelConfig
from megastrategy._lightning.communication_monitor import _sent_bytes
from megastrategy.core.events import EventKind
from megastrategy.core.layout.build import build_layout
from megastrategy.core.layout.layout import ParamSpec


@pytest.mark.parametrize(("size", "instances"), [(4, 1), (4, 2), (6, 2), (6, 3), (4, 4)])
def test_monitor_counts_sent_bytes(size: int, instances: int) -> None:
    config = DistributedDataParallelConfig(num_distributed_optimizer_instances=instances)
    layout = build_layout([ParamSpec("a", (1536,), (1,), torch.float32, torch.float32)], config, size)
    reduced, gathered = (_sent_bytes(layout, kind, 0) for kind in (EventKind.REDUCE_START, EventKind.GATHER_START))
    shards = size // instances
    assert gathered == 4 * 1536 * (shards - 1) // shards, "inside an instance"
    assert reduced + gathered == 8 * 1536 * (size - 1) // size
