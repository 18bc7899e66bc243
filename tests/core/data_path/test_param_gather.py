"""overlap_param_gather: when parameters arrive; no code reads one before it has arrived."""

from __future__ import annotations

import copy
import gc
import io
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import Parameter
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from megastrategy import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from megastrategy.core.errors import CollectiveError
from megastrategy.core.events import Event, EventKind
from tests.support.data_path import buffers_of
from tests.support.doubles import DelayingCollectives, FailingCollectives
from tests.support.models import awkward_model, images
from tests.support.processes import run_processes
from tests.support.ranks import run_ranks, try_ranks
from tests.support.timeouts import HANG_S

CHOICES = (False, True)


def net() -> nn.Sequential:
    """Three layers whose weights do not come from the generator that all ranks' threads share."""
    module = nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 30), nn.Tanh(), nn.Linear(30, 3))
    generator = torch.Generator().manual_seed(0)
    for param in module.parameters():
        param.data = torch.randn(param.shape, generator=generator) * 0.1
    return module


def config(overlap: bool) -> DistributedDataParallelConfig:
    return DistributedDataParallelConfig(bucket_size=100, overlap_param_gather=overlap)


class Setup:
    """A model with gathers that take a while, one step done."""

    def __init__(
        self, group: ProcessGroup, overlap: bool = True, delay_s: float = 0.02, module: nn.Module | None = None
    ) -> None:
        self.events: list[Event] = []
        self.module: Any = net() if module is None else module
        collectives = DelayingCollectives(group, delay_s, ("all_gather",))
        self.model = DistributedDataParallel(
            self.module, config(overlap), collectives=collectives, listener=self.events.append
        )
        self.optimizer = DistributedOptimizer(torch.optim.AdamW(self.model.parameters(), lr=0.1), self.model)
        self.step()

    def step(self) -> None:
        rank = self.model.engine.collectives.rank
        self.model(torch.full((2, 20), 1.0 + rank)).square().sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def still_gathering(self) -> list[bool]:
        return [type(param) is not Parameter for param in self.module.parameters()]


def expected_weights() -> list[Tensor]:
    def run(rank: int, group: ProcessGroup) -> list[Tensor]:
        setup = Setup(group, False, 0.0)
        return [param.detach().clone() for param in setup.module.parameters()]

    return run_ranks(2, run)[0]


def train(rank: int, group: ProcessGroup, overlap: bool, dtype: torch.dtype) -> tuple[list[float], list[Tensor]]:
    """50 steps of the awkward model with everything in between that a loop may do."""
    module = awkward_model().to(dtype)
    chosen = DistributedDataParallelConfig(bucket_size=200, overlap_param_gather=overlap)
    model = DistributedDataParallel(module, chosen, group)
    optimizer = DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.01), model)
    average = AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    losses, saved = [], {}
    for step in range(50):
        optimizer.zero_grad()
        loss = model(images(rank, step, 0, dtype), step, rank)
        loss.backward()
        losses.append(loss.item())
        if step % 7 == 3:
            optimizer.zero_grad()  # a step without a gradient
        optimizer.step()
        if step % 3 == 1:
            average.update_parameters(module)
        if step % 10 == 4:
            saved = {name: value.clone() for name, value in model.state_dict().items()}
            optimizer.state_dict()
        if step % 10 == 6:
            model.eval()
            with torch.no_grad():
                losses.append(model(images(rank, step, 1, dtype), step, rank).item())
            model.train()
        if step == 31:
            module.load_state_dict({name.removeprefix("module."): value for name, value in saved.items()})
        if step == 40:
            losses.append(sum(param.double().sum().item() for param in copy.deepcopy(module).parameters()))
    tensors = [*model.state_dict().values(), *average.state_dict().values()]
    result = losses, [tensor.clone() for tensor in tensors]
    model.close()
    return result


def readers() -> dict[str, Callable[[nn.Module, nn.Module], Any]]:
    def save(module: nn.Module) -> Any:
        torch.save(module, file := io.BytesIO())
        file.seek(0)
        return torch.load(file, weights_only=False)

    class Own(list[Tensor]):
        """No pytree."""

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, weight: Tensor) -> Tensor:
            return weight * 1.0

    return {
        "state_dict": lambda model, module: module.state_dict(),
        "state_dict of the wrapper": lambda model, module: model.state_dict(),
        "deepcopy": lambda model, module: copy.deepcopy(module).state_dict(),
        "pickle": lambda model, module: save(module).state_dict(),
        "data": lambda model, module: {"0.weight": module[0].weight.data},
        "numpy": lambda model, module: {"0.bias": torch.tensor(module[0].bias.detach().numpy())},
        "tolist": lambda model, module: {"0.bias": torch.tensor(module[0].bias.tolist())},
        "arithmetic": lambda model, module: {"2.weight": 1.0 * module[2].weight},
        "from the right": lambda model, module: {"2.weight": torch.ones(30, 30) * module[2].weight},
        "in a list": lambda model, module: dict(
            zip(("2.bias",), torch._foreach_mul([module[2].bias], 1.0), strict=True)
        ),
        "all in one list, of which some share a bucket": lambda model, module: dict(
            zip(module.state_dict(keep_vars=True), torch._foreach_mul(list(module.parameters()), 1.0), strict=True)
        ),
        "by address": lambda model, module: (module[4].weight.data_ptr(), {"4.weight": module[4].weight.detach()})[1],
        "an autograd function": lambda model, module: {"0.weight": Scaled.apply(module[0].weight)},
        "in a list of its own class": lambda model, module: {"2.bias": torch.cat(Own([module[2].bias]))},
        "to": lambda model, module: module.to(torch.float32).state_dict(),
        "iteration": lambda model, module: {"0.bias": torch.stack(list(module[0].bias))},
        "evaluation": lambda model, module: {"loss": model.eval()(torch.ones(1, 20)).detach()},
        "functional_call": lambda model, module: {
            "loss": torch.func.functional_call(module, dict(module.named_parameters()), (torch.ones(1, 20),)).detach()
        },
        "finish_param_gather": lambda model, module: (model.finish_param_gather(), module.state_dict())[1],
    }


@pytest.mark.parametrize(
    "reader", ["state_dict", "deepcopy", "data", "arithmetic", "in a list", "by address", "to", "evaluation"]
)
def test_first_read_after_a_step_has_new_weights(reader: str) -> None:
    """With ``overlap_param_gather`` the first read of a parameter waits for its gather, by any kind of access."""
    plain = net()
    for param, value in zip(plain.parameters(), expected_weights(), strict=True):
        param.data = value
    expected = {**plain.state_dict(), "loss": plain(torch.ones(1, 20)).detach()}

    def run(rank: int, group: ProcessGroup) -> None:
        setup = Setup(group)
        assert all(setup.still_gathering()), "gathers were over when step() returned: nothing is tested"
        read = readers()[reader](setup.model, setup.module)
        assert read
        for name, value in read.items():
            # Weights are equal to the bit. A forward may round in another way where they begin at another address.
            is_equal = torch.allclose if name == "loss" else torch.equal
            assert is_equal(value, expected[name.removeprefix("module.")]), name
        setup.model.finish_param_gather()
        assert not any(setup.still_gathering())
        setup.model.close()
        assert not any(module._forward_pre_hooks for module in setup.module.modules())

    run_ranks(2, run)


def test_raw_memory_reads_in_forward_are_new() -> None:
    """An extension's kernel takes the memory: no function of torch sees the parameter."""

    class Raw(nn.Linear):
        memory: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if self.memory is None else self.memory.clone()

    def run(rank: int, group: ProcessGroup, overlap: bool) -> Tensor:
        module = net()
        module[2].__class__ = Raw
        setup = Setup(group, overlap, module=module)
        setup.model.finish_param_gather()
        memory = module[2].weight.detach()
        setup.step()
        module[2].memory = memory
        assert (type(module[2].weight) is not Parameter) == overlap
        weight: Tensor = module[2](torch.ones(1))
        setup.model.close()
        return weight

    found = [run_ranks(2, lambda rank, group, o=overlap: run(rank, group, o)) for overlap in CHOICES]
    assert all(map(torch.equal, *found))


@pytest.mark.filterwarnings(r"ignore:`torch\.jit\.\w+` is deprecated:DeprecationWarning")
def test_a_scripted_module_reads_the_new_weights() -> None:
    """Its code reads tensors without a function of torch that Python sees."""

    def scripted() -> nn.Sequential:
        module = net()
        module[2] = torch.jit.script(module[2])
        return module

    modules = {(rank, overlap): scripted() for rank in range(2) for overlap in CHOICES}  # by one thread

    def run(rank: int, group: ProcessGroup, overlap: bool) -> Tensor:
        module = modules[rank, overlap]
        setup = Setup(group, overlap, module=module)
        output: Tensor = module[2](torch.ones(1, 30)).detach()
        setup.model.close()
        return output

    found = [run_ranks(2, lambda rank, group, o=overlap: run(rank, group, o)) for overlap in CHOICES]
    assert all(map(torch.equal, *found))


def test_dropped_wrapper_leaves_no_hooks() -> None:
    def run(rank: int, group: ProcessGroup) -> None:
        setup = Setup(group, delay_s=0.0)
        module = setup.module
        buffers = [weakref.ref(flat) for flat in buffers_of(setup.model)[0]]
        setup.model.finish_param_gather()
        setup.optimizer.zero_grad()
        del setup
        deadline = time.monotonic() + HANG_S
        while any(child._forward_pre_hooks for child in module.modules()):
            assert time.monotonic() < deadline
            gc.collect()  # returns at once while another rank's thread collects
        assert module(torch.ones(1, 20)).isfinite().all()
        del module
        while any(flat() is not None for flat in buffers):
            assert time.monotonic() < deadline
            gc.collect()

    run_ranks(2, run)


def test_layers_wait_for_their_own_bucket_only() -> None:
    def run(rank: int, group: ProcessGroup) -> None:
        setup = Setup(group, delay_s=0.1)
        assert len(setup.model.layout.buckets) >= 3
        with torch.no_grad():
            setup.module[0](torch.ones(1, 20))
        assert setup.still_gathering() == [False, False, True, True, True, True]
        setup.model.close()

    run_ranks(2, run)


@pytest.mark.parametrize("overlap", CHOICES)
def test_gathers_start_and_end_when_the_option_says(overlap: bool) -> None:
    def run(rank: int, group: ProcessGroup) -> None:
        setup = Setup(group, overlap)
        calls: list[int] = []
        inner_step = type(setup.optimizer.optimizer).step
        buckets = len(setup.model.layout.buckets)
        setup.events.clear()

        class Counting(torch.optim.AdamW):
            def step(self, closure: Any = None) -> None:  # type: ignore[override]
                calls.append(sum(event.kind is EventKind.GATHER_START for event in setup.events))
                inner_step(self)

        setup.optimizer.optimizer.__class__ = Counting
        setup.step()
        kinds = [event.kind for event in setup.events]
        started, ended = kinds.count(EventKind.GATHER_START), kinds.count(EventKind.GATHER_END)
        # With True the gathers of the step before end in this one's forward.
        assert (started, ended) == (buckets, buckets)
        assert calls == [0], "one call, and then all gathers"
        last = len(kinds) - 1 - kinds[::-1].index(EventKind.STEP_END)
        assert kinds[:last].count(EventKind.GATHER_START) == 0
        arrived_after = kinds[last:].count(EventKind.GATHER_END)
        assert arrived_after == (0 if overlap else buckets)
        order = [event.index for event in setup.events if event.kind is EventKind.GATHER_START]
        assert order == sorted(order, reverse=True), "the first layers first"
        setup.model.close()

    run_ranks(2, run)


def test_unused_param_arrives_before_next_step() -> None:
    def run(rank: int, group: ProcessGroup, overlap: bool) -> list[Tensor]:
        setup = Setup(group, overlap, delay_s=0.05)
        for _ in range(2):
            setup.model.module = setup.module[:4]
            setup.step()
            setup.model.module = setup.module
        setup.step()
        weights = [param.detach().clone() for param in setup.module.parameters()]
        setup.model.close()
        return weights

    expected, _ = run_ranks(2, lambda rank, group: run(rank, group, False))
    for weights in run_ranks(2, lambda rank, group: run(rank, group, True)):
        assert all(map(torch.equal, weights, expected))


def test_ended_rank_is_named_at_param_read() -> None:
    def run(rank: int, group: ProcessGroup) -> None:
        setup = Setup(group, delay_s=0.0)
        setup.model.finish_param_gather()
        if rank == 1:
            setup.optimizer.step = lambda: 1 / 0
        setup.step()
        try:
            setup.module[0].weight.sum()
        except CollectiveError:
            assert not any(setup.still_gathering()), "it is said once"
            setup.model.close()
            raise

    survivor, dead = try_ranks(2, run, timeout_s=60)
    assert isinstance(dead, ZeroDivisionError)
    assert isinstance(survivor, CollectiveError)
    assert "did not complete" in str(survivor)


def test_step_without_arrived_weights_is_not_done() -> None:
    """Otherwise a save after the error would combine other ranks' old weights with new state. The next step that
    gathers all weights corrects it."""

    def run(rank: int, group: ProcessGroup) -> list[Tensor]:
        module, collectives = net(), FailingCollectives(group)
        model = DistributedDataParallel(module, config(True), collectives=collectives)
        optimizer = DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.1), model)
        numbers = []
        for step in range(3):
            model(torch.full((2, 20), 1.0 + rank)).square().sum().backward()
            if step == 1:
                collectives.fail_at(1, ("all_gather",), on_the_wire=True)
            optimizer.step()
            if step == 1:
                with pytest.raises(CollectiveError):
                    module[0].weight.sum()
                collectives.fail_at(0)
                collectives.close()  # and what is started next is started anew
            numbers.append(optimizer.num_steps)
        model.close()
        assert numbers == [(1, 1), (2, 1), (3, 3)]
        return [param.detach().clone() for param in module.parameters()]

    first, second = run_ranks(2, run)
    assert all(map(torch.equal, first, second))


# The broadcast of a module's buffers, which a forward begins with, while new weights are still on their way.

LIMIT_S = 20.0


def with_buffers() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))


def num_groups() -> int:
    return len(torch.distributed.distributed_c10d._world.pg_map)


def train_a_step(model: DistributedDataParallel, optimizer: DistributedOptimizer, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    model(torch.randn(5, 6, generator=generator)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def wrapped(**options: Any) -> tuple[DistributedDataParallel, DistributedOptimizer]:
    config = DistributedDataParallelConfig(overlap_param_gather=True, **options)
    model = DistributedDataParallel(with_buffers(), config)
    return model, DistributedOptimizer(torch.optim.Adam(model.parameters()), model)


def hold_gathers_until_the_module_runs() -> None:
    model, optimizer = wrapped()
    # The outermost module has no parameters of its own: it runs before any is waited for.
    module_runs = threading.Event()
    model.module.register_forward_pre_hook(lambda *_: module_runs.set())
    rings: Any = model.engine.collectives._rings  # type: ignore[attr-defined]
    gather = rings.all_gather

    def held(tensor: torch.Tensor) -> None:
        if not module_runs.wait(LIMIT_S):
            raise RuntimeError("the module's buffers waited for the weights")
        gather(tensor)

    train_a_step(model, optimizer, torch.distributed.get_rank())
    model.finish_param_gather()
    model(torch.ones(5, 6)).sum().backward()
    rings.all_gather = held
    module_runs.clear()
    optimizer.step()
    model(torch.ones(5, 6))
    model.close()


def test_module_buffers_do_not_wait_for_weights() -> None:
    run_processes(2, hold_gathers_until_the_module_runs)


def count_groups() -> list[int]:
    before, made = num_groups(), []
    for options in ({}, {"broadcast_buffers": False}, {"use_distributed_optimizer": False}):
        model, optimizer = wrapped(**options)
        made.append(num_groups() - before)
        model.close()
        optimizer.optimizer.state_dict()  # gathers the state, and ends the groups
    assert num_groups() == before
    return made


def test_whoever_needs_no_second_group_has_none() -> None:
    assert run_processes(2, count_groups) == [[2, 1, 1]] * 2
