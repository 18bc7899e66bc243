"""Defines what is trained: models, data and how many microbatches make a step.

They are the same on every engine, from the same seed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_SEED = 20
_NUM_BATCHES = 8
"""Different steps of data; they repeat, so that the loss falls and a wrong gradient shows in it."""

DTYPES = MappingProxyType({"fp32": torch.float32, "bf16": torch.bfloat16})


class _AttentionBlock(nn.Module):
    """Pre-norm causal attention and MLP over (batch, time, width)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = max(1, width // 64)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, dim=-1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        x = x + self.down(F.gelu(self.up(self.norm2(x))))
        return x


class _LinearBlock(nn.Module):
    """Many small layers in a row."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + F.gelu(layer(x))
        return x


class LanguageModel(nn.Module):
    """(batch, time) tokens -> (batch, time, vocabulary) logits, in fp32.

    Attributes:
        blocks: the parts that FSDP2 wraps one by one.
    """

    def __init__(
        self,
        vocabulary: int,
        context: int,
        width: int,
        blocks: list[nn.Module],
        *,
        is_gpt: bool,
        registered_in_reverse: bool = False,
    ) -> None:
        super().__init__()
        self._step = -1 if registered_in_reverse else 1
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width) if is_gpt else None
        self.blocks = nn.ModuleList(blocks[:: self._step])
        self.norm = nn.LayerNorm(width) if is_gpt else None
        self.head = nn.Linear(width, vocabulary, bias=False)
        if is_gpt:
            self.head.weight = self.tokens.weight
        for param in self.parameters():
            if param.ndim == 2:
                nn.init.normal_(param, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        if self.positions is not None:
            x = x + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in list(self.blocks)[:: self._step]:
            x = block(x)
        if self.norm is not None:
            x = self.norm(x)
        logits: Tensor = self.head(x).float()
        return logits


def gpt(vocabulary: int, context: int, width: int, depth: int, **options: bool) -> LanguageModel:
    blocks: list[nn.Module] = [_AttentionBlock(width) for _ in range(depth)]
    return LanguageModel(vocabulary, context, width, blocks, is_gpt=True, **options)


def next_token_loss(model: Callable[[Tensor], Tensor], windows: Tensor) -> Tensor:
    """Returns the mean loss of a language model; ``windows``: tokens, (sequences, length + 1), int64."""
    return F.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())


def _gpt_14m() -> LanguageModel:
    return gpt(vocabulary=256, context=128, width=384, depth=8)


def _gpt_14m_registered_in_reverse() -> LanguageModel:
    return gpt(vocabulary=256, context=128, width=384, depth=8, registered_in_reverse=True)


def _gpt_124m() -> LanguageModel:
    return gpt(vocabulary=50257, context=128, width=768, depth=12)  # GPT-2's sizes, except for the context


def _small_2000() -> LanguageModel:
    """2,000 parameters: 27 blocks of 37 layers with weight and bias, and two of the rest."""
    return LanguageModel(256, 128, 32, [_LinearBlock(32, 37) for _ in range(27)], is_gpt=False)


def _tiny() -> LanguageModel:
    return gpt(vocabulary=64, context=16, width=64, depth=2)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A workload."""

    name: str
    about: str
    build: Callable[[], LanguageModel]
    vocabulary: int = 256
    dtype: str = "fp32"
    """Dtype of the weights: a key of :data:`DTYPES`."""
    recipe: Literal["adamw", "muon"] = "adamw"
    """Which optimizers train it: a key of :data:`.recipes.RECIPES`."""
    accumulate: int = 1
    """Microbatches a step; all but the last are not synchronised."""
    microbatch: int = 2
    """Sequences."""
    context: int = 128
    """Tokens a sequence."""
    loss_tolerance: float = 1e-5
    """Relative difference allowed between the engines' losses. Wider with bf16 weights, where engines round at
    different places (torch DDP steps bf16 weights, others fp32 main params)."""

    def build_model(self, dtype: str | None = None) -> LanguageModel:
        """The model with the case's seed, in the case's dtype or another one."""
        torch.manual_seed(_SEED)
        return self.build().to(DTYPES[dtype or self.dtype])

    def batches(self, rank: int) -> Tensor:
        """A rank's data: (step, microbatch, sequence, context + 1) tokens."""
        generator = torch.Generator().manual_seed(_SEED + 1 + rank)
        shape = (_NUM_BATCHES, self.accumulate, self.microbatch, self.context + 1)
        return torch.randint(self.vocabulary, shape, generator=generator)

    def count_params(self) -> tuple[int, int]:
        """Counts the model's parameter tensors, and their elements."""
        with torch.device("meta"):
            params = list(self.build().parameters())
        return len(params), sum(param.numel() for param in params)


_ALL = (
    Case(name="gpt-14m", about="GPT, 14M parameters, fp32", build=_gpt_14m),
    Case(name="gpt-14m-accumulate-4", about="the same, 4 microbatches a step", build=_gpt_14m, accumulate=4),
    Case(name="gpt-14m-bf16", about="the same with bf16 weights", build=_gpt_14m, dtype="bf16", loss_tolerance=0.02),
    Case(name="small-2000", about="2,000 small parameters (1M elements), fp32", build=_small_2000),
    Case(
        name="gpt-14m-registered-in-reverse",
        about="gpt-14m whose blocks are registered last first",
        build=_gpt_14m_registered_in_reverse,
    ),
    Case(name="gpt-124m", about="GPT, 124M parameters, fp32", build=_gpt_124m, vocabulary=50257),
    Case(name="gpt-14m-muon", about="gpt-14m trained with Muon and AdamW, fp32", build=_gpt_14m, recipe="muon"),
    Case(
        name="gpt-124m-muon",
        about="gpt-124m trained with Muon and AdamW, fp32",
        build=_gpt_124m,
        vocabulary=50257,
        recipe="muon",
    ),
    Case(name="tiny", about="to try the program", build=_tiny, vocabulary=64, context=16),
    Case(name="tiny-muon", about="to try it with Muon", build=_tiny, vocabulary=64, context=16, recipe="muon"),
)
CASES: Mapping[str, Case] = MappingProxyType({case.name: case for case in _ALL})
