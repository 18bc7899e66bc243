"""Trainings with replicas, whose ranks are threads or processes, and a replay of one in a single process."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import HashStore

from megastrategy import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from megastrategy._replicas import TorchftLink, start_lighthouse
from megastrategy.core import Collectives, Replicas, SingleRankCollectives, make_collectives

from .patience import HANG_S
from .ranks import gloo_group

torchft = pytest.importorskip("torchft", reason="replicas need torchft: pip install 'megastrategy[replicas]'")
logging.getLogger("torchft").setLevel(logging.CRITICAL)  # a traceback for each failed sum, which are the tests' subject

HEARTBEAT_S, SKEW_S, PATIENCE_S = 4.0, 60.0, 120.0
"""Long enough for processes that get a hundredth of a core, as on a machine with other work."""
OPTIMIZERS: Mapping[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adam": lambda params: torch.optim.Adam(params, lr=0.01),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    "muon": lambda params: torch.optim.Muon(params, lr=0.02),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """One training. ``options`` are of the configuration; a step has the gradients of ``accumulate`` batches."""

    optimizer: str = "adam"
    dtype: torch.dtype = torch.float32
    of: int = 2
    ranks: int = 1
    num_epochs: int = 2
    num_batches: int = 4
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    accumulate: int = 1
    minimum: int = 1

    def module(self) -> nn.Module:
        layers = [nn.Linear(8, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 4)]
        if self.optimizer == "muon":
            layers = [nn.Linear(8, 24, bias=False), nn.Tanh(), nn.Linear(24, 4, bias=False)]
        # Threads have one default generator, which the trial of an optimizer in another thread may seed meanwhile.
        generator = torch.Generator().manual_seed(7)
        for layer in (layer for layer in layers if isinstance(layer, nn.Linear)):
            bound = layer.in_features**-0.5
            for param in layer.parameters():
                nn.init.uniform_(param, -bound, bound, generator=generator)
        return nn.Sequential(*layers).to(self.dtype)

    def config(self) -> DistributedDataParallelConfig:
        return DistributedDataParallelConfig(**{"bucket_size": 300, **self.options})

    def batch(self, epoch: int, number: int, slot: int, rank: int) -> Tensor:
        generator = torch.Generator().manual_seed(((epoch * 100 + number) * 10 + slot) * 10 + rank)
        return torch.randn(6, 8, generator=generator).to(self.dtype)

    def window(self, epoch: int, number: int, slot: int, rank: int) -> list[Tensor]:
        """The batches of the step that ends with this one; an epoch's last step may have fewer."""
        first = number - number % self.accumulate
        return [self.batch(epoch, each, slot, rank) for each in range(first, number + 1)]

    def ends_window(self, number: int) -> bool:
        return (number + 1) % self.accumulate == 0 or number + 1 == self.num_batches

    def batches(self, epoch: int, slot: int, rank: int) -> list[Tensor]:
        return [self.batch(epoch, number, slot, rank) for number in range(self.num_batches)]


def loss_of(outputs: Tensor) -> Tensor:
    return outputs.float().square().mean()


Hook = Callable[[str], None]
"""Called with the name of a point of a step, before or after which a test lets something happen."""


class HookedLink(TorchftLink):
    """The link to other replicas, with points at which tests interfere."""

    def __init__(
        self, slot: int, address: str, hook: Hook, skew_s: float = SKEW_S, patience_s: float = PATIENCE_S
    ) -> None:
        super().__init__(slot, address, HEARTBEAT_S, skew_s, patience_s, "localhost")
        self.hook, self.num_sums, self.num_votes = hook, 0, 0
        self.failing_votes: Collection[int] = ()  # from 1

    def join(self, ranks: Collectives, state: Callable[[], Any]) -> None:
        def serve() -> Any:
            self.hook("serving")
            return state()

        super().join(ranks, serve)
        self._manager._client._client = _Questions(self._manager._client._client, self.hook)

    def _receive(self, state: Any) -> None:
        self.hook("taking")
        super()._receive(state)

    def confirm(self, word: bytes) -> bool:
        self.hook("before meeting")
        are_here = super().confirm(word)
        self.num_sums = 0
        if are_here:
            self.hook("after meeting")
        return are_here

    def meet(self, *, joins: bool) -> Any:
        self.hook("before meeting" if joins else "before meeting again")
        found = super().meet(joins=joins)
        self.num_sums = 0
        self.hook("after meeting" if joins else "after meeting again")
        return found

    def mean_(self, tensor: Tensor) -> None:
        self.hook(f"before sum {self.num_sums}")
        super().mean_(tensor)
        self.num_sums += 1
        self.hook(f"after sum {self.num_sums - 1}")

    def vote(self) -> bool:
        self.hook("before vote")
        self.num_votes += 1
        if self.num_votes in self.failing_votes:
            self.fail()
        voted = super().vote()
        self.hook("after vote")
        return voted

    def fail(self) -> None:
        """Lets the next vote or meeting fail, as a connection does that is lost."""
        self._manager.report_error(RuntimeError("injected"))


class _Questions:
    """torchft's client, with points before each question for the members, and before a request for their state."""

    def __init__(self, client: Any, hook: Hook) -> None:
        self._client, self._hook = client, hook

    def _quorum(self, **arguments: Any) -> Any:
        self._hook("question")
        quorum = self._client._quorum(**arguments)
        if quorum.heal:
            self._hook("asking")
        return quorum

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)


@dataclasses.dataclass
class Run:
    """One rank's training, and what it did.

    Attributes:
        steps: epoch, batch, the members that stepped it, and whether this replica had a part in it.
    """

    case: Case
    slot: int
    rank: int
    replicas: Replicas
    module: nn.Module
    model: DistributedDataParallel
    optimizer: DistributedOptimizer
    steps: list[tuple[int, int, tuple[int, ...], bool]] = dataclasses.field(default_factory=list)

    def train(self, on_step: Callable[[Run], None] = lambda run: None) -> None:
        for epoch in self.replicas.epochs(self.case.num_epochs):
            for batch in self.replicas.batches(self.case.batches(epoch, self.slot, self.rank)):
                self.train_on(batch)
                on_step(self)

    def train_on(self, batch: Tensor) -> None:
        replicas, is_last = self.replicas, self.case.ends_window(self.replicas.batch)
        with contextlib.nullcontext() if is_last else self.model.no_sync():
            (loss_of(self.model(batch)) / self.case.accumulate).backward()
        if is_last:
            self.steps.append((replicas.epoch, replicas.batch, replicas.members, not replicas.is_skipped))
            self.optimizer.step()
            self.optimizer.zero_grad()

    def outcome(self) -> dict[str, Any]:
        return {**outcome_of(self.module, self.optimizer), "steps": self.steps}


def outcome_of(module: nn.Module, *optimizers: DistributedOptimizer) -> dict[str, Any]:
    """Weights, and the state of this rank's shards: equal in all replicas after a training."""
    shard_sets = [optimizer._impl.shard_set for optimizer in optimizers]
    for shard_set in shard_sets:
        shard_set.states.split()
    states = [state for optimizer in optimizers for state in optimizer.optimizer.state.values()]
    return {
        "weights": [param.detach().clone() for param in module.parameters()],
        "buffers": [buffer.clone() for buffer in module.buffers()],
        "state": [value.clone() for state in states for value in state.values() if isinstance(value, Tensor)],
        "main_params": [shard.main.clone() for each in shard_sets for shard in each.shards.values()],
    }


def prepare(
    case: Case,
    slot: int,
    rank: int,
    address: str,
    collectives: Collectives | None,
    hook: Hook = lambda point: None,
    *,
    module: nn.Module | None = None,
    skew_s: float = SKEW_S,
    patience_s: float = PATIENCE_S,
) -> Run:
    module = case.module() if module is None else module
    link = HookedLink(slot, address, hook, skew_s, patience_s)
    replicas = Replicas(link, of=case.of, slot=slot, minimum=case.minimum, patience_s=patience_s)
    model = DistributedDataParallel(module, case.config(), collectives=collectives, replicas=replicas)
    optimizer = DistributedOptimizer(OPTIMIZERS[case.optimizer](module.parameters()), model)
    return Run(case, slot, rank, replicas, module, model, optimizer)


@contextlib.contextmanager
def lighthouse(*, skew_s: float = SKEW_S, heartbeat_s: float = HEARTBEAT_S) -> Iterator[str]:
    server = start_lighthouse("[::]:0", heartbeat_s=heartbeat_s, skew_s=skew_s)
    try:
        yield f"http://localhost:{server.address().rpartition(':')[2]}"
    finally:
        server.shutdown()


def run_replicas(
    case: Case, job: Callable[[int, int, str, Collectives], Any], *, timeout_s: float = HANG_S, skew_s: float = SKEW_S
) -> list[list[Any]]:
    """``job(slot, rank, lighthouse, collectives)`` in a thread for each rank of each replica.

    Returns results, or exceptions with their traceback as a note, by slot and rank.
    """
    outcomes: list[list[Any]] = [[None] * case.ranks for _ in range(case.of)]

    def target(slot: int, rank: int, store: HashStore, address: str) -> None:
        try:
            collectives: Collectives = SingleRankCollectives()
            if case.ranks > 1:
                collectives = make_collectives(gloo_group(store, rank, case.ranks, 120.0), torch.device("cpu"))
            outcomes[slot][rank] = job(slot, rank, address, collectives)
        except BaseException as error:  # noqa: BLE001 - handed to the test, whatever it is
            error.add_note("".join(traceback.format_exception(error)))
            outcomes[slot][rank] = error

    with lighthouse(skew_s=skew_s) as address:
        threads = []
        for slot in range(case.of):
            store = HashStore()
            for rank in range(case.ranks):
                threads.append(threading.Thread(target=target, args=(slot, rank, store, address), daemon=True))  # noqa: PERF401
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout_s)
        assert not any(thread.is_alive() for thread in threads), "a replica hangs"
    return outcomes


def results(outcomes: Iterable[Iterable[Any]]) -> list[list[Any]]:
    """The results of :func:`run_replicas`; an error among them is raised."""
    failed = [each for by_rank in outcomes for each in by_rank if isinstance(each, BaseException)]
    assert not failed, "\n".join(error.__notes__[-1] for error in failed)
    return [list(by_rank) for by_rank in outcomes]


def assert_equal(one: Any, other: Any) -> None:
    """Compares two outcomes to the bit."""
    for name in ("weights", "buffers", "state", "main_params"):
        assert len(one[name]) == len(other[name]), name
        for a, b in zip(one[name], other[name], strict=True):
            assert torch.equal(a, b), name


def mean_grads(
    params: Sequence[Tensor], members: Sequence[int], ranks: int, losses_of: Callable[[int, int], Iterable[Tensor]]
) -> list[Tensor]:
    """The fp32 means of the gradients of ``losses_of(slot, rank)``, added up in the order in which replicas do.

    Sums are over at most two ranks and two replicas, so their order makes no difference.
    """
    assert ranks <= 2
    assert len(members) <= 2
    totals = [torch.zeros_like(param, dtype=torch.float32) for param in params]
    for slot in members:
        inside = [torch.zeros_like(total) for total in totals]
        for rank in range(ranks):
            of_rank = [torch.zeros_like(total) for total in totals]
            for loss in losses_of(slot, rank):
                for sums, grad in zip(of_rank, torch.autograd.grad(loss, params), strict=True):
                    sums.add_(grad.float())
            for sums, local in zip(inside, of_rank, strict=True):
                sums.add_(local / ranks)
        for total, sums in zip(totals, inside, strict=True):
            total.add_(sums)
    return [total / len(members) for total in totals]


def replay(
    case: Case,
    steps: Mapping[tuple[int, int], Sequence[int]],
    *,
    autocast: bool = False,
    clip_value: float = float("inf"),
    schedule: Callable[[torch.optim.Optimizer], Any] = lambda optimizer: None,
    schedule_steps: int = 1,
) -> list[Tensor]:
    """The weights after a training in one process with the same replicas in each step.

    ``schedule`` makes a schedule, which steps so often after each step.
    """
    module = case.module()
    mains = [nn.Parameter(param.detach().float()) for param in module.parameters()]
    optimizer = OPTIMIZERS[case.optimizer](mains)
    scheduler = schedule(optimizer)
    for (epoch, number), members in sorted(steps.items()):

        def losses_of(slot: int, rank: int, epoch: int = epoch, number: int = number) -> Iterator[Tensor]:
            for batch in case.window(epoch, number, slot, rank):
                with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                    outputs = module(batch)
                yield loss_of(outputs) / case.accumulate

        for main, grad in zip(
            mains, mean_grads(list(module.parameters()), members, case.ranks, losses_of), strict=True
        ):
            main.grad = grad.clamp_(-clip_value, clip_value)
        optimizer.step()
        for _ in range(schedule_steps if scheduler is not None else 0):
            scheduler.step()
        with torch.no_grad():
            for param, main in zip(module.parameters(), mains, strict=True):
                param.copy_(main)
    return [param.detach() for param in module.parameters()]


def assert_replayed(
    case: Case, weights: Sequence[Tensor], steps: Mapping[tuple[int, int], Sequence[int]], **options: Any
) -> None:
    """Compares weights to the bit with a replay; ``options`` are those of :func:`replay`."""
    for weight, expected in zip(weights, replay(case, steps, **options), strict=True):
        assert torch.equal(weight, expected)


def assert_together(case: Case, outcomes: Sequence[Sequence[dict[str, Any]]]) -> None:
    """Checks that all replicas were members in every step, and that the weights are those of a replay."""
    steps = members_by_step([outcome["steps"] for by_rank in outcomes for outcome in by_rank])
    every = tuple(range(case.of))
    assert steps == {(epoch, batch): every for epoch in range(case.num_epochs) for batch in range(case.num_batches)}
    assert_replayed(case, outcomes[0][0]["weights"], steps)


def members_by_step(runs: Sequence[Sequence[tuple[int, int, tuple[int, ...], bool]]]) -> dict[tuple[int, int], Any]:
    """The members of each step, by epoch and batch; what a rank logged last, and died of, counts least."""
    found: dict[tuple[int, int], Any] = {}
    for is_last in (True, False):
        for steps in runs:
            for place, (epoch, number, members, has_part) in enumerate(steps):
                if has_part and is_last == (place == len(steps) - 1):
                    found[epoch, number] = members
    return found
