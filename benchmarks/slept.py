"""``python -m benchmarks.slept``: simulated steps beside the engine's own, where work and wire take no processor.

Layers sleep in forward and backward, the optimizer sleeps for each element, and each collective lasts as long as a ring
of the given link would take, after the real one has met all ranks. So what is compared is the schedule alone (what is
launched when, behind what, and waited for where), on any machine, however busy. One profile of two ranks and the
default options is what all steps are simulated from. What a processor adds, ``benchmarks.predictions`` measures.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import click
import torch
from torch import Tensor, nn
from torch.distributed import HashStore, ProcessGroup, ProcessGroupGloo

from megastrategy import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from megastrategy.core.collectives.gloo import GlooCollectives
from megastrategy.core.collectives.interface import Handle
from megastrategy.tools.plan.recorded_work import Measured, measure
from megastrategy.tools.plan.simulator import Link, Processor
from megastrategy.tools.plan.steps import Network, simulate_step
from megastrategy.tools.profiling import Recorder
from megastrategy.tools.timeline import RankEvents

_LINK = Link(bytes_per_ms=20_000.0, hop_ms=1.0)
_LAYERS, _WIDTH, _FORWARD_S, _BACKWARD_S, _STEP_S_PER_NUMEL = 10, 256, 0.005, 0.010, 3e-8
_SKIP, _STEPS, _SHARE = 2, 6, 0.2


class _Sleeps(torch.autograd.Function):
    """Passes on what it gets, after a while in each direction; the weight gets a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        time.sleep(_FORWARD_S)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        time.sleep(_BACKWARD_S)
        return grad, torch.zeros_like(ctx.saved_tensors[0])


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(_WIDTH, _WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = _Sleeps.apply(x, self.weight)
        return result


class _SleepingSGD(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        stepped = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        time.sleep(_STEP_S_PER_NUMEL * sum(p.numel() for p in stepped))


class _SleptCollectives(GlooCollectives):
    """Each collective lasts as long as the link's ring, from when all ranks have met."""

    def __init__(self, group: ProcessGroup, link: Link) -> None:
        super().__init__(group)
        self._link, self._next_s = link, 0.0

    def _ring_s(self, nbytes: int, rounds: int = 1) -> float:
        hops = rounds * (self.size - 1)
        return (hops * self._link.hop_ms + hops * nbytes / self.size / self._link.bytes_per_ms) / 1e3

    def all_reduce(self, tensor: Tensor, scale: float, *, scale_sum: bool = False) -> Handle:
        self._next_s = self._ring_s(tensor.nbytes, 2)
        return super().all_reduce(tensor, scale, scale_sum=scale_sum)

    def all_reduce_max(self, tensor: Tensor) -> Handle:
        self._next_s = self._ring_s(tensor.nbytes, 2)
        return super().all_reduce_max(tensor)

    def reduce_scatter(self, tensor: Tensor, scale: float, *, scale_sum: bool = False) -> Handle:
        self._next_s = self._ring_s(tensor.nbytes)
        return super().reduce_scatter(tensor, scale, scale_sum=scale_sum)

    def reduce_scatter_into(self, sums: Tensor, tensor: Tensor, scale: float, *, scale_sum: bool = False) -> Handle:
        self._next_s = self._ring_s(tensor.nbytes)
        return super().reduce_scatter_into(sums, tensor, scale, scale_sum=scale_sum)

    def all_gather(self, tensor: Tensor) -> Handle:
        self._next_s = self._ring_s(tensor.nbytes)
        return super().all_gather(tensor)

    def _start(self, what: str, run: Callable[[], object]) -> Handle:
        lasts_s, self._next_s = self._next_s, 0.0

        def timed() -> None:
            begun_s = time.perf_counter()
            run()
            time.sleep(max(0.0, begun_s + lasts_s - time.perf_counter()))

        return super()._start(what, timed)


def _group(store: HashStore, rank: int, size: int) -> ProcessGroup:
    options = ProcessGroupGloo._Options()
    options._timeout = timedelta(seconds=60)
    device = ProcessGroupGloo.create_device(hostname="127.0.0.1")
    options._devices = [device] * (2 if size == 2 else 1)
    group = ProcessGroup(store, rank, size)
    backend = ProcessGroupGloo(store, rank, size, options)
    group._register_backend(torch.device("cpu"), ProcessGroup.BackendType.GLOO, backend)
    group._set_default_backend(ProcessGroup.BackendType.GLOO)
    return group


def record(num_ranks: int, link: Link, accumulate: int, options: dict[str, Any]) -> list[RankEvents]:
    """Trains on ranks that are threads, and returns what a profile would."""
    store, found = HashStore(), {}

    def train(rank: int) -> None:
        done: list[bool] = []
        recorder = Recorder(_SKIP, _STEPS, lambda: done.append(True))
        collectives = _SleptCollectives(_group(store, rank, num_ranks), link)
        net = nn.Sequential(*(_Layer() for _ in range(_LAYERS)))
        config = DistributedDataParallelConfig(**options)
        model = DistributedDataParallel(net, config, listener=recorder, collectives=collectives)
        recorder.follow(model)
        optimizer = DistributedOptimizer(_SleepingSGD(model.parameters(), lr=0.1), model)
        x = torch.ones(1, requires_grad=True)
        while not done:
            for number in range(accumulate):
                if number < accumulate - 1:
                    with model.no_sync():
                        model(x).sum().backward()
                else:
                    model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        model.finish_param_gather()
        taken = recorder.take()
        assert taken.recorded is not None
        # What is slept is seen by the clock, as on a device that is not the host.
        found[rank] = dataclasses.replace(taken, recorded=dataclasses.replace(taken.recorded, device_type="slept"))
        model.close()

    threads = [threading.Thread(target=train, args=(rank,)) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [RankEvents(rank, [found[rank]]) for rank in range(num_ranks)]


def cases(which: str) -> Iterator[tuple[float, int, int, dict[str, Any]]]:
    """Yields rates to the profile's, ranks, microbatches and options."""
    numel = _LAYERS * _WIDTH**2
    for scale in (0.5, 1.0, 2.0, 10.0):
        for num_ranks in (2, 4):
            for accumulate in (1, 4):
                for size in (None, numel // 10, numel // 2):
                    if which in ("all", f"{num_ranks}x{accumulate}"):
                        yield scale, num_ranks, accumulate, {"bucket_size": size}
    for num_ranks in (2, 4):
        for options in (
            {"overlap_param_gather": "forward"},
            {"overlap_param_gather": False},
            {"use_distributed_optimizer": False},
            {"overlap_grad_reduce": False},
            {"grad_buffer": "pooled"},
        ):
            if which in ("all", "options"):
                yield 1.0, num_ranks, 1, {"bucket_size": numel // 10, **options}


def fastest_ms(ranks: list[RankEvents]) -> float:
    """The slowest rank's time from step to step, in the fastest of the steps: what else a machine does adds to it."""
    starts = [[step.start_ns for step in rank.models[0].steps] for rank in ranks]
    periods = [[(b - a) / 1e6 for a, b in itertools.pairwise(of_rank)] for of_rank in starts]
    return min(map(max, zip(*periods, strict=True)))


def predicted_ms(measured: Measured, scale: float, num_ranks: int, accumulate: int, options: dict[str, Any]) -> float:
    """The step as it is simulated from the profile."""
    assert measured.link is not None
    link = dataclasses.replace(measured.link, bytes_per_ms=measured.link.bytes_per_ms * scale)
    work = dataclasses.replace(measured.work, num_microbatches=accumulate)
    config = DistributedDataParallelConfig(**options)
    return simulate_step(work, config, num_ranks, Network(link), Processor()).step_ms


@click.command(help=__doc__)
@click.option("--which", default="all", show_default=True, help="2x1 for two ranks and one microbatch, or options.")
def slept(which: str) -> None:
    """The command."""
    profiled = measure(record(2, _LINK, 1, {}), _SHARE)
    click.echo(f"{profiled.link}; {profiled.step_ms:.1f} ms, simulated {profiled.simulated_ms:.1f}")
    errors = []
    for scale, num_ranks, accumulate, options in cases(which):
        link = dataclasses.replace(_LINK, bytes_per_ms=_LINK.bytes_per_ms * scale)
        real_ms = fastest_ms(record(num_ranks, link, accumulate, options))
        simulated_ms = predicted_ms(profiled, scale, num_ranks, accumulate, options)
        errors.append(simulated_ms / real_ms - 1)
        row = (scale, num_ranks, accumulate, options, f"{simulated_ms:.0f}", f"{real_ms:.0f}", f"{errors[-1]:+.1%}")
        click.echo(f"| {' | '.join(map(str, row))} |")
    sizes = [abs(error) for error in errors]
    click.echo(f"{len(sizes)} cases: median {statistics.median(sizes):.1%}, worst {max(sizes):.1%}")


if __name__ == "__main__":
    slept()
