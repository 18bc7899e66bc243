"""A small language model in stages, and its training on a mesh and in one process."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional

from megastrategy import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from megastrategy._checkpoints.directory_writer import save_directory
from megastrategy.core import OpenDirectory, host_collectives, names_elsewhere
from megastrategy.pipeline import Pipeline, load_whole_state_dict, whole_state_dict

from .tensor_parallel import adamw, whole

VOCAB, WIDTH, SEQUENCE, SAMPLES = 61, 16, 6, 8
"""Of the model, and of a data-parallel rank's batch."""

ROUNDING = 1e-5
"""The bound for weights of AdamW whose gradients were added up in another order: a step magnifies their rounding by up
to lr / eps = 300. Kernels, and so last bits, differ between kinds of processors."""

FROZEN = {"nothing": (), "prefix": (0, 1, 2), "middle": (2, 3), "tail": (4, 5)}
"""By name, the layers that are frozen."""


class Block(nn.Module):
    """A norm, and a layer of a width of its own."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(functional.gelu(self.up(self.norm(x))))


def make_layers(case: Case, tensor_mesh: DeviceMesh | None = None) -> list[nn.Module]:
    """Embedding, four blocks and a head, the same on every rank; cut over the ranks of ``tensor_mesh``, if there is
    one."""
    torch.manual_seed(7)
    embed, head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
    nn.init.normal_(embed.weight, std=0.1)
    if case.tied:
        head.weight = embed.weight
    layers = [embed, *(Block(hidden) for hidden in (24, 32, 40, 48)), head]
    layers = [layer.to(case.dtype) for layer in layers]
    if tensor_mesh is not None:
        parallelize_module(nn.ModuleList(layers), tensor_mesh, plan(sequence_parallel=case.sequence_parallel))
        if case.tied:
            head.weight = embed.weight
    for number in FROZEN[case.frozen]:  # here, as SequenceParallel makes new Parameters, which are trained
        layers[number].requires_grad_(False)
    return layers


def plan(*, sequence_parallel: bool) -> dict[str, ParallelStyle]:
    """torch's plan for the layers; 61 rows of the vocabulary do not divide."""
    along = Shard(1) if sequence_parallel else Replicate()
    styles: dict[str, ParallelStyle] = {
        "0": RowwiseParallel(input_layouts=Replicate(), output_layouts=along),
        "[1-4].up": ColwiseParallel(input_layouts=along),
        "[1-4].down": RowwiseParallel(output_layouts=along),
        "5": ColwiseParallel(input_layouts=along, output_layouts=Replicate()),
    }
    return styles | ({"[1-4].norm": SequenceParallel()} if sequence_parallel else {})


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


PASSES_WHOLE_NUMBERS = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 12)
"""Whether torch's schedules train where integers pass from stage to stage."""


@dataclasses.dataclass(frozen=True)
class Case:
    """Says what is trained. ``split``: the layers of each stage; ``sequence_parallel``: on tensor ranks."""

    split: tuple[int, ...]
    schedule: str = "1F1B"
    frozen: str = "nothing"
    tied: bool = False
    dtype: torch.dtype = torch.float32
    steps: int = 20
    microbatches: int = 4
    clip_norm: float | None = 0.1
    options: tuple[tuple[str, Any], ...] = ()
    sequence_parallel: bool = False


def batch_of(dp_rank: int, step: int) -> tuple[Tensor, Tensor]:
    """Tokens, and those that are to be told."""
    generator = torch.Generator().manual_seed(1000 * dp_rank + step)
    tokens = torch.randint(VOCAB, (SAMPLES, SEQUENCE), generator=generator)
    return tokens, tokens.roll(-1, 1)


@dataclasses.dataclass
class Outcome:
    """``weights``: by name, whole; of a rank those of its stages. ``parts``: as this rank has them. ``state``: the
    optimizer's, where it is."""

    weights: dict[str, Tensor]
    losses: list[float]
    norms: list[float]
    state: dict[str, Any] = dataclasses.field(default_factory=dict)
    parts: dict[str, Tensor] = dataclasses.field(default_factory=dict)


def mesh_of(pp: int, tp: int | None = None) -> DeviceMesh:
    """All ranks of the default group, as stages times data-parallel ranks, times tensor ranks if a number is given."""
    dp = dist.get_world_size() // (pp * (tp or 1))
    if tp is None:
        return init_device_mesh("cpu", (pp, dp), mesh_dim_names=("pp", "dp"))
    return init_device_mesh("cpu", (pp, dp, tp), mesh_dim_names=("pp", "dp", "tp"))


@dataclasses.dataclass
class Trainee:
    """A model and its optimizer on a mesh of ("pp", "dp"), or of ("pp", "dp", "tp")."""

    case: Case
    net: Pipeline
    model: DistributedDataParallel
    optimizer: DistributedOptimizer
    dp_rank: int

    @classmethod
    def make(
        cls, mesh: DeviceMesh, case: Case, loss: Callable[[Tensor, Tensor], Tensor] | None = None, **options: Any
    ) -> Trainee:
        """All ranks together."""
        has_tensor_ranks = "tp" in (mesh.mesh_dim_names or ())
        net = Pipeline(
            make_layers(case, mesh["tp"] if has_tensor_ranks else None),
            case.split,
            loss=loss or loss_of,
            microbatches=case.microbatches,
            schedule=case.schedule,
            mesh=mesh["pp", "tp"] if has_tensor_ranks else mesh["pp"],
        )
        config = DistributedDataParallelConfig(bucket_size=1500, **dict(case.options))
        model = DistributedDataParallel(net, config, process_group=mesh.get_group("dp"), **options)
        return cls(case, net, model, DistributedOptimizer(adamw(model.parameters()), model), mesh.get_local_rank("dp"))

    def train(self, steps: range) -> Outcome:
        losses, norms = list[float](), list[float]()
        for step in steps:
            tokens, targets = batch_of(self.dp_rank, step)
            loss = self.model(tokens, target=targets)
            self.optimizer.zero_grad()
            loss.backward()
            losses.append(loss.item())
            if self.case.clip_norm is not None:
                norms.append(float(self.optimizer.clip_grad_norm_(self.case.clip_norm)))
            self.optimizer.step()
        self.model.finish_param_gather()
        named = dict(self.net.named_parameters())
        parts = {name: getattr(p, "_local_tensor", p).detach().clone() for name, p in named.items()}
        return Outcome({name: whole(param) for name, param in named.items()}, losses, norms, parts=parts)

    def save(self) -> tuple[dict[str, Any], dict[str, Any], dict[str, Tensor]]:
        """Whole weights, optimizer state and main params, where they are."""
        return whole_state_dict(self.net), self.optimizer.state_dict(), self.optimizer.main_params()

    def load(self, saved: tuple[dict[str, Any], dict[str, Any], dict[str, Tensor]]) -> None:
        weights, state, main_params = saved
        load_whole_state_dict(self.net, weights)
        self.optimizer.load_state_dict(state)
        self.optimizer.load_main_params(main_params)

    def save_directory(self, path: Path) -> None:
        state = {"model": self.net.state_dict(), "optimizer": self.optimizer.sharded_state_dict()}
        save_directory(state, {}, path, host_collectives())

    def load_directory(self, path: Path) -> None:
        self.net.load_state_dict(OpenDirectory(path).read_weights("model", self.net, names_elsewhere(self.net)))
        self.optimizer.load_sharded(path)


def train_on(mesh: DeviceMesh, case: Case) -> Outcome:
    """All ranks together."""
    trainee = Trainee.make(mesh, case)
    try:
        outcome = trainee.train(range(case.steps))
        outcome.state = trainee.optimizer.state_dict()
        return outcome
    finally:
        trainee.model.close()


def answers(asked: Sequence[Callable[[DeviceMesh], Any]], pp: int, tp: int | None = None) -> dict[str, Any]:
    """The results of the functions on the mesh of all ranks, by their names: one group of processes for all of them,
    since starting one takes seconds."""
    mesh = mesh_of(pp, tp)
    return {ask.__name__: ask(mesh) for ask in asked}


def train_alone(
    case: Case, dp: int, dp_after: int | None = None, change_at: int | None = None, *, steps: int | None = None
) -> Outcome:
    """Trains in one process with torch alone, on the union of the batches of ``dp`` data-parallel ranks; from step
    ``change_at`` on of ``dp_after``.

    16-bit weights have an fp32 copy that is stepped.
    """
    layers = nn.ModuleList(make_layers(case))
    params = {f"layers.{name}": param for name, param in layers.named_parameters()}
    trained = {name: param for name, param in params.items() if param.requires_grad}
    mains = {name: nn.Parameter(p.detach().float(), requires_grad=p.requires_grad) for name, p in params.items()}
    optimizer, losses, norms = adamw(mains.values()), list[float](), list[float]()
    for step in range(steps or case.steps):
        dp = dp_after if dp_after is not None and step == change_at else dp
        for name in trained:
            mains[name].grad = torch.zeros_like(mains[name])
        total = 0.0
        for dp_rank in range(dp):
            parts = [part.split(SAMPLES // case.microbatches) for part in batch_of(dp_rank, step)]
            for tokens, targets in zip(*parts, strict=True):
                x = tokens
                for layer in layers:
                    x = layer(x)
                loss = loss_of(x, targets) / case.microbatches
                for name, grad in zip(trained, torch.autograd.grad(loss, list(trained.values())), strict=True):
                    mains[name].grad += grad.float() / dp  # type: ignore[operator] # made above
                total += loss.item() if dp_rank == 0 else 0.0
        losses.append(total)
        if case.clip_norm is not None:
            norms.append(float(nn.utils.clip_grad_norm_(mains.values(), case.clip_norm)))
        optimizer.step()
        for name, main in mains.items():
            params[name].detach().copy_(main)
    weights = {f"layers.{name}": p.detach().clone() for name, p in layers.named_parameters(remove_duplicate=False)}
    return Outcome(weights, losses, norms, optimizer.state_dict())
