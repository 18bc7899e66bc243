"""Jobs for tests of the Fabric door: loops over a module with everything awkward, under ours and ``"ddp"``."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies.ddp import DDPStrategy
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from megastrategy.fabric import MegatronDDPStrategy

from ..support.comparison import assert_equal
from .fits import BUCKET_SIZE, AwkwardNet, adamw, loader, weights_of
from .matrix import MODES
from .rank_processes import Ranks, number_of_ranks

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
    """The results of a loop on one rank.

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


@dataclasses.dataclass
class Trainee:
    """A model and its optimizer, set up by a Fabric, and what its training left behind until now."""

    fabric: Fabric
    net: nn.Module
    model: Any
    optimizer: Any
    losses: list[float] = dataclasses.field(default_factory=list)
    norms: list[float] = dataclasses.field(default_factory=list)

    def backward(self, batch: Batch, use_side: bool = True) -> Tensor:
        features, tokens, targets = batch
        loss = F.cross_entropy(self.model(features, tokens, use_side), targets)
        self.fabric.backward(loss)
        self.losses.append(loss.item())
        return loss

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def train(self, num_batches: int | None = None, before_step: Callable[[], object] = lambda: None) -> Loop:
        """An epoch, or its first batches."""
        for batch in itertools.islice(make_data(self.fabric), num_batches):
            self.backward(batch)
            before_step()
            self.step()
        return self.end()

    def clip(self, **options: Any) -> None:
        norm = self.fabric.clip_gradients(self.model, self.optimizer, **options)
        self.norms += [] if norm is None else [norm.item()]

    def end(self) -> Loop:
        return Loop(weights_of(self.net), self.losses, self.norms, state_of(self.fabric, self.optimizer))


def set_up(
    name: str,
    strategy_options: dict[str, Any] | None = None,
    make_optimizer: Callable[[Any], torch.optim.Optimizer] = sgd,
    *,
    net: nn.Module | None = None,
    **fabric_options: Any,
) -> Trainee:
    """``net``: an AwkwardNet by default."""
    fabric = make_fabric(name, strategy_options, **fabric_options)
    net = AwkwardNet() if net is None else net
    return Trainee(fabric, net, *fabric.setup(net, make_optimizer(net.parameters())))


def set_up_apart(name: str, strategy_options: dict[str, Any]) -> Trainee:
    """The optimizer is built on the parameters of what ``setup_module`` returned."""
    fabric, net = make_fabric(name, strategy_options), AwkwardNet()
    model = fabric.setup_module(net)
    return Trainee(fabric, net, model, fabric.setup_optimizers(sgd(model.parameters())))


def step_with(fabric: Fabric, model: Any, *optimizers: Any, batches: int = 3) -> list[float]:
    """A few steps of all the optimizers; the losses."""
    trainee = Trainee(fabric, model, model, None)
    for batch in itertools.islice(make_data(fabric), batches):
        trainee.backward(batch)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return trainee.losses


def train(
    name: str,
    strategy_options: dict[str, Any] | None = None,
    *,
    make_optimizer: Callable[[Any], torch.optim.Optimizer] = adamw,
    accumulate: int = 1,
    clip: dict[str, Any] | None = None,
    zero: str = "optimizer",
    before_setup: Callable[[nn.Module], nn.Module] = lambda net: net,
    after_setup: Callable[[nn.Module], nn.Module] = lambda model: model,
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
    net = AwkwardNet()
    model, optimizer = fabric.setup(before_setup(net), make_optimizer(net.parameters()))
    trainee = Trainee(fabric, net, after_setup(model), optimizer)
    zeroed = {"optimizer": optimizer, "model": model, "module": net}[zero]
    data = make_data(fabric)
    for _ in range(EPOCHS):
        for number, batch, steps in windows(data, accumulate):
            with fabric.no_backward_sync(trainee.model, enabled=not steps):
                trainee.backward(batch, number % 2 == 1)
            if steps:
                if clip is not None:
                    trainee.clip(**clip)
                optimizer.step()
                zeroed.zero_grad()
    return trainee.end()


# --- comparison with "ddp" -------------------------------------------------------------------------------------------

CLIP_NORM = 0.5
CLIP_VALUE = 0.02

both_modes = pytest.mark.parametrize("options", MODES.values(), ids=MODES)


def assert_like_ddp(ranks: Ranks, job: Any, options: dict[str, Any], *, rtol: float = 0.0, **arguments: Any) -> None:
    """``job`` gives the same on every rank under both strategies."""
    ours = ranks.run(job, "megatron_ddp", options, **arguments)
    theirs = ranks.run(job, "ddp", {}, **arguments)
    for mine, other in zip(ours, theirs, strict=True):
        assert_equal(mine, other, rtol)
