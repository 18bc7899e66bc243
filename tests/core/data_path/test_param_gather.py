"""overlap_param_gather: when parameters arrive; no code reads one before it has arrived."""

from __future__ import annotations

import copy
import gc
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn import Parameter

from megastrategy import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from megastrategy.core.errors import CollectiveError
from megastrategy.core.events import Event
from tests.support.data_path import buffers_of
from tests.support.doubles import DelayingCollectives, FailingCollectives
from tests.support.processes import run_processes
from tests.support.ranks import run_ranks
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


READERS: dict[str, Callable[[nn.Module, nn.Module], dict[str, Tensor]]] = {
    "state_dict": lambda model, module: module.state_dict(),
    "deepcopy": lambda model, module: copy.deepcopy(module).state_dict(),
    "data": lambda model, module: {"0.weight": module[0].weight.data},
    "arithmetic": lambda model, module: {"2.weight": 1.0 * module[2].weight},
    "in a list": lambda model, module: {"2.bias": torch._foreach_mul([module[2].bias], 1.0)[0]},
    "by address": lambda model, module: (module[4].weight.data_ptr(), {"4.weight": module[4].weight.detach()})[1],
    "to": lambda model, module: module.to(torch.float32).state_dict(),
    "evaluation": lambda model, module: {"loss": model.eval()(torch.ones(1, 20)).detach()},
}


@pytest.mark.parametrize("reader", READERS)
def test_first_read_after_a_step_has_new_weights(reader: str) -> None:
    """With ``overlap_param_gather`` the first read of a parameter waits for its gather, by any kind of access."""
    plain = net()
    for param, value in zip(plain.parameters(), expected_weights(), strict=True):
        param.data = value
    expected = {**plain.state_dict(), "loss": plain(torch.ones(1, 20)).detach()}

    def run(rank: int, group: ProcessGroup) -> None:
        setup = Setup(group)
        assert all(setup.still_gathering()), "gathers were over when step() returned: nothing is tested"
        read = READERS[reader](setup.model, setup.module)
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


def hold_gathers_until_the_module_runs() -> None:
    torch.manual_seed(3)
    module = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    model = DistributedDataParallel(module, DistributedDataParallelConfig(overlap_param_gather=True))
    optimizer = DistributedOptimizer(torch.optim.Adam(model.parameters()), model)
    # The outermost module has no parameters of its own: it runs before any is waited for.
    module_runs = threading.Event()
    module.register_forward_pre_hook(lambda *_: module_runs.set())
    rings: Any = model.engine.collectives._rings  # type: ignore[attr-defined]
    gather = rings.all_gather

    def held(tensor: torch.Tensor) -> None:
        if not module_runs.wait(LIMIT_S):
            raise RuntimeError("the module's buffers waited for the weights")
        gather(tensor)

    model(torch.ones(5, 6)).sum().backward()
    optimizer.step()
    model.finish_param_gather()
    model(torch.ones(5, 6)).sum().backward()
    rings.all_gather = held
    module_runs.clear()
    optimizer.step()
    model(torch.ones(5, 6))
    model.close()


def test_module_buffers_do_not_wait_for_weights() -> None:
    run_processes(2, hold_gathers_until_the_module_runs)


# Reads between a step and the next forward of parameters that are no plain Parameter, with overlapped gathers.


READS: dict[str, Callable[[Any], Tensor]] = {
    "full_tensor": lambda param: param.full_tensor(),
    "to_local": lambda param: param.to_local(),
    "the local tensor": lambda param: param._local_tensor,
    "redistribute": lambda param: param.redistribute(placements=[Shard(1)]).to_local(),
    "norm": lambda param: param.norm().full_tensor(),
}


class Borrows(nn.Module):
    """The second layer's forward reads the first layer's DTensor."""

    def __init__(self, mesh: Any) -> None:
        super().__init__()
        weight = torch.randn(12, 8, generator=torch.Generator().manual_seed(1))
        self.first = nn.ParameterDict({"weight": Parameter(distribute_tensor(weight, mesh, [Shard(0)]))})
        self.second = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        # The second layer's bucket arrives last, so that waiting for it would hide a stale read of the first one.
        local = self.first["weight"].to_local()
        return self.second(x @ local.T @ local)


def train_and_read(overlap: bool | str, read: Callable[[Any], Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Returns the readings after each step and the weights at the end."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    module = Borrows(mesh["tp"])
    group = mesh.get_group("dp")
    model = DistributedDataParallel(
        module,
        DistributedDataParallelConfig(bucket_size=64, overlap_param_gather=overlap),
        group,
        collectives=DelayingCollectives(group, 0.05, ("all_gather",)),
    )
    optimizer = DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.1), model)
    readings = []
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.full((4, 8), 1.0 + dist.get_rank())).square().mean().backward()
        optimizer.step()
        readings.append(read(module.first["weight"]).detach().clone())
    model.close()
    weights = [param.to_local() if isinstance(param, DTensor) else param for param in module.parameters()]
    return readings, [weight.detach() for weight in weights]


def read_both() -> dict[str, list[tuple[list[Tensor], list[Tensor]]]]:
    return {name: [train_and_read(overlap, read) for overlap in (False, True)] for name, read in READS.items()}


def test_dtensor_reads_see_the_step() -> None:
    for answers in run_processes(2, read_both):
        for name, ((readings, weights), (overlapped, overlapped_weights)) in answers.items():
            assert not torch.equal(readings[0], readings[1]), name
            assert all(map(torch.equal, readings, overlapped)), name
            assert all(map(torch.equal, weights, overlapped_weights)), name
