"""A small language model that torch's ``parallelize_module`` cuts, and its training on a mesh and in one process."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional

from megastrategy import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer

from .engines import ENGINES

SEQUENCE = 8

FLATTENS_SEQUENCES = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 12)
"""Whether a linear layer that every tensor rank has whole can be given a DTensor cut along its sequence: torch 2.11
raises "Attempted to flatten multiple dimensions", also without megastrategy (docs/tensor_parallel.md)."""

Mode = Literal["reduce-scatter", "all-reduce", "pooled", "flattened", "forward", "instances"]


@dataclasses.dataclass(frozen=True)
class Case:
    """Says what is trained.

    ``vocab``: rows of the embedding; with 509 the tensor ranks have parts of different sizes.
    """

    mode: Mode = "reduce-scatter"
    sequence_parallel: bool = True
    accumulate: int = 1
    tied: bool = False
    dtype: torch.dtype = torch.float32
    vocab: int = 512
    steps: int = 20
    clip_norm: float | None = 0.1
    options: tuple[tuple[str, Any], ...] = ()

    def config(self) -> DistributedDataParallelConfig:
        return DistributedDataParallelConfig(bucket_size=20_000, **{**ENGINES[self.mode], **dict(self.options)})


class Block(nn.Module):
    """A norm, a layer that every tensor rank has whole, and two that they share."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(width), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(functional.gelu(self.up(self.mixed(self.norm(x)))))

    def mixed(self, x: Tensor) -> Tensor:
        if FLATTENS_SEQUENCES or not isinstance(x, DTensor) or not x.placements[0].is_shard():
            return self.mix(x)
        weight = self.mix.weight.to_local(grad_placements=[Partial()])  # type: ignore[operator] # a DTensor
        return DTensor.from_local(functional.linear(x.to_local(), weight), x.device_mesh, x.placements)


class LanguageModel(nn.Module):
    """Embedding, blocks, norm, head, and a number that no plan names."""

    def __init__(self, vocab: int, *, tied: bool, width: int = 128) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList([Block(width), Block(width)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocab, bias=False)
        self.temperature = nn.Parameter(torch.tensor(0.5))
        nn.init.normal_(self.embed.weight, std=0.1)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x)).float() * self.temperature.float()
        return logits

    def loss(self, logits: Tensor, tokens: Tensor) -> Tensor:
        return functional.cross_entropy(logits.flatten(0, 1), tokens.roll(-1, 1).flatten())


def plan(*, sequence_parallel: bool) -> dict[str, ParallelStyle]:
    """torch's plan for :class:`LanguageModel`. Under sequence parallelism ``mix`` is whole on every rank, and its
    gradient a sum over them."""
    along = Shard(1) if sequence_parallel else Replicate()
    styles: dict[str, ParallelStyle] = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=along),
        "head": ColwiseParallel(input_layouts=along, output_layouts=Replicate()),
        "blocks.*.up": ColwiseParallel(input_layouts=along),
        "blocks.*.down": RowwiseParallel(output_layouts=along),
    }
    if sequence_parallel:
        styles |= {name: SequenceParallel() for name in ("norm", "blocks.*.norm", "blocks.*.mix")}
    return styles


def make_module(case: Case, mesh: DeviceMesh | None) -> LanguageModel:
    """The model, the same on every rank; parallelised over ``mesh`` (one dimension) if there is one."""
    torch.manual_seed(11)
    module = LanguageModel(case.vocab, tied=case.tied).to(case.dtype)
    if mesh is not None:
        parallelize_module(module, mesh, plan(sequence_parallel=case.sequence_parallel))
        if case.tied:
            module.head.weight = module.embed.weight
    return module


def tokens_of(case: Case, dp_rank: int, step: int, microbatch: int) -> Tensor:
    """The batch of one data-parallel rank."""
    generator = torch.Generator().manual_seed(10_000 * dp_rank + 100 * step + microbatch)
    return torch.randint(case.vocab, (2, SEQUENCE), generator=generator)


def adamw(params: Any) -> torch.optim.Optimizer:
    """With an eps large enough that noise in a gradient of nothing is not a step."""
    return torch.optim.AdamW(params, lr=3e-3, eps=1e-5)


def whole(tensor: Tensor) -> Tensor:
    """All of a parameter, or of a gradient, in memory of its own."""
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach().clone()


@dataclasses.dataclass
class Outcome:
    """``replicas``: the parameters that every tensor rank has whole, as this one has them. ``state``: torch's, of the
    optimizer, where one process trained alone."""

    weights: dict[str, Tensor]
    losses: list[float]
    norms: list[Tensor]
    replicas: dict[str, bytes] = dataclasses.field(default_factory=dict)
    state: dict[str, Any] = dataclasses.field(default_factory=dict)


def meshes(tp: int) -> DeviceMesh:
    """All ranks of the default group as data-parallel times tensor ranks."""
    return init_device_mesh("cpu", (torch.distributed.get_world_size() // tp, tp), mesh_dim_names=("dp", "tp"))


@dataclasses.dataclass
class Trainee:
    """A model and its optimizer on a mesh of ("dp", "tp")."""

    mesh: DeviceMesh
    case: Case
    module: LanguageModel
    model: DistributedDataParallel
    optimizer: DistributedOptimizer

    @classmethod
    def make(cls, mesh: DeviceMesh, case: Case, *, parallel: bool = True) -> Trainee:
        """All ranks together. ``parallel``: whether the module is parallelised, or left as it is."""
        module = make_module(case, mesh["tp"] if parallel else None)
        model = DistributedDataParallel(module, case.config(), process_group=mesh.get_group("dp"))
        return cls(mesh, case, module, model, DistributedOptimizer(adamw(model.parameters()), model))

    def train(self, steps: range) -> tuple[list[float], list[Tensor]]:
        """Returns the losses of every microbatch and the norms of every step."""
        losses, norms = list[float](), list[Tensor]()
        for step in steps:
            self.optimizer.zero_grad()
            for microbatch in range(self.case.accumulate):
                losses.append(self.backward(step, microbatch))
            if self.case.clip_norm is not None:
                norms.append(self.optimizer.clip_grad_norm_(self.case.clip_norm))
            self.optimizer.step()
        self.model.finish_param_gather()
        return losses, norms

    def backward(self, step: int, microbatch: int) -> float:
        """One microbatch of this rank's."""
        last = microbatch == self.case.accumulate - 1
        with contextlib.nullcontext() if last else self.model.no_sync():
            tokens = tokens_of(self.case, self.mesh.get_local_rank("dp"), step, microbatch)
            loss = self.module.loss(self.model(tokens), tokens) / self.case.accumulate
            loss.backward()
        return loss.item()

    def weights(self) -> dict[str, Tensor]:
        """Whole ones, by name. Collective."""
        return {name: whole(param) for name, param in self.module.named_parameters()}

    def replicas(self) -> dict[str, bytes]:
        """The parameters that every tensor rank has whole, as this one has them."""
        return {
            name: bytes((p._local_tensor if isinstance(p, DTensor) else p).detach().flatten().view(torch.uint8).numpy())
            for name, p in self.module.named_parameters()
            if not isinstance(p, DTensor) or p.placements[0].is_replicate()
        }


def train_on(mesh: DeviceMesh, case: Case, *, parallel: bool = True) -> Outcome:
    """Trains on a mesh of ("dp", "tp"), all ranks together."""
    trainee = Trainee.make(mesh, case, parallel=parallel)
    try:
        losses, norms = trainee.train(range(case.steps))
        return Outcome(trainee.weights(), losses, norms, trainee.replicas())
    finally:
        trainee.model.close()


def train_alone(case: Case, dp: int) -> Outcome:
    """Trains in one process with torch alone, on the union of the batches that ``dp`` data-parallel ranks have.

    16-bit weights have an fp32 copy that is stepped.
    """
    module = make_module(case, None)
    params = dict(module.named_parameters())
    mains = {name: nn.Parameter(p.detach().float()) for name, p in params.items()}
    optimizer = adamw(mains.values())
    losses, norms = list[float](), list[Tensor]()
    for step in range(case.steps):
        for main in mains.values():
            main.grad = torch.zeros_like(main)
        for microbatch in range(case.accumulate):
            for dp_rank in range(dp):
                tokens = tokens_of(case, dp_rank, step, microbatch)
                loss = module.loss(module(tokens), tokens) / case.accumulate
                for name, grad in zip(params, torch.autograd.grad(loss, list(params.values())), strict=True):
                    main_grad = mains[name].grad
                    assert main_grad is not None
                    main_grad += grad.float() / dp
                losses.append(loss.item())
        if case.clip_norm is not None:
            norms.append(torch.nn.utils.clip_grad_norm_(mains.values(), case.clip_norm))
        optimizer.step()
        for name, main in mains.items():
            params[name].detach().copy_(main)
    state = optimizer.state_dict()
    return Outcome({name: p.detach().clone() for name, p in params.items()}, losses, norms, state=state)
