"""Replicas in the processes of one job: one leaves, and comes back with other weights, as a restarted process would."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchft.coordination import LighthouseServer

from megastrategy import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    DistributedOptimizer,
    GradScaler,
    Replicas,
)

from .processes import run_processes
from .timeouts import HANG_S

HEARTBEAT_S, SKEW_S, PATIENCE_S = 1.0, 60.0, 240.0
OF = 2
TOGETHER, ALONE, END = 3, 6, 9
"""The steps after which replica 1 leaves, replica 0 waits for it, and both end."""


def wait_until_asked(address: str) -> None:
    """Waits until one replica has asked for a quorum: the next one that asks has it in its quorum.

    A heartbeat is not enough. Members of the last quorum that have all asked wait for no replica that has not.
    """
    deadline = time.monotonic() + HANG_S / 2
    status = ""
    while "[1/1 participants healthy]" not in status:
        assert time.monotonic() < deadline, status
        with urllib.request.urlopen(f"{address}/status") as page:
            status = page.read().decode()


def start_lighthouse(heartbeat_s: float) -> Any:
    """Starts torchft's lighthouse in this process."""
    milliseconds = {"join_timeout_ms": int(1000 * SKEW_S), "heartbeat_timeout_ms": int(1000 * heartbeat_s)}
    return LighthouseServer(bind="[::]:0", min_replicas=1, **milliseconds)


@contextlib.contextmanager
def lighthouse() -> Iterator[str]:
    """The address of a lighthouse of its own."""
    server = start_lighthouse(HEARTBEAT_S)
    try:
        yield server.address()
    finally:
        server.shutdown()


class Net(nn.Module):
    """A batch norm, a layer that only some batches use, and an awkward number of elements."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(7, 33), nn.BatchNorm1d(33)
        self.rare, self.last = nn.Linear(33, 33), nn.Linear(33, 5)

    def forward(self, x: Tensor, *, uses_rare: bool) -> Tensor:
        x = self.norm(self.first(x)).relu()
        x = self.rare(x) if uses_rare else x
        result: Tensor = self.last(x)
        return result


def adamw(params: list[nn.Parameter]) -> list[torch.optim.Optimizer]:
    return [torch.optim.AdamW(params, lr=1e-2, eps=1e-4)]


def momentum(params: list[nn.Parameter]) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(params, lr=0.05, momentum=0.9)]


def muon(params: list[nn.Parameter]) -> list[torch.optim.Optimizer]:
    matrices = [param for param in params if param.dim() == 2]
    rest = [param for param in params if param.dim() != 2]
    return [torch.optim.Muon(matrices, lr=1e-2), *adamw(rest)]


def two(params: list[nn.Parameter]) -> list[torch.optim.Optimizer]:
    return [*adamw(params[:3]), *momentum(params[3:])]


@dataclasses.dataclass(frozen=True)
class Case:
    """Says what is trained; of the ``microbatches`` of a step only the last is synchronised."""

    optimizers: Callable[[list[nn.Parameter]], list[torch.optim.Optimizer]] = adamw
    options: tuple[tuple[str, Any], ...] = ()
    dtype: torch.dtype = torch.float32
    ranks: int = 2
    microbatches: int = 1
    scales: bool = False
    counts_tokens: bool = False

    def config(self) -> DistributedDataParallelConfig:
        return DistributedDataParallelConfig(**{"bucket_size": 600, **dict(self.options)})

    def batch(self, slot: int, rank: int, step: int, microbatch: int) -> Tensor:
        seed = ((100 * slot + rank) * 100 + step) * 10 + microbatch
        num = 4 + (3 * slot + rank if self.counts_tokens else 0)
        return torch.randn(num, 7, generator=torch.Generator().manual_seed(seed)).to(self.dtype)

    def uses_rare(self, slot: int, step: int) -> bool:
        """Replica 0 uses the layer in every second step, replica 1 in every third."""
        return step % (2 + slot) == 0


class Training:
    """One rank of one replica, from its start to its end."""

    def __init__(self, case: Case, address: str, group: dist.ProcessGroup, slot: int, seed: int) -> None:
        self.case, self.slot, self.rank = case, slot, dist.get_rank(group)
        self.replicas = Replicas(
            OF, slot, lighthouse=address, skew_s=SKEW_S, patience_s=PATIENCE_S, process_group=group
        )
        torch.manual_seed(seed)
        self.module = Net().to(case.dtype)
        self.model = DistributedDataParallel(self.module, case.config(), group, replicas=self.replicas)
        inner = case.optimizers(list(self.module.parameters()))
        self.optimizers = [DistributedOptimizer(one, self.model) for one in inner]
        self.scaler = GradScaler("cpu", init_scale=256.0, enabled=case.scales)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizers[0], 2, 0.8)
        self.replicas.register("schedule", self.schedule.state_dict, self.schedule.load_state_dict)
        self.replicas.register("scaler", self.scaler.state_dict, self.scaler.load_state_dict)
        self.healed_in = -1  # the number of the step

    def run(self, end: int) -> None:
        """Trains until so many steps are made."""
        while self.replicas.step < end and not self.replicas.should_stop:
            self._step(self.replicas.step)

    def _step(self, step: int) -> None:
        case = self.case
        for microbatch in range(case.microbatches):
            is_last = microbatch == case.microbatches - 1
            with contextlib.nullcontext() if is_last else self.model.no_sync():
                x = case.batch(self.slot, self.rank, step, microbatch)
                outputs = self.model(x, uses_rare=case.uses_rare(self.slot, step))
                loss = outputs.float().square().mean() / case.microbatches
                if case.counts_tokens:
                    self.model.count_tokens(len(x))
                    loss = outputs.float().square().mean() * len(x)
                self.scaler.scale(loss).backward()
        for optimizer in self.optimizers:
            self.scaler.unscale_(optimizer) if case.scales else None
            optimizer.clip_grad_norm_(1.0)
            self.scaler.step(optimizer)
            optimizer.zero_grad()
        self.scaler.update()
        if self.replicas.healed:
            self.healed_in = self.replicas.step - 1
        if self.replicas.dropped:
            self.replicas.restore()
        else:
            self.schedule.step()

    def outcome(self) -> dict[str, Any]:
        states = [optimizer.state_dict() for optimizer in self.optimizers]
        return {
            "weights": {name: param.detach().clone() for name, param in self.module.named_parameters()},
            "buffers": {name: buffer.clone() for name, buffer in self.module.named_buffers()},
            "states": states if self.rank == 0 else None,
            "schedule": self.schedule.state_dict(),
            "scale": self.scaler.get_scale(),
            "healed in": self.healed_in,
            "steps": self.replicas.step,
        }


class SmallTraining:
    """One rank of one replica of two, whose batches are of ones."""

    def __init__(self, address: str, slot: int, groups: list[Any], *, width: int = 4, seed: int = 0, **options: Any):
        options = {"skew_s": SKEW_S, "patience_s": PATIENCE_S} | options
        self.replicas = Replicas(OF, slot, lighthouse=address, process_group=groups[slot], **options)
        torch.manual_seed(seed)
        module = nn.Sequential(nn.Linear(3, width), nn.Linear(width, 1))
        config = DistributedDataParallelConfig(check_for_nan_in_grad=True, bucket_size=4)
        self.model = DistributedDataParallel(module, config, groups[slot], replicas=self.replicas)
        self.optimizer = DistributedOptimizer(torch.optim.AdamW(self.model.parameters()), self.model)

    def step(self, value: float = 1.0) -> None:
        self.optimizer.zero_grad()
        self.model(torch.full((2, 3), value)).square().mean().backward()
        self.optimizer.step()

    def close(self) -> None:
        self.replicas.close()
        self.model.close()


def leave_and_come_back(case: Case, alone: int, address: str) -> dict[str, Any]:
    """A process's job: replica 1 leaves after ``TOGETHER`` steps, and comes back when replica 0 has made ``alone``."""
    slot = dist.get_rank() // case.ranks
    groups = [dist.new_group(list(range(s * case.ranks, (s + 1) * case.ranks))) for s in range(OF)]

    def make(is_first: bool) -> Training:
        return Training(case, address, groups[slot], slot, int(not is_first))

    result: dict[str, Any] = play(slot, make, alone, address)
    return result


def end_one_after_the_other(case: Case, address: str) -> dict[str, Any]:
    """A process's job: replica 0 ends after ``TOGETHER`` steps, and replica 1 would make more."""
    slot = dist.get_rank() // case.ranks
    groups = [dist.new_group(list(range(s * case.ranks, (s + 1) * case.ranks))) for s in range(OF)]
    training = Training(case, address, groups[slot], slot, 0)
    training.run(END if slot else TOGETHER)
    training.replicas.finish()
    return training.outcome()


def play(slot: int, make: Callable[[bool], Any], alone: int, address: str) -> Any:
    """Trains so, and returns the outcome; ``make``: starts this rank, for the first time or again."""
    training = make(True)
    training.run(TOGETHER)
    dist.barrier()
    if slot == 1:
        training.replicas.close()
        training.model.close()
    else:
        training.run(alone)
    dist.barrier()
    if slot == 1:
        training = make(False)
    else:
        wait_until_asked(address)
    training.run(END)
    training.replicas.finish()
    return training.outcome()


def train_plainly(case: Case, healed_in: int) -> dict[str, Tensor]:
    """The same training in one process with torch alone; returns the weights.

    ``healed_in``: the number of the step in which replica 1 came back, without a part of the gradient.
    """
    torch.manual_seed(0)
    module = Net().to(case.dtype)
    optimizers = case.optimizers(list(module.parameters()))
    schedule = torch.optim.lr_scheduler.StepLR(optimizers[0], 2, 0.8)
    for step in range(END):
        slots = [0] if TOGETHER <= step <= healed_in else [0, 1]
        losses = []
        num_tokens = 0
        for slot in slots:
            for rank in range(case.ranks):
                for microbatch in range(case.microbatches):
                    x = case.batch(slot, rank, step, microbatch)
                    loss = module(x, uses_rare=case.uses_rare(slot, step)).float().square().mean()
                    losses.append(loss * len(x) if case.counts_tokens else loss)
                    num_tokens += len(x) if case.counts_tokens else 1
        (sum(losses) / num_tokens).backward()  # type: ignore[union-attr] # a tensor
        for optimizer in optimizers:
            torch.nn.utils.clip_grad_norm_([p for g in optimizer.param_groups for p in g["params"]], 1.0)
            optimizer.step()
            optimizer.zero_grad()
        schedule.step()
    return {name: param.detach() for name, param in module.named_parameters()}


def run_in_replicas(job: Callable[..., Any], ranks: int, *arguments: Any) -> list[list[Any]]:
    """Returns what ``job(*arguments, address)`` returns, by replica and rank."""
    with lighthouse() as address:
        found = run_processes(OF * ranks, functools.partial(job, *arguments, address))
    return [found[slot * ranks : (slot + 1) * ranks] for slot in range(OF)]


def assert_equal(first: Any, second: Any, where: str = "") -> None:
    """Compares nested values to the bit."""
    if isinstance(first, Tensor):
        assert first.dtype == second.dtype, where
        assert torch.equal(first, second), where
    elif isinstance(first, dict):
        assert first.keys() == second.keys(), where
        for key in first:
            assert_equal(first[key], second[key], f"{where}.{key}")
    elif isinstance(first, list | tuple):
        assert len(first) == len(second), where
        for number, (one, other) in enumerate(zip(first, second, strict=True)):
            assert_equal(one, other, f"{where}[{number}]")
    else:
        assert first == second, (where, first, second)
