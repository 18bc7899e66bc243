"""Plain loops for ``megastrategy plan``; the first can also count its own allocations in a real run.

python -m tests.tools.planned_script (gpt | frozen | conv) [--count]
python -m tests.tools.planned_script experts EP DTYPE OPTIONS
"""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from megastrategy import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from tests.support.scripts import ROOT

WIDTH, LENGTH, BATCH = 128, 64, 16


class Gpt(nn.Module):
    def __init__(self, num_frozen: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1000, WIDTH)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.1, batch_first=True) for _ in range(4)
        )
        self.head = nn.Linear(WIDTH, 1000)
        for module in [self.embedding, *self.blocks][:num_frozen]:
            module.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        for block in self.blocks:
            x = block(x, mask)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for before, after in [(3, 32), (32, 64), (64, 64)]:
            layers += [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU(), nn.MaxPool2d(2)]
        self.features, self.head = nn.Sequential(*layers), nn.Linear(64 * 64, 10)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.features(images).flatten(1)).square().mean()


def make(name: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    if name == "conv":
        return ConvNet(), torch.randn(BATCH, 3, 64, 64)
    return Gpt(3 if name == "frozen" else 0), torch.randint(0, 1000, (BATCH, LENGTH))


def counted_peak(work: Callable[[], object]) -> int:
    """The most bytes that the CPU's allocator had given out at once in ``work()``, beyond those before it."""
    _, peak = counted(work)
    return peak


def counted(work: Callable[[], object]) -> tuple[int, int]:
    """The bytes that the CPU's allocator has given out in ``work()`` and not got back, and the most of them at once."""
    recorded = [torch.profiler.ProfilerActivity.CPU]
    # acc_events: without it torch 2.11 and 2.12 warn that a second cycle, which there is none of, would be lost
    with torch.profiler.profile(activities=recorded, profile_memory=True, acc_events=True) as profile:
        work()
    assert profile.profiler is not None
    changes = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    live = peak = 0
    for event in sorted(changes, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return live, peak


def train(name: str, counts: bool) -> None:
    module, batch = make(name)
    model = DistributedDataParallel(module, DistributedDataParallelConfig(bucket_size=20_000))
    optimizer = DistributedOptimizer(torch.optim.AdamW(p for p in model.parameters() if p.requires_grad), model)
    for _ in range(2):
        optimizer.zero_grad()
        if counts:
            sys.stdout.write(f"peak {counted_peak(lambda: model(batch).backward())}\n")
        else:
            model(batch).backward()
        optimizer.step()


def train_experts(
    ep: int, dtype: torch.dtype, options: dict[str, Any], num_steps: int = 2
) -> tuple[Any, DistributedOptimizer]:
    """Trains the module of examples/moe_gpt.py, with the same weights on all ranks of the default group."""
    mesh = init_device_mesh("cpu", (dist.get_world_size() // ep, ep), mesh_dim_names=("edp", "ep"))
    module: Any = runpy.run_path(str(ROOT / "examples" / "moe_gpt.py"))["make_module"]().to(dtype)
    for layer in module.experts():
        layer.divide(mesh["ep"])
    config = DistributedDataParallelConfig(bucket_size=20_000, **options)
    model = DistributedDataParallel(module, config, expert_mesh=mesh)
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
    if sys.argv[1] == "experts":
        train_experts(int(sys.argv[2]), getattr(torch, sys.argv[3]), json.loads(sys.argv[4]))
    else:
        train(sys.argv[1], "--count" in sys.argv)
