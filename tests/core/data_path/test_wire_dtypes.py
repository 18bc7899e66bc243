"""grad_wire_dtype: fewer bits on the wire, and sums in the gradients' own dtype.

The reference is a loop without ranks that rounds by itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megastrategy import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from megastrategy.core import make_collectives
from megastrategy.core.errors import NonFiniteGradError
from megastrategy.core.layout.memory import memory_use
from tests.support.data_path import copied_grads, memory_of, owners_of, state_bytes_of
from tests.support.doubles import RecordingCollectives
from tests.support.models import two_layers
from tests.support.optimizers import LambWithMoments, MatricesAndRest
from tests.support.ranks import run_ranks, with_instances
from tests.support.training import assert_same_state

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
BF16 = {"grad_wire_dtype": "bf16"}
MakeOptimizer = Callable[[Iterable[Any]], torch.optim.Optimizer]


def batch(rank: int, step: int, microbatch: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + 10 * step + microbatch)
    return torch.randn(5, 10, generator=generator)


def adamw(params: Iterable[Any]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.02, weight_decay=0.1)


def lamb(params: Iterable[Any]) -> torch.optim.Optimizer:
    """Steps whole parameters."""
    return LambWithMoments(params, lr=0.02)


def matrices_and_rest(params: Iterable[Any]) -> torch.optim.Optimizer:
    """Steps one group whole, and one as shards, in the same buckets."""
    every = list(params)
    rest = [param for param in every if param.dim() < 2]
    return MatricesAndRest([{"params": [p for p in every if p.dim() > 1], "by_row": True}, {"params": rest}])


class Ours:
    """One rank's training."""

    def __init__(self, group: ProcessGroup, make: MakeOptimizer = adamw, **options: Any) -> None:
        self.rank, self.module = group.rank(), two_layers()
        config = DistributedDataParallelConfig(**{"bucket_size": 200, **options})
        instances = config.num_distributed_optimizer_instances
        real = with_instances(group, instances) if instances > 1 else make_collectives(group, torch.device("cpu"))
        self.collectives = RecordingCollectives(group, real)
        self.model = DistributedDataParallel(self.module, config, collectives=self.collectives)
        self.optimizer = DistributedOptimizer(make(self.model.parameters()), self.model)

    def step(self, step: int, accumulate: int = 1) -> None:
        self.optimizer.zero_grad()
        for microbatch in range(accumulate):
            last = microbatch == accumulate - 1
            with contextlib.nullcontext() if last else self.model.no_sync():
                (self.model(batch(self.rank, step, microbatch)).square().sum() / accumulate).backward()
        self.optimizer.step()

    def weights(self) -> list[Tensor]:
        self.model.finish_param_gather()
        return [param.detach().clone() for param in self.module.parameters()]


def train(make: MakeOptimizer, size: int, steps: int, accumulate: int, options: dict[str, Any]) -> list[Any]:
    def run(rank: int, group: ProcessGroup) -> Any:
        ours = Ours(group, make, **options)
        for step in range(steps):
            ours.step(step, accumulate)
        assert not ours.optimizer.main_params()
        result = ours.weights(), ours.optimizer.state_dict()
        ours.model.close()
        return result

    return run_ranks(size, run)


def train_alone(
    make: MakeOptimizer, size: int, steps: int, accumulate: int, wire: str
) -> tuple[list[Tensor], dict[str, Any]]:
    """The same without ranks: weights, and the optimizer's state."""
    module = two_layers()
    optimizer = make(module.parameters())
    for step in range(steps):
        sums = [torch.zeros_like(param) for param in module.parameters()]
        for rank in range(size):
            module.zero_grad()
            for microbatch in range(accumulate):
                (module(batch(rank, step, microbatch)).square().sum() / accumulate).backward()
            for total, param in zip(sums, module.parameters(), strict=True):
                assert param.grad is not None
                total.add_(param.grad.to(DTYPES[wire]).float() * (1.0 / size))
        for param, total in zip(module.parameters(), sums, strict=True):
            param.grad = total
        optimizer.step()
    return [param.detach() for param in module.parameters()], optimizer.state_dict()


WIRES: dict[str, dict[str, Any]] = {
    "bf16": BF16,
    "fp16": {"grad_wire_dtype": "fp16"},
    "in the next forward": {**BF16, "overlap_param_gather": True},
    "pooled": {**BF16, "grad_buffer": "pooled"},
    "one bucket": {**BF16, "bucket_size": 10**9},
}


@pytest.mark.parametrize(
    ("name", "make", "size"),
    [
        ("bf16", adamw, 2),
        ("fp16", lamb, 3),
        ("in the next forward", matrices_and_rest, 4),
        ("pooled", adamw, 2),
        ("one bucket", adamw, 2),
    ],
)
def test_bits_equal_a_loop_that_rounds_by_itself(name: str, make: MakeOptimizer, size: int) -> None:
    options = WIRES[name]
    accumulate = 1 if "grad_buffer" in options else 2
    weights, state = train_alone(make, size, 10, accumulate, options["grad_wire_dtype"])
    outcomes = train(make, size, 10, accumulate, options)
    for held, _ in outcomes:
        assert all(map(torch.equal, held, weights)), "on every rank"
    assert_same_state(outcomes[0][1], state)


def test_instances_round_inside_of_them() -> None:
    """Between instances sums have 32 bits. All ranks, of both, hold the same weights."""
    outcomes = train(adamw, 4, 10, 1, {**BF16, "num_distributed_optimizer_instances": 2})
    exact = train(adamw, 4, 10, 1, {"num_distributed_optimizer_instances": 2})
    for held, _ in outcomes:
        assert all(map(torch.equal, held, outcomes[0][0]))
        for mine, theirs in zip(held, exact[0][0], strict=True):
            assert not torch.equal(mine, theirs)
            torch.testing.assert_close(mine, theirs, rtol=0.02, atol=0.02)


@pytest.mark.parametrize(("make", "name", "size"), [(adamw, "bf16", 2), (matrices_and_rest, "pooled", 3)])
def test_memory_is_the_table_to_the_byte(make: MakeOptimizer, name: str, size: int) -> None:
    def run(rank: int, group: ProcessGroup) -> None:
        ours = Ours(group, make, **WIRES[name])
        ours.step(0)
        num_kept = ours.optimizer._impl.num_kept()
        use = memory_use(ours.model.layout, rank, num_kept or 0, owners_of(ours.model).rank_of)
        weights, grads = memory_of(ours.model)
        assert sum(tensor.nbytes for tensor in weights) == use.param_bytes
        assert sum(tensor.nbytes for tensor in [*grads, *copied_grads(ours.optimizer)]) == use.grad_bytes
        assert state_bytes_of(ours.optimizer) == use.state_bytes
        ours.model.close()

    run_ranks(size, run)


def test_one_rank_rounds_nothing() -> None:
    [(weights, _)] = train(adamw, 1, 5, 1, BF16)
    [(expected, _)] = train(adamw, 1, 5, 1, {})
    assert all(map(torch.equal, weights, expected))


@pytest.mark.parametrize("grad_buffer", ["contiguous", "pooled"])
def test_nan_check_sees_infinite_sent_gradients(grad_buffer: str) -> None:
    def run(rank: int, group: ProcessGroup) -> None:
        ours = Ours(group, grad_wire_dtype="fp16", check_for_nan_in_grad=True, grad_buffer=grad_buffer)
        with pytest.raises(NonFiniteGradError, match=r"rank 1.*2\.weight"):
            (ours.model(batch(rank, 0)).sum() * (1e6 if rank == 1 else 1.0)).backward()
        ours.model.close()

    run_ranks(2, run)
