"""Counts the host's work in a steady step: operators, each a kernel at least on an accelerator, and Python's bytecodes.

    python -m benchmarks.step_costs [--engines ours ddp]

Both counts are exact under any load. This process is rank 0 of 8 over torch's fake backend, which sends nothing, and
the engine arranges its work as on an accelerator. Operators are counted in a GPT of 148 parameters in 8 buckets.
Bytecodes are counted with clipping, in a model of the same parameters whose forward and backward run in C. Two further
models (148 parameters in 37 buckets, 580 in 37) show how bytecodes grow with parameters and with buckets.
"""

import argparse
import contextlib
import dataclasses
import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any, Protocol, Self
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megastrategy import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from megastrategy.core import devices
from megastrategy.core.collectives import BackendCollectives

from .cases import LanguageModel, gpt, next_token_loss
from .gpu_check.counts import Operations

DP_SIZE = 8
STEPS_BEFORE = 4
"""Layouts, states and caches are made in the first steps."""
PHASES = ("zero_grad", "forward", "backward", "clip", "step")
LEARNING_RATE = 1e-4


class Engine(Protocol):
    """One engine around a model and its AdamW."""

    model: nn.Module

    @property
    def num_buckets(self) -> int: ...
    def no_sync(self) -> contextlib.AbstractContextManager[Any]: ...
    def zero_grad(self) -> None: ...
    def clip(self) -> None: ...
    def step(self) -> None: ...


class Alone:
    """The model and AdamW without ranks: the work that no engine can take away."""

    def __init__(self, module: nn.Module, num_buckets: int) -> None:
        self.model = module
        self.params = list(module.parameters())
        self.num_buckets = num_buckets
        self.optimizer = torch.optim.AdamW(self.params, lr=LEARNING_RATE, fused=True)

    def no_sync(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def clip(self) -> None:
        nn.utils.clip_grad_norm_(self.params, 1.0)

    def step(self) -> None:
        self.optimizer.step()


class TorchDDP(Alone):
    """torch DDP with bucket views and fused AdamW, which steps 16-bit weights themselves."""

    def __init__(self, module: nn.Module, num_buckets: int) -> None:
        super().__init__(module, num_buckets)
        size_mb = bucket_numel(module, num_buckets) * next(module.parameters()).element_size() / 2**20
        self.model = nn.parallel.DistributedDataParallel(module, bucket_cap_mb=size_mb, gradient_as_bucket_view=True)
        self.model.register_comm_hook(dist.distributed_c10d._get_default_group(), _reduce_over_fake_ranks)

    def no_sync(self) -> contextlib.AbstractContextManager[Any]:
        return self.model.no_sync()  # type: ignore[operator, no-any-return]


def _reduce_over_fake_ranks(group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Reduces as torch DDP does by itself: collectives of the fake backend have no future, for which its C++ asks."""
    group.allreduce([bucket.buffer()])
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


class Floor(Alone):
    """The least that a distributed optimizer needs, with nothing checked: a hook that adds to ``main_grad`` and counts,
    a scale and a reduce-scatter for each bucket, one AdamW call on a flat shard of each, one copy to 16 bits, gathers.
    """

    def __init__(self, module: nn.Module, num_buckets: int) -> None:
        self.model = module
        self.group = dist.distributed_c10d._get_default_group()
        self.is_synced = True
        params = [*module.parameters()][::-1]
        dtype, limit = params[0].dtype, bucket_numel(module, num_buckets)
        self.grads, self.weights, self.shard_grads, self.shards = [], [], [], []
        self.num_params: list[int] = []
        self.missing: list[int] = []
        bucket: list[nn.Parameter] = []
        for param in params:
            bucket.append(param)
            if sum(p.numel() for p in bucket) >= limit or param is params[-1]:
                self._add_bucket(bucket, dtype)
                bucket = []
        mains = self.shards if dtype == torch.float32 else [shard.float() for shard in self.shards]
        self.mains = [nn.Parameter(main) for main in mains]
        for main, grad in zip(self.mains, self.shard_grads, strict=True):
            main.grad = grad
        self.optimizer = torch.optim.AdamW(self.mains, lr=LEARNING_RATE, fused=True)
        self.handles: list[Any] = []
        self.num_buckets = len(self.grads)

    def _add_bucket(self, params: Sequence[nn.Parameter], dtype: torch.dtype) -> None:
        numel = sum(-(-param.numel() // 64) * 64 for param in params)
        numel += -numel % (64 * DP_SIZE)
        grads, weights = torch.zeros(numel), torch.zeros(numel, dtype=dtype)
        start, bucket = 0, len(self.grads)
        for param in params:
            view = weights[start : start + param.numel()].view_as(param)
            view.copy_(param.detach())
            param.data = view
            grad = grads[start : start + param.numel()].view_as(param)
            param.register_post_accumulate_grad_hook(self._hook(bucket, grad))
            start += -(-param.numel() // 64) * 64
        self.grads.append(grads)
        self.weights.append(weights)
        self.shard_grads.append(grads[: numel // DP_SIZE])
        self.shards.append(weights[: numel // DP_SIZE])
        self.num_params.append(len(params))
        self.missing.append(len(params))

    def _hook(self, bucket: int, main_grad: Tensor) -> Callable[[Tensor], None]:
        missing = self.missing

        def add(param: Tensor) -> None:
            main_grad.add_(param.grad)  # type: ignore[arg-type]
            param.grad = None
            if self.is_synced:
                missing[bucket] -= 1
                if not missing[bucket]:
                    self._launch(bucket)

        return add

    def _launch(self, bucket: int) -> None:
        self.grads[bucket].mul_(1 / DP_SIZE)
        self.handles.append(self.group._reduce_scatter_base(self.shard_grads[bucket], self.grads[bucket]))

    def _finish(self) -> None:
        for handle in self.handles:
            handle.wait()
        self.handles.clear()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        self.is_synced = False
        yield
        self.is_synced = True

    def zero_grad(self) -> None:
        torch._foreach_zero_(self.grads)
        self.missing[:] = self.num_params

    @torch.no_grad()
    def clip(self) -> None:
        self._finish()
        squares = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(self.shard_grads))) ** 2
        self.group.allreduce([squares]).wait()
        torch._foreach_mul_(self.shard_grads, torch.clamp(1.0 / (squares.sqrt() + 1e-6), max=1.0))

    @torch.no_grad()
    def step(self) -> None:
        self._finish()
        self.optimizer.step()
        if self.mains[0].dtype != self.shards[0].dtype:
            torch._foreach_copy_(self.shards, self.mains)
        gathers = zip(self.weights, self.shards, strict=True)
        for handle in [self.group._allgather_base(weights, shard) for weights, shard in gathers]:
            handle.wait()


class Ours:
    """This engine, over the backend's own collectives as on an accelerator."""

    def __init__(self, module: nn.Module, num_buckets: int, **options: Any) -> None:
        config = DistributedDataParallelConfig(bucket_size=bucket_numel(module, num_buckets), **options)
        collectives = BackendCollectives(dist.distributed_c10d._get_default_group())
        self.model = self.wrapper = DistributedDataParallel(module, config, collectives=collectives)
        inner = torch.optim.AdamW(module.parameters(), lr=LEARNING_RATE, fused=True)
        self.optimizer = DistributedOptimizer(inner, self.wrapper)

    @property
    def num_buckets(self) -> int:
        return len(self.wrapper.layout.buckets)

    def no_sync(self) -> contextlib.AbstractContextManager[Any]:
        return self.wrapper.no_sync()

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def clip(self) -> None:
        self.optimizer.clip_grad_norm_(1.0)

    def step(self) -> None:
        self.optimizer.step()


ENGINES: dict[str, Callable[[nn.Module, int], Engine]] = {
    "alone": Alone,
    "ddp": TorchDDP,
    "floor": Floor,
    "ours": Ours,
    "ours-overlap-param-gather": lambda module, buckets: Ours(module, buckets, overlap_param_gather=True),
    "ours-all-reduce": lambda module, buckets: Ours(module, buckets, use_distributed_optimizer=False),
}


def bucket_numel(module: nn.Module, num_buckets: int) -> int:
    """Returns the size of a bucket, in elements, for about ``num_buckets`` buckets."""
    return -(-sum(param.numel() for param in module.parameters()) // num_buckets)


# --- models ----------------------------------------------------------------------------------------------------------


class Gpt(nn.Module):
    """A GPT that returns its loss: 148 parameters if it has 12 blocks."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.model: LanguageModel = gpt(64, 16, 64, depth)
        self.tokens = torch.arange(17).unsqueeze(0)  # not a module buffer, which would be broadcast

    def forward(self) -> Tensor:
        return next_token_loss(self.model, self.tokens)  # type: ignore[arg-type]


class ReadyGradients(nn.Module):
    """Has the parameters of another module, and a forward and a backward of four operators that loop in C."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.all = tuple(module.parameters())

    def forward(self) -> Tensor:
        return torch.stack(torch._foreach_norm(self.all)).sum()


# --- counting --------------------------------------------------------------------------------------------------------


class Bytecodes:
    """Counts the bytecodes that this thread runs while it is entered."""

    def __init__(self) -> None:
        self.total = 0

    def _trace(self, frame: FrameType, event: str, argument: object) -> Any:
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        if event == "opcode":
            self.total += 1
        return self._trace

    def __enter__(self) -> Self:
        self._previous = sys.gettrace()
        sys.settrace(self._trace)
        return self

    def __exit__(self, *exception: object) -> None:
        sys.settrace(self._previous)


class OperatorsAndCollectives(Operations):
    """Counts collectives, too."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.namespace == "c10d":
            self.counts[str(func)] += 1
        return super().__torch_dispatch__(func, types, args, kwargs)


@dataclasses.dataclass(frozen=True)
class Counts:
    """Counts of one step by phase."""

    by_phase: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.by_phase.values())


def count_step(engine: Engine, counter: type[Any], *, microbatches: int = 1, clips: bool = False) -> Counts:
    """Returns the counts of the step after :data:`STEPS_BEFORE` others."""
    counts = dict.fromkeys(PHASES, 0)

    def run(phase: str, call: Callable[[], Any], is_counted: bool) -> Any:
        if not is_counted:
            return call()
        with counter() as counted:
            result = call()
        counts[phase] += counted.total
        return result

    for step in range(STEPS_BEFORE + 1):
        is_last = step == STEPS_BEFORE
        run("zero_grad", engine.zero_grad, is_last)
        for number in range(microbatches):
            window = contextlib.nullcontext() if number == microbatches - 1 else engine.no_sync()
            with window:
                loss = run("forward", engine.model, is_last)
                run("backward", loss.backward, is_last)
        if clips:
            run("clip", engine.clip, is_last)
        run("step", engine.step, is_last)
    return Counts(counts)


def operators(name: str, dtype: torch.dtype, *, microbatches: int = 1, clips: bool = False) -> Counts:
    """Returns the operators and collectives of a step of the GPT; an operator over a list of tensors is one."""
    engine = ENGINES[name](make_gpt(12, dtype), 8)
    return count_step(engine, OperatorsAndCollectives, microbatches=microbatches, clips=clips)


def bytecodes(engine: Engine) -> Counts:
    """Returns the bytecodes of a step with clipping."""
    return count_step(engine, Bytecodes, clips=True)


@dataclasses.dataclass(frozen=True)
class Slopes:
    """The growth of a count with a parameter and with a bucket, and the rest."""

    per_param: float
    per_bucket: float
    rest: float


def slopes(name: str, dtype: torch.dtype) -> Slopes:
    """Returns the slopes of the bytecodes of a step with clipping, from three sizes."""
    totals, nums_params, nums_buckets = [], [], []
    for depth, num_buckets in ((12, 8), (12, 37), (48, 37)):
        module = make_gpt(depth, dtype)
        engine = ENGINES[name](ReadyGradients(module), num_buckets)
        totals.append(bytecodes(engine).total)
        nums_params.append(len(list(module.parameters())))
        nums_buckets.append(engine.num_buckets)
    sizes = torch.tensor([nums_params, nums_buckets, [1, 1, 1]], dtype=torch.float64).T
    solution = torch.linalg.solve(sizes, torch.tensor(totals, dtype=torch.float64))
    return Slopes(*solution.tolist())


def make_gpt(depth: int, dtype: torch.dtype) -> Gpt:
    torch.manual_seed(0)
    return Gpt(depth).to(dtype)


@contextlib.contextmanager
def one_rank_of_eight() -> Iterator[None]:
    """Makes this process rank 0 of 8, whose collectives send nothing, and core work as on an accelerator."""
    importlib.import_module("torch.testing._internal.distributed.fake_pg")  # makes the backend known
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=DP_SIZE)
    try:
        with mock.patch.object(devices, "is_on_host", return_value=False):
            yield
    finally:
        dist.destroy_process_group()


def print_operators(names: Sequence[str], dtype: torch.dtype) -> None:
    columns = ("1 microbatch", "+ clipping", "4 microbatches", "step alone")
    print(f"\n{dtype} weights, operators".ljust(36) + "".join(f"{column:>16}" for column in columns))
    for name in names:
        one = operators(name, dtype)
        clipped = operators(name, dtype, clips=True).total - one.total
        four = operators(name, dtype, microbatches=4)
        row = (one.total, clipped, four.total, one.by_phase["step"])
        print(f"{name:35}" + "".join(f"{number:16,}" for number in row))


def print_bytecodes(names: Sequence[str], dtype: torch.dtype) -> None:
    columns = (*PHASES, "sum", "a parameter", "a bucket")
    print(f"\n{dtype} weights, bytecodes".ljust(36) + "".join(f"{column:>12}" for column in columns))
    for name in names:
        counts = bytecodes(ENGINES[name](ReadyGradients(make_gpt(12, dtype)), 8))
        slope = slopes(name, dtype)
        row = (*counts.by_phase.values(), counts.total, round(slope.per_param), round(slope.per_bucket))
        print(f"{name:35}" + "".join(f"{number:12,}" for number in row))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    names = parser.parse_args().engines
    with one_rank_of_eight():
        for dtype in (torch.float32, torch.bfloat16):
            print_operators(names, dtype)
            print_bytecodes(names, dtype)


if __name__ == "__main__":
    main()
