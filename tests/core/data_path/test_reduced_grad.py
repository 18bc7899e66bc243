"""``.grad`` is a stand-in after a reduce-scatter (megastrategy.core.data_path.reduced_grad): a read raises or is right,
and a drop is noticed."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from megastrategy import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from megastrategy.core.errors import ReducedGradError
from tests.support.ranks import run_ranks

SHARDED: dict[str, dict[str, Any]] = {
    "contiguous": {"bucket_size": 40},
    "pooled": {"bucket_size": 40, "grad_buffer": "pooled"},
    "forward": {"bucket_size": 40, "overlap_param_gather": True},
    "late": {"bucket_size": 40, "overlap_grad_reduce": False},
}
sharded = pytest.mark.parametrize("options", SHARDED.values(), ids=SHARDED)


class Net(nn.Module):
    """Two buckets and more; ``idle`` never has a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.idle = nn.Linear(10, 7), nn.Linear(7, 3), nn.Linear(3, 2)
        generator = torch.Generator().manual_seed(0)  # ranks are threads, which share torch's own
        for param in self.parameters():
            nn.init.normal_(param, std=0.3, generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).relu())


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(4, 10, generator=torch.Generator().manual_seed(10 * step + rank))


def loss_of(model: Any, rank: int, step: int) -> Tensor:
    loss: Tensor = model(batch(rank, step)).square().mean()
    return loss


def after_a_backward(options: dict[str, Any], look: Callable[[DistributedDataParallel, Net], Any]) -> list[Any]:
    """Returns the results of ``look`` on two ranks between a synchronised backward and the step."""

    def run(rank: int, group: ProcessGroup) -> Any:
        net = Net()
        model = DistributedDataParallel(net, DistributedDataParallelConfig(**options), group)
        DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), model)
        loss_of(model, rank, 0).backward()
        try:
            return look(model, net)
        finally:
            model.close()

    return run_ranks(2, run)


# --- reads -----------------------------------------------------------------------------------------------------------


def adaptive_clipping(params: list[nn.Parameter]) -> None:
    """The pattern of timm's: by the norm of each unit, in place."""
    for param in params:
        if param.grad is None:
            continue
        norm = param.grad.detach().norm(2.0, dim=0, keepdim=True)
        param.grad.detach().copy_(param.grad * (param.norm() / norm).clamp(max=1.0))


def unscale(params: list[nn.Parameter]) -> None:
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(1))
    scaler.unscale_(torch.optim.SGD(params, lr=0.1))


READERS: dict[str, Callable[[list[nn.Parameter]], Any]] = {
    "clip_grad_norm_": lambda params: nn.utils.clip_grad_norm_(params, 1.0),
    "clip_grad_norm_, foreach": lambda params: nn.utils.clip_grad_norm_(params, 1.0, foreach=True),
    "clip_grad_value_": lambda params: nn.utils.clip_grad_value_(params, 1.0),
    "get_total_norm": lambda params: nn.utils.get_total_norm([p.grad for p in params if p.grad is not None]),
    "adaptive clipping": adaptive_clipping,
    "torch's GradScaler": unscale,
    "norm": lambda params: params[0].grad.norm(),
    "clone": lambda params: params[0].grad.clone(),
    "numpy": lambda params: params[0].grad.numpy(),
    "from_dlpack, numpy": lambda params: np.from_dlpack(params[0].grad),
    "from_dlpack, torch": lambda params: torch.from_dlpack(params[0].grad),
    "data_ptr": lambda params: params[0].grad.data_ptr(),
    "index": lambda params: params[0].grad[0],
    "another's arithmetic": lambda params: torch.zeros_like(params[0]).add_(params[0].grad),
    "keyword": lambda params: torch.add(torch.zeros(7, 10), other=params[0].grad),
    "stack": lambda params: torch.cat([p.grad.view(-1) for p in params if p.grad is not None]),
    "assignment to .data": lambda params: setattr(params[0].grad, "data", torch.ones_like(params[0])),
    "in place": lambda params: params[0].grad.mul_(0.5),
    "pickle": lambda params: pickle.dumps(params[0].grad),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1).step(),
    "AdamW, foreach": lambda params: torch.optim.AdamW(params, foreach=True).step(),
    "AdamW, fused": lambda params: torch.optim.AdamW(params, fused=True).step(),
}


@sharded
def test_reading_reduced_grad_names_the_way_out(options: dict[str, Any]) -> None:
    def look(model: DistributedDataParallel, net: Net) -> dict[str, str]:
        messages = {}
        for name, read in READERS.items():
            with torch.no_grad(), pytest.raises(ReducedGradError) as raised:
                read(list(net.parameters()))
            messages[name] = str(raised.value)
        return messages

    for messages in after_a_backward(options, look):
        for name, message in messages.items():
            assert "the gradient of 'first.weight', which was reduce-scattered" in message, name
            assert len(message) <= 400, name
            clips = "clip" in name or "norm" in name
            for way_out in ("full_grad(param)", "use_distributed_optimizer="):
                assert way_out in message, name
            assert ("clip_grad_norm_" in message) is clips, name
            assert ("Step the optimizer that was prepared" in message) is not clips, name
            assert ("megastrategy.GradScaler" in message) is not clips, name


@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        pytest.param(SHARDED["contiguous"], torch.float32, id="contiguous-fp32"),
        pytest.param(SHARDED["forward"], torch.float32, id="forward-fp32"),
        pytest.param(SHARDED["late"], torch.float32, id="late-fp32"),
        pytest.param(SHARDED["pooled"], torch.bfloat16, id="pooled-bf16"),
    ],
)
def test_shape_and_dtype_of_a_gradient_can_be_read(options: dict[str, Any], dtype: torch.dtype) -> None:
    def run(rank: int, group: ProcessGroup) -> None:
        net = Net().to(dtype)
        model = DistributedDataParallel(net, DistributedDataParallelConfig(**options), group)
        model(batch(rank, 0).to(dtype)).square().mean().backward()
        for name, param in net.named_parameters():
            if name.startswith("idle"):
                assert param.grad is None, "as under torch DDP"
                continue
            grad = param.grad
            assert grad is not None
            assert isinstance(grad, Tensor)
            assert (grad.shape, grad.stride(), grad.dtype) == (param.shape, param.stride(), torch.float32)
            assert (grad.device, grad.layout, grad.requires_grad) == (param.device, torch.strided, False)
            assert (grad.numel(), grad.nbytes, len(grad)) == (param.numel(), 4 * param.numel(), len(param))
            assert grad.is_floating_point()
            assert name in repr(grad)
            assert f"{grad.detach()}{grad.data}" == 2 * repr(grad)
        model.close()
        assert all(param.grad is None for param in net.parameters())

    run_ranks(2, run)


# --- changes ---------------------------------------------------------------------------------------------------------

Program = Callable[[Any, Any, Net, int], None]
"""Forwards, backwards and steps with (model, optimizer, module, rank), under either engine."""


def end_of(program: Program, options: dict[str, Any] | None, optimizer: str = "Adam") -> list[dict[str, Any]]:
    """Weights and optimizer state that a program ends with on two ranks; under torch DDP without ``options``."""

    def run(rank: int, group: ProcessGroup) -> dict[str, Any]:
        net = Net()
        inner = getattr(torch.optim, optimizer)(net.parameters(), lr=0.05)
        if options is None:
            model: Any = TorchDDP(net, process_group=group, find_unused_parameters=True)
            program(model, inner, net, rank)
            state = inner.state_dict()
        else:
            model = DistributedDataParallel(net, DistributedDataParallelConfig(**options), group)
            distributed = DistributedOptimizer(inner, model)
            program(model, distributed, net, rank)
            state = distributed.state_dict()
            model.close()
        return {"weights": {name: param.detach().clone() for name, param in net.named_parameters()}, **state}

    return run_ranks(2, run)


def assert_ends_alike(program: Program, options: dict[str, Any], relative: float = 0.0, **kind: str) -> None:
    ours, theirs = end_of(program, options, **kind), end_of(program, None, **kind)
    for mine, other in zip(ours, theirs, strict=True):
        for name, weight in other["weights"].items():
            bound = relative * weight.abs().max().item()
            torch.testing.assert_close(mine["weights"][name], weight, rtol=0, atol=bound, msg=lambda m, n=name: n + m)
    assert ours[0]["state"].keys() == theirs[0]["state"].keys(), "the same parameters were stepped"
    for index, values in theirs[0]["state"].items():
        for name, value in values.items():
            torch.testing.assert_close(ours[0]["state"][index][name], value, rtol=10 * relative, atol=relative)


def drops_between_backwards(model: Any, optimizer: Any, net: Net, rank: int) -> None:
    """Only gradients accumulated after the drop remain."""
    for step in range(4):
        optimizer.zero_grad()
        loss_of(model, rank, 2 * step).backward()
        net.first.zero_grad()
        net.second.bias.grad = None
        loss_of(model, rank, 2 * step + 1).backward()
        optimizer.step()


def drops_after_a_local_backward(model: Any, optimizer: Any, net: Net, rank: int) -> None:
    """What was reduced, and what was added to it on this rank, is gone."""
    for step in range(4):
        loss_of(model, rank, 3 * step).backward()
        with model.no_sync():
            loss_of(model, rank, 3 * step + 1).backward()
        net.first.zero_grad()
        loss_of(model, rank, 3 * step + 2).backward()
        optimizer.step()
        optimizer.zero_grad()


def zeroes_in_place(model: Any, optimizer: Any, net: Net, rank: int) -> None:
    """A gradient of zeros is one: Adam's moments decay with it."""
    for step in range(4):
        loss_of(model, rank, step).backward()
        if step == 1:
            net.zero_grad(set_to_none=False)
        elif step == 2:
            torch._foreach_zero_([param.grad for param in net.parameters() if param.grad is not None])
        elif step == 3:
            net.first.weight.grad.data.zero_()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("mode", ["contiguous", "forward"])
def test_dropped_grads_are_dropped(mode: str) -> None:
    assert_ends_alike(zeroes_in_place, SHARDED[mode])


def never_zeroes(model: Any, optimizer: Any, net: Net, rank: int) -> None:
    for step in range(4):
        loss_of(model, rank, step).backward()
        optimizer.step()


def accumulates_upon_the_reduced(model: Any, optimizer: Any, net: Net, rank: int) -> None:
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, rank, 3 * step).backward()
        with model.no_sync():
            loss_of(model, rank, 3 * step + 1).backward()
        loss_of(model, rank, 3 * step + 2).backward()
        optimizer.step()


@pytest.mark.parametrize(
    ("program", "options"),
    [
        pytest.param(never_zeroes, SHARDED["contiguous"], id="never_zeroes-contiguous"),
        pytest.param(drops_between_backwards, SHARDED["pooled"], id="drops_between_backwards-pooled"),
        pytest.param(drops_after_a_local_backward, SHARDED["forward"], id="drops_after_a_local_backward-forward"),
        pytest.param(accumulates_upon_the_reduced, SHARDED["contiguous"], id="accumulates_upon_the_reduced-contiguous"),
    ],
)
def test_a_backward_adds_to_reduced_gradients(program: Program, options: dict[str, Any]) -> None:
    """Not to the bit: accumulated gradients are averaged on their owner (docs: several synchronised backwards)."""
    assert_ends_alike(program, options, 1e-6, optimizer="SGD")


@sharded
def test_a_stand_in_of_another_parameter_is_refused(options: dict[str, Any]) -> None:
    """Each would be stepped with its own gradient, where torch DDP uses the one that was put there."""

    def run(rank: int, group: ProcessGroup) -> None:
        net = nn.LayerNorm(10)
        model = DistributedDataParallel(net, DistributedDataParallelConfig(**options), group)
        optimizer = DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), model)
        loss_of(model, rank, 0).backward()
        net.weight.grad, net.bias.grad = net.bias.grad, net.weight.grad
        for use in (optimizer.step, optimizer.grad_norm, lambda: model.full_grad(net.weight)):
            with pytest.raises(ReducedGradError, match=r"putting a \.grad into that of '\w+' needs the gradient of"):
                use()
        model.close()

    run_ranks(2, run)


# The memory of a bucket keeps old values, and no later gradient has any of them.


X = torch.ones(3, 20)


class TwoLayers(nn.Module):
    """Two layers; the second one may be left out."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.first, self.second = nn.Linear(20, 20), nn.Linear(20, 20)
        for param in self.parameters():
            param.data = torch.randn(param.shape, generator=generator)

    def forward(self, x: Tensor, uses_second: bool = True) -> Tensor:
        x = self.first(x)
        return (self.second(x) if uses_second else x).sum()


@pytest.mark.parametrize("options", [{}, {"use_distributed_optimizer": False}, {"grad_wire_dtype": "bf16"}], ids=str)
def test_old_values_of_a_view_are_in_no_later_gradient(options: dict[str, Any]) -> None:
    """A layer that one rank leaves out adds nothing there, and one that all leave out has no gradient."""

    def run(rank: int, group: ProcessGroup) -> None:
        module = TwoLayers()
        model = DistributedDataParallel(module, DistributedDataParallelConfig(bucket_size=500, **options), group)
        model(X).backward()
        whole = model.full_grad(module.second.weight)
        assert whole is not None
        assert whole.any()
        model.zero_grad()
        model(X, rank == 0).backward()
        half = model.full_grad(module.second.weight)
        assert half is not None
        assert torch.equal(half, whole / 2)
        model.zero_grad()
        model(X, False).backward()
        assert model.full_grad(module.second.weight) is None
        model.close()

    run_ranks(2, run)
