"""What the tests of the Fabric door train: a module with everything awkward, and a user's loop with plain results."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies.ddp import DDPStrategy
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from megastrategy.fabric import MegatronDDPStrategy

from .fits import BUCKET_SIZE, AwkwardNet, adamw, loader, weights_of
from .rank_processes import number_of_ranks

EPOCHS = 2
Batch = Sequence[Tensor]


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05, momentum=0.9)


def make_strategy(name: str, **options: Any) -> DDPStrategy:
    """``"ddp"`` with unused parameters allowed, or ``"megatron_ddp"`` with several buckets."""
    if name == "ddp":
        return DDPStrategy(**{"find_unused_parameters": True, **options})
    return MegatronDDPStrategy(**{"bucket_size": BUCKET_SIZE, **options})


def make_fabric(name: str, strategy_options: dict[str, Any] | None = None, **options: Any) -> Fabric:
    """Launched, on the CPU, on all ranks that there are."""
    strategy = make_strategy(name, **strategy_options or {})
    fabric = Fabric(accelerator="cpu", devices=number_of_ranks(), strategy=strategy, **options)
    fabric.launch()
    return fabric


def make_data(fabric: Fabric) -> DataLoader[Any]:
    """This rank's half of the samples: seven batches, the last one short."""
    data: DataLoader[Any] = fabric.setup_dataloaders(loader(number_of_ranks()))
    return data


def windows(data: Any, size: int) -> Iterator[tuple[int, Batch, bool]]:
    """(number, batch, whether a step follows); the last window of an epoch may be short."""
    for number, batch in enumerate(data):
        yield number, batch, (number + 1) % size == 0 or number + 1 == len(data)


@dataclasses.dataclass
class Loop:
    """What a loop left behind on one rank.

    Attributes:
        weights: the module's state_dict, cloned.
        losses: this rank's loss of every batch.
        norms: what clipping returned, by step.
        state: the optimizer's state_dict on rank 0, whole; None on other ranks.
    """

    weights: dict[str, Tensor]
    losses: list[float]
    norms: list[float]
    state: dict[str, Any] | None


def state_of(fabric: Fabric, optimizer: Any) -> dict[str, Any] | None:
    """The optimizer's state_dict, asked for on all ranks as it must be, and kept on rank 0."""
    state = optimizer.state_dict()
    # torch's order is that of the first gradients, and means nothing
    return {**state, "state": dict(sorted(state["state"].items()))} if fabric.is_global_zero else None


def train(
    name: str,
    strategy_options: dict[str, Any] | None = None,
    *,
    make_optimizer: Callable[[Any], torch.optim.Optimizer] = adamw,
    accumulate: int = 1,
    clip: dict[str, Any] | None = None,
    zero: str = "optimizer",
    before_setup: Callable[[nn.Module], nn.Module] | None = None,
    after_setup: Callable[[nn.Module], nn.Module] | None = None,
    **fabric_options: Any,
) -> Loop:
    """A user's training loop under the strategy called ``name``.

    Args:
        name, strategy_options: see :func:`make_strategy`.
        make_optimizer: from the parameters.
        accumulate: batches a step; they are synchronised once.
        clip: arguments for ``fabric.clip_gradients``.
        zero: through which object gradients are zeroed: the optimizer's wrapper, the model's, or the raw module.
        before_setup, after_setup: applied to the model (``torch.compile``, for one).
        fabric_options: for ``Fabric``.
    """
    fabric = make_fabric(name, strategy_options, **fabric_options)
    data = make_data(fabric)
    net = AwkwardNet()
    model, optimizer = fabric.setup(before_setup(net) if before_setup else net, make_optimizer(net.parameters()))
    trained = after_setup(model) if after_setup else model
    zeroed = {"optimizer": optimizer, "model": model, "module": net}[zero]
    losses, norms = [], []
    for _ in range(EPOCHS):
        for number, (features, tokens, targets), steps in windows(data, accumulate):
            with fabric.no_backward_sync(trained, enabled=not steps):
                loss = F.cross_entropy(trained(features, tokens, number % 2 == 1), targets)
                fabric.backward(loss)
            losses.append(loss.item())
            if steps:
                if clip is not None:
                    norm = fabric.clip_gradients(trained, optimizer, **clip)
                    norms += [] if norm is None else [norm.item()]
                optimizer.step()
                zeroed.zero_grad()
    return Loop(weights_of(net), losses, norms, state_of(fabric, optimizer))
