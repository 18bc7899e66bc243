"""Checks at the end of a backward: gradients that are not finite are traced to where they began, and gradients of
different microbatches are never mixed. And the norms that people log."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from megastrategy import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from megastrategy.core.errors import (
    MicrobatchMismatchError,
    NonFiniteGradError,
    UnusedParameterError,
)
from tests.support.budgets import HostReads, work_as_on_an_accelerator
from tests.support.doubles import DelayingCollectives, RecordingCollectives
from tests.support.engines import engines
from tests.support.models import awkward_model, images, two_layers
from tests.support.ranks import run_ranks, try_ranks

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
def test_a_gradient_that_is_not_finite_is_traced_to_rank_parameter_and_bucket(
    mode: str, size: int, value: float
) -> None:
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


@pytest.mark.parametrize("mode", MODES)
def test_step_after_rejected_gradients_of_other_parameters_on_each_rank(mode: str) -> None:
    """Each rank had gradients in other buckets; the step finds none on any, and training continues."""

    def run(rank: int, group: ProcessGroup) -> torch.Tensor:
        model = wrap(group, check_for_nan_in_grad=True, **MODES[mode])
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
        for _ in range(2):
            if rank == 0:
                poison(model, math.nan, 1)
            outputs = model(torch.ones(2, 10))
            with pytest.raises(NonFiniteGradError):
                (outputs.sum() if rank == 0 else outputs.detach().sum() + model.module[2].weight.sum()).backward()
            optimizer.step()
            model(torch.ones(2, 10)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return torch.cat([param.detach().flatten() for param in model.module.parameters()])

    first, second = run_ranks(2, run)
    assert torch.equal(first, second)


@pytest.mark.parametrize("value", [math.nan, -math.inf])
@pytest.mark.parametrize("mode", MODES)
def test_an_accelerator_is_read_once_and_not_in_the_hooks(
    mode: str, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
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


@pytest.mark.sample(1)
@pytest.mark.parametrize("on_accelerator", [False, True])
@pytest.mark.parametrize("mode", ["reduce-scatter", "pooled"])
def test_a_late_gradient_is_looked_at_too(mode: str, on_accelerator: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A parameter used by two re-entrant checkpoints: its second part comes when its bucket is gone already."""
    if on_accelerator:
        work_as_on_an_accelerator(monkeypatch)

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
        config = DistributedDataParallelConfig(bucket_size=1, check_for_nan_in_grad=True, **MODES[mode])
        model = DistributedDataParallel(two_layers(), config, collectives=collectives)
        hidden = Late.apply(torch.tanh(model.module[0](torch.ones(2, 10))))
        loss = model.module[2](hidden).sum()
        model.watch_backward(loss)
        loss.backward()

    for outcome in try_ranks(2, run):
        assert isinstance(outcome, NonFiniteGradError)
        assert "rank 0, parameter '2.weight'" in str(outcome)
        assert "rank 1" not in str(outcome)


@pytest.mark.parametrize("mode", MODES)
def test_training_goes_on_after_the_error(mode: str) -> None:
    """Code that catches it on all ranks and drops the batch trains as if the batch had not existed."""

    def run(rank: int, group: ProcessGroup) -> list[torch.Tensor]:
        weights = []
        for spoiled in (False, True):
            model = wrap(group, check_for_nan_in_grad=True, **MODES[mode])
            optimizer = DistributedOptimizer(torch.optim.Adam(model.parameters()), model)
            for step in range(3):
                optimizer.zero_grad()
                if spoiled and step == 1:
                    poison(model, math.nan, 1)
                    with pytest.raises(NonFiniteGradError):
                        model(torch.ones(2, 10)).sum().backward()
                    optimizer.zero_grad()
                model(torch.full((2, 10), float(step + rank))).sum().backward()
                optimizer.step()
            weights.append(model.module[0].weight.detach().clone())
            model.close()
        return weights

    for clean, spoiled in run_ranks(2, run):
        assert torch.equal(clean, spoiled)


@pytest.mark.parametrize("mode", ["reduce-scatter", "pooled", "all-reduce"])
def test_training_goes_on_after_the_error_without_zero_grad(mode: str) -> None:
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
def test_a_backward_that_met_nan_and_then_raised_leaves_nothing(mode: str) -> None:
    """Its gradients are dropped, and what was found in them with them."""

    def on_purpose(grad: torch.Tensor) -> None:
        raise ArithmeticError("on purpose")

    def run(rank: int, group: ProcessGroup) -> list[torch.Tensor]:
        weights = []
        for disturbed in (False, True):
            model = wrap(group, check_for_nan_in_grad=True, **{"bucket_size": 1, **MODES[mode]})
            optimizer = DistributedOptimizer(torch.optim.Adam(model.parameters()), model)
            if disturbed:
                hooks = [
                    model.module[-1].bias.register_hook(lambda grad: torch.full_like(grad, math.nan)),
                    model.module[0].weight.register_hook(on_purpose),
                ]
                with pytest.raises(ArithmeticError):
                    model(torch.ones(2, 10)).sum().backward()
                for hook in hooks:
                    hook.remove()
                optimizer.zero_grad()
            model(torch.full((2, 10), 1.0 + rank)).sum().backward()
            optimizer.step()
            weights.append(model.module[0].weight.detach().clone())
            model.close()
        return weights

    for clean, disturbed in run_ranks(2, run):
        assert torch.equal(clean, disturbed)


class LeavesOut(nn.Module):
    """Two layers; the first may be left out of the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = two_layers()

    def forward(self, x: torch.Tensor, *, whole: bool = True) -> torch.Tensor:
        hidden = self.layers[:-1](x)
        return self.layers[-1](hidden if whole else hidden.detach())


@pytest.mark.sample(2)
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("mode", ["reduce-scatter", "pooled", "all-reduce"])
def test_training_goes_on_after_an_unused_parameter_was_told(mode: str, overlap: bool) -> None:
    """Gradients of the failed backward are dropped, whether or not buckets were launched, without ``zero_grad()``."""

    def train(model: nn.Module, optimizer: Any, rank: int) -> None:
        model(torch.full((2, 10), 1.0 + rank)).square().sum().backward()
        optimizer.step()

    def run(rank: int, group: ProcessGroup) -> torch.Tensor:
        options = {"find_unused_parameters": False, "overlap_grad_reduce": overlap, **MODES[mode]}
        model = DistributedDataParallel(LeavesOut(), DistributedDataParallelConfig(bucket_size=100, **options), group)
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
        with pytest.raises(UnusedParameterError):
            model(torch.ones(2, 10), whole=False).square().sum().backward()
        train(model, optimizer, rank)
        return torch.cat([param.detach().flatten() for param in model.module.parameters()])

    def undisturbed(rank: int, group: ProcessGroup) -> torch.Tensor:
        module = LeavesOut()
        train(TorchDDP(module, process_group=group), torch.optim.SGD(module.parameters(), lr=0.1), rank)
        return torch.cat([param.detach().flatten() for param in module.parameters()])

    for mine, theirs in zip(run_ranks(2, run), run_ranks(2, undisturbed), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("mode", ["reduce-scatter", "pooled"])
def test_a_step_may_come_before_any_backward(mode: str) -> None:
    """With the gradients that the module had when it was wrapped."""

    def run(rank: int, group: ProcessGroup) -> torch.Tensor:
        module = two_layers()
        module(torch.full((2, 10), 1.0 + rank)).square().sum().backward()
        config = DistributedDataParallelConfig(bucket_size=100, **MODES[mode])
        model = DistributedDataParallel(module, config, group)
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
        optimizer.step()
        return torch.cat([param.detach().flatten() for param in module.parameters()])

    for mine, theirs in zip(run_ranks(2, run), run_ranks(2, one_step), strict=True):
        assert torch.equal(mine, theirs)


def test_without_the_check_nothing_more_is_sent_and_nan_spreads() -> None:
    """The fault that the option prevents, and its cost: no additional collective if ranks agree on used parameters."""

    def run(rank: int, group: ProcessGroup) -> tuple[list[str], bool]:
        calls = []
        for check in (False, True):
            collectives = RecordingCollectives(group)
            config = DistributedDataParallelConfig(bucket_size=100, check_for_nan_in_grad=check)
            model = DistributedDataParallel(two_layers(), config, collectives=collectives)
            collectives.calls.clear()
            model(torch.ones(2, 10)).sum().backward()
            calls.append([call.name for call in collectives.calls])
            model.close()
        assert calls[0] == calls[1]
        model = wrap(group)
        if rank == 1:
            poison(model, math.nan, 1)
        model(torch.ones(2, 10)).sum().backward()
        grad = model.full_grad(model.module[0].bias)
        assert grad is not None
        return calls[0], bool(grad.isnan().any())

    assert all(spread for _, spread in run_ranks(2, run))


@pytest.mark.parametrize("mode", ["reduce-scatter", "pooled", "all-reduce"])
def test_gradients_of_different_microbatches_are_not_mixed(mode: str) -> None:
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


def test_microbatches_that_nobody_counts_are_not_compared() -> None:
    def run(rank: int, group: ProcessGroup) -> None:
        model = wrap(group)
        for _ in range(2 + rank):
            outputs = model(torch.ones(2, 10))
        outputs.sum().backward()

    run_ranks(2, run)


# --- norms -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
@pytest.mark.parametrize("mode", ["reduce-scatter", "pooled", "all-reduce"])
@pytest.mark.parametrize("size", [2, 3])
def test_norms_of_every_parameter_are_those_of_ddps_gradients(mode: str, norm_type: float, size: int) -> None:
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


def test_norms_before_the_reduction_are_of_local_gradients_and_after_zero_grad_zero() -> None:
    def run(rank: int, group: ProcessGroup) -> torch.Tensor:
        model = wrap(group)
        with model.no_sync():
            model(torch.full((2, 10), rank + 1.0)).sum().backward()
        local = model.grad_norms()
        model.zero_grad()
        assert torch.equal(model.grad_norms(), torch.zeros(4, dtype=torch.float64))
        return local

    first, second = run_ranks(2, run)
    assert not torch.equal(first, second)


def test_a_gradient_written_after_the_reduction_is_what_norms_and_steps_see() -> None:
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


# --- what a listener can measure -------------------------------------------------------------------------------------
