"""What the fuzzer draws: a model, options, and what a user does with them in what order.

Gradients are whole numbers (over a power of two) whatever the weights are, so that no sum over ranks or microbatches
is rounded, in no order and in 16 bits neither: results have to be equal to the bit on any number of ranks.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from megastrategy import DistributedDataParallelConfig

from ..support.switches import GO_WITH_ALL, MAY_CONTRADICT

MAX_RANKS = 4
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.01, "momentum": 0.9, "weight_decay": 0.1},
    "AdamW": {"lr": 0.01, "weight_decay": 0.1},
    "Adam": {"lr": 0.01, "amsgrad": True},
    "RMSprop": {"lr": 0.01, "momentum": 0.5},
    "Adagrad": {"lr": 0.05},
}

Used = Literal["always", "odd steps", "rank 0", "never"]


@dataclasses.dataclass(frozen=True)
class Layer:
    """One parameter. ``used``: in which forwards. ``group``: of the optimizer's two, with learning rates of their
    own."""

    shape: tuple[int, ...]
    dtype: str = "float32"
    used: Used = "always"
    group: int = 0


@dataclasses.dataclass(frozen=True)
class Train:
    """``accumulate`` microbatches, then a step. ``synchronised``: each of the backwards, not the last alone; not on
    three ranks, where an all-reduce takes a third of gradients that are a mean of thirds already, and rounds."""

    accumulate: int = 1
    synchronised: bool = False
    clip: Literal["no", "value", "norm"] = "no"


@dataclasses.dataclass(frozen=True)
class Drop:
    """A backward whose gradients are zeroed, not stepped."""


@dataclasses.dataclass(frozen=True)
class Evaluate:
    """A forward without gradients, in evaluation mode."""


@dataclasses.dataclass(frozen=True)
class Freeze:
    layer: int


@dataclasses.dataclass(frozen=True)
class Thaw:
    layer: int


@dataclasses.dataclass(frozen=True)
class Change:
    """The user halves a weight."""

    layer: int


@dataclasses.dataclass(frozen=True)
class LearningRate:
    """Halved, in every group."""


@dataclasses.dataclass(frozen=True)
class Save:
    """Weights, optimizer state and main params are remembered."""


@dataclasses.dataclass(frozen=True)
class Load:
    """What was remembered last comes back, on the same ranks."""


@dataclasses.dataclass(frozen=True)
class Resume:
    """The script ends after a save, and another goes on with this many ranks."""

    ranks: int


Action = Train | Drop | Evaluate | Freeze | Thaw | Change | LearningRate | Save | Load | Resume


@dataclasses.dataclass(frozen=True)
class Case:
    """Everything that decides what is computed."""

    ranks: int
    layers: tuple[Layer, ...]
    options: dict[str, Any]
    optimizer: str
    program: tuple[Action, ...]

    @property
    def config(self) -> DistributedDataParallelConfig:
        return DistributedDataParallelConfig(**self.options)

    @property
    def is_fp32(self) -> bool:
        """torch DDP can be the reference."""
        return all(layer.dtype == "float32" for layer in self.layers)

    def instances(self, ranks: int) -> int:
        """As many as divide the ranks, and leave shards where there has to be one to sum into."""
        asked: int = self.options.get("num_distributed_optimizer_instances", 1)
        sums_in_shards = self.config.reduce_scatter_with_fp32_accumulation or self.config.grad_buffer == "pooled"
        return 1 if ranks % asked or (ranks == asked and sums_in_shards) else asked


class Model(nn.Module):
    """The layers as parameters; ``forward`` takes the step, the microbatch's number and the rank, and returns a
    scalar fp32 loss whose gradients are :func:`coefficients`."""

    def __init__(self, layers: tuple[Layer, ...]) -> None:
        super().__init__()
        self.layers = layers
        generator = torch.Generator().manual_seed(0)
        self.weights = nn.ParameterList()
        for layer in layers:
            values = torch.randn(layer.shape, generator=generator).bfloat16()  # the same values in every dtype
            self.weights.append(nn.Parameter(values.to(getattr(torch, layer.dtype))))

    def forward(self, step: int, number: int, rank: int) -> Tensor:
        loss = torch.zeros(())
        for index, (layer, weight) in enumerate(zip(self.layers, self.weights, strict=True)):
            if is_used(layer, step, rank):
                loss = loss + (coefficients(layer, index, number, rank).to(weight.dtype) * weight).float().sum()
        return loss


def is_used(layer: Layer, step: int, rank: int) -> bool:
    return {"always": True, "odd steps": step % 2 == 1, "rank 0": rank == 0, "never": False}[layer.used]


def coefficients(layer: Layer, index: int, number: int, rank: int) -> Tensor:
    """Multiples of three up to 15 in size: bf16 has the bits for the sums of four ranks' four microbatches, and a third
    of each, for the mean of three ranks, is a whole number again."""
    generator = torch.Generator().manual_seed(1_000_003 * number + 1_009 * index + rank)
    return 3.0 * torch.randint(-5, 6, layer.shape, generator=generator)


def _shapes() -> st.SearchStrategy[tuple[int, ...]]:
    side = st.integers(1, 9)
    return st.one_of(st.just(()), st.tuples(st.integers(1, 70)), st.tuples(side, side), st.tuples(side, side, side))


DTYPES = {
    "fp32": ["float32"],
    "bf16": ["bfloat16"],
    "fp16": ["float16"],
    "mixed": ["float32", "bfloat16", "float16"],
}


@st.composite
def cases(draw: st.DrawFn) -> Case:
    dtypes = DTYPES[draw(st.sampled_from(list(DTYPES)))]
    switches = {name: values for name, values in {**MAY_CONTRADICT, **GO_WITH_ALL}.items() if name != "dtype"}
    # "auto" measures, and so differs from one run to the next
    switches["bucket_size"] = [1, 60, 10**9]
    options: dict[str, Any] = {}
    for name, values in switches.items():
        value = draw(st.sampled_from(list(values)))
        is_default = value == DistributedDataParallelConfig.__dataclass_fields__[name].default
        if not is_default and _is_allowed({**options, name: value}):
            options[name] = value
    config = DistributedDataParallelConfig(**options)
    used: list[Used] = ["always"]
    if config.find_unused_parameters:
        used += ["rank 0", "never"] if config.static_graph else ["odd steps", "rank 0", "never"]
    layer = st.builds(Layer, _shapes(), st.sampled_from(dtypes), st.sampled_from(used), st.integers(0, 1))
    first = st.builds(Layer, _shapes(), st.sampled_from(dtypes), st.just("always"), st.just(0))
    layers = (draw(first), *draw(st.lists(layer, max_size=4)))
    ranks = st.integers(1, MAX_RANKS)
    other = st.integers(1, max(1, len(layers) - 1))  # the first is always trained
    train = st.builds(Train, st.sampled_from([1, 2, 4]), st.booleans(), st.sampled_from(["no", "value", "norm"]))
    actions = [train, train, train, st.builds(Drop), st.builds(Evaluate), st.builds(Change, other)]
    actions += [st.builds(LearningRate), st.builds(Save), st.builds(Load), st.builds(Resume, ranks)]
    if not config.static_graph:
        actions += [st.builds(Freeze, other), st.builds(Thaw, other)]
    program = draw(st.lists(st.one_of(actions), min_size=1, max_size=12))
    return Case(draw(ranks), layers, options, draw(st.sampled_from(list(OPTIMIZERS))), tuple(program))


def _is_allowed(options: dict[str, Any]) -> bool:
    try:
        DistributedDataParallelConfig(**options)
    except ValueError:
        return False
    return True
