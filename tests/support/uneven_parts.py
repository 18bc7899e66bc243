"""A model that tensor ranks share unevenly, down to nothing, in every way that a directory has to know."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.nn import functional

from megastrategy import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from megastrategy.core import OpenDirectory, to_host

from .engines import ENGINES
from .tensor_parallel import Mode, whole

ROWS, WIDTH, INNER, FIXED = 10, 12, 43, 5
"""Over four ranks 3, 3, 3 and 1 of 10, 11, 11, 11 and 10 of 43, 2, 2, 1 and 0 of 5. torch looks nothing up in a table
of no rows. Parts of ``up`` take more room on some tensor ranks, so that what comes after them lies elsewhere there."""
NUM_BATCHES = 2
"""In a step, however many data-parallel ranks share them."""


class Uneven(nn.Module):
    """Tied, frozen, replicated and plain parameters, matrices that are cut by rows and by columns, a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(ROWS, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.mix = nn.Linear(WIDTH, 40, bias=False)
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)
        self.fixed = nn.Linear(WIDTH, FIXED)
        self.back = nn.Linear(FIXED, WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, ROWS, bias=False)
        self.head.weight = self.embed.weight
        self.temperature = nn.Parameter(torch.tensor(0.5))

    def forward(self, tokens: Tensor) -> Tensor:
        mixed = self.mix(self.norm(self.embed(tokens)))
        x = mixed[..., :WIDTH] + mixed[..., -WIDTH:]
        x = x + self.down(functional.gelu(self.up(x)))
        x = x + self.back(functional.gelu(self.fixed(x)))
        logits: Tensor = self.head(x).float() * self.temperature.float()
        return functional.cross_entropy(logits.flatten(0, 1), tokens.roll(-1, 1).flatten())


def plan() -> dict[str, ParallelStyle]:
    """Every part stays a DTensor between two layers, or torch would take uneven ones for even ones."""
    columns = {"output_layouts": Shard(-1), "use_local_output": False}
    return {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate()),
        "up": ColwiseParallel(**columns),
        "down": RowwiseParallel(),
        "fixed": ColwiseParallel(**columns),
        "back": RowwiseParallel(),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }


def cut(module: Uneven, mesh: DeviceMesh) -> Uneven:
    """Parallelised over the mesh's tensor ranks, and tied again."""
    parallelize_module(module, mesh["tp"], plan())
    module.head.weight = module.embed.weight
    return module


def make_module(seed: int = 7, dtype: torch.dtype = torch.float32) -> Uneven:
    torch.manual_seed(seed)
    return Uneven().to(dtype)


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    """Two groups and an empty one; parameters not in order, those that will be frozen among them."""
    params = list(module.parameters())
    groups = [{"params": params[::-2], "lr": 2e-3}, {"params": []}, {"params": params[-2::-2]}]
    return torch.optim.AdamW(groups, lr=5e-3, eps=1e-5, amsgrad=True)


def adagrad(module: nn.Module) -> torch.optim.Optimizer:
    """Has state before the first step, and of parameters that are never stepped."""
    return torch.optim.Adagrad(module.parameters(), lr=5e-3, initial_accumulator_value=0.1, eps=1e-5)


@dataclasses.dataclass(frozen=True)
class Kind:
    """How it is trained."""

    mode: Mode = "reduce-scatter"
    dtype: torch.dtype = torch.float32
    optimizer: Any = adamw

    def __str__(self) -> str:
        return f"{self.mode} {str(self.dtype).removeprefix('torch.')} {self.optimizer.__name__}"


@dataclasses.dataclass(frozen=True)
class World:
    """Data-parallel times tensor ranks, of a module that is cut or not."""

    dp: int
    tp: int
    is_cut: bool = True

    def __str__(self) -> str:
        return f"{self.dp}x{self.tp}" if self.is_cut else f"{self.dp} plain"

    @property
    def size(self) -> int:
        return self.dp * self.tp


class Run:
    """A model and its optimizer in a world of processes."""

    def __init__(self, world: World, kind: Kind, mesh: DeviceMesh, seed: int = 7, module: Uneven | None = None) -> None:
        self.mesh = mesh
        self.module = make_module(seed, kind.dtype) if module is None else module
        if world.is_cut:
            cut(self.module, mesh)
        self.module.fixed.weight.requires_grad_(False)  # from the start
        config = DistributedDataParallelConfig(bucket_size=400, **ENGINES[kind.mode])
        self.model = DistributedDataParallel(self.module, config, process_group=mesh.get_group("dp"))
        self.optimizer = DistributedOptimizer(kind.optimizer(self.module), self.model)

    def train(self, steps: range) -> None:
        each = NUM_BATCHES // self.mesh.size(0)
        first = each * self.mesh.get_local_rank("dp")
        for step in steps:
            self.module.up.bias.requires_grad_(step == 0)  # from then on it keeps its state
            self.optimizer.zero_grad()
            for batch in range(first, first + each):
                generator = torch.Generator().manual_seed(100 * step + batch)
                tokens = torch.randint(ROWS, (2, 5), generator=generator)
                self.model.require_backward_grad_sync = batch == first + each - 1
                (self.model(tokens) / each).backward()
            self.optimizer.step()
        self.model.finish_param_gather()

    def state(self) -> dict[str, Any]:
        return {"model": self.module.state_dict(), "optimizer": self.optimizer.sharded_state_dict()}

    def load(self, path: Path) -> None:
        self.module.load_state_dict(OpenDirectory(path).read_weights("model", self.module))
        self.optimizer.load_sharded(path)

    def weights(self) -> dict[str, Tensor]:
        """Whole ones, on every rank. Collective."""
        return {name: whole(param) for name, param in self.module.named_parameters(remove_duplicate=False)}

    def whole(self) -> dict[str, Any]:
        """Everything there is, on rank 0. Collective."""
        state = {"optimizer": self.optimizer.state_dict(), "main_params": self.optimizer.main_params()}
        return to_host({"weights": self.weights(), **state})

    def close(self) -> None:
        self.model.close()
