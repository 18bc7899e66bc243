"""A small mixture of experts whose experts are divided over some of the data-parallel ranks, and its training on a mesh
and in one process.

Nothing is mocked: tokens go to the ranks of their experts and back in torch's own all-to-all.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from megastrategy import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer

from .tensor_parallel import whole

WIDTH, HIDDEN, TOKENS = 8, 12, 10


class _Exchange(torch.autograd.Function):
    """Rows to the ranks of a group and back: ``sent[r]`` rows to rank r, ``received[r]`` from it."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.sizes, ctx.group = (sent, received), group
        out = rows.new_empty(sum(received), rows.shape[1])
        dist.all_to_all_single(out, rows.contiguous(), received, sent, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        sent, received = ctx.sizes
        back = grads[0].new_empty(sum(sent), grads[0].shape[1])
        dist.all_to_all_single(back, grads[0].contiguous(), sent, received, group=ctx.group)
        return back, None, None, None


def experts_of(rank: int, num_experts: int, size: int) -> range:
    """The experts of a rank: as DTensor's ``Shard(0)`` cuts, rounded up as far as they go."""
    each = -(-num_experts // size)
    return range(min(rank * each, num_experts), min((rank + 1) * each, num_experts))


class Experts(nn.Module):
    """Two stacked layers of each expert, and a router that sends a token to its best two.

    ``uses_idle``: whether an expert without tokens gets zeros as its gradient, or none.
    """

    def __init__(self, num_experts: int, *, uses_idle: bool = True) -> None:
        super().__init__()
        self.num_experts, self.uses_idle, self.mesh = num_experts, uses_idle, None
        self.router = nn.Linear(WIDTH, num_experts, bias=False)
        self.up = nn.Parameter(torch.randn(num_experts, WIDTH, HIDDEN) * WIDTH**-0.5)
        self.down = nn.Parameter(torch.randn(num_experts, HIDDEN, WIDTH) * HIDDEN**-0.5)
        self.aux_loss = torch.zeros(())
        self.counts = torch.zeros(num_experts)  # of the last forward's tokens
        self.bias: Tensor
        self.register_buffer("bias", torch.zeros(num_experts))

    def divide(self, mesh: DeviceMesh) -> None:
        """Leaves this rank its experts, DTensors over ``mesh``, of one dimension."""
        self.mesh = mesh  # type: ignore[assignment] # None until here
        for name in ("up", "down"):
            self._parameters[name] = nn.Parameter(distribute_tensor(getattr(self, name), mesh, [Shard(0)]))

    def forward(self, x: Tensor) -> Tensor:
        scores = (self.router(x) + self.bias).softmax(-1)
        weights, chosen = scores.topk(2, -1)
        self.aux_loss = scores.mean(0).square().sum() * 0.1
        ids, order = chosen.flatten().sort(stable=True)
        rows = x[order // 2]
        counts = self.counts = torch.bincount(ids, minlength=self.num_experts)
        out = self._run(rows, counts) if self.mesh is None else self._run_elsewhere(rows, counts, self.mesh)
        back = torch.empty_like(out).index_copy(0, order, out)
        return x + (back.view(len(x), 2, WIDTH) * weights.unsqueeze(-1)).sum(1)

    def _run(self, rows: Tensor, counts: Tensor, up: Tensor | None = None, down: Tensor | None = None) -> Tensor:
        """``rows`` are sorted by expert, ``counts`` of each."""
        up, down = self.up if up is None else up, self.down if down is None else down
        if not self.uses_idle and len(rows) == 0:
            return rows
        outs = [
            functional.gelu(mine @ up[number]) @ down[number]
            for number, mine in enumerate(rows.split(counts.tolist()))
            if self.uses_idle or len(mine)
        ]
        return torch.cat([rows[:0], *outs])

    def _run_elsewhere(self, rows: Tensor, counts: Tensor, mesh: DeviceMesh) -> Tensor:
        group, size, rank = mesh.get_group(), mesh.size(), mesh.get_local_rank()
        every = [torch.empty_like(counts) for _ in range(size)]
        dist.all_gather(every, counts, group=group)
        own = experts_of(rank, self.num_experts, size)
        sent = [int(counts[experts_of(r, self.num_experts, size)].sum()) for r in range(size)]
        here = torch.stack(every)[:, list(own)]  # [from, expert]
        came = _Exchange.apply(rows, sent, here.sum(1).tolist(), group)
        # By sender and expert as they come, by expert and sender as they are run.
        pieces = came.split(here.flatten().tolist())
        by_expert = [pieces[r * len(own) + e] for e in range(len(own)) for r in range(size)]
        up, down = self.up.to_local(), self.down.to_local()  # type: ignore[operator] # DTensors
        out = self._run(torch.cat([came[:0], *by_expert]), here.sum(0), up, down)
        done = out.split(here.t().flatten().tolist())
        in_order = [done[e * size + r] for r in range(size) for e in range(len(own))]
        result: Tensor = _Exchange.apply(torch.cat([came[:0], *in_order]), here.sum(1).tolist(), sent, group)
        return result


class Model(nn.Module):
    """A dense layer, two layers of experts, and a head."""

    def __init__(self, num_experts: int, *, uses_idle: bool = True) -> None:
        super().__init__()
        self.num_used, self.recomputes = 2, ""  # layers
        self.embed, self.head = nn.Linear(4, WIDTH), nn.Linear(WIDTH, 3)
        self.layers = nn.ModuleList([Experts(num_experts, uses_idle=uses_idle) for _ in range(2)])

    def divide(self, mesh: DeviceMesh) -> None:
        for layer in self.layers:
            layer.divide(mesh)  # type: ignore[operator] # Experts

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x)
        layers = [*self.layers[: self.num_used]]
        for layer in [layers[0], *layers] if self.recomputes else layers:
            if self.recomputes:
                hidden = checkpoint(layer, hidden, use_reentrant=self.recomputes == "reentrant")
            else:
                hidden = layer(hidden)
        out: Tensor = self.head(hidden)
        return out

    def loss(self, x: Tensor, y: Tensor, call: Callable[[Tensor], Tensor]) -> Tensor:
        total = functional.cross_entropy(call(x), y)
        for layer in self.layers[: self.num_used]:
            total = total + layer.aux_loss  # type: ignore[operator] # Experts
        return total

    def prepare(self, case: Case, step: int) -> None:
        """Crowds all tokens on the first two experts, and leaves the last layer out, in the steps that a case names."""
        self.num_used = 1 if step in case.shallow_steps else 2
        self.recomputes = case.recomputes
        for layer in self.layers:
            layer.bias[:2] = 10.0 if step in case.crowded_steps else 0.0  # type: ignore[index, operator]


@dataclasses.dataclass(frozen=True)
class Case:
    """``ep``: ranks over which the experts are divided. ``syncs_each``: whether each microbatch's backward reduces.
    ``recomputes``: "reentrant" or "not reentrant", and the first layer is used twice. ``crowded_steps``: all tokens are
    for the first two experts. ``shallow_steps``: the last layer is unused.
    """

    ep: int
    num_experts: int = 4
    microbatches: int = 1
    syncs_each: bool = False
    uses_idle: bool = True
    clip_norm: float | None = 0.5
    optimizer: str = "sgd"
    dtype: torch.dtype = torch.float32
    steps: int = 6
    recomputes: str = ""
    crowded_steps: tuple[int, ...] = ()
    shallow_steps: tuple[int, ...] = ()
    options: tuple[tuple[str, Any], ...] = ()

    def config(self) -> DistributedDataParallelConfig:
        return DistributedDataParallelConfig(**{"bucket_size": 200, **dict(self.options)})

    def make_optimizer(self, params: Iterable[Tensor]) -> torch.optim.Optimizer:
        """SGD shows wrong factors, which AdamW hides."""
        if self.optimizer == "adamw":
            return torch.optim.AdamW(params, lr=3e-3, eps=1e-5)
        return torch.optim.SGD(params, lr=0.3, momentum=0.9)


def make_module(case: Case) -> Model:
    torch.manual_seed(5)
    return Model(case.num_experts, uses_idle=case.uses_idle).to(case.dtype)


def batch_of(dp_rank: int, step: int, microbatch: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(10_000 * dp_rank + 100 * step + microbatch)
    return torch.randn(TOKENS, 4, generator=generator), torch.randint(3, (TOKENS,), generator=generator)


@dataclasses.dataclass
class Outcome:
    """``weights`` and ``state``: of the whole model, by name and by number. ``dense``: this rank's bytes of parameters
    that are no experts'."""

    weights: dict[str, Tensor]
    norms: list[float]
    state: dict[Any, Any]
    dense: dict[str, bytes] = dataclasses.field(default_factory=dict)


@functools.cache
def expert_mesh(ep: int) -> DeviceMesh:
    """All ranks of the default group: neighbours have different experts. One for all cases of a process: each mesh has
    groups of its own, which stay."""
    return init_device_mesh("cpu", (dist.get_world_size() // ep, ep), mesh_dim_names=("edp", "ep"))


@dataclasses.dataclass
class Trainee:
    case: Case
    module: Model
    model: DistributedDataParallel
    optimizer: DistributedOptimizer

    @classmethod
    def make(cls, case: Case) -> Trainee:
        """All ranks together. Dense weights of ranks other than 0 are zero before, so that a broadcast is seen."""
        mesh, module = expert_mesh(case.ep), make_module(case)
        module.divide(mesh["ep"])
        if dist.get_rank() > 0:
            with torch.no_grad():
                module.embed.weight.zero_()
        model = DistributedDataParallel(module, case.config(), expert_mesh=mesh)
        return cls(case, module, model, DistributedOptimizer(case.make_optimizer(module.parameters()), model))

    def train(self, steps: Iterable[int]) -> list[float]:
        """Returns the norms."""
        norms, case, rank = [], self.case, dist.get_rank()
        for step in steps:
            self.module.prepare(case, step)
            self.optimizer.zero_grad()
            for number in range(case.microbatches):
                syncs = case.syncs_each or number == case.microbatches - 1
                with contextlib.nullcontext() if syncs else self.model.no_sync():
                    x, y = batch_of(rank, step, number)
                    loss = self.module.loss(x.to(case.dtype), y, self.model) / case.microbatches
                    loss.backward()
            if case.clip_norm is not None:
                norms.append(float(self.optimizer.clip_grad_norm_(case.clip_norm)))
            self.optimizer.step()
        self.model.finish_param_gather()
        return norms

    def outcome(self, norms: list[float]) -> Outcome:
        weights = {name: whole(param) for name, param in self.module.named_parameters()}
        dense = {
            name: bytes(param.detach().flatten().view(torch.uint8).numpy())
            for name, param in self.module.named_parameters()
            if not hasattr(param, "placements")
        }
        return Outcome(weights, norms, self.optimizer.state_dict()["state"], dense)


def train_on_ranks(case: Case) -> Outcome:
    """All ranks together."""
    trainee = Trainee.make(case)
    outcome = trainee.outcome(trainee.train(range(case.steps)))
    trainee.model.check_replicas()
    trainee.model.close()
    return outcome


def train_alone(case: Case, dp: int) -> Outcome:
    """Trains in one process with torch alone, on the batches of all ``dp`` ranks."""
    module = make_module(case)
    optimizer = case.make_optimizer(module.parameters())
    norms = []
    for step in range(case.steps):
        module.prepare(case, step)
        optimizer.zero_grad()
        for number in range(case.microbatches):
            for rank in range(dp):
                x, y = batch_of(rank, step, number)
                (module.loss(x.to(case.dtype), y, module) / (dp * case.microbatches)).backward()
        if case.clip_norm is not None:
            norms.append(float(nn.utils.clip_grad_norm_(module.parameters(), case.clip_norm)))
        optimizer.step()
    weights = {name: param.detach().clone() for name, param in module.named_parameters()}
    return Outcome(weights, norms, optimizer.state_dict()["state"])


def train_each(cases: dict[str, Case]) -> dict[str, Outcome]:
    """All ranks together."""
    return {name: train_on_ranks(case) for name, case in cases.items()}


def assert_equal(found: list[Outcome], expected: Outcome, tolerance: float) -> None:
    """``found``: of each rank."""
    for rank, outcome in enumerate(found):
        assert outcome.norms == pytest.approx(expected.norms, rel=100 * tolerance)
        torch.testing.assert_close(outcome.weights, expected.weights, rtol=0.0, atol=tolerance)
        assert outcome.dense == found[0].dense, "to the bit"
        if rank == 0:
            torch.testing.assert_close(outcome.state, expected.state, rtol=0.0, atol=20 * tolerance)
