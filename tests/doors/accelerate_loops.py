"""Jobs for tests of the Accelerate door: a user's loop under accelerate's own Accelerator and under ours."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ..support.comparison import assert_equal
from .matrix import MODES
from .rank_processes import Ranks

TWO = 2


class Worlds:
    """Rank processes that accelerate takes for those of ``accelerate launch``, kept by the number of ranks."""

    def __init__(self) -> None:
        self._pools: dict[int, Ranks] = {}

    def run(self, job: Callable[..., Any], /, *arguments: Any, size: int = TWO, **options: Any) -> list[Any]:
        """``job(*arguments, **options)`` on every rank; results by rank, or an AssertionError with the tracebacks."""
        return self._pool(size).run(as_launched, size, job, *arguments, **options)

    def outcomes(self, job: Callable[..., Any], /, *arguments: Any, size: int = TWO, **options: Any) -> list[Any]:
        """Like :meth:`run`, but a rank that failed has a Failure for a result."""
        return self._pool(size).outcomes(as_launched, size, job, *arguments, **options)

    def _pool(self, size: int) -> Ranks:
        return self._pools.setdefault(size, Ranks(size))

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()


def as_launched(size: int, job: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Runs the job in the environment that ``accelerate launch`` makes, and as if no Accelerator had been before."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    rank = os.environ["LOCAL_RANK"]
    for state in (AcceleratorState, PartialState, GradientState):
        state._shared_state.clear()
    os.environ.update(ACCELERATE_USE_CPU="true", OMP_NUM_THREADS="1", RANK=rank, WORLD_SIZE=str(size))
    if size == 1:
        del os.environ["LOCAL_RANK"]
    try:
        return job(*arguments, **options)
    finally:
        os.environ["LOCAL_RANK"] = rank


def make_accelerator(
    name: str, plugin: dict[str, Any] | None = None, *, find_unused: bool = True, **options: Any
) -> Any:
    """``"ddp"``: accelerate's own, with unused parameters allowed; ``"megatron_ddp"``: ours, with several buckets."""
    import accelerate

    from megastrategy.accelerate import Accelerator, MegatronDDPPlugin

    from .fits import BUCKET_SIZE

    if name == "ddp":
        handlers = [accelerate.DistributedDataParallelKwargs(find_unused_parameters=find_unused)]
        return accelerate.Accelerator(kwargs_handlers=handlers, **options)
    options_of_plugin = {"bucket_size": BUCKET_SIZE, **(plugin or {})}
    return Accelerator(megatron_ddp_plugin=MegatronDDPPlugin(**options_of_plugin), **options)


@dataclasses.dataclass
class Run:
    """The results of a loop on one rank.

    Attributes:
        weights: the module's state_dict, cloned.
        losses: this rank's loss of every batch.
        norms: what clipping returned, by step.
        rates: the learning rate after every batch.
        skipped: the batches at whose end the step was skipped.
        state: the optimizer's state_dict on the main process, whole; None on others.
    """

    weights: dict[str, Tensor]
    losses: list[float] = dataclasses.field(default_factory=list)
    norms: list[float] = dataclasses.field(default_factory=list)
    rates: list[float] = dataclasses.field(default_factory=list)
    skipped: list[int] = dataclasses.field(default_factory=list)
    state: dict[str, Any] | None = None


def weights_of(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def state_of(accelerator: Any, optimizer: Any) -> dict[str, Any] | None:
    """The optimizer's state_dict, asked for on all ranks as it must be, and kept on the main process."""
    state = optimizer.state_dict()
    # torch's order is that of the first gradients, and means nothing
    return {**state, "state": dict(sorted(state["state"].items()))} if accelerator.is_main_process else None


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1)


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05, momentum=0.9)


def groups(params: Any) -> torch.optim.Optimizer:
    first, second, *rest = params
    return torch.optim.AdamW([{"params": [second, first], "lr": 3e-3}, {"params": []}, {"params": rest}], lr=1e-2)


def train(
    name: str,
    plugin: dict[str, Any] | None = None,
    *,
    make_optimizer: Callable[[Any], torch.optim.Optimizer] = adamw,
    prepare: str = "together",
    clip: tuple[str, float] | None = None,
    zero: str = "optimizer",
    dtype: torch.dtype = torch.float32,
    scale: float | None = None,
    inf_on: tuple[int, int] | None = None,
    epochs: int = 2,
    **options: Any,
) -> Run:
    """A user's training loop.

    Args:
        name, plugin, options: see :func:`make_accelerator`.
        make_optimizer: from the parameters.
        prepare: "together", "apart", or "reversed" (the optimizer comes before the model).
        clip: ("norm" or "value", the largest allowed).
        zero: through what gradients are zeroed: "optimizer" or "model".
        dtype: of the weights.
        scale: with fp16's scaler, which accelerate makes on a GPU only, from this scale.
        inf_on: (rank, batch) whose loss is infinite.
        epochs: over the data, seven batches a rank; the last one is filled up.
    """
    from torch.nn import functional as F

    from .fabric_loops import AwkwardNet
    from .fits import loader

    accelerator = make_accelerator(name, plugin, **options)
    if scale is not None:
        accelerator.scaler, accelerator.native_amp = torch.amp.GradScaler("cpu", init_scale=scale), True
        accelerator.state._mixed_precision = "fp16"
    net = AwkwardNet().to(dtype)
    inner = make_optimizer(net.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(inner, 4, gamma=0.5)
    if prepare == "together":
        model, optimizer, data, scheduler = accelerator.prepare(net, inner, loader(), scheduler)
    elif prepare == "reversed":
        scheduler, optimizer, data, model = accelerator.prepare(scheduler, inner, loader(), net)
    else:
        model, data = accelerator.prepare(net), accelerator.prepare(loader())
        optimizer = accelerator.prepare(inner)
        scheduler = accelerator.prepare(scheduler)
    run = Run({})
    number = 0
    for _ in range(epochs):
        for features, tokens, targets in data:
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(features.to(dtype), tokens, number % 2 == 1).float(), targets)
                if (accelerator.process_index, number) == inf_on:
                    loss = loss * float("inf")
                accelerator.backward(loss)
                if accelerator.sync_gradients and clip is not None:
                    kind, largest = clip
                    norm = getattr(accelerator, f"clip_grad_{kind}_")(model.parameters(), largest)
                    run.norms += [] if norm is None else [norm.item()]
                optimizer.step()
                scheduler.step()
                (optimizer if zero == "optimizer" or not accelerator.sync_gradients else model).zero_grad()
            run.losses.append(loss.item())
            run.rates.append(optimizer.param_groups[0]["lr"])
            run.skipped += [number] if accelerator.optimizer_step_was_skipped else []
            number += 1
    run.weights, run.state = weights_of(net), state_of(accelerator, optimizer)
    return run


both_modes = pytest.mark.parametrize("mode", MODES.values(), ids=MODES)


def net_of(seed: int = 0, width: int = 13) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, width), nn.Tanh(), nn.Linear(width, 3))


def inputs(accelerator: Any, number: int = 0) -> Tensor:
    """This rank's."""
    generator = torch.Generator().manual_seed(10 * number + accelerator.process_index)
    return torch.randn(4, 5, generator=generator)


def grads_of(model: Any) -> dict[str, Tensor | None]:
    """Whole, as torch DDP has them in ``.grad``."""
    named = dict(model.module.named_parameters())
    if hasattr(model, "full_grad"):
        return {name: model.full_grad(param) for name, param in named.items()}
    return {name: None if param.grad is None else param.grad.clone() for name, param in named.items()}


@dataclasses.dataclass
class Trainee:
    """A model and its optimizer, prepared by an Accelerator."""

    accelerator: Any
    net: Any
    model: Any
    optimizer: Any

    def backward(self, number: int = 0, factor: float = 1.0) -> float:
        """Runs a backward on this rank's inputs of that number; returns the loss."""
        x = inputs(self.accelerator, number).to(next(self.net.parameters()).dtype)
        loss = factor * self.model(x).float().square().mean()
        self.accelerator.backward(loss)
        return loss.item()

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def train(self, *numbers: int) -> dict[str, Tensor]:
        """A step with each of these inputs; the weights."""
        for number in numbers:
            self.backward(number)
            self.step()
        return weights_of(self.net)


def set_up(
    name: str,
    mode: dict[str, Any] | None = None,
    make_optimizer: Callable[[Any], torch.optim.Optimizer] = sgd,
    *,
    net: nn.Module | None = None,
    **options: Any,
) -> Trainee:
    """``net``: :func:`net_of`'s by default."""
    accelerator = make_accelerator(name, mode, **options)
    net = net_of() if net is None else net
    return Trainee(accelerator, net, *accelerator.prepare(net, make_optimizer(net.parameters())))


def assert_like_ddp(
    worlds: Worlds, job: Callable[..., Any], mode: dict[str, Any], rtol: float = 0.0, *arguments: Any
) -> list[Any]:
    """The job's results under ours, which are those under torch DDP; 1e-6 is for the order of a sum over shards."""
    expected = worlds.run(job, "ddp", mode, *arguments)
    ours = worlds.run(job, "megatron_ddp", mode, *arguments)
    assert_equal(ours, expected, rtol if mode["use_distributed_optimizer"] else 0.0)
    return expected
