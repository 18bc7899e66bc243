"""16-bit weights: fp32 main params on the rank that owns them, fp32 gradients, and changes from outside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megastrategy import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer, GradScaler
from megastrategy.core.errors import ParameterChangedError
from tests.support.models import two_layers
from tests.support.ranks import run_ranks


class Scale(nn.Module):
    """One vector of ones, whose gradient is the input: loss = (weight * x).sum()."""

    def __init__(self, numel: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(numel, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * x).sum()


def wrap(
    module: nn.Module, group: ProcessGroup, make: Callable[[Any], torch.optim.Optimizer], **options: Any
) -> tuple[DistributedDataParallel, DistributedOptimizer]:
    model = DistributedDataParallel(module, DistributedDataParallelConfig(**options), group)
    return model, DistributedOptimizer(make(model.parameters()), model)


@pytest.mark.parametrize(
    ("dtype", "sharded", "updates"),
    [
        pytest.param(torch.bfloat16, True, 1000, marks=pytest.mark.nightly),
        (torch.bfloat16, False, 100),
        (torch.float16, True, 100),
    ],
)
def test_tiny_updates_add_up(dtype: torch.dtype, sharded: bool, updates: int) -> None:
    """Together they are 0.01; a weight of 1 in 16 bits rounds each of them away."""
    update = 0.01 / updates

    def run(rank: int, group: ProcessGroup) -> Tensor:
        module = Scale(200, dtype)
        model, optimizer = wrap(
            module, group, lambda params: torch.optim.SGD(params, lr=update), use_distributed_optimizer=sharded
        )
        ones = torch.ones(200, dtype=dtype)
        for _ in range(updates):
            optimizer.zero_grad()
            model(ones).backward()
            optimizer.step()
        return module.weight.detach().clone()

    alone = Scale(200, dtype)
    plain = torch.optim.SGD(alone.parameters(), lr=update)
    for _ in range(updates):
        plain.zero_grad()
        alone(torch.ones(200, dtype=dtype)).backward()
        plain.step()
    assert bool((alone.weight == 1).all()), "16 bit alone stands still"
    in_fp32 = torch.ones(())
    for _ in range(updates):
        in_fp32 -= update
    assert abs(in_fp32.item() - 0.99) < 1e-4
    for weight in run_ranks(2, run):
        assert bool((weight == in_fp32.to(dtype)).all())


@pytest.mark.parametrize("sharded", [True, False])
def test_grads_of_64_microbatches_are_the_fp32_sum(sharded: bool) -> None:
    """To the bit: the sum of bf16 gradients in fp32, microbatch by microbatch, then the mean over two ranks."""

    def inputs(rank: int) -> Tensor:
        return torch.randn(64, 200, generator=torch.Generator().manual_seed(rank)).to(torch.bfloat16)

    def run(rank: int, group: ProcessGroup) -> Tensor | None:
        module = Scale(200, torch.bfloat16)
        model = DistributedDataParallel(module, DistributedDataParallelConfig(use_distributed_optimizer=sharded), group)
        for row in inputs(rank)[:-1]:
            with model.no_sync():
                model(row).backward()
        model(inputs(rank)[-1]).backward()
        return model.full_grad(module.weight)

    sums = []
    for rank in range(2):
        total = torch.zeros(200)
        for row in inputs(rank):
            total += row.float()
        sums.append(total)
    expected = (sums[0] + sums[1]) / 2
    in_bf16 = (inputs(0).sum(0) + inputs(1).sum(0)) / 2
    assert not torch.equal(in_bf16.float(), expected), "the numbers tell fp32 from bf16"
    for grad in run_ranks(2, run):
        assert grad is not None
        assert grad.dtype == torch.float32
        assert torch.equal(grad, expected)


def re_point(module: nn.Sequential, state: dict[str, Tensor]) -> None:
    for name, param in module.named_parameters():
        param.data = state[name].clone()


def copy_data(module: nn.Sequential, state: dict[str, Tensor]) -> None:
    for name, param in module.named_parameters():
        param.data.copy_(state[name])


def load(module: nn.Sequential, state: dict[str, Tensor]) -> None:
    module.load_state_dict(state)


@pytest.mark.parametrize(
    ("change", "dtype", "sharded"),
    [
        (load, torch.float32, True),
        (load, torch.bfloat16, False),
        (copy_data, torch.float32, False),
        (copy_data, torch.bfloat16, True),
        (re_point, torch.float32, True),
        (re_point, torch.bfloat16, True),
        (re_point, torch.bfloat16, False),
    ],
)
def test_weights_changed_from_outside_are_kept(
    change: Callable[[nn.Sequential, dict[str, Tensor]], None], dtype: torch.dtype, sharded: bool
) -> None:
    def run(rank: int, group: ProcessGroup) -> None:
        module = two_layers().to(dtype)
        model, optimizer = wrap(
            module, group, lambda params: torch.optim.SGD(params, lr=0.0), use_distributed_optimizer=sharded
        )
        x = torch.ones(4, 10, dtype=dtype)
        model(x).sum().backward()
        optimizer.step()
        wanted = {name: torch.full_like(value, 0.5) for name, value in module.state_dict().items()}
        change(module, wanted)
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()  # lr=0: whatever it writes is what it took for the weights
        for name, value in module.state_dict().items():
            assert torch.equal(value, wanted[name]), name
        optimizer.param_groups[0]["lr"] = 0.1
        optimizer.zero_grad()
        model(x).sum().backward()
        grads = {name: model.full_grad(param) for name, param in module.named_parameters()}
        optimizer.step()
        for name, value in module.named_parameters():
            assert grads[name] is not None
            expected = (wanted[name].float() - 0.1 * grads[name].float()).to(dtype)  # type: ignore[union-attr]
            torch.testing.assert_close(value.detach(), expected, msg=name)

    run_ranks(2, run)


@pytest.mark.parametrize("sharded", [True, False])
def test_a_parameter_whose_dtype_changed_is_named(sharded: bool) -> None:
    def run(rank: int, group: ProcessGroup) -> None:
        module = two_layers()
        model = DistributedDataParallel(module, DistributedDataParallelConfig(use_distributed_optimizer=sharded), group)
        module[2].double()
        model.watch_backward(loss := module[2](torch.ones(1, 33, dtype=torch.float64)).sum())
        with pytest.raises(ParameterChangedError, match=r"'2\.(weight|bias)' was torch.float32.*now torch.float64"):
            loss.backward()

    run_ranks(2, run)


@pytest.mark.parametrize("sharded", [True, False])
def test_one_infinite_element_skips_step_on_all(sharded: bool) -> None:
    """The other rank's shard is finite: without an agreement it would step, and the ranks would part."""

    def run(rank: int, group: ProcessGroup) -> tuple[float, list[Tensor]]:
        module = two_layers()
        model, optimizer = wrap(module, group, torch.optim.AdamW, use_distributed_optimizer=sharded)
        before = [param.detach().clone() for param in module.parameters()]
        scaler = GradScaler("cpu", init_scale=1024.0)
        last = module[0].bias  # one element of it, in its second half
        last.register_hook(lambda grad: grad.index_fill(0, torch.tensor([32]), float("inf")))
        scaler.scale(model(torch.ones(4, 10)).square().sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert all(torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True))
        assert not any(values for values in optimizer.state.values()), "no state came into being either"
        return scaler.get_scale(), [param.detach().clone() for param in module.parameters()]

    (scale_0, _), (scale_1, _) = run_ranks(2, run)
    assert scale_0 == scale_1 == 512.0


def test_local_grads_are_reduced_before_unscale() -> None:
    def run(rank: int, group: ProcessGroup, forgotten: bool) -> tuple[Tensor, Tensor]:
        module = two_layers()
        model, optimizer = wrap(module, group, lambda params: torch.optim.SGD(params, lr=0.1))
        scaler = GradScaler("cpu", init_scale=1024.0)
        with model.no_sync():
            scaler.scale(model(torch.full((4, 10), 1.0 + rank)).square().sum()).backward()
        if not forgotten:
            model.engine.finish_grad_sync()
        scaler.unscale_(optimizer)
        norm = optimizer.grad_norm()
        scaler.step(optimizer)
        return norm, torch.cat([param.detach().reshape(-1) for param in module.parameters()])

    forgotten, reduced = (run_ranks(2, lambda r, g, f=f: run(r, g, f)) for f in (True, False))
    for mine, expected in zip(forgotten, reduced, strict=True):
        assert torch.equal(mine[0], expected[0])
        assert torch.equal(mine[1], expected[1])
