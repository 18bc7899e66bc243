"""grad_wire_dtype and param_wire_dtype: fewer bits on the wire, every rank the same bits, and nothing lost.

The reference is a loop without ranks that rounds by itself.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megastrategy import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from megastrategy.core import make_collectives
from megastrategy.core.errors import NonFiniteGradError
from megastrategy.core.layout.memory import describe_setup, memory_use, sent_bytes
from tests.support.doubles import RecordingCollectives
from tests.support.held_tensors import tensors_in
from tests.support.models import two_layers
from tests.support.optimizers import LambWithMoments, MatricesAndRest
from tests.support.optimizers_with_methods import ScheduleFree
from tests.support.ranks import run_ranks, with_instances
from tests.support.training import assert_same_state

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
BOTH = {"grad_wire_dtype": "bf16", "param_wire_dtype": "bf16"}
EIGHT = {"grad_wire_dtype": "int8", "param_wire_dtype": "int8"}
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


def rounded(values: Tensor, wire: str | None) -> Tensor:
    """The received values of fp32 numbers."""
    if wire is None:
        return values
    if wire != "int8":
        return values.to(DTYPES[wire]).float()
    blocks = []
    for block in values.flatten().split(64):  # parameters and shards begin with one
        scale = (block.abs().max() * (1 / 127)).clamp(min=2.0**-120).bfloat16().float()
        blocks.append((block * (1 / scale)).round() * scale)
    return torch.cat(blocks).view(values.shape)


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

    def remainders(self) -> dict[str, Tensor]:
        return self.optimizer.main_params()


def train(make: MakeOptimizer, size: int, steps: int, accumulate: int, options: dict[str, Any]) -> list[Any]:
    def run(rank: int, group: ProcessGroup) -> Any:
        ours = Ours(group, make, **options)
        for step in range(steps):
            ours.step(step, accumulate)
        result = ours.weights(), ours.remainders(), ours.optimizer.state_dict()
        ours.model.close()
        return result

    return run_ranks(size, run)


def train_alone(
    make: MakeOptimizer, size: int, steps: int, accumulate: int, options: dict[str, Any]
) -> tuple[list[Tensor], list[Tensor], dict[str, Any]]:
    """The same without ranks: held weights, what they lack of the exact ones, and the optimizer's state."""
    held = two_layers()
    exact = copy.deepcopy(held)
    optimizer = make(exact.parameters())
    remainders = [torch.zeros_like(param) for param in held.parameters()]
    of_grads, of_weights = options.get("grad_wire_dtype"), options.get("param_wire_dtype")
    for step in range(steps):
        sums = [torch.zeros_like(param) for param in held.parameters()]
        for rank in range(size):
            held.zero_grad()
            for microbatch in range(accumulate):
                (held(batch(rank, step, microbatch)).square().sum() / accumulate).backward()
            for total, param in zip(sums, held.parameters(), strict=True):
                assert param.grad is not None
                total.add_(rounded(param.grad, of_grads) * (1.0 / size))
        with torch.no_grad():
            for param, total, weights, left in zip(
                exact.parameters(), sums, held.parameters(), remainders, strict=True
            ):
                param.copy_(weights + left if of_weights else param)
                param.grad = total
            optimizer.step()
            for number, (param, weights) in enumerate(zip(exact.parameters(), held.parameters(), strict=True)):
                weights.copy_(weights + rounded(param - weights, of_weights) if of_weights else param)
                remainders[number] = param - weights
    return [param.detach() for param in held.parameters()], remainders, optimizer.state_dict()


WIRES: dict[str, dict[str, Any]] = {
    "gradients": {"grad_wire_dtype": "bf16"},
    "gradients in fp16": {"grad_wire_dtype": "fp16"},
    "gradients in int8": {"grad_wire_dtype": "int8"},
    "weights": {"param_wire_dtype": "bf16"},
    "weights in int8": {"param_wire_dtype": "int8"},
    "both": BOTH,
    "both in int8": EIGHT,
    "both in int8, in the next forward": {**EIGHT, "overlap_param_gather": "forward"},
    "both in int8, pooled": {**EIGHT, "grad_buffer": "pooled"},
    "both in int8, one bucket": {**EIGHT, "bucket_size": 10**9},
    "both, in the next forward": {**BOTH, "overlap_param_gather": "forward"},
    "both, gathered after the step": {**BOTH, "overlap_param_gather": False},
    "both, pooled": {**BOTH, "grad_buffer": "pooled"},
    "both, one bucket": {**BOTH, "bucket_size": 10**9},
}


CASES = [
    (name, size)
    for name, options in WIRES.items()
    for size in (2, 3, 4)
    if size == 2 or "grad_wire_dtype" in options  # a ring's sum of more than two fp32 gradients has an order of its own
]


@pytest.mark.sample(7)
@pytest.mark.parametrize("make", [adamw, lamb, matrices_and_rest])
@pytest.mark.parametrize(("name", "size"), CASES)
def test_equal_to_the_bit_with_a_loop_that_rounds_by_itself(name: str, make: MakeOptimizer, size: int) -> None:
    options = WIRES[name]
    accumulate = 1 if "grad_buffer" in options else 2
    weights, remainders, state = train_alone(make, size, 10, accumulate, options)
    outcomes = train(make, size, 10, accumulate, options)
    for held, _, _ in outcomes:
        assert all(map(torch.equal, held, weights)), "on every rank"
    _, left, theirs = outcomes[0]
    if "param_wire_dtype" in options:
        assert list(left) == [f"{name} (remainder)" for name, _ in two_layers().named_parameters()]
        assert all(map(torch.equal, left.values(), remainders))
        assert any(remainder.any() for remainder in remainders)
    else:
        assert not left
    assert_same_state(theirs, state)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["both", "both, in the next forward", "both, pooled"])
def test_instances_round_what_is_sent_inside_them(name: str) -> None:
    """Between instances sums have 32 bits. All ranks, of both, hold the same weights."""
    outcomes = train(adamw, 4, 10, 1, {**WIRES[name], "num_distributed_optimizer_instances": 2})
    exact = train(adamw, 4, 10, 1, {"num_distributed_optimizer_instances": 2})
    for held, _, _ in outcomes:
        assert all(map(torch.equal, held, outcomes[0][0]))
        for mine, theirs in zip(held, exact[0][0], strict=True):
            assert not torch.equal(mine, theirs)
            torch.testing.assert_close(mine, theirs, rtol=0.02, atol=0.02)


@pytest.mark.sample(1)
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize(("overlap", "wire"), [("step", BOTH), ("forward", BOTH), ("step", EIGHT), ("forward", EIGHT)])
def test_ranks_stay_equal_to_the_bit_while_a_run_changes(size: int, overlap: str, wire: dict[str, str]) -> None:
    """100 steps with clipping, accumulation, a layer that is unfrozen, and weights that are written from outside."""

    def run(rank: int, group: ProcessGroup) -> list[list[Tensor]]:
        ours = Ours(group, overlap_param_gather=overlap, **wire)
        first = next(iter(ours.module.children()))
        seen = []
        for step in range(100):
            first.requires_grad_(not 40 <= step < 80)
            ours.optimizer.zero_grad()
            for microbatch in range(1 + step % 3):
                with contextlib.nullcontext() if microbatch == step % 3 else ours.model.no_sync():
                    ours.model(batch(rank, step, microbatch)).square().sum().backward()
            ours.optimizer.clip_grad_norm_(0.5)
            ours.optimizer.step()
            if step % 50 == 20:
                with torch.no_grad():
                    ours.module[0].weight.mul_(-1.0)
                    ours.module[2].bias.data.zero_()
            if step % 10 == 0:
                seen.append(ours.weights())
        ours.model.close()
        return seen

    by_rank = run_ranks(size, run)
    for others in by_rank[1:]:
        for mine, theirs in zip(by_rank[0], others, strict=True):
            for one, other in zip(mine, theirs, strict=True):
                assert torch.equal(one.view(torch.int32), other.view(torch.int32)), "zeros have one sign"


@pytest.mark.parametrize("wire", [BOTH, EIGHT])
def test_a_parameter_joins_and_its_changes_are_sent_too(wire: dict[str, str]) -> None:
    def run(rank: int, group: ProcessGroup) -> list[Tensor]:
        ours = Ours(group, **wire)
        for step in range(6):
            ours.step(step)
            if step == 2:
                ours.module.append(nn.Linear(7, 2))
                for param in ours.module[3].parameters():
                    nn.init.constant_(param, 0.1)
                ours.optimizer.add_param_group({"params": list(ours.module[3].parameters())})
        assert len(ours.remainders()) == (6 if rank == 0 else 0)
        weights = ours.weights()
        assert not weights[-2].eq(0.1).any()
        ours.model.close()
        return weights

    first, second = run_ranks(2, run)
    assert all(map(torch.equal, first, second))


@pytest.mark.parametrize(("wire", "dtype", "nbytes_of_64"), [(BOTH, torch.bfloat16, 128), (EIGHT, torch.int8, 66)])
def test_half_the_bytes_are_sent_or_a_quarter(wire: dict[str, str], dtype: torch.dtype, nbytes_of_64: int) -> None:
    def run(rank: int, group: ProcessGroup) -> None:
        ours = Ours(group, **wire)
        ours.collectives.calls.clear()  # of the set-up
        for step in range(3):
            ours.step(step)
        numel = sum(bucket.numel for bucket in ours.model.layout.buckets)
        for name in ("reduce_scatter_into", "all_gather"):
            assert sum(call.nbytes for call in ours.collectives.named(name)) == 3 * nbytes_of_64 * numel // 64
            assert {call.dtype for call in ours.collectives.named(name)} == {dtype}
        assert not ours.collectives.named("reduce_scatter")
        ours.model.close()

    run_ranks(2, run)


@pytest.mark.sample(3)
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(
    "name", ["gradients", "weights", "both", "both, pooled", "both in int8", "both in int8, pooled"]
)
@pytest.mark.parametrize("make", [adamw, matrices_and_rest])
def test_memory_is_what_the_table_says_to_the_byte(make: MakeOptimizer, name: str, size: int) -> None:
    def run(rank: int, group: ProcessGroup) -> None:
        ours = Ours(group, make, **WIRES[name])
        ours.step(0)
        engine, shard_set = ours.model.engine, ours.optimizer._impl.shard_set
        assert engine.param_buffers is not None
        use = memory_use(ours.model.layout, rank, shard_set.num_kept() or 0, engine.owners.rank_of)
        changes = [change for change in engine.param_buffers.changes if change is not None]
        assert sum(tensor.nbytes for tensor in [*engine.param_buffers.flats, *changes]) == use.param_bytes
        held = tensors_in(engine.grad_buffers)
        flats = {id(t): t.nbytes for t in held if type(t) is Tensor and t.dim() == 1 and t.is_leaf}
        views = {id(view) for view in engine.grad_buffers.views}
        assert sum(nbytes for key, nbytes in flats.items() if key not in views) == use.grad_bytes
        kept = [shard for shard in shard_set.shards.values() if shard.keeps_remainder]
        apart = [shard.main for shard in kept if shard.main is not shard.weights]
        state = [v for values in ours.optimizer.state.values() for v in values.values() if v.dim() > 0]
        assert sum(tensor.nbytes for tensor in [*apart, *state]) == use.state_bytes
        ours.model.close()

    run_ranks(size, run)


def test_the_table_says_what_is_saved() -> None:
    def run(rank: int, group: ProcessGroup) -> None:
        ours = Ours(group, **BOTH)
        layout = ours.model.layout
        text = describe_setup(layout, rank, True, 2)
        assert "sent as bfloat16 while backward runs" in text
        numel = sum(buffer.numel for buffer in layout.buffers)
        assert (sent_bytes(layout), sent_bytes(layout, rounded=False)) == (4 * numel // 2, 8 * numel // 2)
        assert sent_bytes(Ours(group, **EIGHT).model.layout) == 2 * 66 * numel // 64 // 2
        assert "rounded for the wire: in a step of one microbatch a rank sends 0.00 MiB instead of 0.00 MiB" in text
        assert "rounded" not in describe_setup(Ours(group).model.layout, rank, True, 2)
        ours.model.close()

    run_ranks(2, run)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_weights_are_sent_as_they_are(dtype: torch.dtype) -> None:
    """16-bit weights need no rounding; with fp64 only gradients are rounded."""

    def run(rank: int, group: ProcessGroup) -> None:
        module = two_layers().to(dtype)
        collectives = RecordingCollectives(group)
        config = DistributedDataParallelConfig(grad_reduce_in_fp32=False, **BOTH)
        model = DistributedDataParallel(module, config, collectives=collectives)
        optimizer = DistributedOptimizer(adamw(model.parameters()), model)
        collectives.calls.clear()  # of the set-up
        model(batch(rank, 0).to(dtype)).sum().backward()
        optimizer.step()
        assert {call.dtype for call in collectives.named("all_gather")} == {dtype}
        reductions = collectives.named("reduce_scatter", "reduce_scatter_into")
        assert {call.dtype for call in reductions} == {torch.bfloat16}
        assert not any(name.endswith("(remainder)") for name in optimizer.main_params())
        model.close()

    run_ranks(2, run)


def test_on_one_rank_nothing_is_rounded_and_nothing_kept() -> None:
    [(weights, remainders, _)] = train(adamw, 1, 5, 1, BOTH)
    [(expected, _, _)] = train(adamw, 1, 5, 1, {})
    assert all(map(torch.equal, weights, expected))
    assert not remainders


@pytest.mark.parametrize("wire", [BOTH, EIGHT])
def test_two_optimizers_whose_parameters_share_a_bucket(wire: dict[str, str]) -> None:
    """Each gathers what it stepped, and what came for the other one is not added once more."""
    size, steps = 3, 5
    weights, remainders, _ = train_alone(matrices_and_rest, size, steps, 1, wire)

    def run(rank: int, group: ProcessGroup) -> list[Tensor]:
        ours = Ours(group, bucket_size=10**9, **wire)
        params = list(ours.module.parameters())
        groups = [
            {"params": [param for param in params if param.dim() > 1], "by_row": True},
            {"params": [param for param in params if param.dim() < 2]},
        ]
        optimizers = [DistributedOptimizer(MatricesAndRest([group]), ours.model) for group in groups]
        for step in range(steps):
            ours.model.zero_grad()
            ours.model(batch(rank, step)).square().sum().backward()
            for optimizer in optimizers:
                optimizer.step()
        left = {name: value for optimizer in optimizers for name, value in optimizer.main_params().items()}
        if rank == 0:
            for (name, _), remainder in zip(ours.module.named_parameters(), remainders, strict=True):
                assert torch.equal(left[f"{name} (remainder)"], remainder)
        held = ours.weights()
        ours.model.close()
        return held

    for held in run_ranks(size, run):
        assert all(map(torch.equal, held, weights))


# --- what is not a step of ours --------------------------------------------------------------------------------------


def test_weights_that_are_written_are_those_of_the_next_step() -> None:
    """Except for what was left out before, which is a rounding of the last change."""

    def run(rank: int, group: ProcessGroup) -> None:
        ours = Ours(group, lambda params: torch.optim.SGD(params, lr=0.01), **BOTH)
        for step in range(3):
            ours.step(step)
        largest = max(remainder.abs().max() for remainder in [*ours.remainders().values(), torch.zeros(1)])
        before = ours.weights()
        for param in ours.module.parameters():
            param.data.fill_(3.0)
        ours.optimizer.param_groups[0]["lr"] = 0.0
        ours.step(3)
        for weights, old in zip(ours.weights(), before, strict=True):
            assert not torch.equal(weights, old)
            torch.testing.assert_close(weights, torch.full_like(weights, 3.0), rtol=0, atol=1e-3)
        assert largest < 1e-3
        ours.model.close()

    run_ranks(2, run)


def test_weights_that_became_nan_can_be_replaced() -> None:
    def run(rank: int, group: ProcessGroup) -> None:
        ours = Ours(group, **BOTH)
        ours.step(0)
        good = ours.weights()
        ours.model(batch(rank, 1) * float("inf")).sum().backward()
        ours.optimizer.step()
        assert any(weights.isnan().any() for weights in ours.weights())
        with torch.no_grad():
            for param, value in zip(ours.module.parameters(), good, strict=True):
                param.copy_(value)
        ours.optimizer.load_state_dict(adamw(two_layers().parameters()).state_dict())
        for step in range(2, 4):
            ours.step(step)
        assert all(weights.isfinite().all() for weights in ours.weights())
        ours.model.close()

    run_ranks(2, run)


class Fails(torch.optim.SGD):
    """Raises once it is armed, when it has changed what it steps."""

    is_armed = False

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        if self.is_armed:
            raise RuntimeError("out of luck")
        return result


@pytest.mark.parametrize("overlap", [False, "step"])
def test_a_step_that_fails_leaves_the_weights_and_can_be_followed(overlap: Any) -> None:
    """It is lost in whole, as it is with 16-bit weights; a remainder that was left half way would be a weight."""

    def run(rank: int, group: ProcessGroup) -> list[Tensor]:
        inner: list[Fails] = []

        def make(params: Iterable[Any]) -> torch.optim.Optimizer:
            inner.append(Fails(params, lr=0.01))
            return inner[0]

        ours = Ours(group, make, overlap_param_gather=overlap, **{**BOTH, "bucket_size": 10**9})
        for step in range(2):
            ours.step(step)
        before, inner[0].is_armed = ours.weights(), True
        with pytest.raises(RuntimeError, match="out of luck"):
            ours.step(2)
        assert all(map(torch.equal, ours.weights(), before))
        assert not any(remainder.any() for remainder in ours.remainders().values())
        inner[0].is_armed = False
        ours.step(2)
        weights = ours.weights()
        for now, old in zip(weights, before, strict=True):
            torch.testing.assert_close(now, old, rtol=0, atol=0.5)
        ours.model.close()
        return weights

    first, second = run_ranks(2, run)
    assert all(map(torch.equal, first, second))


@pytest.mark.parametrize("grad_buffer", ["contiguous", "pooled"])
@pytest.mark.parametrize(("wire", "scale"), [("fp16", 1e6), ("int8", float("inf"))])
def test_a_gradient_that_is_infinite_as_it_is_sent_is_found_by_the_check(
    wire: str, scale: float, grad_buffer: str
) -> None:
    def run(rank: int, group: ProcessGroup) -> None:
        ours = Ours(group, grad_wire_dtype=wire, check_for_nan_in_grad=True, grad_buffer=grad_buffer)
        with pytest.raises(NonFiniteGradError, match=r"rank 1.*2\.weight"):
            (ours.model(batch(rank, 0)).sum() * (scale if rank == 1 else 1.0)).backward()
        ours.model.close()

    run_ranks(2, run)


@pytest.mark.parametrize("overlap", ["step", "forward"])
def test_a_method_that_moves_weights_sends_them_exactly(overlap: str) -> None:
    """Schedule-Free's modes: evaluation sees the average itself, and nothing remains of it."""

    def run(rank: int, group: ProcessGroup) -> list[Tensor]:
        ours = Ours(group, ScheduleFree, overlap_param_gather=overlap, **BOTH)
        ours.optimizer.train()
        for step in range(5):
            ours.step(step)
        held, remainders = ours.weights(), ours.remainders()
        ours.optimizer.eval()
        assert not any(value.any() for value in ours.remainders().values())
        averages, state = ours.weights(), ours.optimizer.state_dict().get("state", {})
        if rank == 0:
            for number, (value, left) in enumerate(zip(held, remainders.values(), strict=True)):
                expected = (value + left).lerp_(state[number]["z"], weight=1 - 1 / 0.9)
                assert torch.equal(averages[number], expected)
        ours.optimizer.train()
        ours.step(5)
        averages += ours.weights()
        ours.model.close()
        return averages

    assert all(map(torch.equal, *run_ranks(2, run)))
