"""Arguments and attributes of torch DDP that scripts use have their meaning here, or an error with the way out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from megastrategy import DistributedDataParallel, DistributedDataParallelConfig
from tests.support.processes import run_processes

READ = ("device", "static_graph", "require_backward_grad_sync", "require_forward_param_sync")
"""What Lightning, Accelerate and sentence-transformers read."""
ARGUMENTS: tuple[dict[str, Any], ...] = (
    {"device_ids": None},
    {"device_ids": None, "output_device": None, "dim": 0},
    {"find_unused_parameters": True},
    {"static_graph": True},
    {"broadcast_buffers": False},
    {"bucket_cap_mb": 1, "gradient_as_bucket_view": True},
)


def _read(kind: Any) -> list[Any]:
    found: list[Any] = []
    for arguments in ARGUMENTS:
        model = kind(nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3)), **arguments)
        found += [getattr(model, name) for name in READ]
        model(torch.ones(4, 6)).sum().backward()
    model = kind(nn.Linear(6, 3))
    model._set_static_graph()
    return [*found, model.static_graph]


@pytest.mark.parametrize("size", [1, 2])
def test_arguments_and_attributes_are_torch_ddps(size: int) -> None:
    assert run_processes(size, _read, DistributedDataParallel) == run_processes(size, _read, TorchDDP)


def _be_refused() -> None:
    module, config = nn.Linear(6, 3), DistributedDataParallelConfig()
    for arguments, text in (
        ({"device_ids": [0]}, r"device_ids=\[0\]: the module is on cpu.*Leave device_ids out"),
        ({"output_device": "cuda:0"}, "output_device='cuda:0': the module is on cpu"),
        ({"dim": 1}, "dim=1: a rank has one device"),
        ({"mixed_precision": torch.float16}, "mixed_precision"),
        ({"find_unused_parameter": True}, "find_unused_parameters"),
    ):
        with pytest.raises(ValueError, match=text):
            DistributedDataParallel(module, **arguments)
    for by_position, text in (
        ([0], r"device_ids=\[0\]: the module is on cpu"),
        ({"bucket_size": 1}, "config: .* got dict"),
    ):
        with pytest.raises(ValueError, match=text):
            DistributedDataParallel(module, by_position)  # type: ignore[arg-type]
    DistributedDataParallel(module, [torch.device("cpu")]).close()  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"static_graph: pass torch DDP's arguments or a .*, not both"):
        DistributedDataParallel(module, config, static_graph=True)
    model = DistributedDataParallel(module, config, device_ids=None)
    for name in ("logger", "process_group", "_comm_hooks"):
        assert not hasattr(model, name)
    assert not hasattr(model, "generate")
    with pytest.raises(NotImplementedError, match=r"register_comm_hook\(\).*grad_wire_dtype='fp16'"):
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)


def test_meaningless_names_are_refused() -> None:
    run_processes(2, _be_refused)
