"""Layers that add the gradients of their weights to ``main_grad`` themselves, as Transformer Engine's and Megatron-LM's
do with a fused kernel: the same bits as where autograd adds them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.utils.checkpoint import checkpoint

from megastrategy import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from megastrategy.core.errors import MainGradError
from tests.support.data_path import grads_of
from tests.support.ranks import run_ranks

WIDTH = 33
WHOLE: dict[str, Any] = {"use_distributed_optimizer": False}


class _Fused(torch.autograd.Function):
    """``x @ weight.T``, whose backward adds the weight's gradient where it accumulates."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Any) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.place = weight.main_grad
        ctx.weight = weight
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        [grad] = grads
        ctx.place.add_(grad.T @ x)
        ctx.weight.grad_added_to_main_grad = True
        return grad @ weight, torch.full_like(weight, float("nan"))  # what is returned has no meaning


class Fused(nn.Linear):
    """A linear layer in the manner of Transformer Engine; its bias is autograd's."""

    fuse_wgrad_accumulation = True

    def forward(self, x: Tensor) -> Tensor:
        product: Tensor = _Fused.apply(x, self.weight)  # type: ignore[no-untyped-call]
        return product if self.bias is None else product + self.bias


class Plain(nn.Linear):
    """The same, as autograd has it."""

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T + self.bias


class Net(nn.Module):
    """Two layers that may be fused, one between them that is not, and one that a step may leave out."""

    def __init__(self, kind: type[nn.Linear], dtype: torch.dtype) -> None:
        super().__init__()
        self.first, self.norm = kind(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.last, self.sometimes = kind(WIDTH, WIDTH), kind(WIDTH, WIDTH)
        generator = torch.Generator().manual_seed(0)  # of its own: ranks are threads, and torch's is theirs together
        for param in self.parameters():
            param.data = torch.randn(param.shape, generator=generator).to(dtype) * 0.2

    def forward(self, x: Tensor, with_all: bool = True) -> Tensor:
        out: Tensor = self.last(self.norm(torch.tanh(self.first(x))))
        return (self.sometimes(out) if with_all else out).float().square().mean()


def batch(rank: int, step: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank)).to(dtype)


def wrap(
    group: ProcessGroup, kind: type[nn.Linear], dtype: torch.dtype = torch.float32, **options: Any
) -> tuple[DistributedDataParallel, DistributedOptimizer]:
    config = DistributedDataParallelConfig(**{"bucket_size": 1500, **options})
    model = DistributedDataParallel(Net(kind, dtype), config, group)
    return model, DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2), model)


def train(
    kind: type[nn.Linear],
    size: int,
    dtype: torch.dtype,
    *,
    accumulate: int = 1,
    zero_every: int = 1,
    **options: Any,
) -> list[dict[str, Tensor]]:
    """Weights after six steps, in some of whose microbatches one layer is left out."""

    def run(rank: int, group: ProcessGroup) -> dict[str, Tensor]:
        model, optimizer = wrap(group, kind, dtype, **options)
        for step in range(6):
            if step % zero_every == 0:
                optimizer.zero_grad()
            for microbatch in range(accumulate):
                number = 10 * step + microbatch
                x, with_all = batch(rank, number, dtype), number % 3 != 1
                if microbatch < accumulate - 1:
                    with model.no_sync():
                        model(x, with_all).backward()
                else:
                    model(x, with_all).backward()
            optimizer.clip_grad_norm_(1.0)
            optimizer.step()
        model.close()
        return {name: value.clone() for name, value in model.module.state_dict().items()}

    return run_ranks(size, run)


@pytest.mark.parametrize(
    ("dtype", "size", "options"),
    [
        (torch.bfloat16, 2, {"accumulate": 3}),
        (torch.float32, 3, {"zero_every": 2}),
        (torch.float32, 1, {"accumulate": 3, "overlap_grad_reduce": False}),
        (torch.float32, 1, {"use_distributed_optimizer": False, "accumulate": 3, "zero_every": 2}),
        (torch.float32, 1, {"overlap_param_gather": True, "accumulate": 2}),
        (torch.float32, 1, {"grad_wire_dtype": "bf16", "accumulate": 2}),
    ],
    ids=str,
)
def test_main_grad_equals_autograd_to_the_bit(dtype: torch.dtype, size: int, options: dict[str, Any]) -> None:
    """The first backward moves everything to other buckets, so the place is another from the second on."""
    fused, plain = (train(kind, size, dtype, **options) for kind in (Fused, Plain))
    for rank in range(size):
        for name, value in plain[rank].items():
            assert torch.equal(fused[rank][name], value), f"rank {rank}: {name}"


def test_main_grad_has_grad_dtype_until_close() -> None:
    def run(rank: int, group: ProcessGroup) -> None:
        model, _ = wrap(group, Fused, torch.bfloat16)
        net: Any = model.module
        assert net.first.weight.main_grad.dtype == torch.float32
        assert net.first.weight.main_grad.shape == net.first.weight.shape
        assert not hasattr(net.norm.weight, "main_grad"), "no layer adds to it"
        model(batch(rank, 0, torch.bfloat16)).backward()
        starts = [(flat.data_ptr(), flat.data_ptr() + flat.nbytes) for flat in grads_of(model)]
        assert any(start <= net.first.weight.main_grad.data_ptr() < end for start, end in starts)
        model.close()
        assert not hasattr(net.first.weight, "main_grad")

    run_ranks(2, run)


def test_a_layer_of_ones_own_says_so_on_its_weight() -> None:
    """Without an attribute of the module that is known here."""

    class Own(Fused):
        fuse_wgrad_accumulation = False

        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            weight: Any = self.weight
            weight.grad_added_to_main_grad = False

    fused, plain = (train(kind, 2, torch.float32, accumulate=2) for kind in (Own, Plain))
    assert all(torch.equal(fused[0][name], value) for name, value in plain[0].items())


def test_a_backward_that_raises_leaves_nothing_behind() -> None:
    """The kernel has added to the gradient of the last layer when the norm's hook raises."""

    def run(kind: type[nn.Linear]) -> Callable[[int, ProcessGroup], Tensor]:
        def of_rank(rank: int, group: ProcessGroup) -> Tensor:
            model, _ = wrap(group, kind, **WHOLE)
            net: Any = model.module
            with model.no_sync():
                model(batch(rank, 0, torch.float32)).backward()
            raises_in_backward(model, net, rank)
            model(batch(rank, 2, torch.float32)).backward()
            grad: Tensor = net.first.weight.grad.clone()
            model.close()
            return grad

        return of_rank

    plain, fused = run_ranks(2, run(Plain)), run_ranks(2, run(Fused))
    assert all(torch.equal(*pair) for pair in zip(plain, fused, strict=True))


def raises_in_backward(model: DistributedDataParallel, net: Any, rank: int) -> None:
    def fail(*_: Any) -> None:
        raise ValueError("bad")

    x = batch(rank, 1, torch.float32).requires_grad_()
    with model.no_sync():
        loss = model(x)
    hook = net.norm.weight.register_hook(fail)
    with pytest.raises(ValueError, match="bad"):
        loss.backward()
    hook.remove()


def test_second_main_grad_of_sent_bucket_is_refused() -> None:
    """The kernel has added it to memory that is being sent."""

    def run(rank: int, group: ProcessGroup) -> None:
        class Twice(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layer = Fused(WIDTH, WIDTH)

            def forward(self, x: Tensor) -> Tensor:
                for _ in range(2):
                    x = checkpoint(self.layer, x, use_reentrant=True)  # type: ignore[no-untyped-call]
                return x.square().mean()

        model = DistributedDataParallel(Twice(), DistributedDataParallelConfig(bucket_size=1), group)
        model(batch(rank, 0, torch.float32).requires_grad_()).backward()  # nothing is sent before its end
        model.zero_grad()
        with pytest.raises(
            MainGradError, match=r"'layer.weight': .*after its bucket had been sent.*use_reentrant=False"
        ):
            model(batch(rank, 0, torch.float32).requires_grad_()).backward()
        model.close()

    run_ranks(2, run)


def test_raw_or_inner_loss_is_refused() -> None:
    """A raw loss's backward runs the kernel before any hook. A loss that a layer keeps for the training loop, as in a
    mixture of experts, may be the first of a backward."""

    def run(rank: int, group: ProcessGroup) -> None:
        model, _ = wrap(group, Fused)
        net: Any = model.module
        with pytest.raises(MainGradError, match="starts from no output of the model's forward: compute the loss from"):
            net(batch(rank, 0, torch.float32)).backward()
        model.close()
        model, _ = wrap(group, Fused)
        net = model.module
        loss = model(batch(rank, 0, torch.float32), False)
        inner = net.sometimes(batch(rank, 1, torch.float32)).sum()  # made last, so its backward comes first
        with pytest.raises(MainGradError, match="compute the loss from what the wrapped model returned"):
            (loss + inner).backward()
        model.close()

    run_ranks(1, run)


@pytest.mark.parametrize(
    "options",
    [{"grad_buffer": "pooled"}, {"use_contiguous_buffers": False, "overlap_grad_reduce": False, **WHOLE}],
    ids=str,
)
def test_main_grad_without_buffer_is_refused(options: dict[str, Any]) -> None:
    def run(rank: int, group: ProcessGroup) -> None:
        with pytest.raises(ValueError, match=r"'first.weight': its layer adds .* grad_buffer=\"contiguous\""):
            wrap(group, Fused, **options)

    run_ranks(2, run)
