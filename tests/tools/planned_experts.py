"""A plain loop with divided experts for ``megastrategy plan``: the module of examples/moe_gpt.py.

python -m tests.tools.planned_experts EP DTYPE OPTIONS
"""

from __future__ import annotations

import json
import runpy
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from megastrategy import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from tests.support.scripts import ROOT


def make_module(dtype: torch.dtype) -> Any:
    """The same weights on all ranks."""
    example = runpy.run_path(str(ROOT / "examples" / "moe_gpt.py"))
    module: nn.Module = example["make_module"]().to(dtype)
    return module


def train(ep: int, dtype: torch.dtype, options: dict[str, Any], num_steps: int = 2) -> tuple[Any, DistributedOptimizer]:
    """The model and its optimizer, on all ranks of the default group."""
    mesh = init_device_mesh("cpu", (dist.get_world_size() // ep, ep), mesh_dim_names=("edp", "ep"))
    module = make_module(dtype)
    for layer in module.experts():
        layer.divide(mesh["ep"])
    model = DistributedDataParallel(
        module, DistributedDataParallelConfig(bucket_size=20_000, **options), expert_mesh=mesh
    )
    optimizer = DistributedOptimizer(torch.optim.AdamW(model.parameters()), model)
    for step in range(num_steps):
        optimizer.zero_grad()
        tokens = torch.randint(256, (2, 16), generator=torch.Generator().manual_seed(step + 10 * dist.get_rank()))
        model(tokens).square().mean().backward()
        optimizer.step()
    return model, optimizer


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train(int(sys.argv[1]), getattr(torch, sys.argv[2]), json.loads(sys.argv[3]))
