"""A parameter or a submodule that is replaced in training is named; what only moves, leaves or comes is left alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.nn.utils import parametrize, prune

from megastrategy import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from megastrategy.core.errors import ParameterChangedError
from tests.support.engines import engines
from tests.support.ranks import run_ranks

MODES = engines("reduce-scatter", "all-reduce", "pooled")
either_mode = pytest.mark.parametrize("options", MODES.values(), ids=MODES)


class Net(nn.Module):
    """Three blocks in a list (the forward runs the present ones), a frozen layer, an auxiliary loss, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(3))
        self.frozen = nn.Linear(5, 5).requires_grad_(False)
        self.norm = nn.BatchNorm1d(5, affine=False)
        self.aux: nn.Module | None = nn.Linear(5, 2)
        self.head: nn.Module = nn.Linear(5, 3)
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for param in self.parameters():
                param.copy_(torch.randn(param.shape, generator=generator) * 0.4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        x = self.norm(self.frozen(x))
        loss = self.head(x).square().mean()
        return loss if self.aux is None else loss + self.aux(x).square().mean()


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * step + rank))


def linear(out: int) -> nn.Linear:
    layer = nn.Linear(5, out)
    with torch.no_grad():
        for number, param in enumerate(layer.parameters(), 1):
            param.copy_(torch.linspace(-0.1 * number, 0.3, param.numel()).view(param.shape))
    return layer


# --- replaced --------------------------------------------------------------------------------------------------------


def head(net: Net) -> None:
    net.head = linear(3)


def head_of_other_names(net: Net) -> None:
    net.head = nn.Sequential(nn.Dropout(0.0), linear(3))


def layer_in_a_block(net: Net) -> None:
    net.blocks[1][0] = linear(5)


def block(net: Net) -> None:
    net.blocks[2] = nn.Sequential(linear(5), nn.Tanh())


REPLACED: dict[Callable[[Net], None], tuple[str, str]] = {
    head: ("head.weight", "'head.weight'"),
    head_of_other_names: ("head.weight", "'head.1.weight'"),
    layer_in_a_block: ("blocks.1.0.weight", "'blocks.1.0.weight'"),
    block: ("blocks.2.0.weight", "'blocks.2.0.weight'"),
}


@either_mode
@pytest.mark.parametrize("replace", REPLACED, ids=lambda replace: replace.__name__)
def test_a_submodule_that_is_replaced_is_named_on_every_rank(
    replace: Callable[[Net], None], options: dict[str, Any]
) -> None:
    """Before every forward, so that catching it once does not help."""
    gone, came = REPLACED[replace]

    def run(rank: int, group: ProcessGroup) -> None:
        net = Net()
        model = DistributedDataParallel(net, DistributedDataParallelConfig(bucket_size=20, **options), group)
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
        model(batch(rank, 0)).backward()
        optimizer.step()
        replace(net)
        for _ in range(2):
            with pytest.raises(ParameterChangedError, match=f"'{gone}' was replaced") as caught:
                model(batch(rank, 1))
            assert came in str(caught.value)
            assert "wrap the model again" in str(caught.value)

    run_ranks(2, run)


def test_the_whole_module_replaced_is_named() -> None:
    def run(rank: int, group: ProcessGroup) -> None:
        model = DistributedDataParallel(Net(), process_group=group)
        model(batch(rank, 0)).backward()
        model.module = Net()
        with pytest.raises(ParameterChangedError, match=r"'blocks\.0\.0\.weight' was replaced"):
            model(batch(rank, 1))

    run_ranks(2, run)


def test_with_torch_ddp_the_new_submodule_is_never_trained() -> None:
    """The fault that the error prevents: the ranks' gradients for it differ, and the optimizer has the old one."""

    def run(rank: int, group: ProcessGroup) -> Tensor:
        net = Net()
        model = TorchDDP(net, process_group=group, find_unused_parameters=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        head(net)
        before = net.head.weight.detach().clone()
        model(batch(rank, 1)).backward()
        optimizer.step()
        assert torch.equal(net.head.weight, before)
        assert net.head.weight.grad is not None
        return net.head.weight.grad

    first, second = run_ranks(2, run)
    assert not torch.equal(first, second)


# --- moved, gone, or come --------------------------------------------------------------------------------------------


class Twice(nn.Module):
    """A parametrization that keeps the Parameter as its original."""

    def forward(self, weight: Tensor) -> Tensor:
        return 2.0 * weight

    def right_inverse(self, weight: Tensor) -> Tensor:
        return weight / 2.0


def pruned(net: Net) -> None:
    prune.l1_unstructured(net.head, "weight", amount=4)


def parametrized(net: Net) -> None:
    parametrize.register_parametrization(net.blocks[0][0], "weight", Twice())


def in_another_module(net: Net) -> None:
    net.head = nn.Sequential(net.head)


def in_another_order(net: Net) -> None:
    net.blocks[0], net.blocks[2] = net.blocks[2], net.blocks[0]


def without_a_block(net: Net) -> None:
    del net.blocks[1]


def without_the_auxiliary_loss(net: Net) -> None:
    net.aux = None


def without_a_bias(net: Net) -> None:
    net.head.bias = None


def other_frozen_layer(net: Net) -> None:
    net.frozen = linear(5).requires_grad_(False)


def with_a_module_that_nobody_calls(net: Net) -> None:
    net.average = linear(3)  # like the copy that averages the weights


ALLOWED = [
    pruned,
    parametrized,
    in_another_module,
    in_another_order,
    without_a_block,
    without_the_auxiliary_loss,
    without_a_bias,
    other_frozen_layer,
    with_a_module_that_nobody_calls,
]


@either_mode
@pytest.mark.parametrize("change", ALLOWED, ids=lambda change: change.__name__)
def test_what_torch_ddp_trains_on_with_is_trained_on_with(
    change: Callable[[Net], None], options: dict[str, Any]
) -> None:
    """To the bit. Parameters that are gone are unused from then on.

    Wrapped again after a parametrization, which gives the Parameter a gradient accumulator that torch DDP has no hook
    on.
    """

    def train(net: Net, model: nn.Module, optimizer: Any, rank: int, steps: range) -> None:
        for step in steps:
            optimizer.zero_grad()
            model(batch(rank, step)).backward()
            optimizer.step()

    def run(rank: int, group: ProcessGroup) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        theirs, ours = Net(), Net()
        reference = TorchDDP(theirs, process_group=group, find_unused_parameters=True)
        model = DistributedDataParallel(ours, DistributedDataParallelConfig(bucket_size=20, **options), group)
        sgd = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model)
        for net, wrapped, steps in ((theirs, reference, sgd), (ours, model, optimizer)):
            train(net, wrapped, steps, rank, range(2))
            change(net)
        reference = TorchDDP(theirs, process_group=group, find_unused_parameters=True)
        for net, wrapped, steps in ((theirs, reference, sgd), (ours, model, optimizer)):
            train(net, wrapped, steps, rank, range(2, 5))
        model.close()
        return theirs.state_dict(), ours.state_dict()

    for theirs, ours in run_ranks(2, run):
        assert list(ours) == list(theirs)
        for name, value in theirs.items():
            assert torch.equal(ours[name], value), name


def test_module_buffers_that_came_in_training_are_broadcast() -> None:
    def run(rank: int, group: ProcessGroup) -> Tensor:
        net = Net()
        model = DistributedDataParallel(net, process_group=group)
        model(batch(rank, 0)).backward()
        net.norm = nn.BatchNorm1d(5, affine=False)
        model(batch(rank, 1)).backward()
        model(batch(rank, 2)).backward()
        model.eval()
        model(batch(rank, 3))
        return net.norm.running_mean

    first, second = run_ranks(2, run)
    assert torch.equal(first, second)


def test_a_replacement_is_noticed_after_a_module_came() -> None:
    """Who has come before is not taken for what came in place of something."""

    def run(rank: int, group: ProcessGroup) -> None:
        net = Net()
        model = DistributedDataParallel(net, process_group=group)
        with_a_module_that_nobody_calls(net)
        model(batch(rank, 0)).backward()
        without_the_auxiliary_loss(net)
        model(batch(rank, 1)).backward()
        head(net)
        with pytest.raises(ParameterChangedError, match=r"'head\.weight' was replaced"):
            model(batch(rank, 2))

    run_ranks(2, run)
