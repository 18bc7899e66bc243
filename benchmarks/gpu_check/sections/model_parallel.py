"""T: tensor parallel layers, pipelines and experts on two ranks, beside one process."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.nn.functional import all_to_all_single
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional

import megastrategy

from ..context import Context
from ..models import SEED
from ..ranks import Rank
from .parity import ONE_GPU, why_no_second_rank

CLOSE = 1e-5
"""Relative: one process adds in another order."""
WIDTH, SAMPLES, EXPERTS, STEPS = 64, 16, 4, 6


def run(context: Context) -> None:
    """The whole section."""
    reason = why_no_second_rank(context)
    environment = () if context.is_host or context.num_gpus > 1 else ONE_GPU
    for name in context.cases(CASES):
        if reason:
            context.skip(name, reason)
            continue
        with context.attempt(name):
            found = context.ranks(compare, name, place=context.place("backend", 2, environment=environment))
            context.check(name, max(found), CLOSE, unit="relative")


def compare(rank: Rank, name: str) -> float:
    """The largest difference of a weight to one process's after a few steps of SGD, relative to the largest weight."""
    device = rank.device.torch_device
    batches = [[torch.randn(SAMPLES, WIDTH, generator=_generator(step, of)) for of in (0, 1)] for step in range(STEPS)]
    batches = [[x.to(device) for x in step] for step in batches]
    alone = _layers().to(device)
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
    shares_a_batch = name != "experts"
    for step in batches:
        optimizer.zero_grad()
        # Ranks that share a model have one batch, those of experts one each.
        sum(_loss(alone, x) / (1 if shares_a_batch else 2) for x in (step[:1] if shares_a_batch else step)).backward()
        optimizer.step()
    ended = CASES[name](rank, _layers().to(device), [step[0 if shares_a_batch else rank.number] for step in batches])
    expected = dict(alone.named_parameters())
    return max(
        float((value - expected[key].detach()).abs().max() / expected[key].detach().abs().max())
        for key, value in ended.items()
    )


def _generator(step: int, of: int) -> torch.Generator:
    return torch.Generator().manual_seed(SEED + 10 * step + of)


class Experts(nn.Module):
    """Experts that all get every token, and a router that weighs their outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) * WIDTH**-0.5)
        self.group: dist.ProcessGroup | None = None

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(x).softmax(-1)
        if self.group is None:
            out = functional.gelu(x @ self.up)
        else:
            size = self.group.size()
            everywhere = x.repeat(size, 1)
            of_all = all_to_all_single(torch.empty_like(everywhere), everywhere, group=self.group)
            own = functional.gelu(of_all @ self.up.to_local())  # type: ignore[operator] # [experts, tokens of all, width]
            to_owners = own.unflatten(1, (size, len(x))).transpose(0, 1).contiguous()
            out = all_to_all_single(torch.empty_like(to_owners), to_owners, group=self.group).flatten(0, 1)
        return x + torch.einsum("etw,te->tw", out, weights)


def _layers() -> nn.Sequential:
    """The same weights each time."""
    torch.manual_seed(SEED)
    return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH), Experts())


def _loss(module: nn.Module, x: Tensor) -> Tensor:
    return functional.mse_loss(module(x), x.flip(1))


def _train(model: Any, batches: Iterable[Tensor], loss: Callable[[Tensor], Tensor]) -> None:
    optimizer = megastrategy.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model)
    for x in batches:
        optimizer.zero_grad()
        loss(x).backward()
        optimizer.step()
    model.finish_param_gather()


def _mesh(rank: Rank, first: str, second: str, sizes: tuple[int, int] = (1, 2)) -> Any:
    return init_device_mesh(rank.device.type, sizes, mesh_dim_names=(first, second))


def train_tensor_parallel(rank: Rank, module: nn.Sequential, batches: list[Tensor]) -> dict[str, Tensor]:
    """Trains with the linear layers cut over both ranks; returns the whole weights."""
    mesh = _mesh(rank, "dp", "tp")
    parallelize_module(module, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    model = megastrategy.DistributedDataParallel(module, _CONFIG, process_group=mesh.get_group("dp"))
    _train(model, batches, lambda x: _loss(model, x))
    return _whole(module)


def train_pipeline(rank: Rank, module: nn.Sequential, batches: list[Tensor]) -> dict[str, Tensor]:
    """Trains a pipeline of two stages; returns the weights of this rank's."""
    mesh = _mesh(rank, "pp", "dp", (2, 1))
    net = megastrategy.Pipeline(
        list(module), split_spec=[2, 2], loss=functional.mse_loss, microbatches=4, mesh=mesh["pp"]
    )
    model = megastrategy.DistributedDataParallel(net, _CONFIG, process_group=mesh.get_group("dp"))
    _train(model, batches, lambda x: model(x, target=x.flip(1)))
    kept = {id(param) for param in net.parameters()}
    return {name: param.detach() for name, param in module.named_parameters() if id(param) in kept}


def train_experts(rank: Rank, module: nn.Sequential, batches: list[Tensor]) -> dict[str, Tensor]:
    """Trains with half of the experts on each rank, and all other weights divided over both; returns whole weights."""
    mesh = _mesh(rank, "edp", "ep")
    experts: Any = module[3]
    experts.group = mesh.get_group("ep")
    experts.up = nn.Parameter(distribute_tensor(experts.up.detach(), mesh["ep"], [Shard(0)]))
    model = megastrategy.DistributedDataParallel(module, _CONFIG, expert_mesh=mesh)
    _train(model, batches, lambda x: _loss(model, x))
    return _whole(module)


def _whole(module: nn.Module) -> dict[str, Tensor]:
    params = {name: param.detach() for name, param in module.named_parameters()}
    return {name: param.full_tensor() if isinstance(param, DTensor) else param for name, param in params.items()}


_CONFIG = megastrategy.DistributedDataParallelConfig(bucket_size=2000)
CASES = {"tensor-parallel": train_tensor_parallel, "pipeline": train_pipeline, "experts": train_experts}
