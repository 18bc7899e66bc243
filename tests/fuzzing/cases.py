"""Draws cases: a model, options, and what a user does with them in what order.

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
from megastrategy.core.config import SHARD_OPTIONS

from ..support import switches
from ..support.user_code import ROWS

MAX_RANKS = 4
DEFAULTS = {field.name: field.default for field in dataclasses.fields(DistributedDataParallelConfig)}
SWITCHES: dict[str, list[Any]] = {"bucket_size": [None, 1, 60, 10**9]} | {
    name: sorted(values, key=lambda value, name=name: value != DEFAULTS[name])  # what a case shrinks to comes first
    for name, values in switches.SWITCHES.items()
    if name not in ("dtype", "bucket_size")
}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.01, "momentum": 0.9, "weight_decay": 0.1},
    "AdamW": {"lr": 0.01, "weight_decay": 0.1},
    "Adam": {"lr": 0.01, "amsgrad": True},
    "RMSprop": {"lr": 0.01, "momentum": 0.5},
    "Adagrad": {"lr": 0.05},
    "LambWithMoments": {"lr": 0.01},  # steps whole parameters
}

# Not those that torch DDP's ranks part by, that are refused, or whose numbers are rounded.
_PLAYED = [
    code
    for code in ROWS
    if not (code.drives or code.parts_torch_ddp or code.refused or code.rounds or code.needs_whole_grads)
]
CODE_IN_A_STEP = [code.name for code in _PLAYED if code.place != "after step"]
CODE_AFTER_A_STEP = [code.name for code in _PLAYED if code.place == "after step"]

NOT_WITH_CODE = {"static_graph", "check_for_nan_in_grad", "find_unused_parameters"}
"""Options under which the reference is not torch DDP, or used parameters may not change."""

Used = Literal["always", "odd steps", "rank 0", "never"]
Clip = Literal["no", "value", "norm", "largest"]


@dataclasses.dataclass(frozen=True)
class Layer:
    """A parameter. ``used``: in which forwards. ``group``: of the optimizer's two, with learning rates of their own.
    ``tied``: another module has it too, and a forward that uses it uses it twice."""

    shape: tuple[int, ...]
    dtype: str = "float32"
    used: Used = "always"
    group: int = 0
    tied: bool = False


@dataclasses.dataclass(frozen=True)
class Train:
    """``accumulate`` microbatches, then a step. ``synchronised``: each of the backwards, not the last alone, where
    :meth:`Case.may_synchronise_each`.

    ``clip``: by "norm" measures only, for a norm over many elements is rounded; the norm of order infinity, "largest",
    is not, and its factor scales. ``infinite``: the rank whose last loss is, so that a scaler's step is skipped.
    ``code``: a row of :mod:`..support.user_code` that is played before the last backward, or after it."""

    accumulate: int = 1
    synchronised: bool = False
    clip: Clip = "no"
    infinite: Literal["none", "first", "last"] = "none"
    code: str = ""


@dataclasses.dataclass(frozen=True)
class Code:
    """A row of :mod:`..support.user_code` that is played after a step."""

    name: str


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
    """Brings back what was remembered last, on the same ranks."""


@dataclasses.dataclass(frozen=True)
class Resume:
    """The script ends after a save, and another goes on with this many ranks. ``directory``: from one that every rank
    wrote its part of, not from what rank 0 has."""

    ranks: int
    directory: bool = False


Action = Train | Code | Drop | Evaluate | Freeze | Thaw | Change | LearningRate | Save | Load | Resume


@dataclasses.dataclass(frozen=True)
class Case:
    """Everything that decides what is computed.

    ``autocast``: forwards run in bf16. ``scaled``: with a GradScaler. ``buffer``: the module has one, which every
    forward of a rank changes. ``late``: collectives are on the wire for a while.
    """

    ranks: int
    layers: tuple[Layer, ...]
    options: dict[str, Any]
    optimizer: str
    program: tuple[Action, ...]
    autocast: bool = False
    scaled: bool = False
    buffer: bool = False
    late: bool = False

    @property
    def config(self) -> DistributedDataParallelConfig:
        return DistributedDataParallelConfig(**self.options)

    @property
    def is_fp32(self) -> bool:
        return all(layer.dtype == "float32" for layer in self.layers)

    @property
    def has_reference_in_ddp(self) -> bool:
        return self.is_fp32

    @property
    def plays_code(self) -> bool:
        """Whether rows of user code mean the same to the reference: as many ranks of torch DDP, without its options."""
        return not self.scaled and self.is_fp32 and not NOT_WITH_CODE & self.options.keys()

    @property
    def sums_in_fp32(self) -> bool:
        """Gradients have fp32 wherever they are clipped."""
        return self.is_fp32 or (self.config.grad_reduce_in_fp32 and self.config.use_contiguous_buffers)

    def may_synchronise_each(self, ranks: int) -> bool:
        """An all-reduce takes a mean of gradients that are a mean already: of thirds a third, which is rounded, and of
        quarters a quarter, for which 16 bits are too few."""
        shards = self.config.use_distributed_optimizer and self.instances(ranks) < ranks
        return ranks != 3 and (shards or self.sums_in_fp32)

    def instances(self, ranks: int) -> int:
        """Returns as many as divide the ranks, and leave shards where an option is about them."""
        asked: int = self.options.get("num_distributed_optimizer_instances", 1)
        needs_shards = any(getattr(self.config, name) not in (False, None, "contiguous") for name in SHARD_OPTIONS)
        return 1 if ranks % asked or (ranks == asked and needs_shards) else asked


class Model(nn.Module):
    """The layers as parameters; ``forward`` takes the step, the microbatch's number and the rank, and returns a
    scalar fp32 loss whose gradients are :func:`coefficients`."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.layers = case.layers
        generator = torch.Generator().manual_seed(0)
        self.weights = nn.ParameterList()
        self.again = nn.ParameterDict()
        for index, layer in enumerate(case.layers):
            values = torch.randn(layer.shape, generator=generator).bfloat16()  # the same values in every dtype
            self.weights.append(nn.Parameter(values.to(getattr(torch, layer.dtype))))
            if layer.tied:
                self.again[str(index)] = self.weights[index]
        if case.buffer:
            self.register_buffer("seen", torch.zeros(3))

    def forward(self, step: int, number: int, rank: int) -> Tensor:
        loss = torch.zeros(())
        if hasattr(self, "seen"):
            if self.training:  # unseen by autograd, as BatchNorm writes its statistics
                self.seen.data.copy_(after_forward(self.seen, number, rank))
            # Autograd keeps the buffer for the backward: whatever writes it until then must be unseen as well.
            loss = loss + (self.weights[0].reshape(-1)[:1].float() * self.seen[:1]).sum() * 0.0
        for index, layer in enumerate(self.layers):
            if is_used(layer, step, rank):
                loss = loss + _term(self.weights[index], *factors(layer, index, number, rank))
                if layer.tied:
                    loss = loss + _term(self.again[str(index)], *factors(layer, index, number, rank + MAX_RANKS))
        return loss


def _term(weight: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """A scalar. What autocast casts is a matrix's product with a vector."""
    if weight.dim() != 2:
        return (left.to(weight.dtype) * weight).float().sum()
    product = nn.functional.linear(right.to(weight.dtype), weight)
    return (left.to(product.dtype) * product).float().sum()


def is_used(layer: Layer, step: int, rank: int) -> bool:
    return {"always": True, "odd steps": step % 2 == 1, "rank 0": rank == 0, "never": False}[layer.used]


def after_forward(seen: Tensor, number: int, rank: int) -> Tensor:
    """Makes the module's buffer what a forward in training leaves there: another value on each rank."""
    return seen * 0.5 + torch.tensor([1.0, number, 3.0 * rank])


def factors(layer: Layer, index: int, number: int, rank: int) -> tuple[Tensor, Tensor]:
    """A column and a row, of a matrix; else all :func:`coefficients`, and 1."""
    generator = torch.Generator().manual_seed(1_000_003 * number + 1_009 * index + rank)
    shape = layer.shape[1:] if len(layer.shape) == 2 else layer.shape
    threes = 3.0 * torch.randint(-5, 6, shape, generator=generator)
    if len(layer.shape) != 2:
        return threes, torch.ones(())
    return torch.randint(-1, 2, layer.shape[:1], generator=generator).float(), threes


def coefficients(layer: Layer, index: int, number: int, rank: int) -> Tensor:
    """Multiples of three up to 15 in size, and of a tied layer up to 30: bf16 has the bits for the sums of four ranks'
    four microbatches, and a third of each, for the mean of three ranks, is a whole number again."""
    total = torch.zeros(layer.shape)
    for use in [rank, rank + MAX_RANKS] if layer.tied else [rank]:
        left, right = factors(layer, index, number, use)
        total += torch.outer(left, right) if len(layer.shape) == 2 else left
    return total


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
    may_play = draw(st.booleans())  # rows of user code, half of the time
    dtypes = DTYPES["fp32" if may_play else draw(st.sampled_from(list(DTYPES)))]
    options: dict[str, Any] = {}
    for name, values in SWITCHES.items():
        if may_play and name in NOT_WITH_CODE:
            continue
        value = draw(st.sampled_from(list(values)))
        if value != DEFAULTS[name] and is_allowed({**options, name: value}):
            options[name] = value
    config = DistributedDataParallelConfig(**options)
    used: list[Used] = ["always"]
    if config.find_unused_parameters:
        used += ["rank 0", "never"] if config.static_graph else ["odd steps", "rank 0", "never"]
    sometimes = st.sampled_from([False, False, False, True])
    kind = st.sampled_from(dtypes)
    layer = st.builds(Layer, _shapes(), kind, st.sampled_from(used), st.integers(0, 1), sometimes)
    first = st.builds(Layer, _shapes(), kind, st.just("always"), st.just(0), sometimes)
    layers = (draw(first), *draw(st.lists(layer, max_size=4)))
    optimizer = draw(st.sampled_from(list(OPTIMIZERS)))
    case = Case(draw(st.integers(1, MAX_RANKS)), layers, options, optimizer, ())
    autocast, scaled, buffer = draw(st.booleans()), not may_play and draw(st.booleans()), draw(st.booleans())
    case = dataclasses.replace(case, autocast=autocast, scaled=scaled, buffer=buffer, late=draw(sometimes))
    actions = _actions(case)  # two lists, since one has six actions on average
    program = [*draw(st.lists(actions, min_size=1, max_size=12)), *draw(st.lists(actions, max_size=12))]
    return dataclasses.replace(case, program=tuple(program))


def _actions(case: Case) -> st.SearchStrategy[Action]:
    config = case.config
    other = st.integers(1, max(1, len(case.layers) - 1))  # the first is always trained
    clips: list[Clip] = ["no", "value", "norm", *(["largest"] if case.sums_in_fp32 else [])]
    infinite = ["none", "none", "first", "last"] if case.scaled and not config.check_for_nan_in_grad else ["none"]
    inside, after = ([""], []) if not case.plays_code else (["", "", "", *CODE_IN_A_STEP], [*CODE_AFTER_A_STEP])
    train = st.builds(
        Train,
        st.sampled_from([1, 2, 4]),
        st.booleans(),
        st.sampled_from(clips),
        st.sampled_from(infinite),
        st.sampled_from(inside),
    )
    actions: list[st.SearchStrategy[Any]] = [st.builds(Drop), st.builds(Evaluate)]
    actions += [st.builds(Code, st.sampled_from(after))] * 3 if after else []
    actions += [st.builds(Change, other), st.builds(LearningRate), st.builds(Save), st.builds(Load)]
    actions += [st.builds(Resume, st.integers(1, MAX_RANKS), st.booleans())]
    if not config.static_graph:
        actions += [st.builds(Freeze, other), st.builds(Thaw, other)]
    # half of them: what goes wrong in the engine mostly needs a few steps to show
    return st.booleans().flatmap(lambda another: st.one_of(actions) if another else train)


def is_allowed(options: dict[str, Any]) -> bool:
    """Whether they may be chosen together."""
    try:
        DistributedDataParallelConfig(**options)
    except ValueError:
        return False
    return True
