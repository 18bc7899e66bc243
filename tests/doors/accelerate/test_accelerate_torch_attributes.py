"""The attributes of torch's DDP that Accelerate and sentence-transformers read and set in a prepared model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from tests.support.comparison import assert_equal

from ..accelerate_loops import Worlds, both_modes, inputs, make_accelerator, net_of, sgd, weights_of


class Counting(nn.Module):
    """Its buffer parts on the ranks, until rank 0's is broadcast."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)
        self.register_buffer("count", torch.tensor(0.0))
        self.number = number

    def forward(self, x: Tensor) -> Tensor:
        self.count += self.number
        return self.layer(x) * self.count


def switch_buffers(name: str, mode: dict[str, Any]) -> list[tuple[bool, float]]:
    accelerator = make_accelerator(name, mode)
    torch.manual_seed(0)
    net = Counting(accelerator.process_index + 1)
    model = accelerator.prepare(net)
    seen = []

    def forward(*, backward: bool = True) -> None:
        loss = model(inputs(accelerator)).sum()
        if backward:
            loss.backward()
        seen.append((model.require_forward_param_sync, net.count.item()))

    forward()
    forward()
    with model.no_sync():
        forward()
    forward()
    with torch.no_grad():
        forward(backward=False)
    forward()
    for value in (False, True, False, False):
        model.require_forward_param_sync = value
        forward()
    return seen


@both_modes
def test_whether_the_next_forward_broadcasts_buffers_is_seen_and_set(worlds: Worlds, mode: dict[str, Any]) -> None:
    ours, theirs = (worlds.run(switch_buffers, name, mode) for name in ("megatron_ddp", "ddp"))
    assert ours == theirs
    assert ours[0] != ours[1], "the ranks' buffers part, or there is nothing to see"


def train_with_a_cache(name: str, mode: dict[str, Any], accumulate: int) -> dict[str, Tensor]:
    """Gradients of a contrastive loss, cached, and the forwards once more inside of its backward: as
    sentence-transformers' ``gradcache`` does it, with the attributes that it asks for."""
    accelerator = make_accelerator(name, mode, gradient_accumulation_steps=accumulate)
    net = net_of()
    model, optimizer = accelerator.prepare(net, sgd(net.parameters()))

    def replay(batches: list[Tensor], grads: list[Tensor], scale: Tensor) -> None:
        assert isinstance(model, TorchDDP)
        assert not model.static_graph or model._static_graph_delay_allreduce_enqueued
        with torch.enable_grad():
            for number, (batch, grad) in enumerate(zip(batches[:-1], grads[:-1], strict=True)):
                with model.no_sync():
                    torch.dot(model(batch).flatten(), grad.flatten() * scale).backward()
                assert number < len(batches)
            if model.require_backward_grad_sync:  # the last, with the buffers that the others have
                model.require_forward_param_sync = False
            torch.dot(model(batches[-1]).flatten(), grads[-1].flatten() * scale).backward()

    for step in range(4):
        with accelerator.accumulate(model):
            batches = list(inputs(accelerator, step).split(2))
            with torch.no_grad():
                outputs = [model(batch) for batch in batches]
            leaves = [output.detach().requires_grad_() for output in outputs]
            every = torch.cat(leaves)
            inner = torch.nn.functional.cross_entropy(every @ every.T, torch.arange(len(every)))
            inner.backward()
            grads = [leaf.grad for leaf in leaves if leaf.grad is not None]
            loss = inner.detach().requires_grad_()
            loss.register_hook(lambda scale, batches=batches, grads=grads: replay(batches, grads, scale))
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    return weights_of(net)


@both_modes
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_loss_with_a_cache_ends_in_the_bits_of_torch_ddp(
    worlds: Worlds, mode: dict[str, Any], accumulate: int
) -> None:
    ours, theirs = (worlds.run(train_with_a_cache, name, mode, accumulate) for name in ("megatron_ddp", "ddp"))
    assert_equal(ours, theirs)
    assert_equal(ours[0], ours[1])


def trigger_by_accelerates_class() -> None:
    """A script that was written for accelerate's own class calls its static method."""
    import accelerate

    accelerator = make_accelerator("megatron_ddp", {"use_distributed_optimizer": False})
    net = net_of()
    model = accelerator.prepare(net)
    with model.no_sync():
        loss = model(inputs(accelerator)).sum()
    with accelerate.Accelerator.trigger_sync_in_backward(model):
        loss.backward()
    mine = net[0].bias.grad.clone()
    assert torch.equal(mine, accelerator.reduce(mine, "mean")), "every rank has the mean"


def test_a_backward_is_synchronised_by_accelerates_own_class(worlds: Worlds) -> None:
    worlds.run(trigger_by_accelerates_class)
