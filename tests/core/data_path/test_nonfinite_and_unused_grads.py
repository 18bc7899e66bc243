"""Checks at the end of a backward: gradients that are not finite are traced to where they began, and gradients of
different microbatches are never mixed. And the norms that people log."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils._pytree import tree_leaves

from megastrategy import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from megastrategy.core.data_path.norms import total_grad_norm
from megastrategy.core.errors import (
    MicrobatchMismatchError,
    NonFiniteGradError,
)
from tests.support.budgets import HostReads, work_as_on_an_accelerator
from tests.support.doubles import DelayingCollectives
from tests.support.engines import engines
from tests.support.models import awkward_model, images, two_layers
from tests.support.ranks import run_ranks, try_ranks
from tests.support.thread_mode import ThreadMode

MODES = engines("reduce-scatter", "pooled", "all-reduce", "flattened")


def one_step(rank: int, group: ProcessGroup) -> torch.Tensor:
    """The weights after one step under torch DDP."""
    module = two_layers()
    model = TorchDDP(module, process_group=group)
    model(torch.full((2, 10), 1.0 + rank)).square().sum().backward()
    torch.optim.SGD(module.parameters(), lr=0.1).step()
    return torch.cat([param.detach().flatten() for param in module.parameters()])


def wrap(group: ProcessGroup, **options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(
        two_layers(), DistributedDataParallelConfig(**{"bucket_size": 100, **options}), group
    )


def poison(model: DistributedDataParallel, value: float, elements: int) -> None:
    """The next gradient of the first layer's bias gets ``elements`` elements of ``value``."""

    def spoil(grad: torch.Tensor) -> torch.Tensor:
        hook.remove()
        spoiled = grad.clone()
        spoiled[:elements] = value
        return spoiled

    hook = model.module[0].bias.register_hook(spoil)


@pytest.mark.parametrize(
    ("mode", "size", "value"),
    [
        ("reduce-scatter", 1, math.nan),
        ("reduce-scatter", 3, -math.inf),
        ("pooled", 3, math.nan),
        ("all-reduce", 1, math.inf),
        ("all-reduce", 3, math.nan),
        ("flattened", 1, -math.inf),
        ("flattened", 3, math.inf),
    ],
)
def test_nonfinite_grad_names_rank_param_and_bucket(mode: str, size: int, value: float) -> None:
    """All ranks end with the one message, and none of them accuses a rank that only received it."""
    culprit = size - 1

    def run(rank: int, group: ProcessGroup) -> None:
        model = wrap(group, check_for_nan_in_grad=True, **MODES[mode])
        model(torch.ones(2, 10)).sum().backward()
        if rank == culprit:
            poison(model, value, 2)
        model(torch.ones(2, 10)).sum().backward()

    outcomes = try_ranks(size, run)
    place = rf"rank {culprit}, parameter '0\.bias' \(bucket 1\): 2 of 33 elements\. Look"
    for outcome in outcomes:
        assert isinstance(outcome, NonFiniteGradError)
        assert re.search(rf"before they were reduced: {place}", str(outcome)), str(outcome)


@pytest.mark.parametrize(
    ("mode", "value"),
    [("reduce-scatter", math.nan), ("pooled", -math.inf), ("all-reduce", math.nan), ("flattened", math.nan)],
)
def test_nonfinite_check_reads_device_once(mode: str, value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many buckets there are. It names rank, parameter and bucket all the same."""
    work_as_on_an_accelerator(monkeypatch)

    def run(rank: int, group: ProcessGroup) -> None:
        model = wrap(group, check_for_nan_in_grad=True, **MODES[mode])
        assert len(model.layout.buckets) > 1
        for _ in range(2):
            with HostReads() as reads:
                model(torch.ones(2, 10)).sum().backward()
            of_check = {name: count for name, count in reads.counts.items() if "nonfinite" in name}
            assert of_check == {"megastrategy.core.data_path.nonfinite.found: tolist": 1}, reads.counts
        if rank == 1:
            poison(model, value, 2)
        model(torch.ones(2, 10)).sum().backward()

    for outcome in try_ranks(2, run):
        assert isinstance(outcome, NonFiniteGradError)
        assert "rank 1, parameter '0.bias' (bucket 1): some of 33 elements. Look" in str(outcome)


def test_a_late_gradient_is_looked_at_too() -> None:
    """A parameter used by two re-entrant checkpoints: its second part comes when its bucket is gone already."""

    def run(rank: int, group: ProcessGroup) -> None:
        class Late(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
                return x.clone()

            @staticmethod
            def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
                with torch.enable_grad():  # a backward inside the backward, as re-entrant checkpointing runs it
                    (model.module[2](torch.ones(2, 33)).sum() * (math.nan if rank == 0 else 1.0)).backward()
                return grad

        collectives = DelayingCollectives(group, 0.05)
        config = DistributedDataParallelConfig(bucket_size=1, check_for_nan_in_grad=True)
        model = DistributedDataParallel(two_layers(), config, collectives=collectives)
        hidden = Late.apply(torch.tanh(model.module[0](torch.ones(2, 10))))
        loss = model.module[2](hidden).sum()
        model.watch_backward(loss)
        loss.backward()

    for outcome in try_ranks(2, run):
        assert isinstance(outcome, NonFiniteGradError)
        assert "rank 0, parameter '2.weight'" in str(outcome)
        assert "rank 1" not in str(outcome)


@pytest.mark.parametrize("mode", ["reduce-scatter", "pooled", "all-reduce"])
def test_training_goes_on_after_nonfinite_grad(mode: str) -> None:
    """Whatever the window held is dropped; nothing that is not finite stays in a shard's sums."""

    def run(rank: int, group: ProcessGroup) -> torch.Tensor:
        model = wrap(group, check_for_nan_in_grad=True, **MODES[mode])
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
        with pytest.raises(NonFiniteGradError):
            model(torch.full((2, 10), math.nan)).sum().backward()
        model(torch.full((2, 10), 1.0 + rank)).square().sum().backward()
        optimizer.step()
        return torch.cat([param.detach().flatten() for param in model.module.parameters()])

    for mine, theirs in zip(run_ranks(2, run), run_ranks(2, one_step), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("mode", ["reduce-scatter", "pooled", "all-reduce"])
def test_grads_of_other_microbatches_are_not_mixed(mode: str) -> None:
    """Rank 1 skips the backward of microbatch 300; 256 more than 44 would look alike in one byte, 1 more does not."""

    def run(rank: int, group: ProcessGroup) -> None:
        model = wrap(group, **MODES[mode])
        for number in range(299, 302):
            model.microbatch = number
            outputs = model(torch.ones(2, 10))
            if rank == 1 and number == 300:
                continue
            outputs.sum().backward()

    for outcome in try_ranks(2, run):
        assert isinstance(outcome, MicrobatchMismatchError)
        assert "rank 0 is at number 300, rank 1 is at number 301" in str(outcome)


# --- norms -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "norm_type", "size"), [("reduce-scatter", 1.0, 2), ("all-reduce", math.inf, 2), ("pooled", 2.0, 3)]
)
def test_grad_norms_equal_torch_ddp(mode: str, norm_type: float, size: int) -> None:
    def run(rank: int, group: ProcessGroup) -> tuple[torch.Tensor, torch.Tensor]:
        reference = TorchDDP(awkward_model(), process_group=group, find_unused_parameters=True)
        reference(images(rank, 1, 0), 1, rank).backward()
        expected = [
            torch.tensor(0.0) if param.grad is None else torch.linalg.vector_norm(param.grad, norm_type)
            for param in reference.module.parameters()
            if param.requires_grad
        ]
        config = DistributedDataParallelConfig(bucket_size=100, **MODES[mode])
        model = DistributedDataParallel(awkward_model(), config, group)
        model(images(rank, 1, 0), 1, rank).backward()
        norms = model.grad_norms(norm_type)
        assert norms.shape == (len(model.engine.params),)
        torch.testing.assert_close(norms, torch.stack(expected).double(), rtol=1e-5, atol=1e-7)
        assert (norms == 0).sum() == 2, "the layer never used has a weight and a bias"
        return norms, torch.stack(expected)

    outcomes = run_ranks(size, run)
    assert all(torch.equal(norms, outcomes[0][0]) for norms, _ in outcomes)


def test_grad_written_after_reduction_is_stepped() -> None:
    """Written by hand on all ranks, or on one only: then no rank waits for a gather that the other does not start."""

    def run(rank: int, group: ProcessGroup) -> None:
        model = wrap(group)
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model)
        model(torch.ones(2, 10)).sum().backward()
        bias = model.module[2].bias
        bias.grad = torch.full((7,), 3.0)
        assert model.grad_norms(1.0)[3].item() == 21.0
        assert torch.equal(model.full_grad(bias), torch.full((7,), 3.0))
        before = bias.detach().clone()
        optimizer.step()
        assert torch.equal(bias, before - 3.0)
        optimizer.zero_grad()
        if rank == 1:
            bias.grad = torch.full((7,), 3.0)
        optimizer.step()
        model(torch.ones(2, 10)).sum().backward()
        optimizer.step()

    run_ranks(2, run)


CPU = torch.device("cpu")
NORM_TYPES = [1.0, 2.0, math.inf]


def draw(number: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(100 + i, generator=generator).to(dtype) for i in range(number)]


class WithoutFp64(ThreadMode):
    """Refuses fp64, as Apple's GPUs do."""

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if any(isinstance(leaf, Tensor) and leaf.dtype == torch.float64 for leaf in tree_leaves(result)):
            raise TypeError("the framework does not support float64")
        return result


@pytest.mark.parametrize("norm_type", NORM_TYPES)
def test_norms_of_several_dtypes_count_grads_once(norm_type: float) -> None:
    grads = [*draw(2), *draw(3, torch.bfloat16), *draw(1, torch.float64), *draw(1)]
    expected = torch.linalg.vector_norm(torch.cat([grad.double() for grad in grads]), norm_type)
    torch.testing.assert_close(total_grad_norm(grads, norm_type, None, CPU), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("options", [{}, {"use_distributed_optimizer": False}], ids=str)
def test_a_device_without_fp64_has_norms_in_fp32(options: dict[str, Any]) -> None:
    def run(rank: int, group: Any) -> tuple[Tensor, ...]:
        model = DistributedDataParallel(two_layers(), DistributedDataParallelConfig(**options), group)
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
        model(torch.full((2, 10), 1.0 + rank)).sum().backward()
        expected = model.grad_norms(), optimizer.grad_norm()
        with WithoutFp64():
            norms, total = model.grad_norms(), optimizer.grad_norm()
            clipped = optimizer.clip_grad_norm_(0.5)
        assert norms.dtype == total.dtype == torch.float32
        torch.testing.assert_close(norms, expected[0].float())
        torch.testing.assert_close(total, expected[1])
        torch.testing.assert_close(optimizer.grad_norm(), torch.tensor(0.5))
        return norms, total, clipped

    first, second = run_ranks(2, run)
    assert all(map(torch.equal, first, second))


@pytest.mark.parametrize("norm_type", NORM_TYPES)
def test_a_gradient_without_elements_has_the_norm_zero(norm_type: float) -> None:
    """torch's kernel has no largest of none; one rank alone would raise, and the others wait for it."""
    grads = draw(3)
    total = total_grad_norm(grads, norm_type, None, CPU)
    assert torch.equal(total_grad_norm([torch.empty(0, 3), *grads], norm_type, None, CPU), total)
    assert total_grad_norm([torch.empty(0)], norm_type, None, CPU) == 0
